/* bench_events: what tracing costs: an event as a task sees it, the bare record, a caller's marks
 * and counters; all of it when nothing is recorded, when the flight record runs, which it always
 * does unless a runtime is made without it, and when there is a trace. */
#include "figures.h"
#include "sched/runtime.h"
#include "shape.h"

#include <penstock/penstock.h>
#include <stdio.h>

enum { TASKS = 1000, CALLS = 20000, ROUNDS = 51 };

enum { NOTHING = 0, FLIGHT, TRACE, LEVELS };

/* The first one is made without a flight record. */
static struct bench {
    pst_runtime *runtime;
    pst_graph *graph;
    pst__track *track; /* for the bare record */
} benches[2], *bench = benches;

static pst_status run_body(void *argument, pst_stream *stream) {
    (void)argument;
    (void)stream;
    return PST_OK;
}

/* A chain on one lane, each task with a name, as tasks have that are looked at in a trace. */
static pst_status build(pst_lane *lane) {
    pst_status status = pst_graph_create(bench->runtime, PST_GRAPH_SEALED, "bench", &bench->graph);
    pst_task before, task;
    for (int i = 0; status == PST_OK && i < TASKS; i++) {
        pst_task_options options = {.size = sizeof(options),
                                    .name = "task",
                                    .lane = lane,
                                    .work = {.start = run_body},
                                    .after = &before,
                                    .after_count = i > 0};
        status = pst_graph_add(bench->graph, &options, &task);
        before = task;
    }
    return status == PST_OK ? pst_graph_seal(bench->graph) : status;
}

static pst_status open_bench(size_t flight_records) {
    pst_lane *lane = NULL;
    pst_lane_options options = {.size = sizeof(options), .name = "lane", .mode = PST_LANE_PUMPED};
    const pst_runtime_options given = {.size = sizeof given, .flight_records = flight_records};
    pst_status status = pst_runtime_create(&given, &bench->runtime);
    if (status == PST_OK) status = pst_lane_create(bench->runtime, &options, &lane);
    if (status == PST_OK)
        status = pst__track_create(pst__runtime_trace(bench->runtime), PST__TRACK_WORKER, "bare",
                                   &bench->track);
    return status == PST_OK ? build(lane) : status;
}

/* ---- what is measured ------------------------------------------------------------------- */

static void replay(void) {
    pst_launch launch;
    if (pst_graph_launch(bench->graph, &launch) == PST_OK) (void)pst_launch_wait(launch);
}

static void call_counter(void) {
    for (int i = 0; i < CALLS; i++)
        pst_trace_counter(bench->runtime, "counter", i);
}

static void call_marks(void) {
    for (int i = 0; i < CALLS; i++) {
        pst_trace_begin(bench->runtime, "mark");
        pst_trace_end(bench->runtime);
    }
}

static void call_record(void) {
    for (uint64_t i = 0; i < CALLS; i++)
        pst__trace_slice(bench->track, "bare", i, i + 1, 0, 0);
}

static void call_clock(void) {
    for (int i = 0; i < CALLS; i++)
        (void)bench_now();
}

static double time_of(void (*call)(void), double per) {
    double begin = bench_now();
    call();
    return (bench_now() - begin) / per;
}

/* Records of a trace that one replay leaves. */
static double records_of_replay(void) {
    pst_trace_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    pst_trace_get_stats(bench->runtime, &before);
    replay();
    pst_trace_get_stats(bench->runtime, &after);
    return (double)(after.records - before.records);
}

enum { TASK = 0, COUNTER, MARKS, RECORD, CLOCK, WHATS };

static double taken[LEVELS][WHATS][ROUNDS];

static void take_round(int level, int round) {
    bench = &benches[level == NOTHING ? 0 : 1];
    replay(); /* warms up */
    taken[level][TASK][round] = time_of(replay, TASKS);
    taken[level][COUNTER][round] = time_of(call_counter, CALLS);
    taken[level][MARKS][round] = time_of(call_marks, CALLS);
    taken[level][CLOCK][round] = time_of(call_clock, CALLS);
    taken[level][RECORD][round] = level == NOTHING ? 0 : time_of(call_record, CALLS);
}

static pst_status take_all(double *records) {
    for (int round = 0; round < ROUNDS; round++) {
        take_round(NOTHING, round);
        take_round(FLIGHT, round);
        pst_status status = pst_trace_start(bench->runtime);
        if (status != PST_OK) return status;
        *records = records_of_replay() / TASKS;
        take_round(TRACE, round);
        status = pst_trace_stop(bench->runtime);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static void print_line(const char *name, double medians[LEVELS][WHATS], int what) {
    printf("%-44s%10.1f%10.1f%10.1f\n", name, medians[NOTHING][what], medians[FLIGHT][what],
           medians[TRACE][what]);
}

static void print_all(double records) {
    double medians[LEVELS][WHATS], task[LEVELS];
    for (int level = 0; level < LEVELS; level++) {
        for (int what = 0; what < WHATS; what++)
            medians[level][what] = bench_median(taken[level][what], ROUNDS);
        task[level] = medians[level][TASK];
    }
    printf("%-44s%10s%10s%10s\n", "ns, median of alternating rounds", "nothing", "flight", "trace");
    print_line("a task's replay", medians, TASK);
    printf("%-44s%10s%10.1f%10.1f\n", "an event of a task", "", task[FLIGHT] - task[NOTHING],
           (task[TRACE] - task[NOTHING]) / records);
    print_line("pst_trace_counter", medians, COUNTER);
    print_line("pst_trace_begin and pst_trace_end, one event", medians, MARKS);
    print_line("the bare record", medians, RECORD);
    print_line("the clock, once", medians, CLOCK);
    printf("a task has %.2f events in a trace, and one in the flight record\n", records);
}

int main(void) {
    double records = 0;
    pst_status status = open_bench(PST_NO_FLIGHT_RECORD);
    bench++;
    if (status == PST_OK) status = open_bench(0);
    if (status == PST_OK) status = take_all(&records);
    if (status == PST_OK)
        print_all(records);
    else
        fprintf(stderr, "penstock: %s\n", pst_status_text(status));
    for (int i = 0; i < 2; i++)
        pst_runtime_destroy(benches[i].runtime);
    return status != PST_OK;
}
