/* A lane's turn. Lanes with one order are owned and served together: a turn launches the head of
 * their leader's queue on the head's own lane, and nothing before it. */
#ifndef PST_SCHED_TURN_H
#define PST_SCHED_TURN_H

#include "sched/lane.h"

/* One turn of the lane, which the caller owns, and of its followers: arrivals, completions, then
 * launches within the budget. Never blocks. 1 when something was done: then the caller takes
 * another turn at once, or wakes those who wait. */
int pst__lane_turn(pst_lane *lane, const pst__budget *budget);

#endif
