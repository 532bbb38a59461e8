/* One rank's engine over a model, and a training loop's parts. */
#ifndef PST_TESTS_OPS_RANK_H
#define PST_TESTS_OPS_RANK_H

#include "rank_state.h"

#include <sys/mman.h>

/* ---- the engine over the model --------------------------------------------------------------- */

static inline pst_status give_target(void *context, uint32_t group, void **memory,
                                     int *accumulate) {
    rank_state *state = context;
    *memory = state->targets[group];
    *accumulate = state->has_target[group];
    state->has_target[group] = 1;
    return state->target_status[group];
}

typedef struct gradients_of {
    rank_state *state;
    uint32_t group;
} gradients_of;

static inline pst_status spoil_gradients_now(void *argument) {
    const gradients_of *of = argument;
    const model *model = of->state->model;
    for (size_t p = model->first[of->group]; p < model->first[of->group + 1]; p++)
        memset(of->state->gradients[p], 0xff, elements_of(&model->shapes[p]) * sizeof(float));
    return PST_OK;
}

static inline void note_consumed(void *context, uint32_t group) {
    rank_state *state = context;
    const gradients_of of = {state, group};
    state->consumed[group]++;
    if (state->spoils_consumed) on_compute(state, spoil_gradients_now, &of, sizeof of);
}

static inline int keep_gradients(void *context, uint32_t group) {
    rank_state *state = context;
    state->kept[group] += state->keeps;
    return state->keeps;
}

typedef struct fill_of {
    const rank_state *state;
    uint32_t group;
    signed char *copy;
} fill_of;

/* What travels of values, which have few bits. */
static inline pst_status fill_now(void *argument) {
    const fill_of *of = argument;
    const size_t count = of->state->layouts[of->group].shard_bytes / sizeof(float);
    for (size_t i = 0; i < count; i++)
        of->copy[i] = (signed char)(of->state->shards[of->group][i] * 16.0f);
    return PST_OK;
}

static inline pst_status fill_copy(void *context, uint32_t group, void *copy) {
    rank_state *state = context;
    const fill_of of = {state, group, copy};
    state->fills++;
    if (state->fill_status == PST_OK) on_compute(state, fill_now, &of, sizeof of);
    return state->fill_status;
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
                                 .dtype = model->dtype,
                                 .gather_dtype = model->gather_dtype,
                                 .reduce_dtype = model->reduce_dtype,
                                 .forward_only = (int)(model->forward_only >> index & 1u),
                                 .looked_up = is_looked_up(model, index),
                                 .filled = model->gather_dtype == PST_INT8};
    return pst_zero_add_group(state->engine, &options, &state->groups[index]);
}

/* Segments are large: nothing is written where nothing is used. */
static inline int has_own_segments(const rank_state *state) {
    return !is_on_host(state) && !state->model->device_segments;
}

/* The thread sanitizer walks through all that is freed: 64 MiB of which little was used. Its heap
 * finds nothing more than the kernel does, which lets no one touch what is unmapped. */
#ifdef __SANITIZE_THREAD__
static inline pst_status alloc_segment(void *unused, size_t bytes, void **memory) {
    (void)unused;
    *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return *memory == MAP_FAILED ? PST_ENOMEM : PST_OK;
}

static inline void free_segment(void *unused, void *memory, size_t bytes) {
    (void)unused;
    (void)munmap(memory, bytes);
}
#else
static inline pst_status alloc_segment(void *unused, size_t bytes, void **memory) {
    (void)unused;
    *memory = aligned_alloc(PST_ARENA_ALIGNMENT, bytes);
    return *memory == NULL ? PST_ENOMEM : PST_OK;
}

static inline void free_segment(void *unused, void *memory, size_t bytes) {
    (void)unused, (void)bytes;
    free(memory);
}
#endif

static inline pst_status create_engine(rank_state *state) {
    const model *model = state->model;
    pst_zero_options options = {
        .size = sizeof options,
        .name = "test",
        .stage = model->stage,
        .gather_comm = state->gather,
        .reduce_comm = state->reduce == NULL || model->one_comm ? state->gather : state->reduce,
        .device = device_of(state),
        .compute = state->compute,
        .pumped = model->pumped,
        .prefetch_ahead = model->prefetch_ahead,
        .prefetch_bytes = model->prefetch_bytes,
        .bucket_bytes = is_on_host(state) || model->bucket_bytes != 0 ? model->bucket_bytes : 65536,
        .part_bytes = model->part_bytes,
        .segment_alloc = has_own_segments(state) ? alloc_segment : NULL,
        .segment_free = has_own_segments(state) ? free_segment : NULL,
        .gradient_target = give_target,
        .gradients_kept = keep_gradients,
        .gradients_consumed = note_consumed,
        .fill_copy = fill_copy,
        .callback_context = state,
        .replica_comm = state->replicas,
        .push_bytes = model->push_bytes,
        .shards_on_host = model->hosted,
        .transient_copies = model->transient,
        .in_callers_order = model->in_callers_order};
    return pst_zero_create(state->runtime, &options, &state->engine);
}

typedef struct at_version {
    rank_state *state;
    uint64_t version;
    size_t group;
    const char *memory;
    uint64_t named_in; /* by which pass; 0: all is used */
} at_version;

/* Where the shards lie when compute is told to write them: they may move before it does. */
typedef struct shard_write {
    rank_state *state;
    uint64_t version;
    float *shards[MOST_GROUPS];
} shard_write;

static inline pst_status write_shards_now(void *argument) {
    const shard_write *wanted = argument;
    const rank_state *state = wanted->state;
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            pst_parameter_layout layout;
            (void)pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p],
                                            &layout);
            size_t width = model->shapes[p].row_elements;
            float *rows = wanted->shards[g] + layout.shard_offset / sizeof(float);
            for (size_t i = 0; i < layout.shard_rows * width; i++)
                rows[i] = value_of(wanted->version, p, layout.first_row * width + i);
        }
    return PST_OK;
}

/* Where shards and targets are touched: compute, or the calling thread. */
static inline void on_owner(rank_state *state, async_run run, const void *argument, size_t bytes) {
    char copy[256];
    if (!state->model->hosted) {
        on_compute(state, run, argument, bytes);
        return;
    }
    memcpy(copy, argument, bytes);
    (void)run(copy);
}

static inline void write_shards(rank_state *state) {
    shard_write now = {.state = state, .version = state->version};
    memcpy(now.shards, state->shards, sizeof now.shards);
    on_owner(state, write_shards_now, &now, sizeof now);
}

static inline void *take_hosted(rank_state *state, size_t bytes) {
    void *taken = state->hosted + state->hosted_bytes;
    state->hosted_bytes += (bytes + 64) / 64 * 64;
    return taken;
}

/* Kernels of the device have no business there. */
static inline void open_hosted(rank_state *state) {
    size_t bytes = 0;
    if (!state->model->hosted) return;
    for (size_t g = 0; g < state->model->group_count; g++) {
        pst_group_layout layout;
        CHECK_OK(pst_zero_group_layout(state->engine, state->groups[g], &layout));
        bytes += layout.shard_bytes + layout.gradient_bytes + 128;
    }
    state->hosted = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(state->hosted, 0, bytes);
    if (state->async == NULL) return;
    state->async->host = state->hosted;
    state->async->host_bytes = bytes;
}

static inline void find_shard(rank_state *state, size_t g) {
    void *place = NULL;
    if (state->model->in_place)
        CHECK_OK(pst_zero_shard_place(state->engine, state->groups[g], &place));
    CHECK(place == NULL || !state->model->hosted);
    state->is_in_place[g] = place != NULL;
    if (place == NULL)
        place = state->model->hosted ? take_hosted(state, state->layouts[g].shard_bytes)
                                     : calloc(1, state->layouts[g].shard_bytes + 1);
    state->shards[g] = place;
}

/* What the shards hold is still to be written. */
static inline void bind_unwritten(rank_state *state) {
    open_hosted(state);
    CHECK_FINE();
    for (size_t g = 0; g < state->model->group_count; g++) {
        pst_group_layout *layout = &state->layouts[g];
        CHECK_OK(pst_zero_group_layout(state->engine, state->groups[g], layout));
        find_shard(state, g);
        CHECK_FINE();
        state->targets[g] = state->model->hosted ? take_hosted(state, layout->gradient_bytes)
                                                 : malloc(layout->gradient_bytes + 1);
        memset(state->targets[g], 0xff, layout->gradient_bytes);
        CHECK_OK(pst_zero_bind_shard(state->engine, state->groups[g], state->shards[g]));
    }
}

static inline void bind_all(rank_state *state) {
    bind_unwritten(state);
    CHECK_FINE();
    write_shards(state);
    CHECK_OK(pst_zero_updated(state->engine));
}

static inline void register_all(rank_state *state) {
    const model *model = state->model;
    CHECK_OK(create_engine(state));
    for (size_t p = 0; p < model->parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &model->shapes[p]));
    for (size_t g = 0; g < model->group_count; g++)
        CHECK_OK(add_group(state, g));
    CHECK_OK(pst_zero_seal(state->engine));
    pst_zero_plan_with(state->engine, model->prefetch_ahead, model->keep_bytes);
}

static inline void build_unwritten(rank_state *state) {
    register_all(state);
    CHECK_FINE();
    bind_unwritten(state);
}

static inline void build_engine(rank_state *state) {
    register_all(state);
    CHECK_FINE();
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
    if (model->gather_dtype == PST_INT8) return (float)((const signed char *)memory)[element] / 16;
    uint32_t bits = (uint32_t)((const uint16_t *)(const void *)memory)[element] << 16; /* bf16 */
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline pst_status check_whole_now(void *argument) {
    const at_version *wanted = argument;
    rank_state *state = wanted->state;
    const model *model = state->model;
    for (size_t p = model->first[wanted->group]; p < model->first[wanted->group + 1]; p++) {
        pst_parameter_layout layout;
        (void)pst_zero_parameter_layout(state->engine, state->groups[wanted->group],
                                        state->parameters[p], &layout);
        for (size_t i = 0; i < elements_of(&model->shapes[p]); i++) {
            const size_t row = i / model->shapes[p].row_elements;
            if (!is_named(state->rank, wanted->named_in, p, row)) continue;
            float found = read_gathered(model, wanted->memory + layout.gathered_offset, i);
            float expected = value_of(wanted->version, p, i);
            if (found != expected) note_wrong(state, "parameter", p, i, found, expected);
        }
    }
    return PST_OK;
}

static inline void check_whole(rank_state *state, size_t g, const char *memory, uint64_t named_in) {
    const at_version now = {state, state->version, g, memory, named_in};
    on_compute(state, check_whole_now, &now, sizeof now);
    if (is_on_host(state)) finish_compute(state);
}

static inline void begin_use_of(rank_state *state, size_t g, uint64_t named_in) {
    void *memory = NULL;
    CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
    CHECK_OK(pst_zero_wait(state->engine, state->groups[g], &memory));
    check_whole(state, g, memory, named_in);
}

static inline void begin_use(rank_state *state, size_t g) {
    begin_use_of(state, g, 0);
}

typedef struct name_write {
    int64_t *to;
    uint64_t pass;
    size_t parameter, rows;
    int rank;
} name_write;

/* Numbers of no row where none is named. */
static inline pst_status write_names_now(void *argument) {
    const name_write *wanted = argument;
    for (size_t row = 0; row < wanted->rows; row++)
        wanted->to[row] = is_named(wanted->rank, wanted->pass, wanted->parameter, row)
                              ? (int64_t)row
                              : (int64_t)(wanted->rows + row);
    return PST_OK;
}

/* In a forward, of a group that nobody else uses; returns the pass that has named its rows. */
static inline uint64_t name_rows(rank_state *state, size_t g, int grad) {
    const model *model = state->model;
    const size_t p = model->first[g];
    const name_write names = {.to = state->named[g][grad],
                              .pass = state->passes,
                              .parameter = p,
                              .rows = model->shapes[p].rows,
                              .rank = state->rank};
    if (!is_looked_up(model, g) || pst_zero_uses(state->engine, state->groups[g]) > 0) return 0;
    on_compute(state, write_names_now, &names, sizeof names);
    if (pst_zero_name_rows(state->engine, state->groups[g], names.to, names.rows) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "pst_zero_name_rows");
    return state->passes;
}

static inline void end_use(rank_state *state, size_t g) {
    CHECK_OK(pst_zero_release(state->engine, state->groups[g]));
}

static inline void use(rank_state *state, size_t g) {
    begin_use(state, g);
    CHECK_FINE();
    end_use(state, g);
}

/* What compute still compares is of the rows that were named last. */
static inline void begin_forward(rank_state *state, int grad) {
    if (state->model->looked_up != 0) DO(finish_compute(state));
    state->passes++;
    CHECK_OK(pst_zero_begin_forward(state->engine, grad));
}

static inline void use_in_forward(rank_state *state, size_t g, int grad) {
    const uint64_t named_in = name_rows(state, g, grad);
    if (grad && is_looked_up(state->model, g)) state->named_in[g] = named_in;
    CHECK_FINE();
    begin_use_of(state, g, named_in);
    CHECK_FINE();
    end_use(state, g);
}

/* Every group once, in order. */
static inline void forward(rank_state *state, int grad) {
    DO(begin_forward(state, grad));
    for (size_t g = 0; g < state->model->group_count; g++) {
        use_in_forward(state, g, grad);
        CHECK_FINE();
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
}

/* ---- gradients ------------------------------------------------------------------------------- */

static inline size_t group_of(const model *model, size_t parameter) {
    size_t g = 0;
    while (model->first[g + 1] <= parameter)
        g++;
    return g;
}

/* Of this rank's gradient no element is zero, but those of rows that it has not named. */
static inline int has_gradient_of(const model *model, int rank, uint64_t named_in, size_t parameter,
                                  size_t element) {
    const size_t row = element / model->shapes[parameter].row_elements;
    return is_named(rank, named_in, parameter, row);
}

/* Ranks, by bit, for whom that is so in the backward of the last forward. */
static inline unsigned named_by(const rank_state *state, size_t parameter, size_t element) {
    const size_t group = group_of(state->model, parameter);
    if (!is_looked_up(state->model, group)) return ~0u;
    const uint64_t named_in = state->named_in[group];
    unsigned ranks = 0;
    for (int rank = 0; rank < state->world; rank++)
        if (has_gradient_of(state->model, rank, named_in, parameter, element)) ranks |= 1u << rank;
    return ranks;
}

typedef struct gradient_write {
    const rank_state *state;
    uint64_t step;
    uint64_t named_in[MOST_GROUPS];
} gradient_write;

static inline pst_status make_gradients_now(void *argument) {
    const gradient_write *wanted = argument;
    const rank_state *state = wanted->state;
    const model *model = state->model;
    for (size_t p = 0; p < model->parameter_count; p++) {
        const uint64_t named_in = wanted->named_in[group_of(model, p)];
        for (size_t i = 0; i < elements_of(&model->shapes[p]); i++)
            state->gradients[p][i] = has_gradient_of(model, state->rank, named_in, p, i)
                                         ? gradient_of(state->rank, wanted->step, p, i)
                                         : 0;
    }
    return PST_OK;
}

static inline void make_gradients(rank_state *state, uint64_t step) {
    gradient_write now = {.state = state, .step = step};
    memcpy(now.named_in, state->named_in, sizeof now.named_in);
    for (size_t p = 0; p < state->model->parameter_count; p++)
        if (state->gradients[p] == NULL)
            state->gradients[p] =
                malloc((elements_of(&state->model->shapes[p]) + 1) * sizeof(float));
    on_compute(state, make_gradients_now, &now, sizeof now);
}

static inline void report(rank_state *state, size_t g) {
    const model *model = state->model;
    const void *sources[MOST_PARAMETERS] = {NULL};
    for (size_t p = model->first[g]; p < model->first[g + 1]; p++)
        if (model->shapes[p].trainable) sources[p - model->first[g]] = state->gradients[p];
    CHECK_OK(pst_zero_gradients(state->engine, state->groups[g], sources, PST_FLOAT32));
}

static inline void backward_use(rank_state *state, size_t g) {
    if (state->model->forward_only >> g & 1u) {
        report(state, g);
        return;
    }
    begin_use(state, g);
    CHECK_FINE();
    report(state, g);
    CHECK_FINE();
    end_use(state, g);
}

static inline pst_status spoil_targets_now(void *argument) {
    const at_version *now = argument;
    for (size_t g = 0; g < now->state->model->group_count; g++)
        memset(now->state->targets[g], 0xff, now->state->layouts[g].gradient_bytes);
    return PST_OK;
}

static inline void fresh_targets(rank_state *state) {
    const at_version now = {.state = state};
    memset(state->has_target, 0, sizeof state->has_target);
    on_owner(state, spoil_targets_now, &now, sizeof now);
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

typedef struct gradient_check {
    rank_state *state;
    size_t group, parameter;
    expected_gradient expected;
} gradient_check;

static inline pst_status check_gradient_now(void *argument) {
    const gradient_check *check = argument;
    rank_state *state = check->state;
    const size_t g = check->group, p = check->parameter;
    pst_parameter_layout layout;
    (void)pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p], &layout);
    const size_t width = state->model->shapes[p].row_elements;
    const float *rows = state->targets[g] + layout.gradient_offset / sizeof(float);
    for (size_t i = 0; i < layout.shard_rows * width; i++) {
        float expected = check->expected(state, p, layout.first_row * width + i);
        if (rows[i] != expected) note_wrong(state, "gradient", p, i, rows[i], expected);
    }
    return PST_OK;
}

static inline void check_gradient(rank_state *state, size_t g, size_t p,
                                  expected_gradient expected) {
    pst_parameter_layout layout;
    CHECK_OK(
        pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p], &layout));
    if (!state->model->shapes[p].trainable) {
        CHECK(layout.gradient_offset == SIZE_MAX);
        return;
    }
    const gradient_check check = {state, g, p, expected};
    on_owner(state, check_gradient_now, &check, sizeof check);
    if (is_on_host(state)) finish_compute(state);
}

/* What most tests expect. */
static inline float mean_of_step_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_gradient(state->world, named_by(state, parameter, element), 1, parameter, element);
}

static inline void check_gradients(rank_state *state, expected_gradient expected) {
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            check_gradient(state, g, p, expected);
            CHECK_FINE();
        }
}

/* A step whose gradients are new. */
static inline void train_step(rank_state *state, uint64_t step) {
    fresh_targets(state);
    forward(state, 1);
    CHECK_FINE();
    backward(state, step);
    CHECK_FINE();
    update(state);
}

/* What is left of a step, 1, behind its forward. */
static inline void end_step(rank_state *state, expected_gradient expected) {
    backward(state, 1);
    CHECK_FINE();
    check_gradients(state, expected);
    CHECK_FINE();
    update(state);
}

static inline void train_and_check(rank_state *state, int steps, expected_gradient expected) {
    for (int step = 0; step < steps && state->failure[0] == '\0'; step++) {
        fresh_targets(state);
        forward(state, 1);
        CHECK_FINE();
        end_step(state, expected);
    }
}

static inline pst_zero_stats stats_of(const rank_state *state) {
    pst_zero_stats stats = {.size = sizeof stats};
    pst_zero_get_stats(state->engine, &stats);
    return stats;
}

#endif
