/* A sealed graph within the caller's capture: the calling thread launches its tasks once, in an
 * order that the edges and the lanes allow, on the lanes' streams, which fork from the captured
 * stream and join it. */
#include "base/clock.h"
#include "sched/calls.h"
#include "sched/graph.h"

#include <sched.h>

#define NO_TASK UINT32_MAX

typedef struct capture {
    pst_graph *graph;
    pst_device *device;
    pst_stream *stream; /* the captured one */
    pst_event *event;   /* where a stream stands */
    uint32_t *missing;  /* by task: predecessors, and one more where its lane's order has one */
    uint32_t *next;     /* by task: the next one in its lane's order of adding */
    uint32_t *ready;    /* tasks that miss none, then those that are launched */
} capture;

/* ---- what can be captured -------------------------------------------------------------------- */

static const char *why_not(const pst__node *node, const pst_device *device) {
    if (node->lane == NULL) return "it is a gate";
    if (node->lane->device != device) return "its lane is of another device";
    if (node->detail != NULL && node->detail->done != NULL)
        return "it has a callback, which no graph calls";
    return NULL;
}

static pst_status check_tasks(const pst_graph *graph, const pst_device *device) {
    for (size_t i = 0; i < graph->node_count; i++) {
        const char *why = why_not(&graph->nodes[i], device);
        if (why != NULL)
            return pst__runtime_fail(graph->runtime, PST_EUNSUPPORTED,
                                     "task %s of graph %s cannot be captured: %s",
                                     pst__node_name(&graph->nodes[i]), graph->name, why);
    }
    return PST_OK;
}

static pst_status check(pst_graph *graph, const pst_device *device) {
    pst_runtime *runtime = graph->runtime;
    pst_status status = pst__calls_refuse(runtime, "pst_graph_capture", graph->name);
    if (status != PST_OK) return status;
    if (device->ops->capture_begin == NULL || device->ops->capture_end == NULL)
        return pst__runtime_fail(runtime, PST_EUNSUPPORTED,
                                 "graph %s cannot be captured: device %s captures nothing",
                                 graph->name, device->ops->name);
    if (graph->kind != PST_GRAPH_SEALED || !graph->is_launchable)
        return pst__runtime_fail(runtime, PST_ESTATE, "graph %s cannot be captured: seal it first",
                                 graph->name);
    if (!pst__graph_is_done(graph))
        return pst__runtime_fail(runtime, PST_EBUSY,
                                 "graph %s cannot be captured: wait for its launches first",
                                 graph->name);
    return check_tasks(graph, device);
}

/* ---- the lanes, of which no worker launches anything meanwhile ------------------------------- */

static int uses(const pst_graph *graph, const pst_lane *leader) {
    for (const pst__share *share = graph->shares; share != NULL; share = share->next)
        if (share->tasks > 0 && share->lane->leader == leader) return 1;
    return 0;
}

/* Those up to `end`, which is not given back itself. */
static void give_back_lanes(const pst_graph *graph, const pst_lane *end) {
    for (pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != end; lane = lane->next)
        if (lane->leader == lane && uses(graph, lane)) pst__lane_disown(lane, 0, NULL);
}

/* In the order of the runtime's list, so that two threads do not wait for each other. */
static pst_status take_lanes(const pst_graph *graph) {
    const uint64_t patience = pst__runtime_deadline(graph->runtime), begin = pst__now();
    for (pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != NULL; lane = lane->next) {
        if (lane->leader != lane || !uses(graph, lane)) continue;
        while (!pst__lane_try_own(lane)) {
            (void)sched_yield();
            if (patience == 0 || pst__now() - begin < patience) continue;
            give_back_lanes(graph, lane);
            return pst__runtime_fail(graph->runtime, PST_ETIMEDOUT,
                                     "graph %s is not captured: lane %s is in a task's start",
                                     graph->name, lane->name);
        }
    }
    return PST_OK;
}

/* ---- the order ------------------------------------------------------------------------------- */

static void count_predecessors(capture *self) {
    const pst_graph *graph = self->graph;
    for (uint32_t i = 0; i < graph->node_count; i++) {
        self->missing[i] = graph->nodes[i].predecessors;
        self->next[i] = NO_TASK;
    }
    for (const pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != NULL;
         lane = lane->next) {
        uint32_t previous = NO_TASK;
        if (!pst__order_is_by_adding(lane->order) || lane->leader != lane) continue;
        for (uint32_t i = 0; i < graph->node_count; i++) {
            if (graph->nodes[i].lane->leader != lane) continue;
            if (previous != NO_TASK) {
                self->next[previous] = i;
                self->missing[i]++;
            }
            previous = i;
        }
    }
}

static void arrive(capture *self, uint32_t task, uint32_t *count) {
    if (--self->missing[task] == 0) self->ready[(*count)++] = task;
}

/* ---- launching ------------------------------------------------------------------------------- */

static pst_status wait_before(const capture *self, uint32_t task) {
    const pst_graph *graph = self->graph;
    const pst__node *node = &graph->nodes[task];
    pst_device *device = self->device;
    pst_status status = PST_OK;
    const uint32_t first = graph->cross_first == NULL ? 0 : graph->cross_first[task];
    const uint32_t end = graph->cross_first == NULL ? 0 : graph->cross_first[task + 1];
    for (uint32_t i = first; status == PST_OK && i < end; i++)
        status = device->ops->stream_wait(device, node->lane->stream,
                                          graph->nodes[graph->cross[i]].detail->event);
    for (uint32_t i = 0; status == PST_OK && i < node->detail->after_count; i++)
        status = device->ops->stream_wait(device, node->lane->stream, node->detail->after[i]);
    return status;
}

static pst_status launch(const capture *self, uint32_t task) {
    pst__node *node = &self->graph->nodes[task];
    pst_device *device = self->device;
    const pst_work work = {.start = node->start, .argument = node->argument};
    pst_status status = wait_before(self, task);
    if (status == PST_OK && work.start != NULL)
        status = device->ops->launch(device, node->lane->stream, &work);
    if (status == PST_OK && (node->flags & PST__NODE_EVENT) != 0)
        status = device->ops->event_record(device, node->detail->event, node->lane->stream);
    if (status == PST_OK) return PST_OK;
    return pst__runtime_fail(node->lane->runtime, status < 0 ? status : PST_EINVAL,
                             "task %s of graph %s could not be captured: %s", pst__node_name(node),
                             self->graph->name, pst__device_text(device));
}

static pst_status launch_all(capture *self) {
    const pst_graph *graph = self->graph;
    uint32_t count = 0;
    pst_status status = PST_OK;
    count_predecessors(self);
    for (uint32_t i = 0; i < graph->node_count; i++)
        if (self->missing[i] == 0) self->ready[count++] = i;
    for (uint32_t taken = 0; status == PST_OK && taken < count; taken++) {
        const uint32_t task = self->ready[taken];
        status = launch(self, task);
        for (uint32_t i = graph->nodes[task].first_edge; i < graph->nodes[task + 1].first_edge; i++)
            arrive(self, graph->edges[i], &count);
        if (self->next[task] != NO_TASK) arrive(self, self->next[task], &count);
    }
    return status;
}

static pst_status on_each_stream(const capture *self, int is_join) {
    const pst_device_ops *ops = self->device->ops;
    pst_status status =
        is_join ? PST_OK : ops->event_record(self->device, self->event, self->stream);
    for (const pst__share *share = self->graph->shares; share != NULL && status == PST_OK;
         share = share->next) {
        pst_stream *stream = share->lane->stream;
        if (share->tasks == 0) continue;
        if (is_join) status = ops->event_record(self->device, self->event, stream);
        if (status == PST_OK)
            status = ops->stream_wait(self->device, is_join ? self->stream : stream, self->event);
    }
    return status;
}

/* Streams that have forked join in any case: the caller's capture goes on. */
static pst_status run(capture *self) {
    pst_device *device = self->device;
    pst_status status = device->ops->capture_begin(device, self->stream);
    if (status != PST_OK) return status;
    status = on_each_stream(self, 0);
    if (status == PST_OK) status = launch_all(self);
    const pst_status joined = on_each_stream(self, 1);
    device->ops->capture_end(device);
    return status == PST_OK ? joined : status;
}

/* ---- the call -------------------------------------------------------------------------------- */

static pst_status capture_into(capture *self, void *native) {
    const pst__heap *heap = &self->graph->runtime->heap;
    const size_t count = self->graph->node_count, bytes = 3 * count * sizeof *self->missing;
    pst_device *device = self->device;
    self->missing = pst__heap_alloc(heap, bytes);
    if (self->missing == NULL && count > 0) return PST_ENOMEM;
    self->next = self->missing + count;
    self->ready = self->next + count;
    pst_status status = device->ops->stream_wrap(device, native, &self->stream);
    if (status == PST_OK) status = device->ops->event_create(device, 0, &self->event);
    if (status == PST_OK) status = take_lanes(self->graph);
    if (status == PST_OK) {
        status = run(self);
        give_back_lanes(self->graph, NULL);
    }
    if (self->event != NULL) device->ops->event_destroy(device, self->event);
    if (self->stream != NULL) device->ops->stream_destroy(device, self->stream);
    pst__heap_free(heap, self->missing, bytes);
    return status;
}

pst_status pst_graph_capture(pst_graph *graph, pst_device *device, void *stream) {
    if (graph == NULL || device == NULL) return PST_EINVAL;
    pst_status status = check(graph, device);
    if (status != PST_OK) return status;
    capture self = {.graph = graph, .device = device};
    status = capture_into(&self, stream);
    if (status == PST_ENOMEM || status == PST_EBUSY)
        return pst__runtime_fail(graph->runtime, status, "graph %s cannot be captured: %s",
                                 graph->name, pst_status_text(status));
    return status;
}
