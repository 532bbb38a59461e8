#include "sched/order.h"

static int serve(pst_lane *lane, pst_lane *leader, uint32_t budget) {
    const int changed = pst__lane_serve(lane, leader, budget);
    pst__lane_count_flush(lane); /* a callback on another lane finds it counted */
    return changed;
}

static int launch_in_order(pst_lane *leader, uint32_t budget) {
    int changed = 0;
    for (const pst__node *head; budget-- > 0 && (head = pst__lane_first(leader)) != NULL;) {
        pst__lane_beat(leader);
        if (!serve(head->lane, leader, 1)) break;
        changed = 1;
    }
    return changed;
}

int pst__order_turn(pst_lane *leader, uint32_t budget) {
    int changed = 0, needs_poll = 0;
    for (pst_lane *lane = leader; lane != NULL; lane = lane->follower)
        changed |= serve(lane, leader, 0);
    changed |= launch_in_order(leader, budget);
    for (pst_lane *lane = leader; lane != NULL; lane = lane->follower)
        needs_poll |= lane->needs_poll;
    leader->needs_poll = needs_poll;
    return changed;
}
