/* Waiting for something that other threads or lanes bring about, and helping meanwhile. */
#ifndef PST_SCHED_WAIT_H
#define PST_SCHED_WAIT_H

#include "sched/graph.h"

/* What a thread asks about: a node in one launch of its graph. */
typedef struct pst__question {
    pst_graph *graph;
    pst__node *node;
    uint64_t number;
    int launched_suffices;
} pst__question;

/* Serves lanes until `holds` answers other than 0. PST_OK, PST_ETIMEDOUT past the runtime's
 * deadline, or the status of a poisoned runtime. `holds` must be cheap; `open`: see budget.h.
 * `waiting` says what for, to the caller's hook. */
pst_status pst__wait_until(pst_runtime *runtime, int (*holds)(const void *argument),
                           const void *argument, const uint64_t *open, pst_waiting waiting);

/* Calls the caller's hook if it is due. */
void pst__wait_call_hook(pst_runtime *runtime, pst_waiting *waiting, uint64_t waited_ns);

/* The same for what other threads are about to do, the user's callbacks at most: the caller serves
 * no lane meanwhile, and a poison does not end it. PST_OK or PST_ETIMEDOUT. */
pst_status pst__wait_aside(pst_runtime *runtime, int (*holds)(const void *argument),
                           const void *argument);

/* The state of the node in the launch asked about. A node that is in a later launch has ended in
 * this one, and only the launch's own status is still known. */
pst__task_state pst__look(const pst__question *asked, pst_status *status);

/* ---- the texts on what does not end (report.c) ------------------------------------------ */

/* The deadline of a wait has passed: both leave a text and return PST_ETIMEDOUT. */
pst_status pst__report_timeout(const pst__question *asked);
pst_status pst__report_launch_timeout(const pst_launch *launch);

/* The runtime could not be destroyed: the text names the lanes whose threads have not come back.
 * Returns PST_ETIMEDOUT. */
pst_status pst__report_left_behind(pst_runtime *runtime);

#define PST__REPORT_BYTES 896

/* The watchdog's text on the lane's oldest launched task; the caller owns the lane. */
void pst__report_overdue(const pst_lane *lane, const pst__node *oldest, char *text, size_t size);
/* The same on a lane whose owner has not come back from a task. */
void pst__report_stuck_thread(const pst_lane *lane, char *text, size_t size);

#endif
