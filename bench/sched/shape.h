/* The graphs that are measured, and the body of their tasks. */
#ifndef BENCH_SCHED_SHAPE_H
#define BENCH_SCHED_SHAPE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bench_shape {
    BENCH_CHAIN = 0,   /* each task after the one before it */
    BENCH_INDEPENDENT, /* no edges */
    BENCH_STENCIL,     /* rows of BENCH_WIDTH; each after its neighbours in the row above */
    BENCH_SHAPE_COUNT
} bench_shape;

enum { BENCH_WIDTH = 8, BENCH_MAX_PREDECESSORS = 3 };

const char *bench_shape_name(bench_shape shape);

/* Writes the indices of task i's predecessors, each at most BENCH_WIDTH + 1 below i, and returns
 * how many there are. */
size_t bench_predecessors(bench_shape shape, size_t i, size_t *predecessors);

/* Which of two threads runs task i where the system has to be told: halves of the stencil's
 * columns, blocks of the chain, every other independent task. */
size_t bench_half(bench_shape shape, size_t i);

/* The body of every task, and how often it ran since the last reset. */
void bench_body(void);
size_t bench_body_count(void);
void bench_body_reset(void);

double bench_now(void); /* nanoseconds */

#ifdef __cplusplus
}
#endif
#endif
