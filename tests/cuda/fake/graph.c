/* Graphs that streams are captured into: nodes and the edges between them. */
#include "internal.h"

typedef struct node {
    operation made;
    int before[FAKE_PENDING + 1], before_count;
    int is_done, is_joined;
} node;

/* It outlives its nodes, as events still name it. */
struct fake_graph {
    fake_graph *next;
    node *nodes;
    int count;
};

static fake_graph *all;

fake_graph *fake_graph_create(void) {
    fake_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) abort();
    graph->next = all;
    return all = graph;
}

void fake_branch_begin(fake_branch *branch, fake_graph *graph) {
    *branch = (fake_branch){.graph = graph, .last = -1};
}

CUresult fake_branch_add(fake_branch *branch, const operation *made) {
    fake_graph *graph = branch->graph;
    node *nodes = realloc(graph->nodes, ((size_t)graph->count + 1) * sizeof *nodes);
    if (nodes == NULL) abort();
    graph->nodes = nodes;
    node *added = &nodes[graph->count];
    *added = (node){.made = *made};
    memcpy(added->before, branch->pending, sizeof branch->pending);
    added->before_count = branch->pending_count;
    if (branch->last >= 0) added->before[added->before_count++] = branch->last;
    branch->pending_count = 0;
    branch->last = graph->count++;
    return CUDA_SUCCESS;
}

CUresult fake_branch_wait(fake_branch *branch, int node) {
    if (branch->pending_count == FAKE_PENDING) return CUDA_ERROR_NOT_SUPPORTED;
    branch->pending[branch->pending_count++] = node;
    return CUDA_SUCCESS;
}

static void join(fake_graph *graph, int from) {
    node *joined = &graph->nodes[from];
    if (joined->is_joined) return;
    joined->is_joined = 1;
    for (int i = 0; i < joined->before_count; i++)
        join(graph, joined->before[i]);
}

CUresult fake_graph_end(const fake_branch *origin) {
    fake_graph *graph = origin->graph;
    if (origin->last >= 0) join(graph, origin->last);
    for (int i = 0; i < origin->pending_count; i++)
        join(graph, origin->pending[i]);
    for (int i = 0; i < graph->count; i++)
        if (!graph->nodes[i].is_joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    return CUDA_SUCCESS;
}

static int is_ready(const fake_graph *graph, const node *node) {
    if (node->is_done) return 0;
    for (int i = 0; i < node->before_count; i++)
        if (!graph->nodes[node->before[i]].is_done) return 0;
    return 1;
}

/* The `skip`th of those that are ready. */
static node *next_ready(fake_graph *graph, size_t (*random_below)(size_t limit)) {
    size_t ready = 0;
    for (int i = 0; i < graph->count; i++)
        ready += (size_t)is_ready(graph, &graph->nodes[i]);
    if (ready == 0) return NULL;
    size_t skip = random_below(ready);
    for (int i = 0;; i++)
        if (is_ready(graph, &graph->nodes[i]) && skip-- == 0) return &graph->nodes[i];
}

void fake_graph_consume(fake_graph *graph, CUstream stream, size_t (*random_below)(size_t limit)) {
    for (node *next; (next = next_ready(graph, random_below)) != NULL;) {
        next->is_done = 1;
        if (next->made.run != NULL) (void)fake_enqueue(stream, &next->made);
    }
    free(graph->nodes);
    graph->nodes = NULL;
}
