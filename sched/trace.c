/* What the scheduler records, and the public functions of tracing. */
#include "sched/trace.h"

#include "base/options.h"
#include "sched/calls.h"
#include "tracing/profiler.h"

#include <penstock/trace.h>

/* An arrow's name in the trace: the same on both ends. */
static uint64_t flow_id(const pst__node *from, const pst__node *to, uint64_t number) {
    const uint64_t parts[] = {from->graph->id, number, (uint64_t)(uintptr_t)from,
                              (uint64_t)(uintptr_t)to};
    uint64_t id = 0;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        id = (id ^ parts[i]) * 0x9e3779b97f4a7c15u ^ id >> 29;
    return id | 1u;
}

/* The node's arrows to other lanes begin, and those from other lanes end. */
static void draw_arrows(const pst_lane *lane, const pst__node *node, uint64_t number,
                        uint64_t time) {
    const pst_graph *graph = node->graph;
    if (graph->cross_first == NULL) return;
    for (uint32_t e = node->first_edge; e < node[1].first_edge; e++) {
        const pst__node *to = &graph->nodes[graph->edges[e]];
        if (to->lane != NULL && to->lane != lane)
            pst__trace_flow(lane->track, flow_id(node, to, number), time, 0);
    }
    const uint32_t index = pst__node_index(node);
    for (uint32_t c = graph->cross_first[index]; c < graph->cross_first[index + 1]; c++) {
        const pst__node *from = &graph->nodes[graph->cross[c]];
        if (from->lane != NULL) pst__trace_flow(lane->track, flow_id(from, node, number), time, 1);
    }
}

static void end_grown_arrows(const pst_lane *lane, const pst__node *node, uint64_t time) {
    const pst__grown *task = pst__grown_of(node);
    for (uint32_t i = 0; i < task->link_count; i++)
        if (task->links[i].flow != 0) pst__trace_flow(lane->track, task->links[i].flow, time, 1);
}

/* The graph and its names may be gone when the trace is written. */
static const char *traced_name(const pst_lane *lane, const pst__node *node) {
    pst__detail *detail = node->detail;
    if (detail == NULL || detail->name == NULL) return "";
    if (detail->traced_name == NULL)
        detail->traced_name = pst__trace_name(lane->runtime->trace, detail->name);
    return detail->traced_name == NULL ? "" : detail->traced_name;
}

static const char *traced_path(const pst_lane *lane, pst__detail *detail) {
    if (detail->path == NULL) return NULL;
    if (detail->traced_path == NULL)
        detail->traced_path = pst__trace_name(lane->runtime->trace, detail->path);
    return detail->traced_path;
}

static void count_moved(pst__moved *moved, uint64_t bytes, uint64_t begin, uint64_t end) {
    const uint64_t from = begin > moved->until ? begin : moved->until;
    /* Relaxed: pairs with take_moved (post.c). */
    pst__store_relaxed(&moved->ended, moved->ended + 1);
    pst__store_relaxed(&moved->bytes, moved->bytes + bytes);
    if (end <= from) return;
    pst__store_relaxed(&moved->busy_ns, moved->busy_ns + (end - from));
    moved->until = end;
}

void pst__hook_done(pst_lane *lane, const pst__node *node, uint64_t begin, uint64_t end) {
    pst__detail *detail = node->detail;
    if (detail != NULL && detail->bytes != 0) count_moved(&lane->moved, detail->bytes, begin, end);
    if (detail == NULL)
        pst__trace_slice(lane->track, "", begin, end, 0, 0);
    else
        pst__trace_collective(lane->track, traced_name(lane, node), traced_path(lane, detail),
                              begin, end, pst__node_ticket(node), detail->bytes);
}

/* ---- times of the device ---------------------------------------------------------------- */

static int is_timed(const pst_lane *lane) {
    const pst_device_ops *ops = lane->device->ops;
    return lane->asynchronous && (ops->caps & PST_DEVICE_TIMED_EVENTS) && ops->event_time != NULL;
}

/* NULL: the slice has the host's times instead. */
static pst_event *record_time(const pst_lane *lane) {
    const pst_device_ops *ops = lane->device->ops;
    pst_event *event = NULL;
    if (ops->event_create(lane->device, 1, &event) != PST_OK) return NULL;
    if (ops->event_record(lane->device, event, lane->stream) == PST_OK) return event;
    ops->event_destroy(lane->device, event);
    return NULL;
}

static void drop_time(const pst_lane *lane, pst_event **event) {
    if (*event != NULL) lane->device->ops->event_destroy(lane->device, *event);
    *event = NULL;
}

/* Leaves them as they are where the device does not know both, as of the flight record. */
static void take_times(const pst_lane *lane, pst__detail *detail, uint64_t *begin, uint64_t *end) {
    const pst_device_ops *ops = lane->device->ops;
    uint64_t began = 0, ended = 0;
    const int is_known = detail->began != NULL && detail->ended != NULL &&
                         ops->event_time(lane->device, detail->began, &began) == PST_OK &&
                         ops->event_time(lane->device, detail->ended, &ended) == PST_OK;
    drop_time(lane, &detail->began);
    drop_time(lane, &detail->ended);
    if (!is_known) return;
    *begin = began;
    *end = ended < began ? began : ended;
}

void pst__hook_launching(const pst_lane *lane, const pst__node *node) {
    if (is_timed(lane)) node->detail->began = record_time(lane);
}

void pst_task_begins(void) {
    const pst__call *call = *pst__calls_of_thread();
    if (call == NULL || call->node == NULL || call->kind != PST__CALL_START) return;
    const pst_lane *lane = call->node->lane;
    pst__detail *detail = call->node->detail;
    if (detail == NULL || detail->began == NULL) return;
    if (lane->device->ops->event_record(lane->device, detail->began, lane->stream) != PST_OK)
        drop_time(lane, &detail->began);
}

void pst__hook_failed(const pst_lane *lane, const pst__node *node) {
    if (!is_timed(lane)) return;
    drop_time(lane, &node->detail->began);
    drop_time(lane, &node->detail->ended);
}

/* ---- launched, done, an edge ------------------------------------------------------------ */

uint64_t pst__hook_launched(pst_lane *lane, const pst__node *node, uint64_t number,
                            uint64_t begin) {
    const uint64_t end = pst__now();
    pst__trace_slice(pst__track_of_thread(lane->runtime->trace), traced_name(lane, node), begin,
                     end, pst__node_ticket(node), 0);
    if (is_timed(lane)) {
        node->detail->ended = record_time(lane);
    } else if (node->flags & PST__NODE_GROWING) {
        end_grown_arrows(lane, node, begin);
    } else {
        draw_arrows(lane, node, number, begin);
    }
    return end;
}

void pst__hook_done_on_device(pst_lane *lane, const pst__node *node, uint64_t number) {
    uint64_t begin = node->detail->launched_at, end = pst__now();
    if (is_timed(lane)) {
        take_times(lane, node->detail, &begin, &end);
        if (pst__trace_on(lane->runtime->trace) && !(node->flags & PST__NODE_GROWING))
            draw_arrows(lane, node, number, begin);
    }
    pst__hook_done(lane, node, begin, end);
}

uint64_t pst__hook_edge(pst_lane *lane, const pst__node *from, const pst__node *to) {
    if (!pst__trace_on(lane->runtime->trace) || is_timed(lane) ||
        (to->lane != NULL && is_timed(to->lane)))
        return 0;
    const uint64_t begin = from->detail->launched_at;
    const uint64_t id = flow_id(from, to, begin);
    pst__trace_flow(lane->track, id, begin, 0);
    return id;
}

/* ---- public functions ------------------------------------------------------------------ */

pst_status pst_trace_start(pst_runtime *runtime) {
    return runtime == NULL ? PST_EINVAL : pst__trace_start(runtime->trace);
}

pst_status pst_trace_stop(pst_runtime *runtime) {
    return runtime == NULL ? PST_EINVAL : pst__trace_stop(runtime->trace);
}

pst_status pst_trace_write(pst_runtime *runtime, const char *path) {
    return pst_trace_write_newest(runtime, path, 0);
}

pst_status pst_trace_write_newest(pst_runtime *runtime, const char *path, uint64_t most_bytes) {
    if (runtime == NULL || path == NULL) return PST_EINVAL;
    return pst__trace_write(runtime->trace, path, most_bytes);
}

void pst_trace_get_stats(const pst_runtime *runtime, pst_trace_stats *stats) {
    if (stats == NULL) return;
    pst_trace_stats now = {0};
    if (runtime != NULL) pst__trace_get_stats(runtime->trace, &now.records, &now.overwritten);
    pst__write_sized(stats, &now, sizeof now);
}

/* The calling thread's track; NULL when nothing is recorded. */
static pst__track *track_of(pst_runtime *runtime) {
    if (runtime == NULL || !pst__trace_on(runtime->trace)) return NULL;
    return pst__track_of_thread(runtime->trace);
}

static int is_shown(const pst_runtime *runtime) {
    return runtime != NULL && (pst__trace_get_level(runtime->trace) & PST__TRACE_SHOWN) != 0;
}

void pst_trace_begin(pst_runtime *runtime, const char *name) {
    pst__track *track = track_of(runtime);
    if (track != NULL) pst__trace_mark_begin(track, name);
    if (is_shown(runtime)) pst__profiler_push(name);
}

/* Without a track the thread's begin was not recorded: nothing is lost with the end. */
void pst_trace_end(pst_runtime *runtime) {
    if (is_shown(runtime)) pst__profiler_pop();
    if (runtime == NULL || !pst__trace_on(runtime->trace)) return;
    pst__track *track = pst__track_of_thread_if_any(runtime->trace);
    if (track != NULL) pst__trace_mark_end(track);
}

void pst_trace_slice(pst_runtime *runtime, const char *name, uint64_t begin, uint64_t end) {
    pst__track *track = track_of(runtime);
    if (track == NULL) return;
    const char *kept = name == NULL ? NULL : pst__trace_intern(runtime->trace, name);
    pst__trace_slice(track, kept, begin, end, 0, 0);
}

void pst_trace_counter(pst_runtime *runtime, const char *name, int64_t value) {
    pst__track *track = track_of(runtime);
    if (track != NULL) pst__trace_count(track, name, pst__now(), value);
}
