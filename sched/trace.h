/* What the scheduler records: lane slices, worker slices, edges between lanes; of the flight
 * record, which always runs, the lane slices of tasks that have a name, by the host's times; a task
 * that ends in its start costs one reading of the clock there, and has no length. */
#ifndef PST_SCHED_TRACE_H
#define PST_SCHED_TRACE_H

#include "base/clock.h"
#include "sched/graph.h"

/* The time when the node's launch begins, and who wants to know more of it. */
typedef struct pst__began {
    uint64_t at; /* 0: nothing is recorded of it */
    int more;    /* of PST__TRACE_ALL and PST__TRACE_SHOWN */
} pst__began;

static inline pst__began pst__hook_begin(const pst_lane *lane, const pst__node *node) {
    const int level = pst__trace_get_level(lane->runtime->trace);
    const int is_named = node->detail != NULL && node->detail->name != NULL;
    if (level == PST__TRACE_FLIGHT) return (pst__began){is_named ? pst__now() : 0, 0};
    const int wanted = is_named ? level : level & PST__TRACE_ALL;
    const int is_recorded = (wanted & (PST__TRACE_FLIGHT | PST__TRACE_ALL)) != 0;
    return (pst__began){is_recorded ? pst__now() : 0, wanted & (PST__TRACE_ALL | PST__TRACE_SHOWN)};
}

/* The node is about to be launched: where the device has times, its stream records the beginning.
 */
void pst__hook_launching(const pst_lane *lane, const pst__node *node);

/* The calling thread has launched the node: a slice on the thread's track from `begin` to now, and
 * the ends of the edges that lead to it from other lanes. Returns now: reading the clock is most of
 * what an event costs. */
uint64_t pst__hook_launched(pst_lane *lane, const pst__node *node, uint64_t number, uint64_t begin);

/* The launch has failed: there will be no end of it. */
void pst__hook_failed(const pst_lane *lane, const pst__node *node);

/* The node is done: a slice on the lane's track from `begin` to `end`. */
void pst__hook_done(pst_lane *lane, const pst__node *node, uint64_t begin, uint64_t end);

/* The same on an asynchronous device: from the device's beginning to its end where it tells times,
 * and the ends of edges are there then, too. */
void pst__hook_done_on_device(pst_lane *lane, const pst__node *node, uint64_t number);

/* A growing task releases a successor on another lane: begins an arrow at the task's launch. The
 * lane's owner calls it. Returns the arrow's id for the other end; 0: none, as where a device tells
 * times: when the task began there is not known yet. */
uint64_t pst__hook_edge(pst_lane *lane, const pst__node *from, const pst__node *to);

#endif
