/* two_lanes.c - a pipeline on two lanes: while "sum" works on one buffer, "load" fills the other.
 *
 *   lane "load":  load 0 --> load 1 --> load 2 --> load 3
 *   lane "sum":   sum 0  --> sum 1  --> sum 2  --> sum 3
 *   between them: load i --> sum i, and sum i --> load i + 2, which fills the same buffer
 *
 * The graph is built and sealed once and launched several times. Each launch waits at a gate until
 * the program has chosen what to load. Usage: two_lanes [TRACE.json]
 */
#include <inttypes.h>
#include <penstock/penstock.h>
#include <stdio.h>

enum { CHUNKS = 4, BUFFERS = 2, VALUES = 1 << 16, LAUNCHES = 3 };

typedef struct pipeline pipeline;

typedef struct chunk {
    pipeline *owner;
    uint64_t index;
    pst_task loaded, summed;
} chunk;

struct pipeline {
    uint64_t first; /* what the program chooses before it opens the gate */
    uint64_t total;
    uint64_t buffers[BUFFERS][VALUES];
    chunk chunks[CHUNKS];
    pst_task gate;
};

/* Work of a task. It runs on its lane's worker, and only when the edges before it allow. */
static pst_status load(void *argument, pst_stream *stream) {
    const chunk *c = argument;
    uint64_t *buffer = c->owner->buffers[c->index % BUFFERS];
    (void)stream;
    for (uint64_t i = 0; i < VALUES; i++)
        buffer[i] = c->owner->first + c->index * VALUES + i;
    return PST_OK;
}

static pst_status sum(void *argument, pst_stream *stream) {
    const chunk *c = argument;
    const uint64_t *buffer = c->owner->buffers[c->index % BUFFERS];
    (void)stream;
    for (uint64_t i = 0; i < VALUES; i++)
        c->owner->total += buffer[i];
    return PST_OK;
}

/* Adds a task that starts after two others; a zeroed second one stands for none. */
static pst_status add(pst_graph *graph, const char *name, pst_lane *lane, pst_work work,
                      pst_task first, pst_task second, pst_task *task) {
    const pst_task after[] = {first, second};
    pst_task_options options = {.size = sizeof options,
                                .name = name,
                                .lane = lane,
                                .work = work,
                                .after = after,
                                .after_count = second.graph ? 2 : 1};
    return pst_graph_add(graph, &options, task);
}

static pst_status build(pipeline *p, pst_graph *graph, pst_lane *loads, pst_lane *sums) {
    const pst_task none = {0};
    pst_status status = pst_graph_add_gate(graph, "chosen", &p->gate);
    for (uint64_t i = 0; i < CHUNKS && !status; i++) {
        chunk *c = &p->chunks[i];
        pst_work loading = {.start = load, .argument = c};
        pst_work summing = {.start = sum, .argument = c};
        c->owner = p;
        c->index = i;
        status = add(graph, "load", loads, loading, i ? c[-1].loaded : p->gate,
                     i < BUFFERS ? none : c[-BUFFERS].summed, &c->loaded);
        if (status) break;
        status = add(graph, "sum", sums, summing, c->loaded, i ? c[-1].summed : none, &c->summed);
    }
    if (status) return status;
    /* What this program will do in each launch, so that sealing finds a hang before it happens. */
    status = pst_graph_outer_open(graph, p->gate);
    if (!status) status = pst_graph_outer_wait(graph, p->chunks[CHUNKS - 1].summed);
    return status ? status : pst_graph_seal(graph);
}

/* One launch, from the choice of its values to its sum. */
static pst_status launch(pipeline *p, pst_graph *graph, uint64_t first) {
    pst_launch run;
    pst_status status = pst_graph_launch(graph, &run);
    if (status) return status;
    p->first = first;
    p->total = 0;
    status = pst_gate_open(run, p->gate, NULL);
    if (!status) status = pst_task_wait(run, p->chunks[CHUNKS - 1].summed, NULL);
    if (status) return status;
    printf("values from %" PRIu64 ": sum %" PRIu64 "\n", first, p->total);
    return pst_launch_wait(run); /* then the graph can be launched again */
}

static pst_status run(pipeline *p, pst_runtime *runtime, pst_graph *graph, const char *trace) {
    pst_lane_options load_lane = {.size = sizeof load_lane, .name = "load"};
    pst_lane_options sum_lane = {.size = sizeof sum_lane, .name = "sum"};
    pst_lane *loads = NULL, *sums = NULL;
    pst_status status = pst_lane_create(runtime, &load_lane, &loads);
    if (!status) status = pst_lane_create(runtime, &sum_lane, &sums);
    if (!status) status = build(p, graph, loads, sums);
    if (!status) status = pst_trace_start(runtime);
    for (uint64_t i = 0; i < LAUNCHES && !status; i++)
        status = launch(p, graph, 1000 * i);
    if (!status) status = pst_trace_stop(runtime);
    return status ? status : pst_trace_write(runtime, trace);
}

int main(int argc, char **argv) {
    static pipeline p;
    const char *trace = argc > 1 ? argv[1] : "two_lanes.json";
    pst_runtime *runtime = NULL;
    pst_graph *graph = NULL;
    char error[256] = "";
    pst_status status = pst_runtime_create(NULL, &runtime);
    if (!status) status = pst_graph_create(runtime, PST_GRAPH_SEALED, "pipeline", &graph);
    if (!status) status = run(&p, runtime, graph, trace);

    if (status) {
        if (runtime) pst_runtime_error(runtime, error, sizeof error);
        fprintf(stderr, "two_lanes: %s: %s\n", pst_status_text(status), error);
    } else {
        printf("trace in %s\n", trace);
    }
    pst_runtime_destroy(runtime); /* and the graph and lanes with it */
    return status ? 1 : 0;
}
