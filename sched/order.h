/* Lanes with one order (`order_with`): the first one, the leader, has the queue of all and is owned
 * for all. A turn launches the head of that queue on the head's own lane, and nothing before it. */
#ifndef PST_SCHED_ORDER_H
#define PST_SCHED_ORDER_H

#include "sched/graph.h"

/* One turn of the leader and its followers, once what has arrived is in the leader's queue. */
int pst__order_turn(pst_lane *leader, pst__spending *spending);

/* turn.c, for the lane's owner: ends what is done on the lane's stream, then launches on it at most
 * `most` tasks from the head of `queue`, the lane itself or its leader, until the budget is spent
 * or the head has to wait. 1 when something was done. */
int pst__lane_serve(pst_lane *lane, pst_lane *queue, pst__spending *spending, uint32_t most);

/* ---- what is stopped --------------------------------------------------------------------
 *
 * A canceled or poisoned graph's tasks are launched no more, and so hold nobody up: where the head
 * of a queue has to wait, they leave it, and end beside it as their predecessors end. */

/* Takes what was stopped out of the queue; 1 when there was something. */
int pst__order_set_aside(pst_lane *leader);

/* Ends what stands aside and has no unfinished predecessor; 1 when there was something. */
int pst__order_end_stopped(pst_lane *leader);

/* ---- the head of a queue ---------------------------------------------------------------- */

/* The first node of what stands in a queue: a node, or a share's batch. */
static inline pst__node *pst__item_first(pst__node *item) {
    if (!(item->flags & PST__NODE_BATCH)) return item;
    const pst__share *share = (const pst__share *)(const void *)item;
    return &item->graph->nodes[share->indices[share->cursor]];
}

/* Takes that node; 1 when it was the last one of the item. */
static inline int pst__item_take_first(pst__node *item) {
    if (!(item->flags & PST__NODE_BATCH)) return 1;
    pst__share *share = (pst__share *)(void *)item;
    return ++share->cursor == share->count;
}

/* The first node of the lane's queue, which stays there. */
static inline pst__node *pst__lane_first(const pst_lane *lane) {
    return lane->ready.first == NULL ? NULL : pst__item_first(lane->ready.first);
}

static inline void pst__lane_take_first(pst_lane *lane) {
    if (pst__item_take_first(lane->ready.first)) pst__fifo_remove_first(&lane->ready);
}

#endif
