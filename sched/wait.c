/* Waiting for tasks and launches, and helping meanwhile. */
#include "base/clock.h"
#include "sched/calls.h"
#include "sched/flight.h"
#include "sched/poison.h"
#include "sched/pump.h"
#include "sched/report.h"
#include "sched/watchdog.h"

#include <inttypes.h>

#define IDLE_TURNS 32u /* in idle, from one look at the workers' lanes to the next */
#define BUSY_TURNS 64u /* that did something, until the clock and the watchdog have their look */

/* ---- waiting ---------------------------------------------------------------------------- */

/* Such lanes live by those who wait. Relaxed: a lane that gets its worker now is looked at once too
 * often. */
static int has_pumped_lane(const pst_runtime *runtime) {
    for (const pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next)
        if (pst__load_relaxed(&lane->worker) == NULL &&
            (pst__load_relaxed(&lane->asked) & PST__ASKED_HAS_TURNS))
            return 1;
    return 0;
}

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

typedef enum spun { SPUN_CAME, SPUN_BUSY, SPUN_IDLE } spun;

/* Looks, and turns meanwhile: until it has come, until the outer loop has to look at the clock, or
 * until turns have found nothing for long. A lane that has a worker is first of all its worker's:
 * each look of ours takes the lane's line from the worker's cache. So we look there now and then,
 * and go on as long as the worker leaves us something. */
static spun help_or_spin(pst_runtime *runtime, const pst__budget *budget) {
    int worker_is_away = 0;
    for (uint32_t idle = 0, busy = 0; idle < runtime->spin; idle++) {
        if (budget->is_enough(budget->argument) || pst_runtime_status(runtime) != PST_OK)
            return SPUN_CAME;
        const int looks = worker_is_away || idle % IDLE_TURNS == IDLE_TURNS - 1;
        const pst__help help =
            pst__runtime_help(runtime, looks ? PST__HELP_ALL : PST__HELP_PUMPED, budget);
        worker_is_away = looks && help.did;
        if (!help.did) {
            ck_pr_stall();
            continue;
        }
        idle = 0;
        if (help.is_slow || ++busy == BUSY_TURNS) return SPUN_BUSY;
    }
    return SPUN_IDLE;
}

static void unregister(pst_runtime **runtime) {
    (void)pst__sub_acq_rel(&(*runtime)->waiters, 1);
}

/* 0 when there was no reason to sleep. */
static int sleep_until(pst_runtime *runtime, const pst__budget *budget, uint64_t timeout_ns) {
    /* Registered first, then the fence, then the last looks: pairs with the fence in
     * pst__runtime_wake_waiters. */
    const uint32_t count = pst__park_count(&runtime->waiting);
    __attribute__((cleanup(unregister))) pst_runtime *registered = runtime;
    (void)pst__add_acq_rel(&registered->waiters, 1);
    pst__fence_store_load();
    if (budget->is_enough(budget->argument) || pst_runtime_status(runtime) != PST_OK ||
        pst__runtime_help(runtime, PST__HELP_ALL, budget).did)
        return 0;
    pst__park_wait(&runtime->waiting, count, timeout_ns);
    return 1;
}

static pst_status timed_out(pst__long_wait *wait) {
    pst__flight_enter(wait);
    pst__flight_failed(wait->runtime, PST_DUMP_DEADLINE, PST_ETIMEDOUT,
                       "a wait has passed its deadline");
    return PST_ETIMEDOUT;
}

/* Serves lanes until `holds` answers other than 0. PST_OK, PST_ETIMEDOUT past the runtime's
 * deadline, or the status of a poisoned runtime. `holds` must be cheap; `open`: see budget.h.
 * `given` says what for, to the caller's hook and to the flight record. */
static pst_status wait_until(int (*holds)(const void *argument), const void *argument,
                             const uint64_t *open, const pst__long_wait *given) {
    __attribute__((cleanup(pst__flight_leave))) pst__long_wait wait = *given;
    pst_runtime *runtime = wait.runtime = wait.asked.graph->runtime;
    const pst__budget budget = {PST__LAUNCHES_A_TURN, PST__TURN_NS, holds, argument, open};
    const int is_timed = runtime->deadline_ns != 0 || runtime->waiting_hook != NULL;
    const uint64_t begin = is_timed ? pst__now() : 0;
    uint64_t poll_ns = PST__POLL_FIRST_NS;
    for (;;) {
        const spun spun = help_or_spin(runtime, &budget);
        pst__watchdog_pump(runtime);
        pst__health_check(runtime);
        const pst_status poison = pst_runtime_status(runtime);
        if (poison != PST_OK) return poison;
        if (spun == SPUN_CAME) return PST_OK;
        uint64_t timeout = has_pumped_lane(runtime) ? poll_ns : PST__FOREVER;
        if (is_timed) {
            const uint64_t spent = pst__now() - begin;
            if (runtime->deadline_ns != 0 && spent >= runtime->deadline_ns) return timed_out(&wait);
            pst__wait_call_hook(runtime, &wait.what, spent);
            if (runtime->deadline_ns != 0) timeout = least(timeout, runtime->deadline_ns - spent);
            if (runtime->waiting_hook != NULL) timeout = least(timeout, PST__WAITING_HOOK_NS);
        }
        if (spun == SPUN_IDLE) pst__flight_enter(&wait);
        if (spun == SPUN_IDLE && sleep_until(runtime, &budget, timeout))
            poll_ns = pst__poll_longer(poll_ns);
        else
            poll_ns = PST__POLL_FIRST_NS;
    }
}

/* ---- a task in a launch ----------------------------------------------------------------- */

static int has_come(const void *argument) {
    const pst__question *asked = argument;
    pst_status status;
    const pst__task_state state = pst__look(asked, &status);
    return pst__task_has_ended(state) || (asked->launched_suffices && state == PST__TASK_LAUNCHED);
}

static pst_status check_number(const pst_launch *launch) {
    const pst_graph *graph = launch->graph;
    const uint64_t latest = pst__graph_number(graph);
    const int known =
        graph->kind == PST_GRAPH_GROWING
            ? launch->number == 0
            : launch->number != 0 && launch->number <= latest && launch->number + 2 > latest;
    if (known) return PST_OK;
    return pst__runtime_fail(graph->runtime, PST_ESTATE,
                             "graph %s: launch %" PRIu64
                             " is not known: its latest launch is %" PRIu64
                             ", and only that and the one before can be asked about",
                             graph->name, launch->number, latest);
}

static pst_status ask(const pst_launch *launch, pst_task task, pst__question *asked) {
    if (launch->graph == NULL) return PST_EINVAL;
    *asked =
        (pst__question){launch->graph, pst__graph_node(launch->graph, task), launch->number, 0};
    if (asked->node == NULL)
        return pst__runtime_fail(launch->graph->runtime, PST_EINVAL,
                                 "graph %s: what is asked about is no task of this graph",
                                 launch->graph->name);
    return check_number(launch);
}

pst_status pst_task_test(pst_launch launch, pst_task task) {
    pst__question asked;
    pst_status status = ask(&launch, task, &asked);
    if (status != PST_OK) return status;
    return pst__task_has_ended(pst__look(&asked, &status)) ? status : PST_PENDING;
}

/* ---- a task's event --------------------------------------------------------------------- */

/* The caller owns the lane. */
static pst_event *owned_event_of(const pst_lane *lane, const pst__node *node) {
    const pst_device_ops *ops = lane->device->ops;
    pst__detail *detail = node->detail;
    /* Relaxed: the lane's owners alone change it from launched on, and hand it over with the lane.
     */
    const int in_flight = pst__word_state(pst__load_relaxed(&node->word)) == PST__TASK_LAUNCHED;
    if (!lane->asynchronous && !in_flight) return lane->runtime->done_event;
    /* Those behind a task that has its event already may be looking at it, unowned. */
    if (pst__detail_make_event(detail, lane->device) != PST_OK) return NULL;
    if (in_flight && !detail->event_recorded) {
        if (ops->event_record(lane->device, detail->event, lane->stream) != PST_OK) return NULL;
        detail->event_recorded = 1;
    }
    return detail->event;
}

/* The event that stands for a node of this lane that is launched or has ended; recorded now if
 * nobody foresaw the question, for which the caller waits until the lane's owner ends its turn.
 * PST_EDEVICE (no memory, or the device failed), PST_ETIMEDOUT. */
static pst_status event_of(pst_lane *lane, pst__node *node, pst_event **event) {
    *event = NULL;
    /* Acquire: pairs with the release in pst__node_become. */
    const pst__task_state state = pst__word_state(pst__load_acquire(&node->word));
    if (!lane->asynchronous && pst__task_has_ended(state)) {
        *event = lane->runtime->done_event;
        return PST_OK;
    }
    if (node->flags & PST__NODE_EVENT) { /* recorded with the launch */
        *event = node->detail->event;
        return PST_OK;
    }
    if (pst__lane_is_gone(lane)) return PST_OK; /* all its tasks have ended */
    const pst_status status = pst__lane_await(lane->leader);
    if (status != PST_OK) return status;
    *event = owned_event_of(lane, node);
    pst__lane_disown(lane->leader, 0, NULL);
    return *event == NULL ? PST_EDEVICE : PST_OK;
}

/* Is the gate's latest opening that of this launch? With its event, if it has recorded one, on this
 * device (NULL: on any). */
static int is_there(const pst__question *asked, const pst_device *device, pst_event **event) {
    pst__detail *gate = asked->node->detail;
    ck_spinlock_lock(&gate->opening);
    const int is_latest = gate->event_number == (uint32_t)asked->number;
    const int is_wanted = gate->event_recorded && (device == NULL || device == gate->event_device);
    if (is_latest && is_wanted) *event = gate->event;
    ck_spinlock_unlock(&gate->opening);
    return is_latest;
}

static pst_event *event_of_gate(const pst__question *asked) {
    pst_status status;
    pst_event *event = NULL;
    if (pst__task_has_ended(pst__look(asked, &status))) (void)is_there(asked, NULL, &event);
    return event;
}

pst_event *pst_task_event(pst_launch launch, pst_task task) {
    pst__question asked;
    pst_status status;
    if (ask(&launch, task, &asked) != PST_OK) return NULL;
    if (asked.node->lane == NULL) return event_of_gate(&asked);
    const pst__task_state state = pst__look(&asked, &status);
    if (state < PST__TASK_LAUNCHED) return NULL;
    pst_event *event;
    (void)event_of(asked.node->lane, asked.node, &event);
    return event;
}

/* ---- the waits -------------------------------------------------------------------------- */

static pst_status give_wait(const pst__question *asked, pst_lane *borrowed, pst_event *event) {
    const pst_status status =
        borrowed->device->ops->stream_wait(borrowed->device, borrowed->stream, event);
    if (status >= PST_OK) return status;
    return pst__runtime_fail(asked->graph->runtime, status,
                             "lane %s: its stream cannot wait for task %s: %s: %s", borrowed->name,
                             pst__node_name(asked->node), pst_status_text(status),
                             pst__device_text(borrowed->device));
}

/* The gate has passed. The device is called without the lock: what fails there may end all gates.
 */
static pst_status wait_for_opening(const pst__question *asked, pst_lane *borrowed) {
    pst_event *event = NULL;
    const int was_there = is_there(asked, borrowed->device, &event);
    const pst_status status = event == NULL ? PST_OK : give_wait(asked, borrowed, event);
    if (status != PST_OK || (was_there && is_there(asked, borrowed->device, &event))) return status;
    return pst__runtime_fail(asked->graph->runtime, PST_ESTATE,
                             "lane %s: gate %s was opened again since launch %" PRIu64
                             ": wait for it before that",
                             borrowed->name, pst__node_name(asked->node), asked->number);
}

/* The task is launched, or has ended: then nothing is left to wait for, and its lane may be gone.
 */
static pst_status stream_waits(const pst__question *asked, pst_lane *borrowed) {
    pst__node *node = asked->node;
    pst_status status;
    if (node->lane == NULL) return wait_for_opening(asked, borrowed);
    if (pst__task_has_ended(pst__look(asked, &status))) return PST_OK;
    pst_event *event;
    status = event_of(node->lane, node, &event);
    if (status == PST_OK) return give_wait(asked, borrowed, event);
    return pst__runtime_fail(asked->graph->runtime, status,
                             "lane %s: no event could be recorded for task %s: %s", borrowed->name,
                             pst__node_name(node),
                             status == PST_ETIMEDOUT ? "its lane's thread is in a task"
                                                     : pst__device_text(borrowed->device));
}

/* The deadline has passed, and not because the watchdog has said so already. */
static int has_timed_out(const pst_runtime *runtime, pst_status status) {
    return status == PST_ETIMEDOUT && pst_runtime_status(runtime) == PST_OK;
}

static pst__long_wait waiting_for(const pst__question *asked) {
    const pst__node *node = asked->node;
    const pst_waiting what = {0, node->lane == NULL ? "" : node->lane->name, pst__node_name(node),
                              pst__node_ticket(node)};
    return (pst__long_wait){.what = what, .asked = *asked};
}

/* The stream's wait should cost nothing: a task that is not launched by then is counted. */
static pst_status wait_for_launch(const pst__question *asked) {
    pst_runtime *runtime = asked->graph->runtime;
    const pst__long_wait wait = waiting_for(asked);
    if (!asked->launched_suffices || has_come(asked))
        return wait_until(has_come, asked, NULL, &wait);
    const uint64_t begin = pst__now();
    const pst_status status = wait_until(has_come, asked, NULL, &wait);
    /* Relaxed: figures for pst_runtime_get_stats. */
    (void)pst__add_relaxed(&runtime->late_launches, 1);
    (void)pst__add_relaxed(&runtime->late_launch_ns, pst__now() - begin);
    return status;
}

static pst_status wait_until_come(const pst__question *asked) {
    pst_status status = wait_for_launch(asked);
    if (has_timed_out(asked->graph->runtime, status)) return pst__report_timeout(asked);
    if (status == PST_OK) (void)pst__look(asked, &status);
    return status;
}

static pst_status may_wait(const pst__question *asked) {
    return pst__calls_refuse(asked->graph->runtime, "a wait for", pst__node_name(asked->node));
}

pst_status pst_task_wait_launch(pst_launch launch, pst_task task) {
    pst__question asked;
    pst_status status = ask(&launch, task, &asked);
    if (status == PST_OK) status = may_wait(&asked);
    if (status != PST_OK) return status;
    asked.launched_suffices = asked.node->lane != NULL && asked.node->lane->asynchronous;
    return wait_until_come(&asked);
}

pst_status pst_task_wait(pst_launch launch, pst_task task, pst_lane *borrowed) {
    pst__question asked;
    pst_status status = ask(&launch, task, &asked);
    if (status == PST_OK) status = pst__graph_check_borrowed(borrowed, asked.node);
    if (status == PST_OK) status = may_wait(&asked);
    if (status != PST_OK) return status;
    const int by_stream = borrowed != NULL && borrowed->asynchronous;
    const pst_lane *lane = asked.node->lane;
    asked.launched_suffices =
        by_stream && lane != NULL && pst__lane_waits_on(borrowed, lane->device);
    status = wait_until_come(&asked);
    if (status == PST_OK && by_stream && (lane == NULL || asked.launched_suffices))
        status = stream_waits(&asked, borrowed);
    return status;
}

static int run_is_done(const void *argument) {
    const pst_launch *launch = argument;
    const pst__run *run = pst__graph_run(launch->graph, launch->number);
    /* A later launch in its place means the same. Relaxed: a number to compare. */
    return pst__run_is_done(launch->graph, run) ||
           pst__load_relaxed(&run->number) != launch->number;
}

pst_status pst_launch_wait(pst_launch launch) {
    if (launch.graph == NULL) return PST_EINVAL;
    pst_graph *graph = launch.graph;
    pst_status status = check_number(&launch);
    if (status == PST_OK)
        status = pst__calls_refuse(graph->runtime, "a wait for all of graph", graph->name);
    if (status != PST_OK) return status;
    const pst__run *run = pst__graph_run(graph, launch.number);
    const pst__long_wait wait = {.what = {.lane = "", .task = ""},
                                 .asked = {graph, NULL, launch.number, 0}};
    status = wait_until(run_is_done, &launch, graph->kind == PST_GRAPH_SEALED ? &run->open : NULL,
                        &wait);
    if (has_timed_out(graph->runtime, status)) return pst__report_launch_timeout(&launch);
    if (status != PST_OK) return status;
    /* Relaxed: run_is_done has acquired the counters, which the status comes before. */
    return pst__load_relaxed(&run->number) == launch.number
               ? (pst_status)pst__load_relaxed(&run->status)
               : PST_OK;
}
