#include "sched/device/adamw.h"

#include "sched/device/half.h"
#include "sched/device/host.h"

#define INLINE PST_ADAMW_FUNCTION

_Static_assert(sizeof(pst__adamw_coefficients) == PST_ADAMW_COEFFICIENTS_BYTES,
               "the public size of what it is");

/* Elements are brought to fp32 in pieces that stay in the cache. Loops run over all of one, as a
 * number of rounds that is known is vectorised best. */
#define BLOCK 256u

typedef struct block {
    float parameter[BLOCK], gradient[BLOCK], exp_avg[BLOCK], exp_avg_sq[BLOCK], largest[BLOCK];
    size_t count;
    unsigned low, high; /* the first element's number */
} block;

/* ---- loading and storing ---------------------------------------------------------------- */

INLINE void load(float *restrict to, const void *restrict from, pst_dtype dtype, size_t at,
                 size_t count) {
    const float *const restrict singles = (const float *)from + at;
    const uint16_t *const restrict halves = (const uint16_t *)from + at;
    if (dtype == PST_FLOAT32)
        for (size_t i = 0; i < count; i++)
            to[i] = singles[i];
    else if (dtype == PST_BFLOAT16)
        for (size_t i = 0; i < count; i++)
            to[i] = pst__from_bfloat16(halves[i]);
    else
        for (size_t i = 0; i < count; i++)
            to[i] = pst__from_float16(halves[i]);
}

INLINE void store(void *restrict to, const float *restrict from, pst_dtype dtype, size_t at,
                  size_t count) {
    float *const restrict singles = (float *)to + at;
    uint16_t *const restrict halves = (uint16_t *)to + at;
    if (dtype == PST_FLOAT32)
        for (size_t i = 0; i < count; i++)
            singles[i] = from[i];
    else if (dtype == PST_BFLOAT16)
        for (size_t i = 0; i < count; i++)
            halves[i] = pst__to_bfloat16(from[i]);
    else
        for (size_t i = 0; i < count; i++)
            halves[i] = pst__to_float16(from[i]);
}

INLINE void store_randomly(uint16_t *restrict to, const float *restrict from, const block *of,
                           unsigned key, unsigned shift) {
    for (size_t i = 0; i < of->count; i++) {
        const unsigned low = of->low + (unsigned)i, high = of->high + (low < of->low);
        to[i] = pst__adamw_round(from[i], pst__adamw_random(key, low, high) >> shift);
    }
}

/* As host_kernels.c adds sources up: from -0 on, to which adding changes nothing. */
INLINE void load_sum(block *to, const pst_adamw_piece *piece, size_t at) {
    const float scale = (float)piece->scale;
    float source[BLOCK], rounded[BLOCK]; /* the second has room for any dtype */
    for (size_t i = 0; i < to->count; i++)
        to->gradient[i] = -0.0f;
    for (size_t k = 0; k < piece->source_count; k++) {
        load(source, piece->sources[k], piece->source_dtype, at, to->count);
        for (size_t i = 0; i < to->count; i++)
            to->gradient[i] += source[i];
    }
    for (size_t i = 0; i < to->count; i++)
        to->gradient[i] *= scale;
    store(rounded, to->gradient, piece->gradient_dtype, 0, to->count);
    load(to->gradient, rounded, piece->gradient_dtype, 0, to->count);
}

INLINE void load_block(block *to, const pst_adamw_piece *piece, size_t at) {
    load(to->parameter, piece->parameter, piece->parameter_dtype, at, to->count);
    if (piece->source_count > 0)
        load_sum(to, piece, at);
    else
        load(to->gradient, piece->gradient, piece->gradient_dtype, at, to->count);
    load(to->exp_avg, piece->exp_avg, piece->moment_dtype, at, to->count);
    load(to->exp_avg_sq, piece->exp_avg_sq, piece->moment_dtype, at, to->count);
    if (piece->max_exp_avg_sq != NULL)
        load(to->largest, piece->max_exp_avg_sq, piece->moment_dtype, at, to->count);
}

INLINE void store_block(const block *from, const pst_adamw_piece *piece, size_t at, unsigned key) {
    store(piece->parameter, from->parameter, piece->parameter_dtype, at, from->count);
    if (piece->rounds_randomly) {
        store_randomly((uint16_t *)piece->exp_avg + at, from->exp_avg, from, key, 0);
        store_randomly((uint16_t *)piece->exp_avg_sq + at, from->exp_avg_sq, from, key, 16);
    } else {
        store(piece->exp_avg, from->exp_avg, piece->moment_dtype, at, from->count);
        store(piece->exp_avg_sq, from->exp_avg_sq, piece->moment_dtype, at, from->count);
    }
    if (piece->max_exp_avg_sq != NULL)
        store(piece->max_exp_avg_sq, from->largest, piece->moment_dtype, at, from->count);
    if (piece->copy != NULL)
        store(piece->copy, from->parameter, piece->copy_dtype, at, from->count);
}

/* ---- the update ------------------------------------------------------------------------- */

INLINE void update_block(block *of, const pst__adamw_coefficients *given, int is_amsgrad) {
    const pst__adamw_coefficients with = *given;
    for (size_t i = 0; i < BLOCK; i++) {
        pst__adamw_element element = {of->parameter[i], of->gradient[i], of->exp_avg[i],
                                      of->exp_avg_sq[i]};
        pst__adamw_moments(&with, &element);
        of->exp_avg[i] = element.exp_avg;
        of->exp_avg_sq[i] = element.exp_avg_sq;
        const float largest =
            of->largest[i] > element.exp_avg_sq ? of->largest[i] : element.exp_avg_sq;
        const float square = is_amsgrad ? largest : element.exp_avg_sq;
        of->largest[i] = square;
        pst__adamw_move(&with, square, &element);
        of->parameter[i] = element.parameter;
    }
}

INLINE void update_piece(const pst_adamw_piece *piece) {
    const pst__adamw_coefficients *with = piece->coefficients;
    block block = {.count = 0};
    for (size_t at = 0; at < piece->count; at += block.count) {
        const uint64_t number = piece->first + at;
        block.count = piece->count - at < BLOCK ? piece->count - at : BLOCK;
        block.low = (unsigned)number;
        block.high = (unsigned)(number >> 32);
        load_block(&block, piece, at);
        update_block(&block, with, piece->max_exp_avg_sq != NULL);
        store_block(&block, piece, at, with->key);
    }
}

/* Without instructions for it a fused multiply-add is a call: right, and slow. */
static void update_anywhere(const pst_adamw_piece *piece) {
    update_piece(piece);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void update_on_avx2(const pst_adamw_piece *piece) {
    update_piece(piece);
}
#endif

static void update(const pst_adamw_piece *piece) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        update_on_avx2(piece);
        return;
    }
#endif
    update_anywhere(piece);
}

/* ---- what the device offers ------------------------------------------------------------- */

static int has_dtype(pst_dtype dtype) {
    return dtype == PST_FLOAT32 || dtype == PST_FLOAT16 || dtype == PST_BFLOAT16;
}

pst_status pst__adamw_check(const pst_adamw_piece *piece) {
    if (!has_dtype(piece->parameter_dtype) || !has_dtype(piece->gradient_dtype) ||
        !has_dtype(piece->moment_dtype) || (piece->copy != NULL && !has_dtype(piece->copy_dtype)))
        return PST_EUNSUPPORTED;
    if (piece->rounds_randomly && piece->moment_dtype != PST_BFLOAT16) return PST_EUNSUPPORTED;
    if (piece->source_count > 0 &&
        (piece->source_count > PST_ADAMW_MOST_SOURCES || !has_dtype(piece->source_dtype)))
        return PST_EUNSUPPORTED;
    return PST_OK;
}

pst_status pst__host_adamw(const pst_adamw_piece *piece) {
    const pst__adamw_coefficients *with = piece->coefficients;
    pst_status status = pst__adamw_check(piece);
    if (status == PST_OK && piece->count > 0 && !with->is_skipped) update(piece);
    return status;
}

pst__adamw_settings pst__adamw_settings_of(const pst_adamw_settings *given) {
    return (pst__adamw_settings){
        .lr = given->lr,
        .beta1 = given->beta1,
        .beta2 = given->beta2,
        .eps = given->eps,
        .weight_decay = given->weight_decay,
        .lr_at = given->lr_at,
        .gradient_scale = given->gradient_scale,
        .gradient_factor = given->gradient_factor,
        .found_inf = given->found_inf,
        .seed = given->seed,
        .maximize = given->maximize != 0,
    };
}

void pst__host_adamw_prepare(const pst_adamw_settings *given, float *const *steps, size_t count,
                             void *coefficients) {
    const pst__adamw_settings settings = pst__adamw_settings_of(given);
    for (size_t i = 0; i < count; i++)
        pst__adamw_prepare(&settings, steps[i], (pst__adamw_coefficients *)coefficients + i);
}
