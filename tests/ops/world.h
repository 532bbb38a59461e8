/* Ranks as threads, each with a runtime, two local communicators and an engine over a small model
 * whose values everybody can compute. Failures are collected by rank, because a test's own asserts
 * belong to its thread. */
#ifndef PST_TESTS_OPS_WORLD_H
#define PST_TESTS_OPS_WORLD_H

#include "../cmocka_all.h"

#include <penstock/penstock.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_GROUPS     24
#define MOST_PARAMETERS 64
#define MOST_RANKS      4

typedef struct shape {
    size_t rows, row_elements;
    int trainable;
} shape;

/* Parameters by group: group g has shapes[first[g]] .. shapes[first[g + 1] - 1]. */
typedef struct model {
    size_t parameter_count, group_count;
    shape shapes[MOST_PARAMETERS];
    size_t first[MOST_GROUPS + 1];
    pst_dtype gather_dtype, reduce_dtype;
    int stage;
    uint32_t prefetch_ahead;
    size_t prefetch_bytes, bucket_bytes;
    int one_comm, pumped;
    uint64_t deadline_ns, watchdog_ns; /* a watchdog poisons */
} model;

typedef struct rank_state {
    int rank, world;
    const model *model;
    void *argument;
    pst_local_world *meeting;
    pst_runtime *runtime;
    pst_comm *gather, *reduce;
    pst_zero *engine;
    uint32_t parameters[MOST_PARAMETERS], groups[MOST_GROUPS];
    char group_names[MOST_GROUPS][24];
    pst_group_layout layouts[MOST_GROUPS];
    float *shards[MOST_GROUPS], *targets[MOST_GROUPS];
    int has_target[MOST_GROUPS]; /* gradients of earlier backwards are in it */
    int consumed[MOST_GROUPS];
    float *gradients[MOST_PARAMETERS]; /* whole, of the current backward */
    uint64_t version;                  /* of the parameters' values */
    char failure[512];
} rank_state;

typedef void (*rank_body)(rank_state *state);

/* ---- failing, from any thread ---------------------------------------------------------------- */

static inline void fail_at(rank_state *state, const char *file, int line, const char *what) {
    char text[256] = "";
    if (state->failure[0] != '\0') return;
    if (state->runtime != NULL) (void)pst_runtime_error(state->runtime, text, sizeof text);
    (void)snprintf(state->failure, sizeof state->failure, "%s:%d: rank %d: %.120s [%s]", file, line,
                   state->rank, what, text);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fail_at(state, __FILE__, __LINE__, #condition);                                        \
            return;                                                                                \
        }                                                                                          \
    } while (0)
#define CHECK_OK(call) CHECK((call) == PST_OK)
/* After a call that may have failed inside. */
#define CHECK_FINE() CHECK(state->failure[0] == '\0')

/* ---- values that every rank can compute ------------------------------------------------------ */

static inline uint64_t mix(uint64_t value) {
    value ^= value >> 30;
    value *= 0xbf58476d1ce4e5b9u;
    value ^= value >> 27;
    value *= 0x94d049bb133111ebu;
    return value ^ (value >> 31);
}

/* Few bits, so that bf16 holds it too. */
static inline float value_of(uint64_t version, size_t parameter, size_t element) {
    uint64_t bits = mix(version * 1000003u + parameter * 10007u + element + 1);
    return (float)((int)(bits % 255u) - 127) / 16.0f;
}

/* Any float: sums are compared bit for bit. */
static inline float gradient_of(int rank, uint64_t step, size_t parameter, size_t element) {
    uint64_t bits = mix(step * 7919u + (uint64_t)rank * 104729u + parameter * 10007u + element + 3);
    return (float)((double)(bits % 2000003u) / 1000001.0 - 1.0);
}

/* Sum in rank order of what each rank sends; a rank beyond `have` (by bit) sends zeros. */
static inline float mean_gradient(int world, unsigned have, uint64_t step, size_t parameter,
                                  size_t element) {
    float sum = 0;
    for (int rank = 0; rank < world; rank++) {
        float sent = (float)((double)gradient_of(rank, step, parameter, element) / world);
        sum += (have >> rank) & 1u ? sent : 0.0f;
    }
    return sum;
}

static inline size_t elements_of(const shape *shape) {
    return shape->rows * shape->row_elements;
}

/* ---- the engine over the model --------------------------------------------------------------- */

static inline pst_status give_target(void *context, uint32_t group, void **memory,
                                     int *accumulate) {
    rank_state *state = context;
    *memory = state->targets[group];
    *accumulate = state->has_target[group];
    state->has_target[group] = 1;
    return PST_OK;
}

static inline void note_consumed(void *context, uint32_t group) {
    ((rank_state *)context)->consumed[group]++;
}

static inline pst_status add_parameter(rank_state *state, size_t index, const shape *shape) {
    char name[32];
    (void)snprintf(name, sizeof name, "p%zu", index);
    pst_parameter_options options = {.size = sizeof options,
                                     .name = name,
                                     .rows = shape->rows,
                                     .row_elements = shape->row_elements,
                                     .trainable = shape->trainable};
    return pst_zero_add_parameter(state->engine, &options, &state->parameters[index]);
}

static inline pst_status add_group(rank_state *state, size_t index) {
    const model *model = state->model;
    (void)snprintf(state->group_names[index], sizeof state->group_names[index], "g%zu", index);
    pst_group_options options = {.size = sizeof options,
                                 .name = state->group_names[index],
                                 .parameters = &state->parameters[model->first[index]],
                                 .parameter_count = model->first[index + 1] - model->first[index],
                                 .dtype = PST_FLOAT32,
                                 .gather_dtype = model->gather_dtype,
                                 .reduce_dtype = model->reduce_dtype};
    return pst_zero_add_group(state->engine, &options, &state->groups[index]);
}

static inline pst_status create_engine(rank_state *state) {
    const model *model = state->model;
    pst_zero_options options = {.size = sizeof options,
                                .name = "test",
                                .stage = model->stage,
                                .gather_comm = state->gather,
                                .reduce_comm = model->one_comm ? state->gather : state->reduce,
                                .pumped = model->pumped,
                                .prefetch_ahead = model->prefetch_ahead,
                                .prefetch_bytes = model->prefetch_bytes,
                                .bucket_bytes = model->bucket_bytes,
                                .gradient_target = give_target,
                                .gradients_consumed = note_consumed,
                                .callback_context = state};
    return pst_zero_create(state->runtime, &options, &state->engine);
}

static inline void write_shards(rank_state *state) {
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            pst_parameter_layout layout;
            (void)pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p],
                                            &layout);
            size_t width = model->shapes[p].row_elements;
            float *rows = state->shards[g] + layout.shard_offset / sizeof(float);
            for (size_t i = 0; i < layout.shard_rows * width; i++)
                rows[i] = value_of(state->version, p, layout.first_row * width + i);
        }
}

static inline void bind_all(rank_state *state) {
    for (size_t g = 0; g < state->model->group_count; g++) {
        pst_group_layout *layout = &state->layouts[g];
        CHECK_OK(pst_zero_group_layout(state->engine, state->groups[g], layout));
        state->shards[g] = calloc(1, layout->shard_bytes + 1);
        state->targets[g] = malloc(layout->gradient_bytes + 1);
        memset(state->targets[g], 0xff, layout->gradient_bytes + 1);
        CHECK_OK(pst_zero_bind_shard(state->engine, state->groups[g], state->shards[g]));
    }
    write_shards(state);
    CHECK_OK(pst_zero_updated(state->engine));
}

static inline void build_engine(rank_state *state) {
    const model *model = state->model;
    CHECK_OK(create_engine(state));
    for (size_t p = 0; p < model->parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &model->shapes[p]));
    for (size_t g = 0; g < model->group_count; g++)
        CHECK_OK(add_group(state, g));
    CHECK_OK(pst_zero_seal(state->engine));
    bind_all(state);
}

/* An optimizer step: other values. */
static inline void update(rank_state *state) {
    state->version++;
    write_shards(state);
    CHECK_OK(pst_zero_updated(state->engine));
}

/* ---- uses ------------------------------------------------------------------------------------ */

static inline float read_gathered(const model *model, const char *memory, size_t element) {
    if (model->gather_dtype == PST_FLOAT32) return ((const float *)(const void *)memory)[element];
    uint32_t bits = (uint32_t)((const uint16_t *)(const void *)memory)[element] << 16; /* bf16 */
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void check_whole(rank_state *state, size_t g, const char *memory) {
    const model *model = state->model;
    for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
        pst_parameter_layout layout;
        CHECK_OK(pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p],
                                           &layout));
        for (size_t i = 0; i < elements_of(&model->shapes[p]); i++)
            CHECK(read_gathered(model, memory + layout.gathered_offset, i) ==
                  value_of(state->version, p, i));
    }
}

static inline void begin_use(rank_state *state, size_t g) {
    void *memory = NULL;
    CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
    CHECK_OK(pst_zero_wait(state->engine, state->groups[g], &memory));
    check_whole(state, g, memory);
}

static inline void end_use(rank_state *state, size_t g) {
    CHECK_OK(pst_zero_release(state->engine, state->groups[g]));
}

static inline void use(rank_state *state, size_t g) {
    begin_use(state, g);
    CHECK_FINE();
    end_use(state, g);
}

/* Every group once, in order. */
static inline void forward(rank_state *state, int grad) {
    CHECK_OK(pst_zero_begin_forward(state->engine, grad));
    for (size_t g = 0; g < state->model->group_count; g++) {
        use(state, g);
        CHECK_FINE();
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
}

/* ---- gradients ------------------------------------------------------------------------------- */

static inline void make_gradients(rank_state *state, uint64_t step) {
    for (size_t p = 0; p < state->model->parameter_count; p++) {
        size_t count = elements_of(&state->model->shapes[p]);
        if (state->gradients[p] == NULL) state->gradients[p] = malloc((count + 1) * sizeof(float));
        for (size_t i = 0; i < count; i++)
            state->gradients[p][i] = gradient_of(state->rank, step, p, i);
    }
}

static inline void report(rank_state *state, size_t g) {
    const model *model = state->model;
    const void *sources[MOST_PARAMETERS] = {NULL};
    for (size_t p = model->first[g]; p < model->first[g + 1]; p++)
        if (model->shapes[p].trainable) sources[p - model->first[g]] = state->gradients[p];
    CHECK_OK(pst_zero_gradients(state->engine, state->groups[g], sources, PST_FLOAT32));
}

static inline void backward_use(rank_state *state, size_t g) {
    begin_use(state, g);
    CHECK_FINE();
    report(state, g);
    CHECK_FINE();
    end_use(state, g);
}

static inline void fresh_targets(rank_state *state) {
    memset(state->has_target, 0, sizeof state->has_target);
    for (size_t g = 0; g < state->model->group_count; g++)
        memset(state->targets[g], 0xff, state->layouts[g].gradient_bytes);
}

/* Every group once, last one first. */
static inline void backward(rank_state *state, uint64_t step) {
    make_gradients(state, step);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = state->model->group_count; g-- > 0;) {
        backward_use(state, g);
        CHECK_FINE();
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
}

typedef float (*expected_gradient)(const rank_state *state, size_t parameter, size_t element);

static inline void check_gradient(rank_state *state, size_t g, size_t p,
                                  expected_gradient expected) {
    pst_parameter_layout layout;
    CHECK_OK(
        pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p], &layout));
    if (!state->model->shapes[p].trainable) {
        CHECK(layout.gradient_offset == SIZE_MAX);
        return;
    }
    size_t width = state->model->shapes[p].row_elements;
    const float *rows = state->targets[g] + layout.gradient_offset / sizeof(float);
    for (size_t i = 0; i < layout.shard_rows * width; i++)
        CHECK(rows[i] == expected(state, p, layout.first_row * width + i));
}

static inline void check_gradients(rank_state *state, expected_gradient expected) {
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            check_gradient(state, g, p, expected);
            CHECK_FINE();
        }
}

static inline pst_zero_stats stats_of(const rank_state *state) {
    pst_zero_stats stats;
    pst_zero_get_stats(state->engine, &stats);
    return stats;
}

/* ---- running ranks --------------------------------------------------------------------------- */

static inline void free_rank(rank_state *state) {
    pst_zero_destroy(state->engine);
    if (state->gather != NULL) state->gather->ops->destroy(state->gather);
    if (state->reduce != NULL) state->reduce->ops->destroy(state->reduce);
    pst_runtime_destroy(state->runtime);
    for (size_t g = 0; g < MOST_GROUPS; g++) {
        free(state->shards[g]);
        free(state->targets[g]);
    }
    for (size_t p = 0; p < MOST_PARAMETERS; p++)
        free(state->gradients[p]);
}

static inline pst_status open_rank(rank_state *state) {
    pst_runtime_options options = {.size = sizeof options,
                                   .rank = state->rank,
                                   .world_size = state->world,
                                   .deadline_ns = state->model->deadline_ns,
                                   .watchdog_ns = state->model->watchdog_ns,
                                   .watchdog_poisons = 1};
    pst_status status = pst_runtime_create(&options, &state->runtime);
    if (status == PST_OK)
        status =
            pst_local_comm_create(state->meeting, state->runtime, state->rank, 0, &state->gather);
    if (status == PST_OK)
        status =
            pst_local_comm_create(state->meeting, state->runtime, state->rank, 1, &state->reduce);
    return status;
}

typedef struct rank_start {
    rank_state *state;
    rank_body body;
} rank_start;

static inline void *run_rank(void *argument) {
    const rank_start *start = argument;
    rank_state *state = start->state;
    start->body(state);
    free_rank(state);
    return NULL;
}

/* Runs `body` on every rank; it may build the engine itself. */
static inline void run_ranks(int world, const model *model, rank_body body, void *argument) {
    static const pst_runtime_options plain = {.size = sizeof plain};
    pst_runtime *runtime;
    pst_local_world *meeting;
    rank_state *states = calloc((size_t)world, sizeof *states);
    rank_start starts[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    assert_int_equal(pst_runtime_create(&plain, &runtime), PST_OK);
    assert_int_equal(pst_local_world_create(runtime, world, &meeting), PST_OK);
    for (int rank = 0; rank < world; rank++) {
        rank_state *state = &states[rank];
        *state = (rank_state){
            .rank = rank, .world = world, .model = model, .argument = argument, .meeting = meeting};
        assert_int_equal(open_rank(state), PST_OK);
        starts[rank] = (rank_start){state, body};
    }
    for (int rank = 0; rank < world; rank++)
        assert_int_equal(pthread_create(&threads[rank], NULL, run_rank, &starts[rank]), 0);
    for (int rank = 0; rank < world; rank++)
        (void)pthread_join(threads[rank], NULL);
    pst_local_world_destroy(meeting);
    pst_runtime_destroy(runtime);
    char failure[512] = "";
    for (int rank = 0; rank < world && failure[0] == '\0'; rank++)
        memcpy(failure, states[rank].failure, sizeof failure);
    free(states);
    if (failure[0] != '\0') fail_msg("%s", failure);
}

/* ---- models ---------------------------------------------------------------------------------- */

static inline void add_shape(model *model, size_t rows, size_t row_elements, int trainable) {
    model->shapes[model->parameter_count++] = (shape){rows, row_elements, trainable};
}

static inline void close_group(model *model) {
    model->first[++model->group_count] = model->parameter_count;
}

static inline model empty_model(int stage) {
    return (model){.gather_dtype = PST_FLOAT32,
                   .reduce_dtype = PST_FLOAT32,
                   .stage = stage,
                   .prefetch_ahead = 2,
                   .deadline_ns = 20000000000u};
}

/* Odd sizes: fewer rows than ranks, rows that do not divide, one element a row, no rows. */
static inline model odd_model(int stage) {
    model model = empty_model(stage);
    add_shape(&model, 1, 1, 1);
    add_shape(&model, 3, 5, 1);
    close_group(&model);
    add_shape(&model, 7, 1, 1);
    add_shape(&model, 0, 4, 1);
    add_shape(&model, 10, 33, 1);
    close_group(&model);
    add_shape(&model, 5, 129, 1);
    add_shape(&model, 2, 3, 0);
    close_group(&model);
    return model;
}

/* Equal groups of one 8 x width parameter each. */
static inline model chain_model(int stage, size_t groups, size_t width) {
    model model = empty_model(stage);
    for (size_t g = 0; g < groups; g++) {
        add_shape(&model, 8, width, 1);
        close_group(&model);
    }
    return model;
}

#endif
