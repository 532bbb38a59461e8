#include "sched/cause.h"

/* The edges, against their direction: the predecessors of node i are from[first[i], first[i + 1]).
 */
typedef struct backwards {
    uint32_t *first, *from;
} backwards;

static size_t edge_count(const pst_graph *graph) {
    return graph->nodes[graph->node_count].first_edge;
}

static void forget(const pst_graph *graph, backwards *edges) {
    const pst__heap *heap = &graph->runtime->heap;
    pst__heap_free(heap, edges->first, (graph->node_count + 1) * sizeof *edges->first);
    pst__heap_free(heap, edges->from, edge_count(graph) * sizeof *edges->from);
}

static int turn_round(const pst_graph *graph, backwards *edges) {
    const pst__heap *heap = &graph->runtime->heap;
    const size_t count = edge_count(graph);
    edges->first = pst__heap_alloc(heap, (graph->node_count + 1) * sizeof *edges->first);
    edges->from = pst__heap_alloc(heap, count * sizeof *edges->from);
    if (edges->first == NULL || edges->from == NULL) return 0;
    for (size_t e = 0; e < count; e++)
        edges->first[graph->edges[e]]++;
    uint32_t end = 0;
    for (size_t i = 0; i <= graph->node_count; i++)
        edges->first[i] = end += edges->first[i];
    /* Filled from the end, so that each `first` comes down to where its node's begin. */
    for (size_t i = graph->node_count; i-- > 0;)
        for (uint32_t e = graph->nodes[i].first_edge; e < graph->nodes[i + 1].first_edge; e++)
            edges->from[--edges->first[graph->edges[e]]] = (uint32_t)i;
    return 1;
}

/* ---- what comes before ------------------------------------------------------------------ */

static pst__task_state state_of(const pst__question *asked, pst__node *node) {
    pst_status status;
    return pst__look(&(pst__question){asked->graph, node, asked->number, 0}, &status);
}

int pst__cause_is_launched(const pst__question *asked, pst__node *node) {
    return state_of(asked, node) >= PST__TASK_LAUNCHED;
}

static pst__node *unfinished_predecessor(const pst__question *asked, const backwards *edges,
                                         const pst__node *node) {
    const uint32_t index = pst__node_index(node);
    for (uint32_t e = edges->first[index]; e < edges->first[index + 1]; e++) {
        pst__node *from = &asked->graph->nodes[edges->from[e]];
        if (!pst__task_has_ended(state_of(asked, from))) return from;
    }
    return NULL;
}

/* A lane that launches in the order of adding holds a task back for the first that is missing. */
static pst__node *first_in_order(const pst__question *asked, const pst__node *node) {
    pst_graph *graph = asked->graph;
    if (node->lane == NULL || node->lane->order != PST_LANE_BY_SUBMISSION) return NULL;
    const pst__share *share = graph->share_of[node->lane->leader->index];
    for (uint32_t i = 0; i < share->count; i++) {
        pst__node *first = &graph->nodes[share->indices[i]];
        if (first == node) return NULL;
        if (!pst__cause_is_launched(asked, first)) return first;
    }
    return NULL;
}

pst__node *pst__cause_of(const pst__question *asked) {
    pst__node *cause = asked->node;
    backwards edges;
    const int is_round = turn_round(asked->graph, &edges);
    for (pst__node *before = cause; is_round && before != NULL;) {
        cause = before;
        before = unfinished_predecessor(asked, &edges, cause);
        if (before == NULL && !pst__cause_is_launched(asked, cause))
            before = first_in_order(asked, cause);
    }
    forget(asked->graph, &edges);
    return cause;
}
