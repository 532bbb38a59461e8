/* Allocator hooks for tests: they count, check the sizes given back, and fail on demand. */
#ifndef PST_TESTS_BASE_COUNTING_HEAP_H
#define PST_TESTS_BASE_COUNTING_HEAP_H

#include "base/heap.h"

#include <stdlib.h>
#include <string.h>

/* Counters are touched by several threads; relaxed, since they are read after the threads ended. */
typedef struct counting_heap {
    long allocs;     /* calls of alloc */
    long live;       /* blocks not freed yet */
    long live_bytes; /* a wrong size at free leaves a difference */
    long fail_at;    /* the call of alloc, counted from 1, that gets NULL; 0: none */
    long misaligned; /* frees with another alignment than a cache line */
} counting_heap;

static inline void *counting_alloc(void *context, size_t bytes, size_t alignment) {
    counting_heap *heap = context;
    long call = __atomic_add_fetch(&heap->allocs, 1, __ATOMIC_RELAXED);
    if (call == heap->fail_at) return NULL;
    void *memory = NULL;
    if (posix_memalign(&memory, alignment, bytes) != 0) return NULL;
    memset(memory, 0xa5, bytes); /* so that nobody gets zeros by luck */
    __atomic_add_fetch(&heap->live, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&heap->live_bytes, (long)bytes, __ATOMIC_RELAXED);
    return memory;
}

static inline void counting_free(void *context, void *memory, size_t bytes, size_t alignment) {
    counting_heap *heap = context;
    if (alignment != PST__CACHE_LINE) __atomic_add_fetch(&heap->misaligned, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&heap->live, 1, __ATOMIC_RELAXED);
    __atomic_sub_fetch(&heap->live_bytes, (long)bytes, __ATOMIC_RELAXED);
    free(memory);
}

static inline pst__heap counting_heap_open(counting_heap *counts) {
    return (pst__heap){{counting_alloc, counting_free, counts}};
}

#endif
