#include "tracing/ring.h"

#include "tests/base/counting_heap.h"
#include "tests/cmocka_all.h"

#include <pthread.h>

enum { CAPACITY = 8 };

typedef struct fixture {
    counting_heap counts;
    pst__heap heap;
    pst__ring ring;
    pst__record out[2 * CAPACITY];
} fixture;

static int open_ring(void **state) {
    static fixture fixture;
    fixture.counts = (counting_heap){0};
    fixture.heap = counting_heap_open(&fixture.counts);
    fixture.ring = (pst__ring){0};
    *state = &fixture;
    return pst__ring_create(&fixture.heap, &fixture.ring, CAPACITY);
}

static int close_ring(void **state) {
    fixture *fixture = *state;
    pst__ring_destroy(&fixture->heap, &fixture->ring);
    return fixture->counts.live_bytes != 0;
}

/* A record all of whose fields follow from `n`, so that a mixture of two is noticed. */
static pst__record record_of(uint64_t n) {
    static const char names[256];
    return (pst__record){&names[n % 256], &names[n % 251], n, n * 3, n * 5, n * 7, n * 11};
}

static int is_record_of(const pst__record *record, uint64_t n) {
    pst__record wanted = record_of(n);
    return record->name == wanted.name && record->path == wanted.path && record->begin == n &&
           record->end == wanted.end && record->ticket == wanted.ticket &&
           record->bytes == wanted.bytes && record->kind == wanted.kind;
}

static void push_many(pst__ring *ring, uint64_t from, uint64_t to) {
    for (uint64_t n = from; n < to; ++n) {
        pst__record record = record_of(n);
        pst__ring_push(ring, &record);
    }
}

static void records_come_back_whole_and_in_order(void **state) {
    fixture *fixture = *state;
    push_many(&fixture->ring, 1, 6);
    assert_int_equal(pst__ring_copy(&fixture->ring, fixture->out, CAPACITY), 5);
    for (uint64_t i = 0; i < 5; ++i)
        assert_true(is_record_of(&fixture->out[i], i + 1));
}

static void a_full_ring_keeps_the_newest_and_counts_the_rest(void **state) {
    fixture *fixture = *state;
    uint64_t overwritten;
    push_many(&fixture->ring, 0, 100);
    assert_int_equal(pst__ring_count(&fixture->ring, &overwritten), 100);
    assert_int_equal(overwritten, 100 - (CAPACITY - 1));
    size_t count = pst__ring_copy(&fixture->ring, fixture->out, 2 * CAPACITY);
    assert_int_equal(count, CAPACITY - 1);
    for (uint64_t i = 0; i < count; ++i)
        assert_true(is_record_of(&fixture->out[i], 100 - count + i));
}

static void nothing_is_overwritten_until_the_ring_is_full(void **state) {
    fixture *fixture = *state;
    uint64_t overwritten;
    push_many(&fixture->ring, 0, CAPACITY - 1);
    assert_int_equal(pst__ring_count(&fixture->ring, &overwritten), CAPACITY - 1);
    assert_int_equal(overwritten, 0);
    push_many(&fixture->ring, 0, 1);
    (void)pst__ring_count(&fixture->ring, &overwritten);
    assert_int_equal(overwritten, 1);
}

static void little_room_gets_the_newest(void **state) {
    fixture *fixture = *state;
    push_many(&fixture->ring, 0, 5);
    assert_int_equal(pst__ring_copy(&fixture->ring, fixture->out, 2), 2);
    assert_true(is_record_of(&fixture->out[0], 3));
    assert_true(is_record_of(&fixture->out[1], 4));
}

static void clearing_forgets_what_was_pushed(void **state) {
    fixture *fixture = *state;
    uint64_t overwritten;
    push_many(&fixture->ring, 0, 20);
    pst__ring_clear(&fixture->ring);
    assert_int_equal(pst__ring_count(&fixture->ring, &overwritten), 0);
    assert_int_equal(overwritten, 0);
    push_many(&fixture->ring, 50, 52);
    assert_int_equal(pst__ring_copy(&fixture->ring, fixture->out, CAPACITY), 2);
    assert_true(is_record_of(&fixture->out[0], 50));
}

static void a_ring_that_was_not_created_is_empty(void **state) {
    fixture *fixture = *state;
    pst__ring none = {0};
    uint64_t overwritten = 1;
    assert_int_equal(pst__ring_count(&none, &overwritten), 0);
    assert_int_equal(overwritten, 0);
    assert_int_equal(pst__ring_copy(&none, fixture->out, CAPACITY), 0);
}

static void a_ring_without_memory_is_not_created(void **state) {
    fixture *fixture = *state;
    pst__ring none = {0};
    fixture->counts.fail_at = fixture->counts.allocs + 1;
    assert_int_equal(pst__ring_create(&fixture->heap, &none, CAPACITY), PST_ENOMEM);
    assert_false(pst__ring_exists(&none));
    assert_int_equal(pst__ring_create(&fixture->heap, &none, UINT64_C(1) << 60), PST_ENOMEM);
    assert_false(pst__ring_exists(&none));
}

enum { PUSHES = 300000 };

typedef struct pusher {
    pthread_t thread;
    pst__ring *ring;
    int done; /* release by the writer, acquire by the test: the writer's last push is visible */
} pusher;

static void *push_on(void *argument) {
    pusher *pusher = argument;
    push_many(pusher->ring, 0, PUSHES);
    pst__store_release(&pusher->done, 1);
    return NULL;
}

/* Returns 1 if what was copied beside the writer is whole, without gaps and in order. */
static int copy_is_sound(const pst__record *out, size_t count) {
    for (size_t i = 0; i < count; ++i)
        if (!is_record_of(&out[i], out[0].begin + i)) return 0;
    return 1;
}

static void copies_beside_a_writer_never_mix_records(void **state) {
    fixture *fixture = *state;
    pusher pusher = {.ring = &fixture->ring};
    int unsound = 0;
    assert_int_equal(pthread_create(&pusher.thread, NULL, push_on, &pusher), 0);
    while (!pst__load_acquire(&pusher.done)) {
        size_t count = pst__ring_copy(&fixture->ring, fixture->out, CAPACITY);
        unsound += !copy_is_sound(fixture->out, count);
    }
    (void)pthread_join(pusher.thread, NULL);
    assert_int_equal(unsound, 0);
    assert_int_equal(pst__ring_copy(&fixture->ring, fixture->out, CAPACITY), CAPACITY - 1);
    assert_true(is_record_of(&fixture->out[CAPACITY - 2], PUSHES - 1));
}

#define WITH_RING(test) cmocka_unit_test_setup_teardown(test, open_ring, close_ring)

int main(void) {
    const struct CMUnitTest tests[] = {
        WITH_RING(records_come_back_whole_and_in_order),
        WITH_RING(a_full_ring_keeps_the_newest_and_counts_the_rest),
        WITH_RING(nothing_is_overwritten_until_the_ring_is_full),
        WITH_RING(little_room_gets_the_newest),
        WITH_RING(clearing_forgets_what_was_pushed),
        WITH_RING(a_ring_that_was_not_created_is_empty),
        WITH_RING(a_ring_without_memory_is_not_created),
        WITH_RING(copies_beside_a_writer_never_mix_records),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
