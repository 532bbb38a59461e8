/* An asynchronous device whose events are completed by hand, and a runtime with a counting heap. */
#ifndef PST_TESTS_MEM_HAND_DEVICE_H
#define PST_TESTS_MEM_HAND_DEVICE_H

#include "tests/base/counting_heap.h"
#include "tests/cmocka_all.h"

#include "sched/runtime.h"

#include <penstock/memory.h>

#define POISON 0xa5

struct pst_event {
    pst_status status; /* what a query answers */
};

struct pst_stream {
    pst_event *waits[16];
    size_t wait_count;
};

typedef struct hand_device {
    pst_device device;
    pst_device_ops ops;
    size_t live_bytes, allocs, frees;
    size_t refuse_from; /* allocations of at least so many bytes fail; 0: none does */
    int is_worker;      /* stream_wait answers like the host device */
    int fill_fails;
    size_t fill_launches;
} hand_device;

static pst_status hand_alloc(pst_device *device, pst_memory_kind kind, size_t bytes,
                             void **memory) {
    (void)kind;
    hand_device *hand = device->context;
    if (hand->refuse_from != 0 && bytes >= hand->refuse_from) return PST_ENOMEM;
    if (posix_memalign(memory, PST_ARENA_ALIGNMENT, bytes) != 0) return PST_ENOMEM;
    memset(*memory, POISON, bytes);
    hand->live_bytes += bytes;
    hand->allocs++;
    return PST_OK;
}

static void hand_free(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    (void)kind;
    hand_device *hand = device->context;
    hand->live_bytes -= bytes;
    hand->frees++;
    free(memory);
}

static pst_status hand_query(pst_device *device, pst_event *event) {
    (void)device;
    return event->status;
}

static pst_status hand_stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    const hand_device *hand = device->context;
    if (hand->is_worker) return event->status;
    if (stream->wait_count == sizeof stream->waits / sizeof *stream->waits) return PST_EDEVICE;
    stream->waits[stream->wait_count++] = event;
    return PST_OK;
}

/* Fills with zeros only: all that mem/ asks for. */
static pst_status hand_cast(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                            size_t count, double scale) {
    (void)stream, (void)scale;
    hand_device *hand = device->context;
    if (hand->fill_fails) return PST_EDEVICE;
    for (size_t i = 0; i < count; i++) {
        if (pieces[i].source != NULL) return PST_EUNSUPPORTED;
        memset(pieces[i].destination, 0,
               pieces[i].count * pst_dtype_size(pieces[i].destination_dtype));
    }
    hand->fill_launches++;
    return PST_OK;
}

static inline void hand_open(hand_device *hand) {
    *hand = (hand_device){.ops = {.api_version = PST_DEVICE_API_VERSION,
                                  .name = "hand",
                                  .alloc = hand_alloc,
                                  .free = hand_free,
                                  .event_query = hand_query,
                                  .stream_wait = hand_stream_wait,
                                  .cast_scale_copy = hand_cast}};
    hand->device = (pst_device){&hand->ops, hand};
}

/* A runtime, its heap's counts and the device; what a test needs, closed with a check for leaks. */
typedef struct bench {
    counting_heap heap;
    pst_runtime *runtime;
    hand_device hand;
} bench;

static inline void bench_open(bench *b) {
    *b = (bench){0};
    hand_open(&b->hand);
    pst_runtime_options options = {.size = sizeof options,
                                   .allocator = {counting_alloc, counting_free, &b->heap}};
    assert_int_equal(pst_runtime_create(&options, &b->runtime), PST_OK);
}

static inline void bench_close(bench *b) {
    pst_runtime_destroy(b->runtime);
    assert_int_equal(b->heap.live, 0);
    assert_int_equal(b->heap.live_bytes, 0);
    assert_int_equal(b->hand.live_bytes, 0);
    assert_int_equal(b->hand.allocs, b->hand.frees);
}

/* The same for each test of a group: *state is the bench. */
static inline int bench_setup(void **state) {
    bench *b = malloc(sizeof *b);
    bench_open(b);
    *state = b;
    return 0;
}

static inline int bench_teardown(void **state) {
    bench_close(*state);
    free(*state);
    return 0;
}

static inline pst_arena_options arena_options(bench *b) {
    return (pst_arena_options){.size = sizeof(pst_arena_options),
                               .name = "gather",
                               .device = &b->hand.device,
                               .segment_bytes = 16 * PST_ARENA_ALIGNMENT};
}

static inline pst_arena *open_arena(bench *b) {
    pst_arena_options options = arena_options(b);
    pst_arena *arena;
    assert_int_equal(pst_arena_create(b->runtime, &options, &arena), PST_OK);
    return arena;
}

static inline pst_arena_stats stats_of(const pst_arena *arena) {
    pst_arena_stats stats = {.size = sizeof stats};
    pst_arena_get_stats(arena, &stats);
    return stats;
}

static inline void assert_error_says(const pst_runtime *runtime, const char *part) {
    char text[1024];
    (void)pst_runtime_error(runtime, text, sizeof text);
    if (strstr(text, part) == NULL) fail_msg("\"%s\" does not say \"%s\"", text, part);
}

#endif
