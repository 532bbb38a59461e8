#include "sched/post.h"

#include "base/clock.h"
#include "sched/lane.h"
#include "sched/report.h"

#include <stdio.h>

/* What heartbeats count is not what ends count. */
#define OF_HEARTBEATS (UINT64_C(1) << 63)

#define COPY(field, text) ((void)snprintf(field, sizeof(field), "%s", text))

static uint64_t first_seen(pst__first_seen *seen, uint64_t count, uint64_t now) {
    if (seen->since == 0 || seen->count != count) *seen = (pst__first_seen){count, now};
    return seen->since;
}

/* Relaxed: pairs with count_moved (trace.c); figures, each by itself whole. */
static void take_moved(const pst_lane *lane, pst_page_lane *taken) {
    taken->ended = pst__load_relaxed(&lane->moved.ended);
    taken->bytes = pst__load_relaxed(&lane->moved.bytes);
    taken->busy_ns = pst__load_relaxed(&lane->moved.busy_ns);
}

/* The caller owns the lane, so that its tasks and their names stay. */
static void take_oldest(pst_lane *lane, uint64_t now, pst_page_lane *taken) {
    const pst__node *oldest = lane->current != NULL ? lane->current : lane->in_flight.first;
    COPY(taken->name, lane->name);
    if (oldest == NULL) {
        lane->watch.unknown.since = 0;
        return;
    }
    const uint64_t seen = first_seen(&lane->watch.unknown, lane->watch.ends, now);
    const uint64_t launched = oldest->detail == NULL ? 0 : oldest->detail->launched_at;
    COPY(taken->task, pst__node_name(oldest));
    taken->ticket = pst__node_ticket(oldest);
    taken->since = launched != 0 ? launched : seen;
}

/* Whether the thread that serves the lanes with this one's order has launched on this one last. */
static int serves_this(const pst_lane *lane) {
    /* Relaxed: pairs with log_launch (serve.c); a figure. */
    const pst_lane *latest = pst__load_relaxed(&lane->leader->watch.latest);
    return lane == (latest == NULL ? lane->leader : latest);
}

/* A thread serves the lane: where its heart stands still it does not come back from a task, the one
 * that was launched last. */
static void take_served(pst_lane *lane, uint64_t now, pst_page_lane *taken) {
    pst_recent launch;
    pst__report_last_launch(lane, &launch);
    COPY(taken->name, launch.lane);
    if (!serves_this(lane)) return;
    /* Relaxed: pairs with pst__lane_heartbeat. */
    const uint64_t beats = pst__load_relaxed(&lane->watch.heartbeats) | OF_HEARTBEATS;
    const uint64_t since = first_seen(&lane->watch.unknown, beats, now);
    if (since == now) return;
    COPY(taken->task, launch.task);
    taken->ticket = launch.ticket;
    taken->since = since;
}

static void take_lane(pst_lane *lane, uint64_t now, pst_page_lane *taken) {
    *taken = (pst_page_lane){0};
    take_moved(lane, taken);
    if (pst__lane_try_own(lane->leader)) {
        take_oldest(lane, now, taken);
        pst__lane_disown(lane->leader, 0, NULL);
    } else {
        take_served(lane, now, taken);
    }
}

void pst__post_lanes(pst_runtime *runtime) {
    pst_page_lane lanes[PST_PAGE_LANES];
    const uint64_t now = pst__now();
    size_t count = 0;
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL && count < PST_PAGE_LANES;
         lane = lane->next)
        if (!pst__lane_is_gone(lane)) take_lane(lane, now, &lanes[count++]);
    pst__page_post_lanes(runtime->page, lanes, count);
}
