/* Reduce-scatters of `ce` in pieces (what they add up to: test_ce_random.c). */
#include "ce_world.h"

enum { RANKS = 2, PIECE = 256, CHUNK = 8 * PIECE };

static ce_world *open_world(void) {
    ce_world *world = calloc(1, sizeof *world);
    world->size = RANKS;
    world->options.piece_bytes = PIECE;
    world->sim.latency_ns = 100;
    ce_open(world);
    return world;
}

static void close_world(ce_world *world) {
    ce_close(world);
    free(world);
}

/* The chunks lie at the beginning of a rank's memory; staging and sum beyond what is registered. */
static pst_collective reduce_of(const ce_rank *rank, pst_reduce_piece *piece) {
    *piece = (pst_reduce_piece){.count = CHUNK / sizeof(float),
                                .destination = rank->home + CE_HOME / 2,
                                .destination_dtype = PST_FLOAT32};
    return (pst_collective){.kind = PST_REDUCE_SCATTER,
                            .name = "bucket",
                            .dtype = PST_FLOAT32,
                            .source = rank->home,
                            .source_bytes = CHUNK,
                            .stride = CHUNK,
                            .pieces = piece,
                            .piece_count = 1,
                            .staging = rank->home + CE_HOME / 2 + CHUNK};
}

static void start(ce_rank *rank, pst_collective *collective) {
    void *request;
    collective->ticket = ++rank->tickets;
    assert_int_equal(rank->comm->ops->start(rank->comm, collective, rank->pulls, &request), PST_OK);
}

static pst_status combine(ce_rank *rank, const pst_collective *collective) {
    return rank->comm->ops->combine(rank->comm, collective, rank->sums);
}

static void staging_has_room_for_two_pieces(void **state) {
    (void)state;
    ce_world *world = open_world();
    const ce_rank *rank = &world->ranks[0];
    pst_reduce_piece piece;
    pst_collective collective = reduce_of(rank, &piece);
    assert_int_equal(rank->comm->ops->staging_bytes(rank->comm, &collective), 2 * PIECE);
    collective.source_bytes = 2 * PIECE;
    assert_int_equal(rank->comm->ops->staging_bytes(rank->comm, &collective), 2 * PIECE);
    collective.source_bytes = 2 * PIECE - 1; /* which are not in pieces */
    assert_int_equal(rank->comm->ops->staging_bytes(rank->comm, &collective), 2 * PIECE);
    collective.source_bytes = 16;
    assert_int_equal(rank->comm->ops->staging_bytes(rank->comm, &collective), 256);
    close_world(world);
}

static void combining_does_not_wait_for_what_comes_later(void **state) {
    (void)state;
    ce_world *world = open_world();
    pst_reduce_piece piece;
    pst_event *event;
    for (int rank = 0; rank < RANKS; rank++) {
        pst_collective first = reduce_of(&world->ranks[rank], &piece);
        for (size_t i = 0; i < RANKS * CHUNK / sizeof(float); i++)
            ((float *)(void *)world->ranks[rank].home)[i] = (float)(rank + 1);
        start(&world->ranks[rank], &first);
    }
    ce_rank *rank = &world->ranks[0];
    pst_collective first = reduce_of(rank, &piece);
    pst_collective second = reduce_of(rank, &piece);
    first.ticket = rank->tickets;
    second.staging = (char *)second.staging + CHUNK;
    start(rank, &second); /* the other rank does not come to it */
    assert_int_equal(combine(rank, &first), PST_OK);
    assert_int_equal(world->device->ops->event_create(world->device, 0, &event), PST_OK);
    assert_int_equal(world->device->ops->event_record(world->device, event, rank->sums), PST_OK);
    assert_true(ce_run_until(world, event, 1000000));
    const float *sum = (const float *)(const void *)(rank->home + CE_HOME / 2);
    for (size_t i = 0; i < CHUNK / sizeof(float); i++)
        assert_float_equal(sum[i], 3, 0);
    assert_int_equal(combine(rank, &second), PST_OK);
    assert_int_equal(world->device->ops->event_record(world->device, event, rank->sums), PST_OK);
    assert_false(ce_run_until(world, event, 1000000));
    world->device->ops->event_destroy(world->device, event);
    (void)rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT);
    assert_true(ce_run_all(world, 1000000));
    assert_int_equal(rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT), PST_OK);
    close_world(world);
}

static void an_abort_ends_all_pieces(void **state) {
    (void)state;
    ce_world *world = open_world();
    pst_reduce_piece piece;
    ce_rank *rank = &world->ranks[0];
    pst_collective collective = reduce_of(rank, &piece);
    start(rank, &collective); /* the other rank does not come */
    assert_int_equal(combine(rank, &collective), PST_OK);
    assert_false(ce_run_all(world, 1000000));
    assert_int_equal(rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT), PST_EBUSY);
    assert_true(ce_run_all(world, 1000000));
    assert_int_equal(rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT), PST_OK);
    close_world(world);
}

static void a_combine_that_comes_too_late_is_named(void **state) {
    (void)state;
    ce_world *world = open_world();
    pst_reduce_piece piece;
    for (int i = 0; i <= PST__CE_SUMS_KNOWN; i++)
        for (int rank = 0; rank < RANKS; rank++) {
            pst_collective collective = reduce_of(&world->ranks[rank], &piece);
            start(&world->ranks[rank], &collective);
        }
    ce_rank *rank = &world->ranks[0];
    pst_collective first = reduce_of(rank, &piece);
    first.ticket = 1;
    assert_int_equal(combine(rank, &first), PST_ESTATE);
    assert_non_null(strstr(rank->comm->ops->error_text(rank->comm),
                           "'bucket' (ticket 1) was not started, or 16 reduce-scatters were"));
    assert_true(ce_run_all(world, 10000000));
    close_world(world);
}

/* As a device does that poisons its runtime, whose hook aborts: in the n-th record from now on,
 * which goes well here, so that streams come to their end. */
static pst_comm *aborted;
static int records;

static pst_status abort_in_a_record(void *context, const char *call) {
    (void)context;
    if (aborted == NULL || strcmp(call, "event_record") != 0 || --records > 0) return PST_OK;
    pst_comm *comm = aborted;
    aborted = NULL;
    (void)comm->ops->abort(comm, PST_EDEVICE);
    return PST_OK;
}

static int start_while_it_fails(int record) {
    ce_world *world = calloc(1, sizeof *world);
    pst_reduce_piece piece;
    void *request;
    world->size = RANKS;
    world->options.piece_bytes = PIECE;
    world->sim.fault = abort_in_a_record;
    ce_open(world);
    ce_rank *rank = &world->ranks[0];
    pst_collective collective = reduce_of(rank, &piece);
    collective.ticket = ++rank->tickets;
    aborted = rank->comm;
    records = record;
    (void)rank->comm->ops->start(rank->comm, &collective, rank->pulls, &request);
    const int has_aborted = aborted == NULL;
    aborted = NULL;
    assert_int_equal(ce_run_all(world, 1000000), has_aborted);
    (void)rank->comm->ops->abort(rank->comm, PST_ECANCELED);
    assert_true(ce_run_all(world, 1000000));
    assert_int_equal(rank->comm->ops->status(rank->comm),
                     has_aborted ? PST_EDEVICE : PST_ECANCELED);
    close_world(world);
    return has_aborted;
}

static void an_abort_comes_from_within_any_record(void **state) {
    (void)state;
    int record = 1;
    while (start_while_it_fails(record))
        record++;
    assert_true(record > 2 * CHUNK / PIECE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_abort_comes_from_within_any_record),
        cmocka_unit_test(staging_has_room_for_two_pieces),
        cmocka_unit_test(combining_does_not_wait_for_what_comes_later),
        cmocka_unit_test(an_abort_ends_all_pieces),
        cmocka_unit_test(a_combine_that_comes_too_late_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
