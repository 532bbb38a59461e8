/* Devices, contexts, errors, and the table of entry points. */
#include "internal.h"
#include "sched/cuda/driver.h"

#include <stdio.h>

struct CUctx_st {
    int users;
};

static struct CUctx_st contexts[FAKE_DEVICES];
static _Thread_local CUcontext current;

int fake_has_context(void) {
    return current != NULL;
}

CUresult CUDAAPI cuInit(unsigned flags) {
    CALL_GLOBAL(cuInit);
    return fake_end(flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
    CALL_GLOBAL(cuDriverGetVersion);
    *version = CUDA_VERSION;
    return fake_end(CUDA_SUCCESS);
}

/* The errors that tests use. */
static const struct {
    CUresult error;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].error == error) {
            *text = errors[i].name;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].error == error) {
            *text = errors[i].text;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

/* ---- devices ------------------------------------------------------------------------ */

CUresult CUDAAPI cuDeviceGetCount(int *count) {
    CALL_GLOBAL(cuDeviceGetCount);
    *count = FAKE_DEVICES;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    CALL_GLOBAL(cuDeviceGet);
    *device = ordinal;
    return fake_end(ordinal >= 0 && ordinal < FAKE_DEVICES ? CUDA_SUCCESS
                                                           : CUDA_ERROR_INVALID_DEVICE);
}

static int attribute_of(CUdevice_attribute attribute) {
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 4;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
        return 0;
    default:
        return 1;
    }
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CALL_GLOBAL(cuDeviceGetAttribute);
    (void)device;
    *value = attribute_of(attribute);
    return fake_end(CUDA_SUCCESS);
}

/* ---- contexts ----------------------------------------------------------------------- */

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL_GLOBAL(cuDevicePrimaryCtxRetain);
    contexts[device].users++;
    *context = &contexts[device];
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CALL_GLOBAL(cuDevicePrimaryCtxRelease);
    if (contexts[device].users == 0) return fake_end(CUDA_ERROR_INVALID_CONTEXT);
    contexts[device].users--;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) {
    CALL_GLOBAL(cuCtxGetCurrent);
    *context = current;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    CALL_GLOBAL(cuCtxSetCurrent);
    current = context;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *lowest, int *highest) {
    CALL(cuCtxGetStreamPriorityRange, NULL);
    *lowest = 0;
    *highest = -5;
    return fake_end(CUDA_SUCCESS);
}

static _Thread_local CUstreamCaptureMode of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;

int fake_is_relaxed(void) {
    return of_thread == CU_STREAM_CAPTURE_MODE_RELAXED;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CALL_GLOBAL(cuThreadExchangeStreamCaptureMode);
    const CUstreamCaptureMode before = of_thread;
    of_thread = *mode;
    *mode = before;
    return fake_end(CUDA_SUCCESS);
}

/* ---- the table ---------------------------------------------------------------------- */

/* The interface of version 12.8, which newer headers give another one. */
CUresult fake_cuMemcpyBatchAsync(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *bytes,
                                 size_t count, CUmemcpyAttributes *attributes, size_t *indices,
                                 size_t attribute_count, size_t *failed, CUstream stream);

FAKE_API CUresult fake_get_address(const char *name, void **address, int version,
                                   cuuint64_t flags) __asm__("cuGetProcAddress");

CUresult fake_get_address(const char *name, void **address, int version, cuuint64_t flags) {
    CALL_GLOBAL(cuGetProcAddress);
    (void)flags;
    *address = NULL;
#define ENTRY(entry, since)                                                                        \
    if (strcmp(name, #entry) == 0 && version >= since) *address = (void *)(uintptr_t)entry;
#undef cuMemcpyBatchAsync
#define cuMemcpyBatchAsync fake_cuMemcpyBatchAsync
    PST__CUDA_DRIVER_MAP(ENTRY, ENTRY)
#undef ENTRY
    if (fake_lacks(name)) *address = NULL;
    return fake_end(*address == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS);
}
