/* Tasks in flight: the device has them, and is asked when they are done. */
#include "sched/flights.h"

#include "sched/failed.h"
#include "sched/trace_hooks.h"

/* Acquire: pairs with the exchange in pst_runtime_poison, so that its time is seen as well. */
int pst__is_abandoned(const pst_runtime *runtime) {
    return pst__load_acquire(&runtime->poison) != PST_OK && runtime->grace_ns != 0 &&
           pst__now() - pst__load_relaxed(&runtime->poison_at) > runtime->grace_ns;
}

void pst__flights_add(pst_lane *lane, pst__node *node) {
    node->detail->flight_next = NULL;
    if (lane->flight_first == NULL)
        lane->flight_first = node;
    else
        lane->flight_last->detail->flight_next = node;
    lane->flight_last = node;
    /* Gates come when they have passed, which need not be the order of their records. */
    if (node->detail->event_recorded && node->lane != NULL) lane->newest = node;
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
static void lose_flights(pst__advance *advance, pst_status given) {
    pst_lane *lane = advance->lane;
    const pst_status status = pst__kept_status(given);
    lane->watched = NULL;
    pst__report_failure(lane->flight_first, lane, status);
    pst_runtime_poison(lane->runtime, status, NULL);
    while (lane->flight_first != NULL)
        end_oldest(advance, status);
    pst__advance_finish(advance);
}

void pst__flights_mark_tail(pst__advance *advance) {
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
    pst__note_texts(lane);
    const pst_status status =
        lane->device->ops->event_query(lane->device, event_in_flight(lane, node));
    if (status != PST_PENDING || !pst__is_abandoned(lane->runtime)) return status;
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

/* If the newest is done, those between are not asked about: a question costs as much as many
 * launches. */
int pst__flights_end(pst__advance *advance) {
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

int pst__flights_end_marked(pst__advance *advance) {
    pst_lane *lane = advance->lane;
    const pst_status status = lane->mark == NULL ? PST_PENDING : ask(lane, lane->mark);
    if (status != PST_PENDING) end_up_to(advance, lane->mark, status);
    if (lane->mark == NULL) lane->mark = lane->newest;
    return status != PST_PENDING;
}
