/* A lane's end. Threads walk along the lanes of a runtime, of a worker and of an order without a
 * lock, so a lane's memory stays where it is, in all these lists, until the runtime goes. What is
 * destroyed is its name, its stream, its events, its worker's thread; the place serves the next
 * lane that is created to be served alike. */
#include "sched/calls.h"
#include "sched/graph.h"
#include "sched/wait.h"
#include "sched/worker.h"

#include <stdio.h>

/* ---- places ----------------------------------------------------------------------------- */

/* In the lists that the place is in; one that others have followed, gone themselves by now, still
 * leads an order. */
static int is_served_alike(const pst_lane *place, const pst_lane_options *options) {
    if (options->order_with != NULL)
        return place->leader == options->order_with->leader && place != place->leader;
    if (place->leader != place || place->mode != options->mode) return 0;
    if (place->follower != NULL && options->order != PST_LANE_BY_SUBMISSION) return 0;
    return place->mode != PST_LANE_SHARED ||
           pst__load_relaxed(&place->worker) == pst__load_relaxed(&options->share_with->worker);
}

pst_lane *pst__place_take(pst_runtime *runtime, const pst_lane_options *options) {
    ck_spinlock_lock(&runtime->lock);
    pst_lane *lane = runtime->lanes;
    while (lane != NULL &&
           (!pst__lane_is_gone(lane) || lane->is_taken || !is_served_alike(lane, options)))
        lane = lane->next;
    if (lane != NULL) lane->is_taken = 1;
    ck_spinlock_unlock(&runtime->lock);
    return lane;
}

void pst__place_give_back(pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    pst__track_end(lane->track);
    lane->track = NULL;
    ck_spinlock_lock(&runtime->lock); /* whoever names lanes that it does not own holds it */
    pst__lane_close(lane);
    lane->is_taken = 0;
    ck_spinlock_unlock(&runtime->lock);
}

/* ---- what holds a lane ------------------------------------------------------------------ */

static pst_status busy(const pst_lane *lane, const char *what, const char *name) {
    return pst__runtime_fail(lane->runtime, PST_EBUSY, "lane %s cannot be destroyed: %s%s",
                             lane->name, what, name);
}

/* A graph that may launch on the lane again, or has something there that has not ended. */
static const pst_graph *find_graph(const pst_lane *lane) {
    for (const pst_graph *graph = lane->runtime->graphs; graph != NULL; graph = graph->next)
        for (const pst__share *share = pst__load_acquire(&graph->shares); share != NULL;
             share = share->next) {
            if (share->lane != lane) continue;
            const uint32_t tasks = pst__load_relaxed(&share->tasks);
            /* Acquire: pairs with the count of those that are left (share.h). */
            if (graph->kind == PST_GRAPH_SEALED ? tasks != 0
                                                : tasks != pst__load_acquire(&share->left))
                return graph;
        }
    return NULL;
}

/* A lane that is served with this one. */
static const pst_lane *find_lane(const pst_lane *lane) {
    for (const pst_lane *other = lane->runtime->lanes; other != NULL; other = other->next) {
        if (other == lane || pst__lane_is_gone(other)) continue;
        if (other->leader == lane) return other;
        if (lane->mode == PST_LANE_WORKER && other->mode == PST_LANE_SHARED &&
            pst__load_relaxed(&other->worker) == pst__load_relaxed(&lane->worker))
            return other;
    }
    return NULL;
}

static pst_status check_unused(const pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    char name[128];
    ck_spinlock_lock(&runtime->lock);
    const pst_graph *graph = find_graph(lane);
    const pst_lane *other = graph == NULL ? find_lane(lane) : NULL;
    if (graph != NULL || other != NULL)
        (void)snprintf(name, sizeof name, "%s", graph != NULL ? graph->name : other->name);
    ck_spinlock_unlock(&runtime->lock);
    if (graph != NULL)
        return busy(lane, "wait for its tasks, and destroy a sealed graph first: graph ", name);
    return other == NULL
               ? PST_OK
               : busy(lane, "another lane is served with it, and is destroyed first: lane ", name);
}

/* The caller owns the lane. On a borrowed one a gate's event may not have come. */
static int has_work(const pst_lane *lane) {
    return lane->current != NULL || lane->flight_first != NULL ||
           (lane->leader == lane &&
            (!pst__arrivals_empty(&lane->arrivals) || lane->ready.first != NULL ||
             lane->stopped.first != NULL || lane->levels.occupied != 0));
}

/* ---- the end ---------------------------------------------------------------------------- */

static int try_to_own(const void *leader) {
    return pst__lane_try_own((pst_lane *)(uintptr_t)leader);
}

static int nobody_looks(const void *watchdog) {
    /* Acquire: pairs with the release at the end of pst__watchdog_look. */
    return !pst__load_acquire(&((const pst__watchdog *)watchdog)->looking);
}

/* The owner's last act. */
static void leave(pst_lane *lane) {
    pst_runtime *runtime = lane->runtime;
    ck_spinlock_lock(&runtime->lock);
    lane->is_taken = 1;
    pst__store_relaxed(&lane->asked, 0);
    pst__store_release(&lane->owned, PST__LANE_GONE); /* pairs with pst__lane_is_gone */
    ck_spinlock_unlock(&runtime->lock);
}

/* Of a worker whose lane goes: others poll the borrowed lanes that it has polled. */
static void give_borrowed_away(pst__worker *worker) {
    pst_runtime *runtime = worker->runtime;
    ck_spinlock_lock(&runtime->lock);
    for (pst_lane **link = &worker->lanes, *lane; (lane = *link) != NULL;) {
        if (lane->mode != PST_LANE_BORROWED) {
            link = &lane->next_of_worker;
            continue;
        }
        *link = lane->next_of_worker;
        pst__store_release(&lane->worker, NULL); /* pairs with the acquire in pst__lane_notify */
    }
    pst__lane_adopt_borrowed(runtime);
    ck_spinlock_unlock(&runtime->lock);
}

static pst_status end_worker(const pst_lane *lane) {
    if (lane->mode != PST_LANE_WORKER) return PST_OK;
    pst__worker *worker = lane->worker;
    if (worker == NULL) return PST_OK;
    pst__worker_stop(worker);
    const pst_status status = pst__worker_join(worker);
    if (status != PST_OK) return status;
    pst__worker_end_track(worker);
    give_borrowed_away(worker);
    return PST_OK;
}

static pst_status stays(const pst_lane *lane, pst_status status) {
    return pst__runtime_fail(lane->runtime, status,
                             "lane %s is not destroyed: the thread that serves it is in a task; "
                             "try again when that has come back",
                             lane->name);
}

pst_status pst_lane_destroy(pst_lane *lane) {
    if (lane == NULL) return PST_OK;
    pst_runtime *runtime = lane->runtime;
    pst_lane *leader = lane->leader;
    pst_status status = pst__calls_refuse(runtime, "pst_lane_destroy", lane->name);
    if (status == PST_OK) status = check_unused(lane);
    if (status != PST_OK) return status;
    if (pst__wait_aside(runtime, try_to_own, leader) != PST_OK) return stays(lane, PST_ETIMEDOUT);
    if (has_work(lane)) {
        pst__lane_disown(leader, 0, NULL);
        return busy(lane, "an event of a gate has not come", "");
    }
    status = end_worker(lane);
    if (status != PST_OK) {
        pst__lane_disown(leader, 0, NULL);
        return stays(lane, status);
    }
    leave(lane);
    if (leader != lane) pst__lane_disown(leader, 0, NULL);
    /* The watchdog may have found the lane served, and be about to name it. If that does not end,
     * the place is the runtime's until this goes. */
    if (pst__wait_aside(runtime, nobody_looks, &runtime->watchdog) == PST_OK)
        pst__place_give_back(lane);
    return PST_OK;
}
