/* Tasks of growing graphs: a list of successors that is closed when the task releases them. */
#ifndef PST_SCHED_GROWING_H
#define PST_SCHED_GROWING_H

#include "sched/advance.h"

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
    pst__grown *next, *previous; /* among spare blocks, or among the graph's open gates */
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
/* Takes an open gate off its graph's list; the caller holds the graph's lock. */
void pst__grown_delist_gate(pst__node *gate);

#endif
