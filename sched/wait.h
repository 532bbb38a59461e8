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
void pst__wait_tell(pst_runtime *runtime, pst_waiting *waiting, uint64_t waited_ns);

/* The same for what other threads are about to do, the user's callbacks at most: the caller serves
 * no lane meanwhile, and a poison does not end it. PST_OK or PST_ETIMEDOUT. */
pst_status pst__wait_aside(pst_runtime *runtime, int (*holds)(const void *argument),
                           const void *argument);

/* The state of the node in the launch asked about. A node that is in a later launch has ended in
 * this one, and only the launch's own status is still known. */
pst__task_state pst__look(const pst__question *asked, pst_status *status);

/* Blocks until the task is launched on its asynchronous lane, and on others until it is done. As
 * pst_task_wait, but no stream waits for it. */
pst_status pst__task_wait_launch(pst_launch launch, pst_task task);

#endif
