/* bench_events: what tracing costs: an event as a task sees it, the bare record, a caller's marks
 * and counters, and all of it when nothing is recorded. */
#include "figures.h"
#include "sched/runtime.h"
#include "shape.h"

#include <penstock/penstock.h>
#include <stdio.h>

enum { TASKS = 1000, CALLS = 20000, ROUNDS = 51 };

static struct {
    pst_runtime *runtime;
    pst_graph *graph;
    pst__track *track; /* for the bare record */
} bench;

static pst_status run_body(void *argument, pst_stream *stream) {
    (void)argument;
    (void)stream;
    return PST_OK;
}

/* A chain on one lane, each task with a name, as tasks have that are looked at in a trace. */
static pst_status build(pst_lane *lane) {
    pst_status status = pst_graph_create(bench.runtime, PST_GRAPH_SEALED, "bench", &bench.graph);
    pst_task before, task;
    for (int i = 0; status == PST_OK && i < TASKS; i++) {
        pst_task_options options = {.size = sizeof(options),
                                    .name = "task",
                                    .lane = lane,
                                    .work = {.start = run_body},
                                    .after = &before,
                                    .after_count = i > 0};
        status = pst_graph_add(bench.graph, &options, &task);
        before = task;
    }
    return status == PST_OK ? pst_graph_seal(bench.graph) : status;
}

static pst_status open_bench(void) {
    pst_lane *lane = NULL;
    pst_lane_options options = {.size = sizeof(options), .name = "lane", .mode = PST_LANE_PUMPED};
    pst_status status = pst_runtime_create(NULL, &bench.runtime);
    if (status == PST_OK) status = pst_lane_create(bench.runtime, &options, &lane);
    if (status == PST_OK)
        status = pst__track_create(pst__runtime_trace(bench.runtime), PST__TRACK_WORKER, "bare",
                                   &bench.track);
    return status == PST_OK ? build(lane) : status;
}

/* ---- what is measured ------------------------------------------------------------------- */

static void replay(void) {
    pst_launch launch;
    if (pst_graph_launch(bench.graph, &launch) == PST_OK) (void)pst_launch_wait(launch);
}

static void call_counter(void) {
    for (int i = 0; i < CALLS; i++)
        pst_trace_counter(bench.runtime, "counter", i);
}

static void call_marks(void) {
    for (int i = 0; i < CALLS; i++) {
        pst_trace_begin(bench.runtime, "mark");
        pst_trace_end(bench.runtime);
    }
}

static void call_record(void) {
    for (uint64_t i = 0; i < CALLS; i++)
        pst__trace_slice(bench.track, "bare", i, i + 1, 0, 0);
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

/* Records that one replay leaves. */
static double records_of_replay(void) {
    pst_trace_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    pst_trace_get_stats(bench.runtime, &before);
    replay();
    pst_trace_get_stats(bench.runtime, &after);
    return (double)(after.records - before.records);
}

enum { TASK = 0, COUNTER, MARKS, RECORD, CLOCK, WHATS };

static double taken[2][WHATS][ROUNDS]; /* without and with a trace that records */

static void take_round(int on, int round) {
    taken[on][TASK][round] = time_of(replay, TASKS);
    taken[on][COUNTER][round] = time_of(call_counter, CALLS);
    taken[on][MARKS][round] = time_of(call_marks, CALLS);
    taken[on][CLOCK][round] = time_of(call_clock, CALLS);
    if (on) taken[on][RECORD][round] = time_of(call_record, CALLS);
}

static pst_status take_all(double *records) {
    replay();
    for (int round = 0; round < ROUNDS; round++) {
        take_round(0, round);
        pst_status status = pst_trace_start(bench.runtime);
        if (status != PST_OK) return status;
        *records = records_of_replay() / TASKS; /* warms up, too */
        take_round(1, round);
        status = pst_trace_stop(bench.runtime);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static void print_all(double records) {
    double off[WHATS], on[WHATS];
    for (int what = 0; what < WHATS; what++) {
        off[what] = bench_median(taken[0][what], ROUNDS);
        on[what] = bench_median(taken[1][what], ROUNDS);
    }
    printf("%-44s%10s%10s\n", "ns, median of alternating rounds", "off", "on");
    printf("%-44s%10.1f%10.1f\n", "a task's replay", off[TASK], on[TASK]);
    printf("%-44s%10s%10.1f\n", "an event of a task", "", (on[TASK] - off[TASK]) / records);
    printf("%-44s%10.1f%10.1f\n", "pst_trace_counter", off[COUNTER], on[COUNTER]);
    printf("%-44s%10.1f%10.1f\n", "pst_trace_begin and pst_trace_end, one event", off[MARKS],
           on[MARKS]);
    printf("%-44s%10s%10.1f\n", "the bare record", "", on[RECORD]);
    printf("%-44s%10.1f\n", "the clock, once", off[CLOCK]);
    printf("a task has %.2f events\n", records);
}

int main(void) {
    double records = 0;
    pst_status status = open_bench();
    if (status == PST_OK) status = take_all(&records);
    if (status == PST_OK)
        print_all(records);
    else
        fprintf(stderr, "penstock: %s\n", pst_status_text(status));
    pst_runtime_destroy(bench.runtime);
    return status != PST_OK;
}
