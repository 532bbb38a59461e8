#include "tests/mem/hand_device.h"

#include "mem/arena.h"
#include "tracing/trace.h"

#include <unistd.h>

#define UNIT ((size_t)PST_ARENA_ALIGNMENT)

static pst_lease acquire(pst_arena *arena, size_t bytes) {
    pst_lease lease;
    assert_int_equal(pst_arena_acquire(arena, bytes, &lease), PST_OK);
    return lease;
}

static pst_lease acquire_at(pst_arena *arena, size_t offset, size_t bytes) {
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, offset, bytes, &lease), PST_OK);
    return lease;
}

static void a_lease_is_aligned_and_as_large_as_asked_for(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    for (size_t bytes = 1; bytes < 5 * UNIT; bytes += 333) {
        pst_lease lease = acquire(arena, bytes);
        assert_int_equal((uintptr_t)lease.memory % UNIT, 0);
        assert_int_equal(lease.bytes, (bytes + UNIT - 1) / UNIT * UNIT);
        assert_int_equal(lease.after_count, 0);
        memset(lease.memory, 1, lease.bytes);
        pst_arena_release(arena, &lease, NULL);
    }
    pst_arena_destroy(arena);
}

static void an_empty_lease_takes_nothing(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease lease = acquire(arena, 0);
    assert_null(lease.memory);
    pst_arena_release(arena, &lease, NULL);
    lease = acquire_at(arena, 4 * UNIT, 0);
    assert_null(lease.memory);
    pst_arena_quarantine(arena, &lease);
    assert_int_equal(stats_of(arena).acquires, 0);
    assert_int_equal(stats_of(arena).reserved, 0);
    pst_arena_destroy(arena);
}

static void the_smallest_piece_that_fits_is_taken(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease five = acquire_at(arena, 0, 5 * UNIT);
    (void)acquire_at(arena, 5 * UNIT, UNIT);
    pst_lease three = acquire_at(arena, 6 * UNIT, 3 * UNIT);
    (void)acquire_at(arena, 9 * UNIT, UNIT);
    pst_arena_release(arena, &five, NULL);
    pst_arena_release(arena, &three, NULL);
    assert_int_equal(acquire(arena, 3 * UNIT).offset, 6 * UNIT);
    assert_int_equal(acquire(arena, 3 * UNIT).offset, 0);
    pst_arena_destroy(arena);
}

static void released_neighbours_become_one_piece_in_any_order(void **state) {
    (void)state;
    const size_t orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        bench b;
        bench_open(&b);
        pst_arena *arena = open_arena(&b);
        assert_int_equal(pst_arena_add_segment(arena, 6 * UNIT), PST_OK);
        pst_lease leases[3];
        for (size_t k = 0; k < 3; k++)
            leases[k] = acquire(arena, 2 * UNIT);
        for (size_t k = 0; k < 3; k++)
            pst_arena_release(arena, &leases[orders[i][k]], NULL);
        assert_int_equal(acquire(arena, 6 * UNIT).offset, 0);
        assert_int_equal(stats_of(arena).grows, 1);
        pst_arena_destroy(arena);
        bench_close(&b);
    }
}

static void it_grows_by_segments_and_by_what_a_larger_request_needs(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    (void)acquire(arena, 10 * UNIT);
    assert_int_equal(stats_of(arena).reserved, 16 * UNIT);
    pst_lease second = acquire(arena, 10 * UNIT);
    assert_int_equal(second.offset, 16 * UNIT);
    pst_lease third = acquire(arena, 100 * UNIT);
    assert_int_equal(third.offset, 32 * UNIT);
    assert_int_equal(stats_of(arena).reserved, 132 * UNIT);
    assert_int_equal(stats_of(arena).grows, 3);
    pst_arena_destroy(arena);
}

static void a_lease_never_spans_two_segments(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    assert_int_equal(pst_arena_add_segment(arena, 2 * UNIT), PST_OK);
    assert_int_equal(pst_arena_add_segment(arena, 2 * UNIT), PST_OK);
    assert_int_equal(acquire(arena, 3 * UNIT).offset, 4 * UNIT);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, UNIT, 2 * UNIT, &lease), PST_EBUSY);
    assert_error_says(b->runtime, "[512, 1536)");
    assert_error_says(b->runtime, "segment");
    assert_int_equal(acquire(arena, 2 * UNIT).offset, 0);
    pst_arena_destroy(arena);
}

static void the_limit_holds_and_the_error_has_the_sizes(void **state) {
    bench *b = *state;
    pst_arena_options options = arena_options(b);
    options.limit_bytes = 20 * UNIT;
    pst_arena *arena;
    assert_int_equal(pst_arena_create(b->runtime, &options, &arena), PST_OK);
    (void)acquire(arena, 15 * UNIT);
    (void)acquire(arena, 3 * UNIT); /* the second segment is cut to the limit */
    assert_int_equal(stats_of(arena).reserved, 20 * UNIT);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire(arena, 2 * UNIT, &lease), PST_ENOMEM);
    assert_null(lease.memory);
    assert_error_says(b->runtime, "arena gather: no room for 1024 bytes");
    assert_error_says(b->runtime, "9216 of 10240 reserved");
    assert_error_says(b->runtime, "largest free piece has 512");
    assert_error_says(b->runtime, "limit is 10240");
    assert_int_equal(pst_arena_add_segment(arena, UNIT), PST_ENOMEM);
    assert_int_equal(pst_arena_acquire(arena, SIZE_MAX, &lease), PST_ENOMEM);
    assert_int_equal(stats_of(arena).leased, 18 * UNIT);
    pst_arena_destroy(arena);
}

static void when_the_device_has_no_whole_segment_it_asks_for_what_is_needed(void **state) {
    bench *b = *state;
    b->hand.refuse_from = 10 * UNIT;
    pst_arena *arena = open_arena(b);
    (void)acquire(arena, 2 * UNIT);
    assert_int_equal(stats_of(arena).reserved, 2 * UNIT);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire(arena, 11 * UNIT, &lease), PST_ENOMEM);
    assert_error_says(b->runtime, "device hand gave no segment of 5632 bytes");
    pst_arena_destroy(arena);
}

static void a_planned_piece_lies_where_the_plan_wants_it(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    assert_int_equal(pst_arena_add_segment(arena, 10 * UNIT), PST_OK);
    pst_lease lease = acquire_at(arena, 3 * UNIT, 2 * UNIT - 5);
    assert_int_equal(lease.offset, 3 * UNIT);
    assert_int_equal(lease.bytes, 2 * UNIT);
    assert_int_equal(stats_of(arena).planned_hits, 1);
    pst_lease left = acquire_at(arena, 0, 3 * UNIT);
    assert_ptr_equal((char *)left.memory + 3 * UNIT, lease.memory);
    assert_int_equal(acquire_at(arena, 5 * UNIT, 5 * UNIT).bytes, 5 * UNIT);
    pst_arena_destroy(arena);
}

static void a_planned_piece_that_is_leased_is_busy_and_the_rest_stays_as_it_was(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease held = acquire_at(arena, 4 * UNIT, UNIT);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, 2 * UNIT, 4 * UNIT, &lease), PST_EBUSY);
    assert_null(lease.memory);
    assert_error_says(b->runtime, "arena gather: bytes [1024, 3072)");
    assert_int_equal(stats_of(arena).leased, UNIT);
    pst_arena_release(arena, &held, NULL);
    assert_int_equal(acquire(arena, 16 * UNIT).offset, 0);
    pst_arena_destroy(arena);
}

static void a_planned_piece_past_the_end_grows_the_arena(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease lease = acquire_at(arena, 100 * UNIT, 3 * UNIT);
    assert_int_equal(lease.offset, 100 * UNIT);
    memset(lease.memory, 1, lease.bytes);
    assert_int_equal(stats_of(arena).reserved, 103 * UNIT);
    assert_int_equal(acquire(arena, 100 * UNIT).offset, 0);
    pst_arena_destroy(arena);
}

static void planned_offsets_that_are_none_are_refused(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, 5, UNIT, &lease), PST_EINVAL);
    assert_error_says(b->runtime, "offset 5");
    assert_int_equal(pst_arena_acquire_at(arena, SIZE_MAX / UNIT * UNIT, UNIT, &lease), PST_EINVAL);
    assert_int_equal(stats_of(arena).reserved, 0);
    pst_arena_destroy(arena);
}

static void quarantined_pieces_are_never_given_again(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease lost = acquire_at(arena, 8 * UNIT, UNIT);
    pst_arena_quarantine(arena, &lost);
    assert_int_equal(stats_of(arena).quarantined, UNIT);
    assert_int_equal(stats_of(arena).leased, 0);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, 8 * UNIT, UNIT, &lease), PST_EBUSY);
    assert_error_says(b->runtime, "quarantine");
    assert_int_equal(acquire(arena, 8 * UNIT).offset, 0);
    assert_int_equal(acquire(arena, 7 * UNIT).offset, 9 * UNIT);
    pst_arena_trim(arena);
    assert_int_equal(stats_of(arena).reserved, 16 * UNIT);
    pst_arena_destroy(arena);
}

static void releasing_twice_is_reported_and_changes_nothing(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease lease = acquire(arena, UNIT);
    (void)acquire(arena, UNIT);
    pst_lease half = lease;
    half.bytes = 2 * UNIT;
    pst_arena_release(arena, &half, NULL);
    assert_error_says(b->runtime, "release of bytes [0, 1024)");
    pst_arena_release(arena, &lease, NULL);
    pst_arena_release(arena, &lease, NULL);
    assert_error_says(b->runtime, "release of bytes [0, 512)");
    pst_arena_quarantine(arena, &lease);
    assert_error_says(b->runtime, "quarantine of bytes [0, 512)");
    assert_int_equal(stats_of(arena).leased, UNIT);
    pst_arena_destroy(arena);
}

static void the_peak_is_the_most_that_was_leased_at_once(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    pst_lease one = acquire(arena, 3 * UNIT), other = acquire(arena, UNIT);
    pst_arena_release(arena, &one, NULL);
    (void)acquire(arena, 2 * UNIT);
    assert_int_equal(stats_of(arena).peak, 4 * UNIT);
    assert_int_equal(stats_of(arena).leased, 3 * UNIT);
    pst_arena_release(arena, &other, NULL);
    pst_arena_reset_peak(arena);
    assert_int_equal(stats_of(arena).peak, 2 * UNIT);
    assert_int_equal(stats_of(arena).acquires, 3);
    pst_arena_destroy(arena);
}

static void trimming_frees_unused_segments_from_the_last_one_on(void **state) {
    bench *b = *state;
    pst_arena *arena = open_arena(b);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pst_arena_add_segment(arena, 2 * UNIT), PST_OK);
    pst_lease second = acquire_at(arena, 2 * UNIT, UNIT);
    pst_arena_trim(arena);
    assert_int_equal(stats_of(arena).reserved, 4 * UNIT);
    assert_int_equal(b->hand.live_bytes, 4 * UNIT);
    pst_arena_release(arena, &second, NULL);
    pst_arena_trim(arena);
    assert_int_equal(stats_of(arena).reserved, 0);
    assert_int_equal(b->hand.live_bytes, 0);
    assert_int_equal(acquire(arena, UNIT).offset, 0);
    pst_arena_destroy(arena);
}

typedef struct own_segments {
    size_t allocs, frees, shift;
} own_segments;

static pst_status own_alloc(void *context, size_t bytes, void **memory) {
    own_segments *own = context;
    own->allocs++;
    char *block = aligned_alloc(UNIT, bytes + UNIT);
    if (block == NULL) return PST_ENOMEM;
    *memory = block + own->shift;
    return PST_OK;
}

static void own_free(void *context, void *memory, size_t bytes) {
    (void)bytes;
    own_segments *own = context;
    own->frees++;
    free((char *)memory - own->shift);
}

static pst_arena *open_own(bench *b, own_segments *own) {
    pst_arena_options options = arena_options(b);
    options.segment_alloc = own_alloc;
    options.segment_free = own_free;
    options.segment_context = own;
    pst_arena *arena;
    assert_int_equal(pst_arena_create(b->runtime, &options, &arena), PST_OK);
    return arena;
}

static void segments_come_from_the_callers_own_allocator(void **state) {
    bench *b = *state;
    own_segments own = {0};
    pst_arena *arena = open_own(b, &own);
    (void)acquire(arena, UNIT);
    pst_arena_destroy(arena);
    assert_int_equal(own.allocs, 1);
    assert_int_equal(own.frees, 1);
    assert_int_equal(b->hand.allocs, 0);
}

static void segments_that_somebody_may_write_are_left_as_they_are(void **state) {
    bench *b = *state;
    own_segments own = {0};
    pst_arena *arena = open_own(b, &own);
    const pst_lease lease = acquire(arena, UNIT);
    pst__arena_leave(arena);
    assert_int_equal(own.frees, 0);
    memset(lease.memory, 1, lease.bytes);
    own_free(&own, lease.memory, lease.bytes);
}

static void a_segment_that_is_not_aligned_is_given_back(void **state) {
    bench *b = *state;
    own_segments own = {.shift = 8};
    pst_arena *arena = open_own(b, &own);
    assert_int_equal(pst_arena_add_segment(arena, UNIT), PST_EDEVICE);
    assert_error_says(b->runtime, "not aligned");
    assert_int_equal(own.allocs, own.frees);
    pst_arena_destroy(arena);
}

static void options_that_make_no_sense_are_refused(void **state) {
    bench *b = *state;
    pst_arena *arena;
    pst_arena_options options = {0};
    assert_int_equal(pst_arena_create(b->runtime, &options, &arena), PST_EINVAL);
    assert_null(arena);
    assert_int_equal(pst_arena_create(b->runtime, NULL, &arena), PST_EINVAL);
    options = arena_options(b);
    options.segment_alloc = own_alloc;
    assert_int_equal(pst_arena_create(b->runtime, &options, &arena), PST_EINVAL);
    assert_error_says(b->runtime, "segment_free");
    arena = open_arena(b);
    assert_int_equal(pst_arena_add_segment(arena, 0), PST_EINVAL);
    pst_arena_destroy(arena);
    pst_arena_destroy(NULL);
}

static void a_trace_counts_the_leased_bytes_under_the_arenas_name(void **state) {
    bench *b = *state;
    pst__trace *trace = pst__runtime_trace(b->runtime);
    pst_arena *arena = open_arena(b);
    assert_int_equal(pst__trace_start(trace), PST_OK);
    pst_lease lease = acquire(arena, 3 * UNIT);
    pst_arena_release(arena, &lease, NULL);
    pst_arena_destroy(arena); /* before the trace is written: the name must outlive it */
    assert_int_equal(pst__trace_stop(trace), PST_OK);
    char path[] = "/tmp/pst_arena_trace_XXXXXX", text[16384] = {0};
    int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    assert_int_equal(pst__trace_write(trace, path, 0), PST_OK);
    assert_true(read(descriptor, text, sizeof text - 1) > 0);
    assert_non_null(strstr(text, "gather bytes"));
    assert_non_null(strstr(text, "1536"));
    (void)close(descriptor);
    (void)unlink(path);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, bench_setup, bench_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_lease_is_aligned_and_as_large_as_asked_for),
        TEST(an_empty_lease_takes_nothing),
        TEST(the_smallest_piece_that_fits_is_taken),
        cmocka_unit_test(released_neighbours_become_one_piece_in_any_order),
        TEST(it_grows_by_segments_and_by_what_a_larger_request_needs),
        TEST(a_lease_never_spans_two_segments),
        TEST(the_limit_holds_and_the_error_has_the_sizes),
        TEST(when_the_device_has_no_whole_segment_it_asks_for_what_is_needed),
        TEST(a_planned_piece_lies_where_the_plan_wants_it),
        TEST(a_planned_piece_that_is_leased_is_busy_and_the_rest_stays_as_it_was),
        TEST(a_planned_piece_past_the_end_grows_the_arena),
        TEST(planned_offsets_that_are_none_are_refused),
        TEST(quarantined_pieces_are_never_given_again),
        TEST(releasing_twice_is_reported_and_changes_nothing),
        TEST(the_peak_is_the_most_that_was_leased_at_once),
        TEST(trimming_frees_unused_segments_from_the_last_one_on),
        TEST(segments_come_from_the_callers_own_allocator),
        TEST(segments_that_somebody_may_write_are_left_as_they_are),
        TEST(a_segment_that_is_not_aligned_is_given_back),
        TEST(options_that_make_no_sense_are_refused),
        TEST(a_trace_counts_the_leased_bytes_under_the_arenas_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
