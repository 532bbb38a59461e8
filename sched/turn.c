/* A lane's turn: what has arrived, what is done, what can be launched. */
#include "sched/growing.h"
#include "sched/order.h"
#include "sched/trace_hooks.h"

#include <inttypes.h>
#include <stdio.h>

/* Launches on a lane that has ever more of them, until what is done there is asked about: the
 * questions cost the device's driver more than a launch costs us. */
#define ASK_EVERY 16u

/* ---- the head of the queue -------------------------------------------------------------- */

/* What is ready by now, also what has arrived since the turn began, competes for the launch. */
static pst__node *most_urgent(pst_lane *lane) {
    if (!pst__arrivals_empty(&lane->arrivals)) pst__arrivals_move(&lane->arrivals, &lane->ready);
    for (pst__node *node; (node = pst__lane_first(lane)) != NULL;) {
        pst__lane_take_first(lane);
        pst__levels_add(&lane->levels, node);
    }
    return pst__levels_head(&lane->levels);
}

/* The node to launch next, which stays in the queue; NULL when there is none yet. */
static pst__node *head_of(pst_lane *lane) {
    if (lane->order == PST_LANE_BY_PRIORITY) return most_urgent(lane);
    pst__node *node = pst__lane_first(lane);
    if (node == NULL) return NULL;
    return lane->order == PST_LANE_BY_READINESS || pst__node_is_ready(node) ? node : NULL;
}

static void take_head(pst_lane *lane) {
    if (lane->order == PST_LANE_BY_PRIORITY)
        pst__levels_remove_head(&lane->levels);
    else
        pst__lane_take_first(lane);
}

/* ---- launching -------------------------------------------------------------------------- */

/* The status with which the node ends without running, PST_OK if it is to run. Relaxed: a cancel
 * makes no promise about tasks that are being launched at that moment. */
static pst_status stop_of(const pst__node *node) {
    pst_status inherited = pst__pending_status(pst__load_relaxed(&node->pending));
    return inherited < 0 ? inherited : (pst_status)pst__load_relaxed(&node->graph->stop);
}

static pst_status wait_cross_events(const pst__node *node, const pst_lane *lane) {
    const pst_graph *graph = node->graph;
    if (graph->cross_first == NULL) return PST_OK;
    const uint32_t index = pst__node_index(node);
    for (uint32_t c = graph->cross_first[index]; c < graph->cross_first[index + 1]; c++) {
        const pst__node *from = &graph->nodes[graph->cross[c]];
        if (!pst__is_early(from, lane)) continue;
        pst_status status =
            lane->device->ops->stream_wait(lane->device, lane->stream, from->detail->event);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* In flight from the launch before: it has to end there first, also when it is not to run now. */
static int is_in_flight(const pst__node *node) {
    return pst__word_state(node->word) == PST__TASK_LAUNCHED;
}

/* The waits before a launch. PST_PENDING: not yet, ask again. */
static pst_status wait_before(const pst__node *node, const pst_lane *lane) {
    const pst__detail *detail = node->detail;
    if (detail == NULL) return PST_OK;
    for (uint32_t i = 0; i < detail->after_count; i++) {
        pst_status status =
            lane->device->ops->stream_wait(lane->device, lane->stream, detail->after[i]);
        if (status != PST_OK) return status;
    }
    if (!lane->asynchronous) return PST_OK;
    return node->flags & PST__NODE_GROWING ? pst__grown_wait_events(node, lane)
                                           : wait_cross_events(node, lane);
}

static pst_status call_launch(const pst__node *node, const pst_lane *lane) {
    if (node->start == NULL) return PST_OK;
    const pst_work work = {node->start, node->detail == NULL ? NULL : node->detail->test,
                           node->argument};
    return lane->device->ops->launch(lane->device, lane->stream, &work);
}

/* What the work itself or its device has said about it. */
static void get_reason(const pst_lane *lane, char *reason, size_t size) {
    pst_runtime *runtime = lane->runtime;
    if (pst__load_relaxed(&runtime->error.count) != lane->texts)
        (void)pst__error_get(&runtime->error, reason, size);
    else
        (void)snprintf(reason, size, "%s", pst__device_text(lane->device));
}

/* In a poisoned runtime the text of the poison stays: what fails now fails because of it. */
static void report_failure(const pst__node *node, const pst_lane *lane, pst_status status) {
    pst_runtime *runtime = lane->runtime;
    char reason[512], text[PST__ERROR_BYTES];
    get_reason(lane, reason, sizeof reason);
    (void)snprintf(text, sizeof text,
                   "lane %s: task %s (ticket %" PRIu64 ") of graph %s failed: %s%s%s", lane->name,
                   pst__node_name(node), pst__node_ticket(node), node->graph->name,
                   pst_status_text(status), reason[0] == '\0' ? "" : ": ", reason);
    if (pst_runtime_status(runtime) == PST_OK)
        (void)pst__runtime_fail(runtime, status, "%s", text);
    else
        pst__log(&runtime->error, PST_LOG_ERROR, "rank %d: %s", runtime->rank, text);
}

/* Relaxed: what this thread writes itself is what it asks about. */
static void note_texts(pst_lane *lane) {
    lane->texts = pst__load_relaxed(&lane->runtime->error.count);
}

static void end_failed(pst__advance *advance, pst__node *node, uint64_t number, pst_status status,
                       pst__phase phase) {
    report_failure(node, advance->lane, status);
    pst__node_end(advance, node, number, PST__TASK_FAILED, status, phase);
}

static void into_flight(pst_lane *lane, pst__node *node) {
    node->detail->flight_next = NULL;
    if (lane->flight_first == NULL)
        lane->flight_first = node;
    else
        lane->flight_last->detail->flight_next = node;
    lane->flight_last = node;
    /* Gates come when they have passed, which need not be the order of their records. */
    if (node->detail->event_recorded && node->lane != NULL) lane->newest = node;
}

/* The device has it. Its event is recorded before successors may ask their streams to wait. */
static void launched_on_device(pst__advance *advance, pst__node *node, uint64_t number) {
    pst_lane *lane = advance->lane;
    pst_status status = PST_OK;
    if (node->flags & PST__NODE_EVENT)
        status = lane->device->ops->event_record(lane->device, node->detail->event, lane->stream);
    if (status < 0) {
        /* The work runs and nobody can tell when it ends: nothing after it is in order. */
        pst_runtime_poison(lane->runtime, status, "an event could not be recorded");
        if (node->detail->launched_at != 0) pst__hook_failed(lane, node);
        end_failed(advance, node, number, status, PST__ALL);
        return;
    }
    node->detail->event_recorded = (node->flags & PST__NODE_EVENT) != 0;
    into_flight(lane, node);
    pst__node_become(node, number, PST__TASK_LAUNCHED, PST_OK);
    pst__lane_count(lane, node->graph, pst__graph_run(node->graph, number), 1, 0);
    pst__runtime_wake_seen_waiters(lane->runtime);
    pst__advance_release(advance, node, PST__WHEN_LAUNCHED, PST_OK);
}

/* A host launch that will say later how it went. */
static void launched_pending(pst__advance *advance, pst__node *node, uint64_t number) {
    pst_lane *lane = advance->lane;
    lane->current = node;
    pst__node_become(node, number, PST__TASK_LAUNCHED, PST_OK);
    pst__lane_count(lane, node->graph, pst__graph_run(node->graph, number), 1, 0);
}

/* Not inlined, so that tasks without a name do not pay for it. */
__attribute__((noinline)) static void note_recent(pst_lane *lane, const pst__node *node) {
    pst__recent_note(&lane->recent, node->graph->id, node->detail->name, node->detail->ticket);
}

/* Stores only what changes: a growing graph's detail comes from the adding thread's cache and goes
 * back there. */
static void forget_last_launch(pst__detail *detail, uint64_t begin) {
    if (detail->event_recorded) detail->event_recorded = 0;
    if (detail->launched_at != begin) detail->launched_at = begin;
}

static void launch(pst__advance *advance, pst__node *node, uint64_t number) {
    pst_lane *lane = advance->lane;
    const uint64_t begin = pst__hook_begin(lane);
    pst__lane_beat(lane);
    if (node->detail != NULL) {
        forget_last_launch(node->detail, begin);
        if (node->detail->name != NULL) note_recent(lane, node);
    }
    if (begin != 0) pst__hook_launching(lane, node);
    pst_status status = call_launch(node, lane);
    const uint64_t end = begin == 0 ? 0 : pst__hook_launched(lane, node, number, begin);
    if (status == PST_PENDING &&
        (lane->asynchronous || node->detail == NULL || node->detail->test == NULL))
        status = PST_EINVAL;
    if (status < 0) {
        if (begin != 0) pst__hook_failed(lane, node);
        end_failed(advance, node, number, status, PST__ALL);
    } else if (lane->asynchronous) {
        launched_on_device(advance, node, number);
    } else if (status == PST_PENDING) {
        launched_pending(advance, node, number);
    } else {
        if (begin != 0) pst__hook_done(lane, node, begin, end);
        pst__node_end(advance, node, number, PST__TASK_DONE, PST_OK, PST__ALL);
    }
}

/* Launches the head of `queue`, the lane's own or its leader's, or ends it if it is not to run. 0
 * when there is nothing to launch yet. */
static int advance_head(pst__advance *advance, pst_lane *queue) {
    pst_lane *lane = advance->lane;
    pst__node *node = head_of(queue);
    if (node == NULL) return 0;
    note_texts(lane);
    const pst_status stop = stop_of(node);
    const pst_status waits = is_in_flight(node) ? PST_PENDING
                             : stop < 0         ? PST_OK
                                                : wait_before(node, lane);
    if (waits == PST_PENDING) {
        lane->needs_poll = 1;
        return 0;
    }
    take_head(queue);
    const uint64_t number = node->graph->number;
    /* Relaxed: armed before the launch is published, and the next one's arrivals come after that.
     */
    pst__store_relaxed(&node->pending, node->predecessors);
    if (node->flags & PST__NODE_GROWING) pst__grown_forget_predecessors(node);
    if (stop < 0)
        pst__node_end(advance, node, number, PST__TASK_CANCELED, stop, PST__ALL);
    else if (waits < 0)
        end_failed(advance, node, number, waits, PST__ALL);
    else
        launch(advance, node, number);
    if (advance->gates.first != NULL) pst__advance_finish(advance);
    return 1;
}

/* ---- completions ------------------------------------------------------------------------ */

/* After a poison launched work is given some time to end, and then abandoned. Acquire: pairs with
 * the exchange in pst_runtime_poison, so that its time is seen as well. */
static int is_abandoned(const pst_runtime *runtime) {
    return pst__load_acquire(&runtime->poison) != PST_OK && runtime->grace_ns != 0 &&
           pst__now() - pst__load_relaxed(&runtime->poison_at) > runtime->grace_ns;
}

static int end_current(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    pst__node *node = lane->current;
    note_texts(lane);
    pst_status status = lane->device->ops->progress(lane->device, lane->stream);
    if (status == PST_PENDING && is_abandoned(lane->runtime))
        status = (pst_status)pst__load_relaxed(&lane->runtime->poison);
    if (status == PST_PENDING) {
        lane->needs_poll = 1;
        return 0;
    }
    lane->current = NULL;
    lane->ends++;
    const uint64_t number = pst__word_number(node->word);
    if (node->detail->launched_at != 0)
        pst__hook_done(lane, node, node->detail->launched_at, pst__now());
    if (status < 0)
        end_failed(advance, node, number, status, PST__ALL);
    else
        pst__node_end(advance, node, number, PST__TASK_DONE, PST_OK, PST__ALL);
    pst__advance_finish(advance);
    return 1;
}

static pst_event *event_in_flight(const pst_lane *lane, const pst__node *node) {
    if (node->detail->event_recorded) return node->detail->event;
    return node == lane->tail ? lane->tail_event : NULL;
}

static void end_oldest(pst__advance *advance, pst_status status) {
    pst_lane *lane = advance->lane;
    pst__node *node = lane->flight_first;
    const uint64_t number = node->lane == NULL ? node->graph->number : pst__word_number(node->word);
    lane->flight_first = node->detail->flight_next;
    lane->ends++;
    if (node == lane->tail) lane->tail = NULL;
    if (node == lane->newest) lane->newest = NULL;
    if (node == lane->mark) lane->mark = NULL;
    if (node->detail->launched_at != 0) pst__hook_done_on_device(lane, node, number);
    pst__node_end(advance, node, number, status < 0 ? PST__TASK_FAILED : PST__TASK_DONE, status,
                  PST__WHEN_DONE);
}

static pst__node *find_watched(const pst_lane *lane) {
    pst__node *node = lane->flight_first;
    while (node != NULL && event_in_flight(lane, node) == NULL)
        node = node->detail->flight_next;
    return node;
}

/* A failure after the launch: what the device did from there on is unknown. */
static void lose_flights(pst__advance *advance, pst_status status) {
    pst_lane *lane = advance->lane;
    lane->watched = NULL;
    report_failure(lane->flight_first, lane, status);
    pst_runtime_poison(lane->runtime, status, NULL);
    while (lane->flight_first != NULL)
        end_oldest(advance, status);
    pst__advance_finish(advance);
}

/* The last tasks in flight have no event of their own: one for all of them is recorded, when
 * nothing can be launched behind them for now. */
static void mark_tail(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    if (lane->flight_first == NULL || lane->tail != NULL ||
        lane->flight_last->detail->event_recorded)
        return;
    const pst_device_ops *ops = lane->device->ops;
    pst_status status = ops->event_record(lane->device, lane->tail_event, lane->stream);
    if (status < 0)
        lose_flights(advance, status);
    else
        lane->tail = lane->newest = lane->flight_last;
}

/* What the device says of a task in flight. */
static pst_status ask(pst_lane *lane, const pst__node *node) {
    note_texts(lane);
    const pst_status status =
        lane->device->ops->event_query(lane->device, event_in_flight(lane, node));
    if (status != PST_PENDING || !is_abandoned(lane->runtime)) return status;
    return (pst_status)pst__load_relaxed(&lane->runtime->poison);
}

/* The tasks up to `last` are done, or it has failed. */
static void end_up_to(pst__advance *advance, const pst__node *last, pst_status status) {
    pst_lane *lane = advance->lane;
    lane->watched = NULL;
    if (status < 0) {
        lose_flights(advance, status);
        return;
    }
    for (const pst__node *ended = NULL; ended != last;) {
        ended = lane->flight_first;
        end_oldest(advance, PST_OK);
    }
    pst__advance_finish(advance);
}

/* From the oldest on, as there is time; if the newest is done, those between are not asked about: a
 * question costs as much as many launches. */
static int end_flights(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    const pst__node *newest = lane->newest;
    int ended = 0;
    for (;; ended = 1) {
        if (lane->watched == NULL) lane->watched = find_watched(lane);
        const pst__node *last = lane->watched;
        if (last == NULL) return ended;
        const pst_status status = ask(lane, last);
        if (status == PST_PENDING) {
            lane->needs_poll = 1;
            return ended;
        }
        if (status == PST_OK && !ended && newest != NULL && newest != last &&
            ask(lane, newest) == PST_OK)
            last = newest;
        end_up_to(advance, last, status);
    }
}

/* Between launches: one question, about the task that was the newest at the last one. So the tasks
 * in flight are at most those that the device has not done and two rounds of launches. */
static int end_marked_flights(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    const pst_status status = lane->mark == NULL ? PST_PENDING : ask(lane, lane->mark);
    if (status != PST_PENDING) end_up_to(advance, lane->mark, status);
    if (lane->mark == NULL) lane->mark = lane->newest;
    return status != PST_PENDING;
}

/* ---- the turn --------------------------------------------------------------------------- */

/* On a borrowed lane only gates arrive, each with its event recorded: they are in flight at once.
 */
static void gates_into_flight(pst_lane *lane) {
    while (lane->ready.first != NULL) {
        pst__node *gate = lane->ready.first;
        pst__fifo_remove_first(&lane->ready);
        into_flight(lane, gate);
    }
}

static uint32_t launch_some(pst__advance *advance, pst_lane *queue, uint32_t budget) {
    uint32_t launched = 0;
    while (launched < budget && advance->lane->current == NULL && advance_head(advance, queue))
        launched++;
    return launched;
}

static int ask_after_launches(pst__advance *advance, uint32_t launched) {
    pst_lane *lane = advance->lane;
    lane->unasked += launched;
    if (launched > 0 && lane->unasked < ASK_EVERY) return 0;
    lane->unasked = 0;
    return launched == 0 ? end_flights(advance) : end_marked_flights(advance);
}

int pst__lane_serve(pst_lane *lane, pst_lane *queue, uint32_t budget) {
    pst__advance advance = {.lane = lane};
    int changed = 0;
    lane->needs_poll = 0;
    if (lane->mode == PST_LANE_BORROWED) gates_into_flight(lane);
    if (lane->current != NULL) changed |= end_current(&advance);
    if (lane->mode == PST_LANE_BORROWED) {
        changed |= end_flights(&advance);
    } else {
        const uint32_t launched = launch_some(&advance, queue, budget);
        changed |= ask_after_launches(&advance, launched) | (launched > 0);
        mark_tail(&advance);
        if (lane->current != NULL) lane->needs_poll = 1;
    }
    if (lane->flight_first != NULL) lane->needs_poll = 1;
    return changed;
}

int pst__lane_turn(pst_lane *lane, uint32_t budget) {
    pst__lane_beat(lane);
    if (!pst__arrivals_empty(&lane->arrivals)) pst__arrivals_move(&lane->arrivals, &lane->ready);
    return lane->follower == NULL ? pst__lane_serve(lane, lane, budget)
                                  : pst__order_turn(lane, budget);
}
