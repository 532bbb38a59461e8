/* Each allocation of metadata in turn fails: the call says so, and nothing is lost or half-made. */
#include "tests/mem/hand_device.h"

#define UNIT ((size_t)PST_ARENA_ALIGNMENT)

typedef pst_status (*scenario)(bench *b);

/* Runs the scenario with the first, second, ... allocation failing, until it gets through. */
static void fail_each_allocation(scenario run) {
    long failures = 0;
    for (pst_status status = PST_ENOMEM; status != PST_OK; failures++) {
        bench b;
        bench_open(&b);
        b.heap.fail_at = b.heap.allocs + failures + 1;
        status = run(&b);
        assert_true(status == PST_OK || status == PST_ENOMEM);
        if (status != PST_OK) assert_error_says(b.runtime, "no memory for");
        bench_close(&b);
    }
    assert_true(failures > 3);
}

/* Many pieces, so that tables grow; releases need no memory. */
static pst_status use_arena(bench *b) {
    pst_arena_options options = arena_options(b);
    pst_arena *arena;
    pst_lease leases[40];
    size_t count = 0;
    pst_status status = pst_arena_create(b->runtime, &options, &arena);
    if (status != PST_OK) {
        assert_null(arena);
        return status;
    }
    for (; count < 40 && status == PST_OK; count++)
        status = pst_arena_acquire(arena, UNIT, &leases[count]);
    if (status != PST_OK) assert_null(leases[--count].memory);
    assert_int_equal(stats_of(arena).leased, count * UNIT);
    long allocs = b->heap.allocs;
    for (size_t i = 0; i < count; i++)
        pst_arena_release(arena, &leases[i], NULL);
    assert_int_equal(b->heap.allocs, allocs);
    if (status == PST_OK) status = pst_arena_acquire_at(arena, 50 * UNIT, UNIT, &leases[0]);
    pst_arena_destroy(arena);
    return status;
}

static pst_status fill_buckets(pst_buckets *buckets) {
    pst_stream stream = {0};
    pst_slot slot;
    pst_bucket bucket;
    pst_status status = PST_OK;
    for (pst_dtype dtype = PST_FLOAT32; dtype < PST_DTYPE_COUNT && status == PST_OK; dtype++) {
        status = pst_buckets_slot(buckets, dtype, 8, &stream, &slot);
        if (status == PST_OK) status = pst_buckets_flush(buckets, dtype, &bucket);
        if (status == PST_OK) pst_buckets_retire(buckets, bucket.id, NULL);
    }
    return status;
}

static pst_status use_buckets(bench *b) {
    pst_arena_options arena_given = arena_options(b);
    pst_arena *arena;
    pst_status status = pst_arena_create(b->runtime, &arena_given, &arena);
    if (status != PST_OK) return status;
    pst_buckets_options options = {
        .size = sizeof options, .arena = arena, .ranks = 2, .chunk_bytes = UNIT};
    pst_buckets *buckets;
    status = pst_buckets_create(b->runtime, &options, &buckets);
    if (status == PST_OK)
        status = fill_buckets(buckets);
    else
        assert_null(buckets);
    pst_buckets_destroy(buckets);
    assert_int_equal(stats_of(arena).leased, 0);
    assert_int_equal(stats_of(arena).quarantined, 0);
    pst_arena_destroy(arena);
    return status;
}

static void an_arena_survives_each_failed_allocation(void **state) {
    (void)state;
    fail_each_allocation(use_arena);
}

static void buckets_survive_each_failed_allocation(void **state) {
    (void)state;
    fail_each_allocation(use_buckets);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_arena_survives_each_failed_allocation),
        cmocka_unit_test(buckets_survive_each_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
