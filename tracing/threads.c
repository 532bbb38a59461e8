/* Tracks that threads make for themselves. Nobody tells the trace when such a thread ends: it would
 * have to be the destructor of the key, which runs on the ending thread, beside another that may be
 * destroying the trace. So whoever makes a track looks for those whose threads are gone. */
#include "tracing/track.h"

#include "base/clock.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

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
        (void)pst__load_acquire(&track->ring.head);
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
    /* Relaxed: a number to show; partner: pst__trace_get_stats. */
    if (track == NULL) (void)pst__add_relaxed(&trace->lost, 1);
    return track;
}

pst_status pst__track_bind(pst__track *track) {
    pst__trace *trace = track->trace;
    if (pthread_setspecific(trace->key, track) == 0) return PST_OK;
    return pst__fail(trace->error, PST_ENOMEM,
                     "rank %d: no memory to make the trace track %s a thread's own", trace->rank,
                     track->name);
}
