/* One rank's model under AdamW: the groups that a backward has updated, and by the host's kernel on
 * the compute stream those whose gradients went to targets. Beside it compute trains all rows by
 * the gradients of all ranks; what ranks hold and gather has to be that, bit for bit. */
#ifndef PST_TESTS_OPS_UPDATE_RANK_H
#define PST_TESTS_OPS_UPDATE_RANK_H

#include "world.h"

#include <penstock/optim.h>

#define NO_PARAMETER SIZE_MAX

/* fp32, with AMSGrad; fp32 shards and all that travels in bf16; bf16 shards and moments, the latter
 * rounded randomly, with fp32 masters. */
typedef enum precision { PLAIN, MIXED, NARROW } precision;

/* Compute alone looks into what these point to. */
typedef struct trainer {
    rank_state *state;
    uint64_t step;
    size_t missing;    /* the parameter that rank 0 has no gradient of in this step */
    unsigned left_out; /* groups that get no pieces in this step, by bit */
    unsigned updated;  /* groups that the latest backward has updated, by bit */
    unsigned pause_us; /* of the host behind each report, in which what it has given is launched */
    uint64_t update_count; /* of the engine's figures, so far */
    pst_adamw_piece own[MOST_PARAMETERS], whole[MOST_PARAMETERS];
    float own_step, whole_step;
    _Alignas(16) unsigned char own_coefficients[PST_ADAMW_COEFFICIENTS_BYTES];
    _Alignas(16) unsigned char whole_coefficients[PST_ADAMW_COEFFICIENTS_BYTES];
    float *raw[MOST_RANKS], *sent[MOST_RANKS], *sum; /* a parameter's gradients */
    float *sums[MOST_RANKS];                         /* the same of each replica */
    char *free;                                      /* the rest of the block */
} trainer;

typedef struct trainer_job {
    trainer *it;
    uint64_t step;
    size_t missing, group;
    unsigned groups; /* by bit */
    const char *memory;
} trainer_job;

static inline model with_precision(model model, precision precision) {
    if (precision != PLAIN) model.gather_dtype = PST_BFLOAT16;
    if (precision == MIXED) model.reduce_dtype = PST_BFLOAT16;
    if (precision == NARROW) model.dtype = PST_BFLOAT16;
    return model;
}

static inline int is_narrow(const trainer *it) {
    return it->state->model->dtype != PST_FLOAT32;
}

static inline pst_adamw_settings trainer_settings(void) {
    return (pst_adamw_settings){.lr = 0.01,
                                .beta1 = 0.9,
                                .beta2 = 0.99,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .seed = 1234567890123};
}

/* ---- memory ---------------------------------------------------------------------------------- */

static inline size_t largest_parameter(const model *model) {
    size_t largest = 0;
    for (size_t p = 0; p < model->parameter_count; p++)
        if (elements_of(&model->shapes[p]) > largest) largest = elements_of(&model->shapes[p]);
    return largest;
}

#define ROUNDED(bytes) (((bytes) + 63) / 64 * 64)

static inline void *take_memory(trainer *it, size_t elements) {
    void *taken = it->free;
    it->free += ROUNDED(elements * sizeof(float));
    return taken;
}

/* Five arrays of a parameter for the rank, five for the whole; a parameter's gradients. */
static inline trainer *alloc_trainer(rank_state *state) {
    const model *model = state->model;
    const size_t largest = largest_parameter(model);
    size_t bytes = ROUNDED(sizeof(trainer)) + (3 * MOST_RANKS + 1) * (largest * sizeof(float) + 64);
    for (size_t p = 0; p < model->parameter_count; p++)
        bytes += 10 * (elements_of(&model->shapes[p]) * sizeof(float) + 64);
    state->own = aligned_alloc(64, ROUNDED(bytes));
    memset(state->own, 0, ROUNDED(bytes));
    trainer *it = state->own;
    it->free = (char *)state->own + ROUNDED(sizeof *it);
    for (int rank = 0; rank < MOST_RANKS; rank++) {
        it->raw[rank] = take_memory(it, largest);
        it->sent[rank] = take_memory(it, largest);
        it->sums[rank] = take_memory(it, largest);
    }
    it->sum = take_memory(it, largest);
    return it;
}

static inline pst_adamw_piece make_piece(trainer *it, size_t first, size_t count,
                                         const void *coefficients) {
    pst_adamw_piece piece = {.parameter = take_memory(it, count),
                             .exp_avg = take_memory(it, count),
                             .exp_avg_sq = take_memory(it, count),
                             .coefficients = coefficients,
                             .count = count,
                             .first = first,
                             .gradient_dtype = it->state->model->dtype};
    if (is_narrow(it)) {
        piece.copy = take_memory(it, count);
        piece.copy_dtype = piece.moment_dtype = it->state->model->dtype;
        piece.rounds_randomly = 1;
    } else {
        piece.max_exp_avg_sq = take_memory(it, count);
    }
    return piece;
}

static inline void make_pieces(trainer *it, size_t g, size_t p) {
    const rank_state *state = it->state;
    const size_t width = state->model->shapes[p].row_elements;
    pst_parameter_layout layout;
    (void)pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p], &layout);
    it->whole[p] = make_piece(it, 0, elements_of(&state->model->shapes[p]), it->whole_coefficients);
    it->own[p] =
        make_piece(it, layout.first_row * width, layout.shard_rows * width, it->own_coefficients);
    void *shard = (char *)state->shards[g] + layout.shard_offset;
    *(is_narrow(it) ? &it->own[p].copy : &it->own[p].parameter) = shard;
}

static inline void take_rows(pst_adamw_piece *own, const pst_adamw_piece *whole) {
    const size_t first = own->first, size = pst_dtype_size(own->copy_dtype);
    memcpy(own->parameter, (float *)whole->parameter + first, own->count * sizeof(float));
    if (own->copy != NULL) memcpy(own->copy, (char *)whole->copy + first * size, own->count * size);
}

static inline pst_status write_all_now(void *argument) {
    const trainer_job *job = argument;
    trainer *it = job->it;
    for (size_t p = 0; p < it->state->model->parameter_count; p++) {
        pst_adamw_piece *whole = &it->whole[p];
        for (size_t i = 0; i < whole->count; i++)
            ((float *)whole->parameter)[i] = value_of(1, p, i);
        const pst_cast rounded = {whole->copy, whole->parameter, whole->count, whole->copy_dtype,
                                  PST_FLOAT32};
        if (whole->copy != NULL) (void)pst__host_cast(&rounded, 1.0);
        take_rows(&it->own[p], whole);
    }
    return PST_OK;
}

/* With an engine and its shards. NULL: it has failed. */
static inline trainer *open_trainer(rank_state *state) {
    build_unwritten(state);
    if (state->failure[0] != '\0') return NULL;
    trainer *it = alloc_trainer(state);
    const trainer_job job = {.it = it};
    it->state = state;
    it->missing = NO_PARAMETER;
    state->spoils_consumed = 1;
    for (size_t g = 0; g < state->model->group_count; g++)
        for (size_t p = state->model->first[g]; p < state->model->first[g + 1]; p++)
            make_pieces(it, g, p);
    on_compute(state, write_all_now, &job, sizeof job);
    if (pst_zero_updated(state->engine) == PST_OK) return it;
    fail_at(state, __FILE__, __LINE__, "the shards are not taken");
    return NULL;
}

/* ---- what is expected ------------------------------------------------------------------------ */

/* The mean of what so many ranks from `first` on send, as a part of that of all. */
static inline void add_up(trainer *it, int first, int ranks, size_t count, void *sum,
                          pst_dtype dtype) {
    const void *sources[MOST_RANKS];
    for (int rank = 0; rank < ranks; rank++)
        sources[rank] = it->sent[first + rank];
    const pst_sum all = {.destination = sum,
                         .sources = sources,
                         .source_count = (size_t)ranks,
                         .count = count,
                         .scale = 1.0 / it->state->world,
                         .destination_dtype = dtype,
                         .source_dtype = it->state->model->reduce_dtype};
    (void)pst__host_sum(&all);
}

static inline void add_up_replicas(trainer *it, size_t count) {
    const void *sources[MOST_RANKS];
    const int replicas = replicas_of(it->state->model), parts = it->state->world / replicas;
    for (int i = 0; i < replicas; i++) {
        add_up(it, i * parts, parts, count, it->sums[i], PST_FLOAT32);
        sources[i] = it->sums[i];
    }
    const pst_sum all = {.destination = it->sum,
                         .sources = sources,
                         .source_count = (size_t)replicas,
                         .count = count,
                         .scale = 1.0,
                         .destination_dtype = it->state->model->dtype};
    (void)pst__host_sum(&all);
}

static inline void add_up_gradients(trainer *it, const trainer_job *job, size_t p) {
    const model *model = it->state->model;
    const size_t count = it->whole[p].count;
    for (int rank = 0; rank < it->state->world; rank++) {
        const int has = rank != 0 || p != job->missing;
        for (size_t i = 0; i < count; i++)
            it->raw[rank][i] = has ? gradient_of(rank, job->step, p, i) : 0;
        const pst_cast sent = {it->sent[rank], it->raw[rank], count, model->reduce_dtype,
                               PST_FLOAT32};
        (void)pst__host_cast(&sent, 1.0);
    }
    if (replicas_of(model) > 1)
        add_up_replicas(it, count);
    else
        add_up(it, 0, it->state->world, count, it->sum, model->dtype);
}

static inline pst_status expect_now(void *argument) {
    const trainer_job *job = argument;
    trainer *it = job->it;
    const model *model = it->state->model;
    const pst_adamw_settings settings = trainer_settings();
    float *step = &it->whole_step;
    pst__host_adamw_prepare(&settings, &step, 1, it->whole_coefficients);
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            if (!(job->groups >> g & 1u) || !model->shapes[p].trainable) continue;
            pst_adamw_piece piece = it->whole[p];
            add_up_gradients(it, job, p);
            piece.gradient = it->sum;
            (void)pst__host_adamw(&piece);
        }
    return PST_OK;
}

static inline float number_at(const void *memory, pst_dtype dtype, size_t i) {
    float value;
    const pst_cast wide = {&value, (const char *)memory + i * pst_dtype_size(dtype), 1, PST_FLOAT32,
                           dtype};
    (void)pst__host_cast(&wide, 1.0);
    return value;
}

static inline void compare(trainer *it, const char *what, size_t p, const void *found,
                           const void *wanted, size_t count, pst_dtype dtype) {
    const size_t size = pst_dtype_size(dtype);
    for (size_t i = 0; i < count; i++)
        if (memcmp((const char *)found + i * size, (const char *)wanted + i * size, size) != 0) {
            note_wrong(it->state, what, p, i, number_at(found, dtype, i),
                       number_at(wanted, dtype, i));
            return;
        }
}

static inline void compare_rows(trainer *it, const char *what, size_t p, const void *found,
                                const void *whole, pst_dtype dtype) {
    const pst_adamw_piece *own = &it->own[p];
    const char *wanted = (const char *)whole + own->first * pst_dtype_size(dtype);
    if (found != NULL) compare(it, what, p, found, wanted, own->count, dtype);
}

static inline pst_status check_rows_now(void *argument) {
    const trainer_job *job = argument;
    trainer *it = job->it;
    for (size_t p = 0; p < it->state->model->parameter_count; p++) {
        const pst_adamw_piece *own = &it->own[p], *whole = &it->whole[p];
        const pst_dtype moment = own->moment_dtype;
        compare_rows(it, "trained", p, own->parameter, whole->parameter, PST_FLOAT32);
        compare_rows(it, "copy", p, own->copy, whole->copy, own->copy_dtype);
        compare_rows(it, "mean", p, own->exp_avg, whole->exp_avg, moment);
        compare_rows(it, "square", p, own->exp_avg_sq, whole->exp_avg_sq, moment);
        compare_rows(it, "largest", p, own->max_exp_avg_sq, whole->max_exp_avg_sq, moment);
    }
    return PST_OK;
}

static inline void check_rows(trainer *it) {
    const trainer_job job = {.it = it};
    on_compute(it->state, check_rows_now, &job, sizeof job);
}

static inline pst_status check_gathered_now(void *argument) {
    const trainer_job *job = argument;
    trainer *it = job->it;
    const rank_state *state = it->state;
    const model *model = state->model;
    for (size_t p = model->first[job->group]; p < model->first[job->group + 1]; p++) {
        const pst_adamw_piece *whole = &it->whole[p];
        const pst_cast sent = {it->sum, whole->parameter, whole->count, model->gather_dtype,
                               PST_FLOAT32};
        pst_parameter_layout layout;
        (void)pst_zero_parameter_layout(state->engine, state->groups[job->group],
                                        state->parameters[p], &layout);
        (void)pst__host_cast(&sent, 1.0);
        compare(it, "gathered", p, job->memory + layout.gathered_offset, it->sum, whole->count,
                model->gather_dtype);
    }
    return PST_OK;
}

/* ---- a step ---------------------------------------------------------------------------------- */

static inline void trainer_begin_use(trainer *it, size_t g) {
    rank_state *state = it->state;
    void *memory = NULL;
    CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
    CHECK_OK(pst_zero_wait(state->engine, state->groups[g], &memory));
    const trainer_job job = {.it = it, .group = g, .memory = memory};
    on_compute(state, check_gathered_now, &job, sizeof job);
}

static inline void trainer_use(trainer *it, size_t g) {
    rank_state *state = it->state;
    DO(trainer_begin_use(it, g));
    end_use(state, g);
}

static inline void trainer_forward(trainer *it) {
    rank_state *state = it->state;
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t g = 0; g < state->model->group_count; g++) {
        DO(trainer_use(it, g));
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
}

static inline void trainer_report(trainer *it, size_t g) {
    rank_state *state = it->state;
    const model *model = state->model;
    const void *sources[MOST_PARAMETERS] = {NULL};
    for (size_t p = model->first[g]; p < model->first[g + 1]; p++)
        if (model->shapes[p].trainable && (state->rank != 0 || p != it->missing))
            sources[p - model->first[g]] = state->gradients[p];
    CHECK_OK(pst_zero_gradients(state->engine, state->groups[g], sources, PST_FLOAT32));
    async_sleep(it->pause_us);
}

static inline void trainer_backward_use(trainer *it, size_t g) {
    rank_state *state = it->state;
    DO(trainer_begin_use(it, g));
    DO(trainer_report(it, g));
    end_use(state, g);
}

static inline pst_status give_pieces(trainer *it) {
    const model *model = it->state->model;
    pst_adamw_piece pieces[MOST_PARAMETERS];
    memcpy(pieces, it->own, sizeof pieces);
    for (size_t g = 0; g < model->group_count; g++)
        if (it->left_out >> g & 1u) pieces[model->first[g]].coefficients = NULL;
    return pst_zero_update(it->state->engine, pieces, model->parameter_count);
}

/* Whether the backward that runs may update some group. */
static inline int may_update(const rank_state *state) {
    for (uint32_t g = 0; g < state->model->group_count; g++)
        if (pst_zero_may_update(state->engine, g)) return 1;
    return 0;
}

/* The gradients are made, the coefficients prepared; and updates asked for, if that may be. */
static inline void trainer_begin_backward(trainer *it, int updates) {
    rank_state *state = it->state;
    const pst_adamw_settings settings = trainer_settings();
    float *step = &it->own_step;
    make_gradients(state, ++it->step);
    memset(state->consumed, 0, sizeof state->consumed);
    fresh_targets(state);
    it->update_count = stats_of(state).updates;
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    CHECK_OK(pst_adamw_prepare(state->runtime, device_of(state), pst_lane_stream(state->compute),
                               &settings, &step, 1, it->own_coefficients));
    if (updates && may_update(state)) CHECK_OK(give_pieces(it));
}

static inline pst_status update_by_targets_now(void *argument) {
    const trainer_job *job = argument;
    trainer *it = job->it;
    const rank_state *state = it->state;
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            if (!(job->groups >> g & 1u) || !model->shapes[p].trainable) continue;
            pst_adamw_piece piece = it->own[p];
            pst_parameter_layout layout;
            (void)pst_zero_parameter_layout(state->engine, state->groups[g], state->parameters[p],
                                            &layout);
            piece.gradient = (char *)state->targets[g] + layout.gradient_offset;
            (void)pst__host_adamw(&piece);
        }
    return PST_OK;
}

static inline unsigned all_groups(const trainer *it) {
    return (1u << it->state->model->group_count) - 1u;
}

/* The rows of these groups have to be those of another step. */
static inline void expect_step(trainer *it, unsigned groups) {
    const trainer_job job = {.it = it, .step = it->step, .missing = it->missing, .groups = groups};
    on_compute(it->state, expect_now, &job, sizeof job);
    check_rows(it);
}

/* What is updated has no target, and else there is one; gradients are given back once. */
static inline void check_groups(trainer *it) {
    rank_state *state = it->state;
    uint64_t count = 0;
    it->updated = 0;
    for (size_t g = 0; g < state->model->group_count; g++) {
        const int is_updated = pst_zero_is_updated(state->engine, state->groups[g]);
        const int has_gradients = state->layouts[g].gradient_bytes > 0;
        CHECK(state->has_target[g] == (has_gradients && !is_updated));
        CHECK(state->consumed[g] == 1);
        it->updated |= (unsigned)is_updated << g;
        count += (uint64_t)is_updated;
    }
    CHECK(stats_of(state).updates == it->update_count + count);
}

static inline void trainer_end_backward(trainer *it) {
    rank_state *state = it->state;
    CHECK_OK(pst_zero_end_backward(state->engine));
    DO(check_groups(it));
    const trainer_job job = {.it = it, .groups = all_groups(it) & ~it->updated};
    on_compute(state, update_by_targets_now, &job, sizeof job);
    expect_step(it, all_groups(it));
    CHECK_OK(pst_zero_updated(state->engine));
}

/* The backward of the first `count` groups, and its end. */
static inline void trainer_finish_backward(trainer *it, size_t count) {
    rank_state *state = it->state;
    for (size_t g = count; g-- > 0;) {
        DO(trainer_backward_use(it, g));
    }
    trainer_end_backward(it);
}

static inline void trainer_step(trainer *it, int updates) {
    rank_state *state = it->state;
    DO(trainer_forward(it));
    DO(trainer_begin_backward(it, updates));
    trainer_finish_backward(it, state->model->group_count);
}

static inline void trainer_steps(trainer *it, int steps, int updates) {
    for (int i = 0; i < steps && it->state->failure[0] == '\0'; i++)
        trainer_step(it, updates);
}

#endif
