/* Connecting the ranks. NCCL can block in it for as long as a rank does not come, so a thread does
 * it, and the caller keeps the deadline. NCCL makes some connections with the first collective that
 * needs them: one of each kind is run, so that no later one blocks for that. */
#include "ops/comm/nccl/nccl.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "sched/cuda/cuda.h"
#include "sched/runtime.h"
#include "sched/thread.h"

#include <string.h>
#include <time.h>

#define NAP_NS 50000
#define WORD   sizeof(float)

static void nap(void) {
    (void)nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

/* ---- the first collectives ------------------------------------------------------------------- */

/* Device memory: a word a rank to give, as many to take, and one of staging a rank. */
static size_t trial_bytes(const pst__nccl *own) {
    return 3 * WORD * (size_t)own->comm.size;
}

static pst_status open_trial(pst__nccl *own) {
    pst_device *device = own->device;
    pst__nccl_trial *trial = &own->trial;
    pst_status status = device->ops->stream_create(device, 0, &trial->stream);
    if (status == PST_OK) status = device->ops->event_create(device, 0, &trial->event);
    if (status == PST_OK)
        status = device->ops->alloc(device, PST_MEMORY_DEVICE, trial_bytes(own), &trial->memory);
    return status;
}

void pst__nccl_close_trial(pst__nccl *own) {
    pst_device *device = own->device;
    pst__nccl_trial *trial = &own->trial;
    if (trial->memory != NULL)
        device->ops->free(device, PST_MEMORY_DEVICE, trial->memory, trial_bytes(own));
    if (trial->event != NULL) device->ops->event_destroy(device, trial->event);
    if (trial->stream != NULL) device->ops->stream_destroy(device, trial->stream);
    memset(trial, 0, sizeof *trial);
}

/* Without pieces nothing is done with what has been reduced. */
static pst_status enqueue(pst__nccl *own, pst_collective_kind kind, const pst_segment *segments) {
    size_t ranks = (size_t)own->comm.size;
    char *memory = own->trial.memory;
    const pst_collective collective = {.kind = kind,
                                       .name = "trial",
                                       .dtype = PST_FLOAT32,
                                       .source = memory,
                                       .source_bytes = WORD,
                                       .stride = WORD,
                                       .destination = memory + WORD * ranks,
                                       .count = 1,
                                       .segments = segments,
                                       .segment_count = ranks,
                                       .staging = memory + 2 * WORD * ranks};
    return pst__nccl_enqueue(own, &collective, own->trial.stream);
}

static pst_status enqueue_all(pst__nccl *own) {
    const pst__heap *heap = pst__runtime_heap(own->runtime);
    size_t ranks = (size_t)own->comm.size;
    pst_segment *segments = pst__heap_alloc(heap, ranks * sizeof *segments);
    if (segments == NULL) return PST_ENOMEM;
    for (size_t rank = 0; rank < ranks; rank++)
        segments[rank] = (pst_segment){(uint32_t)rank, 0, rank * WORD, WORD};
    pst_status status = PST_OK;
    for (int kind = 0; status == PST_OK && kind < PST_COLLECTIVE_KIND_COUNT; kind++)
        status = enqueue(own, (pst_collective_kind)kind, segments);
    pst__heap_free(heap, segments, ranks * sizeof *segments);
    return status;
}

/* The caller of pst__nccl_connect keeps the time, and closes the communicator. */
static pst_status finish(pst__nccl *own) {
    pst_device *device = own->device;
    pst_status status = device->ops->event_record(device, own->trial.event, own->trial.stream);
    if (status != PST_OK) return status;
    while ((status = device->ops->event_query(device, own->trial.event)) == PST_PENDING) {
        if (pst__nccl_is_closed(own)) return PST_ECANCELED;
        nap();
    }
    return status == PST_OK ? pst__nccl_look(own) : status;
}

/* What is in flight after a failure goes with the communicator: the trial's memory after it. */
static pst_status try_all(pst__nccl *own) {
    pst_status status = open_trial(own);
    if (status == PST_OK) status = enqueue_all(own);
    if (status == PST_OK) status = finish(own);
    if (status == PST_OK) pst__nccl_close_trial(own);
    return status;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static pst_status init_rank(pst__nccl *own) {
    ncclResult_t result = own->library.ncclCommInitRankConfig(&own->handle, own->comm.size, own->id,
                                                              own->comm.rank, &own->config);
    return pst__nccl_answer(own, result, "ncclCommInitRankConfig", "the communicator");
}

static pst_status connect_inside(pst__nccl *own) {
    pst__cuda *cuda = pst__cuda_of(own->device);
    CUcontext previous = NULL;
    pst_status status = pst__cuda_enter(cuda, &previous);
    if (status != PST_OK) return status;
    status = init_rank(own);
    if (status == PST_OK) status = try_all(own);
    pst__cuda_leave(cuda, previous);
    return status;
}

static void *run_connect(void *argument) {
    pst__nccl *own = argument;
    (void)pthread_detach(pthread_self());
    own->connected = pst__nccl_enter(own);
    if (own->connected == PST_OK) {
        own->connected = connect_inside(own);
        pst__nccl_leave(own);
    }
    pst__store_release(&own->connecting, 0); /* pairs with is_connecting; the last look at `own` */
    return NULL;
}

/* Acquire: pairs with the store in run_connect; `connected` and `handle` are seen. */
static int is_connecting(pst__nccl *own) {
    return pst__load_acquire(&own->connecting);
}

pst_status pst__nccl_connect(pst__nccl *own, const ncclUniqueId *id) {
    static const ncclConfig_t defaults = NCCL_CONFIG_INITIALIZER;
    uint64_t until = pst__now() + own->deadline_ns;
    pthread_t thread;
    own->config = defaults;
    own->config.blocking = 1;
    own->config.commName = own->name;
    own->id = *id;
    own->connecting = 1;
    if (pst__thread_start(&thread, run_connect, own) != 0) {
        own->connecting = 0;
        return pst__nccl_fail(own, PST_ESYSTEM, "%s", "no thread to connect the ranks");
    }
    while (is_connecting(own) && pst__now() < until)
        nap();
    if (!is_connecting(own)) return own->connected;
    pst_status status =
        pst__nccl_fail(own, PST_ETIMEDOUT,
                       "the ranks are not all connected by the deadline of %.1f s: look for one "
                       "that does not come",
                       (double)own->deadline_ns * 1e-9);
    (void)pst__nccl_abort(own, PST_ETIMEDOUT);
    return status;
}
