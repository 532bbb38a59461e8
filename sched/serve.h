/* What a lane's turn does on its stream: what can be launched, what the device has, and when it is
 * done. */
#ifndef PST_SCHED_SERVE_H
#define PST_SCHED_SERVE_H

#include "sched/lane.h"

/* For the lane's owner. Ends what is done on the stream, then launches on it at most `most` tasks
 * from the head of `queue`, the lane itself or its leader, until the budget is spent or the head
 * has to wait. 1 when something was done. */
int pst__lane_serve(pst_lane *lane, pst_lane *queue, pst__spending *spending, uint32_t most);

#endif
