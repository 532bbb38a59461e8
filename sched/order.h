/* Which task of a queue is next. Of lanes with one order (`order_with`) the first one, the leader,
 * has the queue of all. */
#ifndef PST_SCHED_ORDER_H
#define PST_SCHED_ORDER_H

#include "sched/graph.h"

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

/* ---- the head --------------------------------------------------------------------------- */

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
