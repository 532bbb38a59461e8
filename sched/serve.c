#include "sched/serve.h"

#include "sched/advance.h"
#include "sched/order.h"
#include "sched/trace.h"
#include "tracing/profiler.h"

/* Launches on a lane that has ever more of them, until what is done there is asked about: the
 * questions cost the device's driver more than a launch costs us. */
#define ASK_EVERY 16u

/* Before a lane does what may fail: texts from here on say why. Relaxed: what this thread writes
 * itself is what it asks about. */
static void note_texts(pst_lane *lane) {
    lane->texts = pst__load_relaxed(&lane->runtime->error.count);
}

/* ---- in flight: the device has a task, and is asked when it is done --------------------- */

/* After a poison launched work is given some time to end, and then abandoned. Acquire: pairs with
 * the exchange in pst__runtime_stop, so that its time is seen as well. */
static int is_abandoned(const pst_runtime *runtime) {
    return pst__load_acquire(&runtime->poison) != PST_OK && runtime->grace_ns != 0 &&
           pst__now() - pst__load_relaxed(&runtime->poison_at) > runtime->grace_ns;
}

/* The device has the node, whose event is recorded if it has one. */
static void add_in_flight(pst_lane *lane, pst__node *node) {
    node->detail->flight_next = NULL;
    if (lane->in_flight.first == NULL)
        lane->in_flight.first = node;
    else
        lane->in_flight.last->detail->flight_next = node;
    lane->in_flight.last = node;
    /* Gates come when they have passed, which need not be the order of their records. */
    if (node->detail->event_recorded && node->lane != NULL) lane->in_flight.newest = node;
}

static pst_event *event_in_flight(const pst_lane *lane, const pst__node *node) {
    if (node->detail->event_recorded) return node->detail->event;
    return node == lane->in_flight.tail ? lane->in_flight.tail_event : NULL;
}

static void end_oldest(pst__advance *advance, pst_status status) {
    pst_lane *lane = advance->lane;
    pst__node *node = lane->in_flight.first;
    const uint64_t number = node->lane == NULL ? node->graph->number : pst__word_number(node->word);
    lane->in_flight.first = node->detail->flight_next;
    lane->watch.ends++;
    if (node == lane->in_flight.tail) lane->in_flight.tail = NULL;
    if (node == lane->in_flight.newest) lane->in_flight.newest = NULL;
    if (node == lane->in_flight.mark) lane->in_flight.mark = NULL;
    if (node->detail->launched_at != 0) pst__hook_done_on_device(lane, node, number);
    pst__node_end(advance, node, number, status < 0 ? PST__TASK_FAILED : PST__TASK_DONE, status,
                  PST__WHEN_DONE);
}

static pst__node *find_watched(const pst_lane *lane) {
    pst__node *node = lane->in_flight.first;
    while (node != NULL && event_in_flight(lane, node) == NULL)
        node = node->detail->flight_next;
    return node;
}

/* A failure after the launch: what the device did from there on is unknown. */
static void lose_in_flight(pst__advance *advance, pst_status given) {
    pst_lane *lane = advance->lane;
    const pst_status status = pst__kept_status(given);
    lane->in_flight.watched = NULL;
    pst__report_failure(lane->in_flight.first, lane, status);
    pst_runtime_poison(lane->runtime, status, NULL);
    while (lane->in_flight.first != NULL)
        end_oldest(advance, status);
    pst__advance_finish(advance);
}

/* The last tasks in flight have no event of their own: records one for all of them. For when
 * nothing can be launched behind them for now. */
static void mark_tail(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    if (lane->in_flight.first == NULL || lane->in_flight.tail != NULL ||
        lane->in_flight.last->detail->event_recorded)
        return;
    const pst_device_ops *ops = lane->device->ops;
    pst_status status = ops->event_record(lane->device, lane->in_flight.tail_event, lane->stream);
    if (status < 0)
        lose_in_flight(advance, status);
    else
        lane->in_flight.tail = lane->in_flight.newest = lane->in_flight.last;
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
    lane->in_flight.watched = NULL;
    if (status < 0) {
        lose_in_flight(advance, status);
        return;
    }
    for (const pst__node *ended = NULL; ended != last;) {
        ended = lane->in_flight.first;
        end_oldest(advance, PST_OK);
    }
    pst__advance_finish(advance);
}

/* Ends what is done, from the oldest on; 1 when anything was. If the newest is done, those between
 * are not asked about: a question costs as much as many launches. */
static int end_in_flight(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    const pst__node *newest = lane->in_flight.newest;
    int ended = 0;
    for (;; ended = 1) {
        if (lane->in_flight.watched == NULL) lane->in_flight.watched = find_watched(lane);
        const pst__node *last = lane->in_flight.watched;
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

/* The same between launches, with one question: about the task that was the newest at the last one.
 * So the tasks in flight are at most those that the device has not done and two rounds of launches.
 */
static int end_marked(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    const pst_status status =
        lane->in_flight.mark == NULL ? PST_PENDING : ask(lane, lane->in_flight.mark);
    if (status != PST_PENDING) end_up_to(advance, lane->in_flight.mark, status);
    if (lane->in_flight.mark == NULL) lane->in_flight.mark = lane->in_flight.newest;
    return status != PST_PENDING;
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

/* Inlined, as each launch has it. */
__attribute__((always_inline)) static inline pst_status call_launch(pst__advance *advance,
                                                                    pst__node *node) {
    const pst_lane *lane = advance->lane;
    if (node->start == NULL) return PST_OK;
    const pst_work work = {node->start, node->detail == NULL ? NULL : node->detail->test,
                           node->argument};
    advance->call.kind = PST__CALL_START;
    advance->call.node = node;
    const pst_status status = lane->device->ops->launch(lane->device, lane->stream, &work);
    advance->call.node = NULL;
    return status;
}

static void pop(const char *const *name) {
    (void)name;
    pst__profiler_pop();
}

/* As a range of the calling thread, which ends also where the task leaves by unwinding. */
static pst_status call_shown(pst__advance *advance, pst__node *node) {
    __attribute__((cleanup(pop))) const char *const name = pst__node_name(node);
    pst__profiler_push(name);
    return call_launch(advance, node);
}

/* The device has it. Its event is recorded before successors may ask their streams to wait. */
static void launched_on_device(pst__advance *advance, pst__node *node, uint64_t number) {
    pst_lane *lane = advance->lane;
    pst_status status = PST_OK;
    if (node->flags & PST__NODE_EVENT)
        status = lane->device->ops->event_record(lane->device, node->detail->event, lane->stream);
    if (status < 0) {
        /* The work runs and nobody can know when it ends: nothing after it is in order. */
        pst_runtime_poison(lane->runtime, status, "an event could not be recorded");
        if (node->detail->launched_at != 0) pst__hook_failed(lane, node);
        pst__fail_node(advance, node, number, status, PST__ALL);
        return;
    }
    node->detail->event_recorded = (node->flags & PST__NODE_EVENT) != 0;
    add_in_flight(lane, node);
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
__attribute__((noinline)) static void log_launch(pst_lane *lane, const pst__node *node) {
    pst__launch_log_add(&lane->watch.launches, node->graph->id, node->detail->name,
                        pst__node_ticket(node));
    pst__store_relaxed(&lane->leader->watch.latest, lane); /* pairs with serves_this (post.c) */
}

/* Stores only what changes: a growing graph's detail comes from the adding thread's cache and goes
 * back there. */
static void forget_last_launch(pst__detail *detail, uint64_t begin) {
    if (detail->event_recorded) detail->event_recorded = 0;
    if (detail->launched_at != begin) detail->launched_at = begin;
}

static inline void go_on(pst__advance *advance, pst__node *node, uint64_t number, pst_status status,
                         pst__began began, uint64_t end) {
    pst_lane *lane = advance->lane;
    if (status == PST_PENDING &&
        (lane->asynchronous || node->detail == NULL || node->detail->test == NULL))
        status = PST_EINVAL;
    if (status < 0) {
        if (began.more & PST__TRACE_ALL) pst__hook_failed(lane, node);
        pst__fail_node(advance, node, number, status, PST__ALL);
    } else if (lane->asynchronous) {
        launched_on_device(advance, node, number);
    } else if (status == PST_PENDING) {
        launched_pending(advance, node, number);
    } else {
        if (began.at != 0) pst__hook_done(lane, node, began.at, end);
        pst__node_end(advance, node, number, PST__TASK_DONE, PST_OK, PST__ALL);
    }
}

/* For who wants to know more of it. Not inlined, so that other launches do not pay for it. */
__attribute__((noinline)) static void launch_observed(pst__advance *advance, pst__node *node,
                                                      uint64_t number, pst__began began) {
    const int is_traced = began.more & PST__TRACE_ALL;
    if (is_traced) pst__hook_launching(advance->lane, node);
    const pst_status status = (began.more & PST__TRACE_SHOWN) != 0 ? call_shown(advance, node)
                                                                   : call_launch(advance, node);
    const uint64_t end =
        is_traced ? pst__hook_launched(advance->lane, node, number, began.at) : began.at;
    go_on(advance, node, number, status, began, end);
}

static void launch(pst__advance *advance, pst__node *node, uint64_t number) {
    pst_lane *lane = advance->lane;
    const pst__began began = pst__hook_begin(lane, node);
    pst__lane_heartbeat(lane);
    if (node->detail != NULL) {
        forget_last_launch(node->detail, began.at);
        if (node->detail->name != NULL) log_launch(lane, node);
    }
    if (began.more == 0)
        go_on(advance, node, number, call_launch(advance, node), began, began.at);
    else
        launch_observed(advance, node, number, began);
}

/* Launches the head of `queue`, the lane's own or its leader's, or ends it if it is not to run. 0
 * when there is nothing to launch yet. */
static int advance_head(pst__advance *advance, pst_lane *queue) {
    pst_lane *lane = advance->lane;
    pst__node *node = pst__lane_head(queue);
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
    pst__lane_take_head(queue);
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
    note_texts(lane);
    advance->call.kind = PST__CALL_TEST;
    advance->call.node = node;
    pst_status status = lane->device->ops->progress(lane->device, lane->stream);
    advance->call.node = NULL;
    if (status == PST_PENDING && is_abandoned(lane->runtime))
        status = (pst_status)pst__load_relaxed(&lane->runtime->poison);
    if (status == PST_PENDING) {
        lane->needs_poll = 1;
        return 0;
    }
    lane->current = NULL;
    lane->watch.ends++;
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

/* On a borrowed lane only gates arrive, each with its event recorded: they are in flight at once.
 */
static void gates_into_flight(pst_lane *lane) {
    while (lane->ready.first != NULL) {
        pst__node *gate = lane->ready.first;
        pst__fifo_remove_first(&lane->ready);
        add_in_flight(lane, gate);
    }
}

static uint32_t launch_some(pst__advance *advance, pst_lane *queue, pst__spending *spending,
                            uint32_t most) {
    uint32_t launched = 0;
    while (launched < most && !spending->is_spent && advance->lane->current == NULL &&
           advance_head(advance, queue)) {
        launched++;
        pst__spending_count(spending);
    }
    return launched;
}

static int ask_after_launches(pst__advance *advance, uint32_t launched) {
    pst_lane *lane = advance->lane;
    lane->in_flight.unasked += launched;
    if (launched > 0 && lane->in_flight.unasked < ASK_EVERY) return 0;
    lane->in_flight.unasked = 0;
    return launched == 0 ? end_in_flight(advance) : end_marked(advance);
}

int pst__lane_serve(pst_lane *lane, pst_lane *queue, pst__spending *spending, uint32_t most) {
    __attribute__((cleanup(pst__advance_leave))) pst__advance advance = {.lane = lane};
    int changed = 0;
    pst__calls_enter(&advance.call);
    lane->needs_poll = 0;
    if (lane->mode == PST_LANE_BORROWED) gates_into_flight(lane);
    if (lane->current != NULL) changed |= end_current(&advance);
    if (lane->mode == PST_LANE_BORROWED) {
        changed |= end_in_flight(&advance);
    } else {
        const uint32_t launched = launch_some(&advance, queue, spending, most);
        changed |= ask_after_launches(&advance, launched) | (launched > 0);
        mark_tail(&advance);
        if (lane->current != NULL) lane->needs_poll = 1;
    }
    if (lane->in_flight.first != NULL) lane->needs_poll = 1;
    queue->has_news |= lane->has_news;
    return changed;
}
