/* A ZeRO engine on the device cuda, and the communicators nccl and ce. */
#include "fixture.h"

#include <penstock/copy_engine.h>

enum { ROWS = 8, COLUMNS = 16, PAUSE_NS = 5000000 };
enum { GROUPS = 2, APART = 2048 };
enum { SHARD = 8192 }; /* where the shards lie in a rank's memory, APART bytes from each other */

typedef struct engine_rank {
    nccl_rank *rank;
    pst_stream *wrapped; /* the caller's, as torch's is */
    pst_lane *compute;
    pst_zero *engine;
    pst_status status;
    fake_graph *graph; /* of a step */
    int adds;          /* gradients are added to those that there are */
    pst_comm *reduce;  /* (optional) a communicator of its own for reductions */
    pst_comm *alone;   /* (optional) of this rank, which is a replica; and what it was made with */
    pst_local_world *place;
    pst_comm *host;
    pst_exchange exchange;
} engine_rank;

static engine_rank engines[RANKS];
static int time_waits;

static pst_status give_target(void *context, uint32_t group, void **memory, int *accumulate) {
    const engine_rank *self = context;
    *memory = self->rank->memory + AREA / 2 + group * APART;
    *accumulate = self->adds;
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
    pst_comm *gather = self->alone != NULL ? self->alone : rank->comm;
    const pst_zero_options options = {.size = sizeof options,
                                      .name = "net",
                                      .stage = 3,
                                      .gather_comm = gather,
                                      .reduce_comm = self->reduce != NULL ? self->reduce : gather,
                                      .replica_comm = self->alone != NULL ? rank->comm : NULL,
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

static pst_status add_block(engine_rank *self) {
    const pst_parameter_options weight = {.size = sizeof weight,
                                          .name = "weight",
                                          .rows = ROWS,
                                          .row_elements = COLUMNS,
                                          .trainable = 1};
    uint32_t parameter = 0, index = 0;
    const pst_group_options group = {
        .size = sizeof group, .name = "block", .parameters = &parameter, .parameter_count = 1};
    const pst_status status = pst_zero_add_parameter(self->engine, &weight, &parameter);
    return status == PST_OK ? pst_zero_add_group(self->engine, &group, &index) : status;
}

static void *build(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    self->rank = argument;
    self->status = create_engine(self);
    for (int i = 0; i < GROUPS && self->status == PST_OK; i++)
        self->status = add_block(self);
    if (self->status == PST_OK) self->status = pst_zero_seal(self->engine);
    for (uint32_t i = 0; i < GROUPS && self->status == PST_OK; i++)
        self->status = pst_zero_bind_shard(self->engine, i, self->rank->memory + SHARD + i * APART);
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
        if (engines[i].status != PST_OK) print_error("rank %d: %s\n", i, rank->text);
    }
    for (int i = 0; i < RANKS; i++) {
        if (engines[i].status != PST_OK) fail();
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

/* ---- a step as a graph ----------------------------------------------------------------------- */

enum { SOURCE = 16384 }; /* where the gradients lie in a rank's memory */
enum { VALUES = ROWS * COLUMNS };

/* How many of them the rank has. */
static int own_of(const engine_rank *self) {
    return self->alone != NULL ? VALUES : VALUES / RANKS;
}

/* Compute's work, which is captured where its stream is. */
static pst_status scale(const engine_rank *self, void *to, const void *from, size_t count,
                        double by) {
    const pst_cast all = {to, from, count, PST_FLOAT32, PST_FLOAT32};
    pst_device *device = self->rank->device;
    return device->ops->cast_scale_copy(device, self->rank->stream, &all, 1, by);
}

static pst_status use(engine_rank *self, uint32_t group, void *to) {
    void *memory = NULL;
    pst_status status = pst_zero_gather(self->engine, group);
    if (status == PST_OK) status = pst_zero_wait(self->engine, group, &memory);
    return status == PST_OK ? scale(self, to, memory, VALUES, 1.0) : status;
}

/* The gradient is the parameter. */
static pst_status backward(engine_rank *self) {
    char *memory = self->rank->memory;
    pst_status status = pst_zero_begin_backward(self->engine, 1);
    for (uint32_t i = GROUPS; i-- > 0 && status == PST_OK;) {
        const void *source = memory + SOURCE + i * APART;
        status = use(self, i, memory + SOURCE + i * APART);
        if (status == PST_OK) status = pst_zero_gradients(self->engine, i, &source, PST_FLOAT32);
        if (status == PST_OK) status = pst_zero_release(self->engine, i);
    }
    return status == PST_OK ? pst_zero_end_backward(self->engine) : status;
}

/* The optimizer: the shard becomes so much of the gradient. */
static pst_status update(engine_rank *self, double by) {
    char *memory = self->rank->memory;
    pst_status status = PST_OK;
    for (uint32_t i = 0; i < GROUPS && status == PST_OK; i++)
        status = scale(self, memory + SHARD + i * APART, memory + AREA / 2 + i * APART,
                       (size_t)own_of(self), by);
    return status == PST_OK ? pst_zero_updated(self->engine) : status;
}

static pst_status add_gradients(engine_rank *self) {
    pst_status status = pst_zero_begin_forward(self->engine, 1);
    for (uint32_t i = 0; i < GROUPS && status == PST_OK; i++) {
        status = use(self, i, self->rank->memory);
        if (status == PST_OK) status = pst_zero_release(self->engine, i);
    }
    if (status == PST_OK) status = pst_zero_end_forward(self->engine);
    return status == PST_OK ? backward(self) : status;
}

static pst_status train(engine_rank *self) {
    const pst_status status = add_gradients(self);
    return status == PST_OK ? update(self, 0.5) : status;
}

static pst_status capture(engine_rank *self, pst_status (*body)(engine_rank *self),
                          fake_graph **graph) {
    const CUstream native = pst_cuda_stream(self->wrapped);
    pst_status status = pst_zero_drain(self->engine);
    if (status != PST_OK) return status;
    fake_cuda_begin_capture(native);
    status = pst_zero_begin_capture(self->engine, native);
    if (status == PST_OK) status = body(self);
    const pst_status ended = pst_zero_end_capture(self->engine);
    const CUresult joined = fake_cuda_end_capture(native, graph);
    if (status == PST_OK) status = ended;
    return status == PST_OK && joined != CUDA_SUCCESS ? PST_EDEVICE : status;
}

static pst_status launch(engine_rank *self, fake_graph *graph) {
    const pst_status status = pst_zero_before_graph(self->engine);
    if (status != PST_OK) return status;
    fake_cuda_launch(graph, pst_cuda_stream(self->wrapped));
    return pst_zero_after_graph(self->engine);
}

static pst_status train_as_graph(engine_rank *self) {
    fake_graph *graph = NULL;
    pst_status status = capture(self, train, &graph);
    if (status == PST_OK) status = launch(self, graph);
    if (graph != NULL) fake_cuda_destroy(graph);
    return status;
}

static void train_until_steady(engine_rank *self) {
    for (int i = 0; i < 8 && self->status == PST_OK; i++)
        self->status = train(self);
    if (self->status == PST_OK && !pst_zero_is_steady(self->engine)) self->status = PST_ESTATE;
}

/* Eager until a step can be captured; then by turns. */
static void *train_by_turns(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    train_until_steady(self);
    for (int i = 0; i < 8 && self->status == PST_OK; i++)
        self->status = i % 4 == 3 ? train(self) : train_as_graph(self);
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    return NULL;
}

/* All at once, so that a rank may be launches ahead of the other. */
static pst_status launch_thrice(engine_rank *self, fake_graph *graph) {
    pst_status status = PST_OK;
    fake_cuda_hold(1);
    for (int i = 0; i < 3 && status == PST_OK; i++)
        status = launch(self, graph);
    fake_cuda_hold(0);
    return status;
}

/* NCCL ends only behind them. */
static void destroy_graphs(fake_graph *graphs[2]) {
    for (int i = 0; i < 2; i++)
        if (graphs[i] != NULL) fake_cuda_destroy(graphs[i]);
}

/* Two graphs, launched again and again, with eager steps between. */
static void *train_by_launches(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    fake_graph *graphs[2] = {NULL, NULL};
    train_until_steady(self);
    for (int i = 0; i < 2 && self->status == PST_OK; i++)
        self->status = capture(self, train, &graphs[i]);
    for (int i = 0; i < 4 && self->status == PST_OK; i++) {
        self->status = launch_thrice(self, graphs[i % 2]);
        if (self->status == PST_OK) self->status = train(self);
    }
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    destroy_graphs(graphs);
    return NULL;
}

/* Graphs of the passes alone: the second one adds to the gradients of the first. */
static void *add_by_launches(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    fake_graph *graphs[2] = {NULL, NULL};
    train_until_steady(self);
    for (int i = 0; i < 8 && self->status == PST_OK; i++)
        for (self->adds = 0; self->adds < 2 && self->status == PST_OK; self->adds++) {
            fake_graph **graph = &graphs[self->adds];
            const int is_eager = i == 0 || (i == 1 && self->adds == 1) || i == 5;
            if (is_eager) self->status = add_gradients(self);
            if (!is_eager && *graph == NULL) self->status = capture(self, add_gradients, graph);
            if (!is_eager && self->status == PST_OK) self->status = launch(self, *graph);
            if (self->status == PST_OK && self->adds == 1) self->status = update(self, 0.25);
        }
    self->adds = 0;
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    destroy_graphs(graphs);
    return NULL;
}

static float *shard_of(const nccl_rank *rank, int group) {
    return (float *)(void *)(rank->memory + SHARD + group * APART);
}

/* Replicas have the same ones. */
static float first_value(int rank, int group, int element) {
    const int own = own_of(&engines[rank]), part = engines[rank].alone != NULL ? 0 : rank;
    return (float)(((part * GROUPS + group) * own + element + 1) << 10);
}

static void set_shards(const nccl_world *world) {
    for (int i = 0; i < RANKS; i++)
        for (int group = 0; group < GROUPS; group++)
            for (int k = 0; k < own_of(&engines[i]); k++)
                shard_of(&world->ranks[i], group)[k] = first_value(i, group, k);
}

static void check_halved(const nccl_world *world, int times) {
    for (int i = 0; i < RANKS; i++)
        for (int group = 0; group < GROUPS; group++)
            for (int k = 0; k < own_of(&engines[i]); k++)
                assert_true(shard_of(&world->ranks[i], group)[k] ==
                            first_value(i, group, k) / (float)(1 << times));
}

static void destroy_alone(engine_rank *self) {
    if (self->alone == NULL) return;
    self->alone->ops->destroy(self->alone);
    pst_comm_exchange_close(&self->exchange);
    self->host->ops->destroy(self->host);
    pst_local_world_destroy(self->place);
    self->alone = NULL;
}

static void train_and_check(nccl_world *world, uint64_t seed, void *(*train_all)(void *),
                            int steps) {
    time_waits = 0;
    fake_cuda_seed(seed);
    on_ranks(world, RANKS, build);
    all_are_well();
    set_shards(world);
    on_ranks(world, RANKS, train_all);
    all_are_well();
    check_halved(world, steps);
    on_ranks(world, RANKS, destroy);
    for (int i = 0; i < RANKS; i++) {
        world->ranks[i].comm->ops->destroy(world->ranks[i].comm);
        world->ranks[i].comm = NULL;
        if (engines[i].reduce != NULL) engines[i].reduce->ops->destroy(engines[i].reduce);
        engines[i].reduce = NULL;
        destroy_alone(&engines[i]);
    }
}

static void *create_reduce(void *argument) {
    nccl_rank *rank = argument;
    rank->status = pst_nccl_comm_create(rank->runtime, rank->device, &rank->exchange,
                                        &rank->options, &engines[rank->rank].reduce);
    return NULL;
}

/* One for both directions, or one each. */
static void create_nccls(nccl_world *world, int count) {
    create_comms(world);
    if (count > 1) on_ranks(world, RANKS, create_reduce);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(world->ranks[i].status, PST_OK);
}

static void steps_as_graphs_are_steps(void **state) {
    nccl_world *world = *state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_turns, 16);
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_launches, 24);
        create_nccls(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, add_by_launches, 16);
    }
}

static void *create_alone(void *argument) {
    nccl_rank *rank = argument;
    engine_rank *self = &engines[rank->rank];
    pst_status status = pst_local_world_create(rank->runtime, 1, &self->place);
    if (status == PST_OK)
        status = pst_local_comm_create(self->place, rank->runtime, 0, 0, &self->host);
    if (status == PST_OK)
        status = pst_comm_exchange_open(rank->runtime, self->host, &self->exchange);
    if (status == PST_OK)
        status = pst_nccl_comm_create(rank->runtime, rank->device, &self->exchange, &rank->options,
                                      &self->alone);
    rank->status = status;
    return NULL;
}

/* All-reduces between them, and no gather that moves anything. */
static void steps_of_replicas_as_graphs_are_steps(void **state) {
    nccl_world *world = *state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        create_comms(world);
        on_ranks(world, RANKS, create_alone);
        for (int i = 0; i < RANKS; i++)
            assert_int_equal(world->ranks[i].status, PST_OK);
        train_and_check(world, seed, seed % 2 == 0 ? train_by_turns : train_by_launches,
                        seed % 2 == 0 ? 16 : 24);
    }
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

static void graphs_over_copy_engines_are_steps(void **state) {
    nccl_world *world = *state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        create_ces(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, train_by_launches, 24);
        create_ces(world, 1 + (int)(seed % 2));
        train_and_check(world, seed, add_by_launches, 16);
    }
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
    for (uint64_t seed = 1; seed <= 20; seed++) {
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
        cmocka_unit_test_setup_teardown(steps_of_replicas_as_graphs_are_steps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(graphs_that_a_rank_does_not_launch_end_with_the_deadline,
                                        set_up_with_watchdog, tear_down),
        cmocka_unit_test_setup_teardown(graphs_over_copy_engines_are_steps, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_graph_of_one_collective_is_launched_again, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(what_is_launched_ends_behind_an_abort, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_step_without_a_plan_is_not_captured, set_up, tear_down),
        cmocka_unit_test_setup_teardown(waits_of_the_compute_stream_are_timed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(waits_are_timed_where_that_is_asked_for_alone, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
