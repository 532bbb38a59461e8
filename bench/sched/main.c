/* bench_sched [--tasks N] [--rounds N] [--raw]: what a task costs, beside oneTBB and OpenMP. */
#include "report.h"
#include "sample.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const bench_system *const systems[] = {&bench_penstock, &bench_penstock_growing,
                                              &bench_onetbb, &bench_openmp};
enum { SYSTEM_COUNT = sizeof(systems) / sizeof(systems[0]) };

static int usage(void) {
    fprintf(stderr, "usage: bench_sched [--tasks N] [--rounds N (9 or more)] [--raw]\n");
    return 2;
}

static int parse(int count, char **arguments, bench_results *results, int *raw) {
    for (int i = 1; i < count; i++) {
        const char *value = i + 1 < count ? arguments[i + 1] : "";
        if (strcmp(arguments[i], "--raw") == 0) {
            *raw = 1;
        } else if (strcmp(arguments[i], "--tasks") == 0) {
            results->tasks = strtoul(value, NULL, 10);
            i++;
        } else if (strcmp(arguments[i], "--rounds") == 0) {
            results->rounds = strtoul(value, NULL, 10);
            i++;
        } else {
            return -1;
        }
    }
    return results->tasks >= 1 && results->rounds >= 9 ? 0 : -1;
}

/* One measurement of every case; the systems take turns within each shape. */
static int take_round(const bench_results *results, size_t round) {
    for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
        for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
            for (size_t system = 0; system < SYSTEM_COUNT; system++) {
                bench_case what = {systems[system], (bench_shape)shape, threads, results->tasks};
                bench_sample *sample =
                    bench_result(results, system, (bench_shape)shape, threads, round);
                if (bench_sample_take(&what, sample) != 0) return -1;
            }
    return 0;
}

static int take_all(const bench_results *results) {
    int show = isatty(STDERR_FILENO);
    for (size_t round = 0; round < results->rounds; round++) {
        if (show) fprintf(stderr, "\rround %zu of %zu", round + 1, results->rounds);
        if (take_round(results, round) != 0) return -1;
    }
    if (show) fprintf(stderr, "\r%40s\r", "");
    return 0;
}

int main(int count, char **arguments) {
    bench_results results = {
        .systems = systems, .system_count = SYSTEM_COUNT, .tasks = 100000, .rounds = 11};
    int raw = 0;
    if (parse(count, arguments, &results, &raw) != 0) return usage();
    size_t cases = (size_t)SYSTEM_COUNT * BENCH_SHAPE_COUNT * BENCH_THREAD_COUNTS;
    results.samples = calloc(cases * results.rounds, sizeof(*results.samples));
    if (results.samples == NULL) return 1;
    int failed = take_all(&results) != 0;
    if (!failed) bench_print_table(&results);
    if (!failed) bench_print_distances(&results);
    if (!failed && raw) bench_print_raw(&results);
    free(results.samples);
    return failed;
}
