/* A ZeRO engine on the device cuda, and the communicators nccl and ce. */
#include "../random.h"
#include "engine_rank.h"

#include <penstock/copy_engine.h>

static void refused(nccl_rank *rank, pst_status status) {
    (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
    assert_int_equal(status, PST_ESTATE);
    assert_non_null(strstr(rank->text, "engine 'net'"));
    assert_non_null(strstr(rank->text, "capture"));
    assert_non_null(strstr(rank->text, "outside of what is captured"));
}

/* Each hook says so, changes nothing, and works when the capture is over. */
static void hooks_under_capture_are_refused(void **state) {
    nccl_world *world = *state;
    nccl_rank *first = &world->ranks[0];
    pst_zero *engine;
    void *memory = NULL;
    const void *source = first->memory;
    create_comms(world);
    on_ranks(world, RANKS, build);
    all_are_well();
    on_ranks(world, RANKS, step);
    all_are_well();
    engine = engines[0].engine;
    fake_cuda_capture(pst_cuda_stream(first->stream), 1);
    refused(first, pst_zero_begin_forward(engine, 1));
    refused(first, pst_zero_gather(engine, 0));
    refused(first, pst_zero_wait(engine, 0, &memory));
    refused(first, pst_zero_release(engine, 0));
    refused(first, pst_zero_end_forward(engine));
    refused(first, pst_zero_begin_backward(engine, 1));
    refused(first, pst_zero_gradients(engine, 0, &source, PST_FLOAT32));
    refused(first, pst_zero_end_backward(engine));
    refused(first, pst_zero_updated(engine));
    fake_cuda_capture(pst_cuda_stream(first->stream), 0);
    assert_int_equal(pst_runtime_status(first->runtime), PST_OK);
    on_ranks(world, RANKS, step);
    all_are_well();
    on_ranks(world, RANKS, destroy);
}

/* ---- a step as a graph ----------------------------------------------------------------------- */

static void steps_as_graphs_are_steps(void **state) {
    nccl_world *world = *state;
    for (uint64_t seed = 1; seed <= seeds_of(20); seed++) {
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_turns, 16);
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_launches, 24);
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, add_by_launches, 16);
    }
}

/* An evaluation fills what the graph, and what comes behind it, has to fill again. */
static void *train_behind_evaluations(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    fake_graph *graph = NULL;
    train_until_steady(self);
    if (self->status == PST_OK) (void)step(argument);
    if (self->status == PST_OK) self->status = capture(self, train, &graph);
    for (int i = 0; i < 3 && self->status == PST_OK; i++) {
        self->status = launch(self, graph);
        if (self->status == PST_OK) self->status = launch(self, graph);
        if (self->status == PST_OK) (void)step(argument);
        if (self->status == PST_OK) self->status = launch(self, graph);
        if (self->status == PST_OK) self->status = train(self);
    }
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    if (graph != NULL) fake_cuda_destroy(graph);
    return NULL;
}

static void graphs_fill_what_they_gather(void **state) {
    nccl_world *world = *state;
    fills = 1;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, seed < 3 ? train_by_turns : add_by_launches, 16);
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_behind_evaluations, 20);
    }
    fills = 0;
}

/* ---- a rank that stays away -------------------------------------------------------------------
 */

static int set_up_with_watchdog(void **state) {
    return set_up_watched(state, 2000 * MILLISECONDS);
}

static void *capture_alone(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    train_until_steady(self);
    if (self->status == PST_OK) self->status = capture(self, train, &self->graph);
    return NULL;
}

static void capture_on_all(nccl_world *world) {
    time_waits = 0;
    create_nccls(world, 2);
    on_ranks(world, RANKS, build);
    all_are_well();
    on_ranks(world, RANKS, capture_alone);
    all_are_well();
}

static pst_status runtime_of(nccl_rank *rank) {
    return pst_runtime_status(rank->runtime);
}

/* Nobody but the watchdog looks; the stream then goes on, and no more is launched. */
static void launch_until_overdue(nccl_rank *rank) {
    engine_rank *self = &engines[rank->rank];
    assert_int_equal(launch(self, self->graph), PST_OK);
    assert_int_equal(query(rank), PST_PENDING);
    assert_int_equal(ask_until(rank, runtime_of, PST_OK), PST_ETIMEDOUT);
    assert_int_equal(until_over(rank), PST_OK);
    assert_int_equal(launch(self, self->graph), PST_ETIMEDOUT);
    (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
    if (strstr(rank->text, "graph of a step") == NULL) fail_msg("%s", rank->text);
}

static void destroy_comms(nccl_rank *rank) {
    pst_comm **const reduce = &engines[rank->rank].reduce;
    rank->comm->ops->destroy(rank->comm);
    (*reduce)->ops->destroy(*reduce);
    rank->comm = *reduce = NULL;
}

/* Rank 1 does not launch its graph, and when it does rank 0 has given up. */
static void graphs_that_a_rank_does_not_launch_end_with_the_deadline(void **state) {
    nccl_world *world = *state;
    capture_on_all(world);
    for (int i = 0; i < RANKS; i++)
        launch_until_overdue(&world->ranks[i]);
    assert_int_equal(fake_nccl_live(), 2 * RANKS); /* the graphs are there still */
    for (int i = 0; i < RANKS; i++)
        fake_cuda_destroy(engines[i].graph);
    on_ranks(world, RANKS, destroy);
    for (int i = 0; i < RANKS; i++) {
        destroy_comms(&world->ranks[i]);
        assert_string_equal(world->ranks[i].warning, "");
    }
    assert_int_equal(fake_nccl_live(), 0);
}

/* ---- over copy engines ----------------------------------------------------------------------- */

static void *create_ce(void *argument) {
    nccl_rank *rank = argument;
    const pst_ce_options options = {.size = sizeof options};
    rank->status =
        pst_ce_create(rank->runtime, rank->device, &rank->exchange, &options, &rank->comm);
    (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
    return NULL;
}

static void *create_second_ce(void *argument) {
    nccl_rank *rank = argument;
    const pst_ce_options options = {.size = sizeof options, .name = "reduce"};
    rank->status = pst_ce_create(rank->runtime, rank->device, &rank->exchange, &options,
                                 &engines[rank->rank].reduce);
    return NULL;
}

static void create_ces(nccl_world *world, int count) {
    on_ranks(world, RANKS, create_ce);
    if (count > 1) on_ranks(world, RANKS, create_second_ce);
    for (int i = 0; i < RANKS; i++)
        if (world->ranks[i].status != PST_OK) fail_msg("%s", world->ranks[i].text);
}

static void train_over_copy_engines(nccl_world *world, uint64_t first, uint64_t count) {
    for (uint64_t seed = first; seed < first + seeds_of(count); seed++) {
        create_ces(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_turns, 16);
        create_ces(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_launches, 24);
        create_ces(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, add_by_launches, 16);
    }
}

static void graphs_over_copy_engines_are_steps(void **state) {
    train_over_copy_engines(*state, 1, 10);
}

static void gradients_may_go_out_from_where_they_lie(void **state) {
    push_bytes = 64;
    train_over_copy_engines(*state, 11, 8);
    part_bytes = PST_ZERO_ALIGNMENT; /* more pieces than a node may wait for: FAKE_PENDING */
    train_over_copy_engines(*state, 11, 4);
    push_bytes = part_bytes = 0;
}

/* Stage 2's lie within what is gathered. */
static void shards_may_lie_in_their_places(void **state) {
    is_in_place = 1;
    train_over_copy_engines(*state, 21, 4);
    stage = 2;
    push_bytes = 64;
    train_over_copy_engines(*state, 21, 8);
    push_bytes = 0;
    is_in_place = 0;
    train_over_copy_engines(*state, 31, 4);
    stage = 3;
}

static void rows_may_be_named(void **state) {
    looks_up = 1;
    train_over_copy_engines(*state, 21, 4);
    stage = 2;
    is_in_place = 1;
    push_bytes = 64;
    train_over_copy_engines(*state, 21, 4);
    stage = 3;
    push_bytes = 0;
    is_in_place = looks_up = 0;
}

static void gathers_may_make_their_copies(void **state) {
    nccl_world *world = *state;
    is_transient = 1;
    train_over_copy_engines(world, 21, 10);
    for (uint64_t seed = 1; seed <= seeds_of(10); seed++) {
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_turns, 16);
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_launches, 24);
    }
    is_transient = 0;
}

static void the_host_trains_shards_of_its_own(void **state) {
    nccl_world *world = *state;
    shards_on_host = 1;
    for (uint64_t seed = 1; seed <= seeds_of(20); seed++) {
        push_bytes = seed % 4 == 0 ? 64 : 0;
        is_transient = seed % 3 == 0;
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_on_host, 16);
        create_ces(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_on_host, 16);
    }
    shards_on_host = is_transient = 0;
    push_bytes = 0;
}

/* Of one gather alone, so that no later flag makes up for one that is lost. */
static void *launch_a_gather(void *argument) {
    nccl_rank *rank = argument;
    const pst_comm_ops *ops = rank->comm->ops;
    const CUstream native = pst_cuda_stream(rank->stream);
    const pst_segment segments[RANKS] = {{0, 0, 0, 64}, {1, 0, 64, 64}};
    const pst_collective gather = {.kind = PST_ALL_GATHER,
                                   .name = "gather",
                                   .dtype = PST_FLOAT32,
                                   .ticket = PST_TICKET_CAPTURED(1, 1),
                                   .source = rank->memory,
                                   .source_bytes = 64,
                                   .destination = rank->memory + 64,
                                   .segments = segments,
                                   .segment_count = RANKS};
    fake_graph *graph = NULL;
    rank->status = pst_ce_register(rank->comm, rank->memory, AREA);
    fake_cuda_begin_capture(native);
    if (rank->status == PST_OK) rank->status = ops->capture_begin(rank->comm);
    if (rank->status == PST_OK) rank->status = start(rank, &gather);
    if (rank->status == PST_OK) rank->status = ops->capture_end(rank->comm, rank->stream);
    if (fake_cuda_end_capture(native, &graph) != CUDA_SUCCESS) rank->status = PST_EDEVICE;
    for (int i = 0; i < 3 && rank->status == PST_OK; i++) {
        fake_cuda_launch(graph, native);
        rank->status = ops->graph_launched(rank->comm, rank->stream);
    }
    if (rank->status == PST_OK) rank->status = until_over(rank);
    return NULL;
}

static void a_graph_of_one_collective_is_launched_again(void **state) {
    nccl_world *world = *state;
    for (uint64_t seed = 1; seed <= seeds_of(20); seed++) {
        create_ces(world, 1);
        fake_cuda_seed(seed);
        for (int i = 0; i < RANKS; i++)
            memset(world->ranks[i].memory, 0x10 * (i + 1), 64);
        on_ranks(world, RANKS, launch_a_gather);
        for (int i = 0; i < RANKS; i++) {
            nccl_rank *rank = &world->ranks[i];
            if (rank->status != PST_OK)
                fail_msg("seed %d, rank %d: %s, %s", (int)seed, i, pst_status_text(rank->status),
                         rank->comm->ops->error_text(rank->comm));
            assert_int_equal(rank->memory[64], 0x10);
            assert_int_equal(rank->memory[128], 0x20);
            rank->comm->ops->destroy(rank->comm);
            rank->comm = NULL;
        }
    }
}

static void *train_and_capture(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    train_until_steady(self);
    if (self->status == PST_OK) self->status = capture(self, train, &self->graph);
    if (self->status == PST_OK) self->status = launch(self, self->graph);
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    return NULL;
}

/* Rank 1 launches nothing more. */
static void what_is_launched_ends_behind_an_abort(void **state) {
    nccl_world *world = *state;
    nccl_rank *first = &world->ranks[0], *second = &world->ranks[1];
    create_ces(world, 1);
    on_ranks(world, RANKS, build);
    all_are_well();
    on_ranks(world, RANKS, train_and_capture);
    all_are_well();
    for (int i = 0; i < 3; i++)
        assert_int_equal(launch(&engines[0], engines[0].graph), PST_OK);
    assert_int_equal(query(first), PST_PENDING);
    pst_runtime_poison(first->runtime, PST_ETIMEDOUT, "rank 1 does not come");
    assert_int_equal(until_over(first), PST_OK);
    assert_int_equal(launch(&engines[0], engines[0].graph), PST_ETIMEDOUT);
    assert_int_equal(launch(&engines[1], engines[1].graph), PST_EPEER);
    (void)pst_runtime_error(second->runtime, second->text, sizeof second->text);
    assert_non_null(strstr(second->text, "rank 0 has failed"));
    on_ranks(world, RANKS, destroy);
}

/* What the host would have to wait in is refused, and so is what has no plan yet; nothing breaks.
 */
static void *capture_too_early(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    const CUstream native = pst_cuda_stream(self->wrapped);
    fake_graph *graph = NULL;
    char text[256];
    self->status = pst_zero_drain(self->engine);
    fake_cuda_begin_capture(native);
    if (self->status == PST_OK) self->status = pst_zero_begin_capture(self->engine, native);
    if (self->status == PST_OK) self->status = train(self);
    (void)pst_runtime_error(self->rank->runtime, text, sizeof text);
    const int is_right = self->status == PST_ESTATE && strstr(text, "train some steps") != NULL;
    (void)pst_zero_end_capture(self->engine);
    (void)fake_cuda_end_capture(native, &graph);
    fake_cuda_destroy(graph);
    self->status = is_right ? pst_zero_drain(self->engine) : PST_EINVAL;
    if (self->status == PST_OK) self->status = train(self);
    return NULL;
}

static void a_step_without_a_plan_is_not_captured(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    on_ranks(world, RANKS, build);
    all_are_well();
    on_ranks(world, RANKS, capture_too_early);
    all_are_well();
    on_ranks(world, RANKS, train_by_turns);
    all_are_well();
    on_ranks(world, RANKS, destroy);
}

static void *make_steady(void *argument) {
    train_until_steady(&engines[((nccl_rank *)argument)->rank]);
    return NULL;
}

static void a_capture_that_fails_names_the_call_of_the_driver(void **state) {
    nccl_world *world = *state;
    nccl_rank *rank = &world->ranks[0];
    fake_graph *graph = NULL;
    create_comms(world);
    on_ranks(world, RANKS, build);
    on_ranks(world, RANKS, make_steady);
    all_are_well();
    fake_cuda_fail("cuStreamWaitEvent", 1, CUDA_ERROR_INVALID_HANDLE);
    assert_int_equal(capture(&engines[0], train, &graph), PST_EDEVICE);
    (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
    if (strstr(rank->text, "join the capture: device error device cuda:0: cuStreamWaitEvent") ==
        NULL)
        fail_msg("%s", rank->text);
    fake_cuda_destroy(graph);
    on_ranks(world, RANKS, destroy);
}

/* ---- waits of the compute stream ------------------------------------------------------------- */

/* Until the device has passed all that the rank's stream was given. */
static void pass_stream(nccl_rank *rank) {
    assert_int_equal(until_over(rank), PST_OK);
}

static pst_zero_stats stats_of(int rank) {
    pst_zero_stats stats = {.size = sizeof stats};
    pst_zero_get_stats(engines[rank].engine, &stats);
    return stats;
}

/* Rank 0 waits for a gather that rank 1 begins only later: its stream stands still meanwhile. */
static void waits_of_the_compute_stream_are_timed(void **state) {
    nccl_world *world = *state;
    nccl_rank *first = &world->ranks[0];
    const struct timespec pause = {0, PAUSE_NS};
    time_waits = 1;
    create_comms(world);
    on_ranks(world, RANKS, build);
    all_are_well();
    begin_use(&engines[0]);
    assert_int_equal(query(first), PST_PENDING); /* it has come to the wait */
    assert_int_equal(stats_of(0).timed_waits, 0);
    (void)nanosleep(&pause, NULL);
    begin_use(&engines[1]);
    all_are_well();
    for (int i = 0; i < RANKS; i++)
        pass_stream(&world->ranks[i]);
    const pst_zero_stats stats = stats_of(0);
    assert_int_equal(stats.timed_waits, 1);
    assert_int_equal(stats.untimed_waits, 0);
    assert_true(stats.device_gather_ns >= PAUSE_NS);
    assert_int_equal(stats.device_reduce_ns, 0);
    pst_zero_reset_stats(engines[0].engine);
    assert_int_equal(stats_of(0).timed_waits, 0);
    assert_int_equal(stats_of(0).device_gather_ns, 0);
    on_ranks(world, RANKS, destroy);
}

static void launches_of_graphs_are_timed_apart_from_passes(void **state) {
    nccl_world *world = *state;
    capture_on_all(world);
    const uint64_t passes = stats_of(0).timed_passes;
    for (int i = 0; i < 3 * RANKS; i++)
        assert_int_equal(launch(&engines[i % RANKS], engines[i % RANKS].graph), PST_OK);
    for (int i = 0; i < RANKS; i++)
        pass_stream(&world->ranks[i]);
    const pst_zero_stats stats = stats_of(0);
    assert_int_equal(stats.timed_graphs, 3);
    assert_true(stats.graphs_ns > 0);
    assert_int_equal(stats.timed_passes, passes);
    pst_zero_reset_stats(engines[0].engine);
    assert_int_equal(stats_of(0).timed_graphs + stats_of(0).graphs_ns, 0);
    assert_int_equal(launch(&engines[0], engines[0].graph), PST_OK);
    assert_int_equal(query(&world->ranks[0]), PST_PENDING); /* it waits for the other ranks */
    pst_zero_reset_stats(engines[0].engine);
    for (int i = 1; i < RANKS; i++)
        assert_int_equal(launch(&engines[i], engines[i].graph), PST_OK);
    for (int i = 0; i < RANKS; i++)
        pass_stream(&world->ranks[i]);
    assert_int_equal(stats_of(0).timed_graphs, 0); /* it was launched before */
    for (int i = 0; i < RANKS; i++)
        fake_cuda_destroy(engines[i].graph);
    on_ranks(world, RANKS, destroy);
    for (int i = 0; i < RANKS; i++)
        destroy_comms(&world->ranks[i]);
}

static void waits_are_timed_where_that_is_asked_for_alone(void **state) {
    nccl_world *world = *state;
    time_waits = 0;
    create_comms(world);
    on_ranks(world, RANKS, build);
    all_are_well();
    on_ranks(world, RANKS, step);
    all_are_well();
    for (int i = 0; i < RANKS; i++)
        pass_stream(&world->ranks[i]);
    assert_int_equal(stats_of(0).timed_waits + stats_of(0).untimed_waits, 0);
    assert_int_equal(pst_trace_start(world->ranks[0].runtime), PST_OK);
    begin_use(&engines[0]); /* before rank 1, and so there is something to wait for */
    begin_use(&engines[1]);
    all_are_well();
    for (int i = 0; i < RANKS; i++)
        pass_stream(&world->ranks[i]);
    assert_int_equal(stats_of(0).timed_waits, 1);
    on_ranks(world, RANKS, destroy);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(hooks_under_capture_are_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(steps_as_graphs_are_steps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(graphs_fill_what_they_gather, set_up, tear_down),
        cmocka_unit_test_setup_teardown(graphs_that_a_rank_does_not_launch_end_with_the_deadline,
                                        set_up_with_watchdog, tear_down),
        cmocka_unit_test_setup_teardown(graphs_over_copy_engines_are_steps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(gradients_may_go_out_from_where_they_lie, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(shards_may_lie_in_their_places, set_up, tear_down),
        cmocka_unit_test_setup_teardown(rows_may_be_named, set_up, tear_down),
        cmocka_unit_test_setup_teardown(gathers_may_make_their_copies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_host_trains_shards_of_its_own, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_graph_of_one_collective_is_launched_again, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(what_is_launched_ends_behind_an_abort, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_step_without_a_plan_is_not_captured, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_capture_that_fails_names_the_call_of_the_driver, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(waits_of_the_compute_stream_are_timed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(launches_of_graphs_are_timed_apart_from_passes, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(waits_are_timed_where_that_is_asked_for_alone, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
