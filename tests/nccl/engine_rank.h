/* One rank's ZeRO engine on the device cuda, over the stand-ins: training steps, as they are and as
 * graphs. */
#ifndef PST_TESTS_NCCL_ENGINE_RANK_H
#define PST_TESTS_NCCL_ENGINE_RANK_H

#include "fixture.h"
#include "sched/cuda/cuda.h"
#include "sched/device/host.h"

enum { ROWS = 8, COLUMNS = 16, VALUES = ROWS * COLUMNS, PAUSE_NS = 5000000 };
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
    char *rows[GROUPS]; /* this rank's, of each group's shard */
} engine_rank;

static engine_rank engines[RANKS];
static int time_waits;
static size_t push_bytes; /* 0: nothing is that large */
static size_t part_bytes; /* 0: all goes out whole */
static int shards_on_host;
static int stage = 3;
static int is_in_place;  /* shards lie where the engine has places for them */
static int is_transient; /* gathers make their communication copies, in bf16, which holds values */
static int fills;        /* what is gathered is made by fill_copy */
static int looks_up;     /* groups are looked up: forwards name their rows, all of them */

static inline pst_status give_target(void *context, uint32_t group, void **memory,
                                     int *accumulate) {
    const engine_rank *self = context;
    *memory = self->rank->memory + AREA / 2 + group * APART;
    *accumulate = self->adds;
    return PST_OK;
}

static inline void consumed(void *context, uint32_t group) {
    (void)context, (void)group;
}

static inline pst_status fill_copy(void *context, uint32_t group, void *copy) {
    const engine_rank *self = context;
    const pst_cast all = {copy, self->rows[group], self->alone != NULL ? VALUES : VALUES / RANKS,
                          PST_FLOAT32, PST_FLOAT32};
    pst_device *device = self->rank->device;
    return device->ops->cast_scale_copy(device, self->rank->stream, &all, 1, 1.0);
}

static inline pst_status create_engine(engine_rank *self) {
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
                                      .stage = stage,
                                      .gather_comm = gather,
                                      .reduce_comm = self->reduce != NULL ? self->reduce : gather,
                                      .replica_comm = self->alone != NULL ? rank->comm : NULL,
                                      .device = rank->device,
                                      .compute = self->compute,
                                      .bucket_bytes = 4096,
                                      .push_bytes = push_bytes,
                                      .part_bytes = part_bytes,
                                      .gradient_target = give_target,
                                      .gradients_consumed = consumed,
                                      .callback_context = self,
                                      .time_waits = time_waits,
                                      .shards_on_host = shards_on_host,
                                      .transient_copies = is_transient,
                                      .fill_copy = fill_copy};
    if (status == PST_OK) status = pst_zero_create(rank->runtime, &options, &self->engine);
    return status;
}

static inline pst_status add_block(engine_rank *self) {
    const pst_parameter_options weight = {.size = sizeof weight,
                                          .name = "weight",
                                          .rows = ROWS,
                                          .row_elements = COLUMNS,
                                          .trainable = 1};
    uint32_t parameter = 0, index = 0;
    const pst_group_options group = {.size = sizeof group,
                                     .name = "block",
                                     .parameters = &parameter,
                                     .parameter_count = 1,
                                     .gather_dtype = is_transient ? PST_BFLOAT16 : PST_FLOAT32,
                                     .forward_only = looks_up,
                                     .looked_up = looks_up,
                                     .filled = fills};
    const pst_status status = pst_zero_add_parameter(self->engine, &weight, &parameter);
    return status == PST_OK ? pst_zero_add_group(self->engine, &group, &index) : status;
}

static inline pst_status bind_shard(engine_rank *self, uint32_t group) {
    void *place = NULL;
    pst_parameter_layout layout;
    pst_status status = pst_zero_parameter_layout(self->engine, group, group, &layout);
    if (status == PST_OK && is_in_place) status = pst_zero_shard_place(self->engine, group, &place);
    if (status != PST_OK) return status;
    char *shard = place != NULL ? place : self->rank->memory + SHARD + group * APART;
    self->rows[group] = shard + layout.shard_offset;
    return pst_zero_bind_shard(self->engine, group, shard);
}

static inline void *build(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    self->rank = argument;
    self->status = create_engine(self);
    for (int i = 0; i < GROUPS && self->status == PST_OK; i++)
        self->status = add_block(self);
    if (self->status == PST_OK) self->status = pst_zero_seal(self->engine);
    for (uint32_t i = 0; i < GROUPS && self->status == PST_OK; i++)
        self->status = bind_shard(self, i);
    return NULL;
}

static inline void begin_use(engine_rank *self) {
    void *memory = NULL;
    self->status = pst_zero_begin_forward(self->engine, 0);
    if (self->status == PST_OK) self->status = pst_zero_gather(self->engine, 0);
    if (self->status == PST_OK) self->status = pst_zero_wait(self->engine, 0, &memory);
}

static inline void *step(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    begin_use(self);
    if (self->status == PST_OK) self->status = pst_zero_release(self->engine, 0);
    if (self->status == PST_OK) self->status = pst_zero_end_forward(self->engine);
    return NULL;
}

static inline void *destroy(void *argument) {
    const engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    pst_zero_destroy(self->engine);
    self->rank->device->ops->stream_destroy(self->rank->device, self->wrapped);
    return NULL;
}

static inline void all_are_well(void) {
    for (int i = 0; i < RANKS; i++) {
        nccl_rank *rank = engines[i].rank;
        (void)pst_runtime_error(rank->runtime, rank->text, sizeof rank->text);
        if (engines[i].status != PST_OK) print_error("rank %d: %s\n", i, rank->text);
    }
    for (int i = 0; i < RANKS; i++) {
        if (engines[i].status != PST_OK) fail();
    }
}

/* ---- a step as a graph ----------------------------------------------------------------------- */

enum { SOURCE = 16384 }; /* where the gradients lie in a rank's memory */

/* How many of them the rank has. */
static inline int own_of(const engine_rank *self) {
    return self->alone != NULL ? VALUES : VALUES / RANKS;
}

/* Compute's work, which is captured where its stream is. */
static inline pst_status scale(const engine_rank *self, void *to, const void *from, size_t count,
                               double by, pst_dtype dtype) {
    const pst_cast all = {to, from, count, PST_FLOAT32, dtype};
    pst_device *device = self->rank->device;
    return device->ops->cast_scale_copy(device, self->rank->stream, &all, 1, by);
}

static inline pst_status use(engine_rank *self, uint32_t group, void *to) {
    void *memory = NULL;
    pst_status status = pst_zero_gather(self->engine, group);
    if (status == PST_OK) status = pst_zero_wait(self->engine, group, &memory);
    const pst_dtype dtype = is_transient ? PST_BFLOAT16 : PST_FLOAT32;
    return status == PST_OK ? scale(self, to, memory, VALUES, 1.0, dtype) : status;
}

/* The gradient is the parameter. */
static inline pst_status backward(engine_rank *self) {
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

/* At once, on this thread. */
static inline void scale_on_host(const engine_rank *self, char *to, const char *from, double by) {
    const pst_cast all = {to, from, (size_t)own_of(self), PST_FLOAT32, PST_FLOAT32};
    (void)pst__host_cast(&all, by);
}

/* The optimizer: the shard becomes so much of the gradient. */
static inline pst_status update(engine_rank *self, double by) {
    char *memory = self->rank->memory;
    pst_status status = PST_OK;
    for (uint32_t i = 0; i < GROUPS && shards_on_host; i++)
        scale_on_host(self, self->rows[i], memory + AREA / 2 + i * APART, by);
    if (shards_on_host) return pst_zero_updated(self->engine);
    for (uint32_t i = 0; i < GROUPS && status == PST_OK; i++)
        status = scale(self, self->rows[i], memory + AREA / 2 + i * APART, (size_t)own_of(self), by,
                       PST_FLOAT32);
    return status == PST_OK ? pst_zero_updated(self->engine) : status;
}

static inline pst_status name_rows(engine_rank *self, uint32_t group) {
    static const int64_t all[ROWS + 1] = {7, 3, 0, 1, ROWS, 2, 6, 4, 5};
    return looks_up ? pst_zero_name_rows(self->engine, group, all, ROWS + 1) : PST_OK;
}

static inline pst_status add_gradients(engine_rank *self) {
    pst_status status = pst_zero_begin_forward(self->engine, 1);
    for (uint32_t i = 0; i < GROUPS && status == PST_OK; i++) {
        status = name_rows(self, i);
        if (status == PST_OK) status = use(self, i, self->rank->memory);
        if (status == PST_OK) status = pst_zero_release(self->engine, i);
    }
    if (status == PST_OK) status = pst_zero_end_forward(self->engine);
    return status == PST_OK ? backward(self) : status;
}

static inline pst_status train(engine_rank *self) {
    const pst_status status = add_gradients(self);
    return status == PST_OK ? update(self, 0.5) : status;
}

/* Whoever tells a time next wants another anchor for it. */
static inline void age_anchor(pst__cuda *cuda) {
    (void)pthread_mutex_lock(&cuda->anchor.lock);
    if (cuda->anchor.host_ns != 0) cuda->anchor.host_ns -= 2000000000u;
    (void)pthread_mutex_unlock(&cuda->anchor.lock);
}

/* As a thread with a context of its own, which may ask the driver for no event meanwhile. */
static inline pst_status capture(engine_rank *self, pst_status (*body)(engine_rank *self),
                                 fake_graph **graph) {
    const CUstream native = pst_cuda_stream(self->wrapped);
    pst__cuda *cuda = pst__cuda_of(self->rank->device);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    pst_status status = pst_zero_drain(self->engine);
    if (status != PST_OK) return status;
    age_anchor(cuda);
    (void)cuda->driver.cuThreadExchangeStreamCaptureMode(&mode);
    fake_cuda_begin_capture(native);
    status = pst_zero_begin_capture(self->engine, native);
    if (status == PST_OK) status = body(self);
    const pst_status ended = pst_zero_end_capture(self->engine);
    const CUresult joined = fake_cuda_end_capture(native, graph);
    (void)cuda->driver.cuThreadExchangeStreamCaptureMode(&mode);
    if (status == PST_OK) status = ended;
    return status == PST_OK && joined != CUDA_SUCCESS ? PST_EDEVICE : status;
}

static inline pst_status launch(engine_rank *self, fake_graph *graph) {
    const pst_status status = pst_zero_before_graph(self->engine);
    if (status != PST_OK) return status;
    fake_cuda_launch(graph, pst_cuda_stream(self->wrapped));
    return pst_zero_after_graph(self->engine);
}

static inline pst_status train_as_graph(engine_rank *self) {
    fake_graph *graph = NULL;
    pst_status status = capture(self, train, &graph);
    if (status == PST_OK) status = launch(self, graph);
    if (graph != NULL) fake_cuda_destroy(graph);
    return status;
}

static inline void train_until_steady(engine_rank *self) {
    for (int i = 0; i < 8 && self->status == PST_OK; i++)
        self->status = train(self);
    if (self->status == PST_OK && !pst_zero_is_steady(self->engine)) self->status = PST_ESTATE;
}

/* Eager until a step can be captured; then by turns. */
static inline void *train_by_turns(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    train_until_steady(self);
    for (int i = 0; i < 8 && self->status == PST_OK; i++)
        self->status = i % 4 == 3 ? train(self) : train_as_graph(self);
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    return NULL;
}

/* All at once, so that a rank may be launches ahead of the other. */
static inline pst_status launch_thrice(engine_rank *self, fake_graph *graph) {
    pst_status status = PST_OK;
    fake_cuda_hold(1);
    for (int i = 0; i < 3 && status == PST_OK; i++)
        status = launch(self, graph);
    fake_cuda_hold(0);
    return status;
}

/* NCCL ends only behind them. */
static inline void destroy_graphs(fake_graph *graphs[2]) {
    for (int i = 0; i < 2; i++)
        if (graphs[i] != NULL) fake_cuda_destroy(graphs[i]);
}

/* Two graphs, launched again and again, with eager steps between. */
static inline void *train_by_launches(void *argument) {
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
static inline void *add_by_launches(void *argument) {
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

/* The host does every step as soon as it can, of one backward or of two. */
static inline void *train_on_host(void *argument) {
    engine_rank *self = &engines[((nccl_rank *)argument)->rank];
    for (int i = 0; i < 16 && self->status == PST_OK; i++) {
        const int count = 1 + i % 2;
        for (self->adds = 0; self->adds < count && self->status == PST_OK; self->adds++)
            self->status = add_gradients(self);
        if (self->status == PST_OK) self->status = update(self, 0.5 / count);
    }
    self->adds = 0;
    if (self->status == PST_OK) self->status = pst_zero_drain(self->engine);
    return NULL;
}

static inline float *shard_of(const nccl_rank *rank, int group) {
    return (float *)(void *)engines[rank->rank].rows[group];
}

/* Replicas have the same ones. */
static inline float first_value(int rank, int group, int element) {
    const int own = own_of(&engines[rank]), part = engines[rank].alone != NULL ? 0 : rank;
    return (float)(((part * GROUPS + group) * own + element + 1) << 10);
}

static inline void set_shards(const nccl_world *world) {
    for (int i = 0; i < RANKS; i++)
        for (int group = 0; group < GROUPS; group++)
            for (int k = 0; k < own_of(&engines[i]); k++)
                shard_of(&world->ranks[i], group)[k] = first_value(i, group, k);
}

static inline void check_halved(const nccl_world *world, int times) {
    for (int i = 0; i < RANKS; i++)
        for (int group = 0; group < GROUPS; group++)
            for (int k = 0; k < own_of(&engines[i]); k++)
                assert_true(shard_of(&world->ranks[i], group)[k] ==
                            first_value(i, group, k) / (float)(1 << times));
}

static inline void destroy_alone(engine_rank *self) {
    if (self->alone == NULL) return;
    self->alone->ops->destroy(self->alone);
    pst_comm_exchange_close(&self->exchange);
    self->host->ops->destroy(self->host);
    pst_local_world_destroy(self->place);
    self->alone = NULL;
}

static inline void train_and_check(nccl_world *world, uint64_t seed, void *(*train_all)(void *),
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

static inline void *create_reduce(void *argument) {
    nccl_rank *rank = argument;
    rank->status = pst_nccl_comm_create(rank->runtime, rank->device, &rank->exchange,
                                        &rank->options, &engines[rank->rank].reduce);
    return NULL;
}

/* One for both directions, or one each. */
static inline void create_nccls(nccl_world *world, int count) {
    create_comms(world);
    if (count > 1) on_ranks(world, RANKS, create_reduce);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(world->ranks[i].status, PST_OK);
}

#endif
