/* Sealing: from the lists of building to the flat arrays of replaying. */
#include "sched/advance.h"
#include "sched/order.h"

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

/* ---- the call --------------------------------------------------------------------------- */

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
    pst_status status = pst__graph_check_building(graph, "(seal)");
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
