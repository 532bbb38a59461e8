#include "sched/poison.h"

#include "base/clock.h"
#include "sched/flight.h"
#include "sched/launch.h"

#include <sched.h>

int pst__runtime_stop(pst_runtime *runtime, pst_status status) {
    int none = PST_OK;
    ck_spinlock_lock(&runtime->lock);
    if (runtime->poison == PST_OK) pst__store_relaxed(&runtime->poison_at, pst__now());
    /* Pairs with the acquire in pst_runtime_status. */
    const int first = pst__cas_acq_rel(&runtime->poison, &none, (int)status);
    if (first)
        for (pst_graph *graph = runtime->graphs; graph != NULL; graph = graph->next)
            pst__graph_cancel(graph, status);
    ck_spinlock_unlock(&runtime->lock);
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next)
        pst__lane_notify(lane);
    pst__runtime_wake_waiters(runtime);
    return first;
}

/* While nothing is canceled yet. */
static void record_failure(pst_runtime *runtime, pst_status status) {
    char text[PST__ERROR_BYTES];
    (void)pst_runtime_error(runtime, text, sizeof text);
    pst__flight_failed(runtime, status == PST_ETIMEDOUT ? PST_DUMP_DEADLINE : PST_DUMP_FAILURE,
                       status, text);
}

void pst_runtime_poison(pst_runtime *runtime, pst_status given, const char *text) {
    if (runtime == NULL || given >= 0) return;
    const pst_status status = pst__kept_status(given);
    /* The text first: whoever sees the poison finds it. */
    if (text != NULL && pst_runtime_status(runtime) == PST_OK)
        (void)pst__runtime_fail(runtime, status, "the runtime was stopped: %s", text);
    if (pst_runtime_status(runtime) == PST_OK) record_failure(runtime, status);
    /* The hooks last: no wait depends on them. */
    if (pst__runtime_stop(runtime, status)) pst__hooks_call(runtime, status);
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
static pst__observer *take(pst__observers *observers, int is_check, uint64_t round) {
    ck_spinlock_lock(&observers->lock);
    pst__observer *observer = observers->first;
    /* Acquire: pairs with the releases of the calls below; what the call before did is seen by this
     * one. */
    while (observer != NULL &&
           ((observer->call.check != NULL) != is_check || observer->round >= round ||
            pst__load_acquire(&observer->is_running)))
        observer = observer->next;
    if (observer != NULL) {
        observer->round = round;
        pst__store_relaxed(&observer->is_running, 1); /* the lock shows it to who removes it */
    }
    ck_spinlock_unlock(&observers->lock);
    return observer;
}

void pst__hooks_call(pst_runtime *runtime, pst_status status) {
    for (pst__observer *hook; (hook = take(&runtime->observers, 0, 1)) != NULL;) {
        hook->call.hook(hook->context, status);
        pst__store_release(&hook->is_running, 0); /* pairs with the acquires in take and remove */
    }
}

void pst__health_check(pst_runtime *runtime) {
    pst__observers *observers = &runtime->observers;
    /* Relaxed: a check that is added now is called the next time. */
    if (pst__load_relaxed(&observers->check_count) == 0) return;
    const uint64_t now = pst__now();
    uint64_t next = pst__load_relaxed(&observers->next_check);
    /* One of the threads that find a round due calls. Acquire-release only because it is one
     * operation for all: the lock orders the rounds. */
    if (now < next || !pst__cas_acq_rel(&observers->next_check, &next, now + PST__HEALTH_CHECK_NS))
        return;
    for (pst__observer *check; (check = take(observers, 1, now)) != NULL;) {
        if (pst_runtime_status(runtime) == PST_OK) check->call.check(check->context);
        pst__store_release(&check->is_running, 0); /* as above */
    }
}

static pst_status add(pst_runtime *runtime, callee call, void *context) {
    pst__observers *observers = &runtime->observers;
    pst__observer *observer = pst__heap_alloc(&runtime->heap, sizeof *observer);
    if (observer == NULL)
        return pst__runtime_fail(runtime, PST_ENOMEM, "no memory for a %s",
                                 call.hook != NULL ? "poison hook" : "health check");
    *observer = (pst__observer){.call = call, .context = context};
    ck_spinlock_lock(&observers->lock);
    pst__observer **end = &observers->first;
    while (*end != NULL)
        end = &(*end)->next;
    *end = observer;
    pst__store_relaxed(&observers->check_count, observers->check_count + (call.check != NULL));
    ck_spinlock_unlock(&observers->lock);
    return PST_OK;
}

static void remove_one(pst_runtime *runtime, callee call, const void *context) {
    pst__observers *observers = &runtime->observers;
    ck_spinlock_lock(&observers->lock);
    pst__observer **link = &observers->first;
    while (*link != NULL && ((*link)->call.hook != call.hook || (*link)->call.check != call.check ||
                             (*link)->context != context))
        link = &(*link)->next;
    pst__observer *found = *link;
    if (found != NULL) {
        *link = found->next;
        pst__store_relaxed(&observers->check_count, observers->check_count - (call.check != NULL));
    }
    ck_spinlock_unlock(&observers->lock);
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
    if (status == PST_OK && poison != PST_OK) pst__hooks_call(runtime, poison);
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

void pst__observers_free(pst_runtime *runtime) {
    for (pst__observer *observer = runtime->observers.first, *next; observer != NULL;
         observer = next) {
        next = observer->next;
        pst__heap_free(&runtime->heap, observer, sizeof *observer);
    }
}
