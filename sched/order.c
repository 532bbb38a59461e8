#include "sched/order.h"

/* Acquire: pairs with the release in pst_lane_create; a lane may join at any time. */
static pst_lane *next_of(const pst_lane *lane) {
    return pst__load_acquire(&lane->follower);
}

/* Each launch is counted by the end of its serving, so that a callback on another lane finds it. */
static int launch_in_order(pst_lane *leader, uint32_t budget) {
    int changed = 0;
    for (const pst__node *head; budget-- > 0 && (head = pst__lane_first(leader)) != NULL;) {
        pst__lane_beat(leader);
        if (!pst__lane_serve(head->lane, leader, 1)) break;
        changed = 1;
    }
    return changed;
}

int pst__order_turn(pst_lane *leader, uint32_t budget) {
    int changed = 0, needs_poll = 0;
    for (pst_lane *lane = leader; lane != NULL; lane = next_of(lane))
        changed |= pst__lane_serve(lane, leader, 0);
    changed |= launch_in_order(leader, budget);
    for (pst_lane *lane = leader; lane != NULL; lane = next_of(lane))
        needs_poll |= lane->needs_poll;
    leader->needs_poll = needs_poll;
    return changed;
}
