/* How a graph advances: the launch and the end of a node release its successors. */
#ifndef PST_SCHED_ADVANCE_H
#define PST_SCHED_ADVANCE_H

#include "sched/graph.h"

typedef enum pst__phase {
    PST__WHEN_LAUNCHED, /* successors whose streams wait for this task's event, or follow it */
    PST__WHEN_DONE,     /* the others */
    PST__ALL            /* both: the task ended without having been in flight */
} pst__phase;

typedef enum pst__call { PST__CALL_START, PST__CALL_TEST, PST__CALL_DONE } pst__call;

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
    /* A turn: the call of the user's code that it is in; see calls.h. */
    struct pst__advance *outer;
    pst__node *node; /* NULL: none */
    pst__call call;
    pst__end end; /* of the task that is ending */
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

/* The part of that behind a task's callback, as advance->end says. */
void pst__task_finish(pst__advance *advance, pst__node *node);

/* ---- tasks of growing graphs --------------------------------------------------------------
 *
 * Their successors are a list, which is closed when the task releases them. */

#define PST__LINKS_INLINE 4u

/* An edge: stands in its source's list, lies in its target's block. */
typedef struct pst__link {
    struct pst__link *next;
    pst__grown *target;
    pst__grown *source; /* held while the target's stream may have to wait for its event */
    uint64_t flow;      /* the arrow that the source has begun in the trace; 0: none */
} pst__link;

struct pst__grown {
    pst__node node;
    pst__detail detail;
    pst__link *early; /* successors that the launch releases; closed by then */
    pst__link *late;  /* successors that the end releases; closed by then */
    pst__link *links; /* to the predecessors; own_links or from the heap */
    uint32_t link_count;
    uint32_t references; /* one of the graph until the task has ended, one of the caller's handle */
    pst__share *share;
    pst__grown *next, *previous; /* among spare blocks, or among the graph's closed gates */
    ck_stack_entry_t released;
    pst__link own_links[PST__LINKS_INLINE];
};

static inline pst__share *pst__grown_share(const pst__node *node) {
    return ((const pst__grown *)(const void *)node)->share;
}

void pst__grown_release(pst__advance *advance, pst__node *node, pst__phase phase,
                        pst_status status);
/* Makes the lane's stream wait for the events of the node's predecessors. */
pst_status pst__grown_wait_events(const pst__node *node, const pst_lane *lane);
/* The node is launched or canceled: it needs its predecessors no more. */
void pst__grown_forget_predecessors(pst__node *node);
/* The node, of either kind of graph, has left its queue: it needs its predecessors no more, and is
 * armed for the next launch. Relaxed: before this launch is published, and the next one's arrivals
 * come after that. */
static inline void pst__node_dequeued(pst__node *node) {
    pst__store_relaxed(&node->pending, node->predecessors);
    if (node->flags & PST__NODE_GROWING) pst__grown_forget_predecessors(node);
}
/* The graph's own reference, when the task has ended. */
void pst__grown_drop(pst__node *node);
/* Takes a gate that is opened off its graph's list; the caller holds the graph's lock. */
void pst__grown_delist_gate(pst__node *gate);

#endif
