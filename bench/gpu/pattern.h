/* The graphs of Task Bench as CUDASTF's own benchmark has them: `steps` rows of `width` tasks, each
 * of which writes a datum of its own and reads some of the row above; all of it `repeats` times,
 * over the same data. So a task follows those that wrote what it reads, whoever wrote its own datum
 * before, and all that have read that since. */
#ifndef BENCH_GPU_PATTERN_H
#define BENCH_GPU_PATTERN_H

#include <stddef.h>

typedef enum pattern_kind { TRIVIAL, STENCIL, FFT, SWEEP, PATTERNS } pattern_kind;

enum { PATTERN_WIDTH = 8, PATTERN_STEPS = 8, PATTERN_REPEATS = 10, PATTERN_MOST_AFTER = 8 };
enum { PATTERN_MOST_TASKS = PATTERN_WIDTH * PATTERN_STEPS * PATTERN_REPEATS };

typedef struct pattern_task {
    size_t column;
    size_t after[PATTERN_MOST_AFTER]; /* indices of tasks before this one, each once */
    size_t after_count;
} pattern_task;

typedef struct pattern {
    const char *name;
    pattern_task tasks[PATTERN_MOST_TASKS]; /* in an order that keeps all edges */
    size_t count;
    size_t edges;
} pattern;

void pattern_make(pattern *pattern, pattern_kind kind);

#endif
