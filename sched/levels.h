/* The ready tasks of a lane BY_PRIORITY: a queue for each priority, first in first out within one.
 * Belongs to the lane's owner. */
#ifndef PST_SCHED_LEVELS_H
#define PST_SCHED_LEVELS_H

#include "sched/queue.h"

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
