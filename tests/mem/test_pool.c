/* The books below an arena: what its public interface cannot show. */
#include "mem/pool.h"
#include "tests/mem/hand_device.h"

#define UNIT ((size_t)PST_ARENA_ALIGNMENT)

typedef struct fixture {
    counting_heap counts;
    pst__heap heap;
    hand_device hand;
    pst__pool pool;
} fixture;

static void open_fixture(fixture *f) {
    *f = (fixture){0};
    f->heap = counting_heap_open(&f->counts);
    hand_open(&f->hand);
    pst__pool_init(&f->pool, &f->heap, &f->hand.device);
}

static void close_fixture(fixture *f) {
    pst__pool_free(&f->pool);
    assert_int_equal(f->counts.live, 0);
    assert_int_equal(f->counts.live_bytes, 0);
}

static pst__piece *take(fixture *f, size_t bytes) {
    pst__piece *piece;
    assert_int_equal(pst__pool_take(&f->pool, bytes, &piece), PST_OK);
    return piece;
}

static void give_all(fixture *f, pst__piece *const *pieces, const size_t *order) {
    for (size_t i = 0; i < 3; i++)
        pst__pool_give(&f->pool, pieces[order[i]], NULL);
}

static void given_pieces_merge_at_once_in_any_order(void **state) {
    (void)state;
    const size_t orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    fixture f;
    open_fixture(&f);
    assert_int_equal(pst__pool_add(&f.pool, 0, 3 * UNIT), PST_OK);
    assert_int_equal(pst__pool_add(&f.pool, 3 * UNIT, UNIT), PST_OK);
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) {
        pst__piece *last = take(&f, UNIT);
        assert_int_equal(last->offset, 3 * UNIT); /* the best fit */
        pst__piece *pieces[3];
        for (size_t k = 0; k < 3; k++)
            pieces[k] = take(&f, UNIT);
        give_all(&f, pieces, orders[i]);
        pst__pool_give(&f.pool, last, NULL);
        assert_int_equal(f.pool.by_offset.count, 2); /* a segment each */
        assert_int_equal(f.pool.free.count, 2);
        assert_int_equal(pst__pool_largest(&f.pool), 3 * UNIT);
    }
    close_fixture(&f);
}

static void pieces_merge_when_settling_finds_their_events_done(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_event events[3] = {{PST_PENDING}, {PST_PENDING}, {PST_PENDING}};
    assert_int_equal(pst__pool_add(&f.pool, 0, 4 * UNIT), PST_OK);
    pst__piece *pieces[3];
    for (size_t i = 0; i < 3; i++)
        pieces[i] = take(&f, UNIT);
    for (size_t i = 0; i < 3; i++)
        pst__pool_give(&f.pool, pieces[i], &events[i]);
    assert_int_equal(f.pool.pending.count, 3);
    const size_t counts[] = {3, 3, 1}; /* pieces left after each event */
    const size_t order[] = {2, 0, 1};
    for (size_t i = 0; i < 3; i++) {
        events[order[i]].status = PST_OK;
        pst__pool_settle(&f.pool);
        assert_int_equal(f.pool.by_offset.count, counts[i]);
    }
    close_fixture(&f);
}

static void neighbours_taken_together_lie_in_one_segment(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    pst_event events[2] = {{PST_PENDING}, {PST_PENDING}};
    assert_int_equal(pst__pool_add(&f.pool, 0, 2 * UNIT), PST_OK);
    assert_int_equal(pst__pool_add(&f.pool, 2 * UNIT, 4 * UNIT), PST_OK);
    pst__piece *pieces[6];
    for (size_t i = 0; i < 6; i++)
        pieces[i] = take(&f, UNIT);
    pst__pool_give(&f.pool, pieces[1], NULL); /* the end of the first segment */
    pst__pool_give(&f.pool, pieces[2], NULL); /* the beginning of the second */
    pst__pool_give(&f.pool, pieces[4], &events[0]);
    pst__pool_give(&f.pool, pieces[5], &events[1]);
    assert_int_equal(take(&f, 2 * UNIT)->offset, 4 * UNIT);
    close_fixture(&f);
}

static void taking_and_giving_again_needs_no_more_memory(void **state) {
    (void)state;
    fixture f;
    open_fixture(&f);
    assert_int_equal(pst__pool_add(&f.pool, 0, 100 * UNIT), PST_OK);
    long allocs = 0;
    for (size_t turn = 0; turn < 10; turn++) {
        pst__piece *pieces[20];
        for (size_t i = 0; i < 20; i++)
            pieces[i] = take(&f, (1 + i % 3) * UNIT);
        for (size_t i = 0; i < 20; i++)
            pst__pool_give(&f.pool, pieces[i], NULL);
        if (turn == 0) allocs = f.counts.allocs;
    }
    assert_int_equal(f.counts.allocs, allocs);
    close_fixture(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(given_pieces_merge_at_once_in_any_order),
        cmocka_unit_test(pieces_merge_when_settling_finds_their_events_done),
        cmocka_unit_test(neighbours_taken_together_lie_in_one_segment),
        cmocka_unit_test(taking_and_giving_again_needs_no_more_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
