/* What an arena does with pieces that a device still uses. */
#include "tests/mem/hand_device.h"

#define UNIT ((size_t)PST_ARENA_ALIGNMENT)

/* An arena of one segment that does not grow. */
static pst_arena *open_fixed(bench *b, size_t bytes) {
    pst_arena_options options = arena_options(b);
    options.limit_bytes = bytes;
    pst_arena *arena;
    assert_int_equal(pst_arena_create(b->runtime, &options, &arena), PST_OK);
    assert_int_equal(pst_arena_add_segment(arena, bytes), PST_OK);
    return arena;
}

static pst_lease acquire(pst_arena *arena, size_t bytes) {
    pst_lease lease;
    assert_int_equal(pst_arena_acquire(arena, bytes, &lease), PST_OK);
    return lease;
}

/* Leases `count` pieces of a unit each, and releases each behind an event of its own. */
static void release_behind(pst_arena *arena, pst_event *events, size_t count) {
    pst_lease leases[8];
    for (size_t i = 0; i < count; i++)
        leases[i] = acquire(arena, UNIT);
    for (size_t i = 0; i < count; i++)
        pst_arena_release(arena, &leases[i], &events[i]);
}

static void a_piece_in_use_is_given_with_its_event(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 2 * UNIT);
    pst_event event = {PST_PENDING};
    pst_lease lease = acquire(arena, 2 * UNIT);
    pst_arena_release(arena, &lease, &event);
    lease = acquire(arena, UNIT);
    assert_int_equal(lease.after_count, 1);
    assert_ptr_equal(lease.after[0], &event);
    assert_int_equal(stats_of(arena).event_waits, 1);
    pst_arena_destroy(arena);
}

static void a_piece_whose_event_is_done_is_given_without_it(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, UNIT);
    pst_event event = {PST_PENDING};
    pst_lease lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, &event);
    event.status = PST_OK;
    assert_int_equal(acquire(arena, UNIT).after_count, 0);
    assert_int_equal(stats_of(arena).event_waits, 0);
    pst_arena_destroy(arena);
}

static void a_free_piece_is_preferred_to_one_that_fits_better_but_waits(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 8 * UNIT);
    pst_event event = {PST_PENDING};
    pst_lease lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, &event);
    lease = acquire(arena, UNIT);
    assert_int_equal(lease.offset, UNIT);
    assert_int_equal(lease.after_count, 0);
    pst_arena_destroy(arena);
}

static void of_equal_pieces_that_wait_the_longest_released_is_given_first(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 3 * UNIT);
    pst_event events[3] = {{PST_PENDING}, {PST_PENDING}, {PST_PENDING}};
    pst_lease leases[3];
    for (size_t i = 0; i < 3; i++)
        leases[i] = acquire(arena, UNIT);
    const size_t order[] = {2, 0, 1};
    for (size_t i = 0; i < 3; i++)
        pst_arena_release(arena, &leases[order[i]], &events[order[i]]);
    for (size_t i = 0; i < 3; i++)
        assert_ptr_equal(acquire(arena, UNIT).after[0], &events[order[i]]);
    pst_arena_destroy(arena);
}

static void pieces_that_wait_stay_apart_and_merge_when_their_events_are_done(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 5 * UNIT);
    pst_event events[5] = {
        {PST_PENDING}, {PST_PENDING}, {PST_PENDING}, {PST_PENDING}, {PST_PENDING}};
    release_behind(arena, events, 5);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire(arena, 5 * UNIT, &lease), PST_ENOMEM); /* five events */
    for (size_t i = 0; i < 5; i++)
        events[i].status = PST_OK;
    lease = acquire(arena, 5 * UNIT);
    assert_int_equal(lease.after_count, 0);
    pst_arena_destroy(arena);
}

static void neighbours_that_wait_are_taken_together_before_the_arena_grows(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 6 * UNIT);
    pst_event events[5] = {
        {PST_PENDING}, {PST_PENDING}, {PST_PENDING}, {PST_PENDING}, {PST_PENDING}};
    release_behind(arena, events, 5);
    events[1].status = PST_OK;
    pst_lease lease = acquire(arena, 4 * UNIT);
    assert_int_equal(lease.bytes, 4 * UNIT);
    assert_int_equal(lease.after_count, 3);
    assert_int_equal(stats_of(arena).grows, 1);
    pst_arena_destroy(arena);
}

static void a_planned_piece_names_each_event_of_what_it_covers_once(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 8 * UNIT);
    pst_event shared = {PST_PENDING}, other = {PST_PENDING}, outside = {PST_PENDING};
    pst_event *behind[] = {&outside, &shared, &other, &shared};
    pst_lease leases[4];
    for (size_t i = 0; i < 4; i++)
        leases[i] = acquire(arena, 2 * UNIT);
    for (size_t i = 0; i < 4; i++)
        pst_arena_release(arena, &leases[i], behind[i]);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, 3 * UNIT, 4 * UNIT, &lease), PST_OK);
    assert_int_equal(lease.after_count, 2);
    assert_ptr_equal(lease.after[0], &shared);
    assert_ptr_equal(lease.after[1], &other);
    assert_int_equal(pst_arena_acquire_at(arena, 2 * UNIT, UNIT, &lease), PST_OK);
    assert_ptr_equal(lease.after[0], &shared);
    pst_arena_destroy(arena);
}

static void a_planned_piece_that_waits_for_too_many_events_is_busy(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 5 * UNIT);
    pst_event events[5] = {
        {PST_PENDING}, {PST_PENDING}, {PST_PENDING}, {PST_PENDING}, {PST_PENDING}};
    release_behind(arena, events, 5);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(arena, 0, 5 * UNIT, &lease), PST_EBUSY);
    assert_error_says(b->runtime, "more events");
    events[2].status = PST_OK;
    assert_int_equal(pst_arena_acquire_at(arena, 0, 5 * UNIT, &lease), PST_OK);
    assert_int_equal(lease.after_count, 4);
    pst_arena_destroy(arena);
}

static void a_lease_released_unused_still_waits_for_what_it_named(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, UNIT);
    pst_event event = {PST_PENDING};
    pst_lease lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, &event);
    lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, NULL);
    lease = acquire(arena, UNIT);
    assert_int_equal(lease.after_count, 1);
    assert_ptr_equal(lease.after[0], &event);
    pst_arena_destroy(arena);
}

static void a_new_event_takes_the_place_of_those_the_lease_named(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, UNIT);
    pst_event first = {PST_PENDING}, second = {PST_PENDING};
    pst_lease lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, &first);
    lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, &second);
    lease = acquire(arena, UNIT);
    assert_int_equal(lease.after_count, 1);
    assert_ptr_equal(lease.after[0], &second);
    pst_arena_destroy(arena);
}

/* As the event of a growing graph's task goes with the task's handle. */
static void an_event_may_go_when_no_piece_waits_for_it(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 2 * UNIT);
    pst_event event = {PST_PENDING}, failed = {PST_EDEVICE};
    pst_lease lease = acquire(arena, UNIT);
    assert_int_equal(pst_arena_forget(arena, &event), PST_OK);
    pst_arena_release(arena, &lease, &event);
    assert_int_equal(pst_arena_forget(arena, &event), PST_PENDING);
    lease = acquire(arena, 2 * UNIT); /* it names the event, too */
    assert_int_equal(pst_arena_forget(arena, &event), PST_PENDING);
    event.status = PST_OK;
    assert_int_equal(pst_arena_forget(arena, &event), PST_OK);
    event.status = PST_EDEVICE; /* as if it were gone: nobody asks */
    pst_arena_release(arena, &lease, NULL);
    assert_int_equal(stats_of(arena).quarantined, 0);
    lease = acquire(arena, 2 * UNIT);
    pst_arena_release(arena, &lease, &failed);
    assert_int_equal(pst_arena_forget(arena, &failed), PST_OK);
    assert_int_equal(stats_of(arena).quarantined, 2 * UNIT);
    pst_arena_destroy(arena);
}

static void a_piece_whose_event_fails_goes_to_quarantine(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, 2 * UNIT);
    pst_event late = {PST_PENDING}, at_once = {PST_EDEVICE};
    pst_lease one = acquire(arena, UNIT), other = acquire(arena, UNIT);
    pst_arena_release(arena, &one, &late);
    pst_arena_release(arena, &other, &at_once);
    assert_int_equal(stats_of(arena).quarantined, UNIT);
    late.status = PST_EDEVICE;
    pst_lease lease;
    assert_int_equal(pst_arena_acquire(arena, UNIT, &lease), PST_ENOMEM);
    assert_error_says(b->runtime, "1024 in quarantine");
    assert_int_equal(stats_of(arena).quarantined, 2 * UNIT);
    pst_arena_destroy(arena);
}

static void a_segment_is_not_freed_while_a_device_may_use_it(void **state) {
    bench *b = *state;
    pst_arena *arena = open_fixed(b, UNIT);
    pst_event event = {PST_PENDING};
    pst_lease lease = acquire(arena, UNIT);
    pst_arena_release(arena, &lease, &event);
    pst_arena_trim(arena);
    assert_int_equal(stats_of(arena).reserved, UNIT);
    event.status = PST_OK;
    pst_arena_trim(arena);
    assert_int_equal(stats_of(arena).reserved, 0);
    pst_arena_destroy(arena);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, bench_setup, bench_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_piece_in_use_is_given_with_its_event),
        TEST(a_piece_whose_event_is_done_is_given_without_it),
        TEST(a_free_piece_is_preferred_to_one_that_fits_better_but_waits),
        TEST(of_equal_pieces_that_wait_the_longest_released_is_given_first),
        TEST(pieces_that_wait_stay_apart_and_merge_when_their_events_are_done),
        TEST(neighbours_that_wait_are_taken_together_before_the_arena_grows),
        TEST(a_planned_piece_names_each_event_of_what_it_covers_once),
        TEST(a_planned_piece_that_waits_for_too_many_events_is_busy),
        TEST(a_lease_released_unused_still_waits_for_what_it_named),
        TEST(a_new_event_takes_the_place_of_those_the_lease_named),
        TEST(an_event_may_go_when_no_piece_waits_for_it),
        TEST(a_piece_whose_event_fails_goes_to_quarantine),
        TEST(a_segment_is_not_freed_while_a_device_may_use_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
