/* The tracks of a trace: their lives, those that threads make for themselves, what is recorded. */
#include "base/clock.h"
#include "tracing/state.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

/* ---- their lives -------------------------------------------------------------------------- */

pst_status pst__track_prepare(pst__track *track, pst__tape_kind kind) {
    pst__trace *trace = track->trace;
    const uint64_t capacity = trace->tapes[kind].capacity;
    if (pst__ring_exists(&track->rings[kind])) return PST_OK;
    pst_status status = pst__ring_create(&trace->heap, &track->rings[kind], capacity);
    if (status == PST_OK) return PST_OK;
    return pst__fail(trace->error, status,
                     "rank %d: no memory for the trace of track %s (%llu records); record fewer",
                     trace->rank, track->name, (unsigned long long)capacity);
}

void pst__track_take(pst__track *track, pst__tape_kind kind) {
    /* Partner: the acquire in push. */
    if (pst__ring_exists(&track->rings[kind]))
        pst__store_release(&track->ring, &track->rings[kind]);
}

/* On all tapes that run, and takes the one that is to be written. */
static pst_status prepare_all(pst__track *track) {
    const pst__trace *trace = track->trace;
    pst_status status = PST_OK;
    if (trace->tapes[PST__TAPE_FLIGHT].capacity != 0)
        status = pst__track_prepare(track, PST__TAPE_FLIGHT);
    if (status == PST_OK && pst__trace_on(trace))
        status = pst__track_prepare(track, PST__TAPE_RECORDING);
    pst__track_take(track, PST__TAPE_FLIGHT);
    pst__track_take(track, PST__TAPE_RECORDING);
    return status;
}

void pst__track_free(pst__track *track) {
    const pst__heap *heap = &track->trace->heap;
    for (unsigned kind = 0; kind < PST__TAPES; ++kind)
        pst__ring_destroy(heap, &track->rings[kind]);
    pst__heap_free_text(heap, track->name);
    pst__heap_free(heap, track, sizeof *track);
}

pst__track *pst__track_add(pst__trace *trace, pst__track_kind kind, const char *name) {
    pst__track *track = pst__heap_alloc(&trace->heap, sizeof *track);
    if (track == NULL) goto no_memory;
    track->trace = trace;
    track->kind = kind;
    track->name = pst__heap_text(&trace->heap, name);
    if (track->name == NULL) goto no_memory;
    if (prepare_all(track) != PST_OK) goto fail;
    pst__track **link = &trace->tracks;
    while (*link != NULL)
        link = &(*link)->next;
    *link = track;
    track->index = ++trace->track_count;
    return track;

no_memory:
    (void)pst__fail(trace->error, PST_ENOMEM, "rank %d: no memory for the trace track %s",
                    trace->rank, name);
fail:
    if (track != NULL) pst__track_free(track);
    return NULL;
}

void pst__track_remove(pst__track *track) {
    pst__track **link = &track->trace->tracks;
    while (*link != track)
        link = &(*link)->next;
    *link = track->next;
    for (unsigned kind = 0; kind < PST__TAPES; ++kind)
        pst__past_keep(track, kind);
    pst__track_free(track);
}

pst_status pst__track_create(pst__trace *trace, pst__track_kind kind, const char *name,
                             pst__track **track) {
    (void)pthread_mutex_lock(&trace->lock);
    *track = pst__track_add(trace, kind, name);
    (void)pthread_mutex_unlock(&trace->lock);
    return *track == NULL ? PST_ENOMEM : PST_OK;
}

void pst__track_end(pst__track *track) {
    if (track == NULL) return;
    pst__trace *trace = track->trace;
    (void)pthread_mutex_lock(&trace->lock);
    pst__track_remove(track);
    (void)pthread_mutex_unlock(&trace->lock);
}

/* ---- tracks of threads --------------------------------------------------------------------
 *
 * Nobody tells the trace when a thread ends that has made a track for itself: it would
 * have to be the destructor of the key, which runs on the ending thread, beside another that may be
 * destroying the trace. So whoever makes a track looks for those whose threads are gone. */

/* A look asks the kernel for each of the threads: while all are there, no record asks it again. */
#define LOOK_AGAIN_NS 1000000u

static int has_ended(const pst__track *track, pid_t caller) {
    if (track->thread == 0) return 0;
    if (track->thread == caller) return 1; /* the number of an ended thread, given out again */
    return tgkill(getpid(), track->thread, 0) != 0 && errno == ESRCH;
}

void pst__threads_reap(pst__trace *trace, pid_t caller) {
    for (pst__track *track = trace->tracks, *next; track != NULL; track = next) {
        next = track->next;
        if (!has_ended(track, caller)) continue;
        /* Acquire, partners: the releases in pst__ring_push and of the marks. One of them was the
         * last that the thread did to its track, so that all it did comes before the removal. */
        for (unsigned kind = 0; kind < PST__TAPES; ++kind)
            (void)pst__load_acquire(&track->rings[kind].head);
        (void)pst__load_acquire(&track->depth);
        pst__track_remove(track);
        trace->thread_count--;
    }
}

static pst__track *make_locked(pst__trace *trace, const char *name, pid_t caller) {
    pst__threads_reap(trace, caller);
    if (trace->thread_count == PST__TRACE_THREADS_MAX) return NULL;
    pst__track *track = pst__track_add(trace, PST__TRACK_WORKER, name);
    if (track == NULL) return NULL;
    if (pthread_setspecific(trace->key, track) != 0) {
        pst__track_remove(track);
        return NULL;
    }
    track->thread = caller;
    trace->thread_count++;
    return track;
}

static pst__track *make(pst__trace *trace) {
    const pid_t caller = gettid();
    char thread[16] = "thread", name[48];
    (void)pthread_getname_np(pthread_self(), thread, sizeof thread);
    (void)snprintf(name, sizeof name, "%s (%ld)", thread, (long)caller);
    (void)pthread_mutex_lock(&trace->lock);
    pst__track *track = make_locked(trace, name, caller);
    /* Relaxed: who finds it old looks once more, or loses a record that it need not have lost. */
    if (track == NULL) pst__store_relaxed(&trace->full_until, pst__now() + LOOK_AGAIN_NS);
    (void)pthread_mutex_unlock(&trace->lock);
    return track;
}

pst__track *pst__track_of_thread_if_any(pst__trace *trace) {
    return pthread_getspecific(trace->key);
}

pst__track *pst__track_of_thread(pst__trace *trace) {
    pst__track *track = pst__track_of_thread_if_any(trace);
    if (track != NULL) return track;
    if (pst__now() >= pst__load_relaxed(&trace->full_until)) track = make(trace);
    /* Relaxed: a number to show; partner: pst__tape_count. */
    if (track == NULL) {
        const int is_on = pst__trace_on(trace);
        const pst__tape_kind kind = is_on ? PST__TAPE_RECORDING : PST__TAPE_FLIGHT;
        (void)pst__add_relaxed(&trace->tapes[kind].lost, 1);
    }
    return track;
}

pst_status pst__track_bind(pst__track *track) {
    pst__trace *trace = track->trace;
    if (pthread_setspecific(trace->key, track) == 0) return PST_OK;
    return pst__fail(trace->error, PST_ENOMEM,
                     "rank %d: no memory to make the trace track %s a thread's own", trace->rank,
                     track->name);
}

/* ---- recording ---------------------------------------------------------------------------- */

/* Acquire, partner: the release in pst__track_take; who sees the ring sees its memory.
 * Without a ring: the caller looked at pst__trace_on, then the trace was stopped, then the track
 * was made. Nobody misses that record, and whoever removes the track comes behind the look at it:
 * release, partner: the acquire of `depth` in pst__threads_reap. */
static inline void push(pst__track *track, const pst__record *record) {
    if (track == NULL) return;
    pst__ring *ring = pst__load_acquire(&track->ring);
    if (ring != NULL)
        pst__ring_push(ring, record);
    else
        pst__store_release(&track->depth, track->depth);
}

void pst__trace_slice(pst__track *track, const char *name, uint64_t begin, uint64_t end,
                      uint64_t ticket, uint64_t bytes) {
    pst__trace_collective(track, name, NULL, begin, end, ticket, bytes);
}

void pst__trace_collective(pst__track *track, const char *name, const char *path, uint64_t begin,
                           uint64_t end, uint64_t ticket, uint64_t bytes) {
    push(track, &(pst__record){name, path, begin, end, ticket, bytes, PST__RECORD_SLICE});
}

void pst__trace_flow(pst__track *track, uint64_t id, uint64_t time, int is_end) {
    uint64_t kind = is_end ? PST__RECORD_FLOW_END : PST__RECORD_FLOW_START;
    push(track, &(pst__record){"", NULL, time, time, id, 0, kind});
}

void pst__trace_count(pst__track *track, const char *name, uint64_t time, int64_t value) {
    push(track, &(pst__record){name, NULL, time, time, 0, (uint64_t)value, PST__RECORD_COUNT});
}

/* ---- marks: `depth` is stored with release; partner: the acquire in pst__threads_reap ------- */

/* Marks left open by an earlier recording are forgotten. */
static void begin_session(pst__track *track) {
    /* Relaxed: the caller's acquire in pst__trace_on came first. */
    uint64_t session = pst__load_relaxed(&track->trace->session);
    if (track->mark_session == session) return;
    track->mark_session = session;
    pst__store_release(&track->depth, 0u);
}

void pst__trace_mark_begin(pst__track *track, const char *name) {
    if (track == NULL) return;
    begin_session(track);
    if (track->depth < PST__TRACE_MARKS_MAX)
        track->marks[track->depth] = (pst__mark){name, pst__now()};
    pst__store_release(&track->depth, track->depth + 1);
}

void pst__trace_mark_end(pst__track *track) {
    if (track == NULL) return;
    begin_session(track);
    if (track->depth == 0) return;
    const unsigned depth = track->depth - 1;
    pst__store_release(&track->depth, depth);
    if (depth >= PST__TRACE_MARKS_MAX) return;
    const pst__mark *mark = &track->marks[depth];
    pst__trace_slice(track, mark->name, mark->begin, pst__now(), 0, 0);
}
