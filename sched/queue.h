/* A lane's queues of nodes, through their `link`: `pst__arrivals` takes nodes from any thread,
 * `pst__fifo` belongs to the lane's owner. Neither has a capacity nor a lock. */
#ifndef PST_SCHED_QUEUE_H
#define PST_SCHED_QUEUE_H

#include "sched/node.h"

typedef struct pst__arrivals {
    ck_stack_t stack;
} pst__arrivals;

typedef struct pst__fifo {
    pst__node *first, *last;
} pst__fifo;

static inline pst__node *pst__fifo_next(const pst__node *node) {
    return (pst__node *)(void *)node->link.next;
}

static inline void pst__fifo_append(pst__fifo *fifo, pst__node *node) {
    node->link.next = NULL;
    if (fifo->first == NULL)
        fifo->first = node;
    else
        fifo->last->link.next = &node->link;
    fifo->last = node;
}

static inline void pst__fifo_remove_first(pst__fifo *fifo) {
    fifo->first = pst__fifo_next(fifo->first);
}

/* Any thread. ck's compare-and-swap publishes the node to pst__arrivals_move. */
static inline void pst__arrivals_push(pst__arrivals *arrivals, pst__node *node) {
    ck_stack_push_upmc(&arrivals->stack, &node->link);
}

static inline int pst__arrivals_empty(const pst__arrivals *arrivals) {
    return ck_pr_load_ptr(&arrivals->stack.head) == NULL;
}

/* The lane's owner: moves what has arrived to the end of `fifo`, in the order of the pushes. */
static inline void pst__arrivals_move(pst__arrivals *arrivals, pst__fifo *fifo) {
    ck_stack_entry_t *entry = ck_stack_batch_pop_upmc(&arrivals->stack);
    pst__node *oldest = NULL;
    while (entry != NULL) {
        ck_stack_entry_t *next = entry->next;
        entry->next = (ck_stack_entry_t *)(void *)oldest;
        oldest = (pst__node *)(void *)entry;
        entry = next;
    }
    while (oldest != NULL) {
        pst__node *next = pst__fifo_next(oldest);
        pst__fifo_append(fifo, oldest);
        oldest = next;
    }
}

/* The ready tasks of a lane BY_PRIORITY: a queue for each priority, first in first out within one.
 * Belongs to the lane's owner. */
#define PST__LEVELS (PST_PRIORITY_LEAST_URGENT - PST_PRIORITY_MOST_URGENT + 1)

typedef struct pst__levels {
    pst__fifo fifos[PST__LEVELS]; /* the most urgent first */
    uint32_t occupied;            /* bit i: fifos[i] is not empty */
} pst__levels;

static inline void pst__levels_add(pst__levels *levels, pst__node *node) {
    const int priority = node->detail == NULL ? 0 : node->detail->priority;
    const unsigned level = (unsigned)(priority - PST_PRIORITY_MOST_URGENT);
    pst__fifo_append(&levels->fifos[level], node);
    levels->occupied |= 1u << level;
}

static inline pst__fifo *pst__levels_first(pst__levels *levels) {
    return &levels->fifos[__builtin_ctz(levels->occupied)];
}

/* The node to launch next, which stays; NULL: none. */
static inline pst__node *pst__levels_head(pst__levels *levels) {
    return levels->occupied == 0 ? NULL : pst__levels_first(levels)->first;
}

static inline void pst__levels_remove_head(pst__levels *levels) {
    pst__fifo *fifo = pst__levels_first(levels);
    pst__fifo_remove_first(fifo);
    if (fifo->first == NULL) levels->occupied &= levels->occupied - 1; /* its lowest bit */
}

#endif
