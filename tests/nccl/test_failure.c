/* Creating, failing, aborting, ending. */
#include "fixture.h"

static void set_deadline(nccl_world *world, uint64_t deadline_ns) {
    for (int i = 0; i < RANKS; i++)
        world->ranks[i].options.deadline_ns = deadline_ns;
}

/* An array that both ranks reduce. */
static pst_collective reduce_of(const nccl_rank *rank) {
    return (pst_collective){.kind = PST_ALL_REDUCE,
                            .name = "norm",
                            .ticket = 7,
                            .dtype = PST_FLOAT32,
                            .destination = rank->memory,
                            .count = 100};
}

static void assert_none_created(nccl_world *world, pst_status status) {
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(world->ranks[i].status, status);
        assert_null(world->ranks[i].comm);
    }
    assert_int_equal(fake_nccl_live(), 0);
}

static void without_nccl_it_says_so_on_all_ranks(void **state) {
    nccl_world *world = *state;
    world->ranks[1].options.library = "/nowhere/libnccl.so.2";
    on_ranks(world, RANKS, create_comm);
    assert_none_created(world, PST_EUNSUPPORTED);
    assert_non_null(strstr(world->ranks[1].text, "/nowhere/libnccl.so.2"));
    assert_non_null(strstr(world->ranks[0].text, "rank 1 failed"));
}

static void a_library_that_is_not_nccl_is_named(void **state) {
    nccl_world *world = *state;
    for (int i = 0; i < RANKS; i++)
        world->ranks[i].options.library = FAKE_CUDA_PATH;
    on_ranks(world, RANKS, create_comm);
    assert_none_created(world, PST_EUNSUPPORTED);
    assert_non_null(strstr(world->ranks[0].text, "has no ncclGetVersion"));
}

static void other_options_are_a_mismatch(void **state) {
    nccl_world *world = *state;
    nccl_rank *rank = &world->ranks[1];
    assert_int_equal(pst_local_comm_create(world->meeting, rank->runtime, 1, 1, &rank->over),
                     PST_OK);
    rank->options.verify_over = rank->over;
    on_ranks(world, RANKS, create_comm);
    assert_none_created(world, PST_EMISMATCH);
    assert_non_null(strstr(world->ranks[0].text, "rank 1 has other options than rank 0"));
}

/* ---- ranks that do not do the same ----------------------------------------------------------- */

static void open_verified(nccl_world *world) {
    for (int i = 0; i < RANKS; i++) {
        nccl_rank *rank = &world->ranks[i];
        assert_int_equal(pst_local_comm_create(world->meeting, rank->runtime, i, 1, &rank->over),
                         PST_OK);
        rank->options.verify_over = rank->over;
    }
    create_comms(world);
}

static void start_on_all(nccl_world *world, const char *const names[RANKS]) {
    for (int i = 0; i < RANKS; i++) {
        pst_collective reduce = reduce_of(&world->ranks[i]);
        reduce.name = names[i];
        assert_int_equal(start(&world->ranks[i], &reduce), PST_OK);
    }
}

/* The device gets through, with wrong sums; the ranks go on before they know. */
static void collectives_that_differ_are_named_on_all_ranks(void **state) {
    static const char *const equal[RANKS] = {"norm", "norm"}, *const other[RANKS] = {"norm",
                                                                                     "loss"};
    nccl_world *world = *state;
    const uint64_t end = pst__now() + PATIENCE;
    open_verified(world);
    for (int i = 0; i < 20; i++)
        start_on_all(world, i == 11 ? other : equal);
    for (int told = 0; told < RANKS && pst__now() < end;) {
        told = 0;
        for (int i = 0; i < RANKS; i++)
            told += world->ranks[i].comm->ops->status(world->ranks[i].comm) != PST_OK;
    }
    for (int i = 0; i < RANKS; i++) {
        pst_comm *comm = world->ranks[i].comm;
        const char *text = comm->ops->error_text(comm);
        assert_int_equal(comm->ops->status(comm), PST_EMISMATCH);
        if (strstr(text, "number 12 is not the same collective on all ranks: rank 0: all_reduce "
                         "'norm' of 400 bytes of float32, rank 1: all_reduce 'loss' of 400 bytes "
                         "of float32") == NULL)
            fail_msg("%s", text);
    }
}

static void wrong_arguments_are_refused(void **state) {
    nccl_world *world = *state;
    nccl_rank *rank = &world->ranks[0];
    assert_int_equal(pst_nccl_comm_create(rank->runtime, pst_runtime_host(rank->runtime),
                                          &rank->exchange, &rank->options, &rank->comm),
                     PST_EINVAL);
    assert_int_equal(
        pst_nccl_comm_create(rank->runtime, rank->device, NULL, &rank->options, &rank->comm),
        PST_EINVAL);
    rank->options.verify_over = world->ranks[1].host; /* of another rank */
    assert_int_equal(pst_nccl_comm_create(rank->runtime, rank->device, &rank->exchange,
                                          &rank->options, &rank->comm),
                     PST_EINVAL);
    rank->options.verify_over = NULL;
    rank->options.size = 3;
    assert_int_equal(pst_nccl_comm_create(rank->runtime, rank->device, &rank->exchange,
                                          &rank->options, &rank->comm),
                     PST_EINVAL);
    assert_null(rank->comm);
}

static void a_failure_of_one_rank_while_creating_is_all_ranks(void **state) {
    nccl_world *world = *state;
    set_deadline(world, 500 * MILLISECONDS);
    fake_nccl_fail("ncclCommInitRankConfig", 2, ncclSystemError);
    on_ranks(world, RANKS, create_comm);
    for (int i = 0; i < RANKS; i++) /* the other one waits until the deadline */
        assert_true(world->ranks[i].status == PST_ESYSTEM ||
                    world->ranks[i].status == PST_ETIMEDOUT);
    assert_int_equal(fake_nccl_live(), 0);
}

static void a_rank_that_never_connects_ends_with_the_deadline(void **state) {
    nccl_world *world = *state;
    set_deadline(world, 500 * MILLISECONDS);
    fake_nccl_hang("ncclCommInitRankConfig");
    on_ranks(world, RANKS, create_comm);
    assert_none_created(world, PST_ETIMEDOUT);
    assert_non_null(strstr(world->ranks[0].text, "by the deadline of 0.5 s"));
}

static void a_first_collective_that_hangs_ends_with_the_deadline(void **state) {
    nccl_world *world = *state;
    set_deadline(world, 500 * MILLISECONDS);
    fake_nccl_hang("ncclGroupEnd");
    on_ranks(world, RANKS, create_comm);
    assert_none_created(world, PST_ETIMEDOUT);
}

static void an_error_of_any_call_is_named_and_final(void **state) {
    static const struct {
        const char *call;
        ncclResult_t result;
        pst_status status;
    } cases[] = {{"ncclGroupStart", ncclInternalError, PST_ESYSTEM},
                 {"ncclAllReduce", ncclInvalidArgument, PST_EINVAL},
                 {"ncclGroupEnd", ncclUnhandledCudaError, PST_EDEVICE},
                 {"ncclCommGetAsyncError", ncclRemoteError, PST_EPEER}};
    nccl_world *world = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        create_comms(world);
        nccl_rank *rank = &world->ranks[0];
        const pst_collective reduce = reduce_of(rank);
        fake_nccl_fail(cases[i].call, 1, cases[i].result);
        assert_int_equal(start(rank, &reduce), cases[i].status);
        assert_non_null(strstr(rank->text, cases[i].call));
        assert_non_null(strstr(rank->text, "told by the stand-in"));
        assert_string_equal(rank->comm->ops->error_text(rank->comm), rank->text);
        assert_int_equal(fake_nccl_open_groups(), 0);
        assert_int_equal(start(rank, &reduce), cases[i].status); /* for good */
        assert_int_equal(rank->comm->ops->status(rank->comm), cases[i].status);
        for (int j = 0; j < RANKS; j++) {
            world->ranks[j].comm->ops->destroy(world->ranks[j].comm);
            world->ranks[j].comm = NULL;
        }
    }
}

static void an_error_in_a_group_names_collective_and_ticket(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    nccl_rank *rank = &world->ranks[1];
    const pst_collective reduce = reduce_of(rank);
    fake_nccl_fail("ncclAllReduce", 1, ncclInvalidUsage);
    assert_int_equal(start(rank, &reduce), PST_EINVAL);
    assert_non_null(strstr(rank->text, "rank 1, communicator 'nccl': ncclAllReduce for all_reduce "
                                       "'norm' (ticket 7) failed: invalid usage"));
    assert_int_equal(fake_nccl_calls("ncclGroupEnd"), 1);
}

static void an_error_of_what_is_in_flight_is_found_by_status_and_start(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    nccl_rank *rank = &world->ranks[0];
    const pst_collective reduce = reduce_of(rank);
    assert_int_equal(rank->comm->ops->status(rank->comm), PST_OK);
    assert_int_equal(start(rank, &reduce), PST_OK);
    fake_nccl_break(ncclRemoteError);
    assert_int_equal(rank->comm->ops->status(rank->comm), PST_EPEER);
    assert_non_null(strstr(rank->comm->ops->error_text(rank->comm), "remote error"));
    assert_int_equal(start(&world->ranks[1], &reduce), PST_EPEER);
}

/* ---- abort ----------------------------------------------------------------------------------- */

static pst_status abort_as_timed_out(nccl_rank *rank) {
    return rank->comm->ops->abort(rank->comm, PST_ETIMEDOUT);
}

static pst_status until_aborted(nccl_rank *rank) {
    return ask_until(rank, abort_as_timed_out, PST_EBUSY);
}

static void an_abort_lets_the_stream_go_on(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    nccl_rank *rank = &world->ranks[0]; /* the other one does not come */
    const pst_collective reduce = reduce_of(rank);
    assert_int_equal(start(rank, &reduce), PST_OK);
    for (int i = 0; i < 10; i++)
        assert_int_equal(query(rank), PST_PENDING);
    assert_int_equal(until_aborted(rank), PST_OK);
    assert_int_equal(until_over(rank), PST_OK);
    assert_int_equal(rank->comm->ops->status(rank->comm), PST_ETIMEDOUT);
    assert_int_equal(start(rank, &reduce), PST_ETIMEDOUT);
    assert_int_equal(fake_nccl_calls("ncclCommAbort"), 1);
}

static void *start_reduce(void *argument) {
    nccl_rank *rank = argument;
    const pst_collective reduce = reduce_of(rank);
    rank->status = start(rank, &reduce);
    return NULL;
}

static void an_abort_ends_a_start_that_blocks(void **state) {
    nccl_world *world = *state;
    pthread_t thread;
    create_comms(world);
    nccl_rank *rank = &world->ranks[0];
    fake_nccl_hang("ncclGroupEnd");
    assert_int_equal(pthread_create(&thread, NULL, start_reduce, rank), 0);
    while (fake_nccl_calls("ncclGroupEnd") == 0)
        (void)nanosleep(&(struct timespec){0, 100000}, NULL);
    assert_int_equal(until_aborted(rank), PST_OK);
    (void)pthread_join(thread, NULL);
    assert_true(rank->status == PST_ECANCELED || rank->status == PST_ETIMEDOUT);
    assert_int_equal(rank->comm->ops->status(rank->comm), PST_ETIMEDOUT);
}

static void abort_by_many_threads_is_one_abort(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    for (int i = 0; i < 3; i++)
        (void)world->ranks[0].comm->ops->abort(world->ranks[0].comm, PST_ECANCELED);
    assert_int_equal(until_aborted(&world->ranks[0]), PST_OK);
    assert_int_equal(fake_nccl_calls("ncclCommAbort"), 1);
    assert_int_equal(world->ranks[0].comm->ops->status(world->ranks[0].comm), PST_ECANCELED);
}

static void abort_on_poison(void *context, pst_status status) {
    pst_comm *comm = context;
    (void)comm->ops->abort(comm, status);
}

static pst_status status_of(nccl_rank *rank) {
    return rank->comm->ops->status(rank->comm);
}

static int set_up_with_watchdog(void **state) {
    return set_up_watched(state, 80 * MILLISECONDS);
}

static void the_watchdog_ends_what_never_ends(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    nccl_rank *rank = &world->ranks[0]; /* the other one does not come */
    rank->work = (pst_collective_work){.comm = rank->comm, .collective = reduce_of(rank)};
    pst_lane_options lane = {.size = sizeof lane, .name = "reduce", .device = rank->device};
    pst_task_options options = {
        .size = sizeof options, .name = "norm", .work = pst_collective_as_work(&rank->work)};
    pst_graph *graph;
    pst_launch launch;
    pst_task task;
    assert_int_equal(pst_runtime_add_poison_hook(rank->runtime, abort_on_poison, rank->comm),
                     PST_OK);
    assert_int_equal(pst_lane_create(rank->runtime, &lane, &options.lane), PST_OK);
    assert_int_equal(pst_graph_create(rank->runtime, PST_GRAPH_SEALED, "step", &graph), PST_OK);
    assert_int_equal(pst_graph_add(graph, &options, &task), PST_OK);
    assert_int_equal(pst_graph_seal(graph), PST_OK);
    assert_int_equal(pst_graph_launch(graph, &launch), PST_OK);
    assert_int_equal(pst_launch_wait(launch), PST_ETIMEDOUT);
    /* Whoever waits may know it before the hook has run. */
    assert_int_equal(ask_until(rank, status_of, PST_OK), PST_ETIMEDOUT);
    assert_int_equal(until_over(rank), PST_OK); /* an own stream's end, so NCCL is not in the way */
    pst_runtime_remove_poison_hook(rank->runtime, abort_on_poison, rank->comm);
    assert_int_equal(until_aborted(rank), PST_OK);
    assert_int_equal(fake_nccl_calls("ncclCommAbort"), 1);
}

/* ---- ending ---------------------------------------------------------------------------------- */

static void destroy_finalizes(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    for (int i = 0; i < RANKS; i++) {
        world->ranks[i].comm->ops->destroy(world->ranks[i].comm);
        world->ranks[i].comm = NULL;
    }
    assert_int_equal(fake_nccl_calls("ncclCommFinalize"), RANKS);
    assert_int_equal(fake_nccl_calls("ncclCommDestroy"), RANKS);
    assert_int_equal(fake_nccl_calls("ncclCommAbort"), 0);
}

/* ---- every way of closing -------------------------------------------------------------------- */

static void reduce_on_all(nccl_world *world) {
    for (int i = 0; i < RANKS; i++) {
        const pst_collective reduce = reduce_of(&world->ranks[i]);
        assert_int_equal(start(&world->ranks[i], &reduce), PST_OK);
    }
}

static void use_and_finish(nccl_world *world) {
    reduce_on_all(world);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(until_over(&world->ranks[i]), PST_OK);
}

static void leave_in_flight(nccl_world *world) {
    const pst_collective reduce = reduce_of(&world->ranks[0]); /* the other one does not come */
    assert_int_equal(start(&world->ranks[0], &reduce), PST_OK);
}

static void break_off(nccl_world *world) {
    const pst_collective reduce = reduce_of(&world->ranks[0]);
    fake_nccl_fail("ncclAllReduce", 1, ncclInternalError);
    assert_int_equal(start(&world->ranks[0], &reduce), PST_ESYSTEM);
}

static void abort_one(nccl_world *world) {
    leave_in_flight(world);
    assert_int_equal(until_aborted(&world->ranks[0]), PST_OK);
}

static void fail_to_finalize(nccl_world *world) {
    use_and_finish(world);
    fake_nccl_fail("ncclCommFinalize", 1, ncclSystemError);
}

static void nothing_at_all(nccl_world *world) {
    (void)world;
}

/* Nothing of NCCL is left, nor of what a communicator has asked of the driver; but the device keeps
 * the events that the first one has made it create. */
static void whichever_way_it_is_closed_nothing_is_left(void **state) {
    void (*const ways[])(nccl_world *) = {nothing_at_all, use_and_finish, leave_in_flight,
                                          break_off,      abort_one,      fail_to_finalize};
    nccl_world *world = *state;
    const size_t memory = fake_cuda_live_memory();
    size_t things = 0;
    for (size_t way = 0; way < sizeof ways / sizeof ways[0]; way++) {
        create_comms(world);
        assert_int_equal(fake_nccl_live(), RANKS);
        ways[way](world);
        for (int i = 0; i < RANKS; i++) {
            world->ranks[i].comm->ops->destroy(world->ranks[i].comm);
            world->ranks[i].comm = NULL;
        }
        for (int i = 0; i < RANKS; i++)
            assert_int_equal(until_over(&world->ranks[i]), PST_OK);
        assert_int_equal(fake_nccl_live(), 0);
        if (way == 0) things = fake_cuda_live();
        assert_int_equal(fake_cuda_live(), things);
        assert_int_equal(fake_cuda_live_memory(), memory);
        assert_int_equal(fake_nccl_calls("ncclCommDestroy") + fake_nccl_calls("ncclCommAbort"),
                         RANKS);
    }
}

static void what_nccl_does_not_free_is_in_the_log(void **state) {
    nccl_world *world = *state;
    nccl_rank *rank = &world->ranks[0];
    create_comms(world);
    fake_nccl_fail("ncclCommDestroy", 1, ncclUnhandledCudaError);
    rank->comm->ops->destroy(rank->comm);
    rank->comm = NULL;
    assert_non_null(strstr(rank->warning, "rank 0, communicator 'nccl': ncclCommDestroy failed"));
    assert_int_equal(fake_nccl_live(), RANKS);
    fake_nccl_end_all();
    assert_int_equal(fake_nccl_live(), 0);
    world->ranks[1].comm->ops->destroy(world->ranks[1].comm); /* which is ended, too */
    world->ranks[1].comm = NULL;
    assert_non_null(strstr(world->ranks[1].warning, "failed: invalid argument"));
}

/* ---- graphs that outlive their communicator ---------------------------------------------------
 */

static void *destroy_comm(void *argument) {
    nccl_rank *rank = argument;
    rank->comm->ops->destroy(rank->comm);
    rank->comm = NULL;
    return NULL;
}

static fake_graph *capture_reduce(nccl_rank *rank) {
    const pst_collective reduce = reduce_of(rank);
    fake_graph *graph = NULL;
    fake_cuda_begin_capture(pst_cuda_stream(rank->stream));
    assert_int_equal(start(rank, &reduce), PST_OK);
    assert_int_equal(fake_cuda_end_capture(pst_cuda_stream(rank->stream), &graph), CUDA_SUCCESS);
    return graph;
}

/* Memory that stays is a leak only where nobody knows of it. */
pst_comm *left[RANKS];

/* It is left, and ends when the last graph has gone: runtime and device may have gone before. */
static void destroy_leaves_a_communicator_that_graphs_hold(void **state) {
    nccl_world *world = *state;
    fake_graph *graphs[RANKS];
    const uint64_t end = pst__now() + PATIENCE;
    set_deadline(world, 2000 * MILLISECONDS);
    create_comms(world);
    for (int i = 0; i < RANKS; i++) {
        left[i] = world->ranks[i].comm;
        graphs[i] = capture_reduce(&world->ranks[i]);
    }
    assert_int_equal(abort_as_timed_out(&world->ranks[0]), PST_EBUSY); /* the other one finalizes */
    on_ranks(world, RANKS, destroy_comm);
    for (int i = 0; i < RANKS; i++) {
        assert_non_null(strstr(world->ranks[i].warning, "NCCL does not end; its memory stays"));
        assert_non_null(strstr(world->ranks[i].warning, "CUDA graphs"));
        close_nccl_rank(&world->ranks[i]);
        memset(&world->ranks[i], 0, sizeof world->ranks[i]);
    }
    assert_int_equal(fake_nccl_live(), RANKS);
    for (int i = 0; i < RANKS; i++)
        fake_cuda_destroy(graphs[i]);
    while (fake_nccl_live() > 0 && pst__now() < end)
        (void)nanosleep(&(struct timespec){0, 100000}, NULL);
    assert_int_equal(fake_nccl_live(), 0);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(open_nccl_rank(world, i), 0); /* for the end of the test */
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        TEST(without_nccl_it_says_so_on_all_ranks),
        TEST(a_library_that_is_not_nccl_is_named),
        TEST(other_options_are_a_mismatch),
        TEST(wrong_arguments_are_refused),
        TEST(a_failure_of_one_rank_while_creating_is_all_ranks),
        TEST(a_rank_that_never_connects_ends_with_the_deadline),
        TEST(a_first_collective_that_hangs_ends_with_the_deadline),
        TEST(collectives_that_differ_are_named_on_all_ranks),
        TEST(an_error_of_any_call_is_named_and_final),
        TEST(an_error_in_a_group_names_collective_and_ticket),
        TEST(an_error_of_what_is_in_flight_is_found_by_status_and_start),
        TEST(an_abort_lets_the_stream_go_on),
        TEST(an_abort_ends_a_start_that_blocks),
        TEST(abort_by_many_threads_is_one_abort),
        cmocka_unit_test_setup_teardown(the_watchdog_ends_what_never_ends, set_up_with_watchdog,
                                        tear_down),
        TEST(destroy_finalizes),
        TEST(whichever_way_it_is_closed_nothing_is_left),
        TEST(what_nccl_does_not_free_is_in_the_log),
        TEST(destroy_leaves_a_communicator_that_graphs_hold),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
