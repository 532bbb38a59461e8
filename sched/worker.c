#include "sched/worker.h"

#include "sched/poison.h"
#include "sched/turn.h"
#include "sched/watchdog.h"

#include <stdio.h>
#include <string.h>

/* A turn of a lane by its worker. */
typedef struct pst__turn_of {
    pst__worker *self;
    pst_lane *lane;
    int is_last; /* for now: nothing was done in it */
} pst__turn_of;

typedef struct look {
    int changed; /* something was done */
    int pending; /* something is to be asked again soon */
} look;

/* A helper may have the lane, and what became ready meanwhile is then not seen by anybody: it is
 * asked to wake us when it hands the lane back (see pst_lane). The fence orders the request with
 * the second try, and pairs with the one in pst__lane_disown. */
static int try_own(pst_lane *lane) {
    if (pst__lane_try_own(lane)) return 1;
    pst__store_relaxed(&lane->missed, 1);
    pst__fence_store_load();
    return pst__lane_try_own(lane);
}

/* Its next turn comes at once, and not behind what another lane does: it may wake those who wait
 * then. Relaxed: a lane that is adopted at this moment is known in the next round. */
static int is_only_lane(const pst__worker *self, const pst_lane *lane) {
    return lane->next_of_worker == NULL && pst__load_relaxed(&self->lanes) == lane;
}

/* Its own lane's launches as many as there are; several lanes take turns. */
static pst__budget budget_of(const pst__worker *self) {
    /* Acquire: pairs with the release in pst__worker_adopt. */
    const pst_lane *lane = pst__load_acquire(&self->lanes);
    const int has_several = lane != NULL && lane->next_of_worker != NULL;
    return (pst__budget){.launches = PST__LAUNCHES_A_TURN,
                         .nanoseconds = has_several ? PST__TURN_NS : 0};
}

static void hand_back(pst__turn_of *turn) {
    pst_lane *lane = turn->lane;
    if (turn->is_last || !is_only_lane(turn->self, lane)) pst__lane_wake_waiters(lane);
    pst__lane_disown(lane, 0, turn->self);
}

/* The lane goes back also when a task ends this thread. */
static void serve_lane(pst__worker *self, pst_lane *lane, const pst__budget *budget, look *seen) {
    __attribute__((cleanup(hand_back))) pst__turn_of turn = {self, lane, 1};
    const int changed = pst__lane_turn(lane, budget);
    turn.is_last = !changed;
    seen->changed |= changed;
    seen->pending |= lane->needs_poll;
}

static look serve(pst__worker *self) {
    const pst__budget budget = budget_of(self);
    look seen = {0, 0};
    /* Acquire: pairs with the release in pst__worker_adopt. */
    for (pst_lane *lane = pst__load_acquire(&self->lanes); lane != NULL;
         lane = lane->next_of_worker) {
        if (try_own(lane))
            serve_lane(self, lane, &budget, &seen);
        else if (!pst__lane_is_gone(lane))
            seen.pending = 1; /* a helper has it: nobody knows what it leaves */
    }
    return seen;
}

/* Turns until one does something, at most `spin`, fewer while the outside has to finish first. */
static int spin(pst__worker *self) {
    for (uint32_t i = 0; i < self->runtime->spin; i++) {
        look seen = serve(self);
        if (seen.changed) return 1;
        if (seen.pending || pst__load_relaxed(&self->loop.stop)) return 0;
        ck_pr_stall();
    }
    return 0;
}

/* A task has ended the thread: its lanes are left to those who wait. */
static void abandon_lanes(pst__worker *self) {
    pst_runtime *runtime = self->runtime;
    pst_runtime_poison(runtime, PST_ESYSTEM, "a task has ended the thread of its lane's worker");
    for (pst_lane *lane = pst__load_acquire(&self->lanes); lane != NULL;
         lane = lane->next_of_worker)
        pst__store_release(&lane->worker, NULL); /* pairs with the acquire in pst__lane_notify */
}

static void leave(pst__worker **ending) {
    pst__worker *self = *ending;
    if (!pst__load_relaxed(&self->loop.stop)) abandon_lanes(self);
    pst__loop_leave(&self->loop, self->runtime);
}

static void *run(void *argument) {
    __attribute__((cleanup(leave))) pst__worker *self = argument;
    uint64_t poll_ns = PST__POLL_FIRST_NS;
    (void)pst__track_bind(self->track); /* without memory the trace lacks this track */
    /* Acquire: pairs with the release in pst__loop_stop. */
    while (!pst__load_acquire(&self->loop.stop)) {
        if (spin(self)) {
            poll_ns = PST__POLL_FIRST_NS;
            continue;
        }
        /* The count first, then a last look, then the sleep: what comes in between ends it. */
        const uint32_t count = pst__park_count(&self->loop.park);
        look seen = serve(self);
        if (seen.changed || pst__load_acquire(&self->loop.stop)) continue;
        if (seen.pending) pst__health_check(self->runtime);
        pst__park_wait(&self->loop.park, count, seen.pending ? poll_ns : PST__FOREVER);
        if (seen.pending) poll_ns = pst__poll_longer(poll_ns);
    }
    return NULL;
}

/* Lanes have tracks, too, under their own names. */
static pst_status create_track(pst__worker *worker, const char *name) {
    char track[128];
    (void)snprintf(track, sizeof track, "worker %s", name);
    return pst__track_create(worker->runtime->trace, PST__TRACK_WORKER, track, &worker->track);
}

void pst__worker_end_track(pst__worker *worker) {
    pst__track_end(worker->track);
    worker->track = NULL;
}

static pst_status start_thread(pst__worker *worker, const char *name) {
    pst_runtime *runtime = worker->runtime;
    const pst_status status = pst__watchdog_start(runtime);
    if (status != PST_OK) return status;
    pst__store_relaxed(&worker->loop.stop, 0); /* the thread's start publishes both */
    pst__store_relaxed(&worker->loop.ended, 0);
    const int error = pst__thread_start(&worker->loop.thread, run, worker);
    worker->loop.has_thread = error == 0;
    if (error == 0) return PST_OK;
    return pst__runtime_fail(runtime, PST_ESYSTEM,
                             "lane %s: its worker thread could not be started: %s", name,
                             strerror(error));
}

static pst_status start(pst__worker *worker, const char *name) {
    pst_status status = create_track(worker, name);
    if (status == PST_OK) status = start_thread(worker, name);
    if (status != PST_OK) pst__worker_end_track(worker);
    return status;
}

pst_status pst__worker_start(pst_runtime *runtime, const char *name, pst__worker **worker) {
    if (*worker != NULL) return start(*worker, name);
    pst__worker *made = pst__heap_alloc(&runtime->heap, sizeof *made);
    if (made == NULL)
        return pst__runtime_fail(runtime, PST_ENOMEM, "lane %s: no memory for its worker", name);
    made->runtime = runtime;
    ck_ec_init(&made->loop.park.count, 0);
    const pst_status status = start(made, name);
    if (status == PST_OK)
        *worker = made;
    else
        pst__worker_free(made);
    return status;
}

void pst__worker_adopt(pst__worker *worker, pst_lane *lane) {
    lane->next_of_worker = worker->lanes;
    /* Both release the lane's fields: to the worker's walk, and to pst__lane_notify. */
    pst__store_release(&lane->worker, worker);
    pst__store_release(&worker->lanes, lane);
    pst__park_wake(&worker->loop.park);
}

void pst__worker_free(pst__worker *worker) {
    pst__heap_free(&worker->runtime->heap, worker, sizeof *worker);
}
