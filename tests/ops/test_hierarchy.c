/* The communicator `hierarchy` of two communicators `local`: its creation, its failures, and what
 * it gives on the host device, where steps are pending. test_ce_random.c draws collectives for it.
 */
#include "ce_world.h"

#define PLACES 2
#define NODES  3
#define RANKS  (PLACES * NODES)
#define COUNT  700

typedef struct fixture fixture;

typedef struct member {
    fixture *f;
    int rank, places, place, nodes, node;
    pst_runtime *runtime;
    pst_comm *host, *inner, *outer, *comm;
    pst_exchange exchange;
    size_t relay_bytes;
    pst_status status; /* of creating */
    float source[RANKS * COUNT], destination[RANKS * COUNT], array[COUNT], staging[RANKS * COUNT];
    void *request;
} member;

struct fixture {
    pst_runtime *runtime;
    pst_local_world *all, *within[NODES], *between[PLACES];
    member members[RANKS];
};

static void open_member(fixture *f, int rank) {
    member *m = &f->members[rank];
    const pst_runtime_options options = {.size = sizeof options, .deadline_ns = 5000000000u};
    *m = (member){.f = f, .rank = rank};
    m->node = rank / PLACES;
    m->place = rank % PLACES;
    m->relay_bytes = (size_t)RANKS * 2048;
    assert_int_equal(pst_runtime_create(&options, &m->runtime), PST_OK);
    assert_int_equal(pst_local_comm_create(f->all, m->runtime, rank, 0, &m->host), PST_OK);
    assert_int_equal(pst_comm_exchange_open(m->runtime, m->host, &m->exchange), PST_OK);
    assert_int_equal(pst_local_comm_create(f->within[m->node], m->runtime, m->place, 0, &m->inner),
                     PST_OK);
    assert_int_equal(pst_local_comm_create(f->between[m->place], m->runtime, m->node, 0, &m->outer),
                     PST_OK);
}

static int set_up(void **state) {
    fixture *f = calloc(1, sizeof *f);
    *state = f;
    assert_int_equal(pst_runtime_create(NULL, &f->runtime), PST_OK);
    assert_int_equal(pst_local_world_create(f->runtime, RANKS, &f->all), PST_OK);
    for (int node = 0; node < NODES; node++)
        assert_int_equal(pst_local_world_create(f->runtime, PLACES, &f->within[node]), PST_OK);
    for (int place = 0; place < PLACES; place++)
        assert_int_equal(pst_local_world_create(f->runtime, NODES, &f->between[place]), PST_OK);
    for (int rank = 0; rank < RANKS; rank++)
        open_member(f, rank);
    return 0;
}

static void destroy(pst_comm *comm) {
    if (comm != NULL) comm->ops->destroy(comm);
}

static int tear_down(void **state) {
    fixture *f = *state;
    for (int rank = 0; rank < RANKS; rank++) {
        member *m = &f->members[rank];
        destroy(m->comm != NULL ? m->comm : m->inner);
        if (m->comm == NULL) destroy(m->outer);
        pst_comm_exchange_close(&m->exchange);
        destroy(m->host);
        pst_runtime_destroy(m->runtime);
    }
    for (int node = 0; node < NODES; node++)
        pst_local_world_destroy(f->within[node]);
    for (int place = 0; place < PLACES; place++)
        pst_local_world_destroy(f->between[place]);
    pst_local_world_destroy(f->all);
    pst_runtime_destroy(f->runtime);
    free(f);
    return 0;
}

/* ---- creating -------------------------------------------------------------------------------- */

static void *create_one(void *argument) {
    member *m = argument;
    const pst_hierarchy_options options = {.size = sizeof options, .relay_bytes = m->relay_bytes};
    m->status = pst_hierarchy_create(m->runtime, pst_runtime_host(m->runtime), m->inner, m->outer,
                                     &m->exchange, &options, &m->comm);
    return NULL;
}

static void create_all(fixture *f) {
    pthread_t threads[RANKS];
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(pthread_create(&threads[rank], NULL, create_one, &f->members[rank]), 0);
    for (int rank = 0; rank < RANKS; rank++)
        (void)pthread_join(threads[rank], NULL);
}

static void assert_created(fixture *f, pst_status status, const char *text) {
    create_all(f);
    for (int rank = 0; rank < RANKS; rank++) {
        char error[512];
        member *m = &f->members[rank];
        (void)pst_runtime_error(m->runtime, error, sizeof error);
        if (m->status != status || strstr(error, text) == NULL)
            fail_msg("rank %d: %s (%s)", rank, pst_status_text(m->status), error);
        assert_int_equal(m->comm != NULL, status == PST_OK);
    }
}

static void ranks_that_count_in_another_way_are_refused(void **state) {
    fixture *f = *state;
    pst_comm *inner = f->members[2].inner; /* ranks 2 and 3 have changed places */
    f->members[2].inner = f->members[3].inner;
    f->members[3].inner = inner;
    assert_created(f, PST_EINVAL, "rank 2 is place 1 of 2 in node 1 of 3");
    f->members[3].inner = f->members[2].inner; /* each goes with its rank */
    f->members[2].inner = inner;
}

static void unequal_nodes_are_refused(void **state) {
    fixture *f = *state;
    pst_comm *inner = f->members[5].inner;
    f->members[5].inner = f->members[5].outer; /* a node of 3 */
    assert_created(f, PST_EINVAL, "rank 5 is place 2 of 3");
    f->members[5].inner = inner;
}

static void options_are_the_same_on_all_ranks(void **state) {
    fixture *f = *state;
    f->members[4].relay_bytes *= 2;
    assert_created(f, PST_EMISMATCH, "rank 4 has other relay_bytes");
}

static void a_relay_buffer_is_large_enough(void **state) {
    fixture *f = *state;
    for (int rank = 0; rank < RANKS; rank++)
        f->members[rank].relay_bytes -= 512;
    assert_created(f, PST_EINVAL, "too small for 6 ranks");
}

/* ---- on the host ----------------------------------------------------------------------------- */

static pst_status start(member *m, const pst_collective *collective) {
    assert_true(m->comm->ops->staging_bytes(m->comm, collective) <= sizeof m->staging);
    return m->comm->ops->start(m->comm, collective, NULL, &m->request);
}

/* All ranks, from one thread; the status in which each ended. */
static void run(fixture *f, const pst_collective *collectives, pst_status *ends) {
    int left = RANKS;
    for (int rank = 0; rank < RANKS; rank++) {
        ends[rank] = start(&f->members[rank], &collectives[rank]);
        left -= ends[rank] != PST_PENDING;
    }
    for (int turn = 0; left > 0 && turn < 10000; turn++)
        for (int rank = 0; rank < RANKS; rank++) {
            pst_comm *comm = f->members[rank].comm;
            if (ends[rank] != PST_PENDING) continue;
            ends[rank] = comm->ops->test(comm, f->members[rank].request);
            left -= ends[rank] != PST_PENDING;
        }
    assert_int_equal(left, 0);
}

static void run_well(fixture *f, const pst_collective *collectives) {
    pst_status ends[RANKS];
    run(f, collectives, ends);
    for (int rank = 0; rank < RANKS; rank++)
        if (ends[rank] != PST_OK)
            fail_msg("rank %d: %s", rank,
                     f->members[rank].comm->ops->error_text(f->members[rank].comm));
}

static void sums_have_the_same_bits_on_all_ranks(void **state) {
    fixture *f = *state;
    pst_collective collectives[RANKS];
    uint64_t dice = random_seed("sums");
    assert_created(f, PST_OK, "");
    for (int rank = 0; rank < RANKS; rank++) {
        member *m = &f->members[rank];
        for (size_t i = 0; i < COUNT; i++)
            m->array[i] = (float)random_below(&dice, 1000003) / 999.0f;
        collectives[rank] = (pst_collective){.kind = PST_ALL_REDUCE,
                                             .name = "sums",
                                             .ticket = 1,
                                             .dtype = PST_FLOAT32,
                                             .destination = m->array,
                                             .count = COUNT,
                                             .scale = 0.3,
                                             .staging = m->staging};
    }
    run_well(f, collectives);
    for (int rank = 1; rank < RANKS; rank++)
        assert_memory_equal(f->members[rank].array, f->members[0].array,
                            sizeof f->members[0].array);
}

static void scatter(fixture *f, pst_collective *collectives, pst_reduce_piece *pieces) {
    for (int rank = 0; rank < RANKS; rank++) {
        member *m = &f->members[rank];
        for (size_t i = 0; i < (size_t)RANKS * COUNT; i++)
            m->source[i] = (float)(rank + 1) * (float)(i % 97);
        pieces[rank] = (pst_reduce_piece){.offset = 8 * sizeof(float),
                                          .count = COUNT - 20,
                                          .destination = m->destination,
                                          .destination_dtype = PST_FLOAT32};
        collectives[rank] = (pst_collective){.kind = PST_REDUCE_SCATTER,
                                             .name = "chunks",
                                             .ticket = 1,
                                             .dtype = PST_FLOAT32,
                                             .source = m->source,
                                             .source_bytes = COUNT * sizeof(float),
                                             .stride = COUNT * sizeof(float),
                                             .pieces = &pieces[rank],
                                             .piece_count = 1,
                                             .staging = m->staging};
    }
}

static void steps_that_are_pending_go_on(void **state) {
    fixture *f = *state;
    pst_collective collectives[RANKS];
    pst_reduce_piece pieces[RANKS];
    assert_created(f, PST_OK, "");
    scatter(f, collectives, pieces);
    run_well(f, collectives);
    for (size_t rank = 0; rank < RANKS; rank++)
        for (size_t i = 0; i < COUNT - 20; i++)
            assert_true(f->members[rank].destination[i] ==
                        21.0f * (float)((rank * COUNT + 8 + i) % 97));
}

static void a_second_collective_waits_for_the_first(void **state) {
    fixture *f = *state;
    pst_collective collectives[RANKS];
    pst_reduce_piece pieces[RANKS];
    void *request;
    assert_created(f, PST_OK, "");
    scatter(f, collectives, pieces);
    pst_comm *comm = f->members[0].comm;
    assert_int_equal(start(&f->members[0], &collectives[0]), PST_PENDING);
    assert_int_equal(comm->ops->start(comm, &collectives[0], NULL, &request), PST_ESTATE);
    assert_int_equal(comm->ops->status(comm), PST_OK);
}

/* ---- failing --------------------------------------------------------------------------------- */

/* Each rank shares a node or a place with it, or with one that does. */
static void assert_all_learn(fixture *f, pst_status status) {
    for (int turn = 0; turn < 3; turn++)
        for (int rank = 0; rank < RANKS; rank++)
            (void)f->members[rank].comm->ops->status(f->members[rank].comm);
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(f->members[rank].comm->ops->status(f->members[rank].comm), status);
}

static void an_abort_ends_all_nodes(void **state) {
    fixture *f = *state;
    pst_collective collectives[RANKS];
    pst_reduce_piece pieces[RANKS];
    assert_created(f, PST_OK, "");
    scatter(f, collectives, pieces);
    for (int rank = 0; rank < RANKS - 1; rank++)
        assert_int_equal(start(&f->members[rank], &collectives[rank]), PST_PENDING);
    pst_comm *comm = f->members[RANKS - 1].comm;
    assert_int_equal(comm->ops->abort(comm, PST_ETIMEDOUT), PST_OK);
    assert_all_learn(f, PST_ETIMEDOUT);
    for (int rank = 0; rank < RANKS - 1; rank++)
        assert_int_equal(
            f->members[rank].comm->ops->test(f->members[rank].comm, f->members[rank].request),
            PST_ETIMEDOUT);
}

static void a_part_that_fails_is_named(void **state) {
    fixture *f = *state;
    assert_created(f, PST_OK, "");
    pst_comm *part = f->members[3].outer;
    assert_int_equal(part->ops->abort(part, PST_EPEER), PST_OK);
    assert_all_learn(f, PST_EPEER);
    const char *text = f->members[3].comm->ops->error_text(f->members[3].comm);
    assert_non_null(strstr(text, "rank 3, 'hierarchy': its outer part 'local': "));
    assert_non_null(strstr(text, "rank 1 aborted"));
    text = f->members[2].comm->ops->error_text(f->members[2].comm);
    assert_non_null(strstr(text, "its inner part 'local': "));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(ranks_that_count_in_another_way_are_refused, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(unequal_nodes_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(options_are_the_same_on_all_ranks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_relay_buffer_is_large_enough, set_up, tear_down),
        cmocka_unit_test_setup_teardown(sums_have_the_same_bits_on_all_ranks, set_up, tear_down),
        cmocka_unit_test_setup_teardown(steps_that_are_pending_go_on, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_second_collective_waits_for_the_first, set_up, tear_down),
        cmocka_unit_test_setup_teardown(an_abort_ends_all_nodes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_part_that_fails_is_named, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
