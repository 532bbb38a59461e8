#include "sched/graph.h"

#include "base/options.h"
#include "sched/calls.h"
#include "sched/order.h"
#include "sched/wait.h"

#define DETAILS_PER_CHUNK 256u

/* ---- life ------------------------------------------------------------------------------- */

static void enlist(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    ck_spinlock_lock(&runtime->lock);
    graph->id = ++runtime->graph_ids;
    graph->next = runtime->graphs;
    if (graph->next != NULL) graph->next->previous = graph;
    runtime->graphs = graph;
    ck_spinlock_unlock(&runtime->lock);
}

static void delist(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    ck_spinlock_lock(&runtime->lock);
    if (graph->previous != NULL)
        graph->previous->next = graph->next;
    else
        runtime->graphs = graph->next;
    if (graph->next != NULL) graph->next->previous = graph->previous;
    ck_spinlock_unlock(&runtime->lock);
}

pst_status pst_graph_create(pst_runtime *runtime, pst_graph_kind kind, const char *name,
                            pst_graph **created) {
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    if (kind != PST_GRAPH_SEALED && kind != PST_GRAPH_GROWING)
        return pst__runtime_fail(runtime, PST_EINVAL, "graph %s: unknown kind %d",
                                 name == NULL ? "" : name, (int)kind);
    pst_graph *graph = pst__heap_alloc(&runtime->heap, sizeof *graph);
    char *copy = pst__heap_text(&runtime->heap, name);
    if (graph == NULL || copy == NULL) {
        pst__heap_free(&runtime->heap, graph, sizeof *graph);
        pst__heap_free_text(&runtime->heap, copy);
        return pst__runtime_fail(runtime, PST_ENOMEM, "graph %s: no memory",
                                 name == NULL ? "" : name);
    }
    graph->runtime = runtime;
    graph->name = copy;
    graph->kind = kind;
    ck_spinlock_init(&graph->lock);
    ck_stack_init(&graph->released);
    pst__slab_init(&graph->details, &runtime->heap, sizeof(pst__detail), DETAILS_PER_CHUNK);
    pst__slab_init(&graph->tasks, &runtime->heap, sizeof(pst__grown), runtime->task_capacity);
    enlist(graph);
    *created = graph;
    return PST_OK;
}

static void drop_event(void *context, void *detail) {
    (void)context;
    pst__detail_drop_event(detail);
}

void pst__graph_free_sealed_arrays(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    const size_t count = graph->node_count;
    pst__heap_free(heap, graph->edges, graph->pair_count * sizeof *graph->edges);
    pst__heap_free(heap, graph->cross_first, (count + 1) * sizeof *graph->cross_first);
    pst__heap_free(heap, graph->cross, graph->cross_count * sizeof *graph->cross);
    pst__heap_free(heap, graph->batch_indices,
                   graph->batch_index_count * sizeof *graph->batch_indices);
    graph->edges = graph->cross_first = graph->cross = graph->batch_indices = NULL;
}

static void free_shares(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    while (graph->shares != NULL) {
        pst__share *next = graph->shares->next;
        pst__heap_free(heap, graph->shares, sizeof *next);
        graph->shares = next;
    }
    pst__heap_free(heap, graph->share_of, graph->share_room * sizeof *graph->share_of);
}

void pst__graph_free(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    pst__graph_free_sealed_arrays(graph);
    pst__slab_each(&graph->details, drop_event, NULL);
    pst__slab_free(&graph->details);
    pst__grown_free_all(graph);
    free_shares(graph);
    pst__heap_free(heap, graph->nodes, graph->node_capacity * sizeof *graph->nodes);
    pst__heap_free(heap, graph->pairs, graph->pair_capacity * sizeof *graph->pairs);
    pst__heap_free(heap, graph->outer, graph->outer_capacity * sizeof *graph->outer);
    pst__heap_free(heap, graph->gates, graph->gate_capacity * sizeof *graph->gates);
    pst__heap_free_text(heap, graph->name);
    pst__heap_free(heap, graph, sizeof *graph);
}

uint32_t pst__graph_count_unfinished(pst_graph *graph) {
    uint32_t count = 0;
    if (graph->kind == PST_GRAPH_GROWING) return pst__run_unended(graph, &graph->runs[0]);
    for (size_t i = 0; i < graph->node_count; i++) {
        const pst__question asked = {graph, &graph->nodes[i], pst__graph_number(graph), 0};
        pst_status status;
        count += !pst__task_has_ended(pst__look(&asked, &status));
    }
    return count;
}

static int nobody_is_in(const void *argument) {
    const pst_graph *graph = argument;
    /* Acquire: pairs with the last subtraction in end_gate (advance.c). */
    return pst__graph_is_done(graph) && pst__load_acquire(&graph->passing) == 0;
}

pst_status pst_graph_destroy(pst_graph *graph) {
    if (graph == NULL) return PST_OK;
    pst_runtime *runtime = graph->runtime;
    if (pst__calls_are_in(graph))
        return pst__runtime_fail(runtime, PST_ESTATE,
                                 "graph %s cannot be destroyed in a start, test or callback of "
                                 "one of its tasks",
                                 graph->name);
    if (!pst__graph_has_ended(graph))
        return pst__runtime_fail(runtime, PST_EBUSY,
                                 "graph %s has %u unfinished tasks or gates: wait for them or "
                                 "cancel the launch before it is destroyed",
                                 graph->name, pst__graph_count_unfinished(graph));
    /* A callback may be running, or a lane be on its way out of the last task. */
    if (pst__wait_aside(runtime, nobody_is_in, graph) != PST_OK)
        return pst__runtime_fail(runtime, PST_ETIMEDOUT,
                                 "graph %s is not destroyed: a callback of its tasks has not "
                                 "returned in %.3f s",
                                 graph->name, (double)runtime->deadline_ns / 1e9);
    delist(graph);
    pst__graph_free(graph);
    return PST_OK;
}

size_t pst_graph_size(const pst_graph *graph) {
    return graph == NULL ? 0 : graph->node_count;
}

/* ---- shares ----------------------------------------------------------------------------- */

static pst__share *add_share(pst_graph *graph, pst_lane *lane) {
    if (pst__heap_grow(&graph->runtime->heap, (void **)&graph->share_of, &graph->share_room,
                       lane->index + 1u, sizeof(pst__share *)) != PST_OK)
        return NULL;
    pst__share *share = graph->share_of[lane->index];
    if (share != NULL) return share;
    share = pst__heap_alloc(&graph->runtime->heap, sizeof *share);
    if (share == NULL) return NULL;
    share->lane = lane;
    share->item = (pst__node){.graph = graph, .lane = lane, .flags = PST__NODE_BATCH};
    share->next = graph->shares;
    /* Release: whoever adds up the shares finds it complete. */
    pst__store_release(&graph->shares, share);
    return graph->share_of[lane->index] = share;
}

pst__share *pst__graph_make_share(pst_graph *graph, pst_lane *lane) {
    return add_share(graph, lane->leader) == NULL ? NULL : add_share(graph, lane);
}

/* ---- checks ----------------------------------------------------------------------------- */

static pst_status fail(const pst_graph *graph, pst_status status, const char *task,
                       const char *text) {
    return pst__runtime_fail(graph->runtime, status, "graph %s: task %s: %s", graph->name,
                             task == NULL ? "" : task, text);
}

pst_status pst__graph_check_building(pst_graph *graph, const char *task) {
    if (graph->kind != PST_GRAPH_SEALED)
        return fail(graph, PST_ESTATE, task, "only sealed graphs are built this way");
    if (graph->is_launchable) return fail(graph, PST_ESTATE, task, "the graph is sealed already");
    return PST_OK;
}

/* NULL when nothing is. */
static const char *what_is_wrong(pst_graph *graph, const pst_task_options *options) {
    const pst_lane *lane = options->lane;
    if (lane == NULL) return "it has no lane (gates: pst_graph_add_gate)";
    if (lane->runtime != graph->runtime) return "its lane belongs to another runtime";
    if (lane->mode == PST_LANE_BORROWED)
        return "its lane is borrowed, and such a lane takes no tasks";
    if (options->after_event_count > PST__AFTER_EVENTS) return "it has more than 4 after_events";
    if ((options->after == NULL && options->after_count > 0) ||
        (options->after_events == NULL && options->after_event_count > 0))
        return "a list of predecessors or events is missing";
    if (options->after_count >= PST__COUNT_LIMIT) return "it has too many predecessors";
    if (options->priority != 0 &&
        (!pst__order_has_priorities(lane->order) || options->priority < PST_PRIORITY_MOST_URGENT ||
         options->priority > PST_PRIORITY_LEAST_URGENT))
        return "it has a priority, which must be -4 to 3 and belongs to lanes BY_PRIORITY";
    for (size_t i = 0; i < options->after_count; i++)
        if (pst__graph_node(graph, options->after[i]) == NULL)
            return options->after[i].graph == NULL
                       ? "one of its predecessors is no task"
                       : "one of its predecessors belongs to another graph";
    return NULL;
}

static pst_status check_options(pst_graph *graph, const pst_task_options *options) {
    const char *wrong = options == NULL ? "options are missing or their `size` is not "
                                          "sizeof(pst_task_options)"
                                        : what_is_wrong(graph, options);
    if (wrong == NULL) return PST_OK;
    return fail(graph, PST_EINVAL, options == NULL ? NULL : options->name, wrong);
}

pst__node *pst__graph_node(pst_graph *graph, pst_task task) {
    if (graph == NULL || task.graph != graph) return NULL;
    if (graph->kind == PST_GRAPH_GROWING) return (pst__node *)(uintptr_t)task.id;
    return task.id < graph->node_count ? &graph->nodes[task.id] : NULL;
}

/* ---- building a sealed graph ------------------------------------------------------------ */

void pst__detail_fill(pst__detail *detail, const pst_task_options *options) {
    detail->name = options->name;
    detail->test = options->work.test;
    detail->done = options->done;
    detail->done_argument = options->done_argument;
    detail->ticket = options->ticket;
    detail->bytes = options->bytes;
    detail->path = options->path;
    detail->priority = (int16_t)options->priority;
    detail->after_count = (uint16_t)options->after_event_count;
    for (uint32_t i = 0; i < detail->after_count; i++)
        detail->after[i] = options->after_events[i];
}

pst_status pst_task_set_ticket(pst_task task, uint64_t ticket) {
    if (task.graph == NULL || task.graph->kind != PST_GRAPH_SEALED) return PST_EINVAL;
    const pst__node *node = pst__graph_node(task.graph, task);
    if (node == NULL || pst__node_ticket(node) == 0) return PST_EINVAL;
    pst__store_relaxed(&node->detail->ticket, ticket); /* see pst__node_ticket */
    return PST_OK;
}

void pst__detail_drop_event(pst__detail *detail) {
    if (detail->event != NULL)
        detail->event_device->ops->event_destroy(detail->event_device, detail->event);
    detail->event = NULL;
}

pst_status pst__detail_make_event(pst__detail *detail, pst_device *device) {
    if (detail->event_device != device) pst__detail_drop_event(detail);
    if (detail->event != NULL) return PST_OK;
    const pst_status status = device->ops->event_create(device, 0, &detail->event);
    if (status == PST_OK) detail->event_device = device;
    return status;
}

static int wants_detail(const pst_task_options *options) {
    return options->name != NULL || options->work.test != NULL || options->done != NULL ||
           options->ticket != 0 || options->bytes != 0 || options->after_event_count > 0 ||
           options->priority != 0 || options->lane->asynchronous;
}

static pst_status reserve(pst_graph *graph, size_t pairs, const char *task) {
    const pst__heap *heap = &graph->runtime->heap;
    if (graph->node_count + 2 > PST__COUNT_LIMIT || graph->pair_count + pairs > UINT32_MAX)
        return fail(graph, PST_EINVAL, task, "the graph is full: 2^26 tasks, 2^32 edges");
    pst_status status = PST_OK;
    if (graph->node_count + 2 > graph->node_capacity)
        status = pst__heap_grow(heap, (void **)&graph->nodes, &graph->node_capacity,
                                graph->node_count + 2, sizeof *graph->nodes);
    if (status == PST_OK && graph->pair_count + pairs > graph->pair_capacity)
        status = pst__heap_grow(heap, (void **)&graph->pairs, &graph->pair_capacity,
                                graph->pair_count + pairs, sizeof *graph->pairs);
    return status == PST_OK ? PST_OK : fail(graph, status, task, "no memory");
}

static void append_pair(pst_graph *graph, uint32_t from, uint32_t to) {
    if (from >= to) graph->disordered = 1;
    graph->pairs[graph->pair_count++] = (pst__pair){from, to};
    graph->nodes[to].predecessors++;
}

static pst_task append_node(pst_graph *graph) {
    pst__node *node = &graph->nodes[graph->node_count];
    node->graph = graph;
    return (pst_task){graph, graph->node_count++};
}

/* Copied only for a caller with another header: this is done for every task. */
static const pst_task_options *read_options(const pst_task_options *given, pst_task_options *copy) {
    if (given != NULL && given->size == sizeof *given) return given;
    return pst__read_options(copy, sizeof *copy, given) ? copy : NULL;
}

pst_status pst_graph_add(pst_graph *graph, const pst_task_options *given, pst_task *task) {
    pst_task_options copy;
    if (task != NULL) *task = (pst_task){NULL, 0};
    if (graph == NULL) return PST_EINVAL;
    const pst_task_options *options = read_options(given, &copy);
    pst_status status = check_options(graph, options);
    if (status != PST_OK) return status;
    if (graph->kind == PST_GRAPH_GROWING) return pst__grown_add(graph, options, task);
    status = pst__graph_check_building(graph, options->name);
    if (status == PST_OK) status = reserve(graph, options->after_count, options->name);
    if (status != PST_OK) return status;
    pst__share *share = pst__graph_share(graph, options->lane);
    if (share == NULL) return fail(graph, PST_ENOMEM, options->name, "no memory");
    pst__detail *detail = NULL;
    if (wants_detail(options)) {
        detail = pst__slab_take(&graph->details);
        if (detail == NULL) return fail(graph, PST_ENOMEM, options->name, "no memory");
        pst__detail_fill(detail, options);
    }
    const pst_task added = append_node(graph);
    pst__node *node = &graph->nodes[added.id];
    node->start = options->work.start;
    node->argument = options->work.argument;
    node->lane = options->lane;
    node->detail = detail;
    pst__store_relaxed(&share->tasks, share->tasks + 1); /* pst_lane_destroy looks at it */
    for (size_t i = 0; i < options->after_count; i++)
        append_pair(graph, (uint32_t)options->after[i].id, (uint32_t)added.id);
    if (task != NULL) *task = added;
    return PST_OK;
}

pst_status pst_graph_add_gate(pst_graph *graph, const char *name, pst_task *gate) {
    if (gate == NULL) return PST_EINVAL;
    *gate = (pst_task){NULL, 0};
    if (graph == NULL) return PST_EINVAL;
    if (graph->kind == PST_GRAPH_GROWING) return pst__grown_add_gate(graph, name, gate);
    pst_status status = pst__graph_check_building(graph, name);
    if (status == PST_OK) status = reserve(graph, 0, name);
    if (status != PST_OK) return status;
    if (pst__heap_grow(&graph->runtime->heap, (void **)&graph->gates, &graph->gate_capacity,
                       graph->gate_count + 1, sizeof *graph->gates) != PST_OK)
        return fail(graph, PST_ENOMEM, name, "no memory");
    pst__detail *detail = pst__slab_take(&graph->details);
    if (detail == NULL) return fail(graph, PST_ENOMEM, name, "no memory");
    detail->name = name;
    *gate = append_node(graph);
    pst__node *node = &graph->nodes[gate->id];
    node->flags = PST__NODE_GATE;
    node->predecessors = 1; /* its opening */
    node->detail = detail;
    graph->gates[graph->gate_count++] = (uint32_t)gate->id;
    return PST_OK;
}

pst_status pst_graph_add_edge(pst_graph *graph, pst_task from, pst_task to) {
    if (graph == NULL) return PST_EINVAL;
    const pst__node *source = pst__graph_node(graph, from);
    const pst__node *target = pst__graph_node(graph, to);
    pst_status status = pst__graph_check_building(graph, "(edge)");
    if (status != PST_OK) return status;
    if (source == NULL || target == NULL)
        return pst__runtime_fail(
            graph->runtime, PST_EINVAL,
            "graph %s: edge from %s to %s: %s is no task of this graph; edges lead from task to "
            "task of one graph",
            graph->name, source == NULL ? "(foreign task)" : pst__node_name(source),
            target == NULL ? "(foreign task)" : pst__node_name(target),
            source == NULL ? "the first" : "the second");
    if (target->predecessors + 1u >= PST__COUNT_LIMIT)
        return fail(graph, PST_EINVAL, pst__node_name(target), "it has too many predecessors");
    status = reserve(graph, 1, pst__node_name(target));
    if (status == PST_OK) append_pair(graph, (uint32_t)from.id, (uint32_t)to.id);
    return status;
}

static pst_status append_outer(pst_graph *graph, pst_task task, uint32_t is_wait) {
    if (graph == NULL) return PST_EINVAL;
    const pst__node *node = pst__graph_node(graph, task);
    pst_status status = pst__graph_check_building(graph, "(outer program)");
    if (status != PST_OK) return status;
    if (node == NULL || (!is_wait && !(node->flags & PST__NODE_GATE)))
        return fail(graph, PST_EINVAL, node == NULL ? "(foreign task)" : pst__node_name(node),
                    "the outer thread waits for tasks and opens gates of this graph only");
    if (pst__heap_grow(&graph->runtime->heap, (void **)&graph->outer, &graph->outer_capacity,
                       graph->outer_count + 1, sizeof *graph->outer) != PST_OK)
        return fail(graph, PST_ENOMEM, pst__node_name(node), "no memory");
    graph->outer[graph->outer_count++] = (pst__outer){(uint32_t)task.id, is_wait};
    graph->disordered = 1;
    return PST_OK;
}

pst_status pst_graph_outer_open(pst_graph *graph, pst_task gate) {
    return append_outer(graph, gate, 0);
}

pst_status pst_graph_outer_wait(pst_graph *graph, pst_task task) {
    return append_outer(graph, task, 1);
}
