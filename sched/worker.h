/* A worker: the thread that serves one lane or several. */
#ifndef PST_SCHED_WORKER_H
#define PST_SCHED_WORKER_H

#include "sched/lane.h"

#include <pthread.h>

struct pst__worker {
    pst_runtime *runtime;
    pst__worker *next;
    pst_lane *lanes; /* newest first; lanes are only added */
    pst__track *track;
    uint32_t stop; /* set by pst__worker_stop, which wakes the thread */
    pthread_t thread;
    _Alignas(PST__CACHE_LINE) pst__park park; /* written by all who have something for its lanes */
};

/* Starts a worker that has no lane yet; `name` is its first lane's, for errors and the trace.
 * PST_ENOMEM, PST_ESYSTEM, with a text. */
pst_status pst__worker_create(pst_runtime *runtime, const char *name, pst__worker **worker);
/* Puts a lane under a worker. The caller holds the runtime's lock. */
void pst__worker_adopt(pst__worker *worker, pst_lane *lane);
/* Ends the thread. Until all have ended, any may still wake any other: see pst__lane_notify. */
void pst__worker_stop(pst__worker *worker);
void pst__worker_free(pst__worker *worker);

#endif
