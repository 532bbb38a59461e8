/* What ranks tell each other while they set something up, over communicators of the host. */
#include "../cmocka_all.h"

#include "ops/comm/exchange.h"
#include "sched/runtime.h"

#include <penstock/penstock.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define RANKS 3

typedef struct rank_state {
    int rank;
    pst_local_world *world;
    pst_runtime *runtime;
    pst_comm *comm;
    pst_exchange exchange;
    pst__meeting_place place;
    pst_status status[4];
    char text[256];
    uint64_t word, words[RANKS];
    int gives_up; /* at the first look at what it waits for */
} rank_state;

typedef struct fixture {
    pst_runtime *runtime;
    pst_local_world *world;
    rank_state ranks[RANKS];
} fixture;

static void look(void *context, const pst_waiting *waiting) {
    const rank_state *rank = context;
    if (rank->gives_up && strcmp(waiting->task, "exchange") == 0)
        pst_runtime_poison(rank->runtime, PST_ECANCELED, "a signal came");
}

static int set_up(void **state) {
    static fixture f;
    memset(&f, 0, sizeof f);
    *state = &f;
    if (pst_runtime_create(NULL, &f.runtime) != PST_OK) return -1;
    if (pst_local_world_create(f.runtime, RANKS, &f.world) != PST_OK) return -1;
    for (int i = 0; i < RANKS; i++) {
        rank_state *rank = &f.ranks[i];
        rank->rank = i;
        rank->world = f.world;
        pst_runtime_options options = {.size = sizeof options,
                                       .rank = i,
                                       .world_size = RANKS,
                                       .deadline_ns = 2000000000,
                                       .waiting = look,
                                       .waiting_context = rank};
        if (pst_runtime_create(&options, &rank->runtime) != PST_OK) return -1;
        if (pst_local_comm_create(f.world, rank->runtime, i, 0, &rank->comm) != PST_OK) return -1;
        if (pst_comm_exchange_open(rank->runtime, rank->comm, &rank->exchange) != PST_OK) return -1;
        rank->place = (pst__meeting_place){&rank->exchange, pst__runtime_heap(rank->runtime),
                                           pst__runtime_error(rank->runtime), "set-up of 'thing'"};
    }
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    for (int i = 0; i < RANKS; i++) {
        pst_comm_exchange_close(&f->ranks[i].exchange);
        f->ranks[i].comm->ops->destroy(f->ranks[i].comm);
        pst_runtime_destroy(f->ranks[i].runtime);
    }
    pst_local_world_destroy(f->world);
    pst_runtime_destroy(f->runtime);
    return 0;
}

static void on_ranks(fixture *f, int count, void *(*body)(void *)) {
    pthread_t threads[RANKS];
    for (int i = 0; i < count; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, body, &f->ranks[i]), 0);
    for (int i = 0; i < count; i++) {
        (void)pthread_join(threads[i], NULL);
        (void)pst_runtime_error(f->ranks[i].runtime, f->ranks[i].text, sizeof f->ranks[i].text);
    }
}

static void *gather_and_broadcast(void *argument) {
    rank_state *rank = argument;
    uint64_t mine = 100 + (uint64_t)rank->rank;
    rank->word = mine;
    rank->status[0] = pst__exchange_begin(rank->runtime, &rank->exchange, "a test", &rank->place);
    rank->status[1] = pst__exchange_all_gather(&rank->place, &mine, sizeof mine, rank->words);
    rank->status[2] = pst__exchange_broadcast(&rank->place, 1, &rank->word, sizeof rank->word);
    rank->status[3] = pst__exchange_agree(&rank->place, "sizes", 7);
    return NULL;
}

static void ranks_gather_broadcast_and_agree(void **state) {
    fixture *f = *state;
    on_ranks(f, RANKS, gather_and_broadcast);
    for (int i = 0; i < RANKS; i++) {
        for (int call = 0; call < 4; call++)
            assert_int_equal(f->ranks[i].status[call], PST_OK);
        for (uint64_t peer = 0; peer < RANKS; peer++)
            assert_int_equal(f->ranks[i].words[peer], 100 + peer);
        assert_int_equal(f->ranks[i].word, 101);
    }
}

static void *disagree(void *argument) {
    rank_state *rank = argument;
    rank->status[0] = pst__exchange_agree(&rank->place, "sizes", rank->rank == 2 ? 8 : 7);
    return NULL;
}

static void a_difference_is_named_on_all_ranks(void **state) {
    fixture *f = *state;
    on_ranks(f, RANKS, disagree);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(f->ranks[i].status[0], PST_EMISMATCH);
        assert_non_null(strstr(f->ranks[i].text, "set-up of 'thing': rank 2 has other sizes"));
    }
}

static void *one_fails(void *argument) {
    rank_state *rank = argument;
    rank->status[0] = pst__exchange_settle(&rank->place, PST_OK);
    rank->status[1] = pst__exchange_settle(&rank->place, rank->rank == 1 ? PST_ENOMEM : PST_OK);
    return NULL;
}

static void a_failure_of_one_rank_is_known_to_all(void **state) {
    fixture *f = *state;
    on_ranks(f, RANKS, one_fails);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(f->ranks[i].status[0], PST_OK);
        assert_int_equal(f->ranks[i].status[1], PST_ENOMEM);
        if (i != 1) assert_non_null(strstr(f->ranks[i].text, "rank 1 failed: out of memory"));
    }
}

static void *settle(void *argument) {
    rank_state *rank = argument;
    rank->status[0] = pst__exchange_settle(&rank->place, PST_OK);
    return NULL;
}

static void a_rank_that_does_not_come_ends_with_the_deadline(void **state) {
    fixture *f = *state;
    on_ranks(f, RANKS - 1, settle);
    for (int i = 0; i < RANKS - 1; i++) {
        assert_int_equal(f->ranks[i].status[0], PST_ETIMEDOUT);
        assert_non_null(strstr(f->ranks[i].text, "the exchange between the ranks failed"));
    }
}

static void a_rank_that_gives_up_does_not_wait_for_the_deadline(void **state) {
    fixture *f = *state;
    for (int i = 0; i < RANKS - 1; i++)
        f->ranks[i].gives_up = 1;
    on_ranks(f, RANKS - 1, settle);
    for (int i = 0; i < RANKS - 1; i++)
        assert_int_equal(f->ranks[i].status[0], PST_ECANCELED);
}

static void an_exchange_that_cannot_be_is_refused(void **state) {
    fixture *f = *state;
    pst__meeting_place place;
    pst_runtime *runtime = f->ranks[0].runtime;
    pst_exchange exchange = f->ranks[0].exchange;
    assert_int_equal(pst__exchange_begin(runtime, NULL, "a test", &place), PST_EINVAL);
    exchange.rank = RANKS;
    assert_int_equal(pst__exchange_begin(runtime, &exchange, "a test", &place), PST_EINVAL);
    exchange = f->ranks[0].exchange;
    exchange.all_gather = NULL;
    assert_int_equal(pst__exchange_begin(runtime, &exchange, "a test", &place), PST_EINVAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(ranks_gather_broadcast_and_agree, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_difference_is_named_on_all_ranks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_failure_of_one_rank_is_known_to_all, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_rank_that_does_not_come_ends_with_the_deadline, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_rank_that_gives_up_does_not_wait_for_the_deadline, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(an_exchange_that_cannot_be_is_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
