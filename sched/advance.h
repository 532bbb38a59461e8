/* How a graph advances: the launch and the end of a node release its successors. */
#ifndef PST_SCHED_ADVANCE_H
#define PST_SCHED_ADVANCE_H

#include "sched/calls.h"
#include "sched/graph.h"

typedef enum pst__phase {
    PST__WHEN_LAUNCHED, /* successors whose streams wait for this task's event, or follow it */
    PST__WHEN_DONE,     /* the others */
    PST__ALL            /* both: the task ended without having been in flight */
} pst__phase;

/* How a node ends. */
typedef struct pst__end {
    uint64_t number;
    pst__task_state state;
    pst_status status; /* one that can be kept */
    pst__phase phase;
    int is_last; /* of its share of a sealed graph's run */
} pst__end;

/* One thread's walk along the edges; on a lane, its turn. */
typedef struct pst__advance {
    pst_lane *lane;  /* the lane that the thread owns; NULL: none */
    pst__fifo gates; /* gates that have become ready and are still to be passed */
    pst__call call;  /* a turn: the user's code that it is in */
    pst__end end;    /* of the task that is ending */
} pst__advance;

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

/* The lane, whose owner calls, has launched the node: counted before anybody can see it. */
void pst__count_launched(pst_lane *lane, const pst__node *node, uint64_t number);

/* The node's next state in launch `number`. */
void pst__node_become(pst__node *node, uint64_t number, pst__task_state state, pst_status status);

/* The node has ended: its run's count, its callback, its state, its successors, in this order; then
 * the graph may go. `status` is one that can be kept. */
void pst__node_end(pst__advance *advance, pst__node *node, uint64_t number, pst__task_state state,
                   pst_status status, pst__phase phase);

/* Says that the task failed, and why. In a poisoned runtime the text of the poison stays: what
 * fails then fails because of it. */
void pst__report_failure(const pst__node *node, const pst_lane *lane, pst_status status);

/* The same, and the node ends. */
void pst__fail_node(pst__advance *advance, pst__node *node, uint64_t number, pst_status status,
                    pst__phase phase);

/* The end of the scope of a turn, which pst__calls_enter has put on the thread's list: a call that
 * it is in does not return, as an exception or the thread's end unwinds it, and is completed. */
void pst__advance_leave(pst__advance *turn);

/* The node, of either kind of graph, has left its queue: it needs its predecessors no more, and is
 * armed for the next launch. Relaxed: before this launch is published, and the next one's arrivals
 * come after that. */
static inline void pst__node_dequeued(pst__node *node) {
    pst__store_relaxed(&node->pending, node->predecessors);
    if (node->flags & PST__NODE_GROWING) pst__grown_forget_predecessors(node);
}

#endif
