#include "sched/watchdog.h"

#include "base/clock.h"
#include "sched/poison.h"
#include "sched/post.h"
#include "sched/report.h"

#include <string.h>

#define LOOKS   8u         /* a task that is seen once more than that is overdue */
#define POST_NS 250000000u /* at most so long between two posts of the lanes */

/* Without a page each visit is a look. */
static void set_intervals(pst__watchdog *watchdog, uint64_t watchdog_ns, int has_page) {
    const uint64_t look_ns = watchdog_ns / LOOKS + (watchdog_ns % LOOKS != 0);
    uint64_t visits = look_ns != 0;
    if (has_page && look_ns > POST_NS) visits = (look_ns + POST_NS - 1) / POST_NS;
    watchdog->visits_a_look = (uint32_t)(visits < UINT32_MAX ? visits : UINT32_MAX);
    watchdog->interval_ns = visits != 0 ? look_ns / visits : has_page ? POST_NS : 0;
}

void pst__watchdog_init(pst_runtime *runtime, const pst_runtime_options *options) {
    pst__watchdog *watchdog = &runtime->watchdog;
    set_intervals(watchdog, options->watchdog_ns, options->page != NULL);
    watchdog->poisons = options->watchdog_poisons;
    ck_ec_init(&watchdog->loop.park.count, 0);
}

/* ---- a look ---------------------------------------------------------------------------- */

/* 1 at the look at which `count` has not changed for long enough, and only at that one. */
static int is_stalled(pst__stall *stall, uint64_t count) {
    if (stall->looks == 0 || stall->count != count) {
        *stall = (pst__stall){count, 1};
        return 0;
    }
    if (stall->looks > LOOKS) return 0;
    return ++stall->looks > LOOKS;
}

/* The caller owns the lane, so that the task and its graph stay. */
static int look_at_oldest(pst_lane *lane, char *text, size_t size) {
    lane->watch.owner.looks = 0;
    const pst__node *oldest = lane->current != NULL ? lane->current : lane->in_flight.first;
    if (oldest == NULL) lane->watch.task.looks = 0;
    if (oldest == NULL || !is_stalled(&lane->watch.task, lane->watch.ends)) return 0;
    pst__report_overdue(lane, oldest, text, size);
    return 1;
}

static int look_at(pst_lane *lane, char *text, size_t size) {
    pst_lane *leader = lane->leader;
    if (pst__lane_is_gone(lane)) return 0;
    if (pst__lane_try_own(leader)) {
        const int is_overdue = look_at_oldest(lane, text, size);
        pst__lane_disown(leader, 0, NULL);
        return is_overdue;
    }
    /* The thread that serves the lane may touch its tasks at any time: only the lane can be named.
     * Relaxed: pairs with pst__lane_heartbeat. */
    if (lane != leader ||
        !is_stalled(&lane->watch.owner, pst__load_relaxed(&lane->watch.heartbeats)))
        return 0;
    pst__report_stuck_thread(lane, text, size);
    return 1;
}

static void look(pst_runtime *runtime) {
    pst__watchdog *watchdog = &runtime->watchdog;
    char text[PST__REPORT_BYTES];
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next) {
        if (!look_at(lane, text, sizeof text)) continue;
        /* The log hook is called when the lane is free again. */
        (void)pst__add_relaxed(&watchdog->reports, 1); /* a figure for pst_runtime_get_stats */
        (void)pst__runtime_fail(runtime, PST_ETIMEDOUT, "watchdog: %s", text);
        if (watchdog->poisons) pst_runtime_poison(runtime, PST_ETIMEDOUT, NULL);
    }
    pst__health_check(runtime);
}

/* ---- visits ----------------------------------------------------------------------------- */

static int begin_visit(pst__watchdog *watchdog) {
    uint32_t nobody = 0;
    /* Acquires what the last one to visit has released in end_visit. */
    return pst__cas_acq_rel(&watchdog->is_visiting, &nobody, 1);
}

static void end_visit(pst__watchdog *watchdog) {
    pst__store_release(&watchdog->is_visiting, 0); /* pairs with the exchange in begin_visit */
}

void pst__watchdog_look(pst_runtime *runtime) {
    if (!begin_visit(&runtime->watchdog)) return;
    look(runtime);
    end_visit(&runtime->watchdog);
}

static void visit(pst_runtime *runtime) {
    pst__watchdog *watchdog = &runtime->watchdog;
    if (!begin_visit(watchdog)) return;
    if (runtime->page != NULL) pst__post_lanes(runtime);
    if (watchdog->visits_a_look != 0 && ++watchdog->visits % watchdog->visits_a_look == 0)
        look(runtime);
    end_visit(watchdog);
}

void pst__watchdog_pump(pst_runtime *runtime) {
    pst__watchdog *watchdog = &runtime->watchdog;
    /* Relaxed: a thread that starts now visits once too often. */
    if (watchdog->interval_ns == 0 || pst__load_relaxed(&watchdog->loop.has_thread)) return;
    const uint64_t now = pst__now();
    uint64_t next = pst__load_relaxed(&watchdog->next_visit);
    /* One of the threads that find a visit due takes it. Acquire-release only because it is one
     * operation for all: `is_visiting` orders the visits. */
    if (now >= next && pst__cas_acq_rel(&watchdog->next_visit, &next, now + watchdog->interval_ns))
        visit(runtime);
}

/* ---- the thread ------------------------------------------------------------------------ */

static void *run(void *argument) {
    pst_runtime *runtime = argument;
    pst__watchdog *watchdog = &runtime->watchdog;
    for (;;) {
        const uint32_t count = pst__park_count(&watchdog->loop.park);
        /* Acquire: pairs with the release in pst__loop_stop. */
        if (pst__load_acquire(&watchdog->loop.stop)) break;
        pst__park_wait(&watchdog->loop.park, count, watchdog->interval_ns);
        visit(runtime);
    }
    pst__loop_leave(&watchdog->loop, runtime);
    return NULL;
}

pst_status pst__watchdog_start(pst_runtime *runtime) {
    pst__watchdog *watchdog = &runtime->watchdog;
    uint32_t none = 0;
    /* One of the threads that create lanes together starts it. Acquire-release only because it is
     * one operation for all: pthread_create and _join order the rest. */
    if (watchdog->interval_ns == 0 || !pst__cas_acq_rel(&watchdog->loop.has_thread, &none, 1))
        return PST_OK;
    const int error = pst__thread_start(&watchdog->loop.thread, run, runtime);
    if (error == 0) return PST_OK;
    pst__store_release(&watchdog->loop.has_thread, 0);
    return pst__runtime_fail(runtime, PST_ESYSTEM, "the watchdog's thread could not be started: %s",
                             strerror(error));
}
