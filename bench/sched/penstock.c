/* Penstock: sealed graphs, and growing ones. */
#include "system.h"

#include <penstock/graph.h>
#include <penstock/runtime.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_THREADS = 2, WINDOW = 2 * BENCH_WIDTH };

typedef struct setting {
    pst_runtime *runtime;
    pst_lane *lanes[MAX_THREADS];
    size_t threads;
    bench_shape shape;
    size_t tasks;
} setting;

static pst_status run_body(void *argument, pst_stream *stream) {
    (void)argument;
    (void)stream;
    bench_body();
    return PST_OK;
}

/* As with the peers, the calling thread is one of the threads, and each may run any task: while it
 * waits it serves the first lane, and helps at the second. */
static pst_status open_setting(setting *setting) {
    pst_status status = pst_runtime_create(NULL, &setting->runtime);
    for (size_t i = 0; status == PST_OK && i < setting->threads; i++) {
        pst_lane_options options = {.size = sizeof(options),
                                    .name = i == 0 ? "a" : "b",
                                    .mode = i == 0 ? PST_LANE_PUMPED : PST_LANE_WORKER,
                                    .takes_help = 1};
        status = pst_lane_create(setting->runtime, &options, &setting->lanes[i]);
    }
    return status;
}

/* Adds task i, whose predecessors' handles lie at tasks[index % window]. */
static pst_status add(const setting *setting, pst_graph *graph, pst_task *tasks, size_t window,
                      size_t i) {
    size_t predecessors[BENCH_MAX_PREDECESSORS];
    size_t count = bench_predecessors(setting->shape, i, predecessors);
    pst_task after[BENCH_MAX_PREDECESSORS];
    for (size_t k = 0; k < count; k++)
        after[k] = tasks[predecessors[k] % window];
    size_t lane = setting->threads == 1 ? 0 : bench_half(setting->shape, i);
    pst_task_options options = {.size = sizeof(options),
                                .lane = setting->lanes[lane],
                                .work = {.start = run_body},
                                .after = after,
                                .after_count = count};
    return pst_graph_add(graph, &options, &tasks[i % window]);
}

static pst_status launch_and_wait(pst_graph *graph) {
    pst_launch launch;
    pst_status status = pst_graph_launch(graph, &launch);
    return status == PST_OK ? pst_launch_wait(launch) : status;
}

static pst_status build_sealed(const setting *setting, pst_graph *graph) {
    pst_task *tasks = malloc(setting->tasks * sizeof(*tasks));
    if (tasks == NULL) return PST_ENOMEM;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < setting->tasks; i++)
        status = add(setting, graph, tasks, setting->tasks, i);
    free(tasks);
    return status == PST_OK ? pst_graph_seal(graph) : status;
}

static pst_status measure_sealed(const setting *setting, bench_sample *sample) {
    pst_graph *graph = NULL;
    double begin = bench_now();
    pst_status status = pst_graph_create(setting->runtime, PST_GRAPH_SEALED, "bench", &graph);
    if (status == PST_OK) status = build_sealed(setting, graph);
    if (status == PST_OK) status = launch_and_wait(graph);
    double built_and_run = bench_now();
    if (status == PST_OK) status = launch_and_wait(graph);
    double replayed = bench_now();
    sample->nanoseconds[BENCH_BUILD_AND_RUN] = built_and_run - begin;
    sample->nanoseconds[BENCH_REPLAY] = replayed - built_and_run;
    pst_graph_destroy(graph);
    return status;
}

/* Handles are given back as soon as no later task names them. */
static pst_status submit_all(const setting *setting, pst_graph *graph) {
    pst_task tasks[WINDOW] = {{NULL, 0}};
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < setting->tasks; i++) {
        pst_task_release(tasks[i % WINDOW]);
        tasks[i % WINDOW] = (pst_task){NULL, 0};
        status = add(setting, graph, tasks, WINDOW, i);
    }
    for (size_t i = 0; i < WINDOW; i++)
        pst_task_release(tasks[i]);
    return status;
}

static pst_status measure_growing(const setting *setting, bench_sample *sample) {
    pst_graph *graph = NULL;
    double begin = bench_now();
    pst_status status = pst_graph_create(setting->runtime, PST_GRAPH_GROWING, "bench", &graph);
    if (status == PST_OK) status = submit_all(setting, graph);
    if (graph != NULL) {
        pst_status end = pst_launch_wait((pst_launch){graph, 0});
        if (status == PST_OK) status = end;
    }
    sample->nanoseconds[BENCH_BUILD_AND_RUN] = bench_now() - begin;
    pst_graph_destroy(graph);
    return status;
}

static int measure(pst_status (*kind)(const setting *, bench_sample *), bench_shape shape,
                   size_t threads, size_t tasks, bench_sample *sample) {
    setting setting = {.threads = threads, .shape = shape, .tasks = tasks};
    pst_status status = open_setting(&setting);
    if (status == PST_OK) status = kind(&setting, sample);
    if (status != PST_OK) {
        char text[512] = "";
        if (setting.runtime != NULL) pst_runtime_error(setting.runtime, text, sizeof(text));
        fprintf(stderr, "penstock: %s: %s\n", pst_status_name(status), text);
    }
    pst_runtime_destroy(setting.runtime);
    return status == PST_OK ? 0 : -1;
}

static int sealed(bench_shape shape, size_t threads, size_t tasks, bench_sample *sample) {
    return measure(measure_sealed, shape, threads, tasks, sample);
}

static int growing(bench_shape shape, size_t threads, size_t tasks, bench_sample *sample) {
    return measure(measure_growing, shape, threads, tasks, sample);
}

const bench_system bench_penstock = {"penstock", sealed};
const bench_system bench_penstock_growing = {"penstock growing", growing};
