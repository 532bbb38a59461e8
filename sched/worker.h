/* A worker's life: the thread that serves one lane or several. */
#ifndef PST_SCHED_WORKER_H
#define PST_SCHED_WORKER_H

#include "sched/lane.h"

/* Starts a worker for a lane: a new one (*worker is NULL), which has no lane yet, or one whose
 * thread was joined. `name` is the lane's, for errors and the trace. PST_ENOMEM, PST_ESYSTEM, with
 * a text.
 */
pst_status pst__worker_start(pst_runtime *runtime, const char *name, pst__worker **worker);
/* Puts a lane under a worker. The caller holds the runtime's lock. */
void pst__worker_adopt(pst__worker *worker, pst_lane *lane);
/* Its thread was joined, or could not be started: it records no more. */
void pst__worker_end_track(pst__worker *worker);
/* With its runtime: see pst__loop_stop. */
void pst__worker_free(pst__worker *worker);

#endif
