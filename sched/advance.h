/* How a graph advances: the launch and the end of a node release its successors. */
#ifndef PST_SCHED_ADVANCE_H
#define PST_SCHED_ADVANCE_H

#include "sched/graph.h"

/* One thread's walk along the edges. */
typedef struct pst__advance {
    pst_lane *lane;  /* the lane that the thread owns; NULL: none */
    pst__fifo gates; /* gates that have become ready and are still to be passed */
} pst__advance;

typedef enum pst__phase {
    PST__WHEN_LAUNCHED, /* successors whose streams wait for this task's event, or follow it */
    PST__WHEN_DONE,     /* the others */
    PST__ALL            /* both: the task ended without having been in flight */
} pst__phase;

/* `count` predecessors of `node` have come, with `status` if it is an error. */
void pst__advance_arrive(pst__advance *advance, pst__node *node, uint32_t count, pst_status status);

/* Releases the successors of `node` that are due in this phase. */
void pst__advance_release(pst__advance *advance, pst__node *node, pst__phase phase,
                          pst_status status);

/* Passes the gates that became ready, and those behind them. The end of every walk. */
void pst__advance_finish(pst__advance *advance);

/* 1 when a successor on `to` (NULL: a gate) is released by the launch of `node`, 0 when by its end:
 * a stream can only wait for events of its own device. */
int pst__is_early(const pst__node *node, const pst_lane *to);

/* The node's next state in launch `number`. */
void pst__node_become(pst__node *node, uint64_t number, pst__task_state state, pst_status status);

/* The node has ended: its callback, its state, its successors, its run's count, in this order.
 * `status` is one that can be kept. */
void pst__node_end(pst__advance *advance, pst__node *node, uint64_t number, pst__task_state state,
                   pst_status status, pst__phase phase);

#endif
