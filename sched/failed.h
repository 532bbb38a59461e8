/* A task that failed: what is told of it. */
#ifndef PST_SCHED_FAILED_H
#define PST_SCHED_FAILED_H

#include "sched/advance.h"
#include "sched/lane.h"
#include "sched/runtime.h"

/* Before a lane does what may fail: texts from here on tell why. Relaxed: what this thread writes
 * itself is what it asks about. */
static inline void pst__note_texts(pst_lane *lane) {
    lane->texts = pst__load_relaxed(&lane->runtime->error.count);
}

/* Says that the task failed, and why. In a poisoned runtime the text of the poison stays: what
 * fails then fails because of it. */
void pst__report_failure(const pst__node *node, const pst_lane *lane, pst_status status);

/* The same, and the node ends. */
void pst__fail_node(pst__advance *advance, pst__node *node, uint64_t number, pst_status status,
                    pst__phase phase);

#endif
