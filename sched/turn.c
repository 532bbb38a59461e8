#include "sched/turn.h"

#include "sched/advance.h"
#include "sched/order.h"
#include "sched/serve.h"

/* ---- what is stopped --------------------------------------------------------------------
 *
 * A canceled or poisoned graph's tasks are launched no more, and so hold nobody up: where the head
 * of a queue has to wait, they leave it, and end beside it as their predecessors end. */

/* Takes what was stopped out of the queue; 1 when there was something. */
static int set_aside(pst_lane *leader) {
    /* Acquire: pairs with the release in pst__runtime_note_stop; what was stopped by then is seen.
     */
    const uint64_t stops = pst__load_acquire(&leader->runtime->stops);
    if (leader->stops_seen == stops) return 0;
    leader->stops_seen = stops;
    /* What was added to a stopped graph, or launched, has noted the stop after its push: it is
     * found here. */
    if (!pst__arrivals_empty(&leader->arrivals))
        pst__arrivals_move(&leader->arrivals, &leader->ready);
    pst__fifo kept = {NULL, NULL};
    int found = 0;
    for (pst__node *item = leader->ready.first, *next; item != NULL; item = next) {
        next = pst__fifo_next(item);
        const int is_stopped = pst__load_relaxed(&item->graph->stop) < 0;
        pst__fifo_append(is_stopped ? &leader->stopped : &kept, item);
        found |= is_stopped;
    }
    leader->ready = kept;
    return found;
}

/* In flight from the launch before, it has to end there first. */
static int may_end(const pst__node *node) {
    return pst__node_is_ready(node) && pst__word_state(node->word) != PST__TASK_LAUNCHED;
}

static void end(pst__node *node) {
    __attribute__((cleanup(pst__advance_leave))) pst__advance advance = {.lane = node->lane};
    pst__calls_enter(&advance.call);
    const pst_status inherited = pst__pending_status(pst__load_relaxed(&node->pending));
    const pst_status stop = (pst_status)pst__load_relaxed(&node->graph->stop);
    pst__node_dequeued(node);
    pst__node_end(&advance, node, node->graph->number, PST__TASK_CANCELED,
                  inherited < 0 ? inherited : stop, PST__ALL);
    pst__advance_finish(&advance);
}

/* 1 when the last node of the item has ended: then the item is another launch's. */
static int end_some(pst__node *item, int *changed) {
    for (int was_last = 0; !was_last;) {
        pst__node *node = pst__item_first(item);
        if (!may_end(node)) return 0;
        was_last = pst__item_take_first(item);
        end(node);
        *changed = 1;
    }
    return 1;
}

/* Ends what stands aside and has no unfinished predecessor; 1 when there was something. */
static int end_stopped(pst_lane *leader) {
    pst__fifo items = leader->stopped, left = {NULL, NULL};
    int changed = 0;
    leader->stopped = left;
    while (items.first != NULL) {
        pst__node *item = items.first;
        pst__fifo_remove_first(&items);
        if (!end_some(item, &changed)) pst__fifo_append(&leader->stopped, item);
    }
    return changed;
}

/* ---- the turn --------------------------------------------------------------------------- */

static int launch_in_order(pst_lane *leader, pst__spending *spending) {
    int changed = 0;
    for (const pst__node *head; !spending->is_spent && (head = pst__lane_first(leader)) != NULL;) {
        pst__lane_heartbeat(leader);
        const int did = pst__lane_serve(head->lane, leader, spending, 1);
        changed |= did;
        if (!did) break;
    }
    return changed;
}

/* Acquire: pairs with the release in follow (place.c). */
static pst_lane *next_of(const pst_lane *lane) {
    return pst__load_acquire(&lane->follower);
}

static int turn_in_order(pst_lane *leader, pst__spending *spending) {
    int changed = 0, needs_poll = 0;
    for (pst_lane *lane = leader; lane != NULL; lane = next_of(lane))
        if (!pst__lane_is_gone(lane)) changed |= pst__lane_serve(lane, leader, spending, 0);
    changed |= launch_in_order(leader, spending);
    for (pst_lane *lane = leader; lane != NULL; lane = next_of(lane))
        needs_poll |= lane->needs_poll;
    leader->needs_poll = needs_poll;
    return changed;
}

int pst__lane_turn(pst_lane *lane, const pst__budget *budget) {
    pst__spending spending = pst__spending_begin(budget, &lane->pace);
    pst__lane_heartbeat(lane);
    if (!pst__arrivals_empty(&lane->arrivals)) pst__arrivals_move(&lane->arrivals, &lane->ready);
    /* Acquire: pairs with the release in follow (place.c). */
    int changed = pst__load_acquire(&lane->follower) == NULL
                      ? pst__lane_serve(lane, lane, &spending, UINT32_MAX)
                      : turn_in_order(lane, &spending);
    /* What is left waits, for a predecessor or for the task that runs. */
    if (pst__order_is_by_adding(lane->order) && pst__lane_first(lane) != NULL)
        changed |= set_aside(lane);
    if (lane->stopped.first != NULL) changed |= end_stopped(lane);
    return changed;
}
