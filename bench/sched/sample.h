/* One measurement in a process of its own: no threads, caches or settings of another system. */
#ifndef BENCH_SCHED_SAMPLE_H
#define BENCH_SCHED_SAMPLE_H

#include "system.h"

typedef struct bench_case {
    const bench_system *system;
    bench_shape shape;
    size_t threads, tasks;
} bench_case;

/* Measures in a child process, after every shape was run there once; checks that every task ran.
 * Returns 0, or -1 after a message on stderr. */
int bench_sample_take(const bench_case *what, bench_sample *sample);

#endif
