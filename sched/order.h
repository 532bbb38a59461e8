/* Lanes with one order (`order_with`): the first one, the leader, has the queue of all and is owned
 * for all. A turn launches the head of that queue on the head's own lane, and nothing before it. */
#ifndef PST_SCHED_ORDER_H
#define PST_SCHED_ORDER_H

#include "sched/graph.h"

/* One turn of the leader and its followers, once what has arrived is in the leader's queue. */
int pst__order_turn(pst_lane *leader, uint32_t budget);

/* turn.c, for the lane's owner: ends what is done on the lane's stream, then launches on it from
 * the head of `queue`, the lane itself or its leader, until the budget is spent or the head has to
 * wait. 1 when something was done. */
int pst__lane_serve(pst_lane *lane, pst_lane *queue, uint32_t budget);

/* ---- the head of a queue ---------------------------------------------------------------- */

/* The first node of the lane's queue, which stays there. */
static inline pst__node *pst__lane_first(const pst_lane *lane) {
    pst__node *item = lane->ready.first;
    if (item == NULL || !(item->flags & PST__NODE_BATCH)) return item;
    const pst__batch *batch = (const pst__batch *)(const void *)item;
    return &item->graph->nodes[batch->indices[batch->cursor]];
}

static inline void pst__lane_take_first(pst_lane *lane) {
    pst__node *item = lane->ready.first;
    if (item->flags & PST__NODE_BATCH) {
        pst__batch *batch = (pst__batch *)(void *)item;
        if (++batch->cursor < batch->count) return;
    }
    pst__fifo_remove_first(&lane->ready);
}

#endif
