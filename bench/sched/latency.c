/* bench_latency [--raw]: from the opening of a gate to the first instruction of the task behind it,
 * when that task's worker sleeps and when it spins, beside what the machine itself takes: a futex
 * and a spinning thread. */
#include "figures.h"
#include "shape.h"

#include <linux/futex.h>
#include <penstock/penstock.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BLOCKS = 20, BLOCK_SAMPLES = 100, SAMPLES = BLOCKS * BLOCK_SAMPLES };
enum { PAUSE_NS = 200000, FOR_EVER = 1000000000 };

/* The other thread's answer. */
static struct {
    _Alignas(64) atomic_int arrived; /* samples it has answered */
    double at;
} answer;

static void arrive(void) {
    answer.at = bench_now();
    atomic_fetch_add_explicit(&answer.arrived, 1, memory_order_release);
}

static double await(int sample, double begin) {
    while (atomic_load_explicit(&answer.arrived, memory_order_acquire) <= sample) {
    }
    return answer.at - begin;
}

/* Long enough for the other thread to fall asleep where it is meant to. */
static void pause_between(void) {
    nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
}

/* ---- Penstock --------------------------------------------------------------------------- */

static pst_status start(void *argument, pst_stream *stream) {
    (void)argument;
    (void)stream;
    arrive();
    return PST_OK;
}

static pst_status build(pst_runtime *runtime, pst_graph **graph, pst_task *gate) {
    pst_lane *lane = NULL;
    pst_lane_options lane_options = {.size = sizeof(lane_options), .name = "lane"};
    pst_status status = pst_lane_create(runtime, &lane_options, &lane);
    if (status == PST_OK) status = pst_graph_create(runtime, PST_GRAPH_SEALED, "bench", graph);
    if (status == PST_OK) status = pst_graph_add_gate(*graph, "gate", gate);
    pst_task_options options = {.size = sizeof(options),
                                .lane = lane,
                                .work = {.start = start},
                                .after = gate,
                                .after_count = 1};
    if (status == PST_OK) status = pst_graph_add(*graph, &options, NULL);
    return status == PST_OK ? pst_graph_seal(*graph) : status;
}

static pst_status open_gates(pst_graph *graph, pst_task gate, double *samples) {
    pst_status status = PST_OK;
    for (int i = 0; status == PST_OK && i < BLOCK_SAMPLES; i++) {
        pst_launch launch;
        status = pst_graph_launch(graph, &launch);
        if (status != PST_OK) break;
        pause_between();
        double begin = bench_now();
        status = pst_gate_open(launch, gate, NULL);
        if (status != PST_OK) break;
        samples[i] = await(i, begin);
        status = pst_launch_wait(launch);
    }
    return status;
}

static int measure_gate(uint32_t spin, double *samples) {
    pst_runtime *runtime = NULL;
    pst_graph *graph = NULL;
    pst_task gate;
    pst_runtime_options options = {.size = sizeof(options), .spin = spin};
    pst_status status = pst_runtime_create(&options, &runtime);
    if (status == PST_OK) status = build(runtime, &graph, &gate);
    if (status == PST_OK) status = open_gates(graph, gate, samples);
    if (status != PST_OK) fprintf(stderr, "penstock: %s\n", pst_status_text(status));
    pst_runtime_destroy(runtime);
    return status == PST_OK ? 0 : -1;
}

static int measure_gate_parked(double *samples) {
    return measure_gate(1, samples);
}

static int measure_gate_spinning(double *samples) {
    return measure_gate(FOR_EVER, samples);
}

/* ---- the machine ------------------------------------------------------------------------ */

static _Alignas(64) atomic_int opened;

static void *sleep_and_answer(void *argument) {
    (void)argument;
    for (int i = 0; i < BLOCK_SAMPLES; i++) {
        while (atomic_load_explicit(&opened, memory_order_acquire) == i)
            syscall(SYS_futex, &opened, FUTEX_WAIT_PRIVATE, i, NULL, NULL, 0);
        arrive();
    }
    return NULL;
}

static void *spin_and_answer(void *argument) {
    (void)argument;
    for (int i = 0; i < BLOCK_SAMPLES; i++) {
        while (atomic_load_explicit(&opened, memory_order_acquire) == i) {
        }
        arrive();
    }
    return NULL;
}

static int measure_thread(void *(*run)(void *), int wakes, double *samples) {
    pthread_t thread;
    atomic_store(&opened, 0);
    if (pthread_create(&thread, NULL, run, NULL) != 0) return -1;
    for (int i = 0; i < BLOCK_SAMPLES; i++) {
        pause_between();
        double begin = bench_now();
        atomic_store_explicit(&opened, i + 1, memory_order_release);
        if (wakes) syscall(SYS_futex, &opened, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
        samples[i] = await(i, begin);
    }
    pthread_join(thread, NULL);
    return 0;
}

static int measure_futex(double *samples) {
    return measure_thread(sleep_and_answer, 1, samples);
}

static int measure_spinning(double *samples) {
    return measure_thread(spin_and_answer, 0, samples);
}

/* ---- all -------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int (*measure)(double *samples);
} cases[] = {{"gate, worker parked", measure_gate_parked},
             {"bare futex", measure_futex},
             {"gate, worker spinning", measure_gate_spinning},
             {"bare spinning thread", measure_spinning}};
enum { CASES = sizeof(cases) / sizeof(cases[0]) };

static double taken[CASES][SAMPLES];

static void print_raw(void) {
    for (int c = 0; c < CASES; c++) {
        printf("\n%s, sorted, ns:", cases[c].name);
        for (int i = 0; i < SAMPLES; i++)
            printf(" %.0f", taken[c][i]);
    }
    printf("\n");
}

int main(int count, char **arguments) {
    if (count > 2 || (count == 2 && strcmp(arguments[1], "--raw") != 0)) {
        fprintf(stderr, "usage: bench_latency [--raw]\n");
        return 2;
    }
    for (int block = 0; block < BLOCKS; block++)
        for (int c = 0; c < CASES; c++) {
            atomic_store(&answer.arrived, 0);
            if (cases[c].measure(&taken[c][block * BLOCK_SAMPLES]) != 0) return 1;
        }
    printf("ns from the opening to the other thread's first instruction, %d samples\n", SAMPLES);
    printf("%-24s%10s%10s%10s%10s\n", "", "least", "median", "p99", "greatest");
    for (int c = 0; c < CASES; c++) {
        bench_sort(taken[c], SAMPLES);
        printf("%-24s%10.0f%10.0f%10.0f%10.0f\n", cases[c].name, taken[c][0],
               bench_quantile(taken[c], SAMPLES, 0.5), bench_quantile(taken[c], SAMPLES, 0.99),
               taken[c][SAMPLES - 1]);
    }
    if (count == 2) print_raw();
    return 0;
}
