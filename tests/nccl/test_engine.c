/* A ZeRO engine on the device cuda and the communicator nccl. */
#include "fixture.h"

enum { ROWS = 8, COLUMNS = 16, PAUSE_NS = 5000000 };
enum { SHARD = 8192 }; /* where its shard lies in a rank's memory */

typedef struct engine_rank {
    nccl_rank *rank;
    pst_stream *wrapped; /* the caller's, as torch's is */
    pst_lane *compute;
    pst_zero *engine;
    pst_status status;
} engine_rank;

static engine_rank engines[RANKS];
static int time_waits;

static pst_status give_target(void *context, uint32_t group, void **memory, int *accumulate) {
    (void)group;
    *memory = ((engine_rank *)context)->rank->memory + AREA / 2;
    *accumulate = 0;
    return PST_OK;
}

static void consumed(void *context, uint32_t group) {
    (void)context, (void)group;
}

static pst_status create_engine(engine_rank *self) {
    nccl_rank *rank = self->rank;
    pst_status status =
        rank->device->ops->stream_wrap(rank->device, pst_cuda_stream(rank->stream), &self->wrapped);
    if (status != PST_OK) return status;
    const pst_lane_options lane = {.size = sizeof lane,
                                   .name = "compute",
                                   .device = rank->device,
                                   .stream = self->wrapped,
                                   .mode = PST_LANE_BORROWED};
    status = pst_lane_create(rank->runtime, &lane, &self->compute);
    const pst_zero_options options = {.size = sizeof options,
                                      .name = "net",
                                      .stage = 3,
                                      .gather_comm = rank->comm,
                                      .reduce_comm = rank->comm,
                                      .device = rank->device,
                                      .compute = self->compute,
                                      .bucket_bytes = 4096,
                                      .gradient_target = give_target,
                                      .gradients_consumed = consumed,
                                      .callback_context = self,
                                      .time_waits = time_waits};
    if (status == PST_OK) status = pst_zero_create(rank->runtime, &options, &self->engine);
    return status;
}

static void *build(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    const pst_parameter_options weight = {.size = sizeof weight,
                                          .name = "weight",
                                          .rows = ROWS,
                                          .row_elements = COLUMNS,
                                          .trainable = 1};
    uint32_t index = 0;
    const pst_group_options group = {
        .size = sizeof group, .name = "block", .parameters = &index, .parameter_count = 1};
    self->rank = argument;
    self->status = create_engine(self);
    if (self->status == PST_OK)
        self->status = pst_zero_add_parameter(self->engine, &weight, &index);
    if (self->status == PST_OK) self->status = pst_zero_add_group(self->engine, &group, &index);
    if (self->status == PST_OK) self->status = pst_zero_seal(self->engine);
    if (self->status == PST_OK)
        self->status = pst_zero_bind_shard(self->engine, 0, self->rank->memory + SHARD);
    return NULL;
}

static void begin_use(engine_rank *self) {
    void *memory = NULL;
    self->status = pst_zero_begin_forward(self->engine, 0);
    if (self->status == PST_OK) self->status = pst_zero_gather(self->engine, 0);
    if (self->status == PST_OK) self->status = pst_zero_wait(self->engine, 0, &memory);
}

static void *step(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    begin_use(self);
    if (self->status == PST_OK) self->status = pst_zero_release(self->engine, 0);
    if (self->status == PST_OK) self->status = pst_zero_end_forward(self->engine);
    return NULL;
}

static void *destroy(void *argument) {
    const engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    pst_zero_destroy(self->engine);
    self->rank->device->ops->stream_destroy(self->rank->device, self->wrapped);
    return NULL;
}

static void all_are_well(void) {
    for (int i = 0; i < RANKS; i++) {
        nccl_rank *rank = engines[i].rank;
        (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
        if (engines[i].status != PST_OK) fail_msg("rank %d: %s", i, rank->text);
    }
}

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
        cmocka_unit_test_setup_teardown(waits_of_the_compute_stream_are_timed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(waits_are_timed_where_that_is_asked_for_alone, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
