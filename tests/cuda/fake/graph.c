/* Graphs that streams are captured into: nodes and the edges between them. */
#include "internal.h"

typedef struct node {
    operation made;
    int before[FAKE_PENDING + 1], before_count;
    int is_joined;
} node;

typedef struct destructor {
    struct destructor *next;
    void (*call)(void *argument);
    void *argument;
} destructor;

/* The structure stays: events name it. */
struct fake_graph {
    fake_graph *next;
    node *nodes;
    int count;
    int references; /* handles, and launches that are under way */
    destructor *destructors;
};

/* What a launch has still to do. */
typedef struct fake_launch {
    fake_graph *graph;
    size_t left;
    size_t (*random_below)(size_t limit);
    char done[]; /* by node */
} fake_launch;

static fake_graph *all;

fake_graph *fake_graph_create(void) {
    fake_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) abort();
    graph->next = all;
    graph->references = 1;
    return all = graph;
}

void fake_graph_retain(fake_graph *graph) {
    graph->references++;
}

void fake_graph_release(fake_graph *graph) {
    if (--graph->references > 0) return;
    for (destructor *at = graph->destructors, *next; at != NULL; at = next) {
        next = at->next;
        at->call(at->argument);
        free(at);
    }
    graph->destructors = NULL;
}

void fake_graph_at_destroy(fake_graph *graph, void (*call)(void *argument), void *argument) {
    destructor *added = calloc(1, sizeof *added);
    if (added == NULL) abort();
    *added = (destructor){graph->destructors, call, argument};
    graph->destructors = added;
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

/* ---- launches ----------------------------------------------------------------------- */

static int is_ready(const fake_launch *launch, int index) {
    const node *node = &launch->graph->nodes[index];
    if (launch->done[index]) return 0;
    for (int i = 0; i < node->before_count; i++)
        if (!launch->done[node->before[i]]) return 0;
    return 1;
}

static int run_node(fake_launch *launch, int index) {
    operation *made = &launch->graph->nodes[index].made;
    if (!is_ready(launch, index) || (made->run != NULL && !made->run(made))) return 0;
    launch->done[index] = 1;
    launch->left--;
    return 1;
}

/* The first node that can run, from a random one on; 0: there is none. */
static int run_any(fake_launch *launch) {
    const size_t count = (size_t)launch->graph->count, first = launch->random_below(count);
    for (size_t i = 0; i < count; i++)
        if (run_node(launch, (int)((first + i) % count))) return 1;
    return 0;
}

/* Branches do not hold each other up. */
static int run_launch(operation *self) {
    fake_launch *launch = self->owned;
    while (launch->left > 0 && run_any(launch))
        continue;
    if (launch->left > 0) return 0;
    fake_graph_release(launch->graph);
    return 1;
}

operation fake_graph_launch(fake_graph *graph, size_t (*random_below)(size_t limit)) {
    fake_launch *launch = calloc(1, sizeof *launch + (size_t)graph->count);
    if (launch == NULL) abort();
    launch->graph = graph;
    fake_graph_retain(graph);
    launch->left = (size_t)graph->count;
    launch->random_below = random_below;
    return (operation){.run = run_launch, .owned = launch};
}
