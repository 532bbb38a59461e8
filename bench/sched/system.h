/* A system that is measured. */
#ifndef BENCH_SCHED_SYSTEM_H
#define BENCH_SCHED_SYSTEM_H

#include "shape.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bench_mode { BENCH_REPLAY = 0, BENCH_BUILD_AND_RUN, BENCH_MODE_COUNT } bench_mode;

/* One measurement: nanoseconds for the whole graph; 0 for a mode that the system does not have.
 * Beside it a cache line's round trip between two threads, just before and just after. */
typedef struct bench_sample {
    double nanoseconds[BENCH_MODE_COUNT];
    double line[2];
} bench_sample;

/* Builds and runs the shape with `tasks` tasks on `threads` threads, runs it again where the
 * system can, and takes both times. Returns 0, or -1 after a message on stderr. */
typedef struct bench_system {
    const char *name;
    int (*measure)(bench_shape shape, size_t threads, size_t tasks, bench_sample *sample);
} bench_system;

extern const bench_system bench_penstock, bench_penstock_growing, bench_onetbb, bench_openmp;

#ifdef __cplusplus
}
#endif
#endif
