/* Which task is next. Lanes with one order (`order_with`): the first one, the leader, has the queue
 * of all and is owned for all. A turn launches the head of that queue on the head's own lane, and
 * nothing before it. */
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

/* ---- the items of a queue --------------------------------------------------------------- */

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

/* ---- the orders of a lane ---------------------------------------------------------------
 *
 *                  a task enters the queue   the head, which launches next
 *   BY_READINESS   when it is ready          the first
 *   BY_SUBMISSION  when it is added, or      the first, once it is ready
 *                  its graph launched
 *   BY_PRIORITY    when it is ready          the first of the most urgent level
 *
 * A new order is a line here and its cases below: nothing else looks at what order a lane has. */

#define PST__LANE_ORDERS (PST_LANE_BY_PRIORITY + 1)

/* A task holds up those that were added behind it. Several lanes can have such an order together.
 */
static inline int pst__order_is_by_adding(pst_lane_order order) {
    return order == PST_LANE_BY_SUBMISSION;
}

static inline int pst__order_has_priorities(pst_lane_order order) {
    return order == PST_LANE_BY_PRIORITY;
}

/* What is ready by now, also what has arrived since the turn began, competes for the launch. */
static inline pst__node *pst__lane_most_urgent(pst_lane *lane) {
    if (!pst__arrivals_empty(&lane->arrivals)) pst__arrivals_move(&lane->arrivals, &lane->ready);
    for (pst__node *node; (node = pst__lane_first(lane)) != NULL;) {
        pst__lane_take_first(lane);
        pst__levels_add(&lane->levels, node);
    }
    return pst__levels_head(&lane->levels);
}

/* The node to launch next, which stays in the queue; NULL when there is none yet. Of lanes with one
 * order it is one of the lane that launch_in_order serves: within a turn nothing else comes first.
 */
static inline pst__node *pst__lane_head(pst_lane *lane) {
    if (lane->order == PST_LANE_BY_PRIORITY) return pst__lane_most_urgent(lane);
    pst__node *node = pst__lane_first(lane);
    const int waits =
        lane->order == PST_LANE_BY_SUBMISSION && node != NULL && !pst__node_is_ready(node);
    return waits ? NULL : node;
}

static inline void pst__lane_take_head(pst_lane *lane) {
    if (lane->order == PST_LANE_BY_PRIORITY)
        pst__levels_remove_head(&lane->levels);
    else
        pst__lane_take_first(lane);
}

/* What stands in the queue longest, ready or not, for a text; NULL: nothing. */
static inline pst__node *pst__lane_oldest(pst_lane *lane) {
    return lane->levels.occupied != 0 ? pst__levels_head(&lane->levels) : pst__lane_first(lane);
}

#endif
