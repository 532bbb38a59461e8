#include "tracing/track.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NO_NAME ""

pst_status pst__track_prepare(pst__track *track) {
    pst__trace *trace = track->trace;
    if (pst__ring_exists(&track->ring)) return PST_OK;
    pst_status status = pst__ring_create(&trace->heap, &track->ring, trace->capacity);
    if (status == PST_OK) return PST_OK;
    return pst__fail(trace->error, status,
                     "rank %d: no memory for the trace of track %s (%llu records); record fewer",
                     trace->rank, track->name, (unsigned long long)trace->capacity);
}

void pst__track_destroy(pst__track *track) {
    const pst__heap *heap = &track->trace->heap;
    pst__ring_destroy(heap, &track->ring);
    pst__heap_free_text(heap, track->name);
    pst__heap_free(heap, track, sizeof *track);
}

static pst__track *make_track(pst__trace *trace, pst__track_kind kind, const char *name) {
    pst__track *track = pst__heap_alloc(&trace->heap, sizeof *track);
    if (track == NULL) goto no_memory;
    track->trace = trace;
    track->kind = kind;
    track->name = pst__heap_text(&trace->heap, name);
    if (track->name != NULL) return track;
    pst__heap_free(&trace->heap, track, sizeof *track);

no_memory:
    (void)pst__fail(trace->error, PST_ENOMEM, "rank %d: no memory for the trace track %s",
                    trace->rank, name);
    return NULL;
}

/* The lock is held, so that the track has its ring if the trace starts now or has started. */
static pst_status publish_locked(pst__trace *trace, pst__track *track) {
    if (trace->recording) {
        pst_status status = pst__track_prepare(track);
        if (status != PST_OK) return status;
    }
    track->index = ++trace->track_count;
    track->next = trace->tracks;
    /* Partner: the acquire in pst__trace_tracks, which sees the track complete. */
    pst__store_release(&trace->tracks, track);
    return PST_OK;
}

static pst_status publish(pst__trace *trace, pst__track *track) {
    (void)pthread_mutex_lock(&trace->lock);
    pst_status status = publish_locked(trace, track);
    (void)pthread_mutex_unlock(&trace->lock);
    return status;
}

pst_status pst__track_create(pst__trace *trace, pst__track_kind kind, const char *name,
                             pst__track **track) {
    *track = NULL;
    pst__track *made = make_track(trace, kind, name);
    if (made == NULL) return PST_ENOMEM;
    pst_status status = publish(trace, made);
    if (status != PST_OK) {
        pst__track_destroy(made);
        return status;
    }
    *track = made;
    return PST_OK;
}

pst_status pst__track_bind(pst__track *track) {
    pst__trace *trace = track->trace;
    if (pthread_setspecific(trace->key, track) == 0) return PST_OK;
    return pst__fail(trace->error, PST_ENOMEM,
                     "rank %d: no memory to make the trace track %s a thread's own", trace->rank,
                     track->name);
}

/* One of the places for thread tracks; kept even if the track then cannot be made. */
static int take_thread_place(pst__trace *trace) {
    /* Relaxed: a bound, nothing is read through it. The compare keeps it from ever wrapping. */
    unsigned taken = pst__load_relaxed(&trace->thread_count);
    return taken < PST__TRACE_THREADS_MAX &&
           pst__add_relaxed(&trace->thread_count, 1u) < PST__TRACE_THREADS_MAX;
}

static pst__track *make_thread_track(pst__trace *trace) {
    if (!take_thread_place(trace)) return NULL;
    char thread[16] = "thread", name[48];
    (void)pthread_getname_np(pthread_self(), thread, sizeof thread);
    (void)snprintf(name, sizeof name, "%s (%ld)", thread, (long)gettid());
    pst__track *track = make_track(trace, PST__TRACK_WORKER, name);
    if (track == NULL) return NULL;
    if (pthread_setspecific(trace->key, track) == 0) {
        if (publish(trace, track) == PST_OK) return track;
        (void)pthread_setspecific(trace->key, NULL);
    }
    pst__track_destroy(track);
    return NULL;
}

pst__track *pst__track_of_thread(pst__trace *trace) {
    pst__track *track = pthread_getspecific(trace->key);
    if (track != NULL) return track;
    track = make_thread_track(trace);
    /* Relaxed: a number to show; partner: pst__trace_get_stats. */
    if (track == NULL) (void)pst__add_relaxed(&trace->lost, 1);
    return track;
}

/* Without a ring: the caller looked at pst__trace_on, then the trace was stopped, then the track
 * was made. Nobody misses that record. */
static inline void push(pst__track *track, const pst__record *record) {
    if (track == NULL || !pst__ring_exists(&track->ring)) return;
    pst__ring_push(&track->ring, record);
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
    push(track, &(pst__record){NO_NAME, NULL, time, time, id, 0, kind});
}

void pst__trace_count(pst__track *track, const char *name, uint64_t time, int64_t value) {
    push(track, &(pst__record){name, NULL, time, time, 0, (uint64_t)value, PST__RECORD_COUNT});
}

/* Marks left open by an earlier recording are forgotten. */
static void begin_session(pst__track *track) {
    /* Relaxed: the caller's acquire in pst__trace_on came first. */
    uint64_t session = pst__load_relaxed(&track->trace->session);
    if (track->mark_session == session) return;
    track->mark_session = session;
    track->depth = 0;
}

void pst__trace_mark_begin(pst__track *track, const char *name) {
    if (track == NULL) return;
    begin_session(track);
    if (track->depth < PST__TRACE_MARKS_MAX)
        track->marks[track->depth] = (pst__mark){name, pst__now()};
    ++track->depth;
}

void pst__trace_mark_end(pst__track *track) {
    if (track == NULL) return;
    begin_session(track);
    if (track->depth == 0) return;
    if (--track->depth >= PST__TRACE_MARKS_MAX) return;
    const pst__mark *mark = &track->marks[track->depth];
    pst__trace_slice(track, mark->name, mark->begin, pst__now(), 0, 0);
}
