/* The communicator's life. NCCL's own ending can block for as long as other kernels of the device
 * run, or CUDA graphs exist that its calls were captured into, so it happens on a thread of its
 * own, for an abort and for destroy alike. */
#include "ops/comm/nccl/nccl.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "base/options.h"
#include "ops/comm/exchange.h"
#include "sched/cuda/cuda.h"
#include "sched/runtime.h"
#include "sched/thread.h"

#include <sched.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

#define DEFAULT_DEADLINE_NS 600000000000u
/* How long an abort gives a thread that is in a call of NCCL which blocks. */
#define BLOCKED_NS 1000000000u
/* How long destroy waits for the peers to finish what is in flight. */
#define FINALIZE_NS 30000000000u
/* How long it waits for the peers to compare what they have started. */
#define AUDIT_NS 1000000000u
#define NAP_NS   50000

/* ---- the gate -------------------------------------------------------------------------------- */

/* One word says whether it is closed and how many are inside, so closing it and entering it cannot
 * miss each other. */

pst_status pst__nccl_enter(pst__nccl *own) {
    /* Acquire: the handle is seen as create has left it. Release pairs with wait_empty. */
    uint32_t before = pst__add_acq_rel(&own->gate, 1);
    if ((before & PST__NCCL_CLOSED) == 0) return PST_OK;
    pst__nccl_leave(own);
    pst_status status = pst__failure_status(&own->failure);
    return status != PST_OK ? status : PST_ECANCELED;
}

void pst__nccl_leave(pst__nccl *own) {
    (void)pst__sub_acq_rel(&own->gate,
                           1); /* pairs with the load in wait_empty: our calls have ended */
}

int pst__nccl_is_closed(pst__nccl *own) {
    return (pst__load_relaxed(&own->gate) & PST__NCCL_CLOSED) != 0; /* a hint: only ends a loop */
}

/* 1 when this call has closed it: nobody enters any more. */
static int close_gate(pst__nccl *own) {
    uint32_t before = pst__load_relaxed(&own->gate); /* the cas below checks it */
    do {
        if ((before & PST__NCCL_CLOSED) != 0) return 0;
        /* Acquire and release: pairs with the add in enter, which sees it closed from here on. */
    } while (!pst__cas_acq_rel(&own->gate, &before, before | PST__NCCL_CLOSED));
    return 1;
}

/* Waits until nobody is inside a closed gate, at most `nanoseconds`. */
static void wait_empty(pst__nccl *own, uint64_t nanoseconds) {
    uint64_t until = pst__now() + nanoseconds;
    while (pst__load_acquire(&own->gate) != PST__NCCL_CLOSED && pst__now() < until)
        (void)sched_yield(); /* acquire pairs with the release in leave */
}

/* ---- errors ---------------------------------------------------------------------------------- */

pst_status pst__nccl_fail(pst__nccl *own, pst_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const int is_first = pst__failure_set(&own->failure, status, format, arguments);
    va_end(arguments);
    if (!is_first) return pst__failure_status(&own->failure);
    return pst__fail(pst__runtime_error(own->runtime), status, "%s", own->failure.text);
}

pst_status pst__nccl_answer(pst__nccl *own, ncclResult_t result, const char *call,
                            const char *what) {
    if (result == ncclSuccess) return PST_OK;
    const char *detail = own->library.ncclGetLastError(own->handle);
    return pst__nccl_fail(own, pst__nccl_status_of(result),
                          "%s for %s failed: %s: %s (NCCL_DEBUG=WARN in the environment says more)",
                          call, what, own->library.ncclGetErrorString(result),
                          detail == NULL || *detail == '\0' ? "no details" : detail);
}

static pst__nccl *nccl_of(pst_comm *comm) {
    return comm->context;
}

/* ---- ending ---------------------------------------------------------------------------------- */

static uint64_t end_deadline(const pst__nccl *own) {
    return own->deadline_ns < FINALIZE_NS ? own->deadline_ns : FINALIZE_NS;
}

/* pst__nccl.end: the thread that ends NCCL and destroy agree on who comes first. When the thread
 * has been left, runtime and device may be gone. */
enum { ENDING = 0, ENDED, LEFT };

/* 1 if it was not the other one. Release: what this thread did is seen by who finds it; acquire
 * only because it is one operation for both. */
static int decide(pst__nccl *own, int end) {
    int ending = ENDING;
    return pst__cas_acq_rel(&own->end, &ending, end);
}

/* NCCL has freed what it had, or says that it has not. */
static void note_ended(pst__nccl *own) {
    if (own->end_result == ncclSuccess) return;
    pst__log(pst__runtime_error(own->runtime), PST_LOG_WARNING,
             "rank %d, communicator '%s': %s failed: %s; its memory may stay with NCCL",
             own->comm.rank, own->name, own->aborts ? "ncclCommAbort" : "ncclCommDestroy",
             own->library.ncclGetErrorString(own->end_result));
}

/* An abort first of all has kernels end that run. */
static void end_nccl(pst__nccl *own) {
    /* NCCL writes it early in ncclCommInitRankConfig, which may block just now: so not read
     * plainly, although the other side is NCCL's plain store. */
    ncclComm_t handle = pst__load_acquire(&own->handle);
    if (handle == NULL) return;
    if (!own->aborts) own->aborts = own->library.ncclCommFinalize(handle) != ncclSuccess;
    own->end_result =
        own->aborts ? own->library.ncclCommAbort(handle) : own->library.ncclCommDestroy(handle);
}

static void *run_end(void *argument) {
    pst__nccl *own = argument;
    CUcontext previous = NULL;
    (void)pthread_detach(pthread_self());
    /* Who is inside leaves as soon as NCCL answers, which may be never, if NCCL blocks: then
     * ncclCommAbort is what ends that call too. */
    wait_empty(own, BLOCKED_NS);
    (void)pst__cuda_enter(pst__cuda_of(own->device), &previous); /* until the thread ends */
    end_nccl(own);
    (void)decide(own, ENDED); /* the last look at `own` */
    return NULL;
}

/* 1 when nothing of NCCL touches memory any more, and no thread `own`. */
static int has_ended(pst__nccl *own) {
    /* Acquire: pairs with what run_end decides, and with the store of the connecting thread. */
    return pst__load_acquire(&own->end) == ENDED && !pst__load_acquire(&own->connecting);
}

/* Called once, by whoever has closed the gate. */
static void begin_end(pst__nccl *own, int aborts) {
    pthread_t thread;
    own->aborts = aborts;
    pst__store_relaxed(&own->end_began, pst__now()); /* a time alone: nothing is ordered by it */
    if (pst__thread_start(&thread, run_end, own) == 0) return;
    pst__log(pst__runtime_error(own->runtime), PST_LOG_WARNING,
             "rank %d, communicator '%s': no thread to end NCCL; it stays", own->comm.rank,
             own->name);
}

/* No error of the runtime: whoever aborts has said why. */
static void note_abort(pst__nccl *own, pst_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)pst__failure_set(&own->failure, status, format, arguments);
    va_end(arguments);
}

pst_status pst__nccl_abort(pst__nccl *own, pst_status status) {
    if (close_gate(own)) {
        note_abort(own, status, "aborted: %s", pst_status_text(status));
        begin_end(own, 1);
    }
    return has_ended(own) ? PST_OK : PST_EBUSY;
}

static pst_status nccl_abort(pst_comm *comm, pst_status status) {
    return pst__nccl_abort(nccl_of(comm), status);
}

/* ---- the table ------------------------------------------------------------------------------- */

static size_t nccl_staging_bytes(pst_comm *comm, const pst_collective *collective) {
    return pst__nccl_staging_bytes(nccl_of(comm), collective);
}

static pst_status look_at_audit(pst__nccl *own) {
    char text[PST__FAILURE_TEXT];
    if (own->audit == NULL) return PST_OK;
    const pst_status status = pst__audit_look(own->audit, text, sizeof text);
    if (status == PST_EMISMATCH) return pst__nccl_fail(own, status, "%s", text);
    if (status != PST_OK)
        pst__log(pst__runtime_error(own->runtime), PST_LOG_INFO,
                 "rank %d, communicator '%s': the ranks compare no more what they start: %s",
                 own->comm.rank, own->name, text);
    return PST_OK;
}

pst_status pst__nccl_look(pst__nccl *own) {
    pst_status status = pst__failure_status(&own->failure);
    if (status == PST_OK) status = look_at_audit(own);
    if (status != PST_OK) return status;
    ncclResult_t state = ncclSuccess;
    ncclResult_t asked = own->library.ncclCommGetAsyncError(own->handle, &state);
    if (asked != ncclSuccess) state = asked;
    return pst__nccl_answer(own, state, "ncclCommGetAsyncError", "what is in flight");
}

static pst_status nccl_start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                             void **request) {
    pst__nccl *own = nccl_of(comm);
    *request = NULL;
    pst_status status = pst__nccl_enter(own);
    if (status != PST_OK) return status;
    status = pst__nccl_look(own);
    if (status == PST_OK && own->audit != NULL) pst__audit_note(own->audit, collective);
    if (status == PST_OK) status = pst__nccl_enqueue(own, collective, stream);
    pst__nccl_leave(own);
    return status;
}

/* Not called: the device's events show when a collective has ended. */
static pst_status nccl_test(pst_comm *comm, void *request) {
    (void)request;
    return pst__failure_status(&nccl_of(comm)->failure);
}

static pst_status nccl_status(pst_comm *comm) {
    pst__nccl *own = nccl_of(comm);
    pst_status status = pst__nccl_enter(own);
    if (status != PST_OK) return status;
    status = pst__nccl_look(own);
    pst__nccl_leave(own);
    return status;
}

static const char *nccl_error_text(pst_comm *comm) {
    return pst__failure_text(&nccl_of(comm)->failure);
}

static void nccl_free(pst__nccl *own) {
    const pst__heap *heap = pst__runtime_heap(own->runtime);
    pst__nccl_close_trial(own);
    pst__audit_close(own->audit);
    pst__heap_free(heap, own->sources, (size_t)own->comm.size * sizeof *own->sources);
    pst__heap_free_text(heap, own->name);
    pst__heap_free(heap, own, sizeof *own);
}

/* The peers are about to destroy it, too, and compare what they have started. */
static void finish_audit(pst__nccl *own) {
    const uint64_t until = pst__now() + AUDIT_NS;
    while (own->audit != NULL && nccl_status(&own->comm) == PST_OK &&
           !pst__audit_is_done(own->audit) && pst__now() < until)
        (void)nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

/* Time for a call that blocks, to finalize, and to abort, since that has begun: so several
 * communicators are not waited for one after the other. */
static void wait_ended(pst__nccl *own) {
    const uint64_t now = pst__now(), began = pst__load_relaxed(&own->end_began); /* see begin_end */
    uint64_t until = (began == 0 ? now : began) + BLOCKED_NS + 2 * end_deadline(own);
    if (until < now + BLOCKED_NS) until = now + BLOCKED_NS;
    while (!has_ended(own) && pst__now() < until)
        (void)nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

static void nccl_destroy(pst_comm *comm) {
    pst__nccl *own = nccl_of(comm);
    finish_audit(own);
    if (close_gate(own)) /* after an error NCCL would wait for ever */
        begin_end(own, pst__failure_status(&own->failure) != PST_OK);
    wait_ended(own);
    if (!has_ended(own) && (decide(own, LEFT) || !has_ended(own))) { /* its threads need it */
        pst__log(pst__runtime_error(own->runtime), PST_LOG_WARNING,
                 "rank %d, communicator '%s': NCCL does not end; its memory stays. It waits for "
                 "CUDA graphs with its collectives, which are to be destroyed before, or for ranks "
                 "that have not ended theirs",
                 comm->rank, own->name);
        return;
    }
    note_ended(own);
    nccl_free(own);
}

static const pst_comm_ops nccl_ops = {
    .api_version = PST_COMM_API_VERSION,
    .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1u,
    .name = "nccl",
    .staging_bytes = nccl_staging_bytes,
    .start = nccl_start,
    .test = nccl_test,
    .abort = nccl_abort,
    .status = nccl_status,
    .error_text = nccl_error_text,
    .destroy = nccl_destroy,
};

/* ---- creating -------------------------------------------------------------------------------- */

static pst_status check_arguments(pst__error *error, const pst_device *device,
                                  const pst_exchange *exchange, const pst_nccl_options *options) {
    if (options->size == 0)
        return pst__fail(error, PST_EINVAL, "communicator nccl: options->size is not set");
    if (strcmp(device->ops->name, "cuda") != 0)
        return pst__fail(error, PST_EINVAL, "communicator nccl: device '%s' is not cuda",
                         device->ops->name);
    const pst_comm *host = options->verify_over;
    if (host != NULL && (host->size != exchange->size || host->rank != exchange->rank))
        return pst__fail(
            error, PST_EINVAL,
            "communicator nccl: verify_over has rank %d of %d, the exchange rank %d of "
            "%d",
            host->rank, host->size, exchange->rank, exchange->size);
    return PST_OK;
}

static uint64_t deadline_of(pst_runtime *runtime, const pst_nccl_options *options) {
    uint64_t deadline = options->deadline_ns;
    if (deadline == 0) deadline = pst__runtime_deadline(runtime);
    return deadline == 0 ? DEFAULT_DEADLINE_NS : deadline;
}

static pst_status allocate(pst_runtime *runtime, pst_device *device, const pst_exchange *exchange,
                           const pst_nccl_options *options, pst__nccl **out) {
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst__nccl *own = pst__heap_alloc(heap, sizeof *own);
    *out = own;
    if (own == NULL) return PST_ENOMEM;
    own->comm = (pst_comm){&nccl_ops, own, exchange->rank, exchange->size};
    own->runtime = runtime;
    own->device = device;
    own->deadline_ns = deadline_of(runtime, options);
    own->name = pst__heap_text(heap, options->name == NULL ? "nccl" : options->name);
    pst__failure_init(&own->failure, exchange->rank, "communicator ",
                      own->name == NULL ? "nccl" : own->name);
    own->sources = pst__heap_alloc(heap, (size_t)exchange->size * sizeof *own->sources);
    const int is_audited = options->verify_over != NULL && exchange->size > 1;
    if (is_audited) own->audit = pst__audit_open(heap, options->verify_over);
    return own->name == NULL || own->sources == NULL || (is_audited && own->audit == NULL)
               ? PST_ENOMEM
               : PST_OK;
}

/* What a rank can do alone; rank 0 also names the communicator. */
static pst_status prepare(pst__nccl *own, const char *path, ncclUniqueId *id) {
    pst__error *error = pst__runtime_error(own->runtime);
    pst_status status = pst__nccl_library_open(&own->library, path, error);
    if (status != PST_OK || own->comm.rank != 0) return status;
    return pst__nccl_answer(own, own->library.ncclGetUniqueId(id), "ncclGetUniqueId",
                            "the communicator");
}

static pst_status agree(const pst__meeting_place *place, const pst__nccl *own,
                        const pst_nccl_options *options) {
    pst_status status =
        pst__exchange_agree(place, "version of NCCL", (uint64_t)own->library.version);
    if (status != PST_OK) return status;
    return pst__exchange_agree(place, "options", options->verify_over != NULL);
}

static void log_made(pst__nccl *own) {
    int version = own->library.version;
    pst__log(pst__runtime_error(own->runtime), PST_LOG_INFO,
             "rank %d, communicator '%s': NCCL %d.%d.%d, %d ranks", own->comm.rank, own->name,
             version / 10000, version / 100 % 100, version % 100, own->comm.size);
}

/* After a failure on any rank. */
static void discard(pst__nccl *own) {
    if (own == NULL) return;
    const int is_entered = pst__load_acquire(&own->connecting) || pst__nccl_is_closed(own);
    if (!is_entered && own->handle == NULL) { /* see has_ended */
        nccl_free(own);
        return;
    }
    (void)nccl_abort(&own->comm, PST_ECANCELED);
    nccl_destroy(&own->comm);
}

pst_status pst_nccl_comm_create(pst_runtime *runtime, pst_device *device,
                                const pst_exchange *exchange, const pst_nccl_options *given,
                                pst_comm **comm) {
    pst_nccl_options options;
    pst__read_optional(&options, sizeof options, given);
    *comm = NULL;
    pst__error *error = pst__runtime_error(runtime);
    pst__meeting_place place;
    pst_status status = pst__exchange_begin(runtime, exchange, "communicator nccl", &place);
    if (status == PST_OK) status = check_arguments(error, device, exchange, &options);
    if (status != PST_OK) return status;
    pst__nccl *own = NULL;
    ncclUniqueId id = {{0}};
    status = allocate(runtime, device, exchange, &options, &own);
    if (status == PST_OK) status = prepare(own, options.library, &id);
    status = pst__exchange_settle(&place, status);
    if (status == PST_OK) status = agree(&place, own, &options);
    if (status == PST_OK) status = pst__exchange_broadcast(&place, 0, &id, sizeof id);
    if (status == PST_OK) {
        status = pst__nccl_connect(own, &id);
        status = pst__exchange_settle(&place, status);
    }
    if (status != PST_OK) {
        discard(own);
        return status;
    }
    log_made(own);
    *comm = &own->comm;
    return PST_OK;
}
