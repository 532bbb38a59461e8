/* One rank's flat shards over a model, whose parameters are taken as plain numbers of elements. */
#ifndef PST_TESTS_OPS_FLAT_RANK_H
#define PST_TESTS_OPS_FLAT_RANK_H

#include "world.h"

#include <math.h>

typedef struct flat_rank {
    rank_state *state;
    pst_flat *flat;
    uint32_t parameters[MOST_PARAMETERS];
    size_t chunks[MOST_PARAMETERS];
    float *home; /* of all shards but the odd ones */
    float *shards[MOST_PARAMETERS];
    float *targets[MOST_PARAMETERS];  /* NULL: frozen */
    float *expected[MOST_PARAMETERS]; /* whole gradients since the last update */
    int has_sum[MOST_PARAMETERS];
    uint64_t version, reports, freed; /* gradients */
} flat_rank;

/* What compute is to do, with what was so when it was asked. */
typedef struct flat_job {
    flat_rank *rank;
    uint64_t version;
    size_t parameter;
    const void *memory;
    pst_dtype dtype;
    float *gradient, *expected;
} flat_job;

static inline size_t flat_elements(const flat_rank *rank, size_t p) {
    return elements_of(&rank->state->model->shapes[p]);
}

static inline pst_status write_flat_now(void *argument) {
    const flat_job *job = argument;
    flat_rank *rank = job->rank;
    for (size_t p = 0; p < rank->state->model->parameter_count; p++) {
        size_t first = (size_t)rank->state->rank * rank->chunks[p];
        for (size_t i = 0; i < rank->chunks[p]; i++)
            rank->shards[p][i] =
                first + i < flat_elements(rank, p) ? value_of(job->version, p, first + i) : 0;
    }
    return PST_OK;
}

static inline void write_flat(flat_rank *rank) {
    const flat_job job = {.rank = rank, .version = ++rank->version};
    on_compute(rank->state, write_flat_now, &job, sizeof job);
}

static inline pst_status free_flat_gradient_now(void *argument) {
    const flat_job *job = argument;
    memset(job->gradient, 0xff, flat_elements(job->rank, job->parameter) * sizeof(float));
    free(job->gradient);
    return PST_OK;
}

/* Spoiled, on compute, as soon as nobody needs it any more. */
static inline void free_flat_gradient(void *context, void *token) {
    flat_rank *rank = context;
    rank->freed++;
    on_compute(rank->state, free_flat_gradient_now, token, sizeof(flat_job));
    free(token);
}

static inline void add_flat(flat_rank *rank, size_t p, float *home) {
    rank_state *state = rank->state;
    char name[24];
    (void)snprintf(name, sizeof name, "p%zu", p);
    CHECK_OK(pst_flat_add(rank->flat, name, flat_elements(rank, p), &rank->parameters[p]));
    rank->shards[p] = home != NULL ? home : malloc((rank->chunks[p] + 1) * sizeof(float));
    CHECK_OK(pst_flat_bind(rank->flat, rank->parameters[p], rank->shards[p],
                           home != NULL ? rank->home : rank->shards[p], PST_FLOAT32));
    if (!state->model->shapes[p].trainable) return;
    rank->targets[p] = malloc((rank->chunks[p] + 1) * sizeof(float));
    memset(rank->targets[p], 0xff, (rank->chunks[p] + 1) * sizeof(float));
    rank->expected[p] = calloc(flat_elements(rank, p) + 1, sizeof(float));
    CHECK_OK(
        pst_flat_bind_gradient(rank->flat, rank->parameters[p], rank->targets[p], PST_FLOAT32));
}

static inline void open_flat(flat_rank *rank, rank_state *state) {
    const model *model = state->model;
    *rank = (flat_rank){.state = state};
    pst_flat_options options = {
        .size = sizeof options,
        .name = "test",
        .gather_comm = state->gather,
        .reduce_comm = state->reduce == NULL || model->one_comm ? state->gather : state->reduce,
        .device = device_of(state),
        .compute = state->compute,
        .pumped = model->pumped,
        .ahead_bytes = model->prefetch_bytes,
        .fuse_bytes = model->prefetch_ahead * 4096,
        .bucket_bytes = model->bucket_bytes == 0 ? 65536 : model->bucket_bytes,
        .segment_alloc = has_own_segments(state) ? alloc_segment : NULL,
        .segment_free = has_own_segments(state) ? free_segment : NULL,
        .batch_bytes = model->part_bytes,
        .consumed = free_flat_gradient,
        .callback_context = rank};
    CHECK_OK(pst_flat_create(state->runtime, &options, &rank->flat));
    size_t all = 0, world = (size_t)state->world;
    for (size_t p = 0; p < model->parameter_count; p++) {
        rank->chunks[p] = (flat_elements(rank, p) + world - 1) / world;
        all += rank->chunks[p];
    }
    rank->home = malloc((all + 1) * sizeof(float));
    if (model->in_place)
        CHECK_OK(pst_flat_open_memory(rank->flat, rank->home, (all + 1) * sizeof(float)));
    float *home = rank->home;
    for (size_t p = 0; p < model->parameter_count; p++) {
        DO(add_flat(rank, p, p % 5 == 4 ? NULL : home));
        home += rank->chunks[p];
    }
    write_flat(rank);
}

/* Peers may read its shards until its last backward. */
static inline void close_flat(flat_rank *rank) {
    if (rank->flat != NULL && pst_runtime_status(rank->state->runtime) == PST_OK) {
        (void)pst_flat_begin_backward(rank->flat, 1);
        (void)pst_flat_end_backward(rank->flat, 1);
        finish_compute(rank->state);
    }
    pst_flat_destroy(rank->flat);
    for (size_t p = 0; p < rank->state->model->parameter_count; p++) {
        if (p % 5 == 4) free(rank->shards[p]);
        free(rank->targets[p]);
        free(rank->expected[p]);
    }
    free(rank->home);
}

/* ---- uses ------------------------------------------------------------------------------------ */

static inline pst_status check_flat_now(void *argument) {
    const flat_job *job = argument;
    const model as = {.gather_dtype = job->dtype};
    for (size_t i = 0; i < flat_elements(job->rank, job->parameter); i++) {
        float found = read_gathered(&as, job->memory, i);
        float expected = value_of(job->version, job->parameter, i);
        if (found != expected)
            note_wrong(job->rank->state, "parameter", job->parameter, i, found, expected);
    }
    return PST_OK;
}

static inline void begin_flat_use(flat_rank *rank, size_t p, pst_dtype dtype, uint32_t *copy,
                                  void **memory) {
    rank_state *state = rank->state;
    CHECK_OK(pst_flat_copy(rank->flat, rank->parameters[p], dtype, copy));
    CHECK_OK(pst_flat_gather(rank->flat, *copy, memory));
    CHECK_OK(pst_flat_wait(rank->flat, *copy));
    const flat_job job = {
        .rank = rank, .version = rank->version, .parameter = p, .memory = *memory, .dtype = dtype};
    on_compute(state, check_flat_now, &job, sizeof job);
}

static inline void flat_use(flat_rank *rank, size_t p, pst_dtype dtype) {
    rank_state *state = rank->state;
    uint32_t copy;
    void *memory;
    DO(begin_flat_use(rank, p, dtype, &copy, &memory));
    CHECK_OK(pst_flat_release(rank->flat, copy));
}

/* ---- gradients ------------------------------------------------------------------------------- */

static inline pst_status make_flat_gradient_now(void *argument) {
    const flat_job *job = argument;
    for (size_t i = 0; i < flat_elements(job->rank, job->parameter); i++)
        job->gradient[i] = gradient_of(job->rank->state->rank, job->version, job->parameter, i);
    return PST_OK;
}

static inline void flat_report(flat_rank *rank, size_t p) {
    rank_state *state = rank->state;
    uint64_t step = ++rank->reports;
    size_t elements = flat_elements(rank, p);
    flat_job *job = malloc(sizeof *job);
    *job = (flat_job){.rank = rank, .version = step, .parameter = p};
    job->gradient = malloc((elements + 1) * sizeof(float));
    on_compute(state, make_flat_gradient_now, job, sizeof *job);
    CHECK_OK(pst_flat_reduce(rank->flat, rank->parameters[p], job->gradient, PST_FLOAT32,
                             PST_FLOAT32, job));
    if (rank->targets[p] == NULL) return;
    for (size_t i = 0; i < elements; i++) {
        float mean = mean_gradient(state->world, ~0u, step, p, i);
        rank->expected[p][i] = rank->has_sum[p] ? rank->expected[p][i] + mean : mean;
    }
    rank->has_sum[p] = 1;
}

static inline pst_status check_flat_gradient_now(void *argument) {
    const flat_job *job = argument;
    flat_rank *rank = job->rank;
    const float *target = rank->targets[job->parameter];
    for (size_t i = 0; i < rank->chunks[job->parameter]; i++)
        if (!(fabsf(target[i] - job->expected[i]) <= 1e-6f))
            note_wrong(rank->state, "gradient", job->parameter, i, target[i], job->expected[i]);
    free(job->expected);
    return PST_OK;
}

/* Padding is zero. */
static inline void check_flat_gradient(flat_rank *rank, size_t p) {
    size_t chunk = rank->chunks[p], first = (size_t)rank->state->rank * chunk;
    flat_job job = {.rank = rank, .parameter = p};
    job.expected = calloc(chunk + 1, sizeof(float));
    for (size_t i = 0; i < chunk && first + i < flat_elements(rank, p); i++)
        job.expected[i] = rank->expected[p][first + i];
    on_compute(rank->state, check_flat_gradient_now, &job, sizeof job);
}

/* An optimizer's step behind a backward that was the last one. */
static inline void flat_step(flat_rank *rank) {
    for (size_t p = 0; p < rank->state->model->parameter_count; p++) {
        if (rank->targets[p] == NULL) continue;
        if (rank->has_sum[p]) check_flat_gradient(rank, p);
        rank->has_sum[p] = 0;
    }
    write_flat(rank);
}

#endif
