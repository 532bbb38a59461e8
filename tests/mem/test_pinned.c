#include "tests/mem/hand_device.h"
#include "tests/mem/random.h"

#include <pthread.h>

#define UNIT    ((size_t)PST_ARENA_ALIGNMENT)
#define THREADS 4
#define TURNS   3000
#define HELD    8

static pst_pinned *open_pinned(bench *b, size_t piece_bytes) {
    pst_pinned *pinned;
    assert_int_equal(pst_pinned_create(b->runtime, &b->hand.device, piece_bytes, &pinned), PST_OK);
    return pinned;
}

static void *acquire(pst_pinned *pinned, size_t bytes) {
    void *memory;
    assert_int_equal(pst_pinned_acquire(pinned, bytes, &memory), PST_OK);
    return memory;
}

static pst_arena_stats pinned_stats(pst_pinned *pinned) {
    pst_arena_stats stats = {.size = sizeof stats};
    pst_pinned_get_stats(pinned, &stats);
    return stats;
}

static void sizes_are_exact_and_not_rounded_to_powers_of_two(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned = open_pinned(&b, 64 * UNIT);
    char *first = acquire(pinned, 4 * UNIT + 1), *second = acquire(pinned, UNIT);
    assert_int_equal(pinned_stats(pinned).leased, 6 * UNIT);
    assert_ptr_equal(second, first + 5 * UNIT);
    assert_int_equal((uintptr_t)first % UNIT, 0);
    memset(first, 1, 4 * UNIT + 1);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

static void memory_is_registered_in_large_pieces_and_stays_registered(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned = open_pinned(&b, 64 * UNIT);
    void *memory[16];
    for (size_t turn = 0; turn < 5; turn++) {
        for (size_t i = 0; i < 16; i++)
            memory[i] = acquire(pinned, 4 * UNIT);
        for (size_t i = 0; i < 16; i++)
            pst_pinned_release(pinned, memory[i]);
    }
    assert_int_equal(b.hand.allocs, 1);
    assert_int_equal(b.hand.live_bytes, 64 * UNIT);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

static void more_than_a_piece_gets_a_piece_of_its_own_size(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned = open_pinned(&b, 8 * UNIT);
    void *small = acquire(pinned, UNIT), *large = acquire(pinned, 100 * UNIT);
    memset(large, 1, 100 * UNIT);
    assert_int_equal(pinned_stats(pinned).reserved, 108 * UNIT);
    pst_pinned_release(pinned, large);
    pst_pinned_release(pinned, small);
    assert_ptr_equal(acquire(pinned, 100 * UNIT), large);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

static void released_memory_is_given_again(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned = open_pinned(&b, 0);
    void *memory = acquire(pinned, 3 * UNIT);
    pst_pinned_release(pinned, memory);
    assert_ptr_equal(acquire(pinned, 3 * UNIT), memory);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

static void no_bytes_are_no_memory(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned = open_pinned(&b, UNIT);
    assert_null(acquire(pinned, 0));
    pst_pinned_release(pinned, NULL);
    pst_pinned_destroy(pinned);
    pst_pinned_destroy(NULL);
    bench_close(&b);
}

static void releasing_what_is_not_acquired_is_reported(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned = open_pinned(&b, 8 * UNIT);
    char *memory = acquire(pinned, 2 * UNIT);
    pst_pinned_release(pinned, memory + UNIT);
    assert_error_says(b.runtime, "not acquired");
    pst_pinned_release(pinned, &b);
    assert_int_equal(pinned_stats(pinned).leased, 2 * UNIT);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

static void without_memory_the_error_has_the_size(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    b.hand.refuse_from = 1;
    pst_pinned *pinned = open_pinned(&b, 8 * UNIT);
    void *memory = &b;
    assert_int_equal(pst_pinned_acquire(pinned, 3 * UNIT, &memory), PST_ENOMEM);
    assert_null(memory);
    assert_error_says(b.runtime, "arena pinned: device hand gave no segment of 1536 bytes");
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

static void the_host_device_has_pinned_memory(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_pinned *pinned;
    assert_int_equal(pst_pinned_create(b.runtime, NULL, 1u << 20, &pinned), PST_OK);
    unsigned char *memory = acquire(pinned, 12345);
    memset(memory, 7, 12345);
    assert_int_equal(memory[12344], 7);
    pst_pinned_release(pinned, memory);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

typedef struct user {
    pst_pinned *pinned;
    uint64_t seed;
    unsigned char mark;
    int failed; /* read after the thread ended */
} user;

static int all_are(const unsigned char *memory, size_t bytes, unsigned char mark) {
    for (size_t i = 0; i < bytes; i += 61)
        if (memory[i] != mark) return 0;
    return 1;
}

/* Each thread marks what it holds, and finds its own mark when it gives it back. */
static void *acquire_and_release(void *argument) {
    user *self = argument;
    random_source source = {self->seed};
    unsigned char *held[HELD] = {0};
    size_t bytes[HELD] = {0};
    for (size_t turn = 0; turn < TURNS; turn++) {
        size_t i = random_below(&source, HELD);
        void *memory;
        if (!all_are(held[i], bytes[i], self->mark)) self->failed = 1;
        pst_pinned_release(self->pinned, held[i]);
        bytes[i] = 1 + random_below(&source, 6 * UNIT);
        if (pst_pinned_acquire(self->pinned, bytes[i], &memory) != PST_OK) self->failed = 1;
        held[i] = memory;
        if (held[i] == NULL) bytes[i] = 0;
        memset(memory, self->mark, bytes[i]);
    }
    for (size_t i = 0; i < HELD; i++)
        pst_pinned_release(self->pinned, held[i]);
    return NULL;
}

static void threads_never_get_the_same_memory(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    random_source source = random_open(__func__);
    pst_pinned *pinned = open_pinned(&b, 32 * UNIT);
    pthread_t threads[THREADS];
    user users[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        users[i] = (user){pinned, random_next(&source), (unsigned char)(i + 1), 0};
        assert_int_equal(pthread_create(&threads[i], NULL, acquire_and_release, &users[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        (void)pthread_join(threads[i], NULL);
        assert_int_equal(users[i].failed, 0);
    }
    pst_arena_stats stats = pinned_stats(pinned);
    assert_int_equal(stats.leased, 0);
    assert_int_equal(stats.acquires, THREADS * TURNS);
    pst_pinned_destroy(pinned);
    bench_close(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_are_exact_and_not_rounded_to_powers_of_two),
        cmocka_unit_test(memory_is_registered_in_large_pieces_and_stays_registered),
        cmocka_unit_test(more_than_a_piece_gets_a_piece_of_its_own_size),
        cmocka_unit_test(released_memory_is_given_again),
        cmocka_unit_test(no_bytes_are_no_memory),
        cmocka_unit_test(releasing_what_is_not_acquired_is_reported),
        cmocka_unit_test(without_memory_the_error_has_the_size),
        cmocka_unit_test(the_host_device_has_pinned_memory),
        cmocka_unit_test(threads_never_get_the_same_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
