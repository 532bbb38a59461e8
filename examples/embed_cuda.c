/* embed_cuda.c - Penstock beside the streams of a CUDA program.
 *
 *   stream "compute", the program's:  copy in, gate "ready" ............ wait, copy out
 *   lane "side", Penstock's:                       task "copy"
 *   stream "other", the program's:                             wait, copy out
 *
 * `compute` is wrapped as a borrowed lane: a gate opened with it stands for what is enqueued there
 * by then, and pst_task_wait makes it wait for the task; neither makes the thread wait for the GPU.
 * `other` knows nothing of Penstock and waits for the task's event, a CUevent. `side` is pumped:
 * the program's waits launch its tasks.
 *
 * Build with CUDA's headers and -lcuda. Usage: embed_cuda [LIBRARY], the path of driver and
 * run-time compiler if they are not the system's.
 */
#include <cuda.h>
#include <inttypes.h>
#include <penstock/penstock.h>
#include <stdio.h>

enum { VALUES = 1 << 16, BYTES = VALUES * sizeof(uint64_t), LAUNCHES = 3 };

typedef struct program {
    pst_runtime *runtime;
    pst_device *device; /* Penstock's view of the GPU */
    CUcontext context;
    CUstream compute, other;
    CUdeviceptr first, second; /* on the GPU */
    uint64_t given[VALUES], got[VALUES], seen[VALUES];
    pst_stream *wrapped; /* compute, as Penstock sees it */
    pst_lane *borrowed, *side;
    pst_graph *graph;
    pst_task ready, copied;
} program;

static pst_status ok(CUresult result) {
    return result == CUDA_SUCCESS ? PST_OK : PST_EDEVICE;
}

/* ---- the program's own GPU: its context, streams, memory -------------------------------- */

static pst_status open_gpu(program *p) {
    CUdevice gpu;
    CUresult result = cuInit(0);
    if (!result) result = cuDeviceGet(&gpu, 0);
    if (!result) result = cuDevicePrimaryCtxRetain(&p->context, gpu);
    if (!result) result = cuCtxSetCurrent(p->context);
    if (!result) result = cuStreamCreateWithPriority(&p->compute, CU_STREAM_NON_BLOCKING, 0);
    if (!result) result = cuStreamCreateWithPriority(&p->other, CU_STREAM_NON_BLOCKING, 0);
    return ok(result);
}

static pst_status take_memory(program *p, CUdeviceptr *taken) {
    void *memory;
    const pst_status status = p->device->ops->alloc(p->device, PST_MEMORY_DEVICE, BYTES, &memory);
    if (!status) *taken = (CUdeviceptr)(uintptr_t)memory;
    return status;
}

static void close_gpu(program *p) {
    const pst_device_ops *ops = p->device->ops;
    if (p->wrapped != NULL) ops->stream_destroy(p->device, p->wrapped);
    ops->free(p->device, PST_MEMORY_DEVICE, (void *)(uintptr_t)p->first, BYTES);
    ops->free(p->device, PST_MEMORY_DEVICE, (void *)(uintptr_t)p->second, BYTES);
    (void)cuStreamDestroy(p->compute);
    (void)cuStreamDestroy(p->other);
}

/* ---- what Penstock does ----------------------------------------------------------------- */

/* Enqueues, and returns at once; the context is current here. */
static pst_status copy(void *argument, pst_stream *stream) {
    const program *p = argument;
    return ok(cuMemcpyAsync(p->second, p->first, BYTES, pst_cuda_stream(stream)));
}

static pst_status create_lanes(program *p) {
    pst_status status = p->device->ops->stream_wrap(p->device, p->compute, &p->wrapped);
    const pst_lane_options compute = {.size = sizeof compute,
                                      .name = "compute",
                                      .device = p->device,
                                      .stream = p->wrapped,
                                      .mode = PST_LANE_BORROWED};
    const pst_lane_options side = {
        .size = sizeof side, .name = "side", .device = p->device, .mode = PST_LANE_PUMPED};
    if (!status) status = pst_lane_create(p->runtime, &compute, &p->borrowed);
    return status ? status : pst_lane_create(p->runtime, &side, &p->side);
}

static pst_status build(program *p) {
    pst_status status = pst_graph_create(p->runtime, PST_GRAPH_SEALED, "step", &p->graph);
    if (!status) status = pst_graph_add_gate(p->graph, "ready", &p->ready);
    const pst_task_options options = {.size = sizeof options,
                                      .name = "copy",
                                      .lane = p->side,
                                      .work = {copy, NULL, p},
                                      .after = &p->ready,
                                      .after_count = 1};
    if (!status) status = pst_graph_add(p->graph, &options, &p->copied);
    /* Who says where it will wait gets an event that is there in time. */
    if (!status) status = pst_graph_outer_open(p->graph, p->ready);
    if (!status) status = pst_graph_outer_wait(p->graph, p->copied);
    return status ? status : pst_graph_seal(p->graph);
}

/* ---- a step of the program -------------------------------------------------------------- */

static pst_status enqueue(program *p, pst_launch launch) {
    pst_status status =
        ok(cuMemcpyAsync(p->first, (CUdeviceptr)(uintptr_t)p->given, BYTES, p->compute));
    if (!status) status = pst_gate_open(launch, p->ready, p->borrowed);
    if (!status) status = pst_task_wait(launch, p->copied, p->borrowed);
    if (status) return status;
    const CUevent copied = pst_cuda_event(pst_task_event(launch, p->copied));
    CUresult result = cuMemcpyAsync((CUdeviceptr)(uintptr_t)p->got, p->second, BYTES, p->compute);
    if (!result) result = cuStreamWaitEvent(p->other, copied, 0);
    if (!result)
        result = cuMemcpyAsync((CUdeviceptr)(uintptr_t)p->seen, p->second, BYTES, p->other);
    return ok(result);
}

static uint64_t sum(const uint64_t *values) {
    uint64_t total = 0;
    for (size_t i = 0; i < VALUES; i++)
        total += values[i];
    return total;
}

static pst_status step(program *p, uint64_t first) {
    pst_launch launch;
    for (size_t i = 0; i < VALUES; i++)
        p->given[i] = first + i;
    pst_status status = pst_graph_launch(p->graph, &launch);
    if (!status) status = enqueue(p, launch);
    /* Here the program itself wants the values. */
    if (!status) status = ok(cuStreamSynchronize(p->compute));
    if (!status) status = ok(cuStreamSynchronize(p->other));
    if (!status) status = pst_launch_wait(launch); /* then the graph can be launched again */
    if (!status)
        printf("values from %" PRIu64 ": sums %" PRIu64 " and %" PRIu64 "\n", first, sum(p->got),
               sum(p->seen));
    return status;
}

static pst_status run(program *p, const char *library) {
    const pst_cuda_options options = {.size = sizeof options, .driver = library, .nvrtc = library};
    pst_status status = open_gpu(p);
    if (!status) status = pst_cuda_device_create(p->runtime, &options, &p->device);
    if (!status) status = take_memory(p, &p->first);
    if (!status) status = take_memory(p, &p->second);
    if (!status) status = create_lanes(p);
    if (!status) status = build(p);
    for (uint64_t i = 0; i < LAUNCHES && !status; i++)
        status = step(p, 1000 * i);
    return status;
}

int main(int argc, char **argv) {
    static program p;
    char error[256] = "";
    if (pst_runtime_create(NULL, &p.runtime) != PST_OK) return 1;
    const pst_status status = run(&p, argc > 1 ? argv[1] : NULL);
    pst_runtime_error(p.runtime, error, sizeof error);
    if (status) fprintf(stderr, "embed_cuda: %s: %s\n", pst_status_text(status), error);
    pst_runtime_destroy(p.runtime);
    if (p.device != NULL) {
        close_gpu(&p);
        p.device->ops->destroy(p.device); /* after the runtime and all that is on the device */
    }
    return status ? 1 : 0;
}
