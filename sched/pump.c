/* pst_run_once and how a foreign loop knows when to call it. */
#include "sched/pump.h"

#include "sched/graph.h"
#include "sched/poison.h"
#include "sched/turn.h"
#include "sched/watchdog.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static const pst__budget pump_budget = {.launches = 64, .nanoseconds = PST__TURN_NS};

/* ---- the signal ------------------------------------------------------------------------- */

/* A turn has found nothing: takes the signal back. 1 when something may have come since that turn,
 * so that another look is due. The descriptor is emptied first: whoever signals after the store
 * below writes after the read. */
static int take_back(pst__pump *pump) {
    uint64_t count;
    /* Acquire: pairs with the release in pst_fd. */
    const int descriptor = pst__load_acquire(&pump->descriptor);
    const int was_readable =
        descriptor >= 0 && read(descriptor, &count, sizeof count) == (ssize_t)sizeof count;
    /* Acquire-release: pairs with the exchange in call_pumps (lane.c). */
    if (!pst__swap_acq_rel(&pump->signalled, 0)) return was_readable;
    /* Orders the store above with the looks of the turn that follows; see pst__lane_notify. */
    pst__fence_store_load();
    return 1;
}

pst_status pst_fd(pst_runtime *runtime, int *descriptor) {
    if (runtime == NULL || descriptor == NULL) return PST_EINVAL;
    pst__pump *pump = &runtime->pump;
    ck_spinlock_lock(&runtime->lock);
    int made = pump->descriptor;
    if (made < 0) {
        /* Readable, as nobody wrote before: the first look comes without having been asked for. */
        made = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
        pst__store_release(&pump->descriptor, made); /* pairs with the acquires above */
    }
    ck_spinlock_unlock(&runtime->lock);
    *descriptor = made;
    if (made < 0)
        return pst__runtime_fail(runtime, PST_ESYSTEM, "pst_fd: eventfd: %s", strerror(errno));
    return PST_OK;
}

/* ---- turns ------------------------------------------------------------------------------ */

/* Whom the calling thread serves beside the workers. Relaxed: a lane that gets its worker now is
 * polled once too often. */
static int is_meant(const pst_lane *lane, pst__helped which) {
    const uint32_t asked = pst__load_relaxed(&lane->asked);
    if (!(asked & PST__ASKED_HAS_TURNS)) return 0;
    if (pst__load_relaxed(&lane->worker) == NULL) return (which & PST__HELP_PUMPED) != 0;
    return (asked & PST__ASKED_TAKES_HELP) && (which & PST__HELP_WORKERS);
}

/* The lane goes back also when a task of the user's does not return. */
static void hand_back(pst__help *help) {
    pst_lane *lane = help->lane;
    pst__lane_wake_waiters(lane);
    pst__lane_disown(lane, help->did, NULL);
}

static void help_lane(pst_lane *lane, const pst__budget *budget, pst__help *all) {
    __attribute__((cleanup(hand_back))) pst__help help = {.lane = lane, .did = 1};
    help.did = pst__lane_turn(lane, budget);
    all->did |= help.did;
    all->is_slow |= lane->pace.between == 1;
    all->pending |= lane->needs_poll && pst__load_relaxed(&lane->worker) == NULL;
}

pst__help pst__runtime_help(pst_runtime *runtime, pst__helped which, const pst__budget *budget) {
    pst__help help = {0};
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next) {
        if (lane->leader != lane || !is_meant(lane, which))
            continue; /* its leader's turn is its own */
        if (pst__lane_try_own(lane))
            help_lane(lane, budget, &help);
        else if (pst__load_relaxed(&lane->worker) == NULL)
            help.pending = 1; /* another thread has it: nobody knows what it leaves */
    }
    return help;
}

static uint32_t next_poll(uint32_t poll, int changed, int pending) {
    if (!pending) return 0;
    if (changed || poll == 0) return PST__POLL_FIRST_NS;
    return (uint32_t)pst__poll_longer(poll);
}

/* `seen` is from before the turn: a thread that has found nothing pending says so only if nobody
 * else has had a word since, as what another thread found may be later. The order of the changes is
 * all that matters: the exchange is acquire-release only because it is one operation for all. */
static void set_poll(pst__pump *pump, uint64_t seen, int changed, int pending) {
    uint64_t next;
    do
        next = ((seen >> 32) + 1) << 32 | next_poll((uint32_t)seen, changed, pending);
    while (!pst__cas_acq_rel(&pump->poll, &seen, next) && pending);
}

pst_status pst_run_once(pst_runtime *runtime, int *idle) {
    if (runtime == NULL) return PST_EINVAL;
    const uint64_t poll = pst__load_relaxed(&runtime->pump.poll); /* see set_poll */
    pst__help help = pst__runtime_help(runtime, PST__HELP_ALL, &pump_budget);
    if (!help.did && take_back(&runtime->pump))
        help = pst__runtime_help(runtime, PST__HELP_ALL, &pump_budget);
    set_poll(&runtime->pump, poll, help.did, help.pending);
    pst__watchdog_pump(runtime);
    if (help.pending) pst__health_check(runtime);
    if (help.did && idle == NULL) return PST_OK;
    const int is_idle = pst__runtime_is_idle(runtime);
    if (idle != NULL) *idle = is_idle;
    return help.did || is_idle ? PST_OK : PST_PENDING;
}

int64_t pst_timeout(const pst_runtime *runtime) {
    /* Relaxed: what is signalled after this look makes the descriptor readable. */
    if (runtime == NULL || pst__load_relaxed(&runtime->pump.signalled)) return 0;
    /* Relaxed: this thread's own turn was the last to change it, or a later one. */
    const uint32_t poll = (uint32_t)pst__load_relaxed(&runtime->pump.poll);
    return poll == 0 ? -1 : (int64_t)poll;
}
