#include "sched/monitor.h"

#include "base/clock.h"
#include "sched/lane.h"
#include "sched/thread.h"
#include "sched/wait.h"

#include <sched.h>
#include <string.h>

#define LOOKS 8u /* a task that is seen once more than that is overdue */

void pst__monitor_init(pst_runtime *runtime, const pst_runtime_options *options) {
    pst__monitor *monitor = &runtime->monitor;
    ck_spinlock_init(&monitor->lock);
    monitor->interval_ns = options->watchdog_ns / LOOKS + (options->watchdog_ns % LOOKS != 0);
    monitor->poisons = options->watchdog_poisons;
    ck_ec_init(&monitor->park.count, 0);
}

/* ---- observers -------------------------------------------------------------------------- */

/* One of the two is NULL. */
typedef struct callee {
    pst_poison_hook hook;
    pst_health_check check;
} callee;

struct pst__observer {
    callee call;
    void *context;
    uint64_t round; /* of the latest call */
    int is_running; /* a thread is in it; the last thing that this thread touches */
    pst__observer *next;
};

/* The next one to be called in this round. */
static pst__observer *take(pst__monitor *monitor, int is_check, uint64_t round) {
    ck_spinlock_lock(&monitor->lock);
    pst__observer *observer = monitor->observers;
    /* Acquire: pairs with the release in call_all; what the call before did is seen by this one. */
    while (observer != NULL &&
           ((observer->call.check != NULL) != is_check || observer->round >= round ||
            pst__load_acquire(&observer->is_running)))
        observer = observer->next;
    if (observer != NULL) {
        observer->round = round;
        pst__store_relaxed(&observer->is_running, 1); /* the lock shows it to who removes it */
    }
    ck_spinlock_unlock(&monitor->lock);
    return observer;
}

void pst__monitor_call_hooks(pst_runtime *runtime, pst_status status) {
    for (pst__observer *hook; (hook = take(&runtime->monitor, 0, 1)) != NULL;) {
        hook->call.hook(hook->context, status);
        pst__store_release(&hook->is_running, 0); /* pairs with the acquires in take and remove */
    }
}

void pst__monitor_check_health(pst_runtime *runtime) {
    pst__monitor *monitor = &runtime->monitor;
    /* Relaxed: a check that is added now is called the next time. */
    if (pst__load_relaxed(&monitor->check_count) == 0) return;
    const uint64_t now = pst__now();
    uint64_t next = pst__load_relaxed(&monitor->next_check);
    /* One of the threads that find a round due calls. Acquire-release only because it is one
     * operation for all: the lock orders the rounds. */
    if (now < next || !pst__cas_acq_rel(&monitor->next_check, &next, now + PST__HEALTH_CHECK_NS))
        return;
    for (pst__observer *check; (check = take(monitor, 1, now)) != NULL;) {
        if (pst_runtime_status(runtime) == PST_OK) check->call.check(check->context);
        pst__store_release(&check->is_running, 0); /* as above */
    }
}

static pst_status add(pst_runtime *runtime, callee call, void *context) {
    pst__monitor *monitor = &runtime->monitor;
    pst__observer *observer = pst__heap_alloc(&runtime->heap, sizeof *observer);
    if (observer == NULL)
        return pst__runtime_fail(runtime, PST_ENOMEM, "no memory for a %s",
                                 call.hook != NULL ? "poison hook" : "health check");
    *observer = (pst__observer){.call = call, .context = context};
    ck_spinlock_lock(&monitor->lock);
    pst__observer **end = &monitor->observers;
    while (*end != NULL)
        end = &(*end)->next;
    *end = observer;
    pst__store_relaxed(&monitor->check_count, monitor->check_count + (call.check != NULL));
    ck_spinlock_unlock(&monitor->lock);
    return PST_OK;
}

static void remove_one(pst_runtime *runtime, callee call, const void *context) {
    pst__monitor *monitor = &runtime->monitor;
    ck_spinlock_lock(&monitor->lock);
    pst__observer **link = &monitor->observers;
    while (*link != NULL && ((*link)->call.hook != call.hook || (*link)->call.check != call.check ||
                             (*link)->context != context))
        link = &(*link)->next;
    pst__observer *found = *link;
    if (found != NULL) {
        *link = found->next;
        pst__store_relaxed(&monitor->check_count, monitor->check_count - (call.check != NULL));
    }
    ck_spinlock_unlock(&monitor->lock);
    if (found == NULL) return;
    while (pst__load_acquire(&found->is_running)) /* pairs with the release of the call */
        (void)sched_yield();
    pst__heap_free(&runtime->heap, found, sizeof *found);
}

pst_status pst_runtime_add_poison_hook(pst_runtime *runtime, pst_poison_hook call, void *context) {
    if (runtime == NULL || call == NULL) return PST_EINVAL;
    const pst_status status = add(runtime, (callee){.hook = call}, context);
    /* A poison sets its status before it takes the lock: it has found the hook, or is seen here. */
    const pst_status poison = pst_runtime_status(runtime);
    if (status == PST_OK && poison != PST_OK) pst__monitor_call_hooks(runtime, poison);
    return status;
}

void pst_runtime_remove_poison_hook(pst_runtime *runtime, pst_poison_hook call, void *context) {
    if (runtime != NULL) remove_one(runtime, (callee){.hook = call}, context);
}

pst_status pst_runtime_add_health_check(pst_runtime *runtime, pst_health_check call,
                                        void *context) {
    if (runtime == NULL || call == NULL) return PST_EINVAL;
    return add(runtime, (callee){.check = call}, context);
}

void pst_runtime_remove_health_check(pst_runtime *runtime, pst_health_check call,
                                     const void *context) {
    if (runtime != NULL) remove_one(runtime, (callee){.check = call}, context);
}

void pst__monitor_free(pst_runtime *runtime) {
    for (pst__observer *observer = runtime->monitor.observers, *next; observer != NULL;
         observer = next) {
        next = observer->next;
        pst__heap_free(&runtime->heap, observer, sizeof *observer);
    }
}

/* ---- the watchdog's look ---------------------------------------------------------------- */

/* 1 at the look at which `count` has not changed for long enough, and only at that one. */
static int is_stalled(pst__lane_stall *stall, uint64_t count) {
    if (stall->looks == 0 || stall->count != count) {
        *stall = (pst__lane_stall){count, 1};
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

void pst__monitor_look(pst_runtime *runtime) {
    pst__monitor *monitor = &runtime->monitor;
    char text[PST__REPORT_BYTES];
    uint32_t nobody = 0;
    /* Acquires what the last one to look has released below. */
    if (!pst__cas_acq_rel(&monitor->is_looking, &nobody, 1)) return;
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next) {
        if (!look_at(lane, text, sizeof text)) continue;
        /* The log hook is called when the lane is free again. */
        (void)pst__add_relaxed(&monitor->reports, 1); /* a figure for pst_runtime_get_stats */
        (void)pst__runtime_fail(runtime, PST_ETIMEDOUT, "watchdog: %s", text);
        if (monitor->poisons) pst_runtime_poison(runtime, PST_ETIMEDOUT, NULL);
    }
    pst__monitor_check_health(runtime);
    pst__store_release(&monitor->is_looking, 0); /* pairs with the exchange above */
}

void pst__monitor_pump(pst_runtime *runtime) {
    pst__monitor *monitor = &runtime->monitor;
    /* Relaxed: a thread that starts now looks once too often. */
    if (monitor->interval_ns == 0 || pst__load_relaxed(&monitor->has_thread)) return;
    const uint64_t now = pst__now();
    uint64_t next = pst__load_relaxed(&monitor->next_look);
    /* One of the threads that find a look due takes it. Acquire-release only because it is one
     * operation for all: `is_looking` orders the looks. */
    if (now >= next && pst__cas_acq_rel(&monitor->next_look, &next, now + monitor->interval_ns))
        pst__monitor_look(runtime);
}

/* ---- the watchdog's thread -------------------------------------------------------------- */

static void *run(void *argument) {
    pst_runtime *runtime = argument;
    pst__monitor *monitor = &runtime->monitor;
    for (;;) {
        const uint32_t count = pst__park_count(&monitor->park);
        /* Acquire: pairs with the release in pst__monitor_stop. */
        if (pst__load_acquire(&monitor->stop)) break;
        pst__park_wait(&monitor->park, count, monitor->interval_ns);
        pst__monitor_look(runtime);
    }
    pst__store_release(&monitor->ended, 1); /* pairs with the acquire in has_ended */
    pst__runtime_wake_waiters(runtime);
    return NULL;
}

pst_status pst__monitor_start(pst_runtime *runtime) {
    pst__monitor *monitor = &runtime->monitor;
    uint32_t none = 0;
    /* One of the threads that create lanes together starts it. Acquire-release only because it is
     * one operation for all: pthread_create and _join order the rest. */
    if (monitor->interval_ns == 0 || !pst__cas_acq_rel(&monitor->has_thread, &none, 1))
        return PST_OK;
    const int error = pst__thread_start(&monitor->thread, run, runtime);
    if (error == 0) return PST_OK;
    pst__store_release(&monitor->has_thread, 0);
    return pst__runtime_fail(runtime, PST_ESYSTEM, "the watchdog's thread could not be started: %s",
                             strerror(error));
}

static int has_ended(const void *monitor) {
    /* Acquire: pairs with the release in run. */
    return (int)pst__load_acquire(&((const pst__monitor *)monitor)->ended);
}

pst_status pst__monitor_stop(pst_runtime *runtime) {
    pst__monitor *monitor = &runtime->monitor;
    /* Relaxed: no other thread uses the runtime any more. */
    if (!pst__load_relaxed(&monitor->has_thread)) return PST_OK;
    pst__store_release(&monitor->stop, 1); /* pairs with the acquire in run */
    pst__park_wake(&monitor->park);
    if (pst__wait_aside(runtime, has_ended, monitor) != PST_OK) return PST_ETIMEDOUT;
    (void)pthread_join(monitor->thread, NULL);
    pst__store_relaxed(&monitor->has_thread, 0);
    return PST_OK;
}
