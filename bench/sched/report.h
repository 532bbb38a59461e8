/* All measurements of a run, and their table. */
#ifndef BENCH_SCHED_REPORT_H
#define BENCH_SCHED_REPORT_H

#include "system.h"

enum { BENCH_THREAD_COUNTS = 2 }; /* one thread and two */

typedef struct bench_results {
    const bench_system *const *systems;
    size_t system_count, tasks, rounds;
    bench_sample *samples;
} bench_results;

bench_sample *bench_result(const bench_results *results, size_t system, bench_shape shape,
                           size_t threads, size_t round);

/* Prints the medians in ns a task. */
void bench_print_table(const bench_results *results);

/* Prints the medians of two threads once more, apart for the samples during which a cache line went
 * fast between them and for those during which it went slowly, if there were both. */
void bench_print_distances(const bench_results *results);

/* Prints every measurement, a line a case: ns a task in the order of the rounds. */
void bench_print_raw(const bench_results *results);

#endif
