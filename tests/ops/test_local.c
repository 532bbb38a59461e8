/* The communicator `local`, driven by hand from one thread, and by threads. */
#include "world.h"

#define RANKS 3

typedef struct fixture {
    pst_runtime *runtime;
    pst_local_world *world;
    pst_comm *comms[RANKS];
    void *requests[RANKS];
    pst_collective collectives[RANKS];
    float memory[RANKS][64], other[RANKS][64], staging[RANKS][64];
    pst_segment segments[RANKS];
    pst_reduce_piece pieces[RANKS][2];
    int wakes[RANKS];
} fixture;

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof *f);
    *state = f;
    if (pst_runtime_create(NULL, &f->runtime) != PST_OK) return -1;
    if (pst_local_world_create(f->runtime, RANKS, &f->world) != PST_OK) return -1;
    for (int rank = 0; rank < RANKS; rank++) {
        if (pst_local_comm_create(f->world, f->runtime, rank, 0, &f->comms[rank]) != PST_OK)
            return -1;
        for (int i = 0; i < 64; i++)
            f->memory[rank][i] = (float)(100 * rank + i);
    }
    return 0;
}

static int tear_down(void **state) {
    fixture *f = *state;
    for (int rank = 0; rank < RANKS; rank++)
        if (f->comms[rank] != NULL) f->comms[rank]->ops->destroy(f->comms[rank]);
    pst_local_world_destroy(f->world);
    pst_runtime_destroy(f->runtime);
    free(f);
    return 0;
}

static void count_wake(void *argument) {
    ++*(int *)argument;
}

static pst_status start(fixture *f, int rank) {
    pst_collective *collective = &f->collectives[rank];
    collective->wake = count_wake;
    collective->wake_argument = &f->wakes[rank];
    return f->comms[rank]->ops->start(f->comms[rank], collective, NULL, &f->requests[rank]);
}

static pst_status test(fixture *f, int rank) {
    return f->comms[rank]->ops->test(f->comms[rank], f->requests[rank]);
}

/* Starts on all ranks, then asks until all are over: a few turns are enough. */
static void run_all(fixture *f) {
    pst_status status[RANKS];
    for (int rank = 0; rank < RANKS; rank++)
        status[rank] = start(f, rank);
    for (int turn = 0; turn < 4; turn++)
        for (int rank = 0; rank < RANKS; rank++)
            if (status[rank] == PST_PENDING) status[rank] = test(f, rank);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(status[rank], PST_OK);
}

static void set_all(fixture *f, pst_collective collective) {
    for (int rank = 0; rank < RANKS; rank++)
        f->collectives[rank] = collective;
}

static void set_gather(fixture *f) {
    for (uint32_t peer = 0; peer < RANKS; peer++)
        f->segments[peer] = (pst_segment){peer, peer * sizeof(float), peer * 8, 8};
    set_all(f, (pst_collective){.kind = PST_ALL_GATHER,
                                .name = "a",
                                .source_bytes = 64,
                                .segments = f->segments,
                                .segment_count = RANKS});
    for (int rank = 0; rank < RANKS; rank++) {
        f->collectives[rank].source = f->memory[rank];
        f->collectives[rank].destination = f->other[rank];
    }
}

static void gathers_by_segments(void **state) {
    fixture *f = *state;
    const float expected[2 * RANKS] = {0, 1, 101, 102, 202, 203};
    set_gather(f);
    run_all(f);
    for (int rank = 0; rank < RANKS; rank++)
        assert_memory_equal(f->other[rank], expected, sizeof expected);
}

static void reduces_and_scatters_by_pieces(void **state) {
    fixture *f = *state;
    set_all(f, (pst_collective){.kind = PST_REDUCE_SCATTER,
                                .name = "b",
                                .dtype = PST_FLOAT32,
                                .source_bytes = 16,
                                .stride = 20,
                                .scale = 0.5,
                                .piece_count = 2});
    for (int rank = 0; rank < RANKS; rank++) {
        f->other[rank][4] = 1000;
        f->pieces[rank][0] = (pst_reduce_piece){0, 3, f->other[rank], PST_FLOAT32, 0};
        f->pieces[rank][1] =
            (pst_reduce_piece){3 * sizeof(float), 1, &f->other[rank][4], PST_FLOAT32, 1};
        f->collectives[rank].source = f->memory[rank];
        f->collectives[rank].pieces = f->pieces[rank];
    }
    run_all(f);
    for (int rank = 0; rank < RANKS; rank++) {
        for (int i = 0; i < 3; i++)
            assert_true(f->other[rank][i] == 0.5f * (300.0f + 3.0f * (float)(5 * rank + i)));
        assert_true(f->other[rank][4] == 1000 + 0.5f * (300.0f + 3.0f * (float)(5 * rank + 3)));
    }
}

static void set_all_reduce(fixture *f, pst_reduce_op reduce) {
    set_all(f, (pst_collective){.kind = PST_ALL_REDUCE,
                                .name = "c",
                                .dtype = PST_FLOAT32,
                                .count = 5,
                                .reduce = reduce});
    for (int rank = 0; rank < RANKS; rank++) {
        f->collectives[rank].destination = f->memory[rank];
        f->collectives[rank].staging = f->staging[rank];
        assert_int_equal(f->comms[rank]->ops->staging_bytes(f->comms[rank], &f->collectives[rank]),
                         20);
    }
}

static void all_reduces_in_place(void **state) {
    fixture *f = *state;
    set_all_reduce(f, PST_REDUCE_SUM);
    run_all(f);
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < 5; i++)
            assert_true(f->memory[rank][i] == (float)(300 + 3 * i));
    assert_true(f->memory[1][5] == 105);
}

static void all_reduces_the_maximum(void **state) {
    fixture *f = *state;
    set_all_reduce(f, PST_REDUCE_MAX);
    run_all(f);
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < 5; i++)
            assert_true(f->memory[rank][i] == (float)(200 + i));
}

static void broadcasts_from_the_root(void **state) {
    fixture *f = *state;
    set_all(f, (pst_collective){.kind = PST_BROADCAST, .name = "d", .count = 3, .root = 2});
    for (int rank = 0; rank < RANKS; rank++)
        f->collectives[rank].destination = f->memory[rank];
    run_all(f);
    for (int rank = 0; rank < RANKS; rank++)
        assert_memory_equal(f->memory[rank], f->memory[2], 12);
    assert_true(f->memory[0][3] == 3);
}

/* ---- when a request is over ------------------------------------------------------------------ */

static void is_over_only_when_all_have_read(void **state) {
    fixture *f = *state;
    set_gather(f);
    assert_int_equal(start(f, 0), PST_PENDING);
    assert_int_equal(start(f, 1), PST_PENDING);
    assert_int_equal(test(f, 0), PST_PENDING);
    assert_int_equal(f->wakes[0], 0);
    assert_int_equal(start(f, 2), PST_PENDING); /* all are here; it has read, the others have not */
    assert_true(f->wakes[0] == 1 && f->wakes[1] == 1);
    assert_int_equal(test(f, 2), PST_PENDING);
    assert_int_equal(test(f, 1), PST_PENDING);
    assert_int_equal(test(f, 0), PST_OK); /* the last one */
    assert_true(f->wakes[1] == 2 && f->wakes[2] >= 1);
    assert_int_equal(test(f, 1), PST_OK);
    assert_int_equal(test(f, 2), PST_OK);
}

static void a_rank_may_start_ahead_of_the_others(void **state) {
    fixture *f = *state;
    pst_collective barrier = {.kind = PST_BARRIER, .name = "second"};
    void *second[RANKS];
    set_gather(f);
    for (int rank = 0; rank < RANKS; rank++) {
        pst_comm *comm = f->comms[rank];
        assert_int_equal(start(f, rank), PST_PENDING);
        assert_int_equal(comm->ops->start(comm, &barrier, NULL, &second[rank]), PST_PENDING);
    }
    for (int rank = 0; rank < RANKS - 1; rank++)
        assert_int_equal(test(f, rank), rank == RANKS - 2 ? PST_OK : PST_PENDING);
    assert_int_equal(test(f, 0), PST_OK);
    assert_int_equal(test(f, 2), PST_OK);
    assert_int_equal(f->comms[0]->ops->test(f->comms[0], second[0]), PST_PENDING);
    assert_int_equal(f->comms[1]->ops->test(f->comms[1], second[1]), PST_OK);
    assert_int_equal(f->comms[0]->ops->test(f->comms[0], second[0]), PST_OK);
    assert_int_equal(f->comms[2]->ops->test(f->comms[2], second[2]), PST_OK);
}

static void channels_do_not_mix(void **state) {
    fixture *f = *state;
    pst_comm *other;
    pst_collective barrier = {.kind = PST_BARRIER, .name = "elsewhere"};
    void *request;
    set_gather(f);
    assert_int_equal(pst_local_comm_create(f->world, f->runtime, 2, 1, &other), PST_OK);
    assert_int_equal(other->ops->start(other, &barrier, NULL, &request), PST_PENDING);
    run_all(f);
    assert_int_equal(other->ops->test(other, request), PST_PENDING);
    other->ops->destroy(other);
    assert_int_equal(f->comms[0]->ops->status(f->comms[0]), PST_OK);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static void different_collectives_are_named(void **state) {
    fixture *f = *state;
    set_gather(f);
    f->collectives[1].name = "b";
    f->collectives[1].source_bytes = 32;
    assert_int_equal(start(f, 0), PST_PENDING);
    assert_int_equal(start(f, 1), PST_EMISMATCH);
    assert_int_equal(test(f, 0), PST_EMISMATCH);
    assert_int_equal(start(f, 2), PST_EMISMATCH);
    for (int rank = 0; rank < RANKS; rank++) {
        const char *text = f->comms[rank]->ops->error_text(f->comms[rank]);
        assert_non_null(strstr(text, "rank 0: all_gather 'a' of 64 bytes"));
        assert_non_null(strstr(text, "rank 1: all_gather 'b' of 32 bytes"));
    }
}

static void another_kind_dtype_or_count_is_a_mismatch(void **state) {
    fixture *f = *state;
    const pst_collective base = {.kind = PST_ALL_REDUCE, .name = "x", .count = 4, .ticket = 1};
    pst_collective wrong[5] = {base, base, base, base, base};
    wrong[0].kind = PST_BROADCAST;
    wrong[1].dtype = PST_BFLOAT16;
    wrong[2].count = 5;
    wrong[3].reduce = PST_REDUCE_MAX;
    wrong[4].ticket = 2;
    for (int i = 0; i < 5; i++) {
        pst_comm *comms[2];
        void *requests[2];
        for (int rank = 0; rank < 2; rank++)
            assert_int_equal(
                pst_local_comm_create(f->world, f->runtime, rank, 10 + i, &comms[rank]), PST_OK);
        assert_int_equal(comms[0]->ops->start(comms[0], &base, NULL, &requests[0]), PST_PENDING);
        assert_int_equal(comms[1]->ops->start(comms[1], &wrong[i], NULL, &requests[1]),
                         PST_EMISMATCH);
        assert_int_equal(comms[0]->ops->test(comms[0], requests[0]), PST_EMISMATCH);
        for (int rank = 0; rank < 2; rank++)
            comms[rank]->ops->destroy(comms[rank]);
    }
}

static void abort_ends_everybody(void **state) {
    fixture *f = *state;
    set_gather(f);
    assert_int_equal(start(f, 0), PST_PENDING);
    assert_int_equal(f->comms[1]->ops->abort(f->comms[1], PST_ECANCELED), PST_OK);
    assert_int_equal(f->wakes[0], 1);
    assert_int_equal(test(f, 0), PST_ECANCELED);
    assert_int_equal(start(f, 2), PST_ECANCELED);
    assert_int_equal(f->comms[2]->ops->status(f->comms[2]), PST_ECANCELED);
    assert_non_null(strstr(f->comms[0]->ops->error_text(f->comms[0]), "rank 1 aborted"));
}

static void who_waits_for_a_rank_that_left_is_told(void **state) {
    fixture *f = *state;
    set_gather(f);
    assert_int_equal(start(f, 0), PST_PENDING);
    f->comms[2]->ops->destroy(f->comms[2]);
    f->comms[2] = NULL;
    assert_int_equal(f->wakes[0], 1);
    assert_int_equal(test(f, 0), PST_EPEER);
    assert_non_null(strstr(f->comms[0]->ops->error_text(f->comms[0]), "rank 2 has left"));
    assert_int_equal(start(f, 1), PST_EPEER);
}

static void a_rank_may_leave_after_its_last_collective(void **state) {
    fixture *f = *state;
    set_gather(f);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(start(f, rank), PST_PENDING);
    assert_int_equal(test(f, 0), PST_PENDING);
    assert_int_equal(test(f, 1), PST_OK);
    f->comms[1]->ops->destroy(f->comms[1]);
    f->comms[1] = NULL;
    assert_int_equal(test(f, 0), PST_OK);
    assert_int_equal(test(f, 2), PST_OK);
}

static void leaving_with_a_request_in_flight_loses_nothing(void **state) {
    fixture *f = *state;
    set_gather(f);
    assert_int_equal(start(f, 1), PST_PENDING);
    f->comms[1]->ops->destroy(f->comms[1]);
    f->comms[1] = NULL;
    assert_int_equal(start(f, 0), PST_EPEER);
}

static void bad_ranks_and_sizes_are_refused(void **state) {
    fixture *f = *state;
    pst_local_world *world;
    pst_comm *comm;
    assert_int_equal(pst_local_world_create(f->runtime, 0, &world), PST_EINVAL);
    assert_null(world);
    assert_int_equal(pst_local_comm_create(f->world, f->runtime, RANKS, 0, &comm), PST_EINVAL);
    assert_int_equal(pst_local_comm_create(f->world, f->runtime, 1, 0, &comm), PST_EBUSY);
    assert_null(comm);
}

static void collectives_have_names(void **unused) {
    (void)unused;
    assert_string_equal(pst_collective_name(PST_ALL_GATHER), "all_gather");
    assert_string_equal(pst_collective_name(PST_BARRIER), "barrier");
    assert_string_equal(pst_collective_name(PST_COLLECTIVE_KIND_COUNT), "unknown");
}

/* ---- threads --------------------------------------------------------------------------------- */

#define ROUNDS 400

static pst_status finish(pst_comm *comm, pst_collective *collective) {
    void *request;
    pst_status status = comm->ops->start(comm, collective, NULL, &request);
    while (status == PST_PENDING) {
        (void)sched_yield();
        status = comm->ops->test(comm, request);
    }
    return status;
}

static void hammer(rank_state *state) {
    float values[16], staging[16];
    for (uint64_t round = 1; round <= ROUNDS; round++) {
        size_t count = 1 + mix(round) % 16;
        for (size_t i = 0; i < count; i++)
            values[i] = (float)((uint64_t)state->rank + round + i);
        pst_collective collective = {.kind = PST_ALL_REDUCE,
                                     .name = "hammer",
                                     .ticket = round,
                                     .count = count,
                                     .destination = values,
                                     .staging = staging};
        CHECK_OK(finish(state->gather, &collective));
        for (size_t i = 0; i < count; i++)
            CHECK(values[i] ==
                  (float)state->world * ((float)(round + i) + (float)(state->world - 1) / 2));
    }
}

static void threads_meet_many_times(void **unused) {
    (void)unused;
    model model = empty_model(3);
    run_ranks_on_device(4, &model, hammer, NULL);
}

#define LOCAL_TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        LOCAL_TEST(gathers_by_segments),
        LOCAL_TEST(reduces_and_scatters_by_pieces),
        LOCAL_TEST(all_reduces_in_place),
        LOCAL_TEST(all_reduces_the_maximum),
        LOCAL_TEST(broadcasts_from_the_root),
        LOCAL_TEST(is_over_only_when_all_have_read),
        LOCAL_TEST(a_rank_may_start_ahead_of_the_others),
        LOCAL_TEST(channels_do_not_mix),
        LOCAL_TEST(different_collectives_are_named),
        LOCAL_TEST(another_kind_dtype_or_count_is_a_mismatch),
        LOCAL_TEST(abort_ends_everybody),
        LOCAL_TEST(who_waits_for_a_rank_that_left_is_told),
        LOCAL_TEST(a_rank_may_leave_after_its_last_collective),
        LOCAL_TEST(leaving_with_a_request_in_flight_loses_nothing),
        LOCAL_TEST(bad_ranks_and_sizes_are_refused),
        cmocka_unit_test(collectives_have_names),
        cmocka_unit_test(threads_meet_many_times),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
