#include "report.h"

#include "figures.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const mode_names[BENCH_MODE_COUNT] = {"replay", "build and run"};

/* Which samples count: those during which a line's round trip lay in this range. */
typedef struct range {
    double from, to;
} range;

static const range any_distance = {0, HUGE_VAL};

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

static int lies_in(const bench_sample *sample, range range) {
    for (int i = 0; i < 2; i++)
        if (sample->line[i] < range.from || sample->line[i] >= range.to) return 0;
    return 1;
}

/* NAN where no sample counts. */
static double median(const bench_results *results, size_t system, bench_shape shape, size_t threads,
                     bench_mode mode, range range) {
    double *values = calloc(results->rounds, sizeof(*values));
    if (values == NULL) return NAN;
    size_t count = 0;
    for (size_t round = 0; round < results->rounds; round++)
        if (lies_in(bench_result(results, system, shape, threads, round), range))
            values[count++] = per_task(results, system, shape, threads, round, mode);
    double middle = bench_median(values, count);
    free(values);
    return middle;
}

static int has_mode(const bench_results *results, size_t system, bench_mode mode) {
    return bench_result(results, system, BENCH_CHAIN, 1, 0)->nanoseconds[mode] > 0;
}

/* ---- the table -------------------------------------------------------------------------- */

static void print_cells(const bench_results *results, size_t system, size_t threads,
                        bench_mode mode, range range) {
    for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
        printf("%15.0f", median(results, system, (bench_shape)shape, threads, mode, range));
}

static void print_rows(const bench_results *results,
                       void (*print_row)(const bench_results *results, size_t system,
                                         bench_mode mode)) {
    for (int mode = 0; mode < BENCH_MODE_COUNT; mode++) {
        printf("%s\n", mode_names[mode]);
        for (size_t system = 0; system < results->system_count; system++) {
            if (!has_mode(results, system, (bench_mode)mode)) continue;
            printf("  %-20s", results->systems[system]->name);
            print_row(results, system, (bench_mode)mode);
            printf("\n");
        }
    }
}

static void print_all_threads(const bench_results *results, size_t system, bench_mode mode) {
    for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
        print_cells(results, system, threads, mode, any_distance);
}

void bench_print_table(const bench_results *results) {
    printf("ns a task, median of %zu, %zu tasks\n%-22s", results->rounds, results->tasks, "");
    for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
        for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
            printf("%13s/%zu", bench_shape_name((bench_shape)shape), threads);
    printf("   (/threads)\n");
    print_rows(results, print_all_threads);
}

/* ---- near and far ----------------------------------------------------------------------- */

/* Between which all round trips lie but the shortest and the longest tenth, which may be of threads
 * that did not run. */
static range usual_round_trips(const bench_results *results) {
    size_t count =
        2 * results->system_count * BENCH_SHAPE_COUNT * BENCH_THREAD_COUNTS * results->rounds;
    double *lines = calloc(count, sizeof(*lines));
    if (lines == NULL) return (range){NAN, NAN};
    for (size_t i = 0; i < count; i++)
        lines[i] = results->samples[i / 2].line[i % 2];
    bench_sort(lines, count);
    range usual = {bench_quantile(lines, count, 0.1), bench_quantile(lines, count, 0.9)};
    free(lines);
    return usual;
}

/* Half-way on a logarithmic scale. */
static double limit_of(const bench_results *results) {
    range usual = usual_round_trips(results);
    return sqrt(usual.from * usual.to);
}

static void print_by_distance(const bench_results *results, size_t system, bench_mode mode) {
    double limit = limit_of(results);
    print_cells(results, system, 2, mode, (range){0, limit});
    print_cells(results, system, 2, mode, (range){limit, HUGE_VAL});
}

void bench_print_distances(const bench_results *results) {
    range usual = usual_round_trips(results);
    printf("\na cache line's round trip between two threads: %.0f to %.0f ns (10 %%, 90 %%)\n",
           usual.from, usual.to);
    if (usual.to < 2 * usual.from) return;
    printf("two threads, ns a task by that round trip: near, below %.0f ns, and far\n%-22s",
           limit_of(results), "");
    for (int far = 0; far < 2; far++)
        for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
            printf("%10s %s", bench_shape_name((bench_shape)shape), far ? "far " : "near");
    printf("\n");
    print_rows(results, print_by_distance);
}

/* ---- raw -------------------------------------------------------------------------------- */

static void print_raw_line(const bench_results *results, size_t system, bench_shape shape,
                           size_t threads, bench_mode mode) {
    printf("%s, %s, %s, %zu:", results->systems[system]->name, mode_names[mode],
           bench_shape_name(shape), threads);
    for (size_t round = 0; round < results->rounds; round++)
        printf(" %.1f", per_task(results, system, shape, threads, round, mode));
    printf("\n");
}

static void print_raw_trips(const bench_results *results, size_t system, bench_shape shape) {
    printf("%s, round trip before-after, %s, 2:", results->systems[system]->name,
           bench_shape_name(shape));
    for (size_t round = 0; round < results->rounds; round++) {
        const bench_sample *sample = bench_result(results, system, shape, 2, round);
        printf(" %.0f-%.0f", sample->line[0], sample->line[1]);
    }
    printf("\n");
}

static void print_raw_system(const bench_results *results, size_t system, bench_mode mode) {
    for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
        for (size_t threads = 1; threads <= BENCH_THREAD_COUNTS; threads++)
            print_raw_line(results, system, (bench_shape)shape, threads, mode);
}

void bench_print_raw(const bench_results *results) {
    printf("\nevery round, ns a task (system, mode, shape, threads)\n");
    for (size_t system = 0; system < results->system_count; system++) {
        for (int mode = 0; mode < BENCH_MODE_COUNT; mode++)
            if (has_mode(results, system, (bench_mode)mode))
                print_raw_system(results, system, (bench_mode)mode);
        for (int shape = 0; shape < BENCH_SHAPE_COUNT; shape++)
            print_raw_trips(results, system, (bench_shape)shape);
    }
}
