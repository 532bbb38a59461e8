#include "tasks.h"

static pst_status start(void *argument, pst_stream *stream) {
    return bare_launch(argument, stream);
}

static void check(const tasks_setting *setting, pst_status status, const char *what) {
    bench_check(&setting->gpu, status, what);
}

/* Adds task `index`, whose predecessors' handles lie in `tasks`. */
static void add(const tasks_setting *setting, pst_graph *graph, pst_task *tasks, size_t index) {
    const pattern_task *task = &setting->pattern->tasks[index];
    pst_task after[PATTERN_MOST_AFTER];
    for (size_t k = 0; k < task->after_count; k++)
        after[k] = tasks[task->after[k]];
    const pst_task_options options = {.size = sizeof options,
                                      .lane = setting->lanes[task->column % setting->lane_count],
                                      .work = {.start = start, .argument = setting->kernel},
                                      .after = after,
                                      .after_count = task->after_count};
    check(setting, pst_graph_add(graph, &options, &tasks[index]), "pst_graph_add");
}

static pst_graph *make(const tasks_setting *setting, pst_graph_kind kind, pst_task *tasks) {
    pst_graph *graph = NULL;
    check(setting, pst_graph_create(setting->gpu.runtime, kind, "bench", &graph),
          "pst_graph_create");
    for (size_t i = 0; i < setting->pattern->count; i++)
        add(setting, graph, tasks, i);
    return graph;
}

static void run_sealed(const tasks_setting *setting, pst_graph *graph) {
    pst_launch launch;
    check(setting, pst_graph_launch(graph, &launch), "pst_graph_launch");
    check(setting, pst_launch_wait(launch), "pst_launch_wait");
}

static void destroy(const tasks_setting *setting, pst_graph *graph) {
    check(setting, pst_graph_destroy(graph), "pst_graph_destroy");
}

void penstock_prepare(tasks_setting *setting) {
    static pst_task tasks[PATTERN_MOST_TASKS];
    setting->graph = make(setting, PST_GRAPH_SEALED, tasks);
    check(setting, pst_graph_seal(setting->graph), "pst_graph_seal");
}

void penstock_release(tasks_setting *setting) {
    destroy(setting, setting->graph);
    setting->graph = NULL;
}

void penstock_replay(const tasks_setting *setting) {
    run_sealed(setting, setting->graph);
}

void penstock_build(const tasks_setting *setting) {
    static pst_task tasks[PATTERN_MOST_TASKS];
    pst_graph *graph = make(setting, PST_GRAPH_SEALED, tasks);
    check(setting, pst_graph_seal(graph), "pst_graph_seal");
    run_sealed(setting, graph);
    destroy(setting, graph);
}

void penstock_grow(const tasks_setting *setting) {
    static pst_task tasks[PATTERN_MOST_TASKS];
    pst_graph *graph = make(setting, PST_GRAPH_GROWING, tasks);
    check(setting, pst_launch_wait((pst_launch){graph, 0}), "pst_launch_wait");
    for (size_t i = 0; i < setting->pattern->count; i++)
        pst_task_release(tasks[i]);
    destroy(setting, graph);
}
