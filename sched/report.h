/* The texts on what does not end. They name the task that does not, and the one that all others
 * wait for. */
#ifndef PST_SCHED_REPORT_H
#define PST_SCHED_REPORT_H

#include "sched/graph.h"

/* The deadline of a wait has passed: both leave a text and return PST_ETIMEDOUT. */
pst_status pst__report_timeout(const pst__question *asked);
pst_status pst__report_launch_timeout(const pst_launch *launch);

/* The runtime could not be destroyed: the text names the lanes whose threads have not come back.
 * Returns PST_ETIMEDOUT. */
pst_status pst__report_left_behind(pst_runtime *runtime);

/* The lane's name, and its last launch of a task that has a name, if it has not gone. Any thread
 * that owns no lane. */
void pst__report_last_launch(const pst_lane *lane, pst_recent *found);

/* What the question's task waits for, in words; without a node, what the first task of that launch
 * waits for that has not ended. Text of at most PST__CAUSE_BYTES; "" where all have ended. */
#define PST__CAUSE_BYTES 512
void pst__report_cause(const pst__question *asked, char *text);

#define PST__REPORT_BYTES 896

/* The watchdog's text on the lane's oldest launched task; the caller owns the lane. */
void pst__report_overdue(const pst_lane *lane, const pst__node *oldest, char *text, size_t size);
/* The same on a lane whose owner has not come back from a task. */
void pst__report_stuck_thread(const pst_lane *lane, char *text, size_t size);

#endif
