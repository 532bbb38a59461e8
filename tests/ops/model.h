/* Small models whose parameters and gradients every rank can compute. */
#ifndef PST_TESTS_OPS_MODEL_H
#define PST_TESTS_OPS_MODEL_H

#include "tests/random.h"

#include <penstock/device.h>
#include <string.h>

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
    pst_dtype dtype; /* of the shards */
    pst_dtype gather_dtype, reduce_dtype;
    int stage;
    uint32_t prefetch_ahead;
    size_t prefetch_bytes, bucket_bytes, part_bytes, keep_bytes, push_bytes;
    int device_segments;   /* the device keeps memory as long as peers see it */
    unsigned forward_only; /* groups, by bit, whose values backwards do not need */
    unsigned looked_up;    /* of those with one parameter: uses name rows */
    int in_place;          /* shards lie where peers read them, if there is such a place */
    int hosted;            /* shards and targets are the host's, which alone touches them */
    int transient;         /* communication copies do not stay */
    int one_comm, pumped;
    int in_callers_order;              /* pst_zero_options.in_callers_order */
    int replicas;                      /* of which ranks are; 0: one */
    uint64_t deadline_ns, watchdog_ns; /* a watchdog poisons */
    enum { ON_HOST = 0, ON_ASYNC, ON_ONE_SIDED, ON_CE } device; /* and what communicators */
    unsigned delay_us; /* of asynchronous operations, at most */
    unsigned start_us; /* that starting a collective takes there: launches are late */
    uint64_t seed;     /* of what they do when */
    uint64_t fail_at;  /* ticket of the first replica's reductions that fails */
} model;

/* ---- values that every rank can compute ------------------------------------------------------ */

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

#define MOST_ROWS 64 /* of a parameter that is looked up */

/* Does this rank's forward number `pass` (0: it names none, and wants all) name the row? */
static inline int is_named(int rank, uint64_t pass, size_t parameter, size_t row) {
    return pass == 0 || mix(pass * 6007u + (uint64_t)rank * 131u + parameter * 17u + row) % 3 == 0;
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

static inline int replicas_of(const model *model) {
    return model->replicas > 1 ? model->replicas : 1;
}

static inline int is_looked_up(const model *model, size_t group) {
    return (int)(model->looked_up >> group & 1u);
}

static inline size_t elements_of(const shape *shape) {
    return shape->rows * shape->row_elements;
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

/* A die with so many sides. */
static inline size_t drawn(uint64_t *dice, uint64_t bound) {
    *dice = mix(*dice + 0x9e3779b97f4a7c15u);
    return (size_t)((*dice >> 20) % bound);
}

/* Groups at random, and how they travel. */
static inline model drawn_model(uint64_t *dice) {
    model model = empty_model(1 + (int)drawn(dice, 3));
    for (size_t g = 1 + drawn(dice, 12); g > 0; g--) {
        add_shape(&model, 1 + drawn(dice, 9), 1 + drawn(dice, 40), 1);
        for (size_t more = drawn(dice, 3); more > 0; more--)
            add_shape(&model, drawn(dice, 30), 1 + drawn(dice, 30), drawn(dice, 4) > 0);
        close_group(&model);
    }
    model.prefetch_ahead = (uint32_t)drawn(dice, 8);
    model.bucket_bytes = (size_t)128 << drawn(dice, 5);
    model.part_bytes = drawn(dice, 2) == 0 ? 0 : (size_t)128 << drawn(dice, 5);
    model.push_bytes = drawn(dice, 2) * 64;
    model.one_comm = (int)drawn(dice, 2);
    model.gather_dtype = drawn(dice, 3) > 0 ? PST_BFLOAT16 : PST_FLOAT32;
    model.start_us = (unsigned)drawn(dice, 30);
    model.delay_us = (unsigned)drawn(dice, 60);
    model.seed = *dice;
    return model;
}

#endif
