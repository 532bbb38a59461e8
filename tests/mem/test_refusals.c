/* What the device or the caller's own values make impossible. */
#include "tests/mem/hand_device.h"

static const char *last_text(pst_device *device) {
    (void)device;
    return "the bus has stopped";
}

static void a_plan_needs_its_intervals_and_a_place_for_the_result(void **state) {
    pst_runtime *runtime = NULL;
    pst_plan_result result;
    pst_interval interval = {0, 1, 512, 0};
    (void)state;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    assert_int_equal(pst_plan_offsets(runtime, NULL, 1, &result), PST_EINVAL);
    assert_int_equal(pst_plan_offsets(runtime, &interval, 1, NULL), PST_EINVAL);
    assert_error_says(runtime, "intervals and result");
    pst_runtime_destroy(runtime);
}

static void a_segment_that_the_device_refuses_gives_its_reason(void **state) {
    bench b;
    (void)state;
    bench_open(&b);
    b.hand.ops.error_text = last_text;
    b.hand.refuse_from = 1;
    pst_arena *arena = open_arena(&b);
    assert_int_equal(pst_arena_add_segment(arena, 4096), PST_ENOMEM);
    assert_error_says(b.runtime, "the bus has stopped");
    pst_arena_destroy(arena);
    bench_close(&b);
}

/* A caller's header may be older than the library, or newer. */
static void statistics_are_written_as_far_as_the_caller_knows_them(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_arena *arena = open_arena(&b);
    assert_int_equal(pst_arena_add_segment(arena, 4096), PST_OK);
    pst_arena_stats older = {.size = offsetof(pst_arena_stats, leased), .leased = 77};
    pst_arena_get_stats(arena, &older);
    assert_int_equal(older.reserved, 4096);
    assert_int_equal(older.leased, 77);
    pst_arena_stats unset = {.reserved = 77};
    pst_arena_get_stats(arena, &unset);
    assert_int_equal(unset.reserved, 77);
    struct {
        pst_arena_stats known;
        uint64_t unknown;
    } newer = {{.size = sizeof newer}, 77};
    pst_arena_get_stats(arena, &newer.known);
    assert_int_equal(newer.known.reserved, 4096);
    assert_int_equal(newer.unknown, 77);
    pst_arena_destroy(arena);
    bench_close(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_needs_its_intervals_and_a_place_for_the_result),
        cmocka_unit_test(a_segment_that_the_device_refuses_gives_its_reason),
        cmocka_unit_test(statistics_are_written_as_far_as_the_caller_knows_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
