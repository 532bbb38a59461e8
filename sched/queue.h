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

#endif
