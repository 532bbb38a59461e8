/* bench_gpu_tasks [--rounds N] [--peer FOLDER]: what a task on a GPU costs, beside a bare loop of
 * the same launches and, with --peer, beside CUDASTF's task_bench, over streams and over graphs.
 * All run on one thread, from the first launch until the device is done, and take turns. */
#include "tasks.h"
#include "driver.h"
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 1000, PEER_ROUNDS = 3 };

typedef struct way {
    const char *name;
    void (*run)(const tasks_setting *setting);
} way;

static const way ways[] = {
    {"bare loop", bare_run},    {"replay", penstock_replay}, {"build, run", penstock_build},
    {"growing", penstock_grow}, {"captured", captured_run},
};
enum { WAYS = sizeof ways / sizeof ways[0] };

typedef struct peer {
    const char *name, *program, *program_with_kernel;
} peer;

static const peer peers[] = {
    {"stf stream", "task_bench", "task_bench_kernel"},
    {"stf graph", "task_bench_graph", "task_bench_graph_kernel"},
};
enum { PEERS = sizeof peers / sizeof peers[0] };

/* ---- the setting ------------------------------------------------------------------------ */

static const char empty_kernel[] = ".version 7.0\n.target sm_75\n.address_size 64\n"
                                   ".visible .entry empty() { ret; }\n";

/* In the primary context, which the device has opened. */
static CUfunction load_kernel(void) {
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    driver_check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    driver_check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    driver_check(cuModuleLoadData(&module, empty_kernel), "cuModuleLoadData");
    driver_check(cuModuleGetFunction(&kernel, module, "empty"), "cuModuleGetFunction");
    return kernel;
}

static void open_lanes(tasks_setting *setting) {
    for (size_t i = 0; i < setting->lane_count; i++) {
        const pst_lane_options options = {.size = sizeof options,
                                          .name = "column",
                                          .device = setting->gpu.device,
                                          .mode = PST_LANE_PUMPED};
        bench_check(&setting->gpu,
                    pst_lane_create(setting->gpu.runtime, &options, &setting->lanes[i]),
                    "pst_lane_create");
    }
}

/* ---- measuring -------------------------------------------------------------------------- */

static double measure(const tasks_setting *setting, const way *way) {
    const double begin = bench_now();
    way->run(setting);
    return (bench_now() - begin) / (double)setting->pattern->count * 1e6;
}

static double measure_peer(const char *folder, const char *program, pattern_kind kind) {
    double times[PEER_ROUNDS];
    for (size_t i = 0; i < PEER_ROUNDS; i++)
        times[i] = peer_measure(folder, program, kind);
    return bench_quantile(times, PEER_ROUNDS, 0.5);
}

/* The first round warms up and is not counted. */
static void take_rounds(const tasks_setting *setting, double times[WAYS][MOST_ROUNDS],
                        size_t rounds) {
    for (size_t way = 0; way < WAYS; way++)
        (void)measure(setting, &ways[way]);
    for (size_t round = 0; round < rounds; round++)
        for (size_t way = 0; way < WAYS; way++)
            times[way][round] = measure(setting, &ways[way]);
}

static void print_row(const tasks_setting *setting, double times[WAYS][MOST_ROUNDS], size_t rounds,
                      const char *folder, pattern_kind kind) {
    printf("%-8s %-6s %5zu %5zu %5.2f", setting->pattern->name,
           setting->kernel != NULL ? "kernel" : "empty", setting->lane_count,
           setting->pattern->count,
           (double)setting->pattern->edges / (double)setting->pattern->count);
    const double bare = bench_quantile(times[0], rounds, 0.5);
    for (size_t way = 0; way < WAYS; way++)
        printf(" %10.2f", bench_quantile(times[way], rounds, 0.5));
    for (size_t i = 0; folder != NULL && i < PEERS; i++)
        printf(" %10.2f", measure_peer(folder,
                                       setting->kernel != NULL ? peers[i].program_with_kernel
                                                               : peers[i].program,
                                       kind));
    printf("   above the bare loop:");
    for (size_t way = 1; way < WAYS; way++)
        printf(" %5.2f", bench_quantile(times[way], rounds, 0.5) - bare);
    printf("\n");
    fflush(stdout);
}

static void run_case(tasks_setting *setting, pattern_kind kind, size_t rounds, const char *folder) {
    static double times[WAYS][MOST_ROUNDS];
    const int compare = folder != NULL && setting->lane_count == TASKS_MOST_LANES;
    bare_prepare(setting);
    penstock_prepare(setting);
    captured_prepare(setting);
    take_rounds(setting, times, rounds);
    print_row(setting, times, rounds, compare ? folder : NULL, kind);
    captured_release();
    penstock_release(setting);
    bare_release(setting);
}

static void run_lanes(tasks_setting *setting, CUfunction kernel, size_t lanes, size_t rounds,
                      const char *folder) {
    static pattern pattern;
    setting->lane_count = lanes;
    setting->pattern = &pattern;
    for (int with_kernel = 0; with_kernel < 2; with_kernel++)
        for (int kind = 0; kind < PATTERNS; kind++) {
            pattern_make(&pattern, (pattern_kind)kind);
            setting->kernel = with_kernel ? kernel : NULL;
            run_case(setting, (pattern_kind)kind, rounds, folder);
        }
}

/* ---- the program ------------------------------------------------------------------------ */

static void print_head(size_t rounds, const char *folder) {
    printf("us a task: medians of %zu%s\n", rounds,
           folder != NULL ? ", of CUDASTF of 3 processes' means" : "");
    printf("%-8s %-6s %5s %5s %5s", "pattern", "body", "lanes", "tasks", "edges");
    for (size_t way = 0; way < WAYS; way++)
        printf(" %10s", ways[way].name);
    for (size_t i = 0; folder != NULL && i < PEERS; i++)
        printf(" %10s", peers[i].name);
    printf("\n");
}

static int usage(void) {
    fprintf(stderr, "usage: bench_gpu_tasks [--rounds N (1 to %d)] [--peer FOLDER]\n", MOST_ROUNDS);
    return 2;
}

int main(int count, char **arguments) {
    size_t rounds = 21;
    const char *folder = NULL;
    for (int i = 1; i + 1 < count; i += 2) {
        if (strcmp(arguments[i], "--rounds") == 0)
            rounds = strtoul(arguments[i + 1], NULL, 10);
        else if (strcmp(arguments[i], "--peer") == 0)
            folder = arguments[i + 1];
        else
            return usage();
    }
    if (count % 2 == 0 || rounds < 1 || rounds > MOST_ROUNDS) return usage();
    tasks_setting setting = {.lane_count = TASKS_MOST_LANES};
    bench_gpu_open(&setting.gpu);
    open_lanes(&setting);
    CUfunction kernel = load_kernel();
    print_head(rounds, folder);
    run_lanes(&setting, kernel, TASKS_MOST_LANES, rounds, folder);
    run_lanes(&setting, kernel, 1, rounds, NULL);
    bench_gpu_close(&setting.gpu);
    return 0;
}
