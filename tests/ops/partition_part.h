/* A rank's partition over a small flat space, and a backward's parts. */
#ifndef PST_TESTS_OPS_PARTITION_PART_H
#define PST_TESTS_OPS_PARTITION_PART_H

#include "world.h"

#include <penstock/partition.h>

/* Elements of the parameters of the flat space, in its order. */
static const size_t sizes[] = {5, 300, 1, 77, 128, 40, 260, 9};
enum { SIZES = sizeof sizes / sizeof *sizes, GUARD = 8 };

static const float guard = -12345.0f;

typedef struct part {
    rank_state *state;
    pst_partition *partition;
    uint32_t ids[SIZES];
    size_t first[SIZES], count[SIZES]; /* what this rank owns */
    float *flat;                       /* its partition, with guards around it */
    size_t flat_count;
    float *gradients[1024]; /* all that were made, until the end */
    size_t gradient_count;
    int consumed[1024];
    size_t live, most; /* bytes of segments */
} part;

typedef struct variant {
    pst_partition_route route;
    size_t bucket_bytes;
    int reduce_in_fp32;
    int frees_in_compute_order;
    pst_dtype dtype; /* of gradients */
} variant;

/* ---- a partition of the flat space ----------------------------------------------------------- */

static inline size_t total_elements(void) {
    size_t total = 0;
    for (size_t i = 0; i < SIZES; i++)
        total += sizes[i];
    return total;
}

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline void find_own(part *part) {
    const size_t world = (size_t)part->state->world;
    const size_t each = (total_elements() + world - 1) / world;
    const size_t begin = each * (size_t)part->state->rank;
    size_t at = 0;
    for (size_t i = 0; i < SIZES; at += sizes[i++]) {
        size_t low = at > begin ? at : begin, high = smaller(at + sizes[i], begin + each);
        part->count[i] = high > low ? high - low : 0;
        part->first[i] = high > low ? low - at : 0;
    }
    part->flat_count = each;
}

static inline pst_status take_segment(void *context, size_t bytes, void **memory) {
    part *part = context;
    part->live += bytes;
    if (part->live > part->most) part->most = part->live;
    *memory = aligned_alloc(PST_ARENA_ALIGNMENT, bytes);
    return *memory == NULL ? PST_ENOMEM : PST_OK;
}

static inline pst_status free_now(void *argument) {
    free(*(void **)argument);
    return PST_OK;
}

/* In the order of compute, like torch's allocator. */
static inline void give_segment(void *context, void *memory, size_t bytes) {
    part *part = context;
    part->live -= bytes;
    on_compute(part->state, free_now, &memory, sizeof memory);
}

static inline void note_token(void *context, void *token) {
    ((part *)context)->consumed[(size_t)token]++;
}

static inline void fresh_flat(part *part, float value) {
    part->flat = malloc((part->flat_count + 2 * GUARD) * sizeof(float));
    for (size_t i = 0; i < part->flat_count + 2 * GUARD; i++)
        part->flat[i] = i < GUARD || i >= GUARD + part->flat_count ? guard : value;
    part->gradients[part->gradient_count++] = part->flat; /* freed with them */
}

static inline void bind_flat(part *part) {
    rank_state *state = part->state;
    float *target = part->flat + GUARD;
    for (size_t i = 0; i < SIZES; i++) {
        CHECK_OK(pst_partition_bind(part->partition, part->ids[i],
                                    part->count[i] > 0 ? target : NULL, PST_FLOAT32, part->first[i],
                                    part->count[i]));
        target += part->count[i];
    }
}

static inline void create_part(part *part, rank_state *state) {
    const variant *variant = state->argument;
    const pst_partition_options options = {
        .size = sizeof options,
        .name = "test",
        .comm = state->reduce == NULL ? state->gather : state->reduce,
        .device = device_of(state),
        .compute = state->compute,
        .bucket_bytes = variant->bucket_bytes,
        .reduce_in_fp32 = variant->reduce_in_fp32,
        .route = variant->route,
        .segment_alloc = take_segment,
        .segment_free = give_segment,
        .segment_context = part,
        .frees_in_compute_order = variant->frees_in_compute_order,
        .consumed = note_token,
        .callback_context = part};
    part->state = state;
    find_own(part);
    CHECK_OK(pst_partition_create(state->runtime, &options, &part->partition));
    for (size_t i = 0; i < SIZES; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "p%zu", i);
        CHECK_OK(pst_partition_add(part->partition, name, sizes[i], &part->ids[i]));
    }
}

static inline void open_part(part *part, rank_state *state, float value) {
    DO(create_part(part, state));
    fresh_flat(part, value);
    bind_flat(part);
}

static inline void close_part(part *part) {
    rank_state *state = part->state;
    if (!is_on_host(state) && pst_runtime_status(state->runtime) == PST_OK) finish_compute(state);
    pst_partition_destroy(part->partition);
    if (!is_on_host(state)) (void)drain_compute(state);
    for (size_t i = 0; i < part->gradient_count; i++)
        free(part->gradients[i]);
    CHECK(part->live == 0);
}

/* ---- a backward ------------------------------------------------------------------------------ */

static inline void give_as(part *part, size_t index, uint64_t step, pst_dtype dtype) {
    rank_state *state = part->state;
    const size_t token = part->gradient_count++;
    float *values = malloc((sizes[index] + 1) * sizeof *values);
    for (size_t i = 0; i < sizes[index]; i++)
        values[i] = gradient_of(state->rank, step, index, i);
    part->gradients[token] = values;
    if (dtype == PST_BFLOAT16) {
        float *narrow = malloc((sizes[index] + 1) * sizeof *narrow);
        const pst_cast cast = {narrow, values, sizes[index], dtype, PST_FLOAT32};
        (void)pst__host_cast(&cast, 1.0);
        part->gradients[token] = narrow;
        free(values);
    }
    CHECK_OK(pst_partition_reduce(part->partition, part->ids[index], part->gradients[token], dtype,
                                  (void *)token)); // NOLINT: an index
}

static inline void give(part *part, size_t index, uint64_t step) {
    give_as(part, index, step, PST_FLOAT32);
}

/* Parameters [first, end), the last one first. */
static inline void give_all(part *part, size_t first, size_t end, uint64_t step) {
    for (size_t i = end; i-- > first && part->state->failure[0] == '\0';)
        give(part, i, step);
}

static inline void begin(part *part, int is_last) {
    rank_state *state = part->state;
    CHECK_OK(pst_partition_begin_backward(part->partition, is_last));
}

static inline void end(part *part, int release) {
    rank_state *state = part->state;
    CHECK_OK(pst_partition_end_backward(part->partition, release));
}

static inline void backward_of(part *part, int is_last, uint64_t step) {
    rank_state *state = part->state;
    DO(begin(part, is_last));
    DO(give_all(part, 0, SIZES, step));
    end(part, 1);
}

typedef float (*expected_value)(const rank_state *state, size_t parameter, size_t element);

/* Sums in rank order of what each rank sends: multiplied, as a world of 3 can tell. */
static inline float mean_at(const rank_state *state, uint64_t step, size_t parameter,
                            size_t element) {
    float sum = 0;
    for (int rank = 0; rank < state->world; rank++)
        sum += gradient_of(rank, step, parameter, element) * (float)(1.0 / (double)state->world);
    return sum;
}

static inline float mean_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_at(state, 1, parameter, element);
}

static inline float mean_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_at(state, 2, parameter, element);
}

static inline float mean_1_and_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_1(state, parameter, element) + mean_2(state, parameter, element);
}

static inline float zero(const rank_state *state, size_t parameter, size_t element) {
    (void)state, (void)parameter, (void)element;
    return 0.0f;
}

/* finish_compute tells what is noted. */
static inline void check_parameter(const part *part, size_t index, expected_value expected) {
    rank_state *state = part->state;
    const float *at = part->flat + GUARD;
    for (size_t i = 0; i < index; i++)
        at += part->count[i];
    for (size_t i = 0; i < part->count[index]; i++) {
        const float wanted = expected(state, index, part->first[index] + i);
        if (at[i] != wanted) note_wrong(state, "parameter", index, i, at[i], wanted);
    }
}

static inline void check_guards(const part *part) {
    rank_state *state = part->state;
    for (size_t i = 0; i < GUARD; i++)
        CHECK(part->flat[i] == guard && part->flat[GUARD + part->flat_count + i] == guard);
}

static inline void check_all(const part *part, expected_value expected) {
    rank_state *state = part->state;
    finish_compute(state);
    for (size_t i = 0; i < SIZES && state->failure[0] == '\0'; i++)
        check_parameter(part, i, expected);
    DO(finish_compute(state));
    check_guards(part);
}

static inline pst_partition_stats stats_now(const part *part) {
    pst_partition_stats stats = {.size = sizeof stats};
    pst_partition_get_stats(part->partition, &stats);
    return stats;
}

#endif
