/* A graph is built and sealed: from the lists of building to the flat arrays of replaying. */
#include "base/options.h"
#include "sched/advance.h"
#include "sched/cycle.h"
#include "sched/growing.h"

/* ---- checks ----------------------------------------------------------------------------- */

static pst_status fail(const pst_graph *graph, pst_status status, const char *task,
                       const char *text) {
    return pst__runtime_fail(graph->runtime, status, "graph %s: task %s: %s", graph->name,
                             task == NULL ? "" : task, text);
}

/* PST_ESTATE, naming `task`, unless the graph is one that is built and not sealed yet. */
static pst_status check_building(pst_graph *graph, const char *task) {
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

/* ---- building a sealed graph ------------------------------------------------------------ */

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
    status = check_building(graph, options->name);
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
    pst_status status = check_building(graph, name);
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
    pst_status status = check_building(graph, "(edge)");
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

pst_status pst_task_set_ticket(pst_task task, uint64_t ticket) {
    if (task.graph == NULL || task.graph->kind != PST_GRAPH_SEALED) return PST_EINVAL;
    const pst__node *node = pst__graph_node(task.graph, task);
    if (node == NULL || pst__node_ticket(node) == 0) return PST_EINVAL;
    pst__store_relaxed(&node->detail->ticket, ticket); /* see pst__node_ticket */
    return PST_OK;
}

static pst_status append_outer(pst_graph *graph, pst_task task, uint32_t is_wait) {
    if (graph == NULL) return PST_EINVAL;
    const pst__node *node = pst__graph_node(graph, task);
    pst_status status = check_building(graph, "(outer program)");
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

/* ---- the edges -------------------------------------------------------------------------- */

static pst_status make_edges(pst_graph *graph) {
    pst__node *nodes = graph->nodes;
    graph->edges = pst__heap_alloc(&graph->runtime->heap, graph->pair_count * sizeof *graph->edges);
    if (graph->edges == NULL) return PST_ENOMEM;
    for (size_t i = 0; i <= graph->node_count; i++)
        nodes[i].first_edge = 0;
    for (size_t i = 0; i < graph->pair_count; i++)
        nodes[graph->pairs[i].from].first_edge++;
    uint32_t end = 0;
    for (size_t i = 0; i <= graph->node_count; i++)
        nodes[i].first_edge = end += nodes[i].first_edge;
    /* Filled from the end, so that each first_edge comes down to where its node's edges begin. */
    for (size_t i = graph->pair_count; i-- > 0;)
        graph->edges[--nodes[graph->pairs[i].from].first_edge] = graph->pairs[i].to;
    return PST_OK;
}

static int is_cross(const pst_graph *graph, const pst__pair *pair) {
    return graph->nodes[pair->from].lane != graph->nodes[pair->to].lane;
}

/* Predecessors on other lanes: whom streams wait for, and where the trace draws arrows. */
static pst_status make_cross(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    size_t count = 0;
    for (size_t i = 0; i < graph->pair_count; i++)
        count += (size_t)is_cross(graph, &graph->pairs[i]);
    graph->cross_count = count;
    if (count == 0) return PST_OK;
    graph->cross_first =
        pst__heap_alloc(heap, (graph->node_count + 1) * sizeof *graph->cross_first);
    graph->cross = pst__heap_alloc(heap, count * sizeof *graph->cross);
    if (graph->cross_first == NULL || graph->cross == NULL) return PST_ENOMEM;
    for (size_t i = 0; i < graph->pair_count; i++)
        if (is_cross(graph, &graph->pairs[i])) graph->cross_first[graph->pairs[i].to]++;
    uint32_t end = 0;
    for (size_t i = 0; i <= graph->node_count; i++)
        graph->cross_first[i] = end += graph->cross_first[i];
    for (size_t i = graph->pair_count; i-- > 0;)
        if (is_cross(graph, &graph->pairs[i]))
            graph->cross[--graph->cross_first[graph->pairs[i].to]] = graph->pairs[i].from;
    return PST_OK;
}

/* ---- flags and events ------------------------------------------------------------------- */

static void flag_nodes(pst_graph *graph) {
    pst__node *nodes = graph->nodes;
    for (size_t i = 0; i < graph->node_count; i++) {
        pst__node *node = &nodes[i];
        node->pending = node->predecessors;
        node->flags =
            (node->flags & PST__NODE_GATE) != 0 ? PST__NODE_GATE | PST__NODE_LATE : PST__NODE_LOCAL;
        if (node->lane != NULL && node->lane->asynchronous && node->detail->done != NULL)
            node->flags |= PST__NODE_EVENT;
    }
}

static void flag_ends_of_edges(pst_graph *graph) {
    pst__node *nodes = graph->nodes;
    for (size_t i = 0; i < graph->pair_count; i++) {
        pst__node *from = &nodes[graph->pairs[i].from], *to = &nodes[graph->pairs[i].to];
        if (from->lane == to->lane) continue;
        to->flags &= ~(unsigned)PST__NODE_LOCAL & 0x3fu;
        if (from->lane == NULL || !from->lane->asynchronous) continue;
        from->flags |= PST__NODE_EVENT;
        if (!pst__is_early(from, to->lane)) from->flags |= PST__NODE_LATE;
    }
}

static void flag_what_is_waited_for(pst_graph *graph) {
    for (size_t i = 0; i < graph->outer_count; i++) {
        pst__node *node = &graph->nodes[graph->outer[i].task];
        if (graph->outer[i].is_wait && node->lane != NULL && node->lane->asynchronous)
            node->flags |= PST__NODE_EVENT;
    }
}

static pst_status make_events(pst_graph *graph) {
    for (size_t i = 0; i < graph->node_count; i++) {
        pst__node *node = &graph->nodes[i];
        if (!(node->flags & PST__NODE_EVENT)) continue;
        const pst_status status = pst__detail_make_event(node->detail, node->lane->device);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* ---- batches ---------------------------------------------------------------------------- */

/* Does a launch hand this node to its lane at once? */
static int starts_in_batch(const pst__node *node) {
    return node->lane != NULL &&
           (pst__order_is_by_adding(node->lane->order) || node->predecessors == 0);
}

/* Lanes with one order have one queue, and so one batch: that of the first of them. */
static pst__share *batch_of(const pst_graph *graph, const pst__node *node) {
    return graph->share_of[node->lane->leader->index];
}

static void count_batches(pst_graph *graph) {
    graph->batch_index_count = graph->parts = 0;
    for (pst__share *share = graph->shares; share != NULL; share = share->next) {
        share->count = share->cursor = 0;
        share->unlaunched = share->tasks;
        share->unended[0] = share->unended[1] = share->tasks;
        graph->parts += share->tasks > 0;
    }
    graph->parts += (uint32_t)graph->gate_count;
    for (size_t i = 0; i < graph->node_count; i++) {
        if (!starts_in_batch(&graph->nodes[i])) continue;
        batch_of(graph, &graph->nodes[i])->count++;
        graph->batch_index_count++;
    }
    int ordered = 0;
    for (const pst__share *share = graph->shares; share != NULL; share = share->next)
        ordered += share->count > 0 && pst__order_is_by_adding(share->lane->order);
    graph->is_ordered = ordered > 1;
}

/* The cursors count what is filled in; each launch sets them back. */
static void fill_batches(pst_graph *graph) {
    uint32_t *next = graph->batch_indices;
    for (pst__share *share = graph->shares; share != NULL; share = share->next) {
        share->indices = next;
        next += share->count;
    }
    for (uint32_t i = 0; i < graph->node_count; i++) {
        if (!starts_in_batch(&graph->nodes[i])) continue;
        pst__share *share = batch_of(graph, &graph->nodes[i]);
        graph->batch_indices[(size_t)(share->indices - graph->batch_indices) + share->cursor++] = i;
    }
}

static pst_status make_batches(pst_graph *graph) {
    count_batches(graph);
    graph->batch_indices = pst__heap_alloc(&graph->runtime->heap,
                                           graph->batch_index_count * sizeof *graph->batch_indices);
    if (graph->batch_indices == NULL) return PST_ENOMEM;
    fill_batches(graph);
    return PST_OK;
}

/* ---- sealing --------------------------------------------------------------------------- */

static pst_status make_arrays(pst_graph *graph) {
    /* While the graph was built the array doubled: now it gets the room it needs, with the node
     * that ends the last one's edges. */
    pst_status status =
        pst__heap_resize(&graph->runtime->heap, (void **)&graph->nodes, &graph->node_capacity,
                         graph->node_count + 1, sizeof *graph->nodes);
    if (status == PST_OK) status = make_edges(graph);
    if (status == PST_OK) status = make_cross(graph);
    if (status != PST_OK) return status;
    flag_nodes(graph);
    flag_ends_of_edges(graph);
    flag_what_is_waited_for(graph);
    status = make_events(graph);
    return status == PST_OK ? make_batches(graph) : status;
}

pst_status pst_graph_seal(pst_graph *graph) {
    if (graph == NULL) return PST_EINVAL;
    pst_status status = check_building(graph, "(seal)");
    if (status == PST_OK) status = pst__graph_check_cycles(graph);
    if (status == PST_ECYCLE || status == PST_ESTATE) return status;
    if (status == PST_OK) status = make_arrays(graph);
    if (status != PST_OK) {
        pst__graph_free_sealed_arrays(graph);
        return pst__runtime_fail(graph->runtime, status, "graph %s could not be sealed: %s",
                                 graph->name, pst_status_text(status));
    }
    pst__heap_free(&graph->runtime->heap, graph->pairs,
                   graph->pair_capacity * sizeof *graph->pairs);
    graph->pairs = NULL;
    graph->pair_capacity = 0;
    graph->is_launchable = 1;
    return PST_OK;
}
