#include "report.h"

#include <stdio.h>
#include <stdlib.h>

static const char *const mode_names[BENCH_MODE_COUNT] = {"replay", "build and run"};

bench_sample *bench_result(const bench_results *results, size_t system, bench_shape shape,
                           size_t threads, size_t round) {
    size_t row = (system * BENCH_SHAPE_COUNT + (size_t)shape) * BENCH_THREAD_COUNTS + threads - 1;
    return &results->samples[row * results->rounds + round];
}

static double per_task(const bench_results *results, size_t system, bench_shape shape,
                       size_t threads, size_t round, bench_mode mode) {
    return bench_result(results, system, shape, threads, round)->nanoseconds[mode] /
           (double)results->tasks;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median(const bench_results *results, size_t system, bench_shape shape, size_t threads,
                     bench_mode mode) {
    double *values = calloc(results->rounds, sizeof(*values));
    if (values == NULL) return 0;
    for (size_t round = 0; round < results->rounds; round++)
        values[round] = per_task(results, system, shape, threads, round, mode);
    qsort(values, results->rounds, sizeof(*values), compare);
    double middle = values[results->rounds / 2];
    free(values);
    return middle;
}

static int has_mode(const bench_results *results, size_t system, bench_mode mode) {
    return bench_result(results, system, BENCH_CHAIN, 1, 0)->nanoseconds[mode] > 0;
}

static void print_row(const bench_results *results, size_t system, bench_mode mode) {
    printf("  %-20s", results->systems[system]->name);
    for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
        for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
            printf("%15.0f", median(results, system, (bench_shape)shape, threads, mode));
    printf("\n");
}

static void print_heading(const bench_results *results) {
    printf("ns a task, median of %zu, %zu tasks\n%-22s", results->rounds, results->tasks, "");
    for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
        for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
            printf("%13s/%zu", bench_shape_name((bench_shape)shape), threads);
    printf("   (/threads)\n");
}

void bench_print_table(const bench_results *results) {
    print_heading(results);
    for (int mode = 0; mode < BENCH_MODE_COUNT; mode++) {
        printf("%s\n", mode_names[mode]);
        for (size_t system = 0; system < results->system_count; system++)
            if (has_mode(results, system, (bench_mode)mode))
                print_row(results, system, (bench_mode)mode);
    }
}

static void print_raw_line(const bench_results *results, size_t system, bench_shape shape,
                           size_t threads, bench_mode mode) {
    printf("%s, %s, %s, %zu:", results->systems[system]->name, mode_names[mode],
           bench_shape_name(shape), threads);
    for (size_t round = 0; round < results->rounds; round++)
        printf(" %.1f", per_task(results, system, shape, threads, round, mode));
    printf("\n");
}

void bench_print_raw(const bench_results *results) {
    printf("\nevery round, ns a task (system, mode, shape, threads)\n");
    for (size_t system = 0; system < results->system_count; system++)
        for (int mode = 0; mode < BENCH_MODE_COUNT; mode++)
            for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
                for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
                    if (has_mode(results, system, (bench_mode)mode))
                        print_raw_line(results, system, (bench_shape)shape, threads,
                                       (bench_mode)mode);
}
