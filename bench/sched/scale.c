/* bench_scale: what a task costs in graphs of 10^2 to 10^6 tasks with three predecessors each, and
 * how much memory a sealed graph takes. */
#include "figures.h"
#include "shape.h"

#include <penstock/penstock.h>
#include <stdio.h>
#include <stdlib.h>

enum { COLUMNS = 8, LANES = 2, MEMORY_TASKS = 100000 };
enum { LEAST_TASKS = 100, MOST_TASKS = 1000000, REPEATS = 9 };

typedef struct setting {
    pst_runtime *runtime;
    pst_lane *lanes[LANES];
} setting;

static pst_status run_body(void *argument, pst_stream *stream) {
    (void)argument;
    (void)stream;
    return PST_OK;
}

static pst_status open_setting(const pst_allocator *allocator, setting *setting) {
    pst_runtime_options options = {.size = sizeof(options), .allocator = *allocator};
    pst_status status = pst_runtime_create(&options, &setting->runtime);
    for (int i = 0; status == PST_OK && i < LANES; i++) {
        pst_lane_options lane = {
            .size = sizeof(lane), .name = i == 0 ? "a" : "b", .mode = PST_LANE_PUMPED};
        status = pst_lane_create(setting->runtime, &lane, &setting->lanes[i]);
    }
    return status;
}

/* ---- shapes ----------------------------------------------------------------------------- */

/* Three a task but for the first row: the row above, its ends joined. */
static size_t three_predecessors(size_t i, size_t *before) {
    if (i < COLUMNS) return 0;
    size_t above = i - i % COLUMNS - COLUMNS;
    for (size_t k = 0; k < 3; k++)
        before[k] = above + (i + k + COLUMNS - 1) % COLUMNS;
    return 3;
}

static size_t chain(size_t i, size_t *before) {
    return bench_predecessors(BENCH_CHAIN, i, before);
}

static size_t independent(size_t i, size_t *before) {
    return bench_predecessors(BENCH_INDEPENDENT, i, before);
}

typedef struct kind {
    const char *text;
    size_t (*predecessors)(size_t i, size_t *before);
    size_t lanes;
    const char *name; /* of its tasks */
} kind;

static pst_status add_all(const setting *setting, const kind *kind, pst_graph *graph,
                          size_t tasks) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < tasks; i++) {
        size_t before[BENCH_MAX_PREDECESSORS];
        size_t count = kind->predecessors(i, before);
        pst_task after[BENCH_MAX_PREDECESSORS];
        for (size_t k = 0; k < count; k++)
            after[k] = (pst_task){graph, before[k]};
        pst_task_options options = {.size = sizeof(options),
                                    .name = kind->name,
                                    .lane = setting->lanes[i * kind->lanes / COLUMNS % kind->lanes],
                                    .work = {.start = run_body},
                                    .after = after,
                                    .after_count = count};
        status = pst_graph_add(graph, &options, NULL);
    }
    return status;
}

/* ---- time ------------------------------------------------------------------------------- */

enum { BUILD = 0, SEAL, FIRST_RUN, REPLAY, STEPS };

static pst_status run(pst_graph *graph) {
    pst_launch launch;
    pst_status status = pst_graph_launch(graph, &launch);
    return status == PST_OK ? pst_launch_wait(launch) : status;
}

/* Nanoseconds of each step, added to what is there. */
static pst_status time_graph(const setting *setting, size_t tasks, double *steps) {
    static const kind kind = {"", three_predecessors, 1, NULL};
    pst_graph *graph = NULL;
    double begin = bench_now(), end;
    pst_status status = pst_graph_create(setting->runtime, PST_GRAPH_SEALED, "bench", &graph);
    if (status == PST_OK) status = add_all(setting, &kind, graph, tasks);
    for (int step = BUILD; step < STEPS; step++) {
        if (step == SEAL && status == PST_OK) status = pst_graph_seal(graph);
        if (step > SEAL && status == PST_OK) status = run(graph);
        end = bench_now();
        steps[step] += end - begin;
        begin = end;
    }
    pst_graph_destroy(graph);
    return status;
}

/* Small graphs are taken by the hundreds, so that each sample lasts long enough for the clock. */
static pst_status take_sample(const setting *setting, size_t tasks, double *steps) {
    size_t graphs = tasks < MOST_TASKS / 10 ? MOST_TASKS / 10 / tasks : 1;
    for (int step = 0; step < STEPS; step++)
        steps[step] = 0;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < graphs; i++)
        status = time_graph(setting, tasks, steps);
    for (int step = 0; step < STEPS; step++)
        steps[step] /= (double)(graphs * tasks);
    return status;
}

static pst_status print_times(size_t tasks) {
    setting setting = {NULL, {NULL, NULL}};
    double taken[STEPS][REPEATS], steps[STEPS];
    pst_status status = open_setting(&(pst_allocator){NULL, NULL, NULL}, &setting);
    if (status == PST_OK) status = take_sample(&setting, tasks, steps); /* warms up */
    for (int repeat = 0; status == PST_OK && repeat < REPEATS; repeat++) {
        status = take_sample(&setting, tasks, steps);
        for (int step = 0; step < STEPS; step++)
            taken[step][repeat] = steps[step];
    }
    pst_runtime_destroy(setting.runtime);
    if (status != PST_OK) return status;
    printf("%-12zu", tasks);
    for (int step = 0; step < STEPS; step++)
        printf("%12.1f", bench_median(taken[step], REPEATS));
    printf("%16.3f\n", taken[SEAL][REPEATS / 2] * (double)tasks / 1e6);
    return PST_OK;
}

/* ---- memory ----------------------------------------------------------------------------- */

static void *count_alloc(void *context, size_t bytes, size_t alignment) {
    void *memory = NULL;
    if (posix_memalign(&memory, alignment, bytes) != 0) return NULL;
    *(size_t *)context += bytes;
    return memory;
}

static void count_free(void *context, void *memory, size_t bytes, size_t alignment) {
    (void)alignment;
    *(size_t *)context -= bytes;
    free(memory);
}

static const kind kinds[] = {{"chain", chain, 1, NULL},
                             {"independent", independent, 1, NULL},
                             {"three predecessors", three_predecessors, 1, NULL},
                             {"the same over two lanes", three_predecessors, 2, NULL},
                             {"the same, named tasks", three_predecessors, 1, "task"}};

static size_t count_edges(const kind *kind) {
    size_t edges = 0, before[BENCH_MAX_PREDECESSORS];
    for (size_t i = 0; i < MEMORY_TASKS; i++)
        edges += kind->predecessors(i, before);
    return edges;
}

static pst_status print_memory(const kind *kind) {
    size_t live = 0;
    setting setting = {NULL, {NULL, NULL}};
    pst_graph *graph = NULL;
    pst_status status = open_setting(&(pst_allocator){count_alloc, count_free, &live}, &setting);
    size_t before = live;
    if (status == PST_OK)
        status = pst_graph_create(setting.runtime, PST_GRAPH_SEALED, "bench", &graph);
    if (status == PST_OK) status = add_all(&setting, kind, graph, MEMORY_TASKS);
    if (status == PST_OK) status = pst_graph_seal(graph);
    double bytes = (double)(live - before) / MEMORY_TASKS;
    double edges = (double)count_edges(kind) / MEMORY_TASKS;
    pst_runtime_destroy(setting.runtime);
    if (status == PST_OK)
        printf("%-26s%12.1f%12.2f%16.1f\n", kind->text, bytes, edges, 64 + 4 * edges);
    return status;
}

static int fail(pst_status status) {
    fprintf(stderr, "penstock: %s\n", pst_status_text(status));
    return 1;
}

int main(void) {
    printf("ns a task, three predecessors each, one thread, median of %d\n", REPEATS);
    printf("%-12s%12s%12s%12s%12s%16s\n", "tasks", "build", "seal", "first run", "replay",
           "seal, ms");
    for (size_t tasks = LEAST_TASKS; tasks <= MOST_TASKS; tasks *= 10) {
        pst_status status = print_times(tasks);
        if (status != PST_OK) return fail(status);
    }
    printf("\nmemory of a sealed graph of %d tasks\n", MEMORY_TASKS);
    printf("%-26s%12s%12s%16s\n", "", "bytes/task", "edges/task", "64 + 4 an edge");
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
        pst_status status = print_memory(&kinds[k]);
        if (status != PST_OK) return fail(status);
    }
    return 0;
}
