/* One measured function a case: callgrind counts what runs inside `measured`. Prints the number of
 * tasks or events that the count is to be divided by. */
#include <penstock/penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 8, STEPS = 250, TASKS = WIDTH * STEPS };

static struct {
    pst_runtime *runtime;
    pst_lane *lane;
    pst_graph *graph;
    int failed;
} bench;

static pst_status run_body(void *argument, pst_stream *stream) {
    (void)argument;
    (void)stream;
    return PST_OK;
}

static void check(pst_status status) {
    bench.failed |= status != PST_OK;
}

static void open_all(pst_graph_kind kind) {
    const pst_lane_options options = {
        .size = sizeof options, .name = "lane", .mode = PST_LANE_PUMPED};
    check(pst_runtime_create(NULL, &bench.runtime));
    check(pst_lane_create(bench.runtime, &options, &bench.lane));
    check(pst_graph_create(bench.runtime, kind, "bench", &bench.graph));
}

/* A stencil: each task follows its left neighbour and its own place of the step before. */
static void add_step(pst_task *row, int step) {
    pst_task before[WIDTH];
    memcpy(before, row, sizeof before);
    for (int i = 0; i < WIDTH; i++) {
        const pst_task after[] = {before[i], before[(i + WIDTH - 1) % WIDTH]};
        const pst_task_options options = {.size = sizeof options,
                                          .lane = bench.lane,
                                          .work = {run_body, NULL, NULL},
                                          .after = after,
                                          .after_count = step == 0 ? 0 : 2};
        check(pst_graph_add(bench.graph, &options, &row[i]));
    }
    for (int i = 0; i < WIDTH; i++)
        pst_task_release(before[i]);
}

static void build(void) {
    pst_task row[WIDTH] = {{NULL, 0}};
    for (int step = 0; step < STEPS; step++)
        add_step(row, step);
    check(pst_graph_seal(bench.graph));
}

static void replay(void) {
    pst_launch launch;
    check(pst_graph_launch(bench.graph, &launch));
    check(pst_launch_wait(launch));
}

static void grow(void) {
    pst_task row[WIDTH] = {{NULL, 0}};
    for (int step = 0; step < STEPS; step++) {
        add_step(row, step);
        check(pst_run_once(bench.runtime, NULL));
    }
    for (int i = 0; i < WIDTH; i++)
        pst_task_release(row[i]);
    check(pst_launch_wait((pst_launch){bench.graph, 0}));
}

static void (*chosen)(void);

/* The name by which callgrind is told when to count. */
__attribute__((noinline)) void measured(void);
void measured(void) {
    chosen();
    __asm__ volatile("");
}

static void measure_build(void) {
    open_all(PST_GRAPH_SEALED);
    chosen = build;
    measured();
}

static void measure_replay(void) {
    open_all(PST_GRAPH_SEALED);
    build();
    replay(); /* the first one touches everything */
    chosen = replay;
    measured();
}

static void measure_growing(void) {
    open_all(PST_GRAPH_GROWING);
    chosen = grow;
    measured();
}

/* What tracing adds to a replay. */
static void measure_traced_replay(void) {
    open_all(PST_GRAPH_SEALED);
    build();
    check(pst_trace_start(bench.runtime));
    replay();
    chosen = replay;
    measured();
}

static const struct {
    const char *name;
    void (*measure)(void);
} cases[] = {{"build", measure_build},
             {"replay", measure_replay},
             {"growing", measure_growing},
             {"traced_replay", measure_traced_replay}};

int main(int count, char **arguments) {
    for (size_t i = 0; count == 2 && i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(arguments[1], cases[i].name) != 0) continue;
        cases[i].measure();
        pst_runtime_destroy(bench.runtime);
        printf("%d\n", TASKS);
        return bench.failed;
    }
    fprintf(stderr, "usage: %s build|replay|growing|traced_replay\n", arguments[0]);
    return 2;
}
