/* The check at sealing: edges, lanes that launch in the order of adding, and the outer thread's
 * program must leave no cycle. Vertices 0..tasks-1 are tasks, the others the program's lines. */
#include "sched/cycle.h"

#include <stdio.h>
#include <string.h>

typedef struct arcs {
    pst__pair *pairs;
    size_t count, capacity;
    size_t vertices;
    uint32_t *numbers; /* the block of the four below */
    size_t number_count;
    uint32_t *first; /* vertices + 1: where a vertex' arcs begin in `to` */
    uint32_t *to;
    uint32_t *missing; /* arcs that lead to a vertex and are not taken off yet */
    uint32_t *stack;
} arcs;

/* A node's lane launches in order: an arc from the task before it, of this lane or one that has the
 * same order. */
static size_t lane_arcs(const pst_graph *graph, pst__pair *pairs) {
    size_t count = 0;
    for (const pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != NULL;
         lane = lane->next) {
        uint32_t previous = UINT32_MAX;
        if (!pst__order_is_by_adding(lane->order) || lane->leader != lane) continue;
        for (uint32_t i = 0; i < graph->node_count; i++) {
            if (graph->nodes[i].lane == NULL || graph->nodes[i].lane->leader != lane) continue;
            if (previous != UINT32_MAX) pairs[count++] = (pst__pair){previous, i};
            previous = i;
        }
    }
    return count;
}

/* An opening comes before its gate, a task before the wait for it, a line before the next one. */
static size_t outer_arcs(const pst_graph *graph, pst__pair *pairs) {
    size_t count = 0;
    for (uint32_t i = 0; i < graph->outer_count; i++) {
        const uint32_t line = (uint32_t)graph->node_count + i, task = graph->outer[i].task;
        pairs[count++] =
            graph->outer[i].is_wait ? (pst__pair){task, line} : (pst__pair){line, task};
        if (i > 0) pairs[count++] = (pst__pair){line - 1, line};
    }
    return count;
}

static void free_arcs(const pst__heap *heap, arcs *all) {
    pst__heap_free(heap, all->pairs, all->capacity * sizeof *all->pairs);
    pst__heap_free(heap, all->numbers, all->number_count * sizeof *all->numbers);
}

static void sort_arcs(arcs *all) {
    for (size_t i = 0; i < all->count; i++) {
        all->first[all->pairs[i].from]++;
        all->missing[all->pairs[i].to]++;
    }
    uint32_t end = 0;
    for (size_t v = 0; v <= all->vertices; v++)
        all->first[v] = end += all->first[v];
    /* Filled from the end, so that each `first` comes down to where its vertex' arcs begin. */
    for (size_t i = all->count; i-- > 0;)
        all->to[--all->first[all->pairs[i].from]] = all->pairs[i].to;
}

static pst_status collect_arcs(const pst_graph *graph, arcs *all) {
    const pst__heap *heap = &graph->runtime->heap;
    all->vertices = graph->node_count + graph->outer_count;
    all->capacity = graph->pair_count + graph->node_count + 2 * graph->outer_count;
    if (all->capacity > UINT32_MAX) return PST_ENOMEM; /* arcs are counted in 32 bits */
    all->pairs = pst__heap_alloc(heap, all->capacity * sizeof *all->pairs);
    all->number_count = 3 * all->vertices + 1 + all->capacity;
    all->numbers = pst__heap_alloc(heap, all->number_count * sizeof *all->numbers);
    if (all->pairs == NULL || all->numbers == NULL) return PST_ENOMEM;
    all->first = all->numbers;
    all->missing = all->first + all->vertices + 1;
    all->stack = all->missing + all->vertices;
    all->to = all->stack + all->vertices;
    if (graph->pair_count > 0)
        memcpy(all->pairs, graph->pairs, graph->pair_count * sizeof *all->pairs);
    all->count = graph->pair_count;
    all->count += lane_arcs(graph, all->pairs + all->count);
    all->count += outer_arcs(graph, all->pairs + all->count);
    sort_arcs(all);
    return PST_OK;
}

/* Takes off vertices to which no arc leads, until none is left; what remains is on a cycle or
 * behind one. Returns how many were taken off. */
static size_t take_off(arcs *all) {
    size_t depth = 0, taken = 0;
    for (uint32_t v = 0; v < all->vertices; v++)
        if (all->missing[v] == 0) all->stack[depth++] = v;
    while (depth > 0) {
        const uint32_t v = all->stack[--depth];
        taken++;
        for (uint32_t a = all->first[v]; a < all->first[v + 1]; a++)
            if (--all->missing[all->to[a]] == 0) all->stack[depth++] = all->to[a];
    }
    return taken;
}

/* From any vertex that remains, going against the arcs never ends: the first vertex met twice is on
 * a cycle. Leaves the cycle on the stack, against the arcs, and returns its length. */
static size_t find_cycle(arcs *all) {
    uint32_t *before = all->first; /* the arcs' order is not needed any more */
    for (size_t i = 0; i < all->count; i++)
        if (all->missing[all->pairs[i].from] > 0) before[all->pairs[i].to] = all->pairs[i].from;
    uint32_t v = 0;
    while (all->missing[v] == 0)
        v++;
    while (all->missing[v] != UINT32_MAX) {
        all->missing[v] = UINT32_MAX;
        v = before[v];
    }
    size_t length = 0;
    const uint32_t start = v;
    do {
        all->stack[length++] = v;
        v = before[v];
    } while (v != start);
    return length;
}

static size_t append_vertex(const pst_graph *graph, uint32_t vertex, char *text, size_t size) {
    const int is_line = vertex >= graph->node_count;
    const pst__outer *line = is_line ? &graph->outer[vertex - graph->node_count] : NULL;
    const uint32_t task = is_line ? line->task : vertex;
    const char *name = pst__node_name(&graph->nodes[task]);
    const char *what = !is_line        ? ""
                       : line->is_wait ? "the outer thread's wait for "
                                       : "the outer thread's opening of ";
    const int wrote = name[0] == '\0' ? snprintf(text, size, "%s#%u", what, task)
                                      : snprintf(text, size, "%s%s", what, name);
    return wrote < 0 ? 0 : (size_t)wrote;
}

static pst_status report(const pst_graph *graph, const arcs *all, size_t length) {
    char text[768];
    size_t used = 0;
    for (size_t i = 0; i <= length && used < sizeof text - 8; i++) {
        if (i > 0) {
            memcpy(text + used, " -> ", 5);
            used += 4;
        }
        /* Against the arcs from the end is along them; the first vertex comes once more at last. */
        const uint32_t vertex = all->stack[(2 * length - 1 - i) % length];
        used += append_vertex(graph, vertex, text + used, sizeof text - 6 - used);
        if (used > sizeof text - 6) used = sizeof text - 6;
    }
    text[used] = '\0';
    return pst__runtime_fail(graph->runtime, PST_ECYCLE,
                             "graph %s has a cycle: %s; each starts only after the one before it",
                             graph->name, text);
}

pst_status pst__graph_check_cycles(pst_graph *graph) {
    /* Edges that follow the order of adding close no cycle, nor do lanes that launch in it. */
    if (!graph->disordered) return PST_OK;
    arcs all = {0};
    pst_status status = collect_arcs(graph, &all);
    if (status == PST_OK && take_off(&all) < all.vertices)
        status = report(graph, &all, find_cycle(&all));
    free_arcs(&graph->runtime->heap, &all);
    return status;
}
