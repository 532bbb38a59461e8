/* What the scheduler tells the trace: lane slices, worker slices, edges between lanes. */
#ifndef PST_SCHED_TRACE_HOOKS_H
#define PST_SCHED_TRACE_HOOKS_H

#include "base/clock.h"
#include "sched/growing.h"

/* Now, or 0 when nothing is recorded: the one branch that tracing costs when it is off. */
static inline uint64_t pst__hook_begin(const pst_lane *lane) {
    return pst__trace_on(lane->runtime->trace) ? pst__now() : 0;
}

/* The calling thread has launched the node: a slice on the thread's track from `begin` to now, and
 * the ends of the edges that lead to it from other lanes. Returns now: reading the clock is most of
 * what an event costs. */
uint64_t pst__hook_launched(pst_lane *lane, const pst__node *node, uint64_t number, uint64_t begin);

/* The node is done: a slice on the lane's track from `begin` to `end`. */
void pst__hook_done(pst_lane *lane, const pst__node *node, uint64_t begin, uint64_t end);

/* A growing task releases a successor on another lane: begins an arrow at the task's launch. The
 * lane's owner calls it. Returns the arrow's id for the other end; 0: none. */
uint64_t pst__hook_edge(pst_lane *lane, const pst__node *from, const pst__node *to);

#endif
