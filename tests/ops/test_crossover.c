/* The communicator `crossover`: which collective takes which part, what it refuses, and that its
 * parts fail together. test_ce_random.c draws collectives for it. */
#include "ce_world.h"

#include "ops/comm/exchange.h"

#define LIMIT ((size_t)1024)

/* Two ranks of `ce`; what is small takes a hierarchy of one node of them. */
static ce_world *open_world(void) {
    ce_world *world = calloc(1, sizeof *world);
    world->size = 2;
    world->nodes = 1;
    world->relay_bytes = (size_t)1 << 16;
    world->small_below = LIMIT;
    world->sim.bytes_each_us = 100000;
    ce_open(world);
    return world;
}

static void close_world(ce_world *world) {
    ce_close(world);
    free(world);
}

static void assert_path(const ce_world *world, const pst_collective *collective, const char *path) {
    assert_string_equal(pst_comm_path(world->ranks[0].comm, collective), path);
}

static void sizes_decide_by_kind(void **state) {
    ce_world *world = open_world();
    pst_segment segments[] = {{0, 0, 0, LIMIT / 2}, {1, 0, LIMIT, LIMIT / 2 - 1}};
    pst_collective gather = {.kind = PST_ALL_GATHER, .segments = segments, .segment_count = 2};
    pst_collective scatter = {.kind = PST_REDUCE_SCATTER, .source_bytes = LIMIT / 2};
    pst_collective reduce = {
        .kind = PST_ALL_REDUCE, .dtype = PST_FLOAT32, .count = LIMIT / sizeof(float) - 1};
    const pst_collective barrier = {.kind = PST_BARRIER};
    (void)state;
    assert_path(world, &gather, "ce+ce");
    segments[1].bytes++;
    assert_path(world, &gather, "ce");
    assert_path(world, &scatter, "ce");
    scatter.source_bytes--;
    assert_path(world, &scatter, "ce+ce");
    assert_path(world, &reduce, "ce+ce");
    reduce.count++;
    assert_path(world, &reduce, "ce");
    reduce.kind = PST_BROADCAST;
    assert_path(world, &reduce, "ce");
    assert_path(world, &barrier, "ce+ce");
    close_world(world);
}

/* ---- failing --------------------------------------------------------------------------------- */

static void a_part_that_fails_is_named_on_all_ranks(void **state) {
    ce_world *world = open_world();
    pst_comm *mine = world->ranks[0].comm, *other = world->ranks[1].comm;
    void *request;
    (void)state;
    /* Too much that is not registered: the large part refuses it. */
    const pst_collective bad = {.kind = PST_BROADCAST,
                                .name = "far too much",
                                .ticket = 1,
                                .dtype = PST_UINT8,
                                .destination = world->ranks[0].home + CE_HOME / 2,
                                .count = PST_CE_BOUNCE_BYTES + 1};
    assert_int_equal(mine->ops->start(mine, &bad, world->ranks[0].pulls, &request), PST_EINVAL);
    assert_int_equal(mine->ops->status(mine), PST_EINVAL);
    assert_non_null(
        strstr(mine->ops->error_text(mine), "rank 0, 'crossover': its large part 'ce'"));
    assert_non_null(strstr(mine->ops->error_text(mine), "far too much"));
    assert_int_equal(other->ops->status(other), PST_EPEER);
    /* The small part is aborted, and says so. */
    const pst_collective barrier = {.kind = PST_BARRIER, .ticket = 1, .dtype = PST_UINT8};
    assert_int_equal(mine->ops->start(mine, &barrier, world->ranks[0].pulls, &request), PST_EINVAL);
    close_world(world);
}

/* ---- ranks that do not do the same ----------------------------------------------------------- */

/* The small part alone would not notice it. */
static ce_world *open_careless_world(void) {
    ce_world *world = calloc(1, sizeof *world);
    world->size = 2;
    world->nodes = 1;
    world->relay_bytes = (size_t)1 << 16;
    world->small_below = LIMIT;
    ce_prepare(world);
    world->options.no_verify = 1;
    ce_on_all(world, ce_create_hierarchy);
    ce_assert_all(world, PST_OK);
    world->options.no_verify = 0;
    ce_on_all(world, ce_create_crossover);
    ce_assert_all(world, PST_OK);
    ce_open_homes(world);
    return world;
}

static pst_status gather(ce_rank *rank, const char *name, size_t bytes) {
    const pst_segment segments[] = {{0, 0, 0, bytes}, {1, 0, bytes, bytes}};
    const pst_collective collective = {.kind = PST_ALL_GATHER,
                                       .name = name,
                                       .ticket = 1,
                                       .dtype = PST_FLOAT32,
                                       .source = rank->home,
                                       .source_bytes = bytes,
                                       .destination = rank->home + CE_HOME / 2,
                                       .segments = segments,
                                       .segment_count = 2};
    void *request;
    return rank->comm->ops->start(rank->comm, &collective, rank->pulls, &request);
}

/* Both small, or only the second one's. */
static void differ(size_t first_bytes, const char *text) {
    ce_world *world = open_careless_world();
    pst_comm *first = world->ranks[0].comm, *second = world->ranks[1].comm;
    assert_int_equal(gather(&world->ranks[0], "block 3", first_bytes), PST_OK);
    assert_int_equal(gather(&world->ranks[1], "block 4", 64), PST_EMISMATCH);
    if (strstr(second->ops->error_text(second), text) == NULL)
        fail_msg("%s", second->ops->error_text(second));
    assert_int_equal(first->ops->status(first), PST_EMISMATCH);
    (void)first->ops->abort(first, PST_EMISMATCH);
    assert_true(ce_run_all(world, 10000000));
    close_world(world);
}

static void small_collectives_are_compared_with_all_others(void **state) {
    (void)state;
    differ(64, "rank 1: all_gather 'block 4' of 64 bytes of float32, rank 0: all_gather 'block 3' "
               "of 64 bytes");
    differ(2 * LIMIT, "rank 0: all_gather 'block 3' of 2048 bytes of float32");
}

/* ---- creating -------------------------------------------------------------------------------- */

typedef struct attempt {
    pst_runtime *runtime;
    pst_local_world *world;
    pst_comm *large, *small, *both;
    pst_exchange exchange;
} attempt;

static pst_status alone(void *context, const void *mine, size_t bytes, void *all) {
    (void)context;
    memcpy(all, mine, bytes);
    return PST_OK;
}

static int set_up(void **state) {
    attempt *a = calloc(1, sizeof *a);
    *state = a;
    assert_int_equal(pst_runtime_create(NULL, &a->runtime), PST_OK);
    assert_int_equal(pst_local_world_create(a->runtime, 1, &a->world), PST_OK);
    assert_int_equal(pst_local_comm_create(a->world, a->runtime, 0, 0, &a->large), PST_OK);
    assert_int_equal(pst_local_comm_create(a->world, a->runtime, 0, 1, &a->small), PST_OK);
    a->exchange = (pst_exchange){alone, NULL, 0, 1};
    return 0;
}

static int tear_down(void **state) {
    attempt *a = *state;
    if (a->both != NULL) {
        a->both->ops->destroy(a->both);
    } else {
        a->large->ops->destroy(a->large);
        a->small->ops->destroy(a->small);
    }
    pst_local_world_destroy(a->world);
    pst_runtime_destroy(a->runtime);
    free(a);
    return 0;
}

static pst_status create(attempt *a) {
    return pst_crossover_create(a->runtime, a->large, a->small, &a->exchange, NULL, &a->both);
}

static pst_status no_source_wait(pst_comm *comm, pst_stream *stream, uint64_t ticket) {
    (void)comm;
    (void)stream;
    (void)ticket;
    return PST_OK;
}

static void parts_that_cannot_be_combined_are_refused(void **state) {
    attempt *a = *state;
    pst_comm_ops one_sided = *a->large->ops;
    const pst_comm_ops *plain = a->large->ops;
    one_sided.source_wait = no_source_wait; /* and no `pass` */
    a->large->ops = &one_sided;
    assert_int_equal(create(a), PST_EUNSUPPORTED);
    a->large->ops = plain;
    a->small->ops = &one_sided;
    assert_int_equal(create(a), PST_EUNSUPPORTED);
    a->small->ops = plain;
    assert_int_equal(create(a), PST_OK);
}

static void parts_of_other_ranks_are_refused(void **state) {
    attempt *a = *state;
    char text[512];
    a->small->size = 2;
    assert_int_equal(create(a), PST_EINVAL);
    a->small->size = 1;
    (void)pst_runtime_error(a->runtime, text, sizeof text);
    assert_non_null(strstr(text, "'local' of rank 0 of 2"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes_decide_by_kind),
        cmocka_unit_test(a_part_that_fails_is_named_on_all_ranks),
        cmocka_unit_test(small_collectives_are_compared_with_all_others),
        cmocka_unit_test_setup_teardown(parts_that_cannot_be_combined_are_refused, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(parts_of_other_ranks_are_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
