#include "tests/mem/hand_device.h"
#include "tests/mem/random.h"

#define UNIT   ((size_t)PST_ARENA_ALIGNMENT)
#define SMALL  6 /* intervals whose orders are all tried */
#define LAYERS 36

static int alive_together(const pst_interval *a, const pst_interval *b) {
    return a->first <= b->last && b->first <= a->last;
}

static size_t rounded(size_t bytes) {
    return (bytes + UNIT - 1) / UNIT * UNIT;
}

static void assert_no_overlap(const pst_interval *intervals, size_t count, size_t peak) {
    for (size_t i = 0; i < count; i++) {
        const pst_interval *a = &intervals[i];
        assert_int_equal(a->offset % UNIT, 0);
        assert_true(a->offset + a->bytes <= peak);
        for (size_t j = 0; j < i; j++) {
            const pst_interval *b = &intervals[j];
            if (a->bytes == 0 || b->bytes == 0 || !alive_together(a, b)) continue;
            assert_true(a->offset + a->bytes <= b->offset || b->offset + b->bytes <= a->offset);
        }
    }
}

static size_t bytes_alive(const pst_interval *intervals, size_t count, uint64_t step) {
    size_t sum = 0;
    for (size_t i = 0; i < count; i++)
        if (intervals[i].first <= step && step <= intervals[i].last)
            sum += rounded(intervals[i].bytes);
    return sum;
}

/* The lowest offset at which `next` fits beside the ones placed before it. */
static size_t lowest_fit(const pst_interval *const *placed, size_t count,
                         const pst_interval *next) {
    size_t offset = 0;
    for (size_t i = 0; i < count; i++) {
        const pst_interval *other = placed[i];
        size_t end = other->offset + rounded(other->bytes);
        if (other->bytes == 0 || !alive_together(other, next)) continue;
        if (other->offset < offset + rounded(next->bytes) && offset < end) {
            offset = end;
            i = SIZE_MAX; /* look at all of them again */
        }
    }
    return offset;
}

/* The least peak over all orders of placing each at its lowest fit; one of them is optimal. */
static size_t least_peak(pst_interval *intervals, const pst_interval **placed, size_t placed_count,
                         size_t count, unsigned used, size_t peak) {
    if (placed_count == count) return peak;
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        if ((used & (1u << i)) != 0) continue;
        pst_interval *next = &intervals[i];
        next->offset = lowest_fit(placed, placed_count, next);
        size_t end = next->offset + rounded(next->bytes);
        placed[placed_count] = next;
        size_t found = least_peak(intervals, placed, placed_count + 1, count, used | (1u << i),
                                  end > peak ? end : peak);
        if (found < least) least = found;
    }
    return least;
}

static pst_interval random_interval(random_source *source) {
    uint64_t first = random_below(source, 8);
    return (pst_interval){first, first + random_below(source, 4), random_below(source, 9 * UNIT),
                          SIZE_MAX};
}

static void random_inputs_do_not_overlap_and_come_near_the_best_possible_peak(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    random_source source = random_open(__func__);
    double ratios = 0;
    const size_t rounds = 1000;
    for (size_t round = 0; round < rounds; round++) {
        pst_interval intervals[SMALL], copy[SMALL];
        size_t count = 1 + random_below(&source, SMALL), bound = 0;
        for (size_t i = 0; i < count; i++)
            intervals[i] = copy[i] = random_interval(&source);
        pst_plan_result result;
        assert_int_equal(pst_plan_offsets(b.runtime, intervals, count, &result), PST_OK);
        assert_no_overlap(intervals, count, result.peak);
        for (uint64_t step = 0; step < 12; step++) {
            size_t alive = bytes_alive(intervals, count, step);
            if (alive > bound) bound = alive;
        }
        assert_int_equal(result.lower_bound, bound);
        const pst_interval *placed[SMALL];
        size_t least = least_peak(copy, placed, 0, count, 0, 0);
        assert_true(bound <= least && least <= result.peak);
        ratios += least == 0 ? 1 : (double)result.peak / (double)least;
    }
    assert_true(ratios / (double)rounds < 1.05);
    bench_close(&b);
}

static void larger_random_inputs_do_not_overlap(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    random_source source = random_open(__func__);
    for (size_t round = 0; round < 50; round++) {
        pst_interval intervals[200];
        size_t count = random_below(&source, 200);
        for (size_t i = 0; i < count; i++) {
            uint64_t first = random_below(&source, 100);
            size_t bytes = random_below(&source, 1u << random_below(&source, 20));
            intervals[i] = (pst_interval){first, first + random_below(&source, 40), bytes, 1};
        }
        pst_plan_result result;
        assert_int_equal(pst_plan_offsets(b.runtime, intervals, count, &result), PST_OK);
        assert_no_overlap(intervals, count, result.peak);
        assert_true(result.peak >= result.lower_bound);
    }
    bench_close(&b);
}

static void equal_inputs_give_equal_offsets(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    random_source source = random_open(__func__);
    pst_interval one[100], other[100];
    for (size_t i = 0; i < 100; i++) {
        one[i] = random_interval(&source);
        one[i].bytes = (1 + random_below(&source, 3)) * UNIT; /* many ties */
        other[i] = one[i];
        other[i].offset = random_below(&source, 1000); /* not read */
    }
    pst_plan_result first, second;
    assert_int_equal(pst_plan_offsets(b.runtime, one, 100, &first), PST_OK);
    assert_int_equal(pst_plan_offsets(b.runtime, other, 100, &second), PST_OK);
    assert_memory_equal(one, other, sizeof one);
    assert_int_equal(first.peak, second.peak);
    bench_close(&b);
}

/* Groups of a model in a forward and a backward: each is gathered `window` uses ahead of its own.
 */
static size_t layer_intervals(pst_interval *intervals, size_t window, size_t embedding,
                              size_t layer) {
    for (size_t use = 0; use < 2 * LAYERS; use++) {
        size_t group = use < LAYERS ? use : 2 * LAYERS - 1 - use;
        int is_end = group == 0 || group == LAYERS - 1;
        intervals[use] = (pst_interval){use >= window ? use - window : 0, use,
                                        is_end ? embedding : layer + group % 3 * UNIT, 0};
    }
    return 2 * LAYERS;
}

static void a_window_of_layers_needs_little_more_than_its_lower_bound(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    const size_t embeddings[] = {100 * UNIT, 1000 * UNIT, 5000 * UNIT};
    for (size_t window = 0; window <= 6; window++) {
        for (size_t i = 0; i < 3; i++) {
            pst_interval intervals[2 * LAYERS];
            size_t count = layer_intervals(intervals, window, embeddings[i], 870 * UNIT);
            pst_plan_result result;
            assert_int_equal(pst_plan_offsets(b.runtime, intervals, count, &result), PST_OK);
            assert_no_overlap(intervals, count, result.peak);
            if ((double)result.peak > 1.1 * (double)result.lower_bound)
                fail_msg("window %zu, embedding %zu: peak %zu, lower bound %zu", window,
                         embeddings[i], result.peak, result.lower_bound);
        }
    }
    bench_close(&b);
}

static void intervals_that_follow_one_another_share_their_bytes(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_interval intervals[] = {{0, 1, 3 * UNIT, 7}, {2, 2, 2 * UNIT, 7}, {3, 9, 3 * UNIT, 7}};
    pst_plan_result result;
    assert_int_equal(pst_plan_offsets(b.runtime, intervals, 3, &result), PST_OK);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(intervals[i].offset, 0);
    assert_int_equal(result.peak, 3 * UNIT);
    bench_close(&b);
}

static void zero_bytes_need_nothing_and_lie_at_offset_zero(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_interval intervals[] = {{0, 9, 100, 7}, {0, 9, 0, 7}};
    pst_plan_result result;
    assert_int_equal(pst_plan_offsets(b.runtime, intervals, 2, &result), PST_OK);
    assert_int_equal(intervals[1].offset, 0);
    assert_int_equal(result.peak, UNIT);
    bench_close(&b);
}

static void no_intervals_need_nothing(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_plan_result result = {1, 1};
    assert_int_equal(pst_plan_offsets(b.runtime, NULL, 0, &result), PST_OK);
    assert_int_equal(result.peak, 0);
    assert_int_equal(result.lower_bound, 0);
    bench_close(&b);
}

static void an_interval_that_ends_before_it_begins_is_named(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_interval intervals[] = {{0, 1, 8, 7}, {5, 4, 8, 7}};
    pst_plan_result result;
    assert_int_equal(pst_plan_offsets(b.runtime, intervals, 2, &result), PST_EINVAL);
    assert_error_says(b.runtime, "interval 1");
    assert_int_equal(intervals[0].offset, 7);
    bench_close(&b);
}

static void sizes_that_overflow_are_refused(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_plan_result result;
    pst_interval alone[] = {{0, 1, SIZE_MAX, 0}};
    assert_int_equal(pst_plan_offsets(b.runtime, alone, 1, &result), PST_EINVAL);
    pst_interval together[] = {{0, 1, SIZE_MAX / 4, 0}, {0, 1, SIZE_MAX / 4, 0}};
    assert_int_equal(pst_plan_offsets(b.runtime, together, 2, &result), PST_EINVAL);
    assert_error_says(b.runtime, "interval 1");
    assert_int_equal(pst_plan_offsets(b.runtime, together, SIZE_MAX / 8, &result), PST_EINVAL);
    bench_close(&b);
}

static void without_memory_it_fails_and_leaves_nothing(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_interval intervals[] = {{0, 1, 8, 7}, {0, 1, 8, 7}};
    pst_plan_result result;
    long live = b.heap.live, failures = 0;
    pst_status status;
    do {
        b.heap.fail_at = b.heap.allocs + failures + 1;
        status = pst_plan_offsets(b.runtime, intervals, 2, &result);
        assert_int_equal(b.heap.live, live);
        if (status == PST_OK) break;
        assert_int_equal(status, PST_ENOMEM);
        assert_int_equal(intervals[0].offset, 7);
        failures++;
    } while (failures < 100);
    assert_true(failures > 0);
    assert_int_equal(status, PST_OK);
    bench_close(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_inputs_do_not_overlap_and_come_near_the_best_possible_peak),
        cmocka_unit_test(larger_random_inputs_do_not_overlap),
        cmocka_unit_test(equal_inputs_give_equal_offsets),
        cmocka_unit_test(a_window_of_layers_needs_little_more_than_its_lower_bound),
        cmocka_unit_test(intervals_that_follow_one_another_share_their_bytes),
        cmocka_unit_test(zero_bytes_need_nothing_and_lie_at_offset_zero),
        cmocka_unit_test(no_intervals_need_nothing),
        cmocka_unit_test(an_interval_that_ends_before_it_begins_is_named),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(without_memory_it_fails_and_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
