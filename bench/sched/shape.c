#include "shape.h"

#include <stdatomic.h>
#include <time.h>

enum { CHAIN_BLOCK = 1024, MAX_COUNTERS = 16 };

const char *bench_shape_name(bench_shape shape) {
    static const char *const names[BENCH_SHAPE_COUNT] = {"chain", "independent", "stencil"};
    return names[shape];
}

static size_t stencil_predecessors(size_t i, size_t *predecessors) {
    size_t column = i % BENCH_WIDTH, count = 0;
    if (i < BENCH_WIDTH) return 0;
    predecessors[count++] = i - BENCH_WIDTH;
    if (column > 0) predecessors[count++] = i - BENCH_WIDTH - 1;
    if (column < BENCH_WIDTH - 1) predecessors[count++] = i - BENCH_WIDTH + 1;
    return count;
}

size_t bench_predecessors(bench_shape shape, size_t i, size_t *predecessors) {
    if (shape == BENCH_STENCIL) return stencil_predecessors(i, predecessors);
    if (shape == BENCH_INDEPENDENT || i == 0) return 0;
    predecessors[0] = i - 1;
    return 1;
}

size_t bench_half(bench_shape shape, size_t i) {
    switch (shape) {
    case BENCH_CHAIN:
        return i / CHAIN_BLOCK % 2;
    case BENCH_STENCIL:
        return i % BENCH_WIDTH >= BENCH_WIDTH / 2;
    default:
        return i % 2;
    }
}

/* A counter a thread, on a cache line of its own: one for all would make every body wait for the
 * other thread's cache. */
typedef struct counter {
    _Alignas(64) atomic_size_t count;
} counter;

static counter counters[MAX_COUNTERS];
static atomic_size_t counters_taken;

void bench_body(void) {
    static _Thread_local counter *own;
    if (own == NULL) own = &counters[atomic_fetch_add(&counters_taken, 1) % MAX_COUNTERS];
    atomic_fetch_add_explicit(&own->count, 1, memory_order_relaxed);
}

size_t bench_body_count(void) {
    size_t sum = 0;
    for (size_t i = 0; i < MAX_COUNTERS; i++)
        sum += atomic_load(&counters[i].count);
    return sum;
}

void bench_body_reset(void) {
    for (size_t i = 0; i < MAX_COUNTERS; i++)
        atomic_store(&counters[i].count, 0);
}

double bench_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}
