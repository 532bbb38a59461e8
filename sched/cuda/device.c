#include "base/options.h"
#include "sched/cuda/kernels.h"
#include "sched/runtime.h"

#include <stdio.h>

/* ---- the kernels -------------------------------------------------------------------- */

static pst_status check_kernels(pst__cuda *cuda) {
    return cuda->kernels != NULL ? PST_OK
                                 : pst__cuda_refuse(cuda, PST_EUNSUPPORTED,
                                                    "there are no kernels: %s", cuda->no_kernels);
}

/* A slot of the table: the kernel's function, where there are kernels, within the context; for a
 * stream that takes work, or for any, which may be under a capture of the caller's. */
#define KERNEL(slot, parameters, ...) KERNEL_FOR(stream, slot, parameters, __VA_ARGS__)
#define KERNEL_FOR(checked, slot, parameters, ...)                                                 \
    static pst_status slot parameters {                                                            \
        pst__cuda *cuda = pst__cuda_of(device);                                                    \
        const pst_status status = check_kernels(cuda);                                             \
        if (status != PST_OK) return status;                                                       \
        PST__CUDA_ENTER_OR_RETURN(cuda, checked);                                                  \
        return pst__cuda_##slot(cuda, stream->native, __VA_ARGS__);                                \
    }

KERNEL(cast_scale_copy,
       (pst_device * device, pst_stream *stream, const pst_cast *pieces, size_t count,
        double scale),
       pieces, count, scale)
KERNEL(sum, (pst_device * device, pst_stream *stream, const pst_sum *sum), sum)
KERNEL(maximum, (pst_device * device, pst_stream *stream, const pst_sum *maximum), maximum)
KERNEL(fill, (pst_device * device, pst_stream *stream, void *memory, int byte, size_t bytes),
       memory, byte, bytes)
KERNEL(copy_rows, (pst_device * device, pst_stream *stream, const pst_row_copy *copy), copy)
KERNEL_FOR(NULL, adamw_prepare,
           (pst_device * device, pst_stream *stream, const pst_adamw_settings *settings,
            float *const *steps, size_t count, void *coefficients),
           settings, steps, count, coefficients)
KERNEL_FOR(NULL, adamw,
           (pst_device * device, pst_stream *stream, const pst_adamw_piece *pieces, size_t count),
           pieces, count)
#undef KERNEL
#undef KERNEL_FOR

/* ---- the table ---------------------------------------------------------------------- */

static void destroy(pst_device *device);

static const pst_device_ops cuda_ops = {
    .api_version = PST_DEVICE_API_VERSION,
    .caps = PST_DEVICE_TIMED_EVENTS,
    .name = "cuda",
    .stream_create = pst__cuda_stream_create,
    .stream_wrap = pst__cuda_stream_wrap,
    .stream_destroy = pst__cuda_stream_destroy,
    .launch = pst__cuda_launch,
    .event_create = pst__cuda_event_create,
    .event_destroy = pst__cuda_event_destroy,
    .event_record = pst__cuda_event_record,
    .stream_wait = pst__cuda_stream_wait,
    .event_query = pst__cuda_event_query,
    .event_time = pst__cuda_event_time,
    .copy = pst__cuda_copy,
    .copy_2d = pst__cuda_copy_2d,
    .alloc = pst__cuda_alloc,
    .free = pst__cuda_free,
    .memory_export = pst__cuda_memory_export,
    .memory_import = pst__cuda_memory_import,
    .memory_unmap = pst__cuda_memory_unmap,
    .stream_write32 = pst__cuda_stream_write32,
    .stream_wait32 = pst__cuda_stream_wait32,
    .stream_flags32 = pst__cuda_stream_flags32,
    .flag_write32 = pst__cuda_flag_write32,
    .cast_scale_copy = cast_scale_copy,
    .sum = sum,
    .fill = fill,
    .maximum = maximum,
    .copy_rows = copy_rows,
    .adamw_prepare = adamw_prepare,
    .adamw = adamw,
    .stream_ready = pst__cuda_stream_ready,
    .capture_begin = pst__cuda_capture_begin,
    .capture_end = pst__cuda_capture_end,
    .error_text = pst__cuda_error_text,
    .destroy = destroy,
};

/* ---- opening ------------------------------------------------------------------------ */

static pst_status find_gpu(pst__cuda *cuda) {
    int count = 0;
    pst_status status = pst__cuda_call(cuda, cuInit, (0), "the driver");
    if (status == PST_OK)
        status = pst__cuda_call(cuda, cuDeviceGetCount, (&count), "of all devices");
    if (status != PST_OK) return status;
    if (cuda->ordinal < 0 || cuda->ordinal >= count)
        return pst__cuda_refuse(cuda, PST_EUNSUPPORTED, "the driver has %d GPUs, counted from 0",
                                count);
    return pst__cuda_call(cuda, cuDeviceGet, (&cuda->gpu, cuda->ordinal), "ordinal %d",
                          cuda->ordinal);
}

static pst_status get_attributes(pst__cuda *cuda) {
    int maps = 0, same_pointer = 0;
    const struct {
        CUdevice_attribute attribute;
        int *value;
        const char *name;
    } wanted[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &cuda->major, "compute capability"},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &cuda->minor, "compute capability"},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &cuda->processors, "multiprocessors"},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, &maps, "memory management"},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, &same_pointer,
         "host pointers"},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, &cuda->exports,
         "export of memory"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        const pst_status status =
            pst__cuda_call(cuda, cuDeviceGetAttribute,
                           (wanted[i].value, wanted[i].attribute, cuda->gpu), "%s", wanted[i].name);
        if (status != PST_OK) return status;
    }
    if (!maps || !same_pointer)
        return pst__cuda_refuse(cuda, PST_EUNSUPPORTED,
                                "the GPU has no virtual memory management, or does not reach host "
                                "memory at the host's addresses");
    /* A driver that does not know this attribute refuses it. */
    if (cuda->driver.cuDeviceGetAttribute(&cuda->numa_node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
                                          cuda->gpu) != CUDA_SUCCESS)
        cuda->numa_node = -1;
    return PST_OK;
}

static pst_status get_granularity(pst__cuda *cuda) {
    const CUmemAllocationProp kind = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes =
            cuda->exports ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda->gpu}};
    return pst__cuda_call(cuda, cuMemGetAllocationGranularity,
                          (&cuda->granularity, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                          "recommended");
}

/* The highest priority is kept for the service stream where there are others. */
static pst_status create_service(pst__cuda *cuda) {
    pst_status status = pst__cuda_call(cuda, cuCtxGetStreamPriorityRange,
                                       (&cuda->lowest, &cuda->highest), "of streams");
    if (status != PST_OK) return status;
    const int own = cuda->highest;
    if (cuda->highest < cuda->lowest - 1) cuda->highest++;
    return pst__cuda_call(cuda, cuStreamCreateWithPriority,
                          (&cuda->service, CU_STREAM_NON_BLOCKING, own), "the service stream");
}

/* Without a compiler all but the kernels works: who calls one is told then. */
static void load_kernels(pst__cuda *cuda, const pst_cuda_options *options) {
    if (pst__cuda_kernels_load(cuda, options->nvrtc, options->cache) == PST_OK) return;
    (void)snprintf(cuda->no_kernels, sizeof cuda->no_kernels, "%s",
                   pst__cuda_error_text(&cuda->device));
    pst__log(pst__runtime_error(cuda->runtime), PST_LOG_WARNING, "no kernels: %s",
             cuda->no_kernels);
}

static pst_status open_context(pst__cuda *cuda, const pst_cuda_options *options) {
    pst_status status = pst__cuda_call(cuda, cuDevicePrimaryCtxRetain, (&cuda->context, cuda->gpu),
                                       "the primary context");
    if (status != PST_OK) return status;
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    status = create_service(cuda);
    if (status == PST_OK) status = get_granularity(cuda);
    if (status == PST_OK) load_kernels(cuda, options);
    return status;
}

static pst_status open_device(pst__cuda *cuda, const pst_cuda_options *options) {
    pst_status status = pst__cuda_driver_open(&cuda->driver, options->driver, cuda->runtime);
    if (status != PST_OK) return status;
    status = find_gpu(cuda);
    if (status == PST_OK) status = get_attributes(cuda);
    if (status == PST_OK) status = open_context(cuda, options);
    if (status == PST_OK) return PST_OK;
    return pst__runtime_fail(cuda->runtime, status, "%s", pst__cuda_error_text(&cuda->device));
}

/* ---- the device --------------------------------------------------------------------- */

static void close_context(pst__cuda *cuda) {
    CUcontext previous;
    if (cuda->context == NULL) return;
    (void)pst__cuda_enter(cuda, &previous); /* of a lost context all that follows fails */
    pst__cuda_kernels_unload(cuda);
    pst__cuda_events_free(cuda);
    if (cuda->service != NULL) (void)cuda->driver.cuStreamDestroy(cuda->service);
    pst__cuda_leave(cuda, previous);
    (void)cuda->driver.cuDevicePrimaryCtxRelease(cuda->gpu);
}

static void destroy(pst_device *device) {
    pst__cuda *cuda = pst__cuda_of(device);
    const pst__heap heap = cuda->heap;
    cuda->opened = 0; /* the runtime may be gone */
    close_context(cuda);
    (void)pthread_mutex_destroy(&cuda->anchor.lock);
    pst__cuda_driver_close(&cuda->driver);
    pst__heap_free(&heap, cuda, sizeof *cuda);
}

static pst__cuda *create(pst_runtime *runtime, int ordinal) {
    pst__cuda *cuda = pst__heap_alloc(pst__runtime_heap(runtime), sizeof *cuda);
    if (cuda == NULL) return NULL;
    cuda->device = (pst_device){&cuda_ops, cuda};
    cuda->heap = *pst__runtime_heap(runtime);
    cuda->runtime = runtime;
    cuda->ordinal = ordinal;
    (void)snprintf(cuda->name, sizeof cuda->name, "cuda:%d", ordinal);
    ck_spinlock_init(&cuda->untimed.lock);
    ck_spinlock_init(&cuda->timed.lock);
    ck_spinlock_init(&cuda->shared_lock);
    if (pthread_mutex_init(&cuda->anchor.lock, NULL) == 0) return cuda;
    pst__heap_free(pst__runtime_heap(runtime), cuda, sizeof *cuda);
    return NULL;
}

pst_status pst_cuda_device_create(pst_runtime *runtime, const pst_cuda_options *given,
                                  pst_device **created) {
    pst_cuda_options options = {0};
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    if (given != NULL && !pst__read_options(&options, sizeof options, given))
        return pst__runtime_fail(
            runtime, PST_EINVAL,
            "pst_cuda_device_create: options->size is not sizeof(pst_cuda_options)");
    pst__cuda *cuda = create(runtime, options.ordinal);
    if (cuda == NULL) return pst__runtime_fail(runtime, PST_ENOMEM, "device cuda: no memory");
    const pst_status status = open_device(cuda, &options);
    if (status != PST_OK) {
        destroy(&cuda->device);
        return status;
    }
    cuda->opened = 1;
    *created = &cuda->device;
    return PST_OK;
}
