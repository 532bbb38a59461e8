/* capture_cuda.c - a sealed graph as a part of a CUDA graph.
 *
 *   the program's capture:  copy "first" to "second" .. Penstock's graph .. copy "third" to "last"
 *   Penstock's graph:       lane "left" and lane "right" copy a half of "second" to "third" each
 *
 * pst_graph_capture puts all tasks between what the program captures before and behind. From then
 * on one cuGraphLaunch runs everything; Penstock's threads have no part in it.
 *
 * Build with CUDA's headers and -lcuda. Usage: capture_cuda [LIBRARY], the path of driver and
 * run-time compiler if they are not the system's.
 */
#include <cuda.h>
#include <inttypes.h>
#include <penstock/penstock.h>
#include <stdio.h>

enum { VALUES = 1 << 16, BYTES = VALUES * sizeof(uint64_t), HALF = BYTES / 2, LAUNCHES = 3 };
enum { FIRST, SECOND, THIRD, LAST, BUFFERS };

typedef struct program {
    pst_runtime *runtime;
    pst_device *device;
    CUcontext context;
    CUstream stream;
    CUgraphExec executable;
    CUdeviceptr buffers[BUFFERS];
    uint64_t given[VALUES], got[VALUES];
    pst_graph *graph;
} program;

static pst_status ok(CUresult result) {
    return result == CUDA_SUCCESS ? PST_OK : PST_EDEVICE;
}

/* ---- the program's own GPU -------------------------------------------------------------- */

static pst_status open_gpu(program *p, const char *library) {
    const pst_cuda_options options = {.size = sizeof options, .driver = library, .nvrtc = library};
    pst_status status = pst_cuda_device_create(p->runtime, &options, &p->device);
    for (int i = 0; i < BUFFERS && !status; i++) {
        void *memory = NULL;
        status = p->device->ops->alloc(p->device, PST_MEMORY_DEVICE, BYTES, &memory);
        p->buffers[i] = (CUdeviceptr)(uintptr_t)memory;
    }
    CUresult result = cuDevicePrimaryCtxRetain(&p->context, 0);
    if (!result) result = cuCtxSetCurrent(p->context);
    if (!result) result = cuStreamCreateWithPriority(&p->stream, CU_STREAM_NON_BLOCKING, 0);
    return status ? status : ok(result);
}

static void close_gpu(program *p) {
    for (int i = 0; i < BUFFERS; i++)
        p->device->ops->free(p->device, PST_MEMORY_DEVICE, (void *)(uintptr_t)p->buffers[i], BYTES);
    (void)cuGraphExecDestroy(p->executable);
    (void)cuStreamDestroy(p->stream);
    p->device->ops->destroy(p->device); /* after the runtime and all that is on the device */
}

/* ---- Penstock's graph ------------------------------------------------------------------- */

static pst_status copy_half(const program *p, size_t at, const pst_stream *stream) {
    return ok(cuMemcpyAsync(p->buffers[THIRD] + at, p->buffers[SECOND] + at, HALF,
                            pst_cuda_stream(stream)));
}

static pst_status copy_left(void *argument, pst_stream *stream) {
    return copy_half(argument, 0, stream);
}

static pst_status copy_right(void *argument, pst_stream *stream) {
    return copy_half(argument, HALF, stream);
}

static pst_status add(program *p, const char *name,
                      pst_status (*start)(void *argument, pst_stream *stream)) {
    pst_lane *lane = NULL;
    const pst_lane_options options = {.size = sizeof options, .name = name, .device = p->device};
    const pst_status status = pst_lane_create(p->runtime, &options, &lane);
    const pst_task_options task = {
        .size = sizeof task, .name = name, .lane = lane, .work = {start, NULL, p}};
    return status ? status : pst_graph_add(p->graph, &task, NULL);
}

static pst_status build(program *p) {
    pst_status status = pst_graph_create(p->runtime, PST_GRAPH_SEALED, "halves", &p->graph);
    if (!status) status = add(p, "left", copy_left);
    if (!status) status = add(p, "right", copy_right);
    return status ? status : pst_graph_seal(p->graph);
}

/* ---- the program's capture -------------------------------------------------------------- */

static CUresult copy(const program *p, int to, int from) {
    return cuMemcpyAsync(p->buffers[to], p->buffers[from], BYTES, p->stream);
}

static pst_status capture(program *p) {
    CUgraph graph;
    CUresult result = cuStreamBeginCapture(p->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (!result) result = copy(p, SECOND, FIRST);
    if (result) return ok(result);
    const pst_status status = pst_graph_capture(p->graph, p->device, p->stream);
    if (!status) result = copy(p, LAST, THIRD);
    const CUresult ended = cuStreamEndCapture(p->stream, &graph); /* also of one that has failed */
    if (status || result || ended) return status ? status : PST_EDEVICE;
    result = cuGraphInstantiateWithFlags(&p->executable, graph, 0);
    (void)cuGraphDestroy(graph);
    return ok(result);
}

static pst_status launch(program *p, uint64_t first) {
    uint64_t sum = 0;
    for (size_t i = 0; i < VALUES; i++)
        p->given[i] = first + i;
    const CUdeviceptr given = (CUdeviceptr)(uintptr_t)p->given,
                      got = (CUdeviceptr)(uintptr_t)p->got;
    CUresult result = cuMemcpyAsync(p->buffers[FIRST], given, BYTES, p->stream);
    if (!result) result = cuGraphLaunch(p->executable, p->stream);
    if (!result) result = cuMemcpyAsync(got, p->buffers[LAST], BYTES, p->stream);
    if (!result) result = cuStreamSynchronize(p->stream);
    for (size_t i = 0; i < VALUES; i++)
        sum += p->got[i];
    if (!result) printf("values from %" PRIu64 ": sum %" PRIu64 "\n", first, sum);
    return ok(result);
}

int main(int argc, char **argv) {
    static program p;
    char error[256] = "";
    if (pst_runtime_create(NULL, &p.runtime) != PST_OK) return 1;
    pst_status status = open_gpu(&p, argc > 1 ? argv[1] : NULL);
    if (!status) status = build(&p);
    if (!status) status = capture(&p);
    for (uint64_t i = 0; i < LAUNCHES && !status; i++)
        status = launch(&p, 1000 * i);
    pst_runtime_error(p.runtime, error, sizeof error);
    if (status) fprintf(stderr, "capture_cuda: %s: %s\n", pst_status_text(status), error);
    pst_runtime_destroy(p.runtime);
    if (p.device != NULL) close_gpu(&p);
    return status ? 1 : 0;
}
