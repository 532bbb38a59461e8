/* The life of workers. */
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
/* Has the thread end. It may still be woken by any thread (see pst__lane_notify), also when it has
 * ended: a worker is freed with its runtime. */
void pst__worker_stop(pst__worker *worker);
/* Joins the thread, which pst__worker_stop has ended. PST_ETIMEDOUT after the runtime's deadline:
 * it is in a task of the user's. */
pst_status pst__worker_join(pst__worker *worker);
/* Its thread was joined, or could not be started: it records no more. */
void pst__worker_end_track(pst__worker *worker);
void pst__worker_free(pst__worker *worker);

#endif
