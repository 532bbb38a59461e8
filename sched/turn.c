/* A lane's turn: what has arrived, what can be launched, what the host's work has done. */
#include "sched/calls.h"
#include "sched/failed.h"
#include "sched/flights.h"
#include "sched/growing.h"
#include "sched/order.h"
#include "sched/trace_hooks.h"

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

/* The node to launch next, which stays in the queue; NULL when there is none yet. Of an order it is
 * one of the lane that launch_in_order serves: within a turn nothing else comes first. */
static pst__node *head_of(pst_lane *lane) {
    if (lane->order == PST_LANE_BY_PRIORITY) return most_urgent(lane);
    pst__node *node = pst__lane_first(lane);
    const int waits =
        lane->order == PST_LANE_BY_SUBMISSION && node != NULL && !pst__node_is_ready(node);
    return waits ? NULL : node;
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

static pst_status call_launch(pst__advance *advance, pst__node *node) {
    const pst_lane *lane = advance->lane;
    if (node->start == NULL) return PST_OK;
    const pst_work work = {node->start, node->detail == NULL ? NULL : node->detail->test,
                           node->argument};
    advance->call = PST__CALL_START;
    advance->node = node;
    const pst_status status = lane->device->ops->launch(lane->device, lane->stream, &work);
    advance->node = NULL;
    return status;
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
        pst__fail_node(advance, node, number, status, PST__ALL);
        return;
    }
    node->detail->event_recorded = (node->flags & PST__NODE_EVENT) != 0;
    pst__flights_add(lane, node);
    pst__count_launched(lane, node, number);
    pst__node_become(node, number, PST__TASK_LAUNCHED, PST_OK);
    pst__runtime_wake_seen_waiters(lane->runtime);
    pst__advance_release(advance, node, PST__WHEN_LAUNCHED, PST_OK);
}

/* A host launch that will say later how it went. */
static void launched_pending(pst__advance *advance, pst__node *node, uint64_t number) {
    pst_lane *lane = advance->lane;
    lane->current = node;
    pst__count_launched(lane, node, number);
    pst__node_become(node, number, PST__TASK_LAUNCHED, PST_OK);
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
    pst_status status = call_launch(advance, node);
    const uint64_t end = begin == 0 ? 0 : pst__hook_launched(lane, node, number, begin);
    if (status == PST_PENDING &&
        (lane->asynchronous || node->detail == NULL || node->detail->test == NULL))
        status = PST_EINVAL;
    if (status < 0) {
        if (begin != 0) pst__hook_failed(lane, node);
        pst__fail_node(advance, node, number, status, PST__ALL);
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
    pst__note_texts(lane);
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
    pst__node_dequeued(node);
    if (stop < 0)
        pst__node_end(advance, node, number, PST__TASK_CANCELED, stop, PST__ALL);
    else if (waits < 0)
        pst__fail_node(advance, node, number, waits, PST__ALL);
    else
        launch(advance, node, number);
    if (advance->gates.first != NULL) pst__advance_finish(advance);
    return 1;
}

/* ---- a host task's end ------------------------------------------------------------------------
 */

static int end_current(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    pst__node *node = lane->current;
    pst__note_texts(lane);
    advance->call = PST__CALL_TEST;
    advance->node = node;
    pst_status status = lane->device->ops->progress(lane->device, lane->stream);
    advance->node = NULL;
    if (status == PST_PENDING && pst__is_abandoned(lane->runtime))
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
        pst__fail_node(advance, node, number, status, PST__ALL);
    else
        pst__node_end(advance, node, number, PST__TASK_DONE, PST_OK, PST__ALL);
    pst__advance_finish(advance);
    return 1;
}

/* ---- the turn --------------------------------------------------------------------------- */

void pst__spending_look(pst__spending *spending) {
    pst__pace *pace = spending->pace;
    if (spending->budget->nanoseconds != 0) {
        const uint64_t now = pst__now();
        const uint64_t quick = (uint64_t)pace->between * PST__PACE_NS / (now - pace->looked + 1);
        pace->between = quick == 0                     ? 1
                        : quick < PST__LAUNCHES_A_LOOK ? (uint32_t)quick
                                                       : PST__LAUNCHES_A_LOOK;
        pace->looked = now;
        if (spending->until == 0) spending->until = now + spending->budget->nanoseconds;
        spending->is_over = now >= spending->until;
    }
    pace->rest = pace->between;
}

/* On a borrowed lane only gates arrive, each with its event recorded: they are in flight at once.
 */
static void gates_into_flight(pst_lane *lane) {
    while (lane->ready.first != NULL) {
        pst__node *gate = lane->ready.first;
        pst__fifo_remove_first(&lane->ready);
        pst__flights_add(lane, gate);
    }
}

static uint32_t launch_some(pst__advance *advance, pst_lane *queue, pst__spending *spending,
                            uint32_t most) {
    uint32_t launched = 0;
    while (launched < most && !spending->is_over && advance->lane->current == NULL &&
           advance_head(advance, queue)) {
        launched++;
        pst__spending_count(spending);
    }
    return launched;
}

static int ask_after_launches(pst__advance *advance, uint32_t launched) {
    pst_lane *lane = advance->lane;
    lane->unasked += launched;
    if (launched > 0 && lane->unasked < ASK_EVERY) return 0;
    lane->unasked = 0;
    return launched == 0 ? pst__flights_end(advance) : pst__flights_end_marked(advance);
}

int pst__lane_serve(pst_lane *lane, pst_lane *queue, pst__spending *spending, uint32_t most) {
    __attribute__((cleanup(pst__calls_leave))) pst__advance advance = {.lane = lane};
    int changed = 0;
    pst__calls_enter(&advance);
    lane->needs_poll = 0;
    if (lane->mode == PST_LANE_BORROWED) gates_into_flight(lane);
    if (lane->current != NULL) changed |= end_current(&advance);
    if (lane->mode == PST_LANE_BORROWED) {
        changed |= pst__flights_end(&advance);
    } else {
        const uint32_t launched = launch_some(&advance, queue, spending, most);
        changed |= ask_after_launches(&advance, launched) | (launched > 0);
        pst__flights_mark_tail(&advance);
        if (lane->current != NULL) lane->needs_poll = 1;
    }
    if (lane->flight_first != NULL) lane->needs_poll = 1;
    return changed;
}

int pst__lane_turn(pst_lane *lane, const pst__budget *budget) {
    pst__spending spending = pst__spending_begin(budget, &lane->pace);
    pst__lane_beat(lane);
    if (!pst__arrivals_empty(&lane->arrivals)) pst__arrivals_move(&lane->arrivals, &lane->ready);
    /* Acquire: pairs with the release in follow (lane.c). */
    int changed = pst__load_acquire(&lane->follower) == NULL
                      ? pst__lane_serve(lane, lane, &spending, UINT32_MAX)
                      : pst__order_turn(lane, &spending);
    /* What is left waits, for a predecessor or for the task that runs. */
    if (lane->order == PST_LANE_BY_SUBMISSION && pst__lane_first(lane) != NULL)
        changed |= pst__order_set_aside(lane);
    if (lane->stopped.first != NULL) changed |= pst__order_end_stopped(lane);
    return changed;
}
