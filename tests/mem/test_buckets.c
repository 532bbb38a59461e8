#include "tests/mem/hand_device.h"

#define UNIT  ((size_t)PST_ARENA_ALIGNMENT)
#define RANKS 3
#define CHUNK 1024

typedef struct fixture {
    bench bench;
    pst_arena *arena;
    pst_buckets *buckets;
    pst_stream stream;
} fixture;

static void open_with(fixture *f, size_t limit) {
    *f = (fixture){0};
    bench_open(&f->bench);
    pst_arena_options given = arena_options(&f->bench);
    given.limit_bytes = limit;
    assert_int_equal(pst_arena_create(f->bench.runtime, &given, &f->arena), PST_OK);
    pst_buckets_options options = {
        .size = sizeof options, .arena = f->arena, .ranks = RANKS, .chunk_bytes = CHUNK};
    assert_int_equal(pst_buckets_create(f->bench.runtime, &options, &f->buckets), PST_OK);
}

static void open_fixture(fixture *f) {
    open_with(f, 0);
}

static void close_fixture(fixture *f) {
    pst_buckets_destroy(f->buckets);
    pst_arena_destroy(f->arena);
    bench_close(&f->bench);
}

static pst_slot slot(fixture *f, pst_dtype dtype, size_t bytes) {
    pst_slot taken;
    assert_int_equal(pst_buckets_slot(f->buckets, dtype, bytes, &f->stream, &taken), PST_OK);
    return taken;
}

static pst_bucket flush(fixture *f, pst_dtype dtype) {
    pst_bucket bucket;
    assert_int_equal(pst_buckets_flush(f->buckets, dtype, &bucket), PST_OK);
    return bucket;
}

/* Takes a slot, flushes and retires the bucket behind `event`; returns where it was. */
static void *use_once(fixture *f, pst_event *event) {
    (void)slot(f, PST_FLOAT32, 4);
    pst_bucket bucket = flush(f, PST_FLOAT32);
    pst_buckets_retire(f->buckets, bucket.id, event);
    return bucket.memory;
}

static pst_buckets_stats bucket_stats(const fixture *f) {
    pst_buckets_stats stats = {.size = sizeof stats};
    pst_buckets_get_stats(f->buckets, &stats);
    return stats;
}

static void slots_follow_one_another_aligned_in_each_ranks_chunk(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_slot one = slot(&f, PST_FLOAT32, 100), other = slot(&f, PST_FLOAT32, 260);
    assert_int_equal(one.offset, 0);
    assert_int_equal(one.padded_bytes, 128);
    assert_int_equal(other.offset, 128);
    assert_int_equal(other.padded_bytes, 384);
    assert_int_equal(other.bytes, 260);
    assert_int_equal(other.stride, CHUNK);
    assert_ptr_equal(other.memory, (char *)one.memory + 128);
    assert_int_equal((uintptr_t)one.memory % 128, 0);
    pst_bucket bucket = flush(&f, PST_FLOAT32);
    assert_ptr_equal(bucket.memory, one.memory);
    assert_int_equal(bucket.stride, CHUNK);
    assert_int_equal(bucket.used_bytes, 512);
    assert_int_equal(bucket.slot_count, 2);
    assert_int_equal(bucket.dtype, PST_FLOAT32);
    close_fixture(&f);
}

static void the_padding_is_zero_on_all_ranks_and_nothing_else_is(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    const size_t sizes[] = {4, 124, 128, 132, 300};
    size_t used = 0;
    unsigned char *memory = NULL;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        pst_slot taken = slot(&f, PST_FLOAT32, sizes[i]);
        if (memory == NULL) memory = taken.memory;
        for (size_t rank = 0; rank < RANKS; rank++) {
            for (size_t at = 0; at < taken.padded_bytes; at++) {
                unsigned char expected = at < sizes[i] ? POISON : 0;
                assert_int_equal(memory[rank * CHUNK + used + at], expected);
            }
        }
        used += taken.padded_bytes;
    }
    for (size_t rank = 0; rank < RANKS; rank++)
        for (size_t at = used; at < CHUNK; at++)
            assert_int_equal(memory[rank * CHUNK + at], POISON);
    assert_int_equal(f.bench.hand.fill_launches, 4); /* one a slot, none where nothing is padded */
    close_fixture(&f);
}

static void each_dtype_has_buckets_of_its_own(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_slot wide = slot(&f, PST_FLOAT32, 8), narrow = slot(&f, PST_BFLOAT16, 8);
    assert_int_equal(narrow.offset, 0);
    assert_ptr_not_equal(wide.memory, narrow.memory);
    pst_bucket bucket = flush(&f, PST_BFLOAT16);
    assert_ptr_equal(bucket.memory, narrow.memory);
    assert_int_equal(bucket.dtype, PST_BFLOAT16);
    assert_int_equal(slot(&f, PST_FLOAT32, 8).offset, 128);
    assert_int_equal(bucket_stats(&f).extra, 0);
    close_fixture(&f);
}

static void a_slot_that_does_not_fit_is_busy_until_the_bucket_is_flushed(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    (void)slot(&f, PST_FLOAT32, 900);
    pst_slot taken;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 4, &f.stream, &taken), PST_EBUSY);
    pst_bucket bucket = flush(&f, PST_FLOAT32);
    assert_int_equal(bucket.used_bytes, CHUNK);
    assert_int_equal(bucket.slot_count, 1);
    assert_int_equal(slot(&f, PST_FLOAT32, 4).offset, 0);
    close_fixture(&f);
}

static void while_one_bucket_is_reduced_the_other_fills(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    void *first = slot(&f, PST_FLOAT32, 4).memory;
    pst_bucket reducing = flush(&f, PST_FLOAT32);
    void *second = slot(&f, PST_FLOAT32, 4).memory;
    assert_ptr_not_equal(second, first);
    pst_buckets_retire(f.buckets, reducing.id, NULL);
    reducing = flush(&f, PST_FLOAT32);
    assert_ptr_equal(slot(&f, PST_FLOAT32, 4).memory, first);
    pst_buckets_retire(f.buckets, reducing.id, NULL);
    assert_int_equal(bucket_stats(&f).buckets, 2);
    assert_int_equal(bucket_stats(&f).flushes, 2);
    assert_int_equal(bucket_stats(&f).extra, 0);
    (void)flush(&f, PST_FLOAT32);
    close_fixture(&f);
}

static void with_both_in_use_an_extra_bucket_fills_and_goes_back_when_retired(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_bucket buckets[3];
    for (size_t i = 0; i < 3; i++) {
        (void)slot(&f, PST_FLOAT32, 4);
        buckets[i] = flush(&f, PST_FLOAT32);
    }
    assert_int_equal(bucket_stats(&f).extra, 1);
    assert_int_equal(bucket_stats(&f).buckets, 3);
    for (size_t i = 0; i < 3; i++)
        pst_buckets_retire(f.buckets, buckets[i].id, NULL);
    assert_int_equal(bucket_stats(&f).buckets, 2);
    assert_int_equal(bucket_stats(&f).bytes, stats_of(f.arena).leased);
    close_fixture(&f);
}

static void a_slot_larger_than_a_chunk_gets_a_bucket_of_its_own_size(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    (void)slot(&f, PST_FLOAT32, 4);
    pst_slot large;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 5000, &f.stream, &large), PST_EBUSY);
    pst_bucket small = flush(&f, PST_FLOAT32);
    pst_buckets_retire(f.buckets, small.id, NULL);
    large = slot(&f, PST_FLOAT32, 5000);
    assert_int_equal(large.stride, 5120);
    memset(large.memory, 1, 3 * large.stride);
    pst_bucket bucket = flush(&f, PST_FLOAT32);
    assert_int_equal(bucket.used_bytes, 5120);
    assert_int_equal(bucket_stats(&f).own_size, 1);
    pst_buckets_retire(f.buckets, bucket.id, NULL);
    assert_int_equal(bucket_stats(&f).buckets, 1);
    assert_int_equal(stats_of(f.arena).leased, RANKS * CHUNK);
    close_fixture(&f);
}

static void filling_waits_on_the_stream_for_the_reduction_that_used_the_memory(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_event events[2] = {{PST_PENDING}, {PST_PENDING}};
    void *first = use_once(&f, &events[0]);
    void *second = use_once(&f, &events[1]); /* rather than wait */
    assert_ptr_not_equal(first, second);
    assert_int_equal(f.stream.wait_count, 0);
    assert_ptr_equal(slot(&f, PST_FLOAT32, 4).memory, first); /* rather than have a third one */
    assert_int_equal(f.stream.wait_count, 1);
    assert_ptr_equal(f.stream.waits[0], &events[0]);
    (void)slot(&f, PST_FLOAT32, 4); /* comes behind the first one */
    assert_int_equal(f.stream.wait_count, 1);
    (void)flush(&f, PST_FLOAT32);
    close_fixture(&f);
}

static void
where_the_stream_is_its_worker_a_slot_is_pending_until_the_memory_is_free(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    f.bench.hand.is_worker = 1;
    pst_event events[2] = {{PST_PENDING}, {PST_PENDING}};
    void *first = use_once(&f, &events[0]);
    (void)use_once(&f, &events[1]);
    pst_slot taken;
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 4, &f.stream, &taken),
                         PST_PENDING);
    pst_bucket bucket;
    assert_int_equal(pst_buckets_flush(f.buckets, PST_FLOAT32, &bucket), PST_ESTATE);
    events[0].status = PST_OK;
    assert_ptr_equal(slot(&f, PST_FLOAT32, 4).memory, first);
    assert_int_equal(bucket_stats(&f).buckets, 2);
    close_fixture(&f);
}

static void without_memory_for_a_second_bucket_the_first_is_waited_for(void **state) {
    (void)state;
    fixture f;
    open_with(&f, RANKS * CHUNK);
    pst_event event = {PST_PENDING};
    void *first = use_once(&f, &event);
    assert_ptr_equal(slot(&f, PST_FLOAT32, 4).memory, first);
    assert_ptr_equal(f.stream.waits[0], &event);
    (void)flush(&f, PST_FLOAT32);
    pst_slot taken;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 4, &f.stream, &taken), PST_ENOMEM);
    assert_error_says(f.bench.runtime, "arena gather: no room");
    close_fixture(&f);
}

static void trimming_gives_retired_buckets_back_behind_their_events(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_event event = {PST_PENDING};
    (void)use_once(&f, &event);
    (void)slot(&f, PST_BFLOAT16, 4); /* stays */
    pst_buckets_trim(f.buckets);
    assert_int_equal(bucket_stats(&f).buckets, 1);
    assert_int_equal(stats_of(f.arena).leased, RANKS * CHUNK);
    pst_lease lease;
    assert_int_equal(pst_arena_acquire_at(f.arena, 0, RANKS * CHUNK, &lease), PST_OK);
    assert_int_equal(lease.after_count, 1);
    assert_ptr_equal(lease.after[0], &event);
    pst_arena_release(f.arena, &lease, NULL);
    pst_bucket bucket = flush(&f, PST_BFLOAT16);
    pst_buckets_retire(f.buckets, bucket.id, NULL);
    close_fixture(&f);
}

static void destroying_quarantines_what_may_still_be_written(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    (void)use_once(&f, NULL);
    (void)slot(&f, PST_FLOAT32, 4);
    (void)flush(&f, PST_FLOAT32);
    pst_buckets_destroy(f.buckets);
    assert_int_equal(stats_of(f.arena).quarantined, RANKS * CHUNK);
    assert_int_equal(stats_of(f.arena).leased, 0);
    f.buckets = NULL;
    close_fixture(&f);
}

static void a_slot_whose_padding_fails_is_not_taken(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    f.bench.hand.fill_fails = 1;
    pst_slot taken;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 4, &f.stream, &taken), PST_EDEVICE);
    assert_error_says(f.bench.runtime, "device hand could not zero");
    f.bench.hand.fill_fails = 0;
    assert_int_equal(slot(&f, PST_FLOAT32, 4).offset, 0);
    assert_int_equal(flush(&f, PST_FLOAT32).slot_count, 1);
    close_fixture(&f);
}

static void a_slot_behind_a_failed_reduction_fails(void **state) {
    (void)state;
    fixture f;
    open_with(&f, RANKS * CHUNK);
    pst_event event = {PST_EDEVICE};
    (void)use_once(&f, &event);
    pst_slot taken;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 4, &f.stream, &taken), PST_EDEVICE);
    assert_error_says(f.bench.runtime, "bucket 1 of float32");
    close_fixture(&f);
}

static void on_the_host_device_the_padding_is_zero_too(void **state) {
    (void)state;
    bench b;
    bench_open(&b);
    pst_arena_options given = {.size = sizeof given, .name = "host"};
    pst_arena *arena;
    assert_int_equal(pst_arena_create(b.runtime, &given, &arena), PST_OK);
    pst_buckets_options options = {
        .size = sizeof options, .arena = arena, .ranks = RANKS, .chunk_bytes = CHUNK};
    pst_buckets *buckets;
    assert_int_equal(pst_buckets_create(b.runtime, &options, &buckets), PST_OK);
    pst_device *host = pst_runtime_host(b.runtime);
    pst_stream *stream;
    assert_int_equal(host->ops->stream_wrap(host, NULL, &stream), PST_OK);
    pst_lease poisoned;
    assert_int_equal(pst_arena_acquire(arena, RANKS * CHUNK, &poisoned), PST_OK);
    memset(poisoned.memory, POISON, poisoned.bytes);
    pst_arena_release(arena, &poisoned, NULL);
    pst_slot taken;
    assert_int_equal(pst_buckets_slot(buckets, PST_BFLOAT16, 30, stream, &taken), PST_OK);
    assert_ptr_equal(taken.memory, poisoned.memory);
    const unsigned char *memory = taken.memory;
    for (size_t rank = 0; rank < RANKS; rank++)
        for (size_t at = 0; at < 128; at++)
            assert_int_equal(memory[rank * CHUNK + at], at < 30 ? POISON : 0);
    pst_bucket bucket;
    assert_int_equal(pst_buckets_flush(buckets, PST_BFLOAT16, &bucket), PST_OK);
    pst_buckets_retire(buckets, bucket.id, NULL);
    host->ops->stream_destroy(host, stream);
    pst_buckets_destroy(buckets);
    pst_arena_destroy(arena);
    bench_close(&b);
}

static void what_is_no_slot_is_refused(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_slot taken;
    pst_stream *stream = &f.stream;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 6, stream, &taken), PST_EINVAL);
    assert_error_says(f.bench.runtime, "6 bytes");
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 0, stream, &taken), PST_EINVAL);
    assert_int_equal(pst_buckets_slot(f.buckets, PST_DTYPE_COUNT, 8, stream, &taken), PST_EINVAL);
    assert_int_equal(pst_buckets_slot(f.buckets, PST_UINT8, SIZE_MAX, stream, &taken), PST_EINVAL);
    assert_int_equal(pst_buckets_slot(f.buckets, PST_UINT8, SIZE_MAX / 2, stream, &taken),
                     PST_EINVAL);
    assert_int_equal(stats_of(f.arena).leased, 0);
    close_fixture(&f);
}

static void flushing_nothing_and_retiring_twice_are_reported(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_bucket bucket;
    assert_int_equal(pst_buckets_flush(f.buckets, PST_BFLOAT16, &bucket), PST_ESTATE);
    assert_error_says(f.bench.runtime, "bfloat16");
    (void)slot(&f, PST_FLOAT32, 4);
    bucket = flush(&f, PST_FLOAT32);
    pst_buckets_retire(f.buckets, bucket.id, NULL);
    pst_buckets_retire(f.buckets, bucket.id, NULL);
    assert_error_says(f.bench.runtime, "bucket 1");
    assert_int_equal(bucket_stats(&f).buckets, 1);
    close_fixture(&f);
}

static void options_that_make_no_sense_are_refused(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    const pst_buckets_options good = {
        .size = sizeof good, .arena = f.arena, .ranks = 1, .chunk_bytes = 8};
    pst_buckets_options bad[7];
    for (size_t i = 0; i < 7; i++)
        bad[i] = good;
    bad[0].size = 0;
    bad[1].arena = NULL;
    bad[2].ranks = 0;
    bad[3].chunk_bytes = 0;
    bad[4].alignment = 96;
    bad[5].ranks = SIZE_MAX / 64;
    bad[6].ranks = (size_t)INT32_MAX + 1; /* no communicator has so many */
    for (size_t i = 0; i < 7; i++) {
        pst_buckets *buckets = f.buckets;
        assert_int_equal(pst_buckets_create(f.bench.runtime, &bad[i], &buckets), PST_EINVAL);
        assert_null(buckets);
    }
    close_fixture(&f);
}

typedef struct refills {
    uint64_t ids[8];
    size_t count;
} refills;

static pst_status note_refill(void *context, uint64_t id, pst_stream *stream) {
    refills *noted = context;
    (void)stream;
    noted->ids[noted->count++] = id;
    return PST_OK;
}

static void open_fixed(fixture *f, refills *noted) {
    open_fixture(f);
    pst_buckets_destroy(f->buckets);
    const pst_buckets_options options = {.size = sizeof options,
                                         .arena = f->arena,
                                         .ranks = RANKS,
                                         .chunk_bytes = CHUNK,
                                         .fixed = 1,
                                         .refill = note_refill,
                                         .refill_context = noted};
    assert_int_equal(pst_buckets_create(f->bench.runtime, &options, &f->buckets), PST_OK);
}

static void fixed_buckets_take_turns_and_wait_on_the_stream(void **state) {
    (void)state;
    fixture f;
    refills noted = {.count = 0};
    open_fixed(&f, &noted);
    pst_event events[2] = {{PST_PENDING}, {PST_PENDING}};
    void *first = use_once(&f, NULL);
    void *second = use_once(&f, &events[0]); /* though the first one is free at once */
    assert_ptr_not_equal(first, second);
    assert_ptr_equal(use_once(&f, &events[1]), first);
    assert_int_equal(f.stream.wait_count, 0);
    assert_ptr_equal(slot(&f, PST_FLOAT32, 4).memory, second);
    assert_ptr_equal(f.stream.waits[0], &events[0]);
    assert_int_equal(noted.count, 4); /* once each time one begins to fill */
    (void)slot(&f, PST_FLOAT32, 4);
    assert_int_equal(noted.count, 4);
    (void)flush(&f, PST_FLOAT32);
    (void)slot(&f, PST_FLOAT32, 4);
    (void)flush(&f, PST_FLOAT32);
    pst_slot none;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, 4, &f.stream, &none), PST_PENDING);
    assert_int_equal(bucket_stats(&f).extra, 0);
    close_fixture(&f);
}

static void a_whole_bucket_is_taken_beside_the_one_that_fills(void **state) {
    (void)state;
    fixture f;
    refills noted = {.count = 0};
    open_fixed(&f, &noted);
    const pst_slot filling = slot(&f, PST_FLOAT32, 4);
    pst_bucket whole;
    pst_event reduced = {PST_PENDING};
    assert_int_equal(pst_buckets_take(f.buckets, PST_FLOAT32, CHUNK, &f.stream, &whole), PST_OK);
    assert_ptr_not_equal(whole.memory, filling.memory);
    assert_int_equal(whole.stride, CHUNK);
    assert_int_equal(noted.count, 2);
    pst_bucket none;
    assert_int_equal(pst_buckets_take(f.buckets, PST_FLOAT32, CHUNK, &f.stream, &none),
                     PST_PENDING);
    assert_int_equal(pst_buckets_take(f.buckets, PST_FLOAT32, CHUNK + 4, &f.stream, &none),
                     PST_EINVAL);
    pst_buckets_retire(f.buckets, whole.id, &reduced);
    assert_int_equal(pst_buckets_take(f.buckets, PST_FLOAT32, 4, &f.stream, &none), PST_OK);
    assert_int_equal(none.id, whole.id);
    assert_ptr_equal(f.stream.waits[f.stream.wait_count - 1], &reduced);
    assert_int_equal(flush(&f, PST_FLOAT32).used_bytes, filling.padded_bytes); /* goes on filling */
    close_fixture(&f);
}

static void fixed_buckets_keep_their_memory_and_refuse_what_is_too_large(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_buckets_destroy(f.buckets);
    const pst_buckets_options options = {
        .size = sizeof options, .arena = f.arena, .ranks = RANKS, .chunk_bytes = CHUNK, .fixed = 1};
    assert_int_equal(pst_buckets_create(f.bench.runtime, &options, &f.buckets), PST_OK);
    pst_slot none;
    assert_int_equal(pst_buckets_slot(f.buckets, PST_FLOAT32, CHUNK + 4, &f.stream, &none),
                     PST_EINVAL);
    (void)use_once(&f, NULL);
    pst_buckets_trim(f.buckets);
    assert_int_equal(bucket_stats(&f).buckets, 2);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slots_follow_one_another_aligned_in_each_ranks_chunk),
        cmocka_unit_test(the_padding_is_zero_on_all_ranks_and_nothing_else_is),
        cmocka_unit_test(each_dtype_has_buckets_of_its_own),
        cmocka_unit_test(a_slot_that_does_not_fit_is_busy_until_the_bucket_is_flushed),
        cmocka_unit_test(while_one_bucket_is_reduced_the_other_fills),
        cmocka_unit_test(with_both_in_use_an_extra_bucket_fills_and_goes_back_when_retired),
        cmocka_unit_test(a_slot_larger_than_a_chunk_gets_a_bucket_of_its_own_size),
        cmocka_unit_test(filling_waits_on_the_stream_for_the_reduction_that_used_the_memory),
        cmocka_unit_test(where_the_stream_is_its_worker_a_slot_is_pending_until_the_memory_is_free),
        cmocka_unit_test(without_memory_for_a_second_bucket_the_first_is_waited_for),
        cmocka_unit_test(trimming_gives_retired_buckets_back_behind_their_events),
        cmocka_unit_test(destroying_quarantines_what_may_still_be_written),
        cmocka_unit_test(a_slot_whose_padding_fails_is_not_taken),
        cmocka_unit_test(a_slot_behind_a_failed_reduction_fails),
        cmocka_unit_test(on_the_host_device_the_padding_is_zero_too),
        cmocka_unit_test(what_is_no_slot_is_refused),
        cmocka_unit_test(flushing_nothing_and_retiring_twice_are_reported),
        cmocka_unit_test(options_that_make_no_sense_are_refused),
        cmocka_unit_test(fixed_buckets_take_turns_and_wait_on_the_stream),
        cmocka_unit_test(a_whole_bucket_is_taken_beside_the_one_that_fills),
        cmocka_unit_test(fixed_buckets_keep_their_memory_and_refuse_what_is_too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
