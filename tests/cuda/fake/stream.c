/* Streams and events: queues of operations, and when they run. */
#include "internal.h"

#include <sched.h>
#include <time.h>

struct CUstream_st {
    CUstream next;
    operation *first, **end;
    fake_branch branch;
    int captures, destroyed;
};

/* A record numbers itself when it is enqueued; the event has reached it when it has run, which
 * those on several streams do in any order. */
struct CUevent_st {
    CUevent next;
    uint64_t asked, reached; /* the latter: all up to here, */
    uint64_t beyond;         /* and of those behind, by bit */
    uint64_t time_ns;
    unsigned flags;
    fake_graph *graph; /* that its latest record is in, and where; NULL: in none */
    int node;
    int destroyed; /* kept: an operation may know it */
};

static struct CUstream_st legacy = {.end = &legacy.first};
static CUstream streams = &legacy;
static CUevent events;
static size_t stream_count = 1, live;
static int held;
static size_t pace;
static uint64_t seed = 0x9e3779b97f4a7c15u;

static CUstream resolve(CUstream stream) {
    const int is_default =
        stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
    return is_default ? &legacy : stream;
}

static void *zeroed(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (memory == NULL) abort();
    return memory;
}

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int fake_is_captured(CUstream stream) {
    return resolve(stream)->branch.graph != NULL;
}

/* ---- running: under the lock -------------------------------------------------------- */

CUresult fake_enqueue(CUstream stream, const operation *made) {
    CUstream queue = resolve(stream);
    if (queue->branch.graph != NULL) return fake_branch_add(&queue->branch, made);
    if (queue->captures) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    operation *added = zeroed(sizeof *added);
    *added = *made;
    added->next = NULL;
    *queue->end = added;
    queue->end = &added->next;
    return CUDA_SUCCESS;
}

static int run_first(CUstream stream) {
    operation *first = stream->first;
    if (first == NULL || !first->run(first)) return 0;
    stream->first = first->next;
    if (stream->first == NULL) stream->end = &stream->first;
    free(first->owned);
    free(first);
    return 1;
}

static size_t random_below(size_t limit) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (size_t)(seed % limit);
}

/* The first operation that can run, of all streams from a random one on; 0: there is none. */
static int run_any(void) {
    CUstream at = streams;
    for (size_t skip = random_below(stream_count); skip > 0; skip--)
        at = at->next;
    for (size_t i = 0; i < stream_count; i++, at = at->next) {
        if (at == NULL) at = streams;
        if (run_first(at)) return 1;
    }
    return 0;
}

static void free_finished(void) {
    for (CUstream *link = &streams; *link != NULL;) {
        CUstream stream = *link;
        if (!stream->destroyed || stream->first != NULL) {
            link = &stream->next;
            continue;
        }
        *link = stream->next;
        stream_count--;
        free(stream);
    }
}

static void run(void) {
    if (held) return;
    for (size_t ran = 0; (pace == 0 || ran < pace) && run_any(); ran++)
        continue;
    free_finished();
}

/* ---- streams ------------------------------------------------------------------------ */

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *created, unsigned flags, int priority) {
    CALL(cuStreamCreateWithPriority, NULL);
    if (flags != CU_STREAM_NON_BLOCKING || priority > 0 || priority < -5)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    CUstream stream = zeroed(sizeof *stream);
    stream->end = &stream->first;
    stream->next = streams;
    streams = stream;
    stream_count++;
    live++;
    *created = stream;
    return fake_end(CUDA_SUCCESS);
}

/* What is enqueued still runs, as the driver has it. */
CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream) {
    CALL(cuStreamDestroy, stream);
    stream->destroyed = 1;
    live--;
    free_finished();
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamQuery(CUstream stream) {
    CALL(cuStreamQuery, stream);
    run();
    return fake_end(resolve(stream)->first == NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    CUresult result = CUDA_ERROR_NOT_READY;
    while (result == CUDA_ERROR_NOT_READY) {
        CALL(cuStreamSynchronize, stream);
        run();
        result = resolve(stream)->first == NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
        fake_leave();
        (void)sched_yield();
    }
    return result;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    CALL(cuStreamIsCapturing, stream);
    const int captures = resolve(stream)->captures || resolve(stream)->branch.graph != NULL;
    *status = captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return fake_end(CUDA_SUCCESS);
}

static int call_host(operation *self) {
    self->of.host.function(self->of.host.argument);
    return 1;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    CALL(cuLaunchHostFunc, stream);
    const operation made = {.run = call_host, .of.host = {function, argument}};
    return fake_end(fake_enqueue(stream, &made));
}

/* ---- for stand-ins of other libraries ------------------------------------------------ */

static int is_over(operation *self) {
    return self->of.foreign.is_over(self->of.foreign.argument);
}

CUresult fake_cuda_run(CUstream stream, int (*over)(void *argument), void *argument) {
    CUresult result = fake_enter("run", stream, 0);
    const operation made = {.run = is_over, .of.foreign = {over, argument}};
    return result == CUDA_SUCCESS ? fake_end(fake_enqueue(stream, &made)) : result;
}

int fake_cuda_at_destroy(CUstream stream, void (*call)(void *argument), void *argument) {
    CUresult result = fake_enter("at destroy", stream, 0);
    fake_graph *graph = resolve(stream)->branch.graph;
    if (graph != NULL) fake_graph_at_destroy(graph, call, argument);
    if (result == CUDA_SUCCESS) fake_leave();
    return graph != NULL;
}

void fake_cuda_poll(void) {
    CUresult result = fake_enter("poll", NULL, 0);
    run();
    if (result == CUDA_SUCCESS) fake_leave();
}

/* ---- graphs ------------------------------------------------------------------------- */

static fake_graph *open_graphs[8]; /* those that streams are captured into now */

/* This thread's captures, and whether it has asked for an event within, which ends them. */
static _Thread_local int captures_here, is_invalidated;

static int is_open(const fake_graph *graph) {
    for (size_t i = 0; i < 8; i++)
        if (open_graphs[i] == graph) return 1;
    return 0;
}

void fake_cuda_begin_capture(CUstream stream) {
    CUresult result = fake_enter("begin capture", stream, 0);
    size_t place = 0;
    while (open_graphs[place] != NULL)
        place++;
    open_graphs[place] = fake_graph_create();
    fake_branch_begin(&stream->branch, open_graphs[place]);
    captures_here++;
    if (result == CUDA_SUCCESS) fake_leave();
}

CUresult fake_cuda_end_capture(CUstream stream, fake_graph **graph) {
    CUresult result = fake_enter("end capture", stream, 0);
    if (result != CUDA_SUCCESS) return result;
    *graph = stream->branch.graph;
    result = fake_graph_end(&stream->branch);
    captures_here--;
    if (is_invalidated) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    is_invalidated = captures_here > 0 && is_invalidated;
    for (size_t i = 0; i < 8; i++)
        if (open_graphs[i] == *graph) open_graphs[i] = NULL;
    for (CUstream at = streams; at != NULL; at = at->next)
        if (at->branch.graph == *graph) at->branch.graph = NULL;
    return fake_end(result);
}

void fake_cuda_launch(fake_graph *graph, CUstream stream) {
    CUresult result = fake_enter("launch", stream, 0);
    const operation made = fake_graph_launch(graph, random_below);
    (void)fake_enqueue(stream, &made);
    if (result == CUDA_SUCCESS) fake_leave();
}

void fake_cuda_destroy(fake_graph *graph) {
    CUresult result = fake_enter("destroy", NULL, 0);
    fake_graph_release(graph);
    if (result == CUDA_SUCCESS) fake_leave();
}

/* The driver's own calls for these, as programs have them. */

CUresult CUDAAPI cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    (void)mode;
    fake_cuda_begin_capture(stream);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    return fake_cuda_end_capture(stream, (fake_graph **)(void *)graph);
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *executable, CUgraph graph,
                                             unsigned long long flags) {
    CALL(cuGraphInstantiateWithFlags, NULL);
    (void)flags;
    fake_graph_retain((fake_graph *)(void *)graph);
    *executable = (CUgraphExec)(void *)graph;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    fake_cuda_launch((fake_graph *)(void *)executable, stream);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
    fake_cuda_destroy((fake_graph *)(void *)graph);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec executable) {
    fake_cuda_destroy((fake_graph *)(void *)executable);
    return CUDA_SUCCESS;
}

/* ---- events ------------------------------------------------------------------------- */

CUresult CUDAAPI cuEventCreate(CUevent *created, unsigned flags) {
    CALL(cuEventCreate, NULL);
    CUevent event = zeroed(sizeof *event);
    event->flags = flags;
    event->next = events;
    events = event;
    live++;
    *created = event;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventDestroy_v2(CUevent event) {
    CALL(cuEventDestroy, NULL);
    if (event->destroyed) return fake_end(CUDA_ERROR_INVALID_HANDLE);
    event->destroyed = 1;
    live--;
    return fake_end(CUDA_SUCCESS);
}

static int is_reached(const struct CUevent_st *event, uint64_t record) {
    if (record <= event->reached) return 1;
    const uint64_t ahead = record - event->reached - 1;
    return ahead < 64 && (event->beyond >> ahead & 1u) != 0;
}

static int reach(operation *self) {
    CUevent event = self->of.event.event;
    const uint64_t ahead = self->of.event.record - event->reached - 1;
    if (ahead >= 64) return 0; /* one at least of those in front comes first */
    event->beyond |= UINT64_C(1) << ahead;
    for (; (event->beyond & 1u) != 0; event->beyond >>= 1)
        event->reached++;
    event->time_ns = now_ns();
    return 1;
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    CALL(cuEventRecord, stream);
    fake_branch *branch = &resolve(stream)->branch;
    event->graph = branch->graph;
    if (branch->graph != NULL) {
        const operation nothing = {.run = NULL};
        const CUresult result = fake_branch_add(branch, &nothing);
        event->node = branch->last;
        return fake_end(result);
    }
    const operation made = {.run = reach, .of.event = {event, ++event->asked}};
    return fake_end(fake_enqueue(stream, &made));
}

static int has_reached(operation *self) {
    return is_reached(self->of.event.event, self->of.event.record);
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CALL(cuStreamWaitEvent, stream);
    (void)flags;
    fake_branch *branch = &resolve(stream)->branch;
    if (event->graph != NULL) {
        if (!is_open(event->graph)) return fake_end(CUDA_ERROR_CAPTURED_EVENT);
        if (branch->graph == NULL) fake_branch_begin(branch, event->graph);
        if (branch->graph != event->graph) return fake_end(CUDA_ERROR_STREAM_CAPTURE_MERGE);
        return fake_end(fake_branch_wait(branch, event->node));
    }
    if (branch->graph != NULL) return fake_end(CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    const operation made = {.run = has_reached, .of.event = {event, event->asked}};
    return fake_end(fake_enqueue(stream, &made));
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
    CALL(cuEventQuery, NULL);
    if (event->graph != NULL) return fake_end(CUDA_ERROR_CAPTURED_EVENT);
    if (captures_here > 0 && !fake_is_relaxed()) {
        is_invalidated = 1;
        return fake_end(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    run();
    return fake_end(is_reached(event, event->asked) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    CALL(cuEventElapsedTime, NULL);
    if (((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING) != 0 || from->asked == 0 ||
        to->asked == 0)
        return fake_end(CUDA_ERROR_INVALID_HANDLE);
    if (!is_reached(from, from->asked) || !is_reached(to, to->asked))
        return fake_end(CUDA_ERROR_NOT_READY);
    *milliseconds = (float)((double)(int64_t)(to->time_ns - from->time_ns) / 1e6);
    return fake_end(CUDA_SUCCESS);
}

/* ---- the tests' side ---------------------------------------------------------------- */

void fake_cuda_hold(int on) {
    CUresult result = fake_enter("hold", NULL, 0);
    held = on;
    if (result == CUDA_SUCCESS) fake_leave();
}

void fake_cuda_pace(size_t operations) {
    CUresult result = fake_enter("pace", NULL, 0);
    pace = operations;
    if (result == CUDA_SUCCESS) fake_leave();
}

void fake_cuda_seed(uint64_t value) {
    CUresult result = fake_enter("seed", NULL, 0);
    seed = value == 0 ? 1 : value;
    if (result == CUDA_SUCCESS) fake_leave();
}

void fake_cuda_capture(CUstream stream, int on) {
    CUresult result = fake_enter("capture", stream, 0);
    resolve(stream)->captures = on;
    if (result == CUDA_SUCCESS) fake_leave();
}

size_t fake_cuda_live(void) {
    CUresult result = fake_enter("live", NULL, 0);
    const size_t count = live;
    if (result == CUDA_SUCCESS) fake_leave();
    return count;
}
