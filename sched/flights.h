/* Tasks in flight: the device has them, and is asked when they are done. For the lane's owner. */
#ifndef PST_SCHED_FLIGHTS_H
#define PST_SCHED_FLIGHTS_H

#include "sched/advance.h"

/* The device has the node, whose event is recorded if it has one. */
void pst__flights_add(pst_lane *lane, pst__node *node);

/* The last tasks in flight have no event of their own: records one for all of them. For when
 * nothing can be launched behind them for now. */
void pst__flights_mark_tail(pst__advance *advance);

/* Ends what is done, from the oldest on. 1 when anything was. */
int pst__flights_end(pst__advance *advance);

/* The same between launches, with one question: about the task that was the newest at the last one.
 * So the tasks in flight are at most those that the device has not done and two rounds of launches.
 */
int pst__flights_end_marked(pst__advance *advance);

/* After a poison launched work is given some time to end, and then abandoned. */
int pst__is_abandoned(const pst_runtime *runtime);

#endif
