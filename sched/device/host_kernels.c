#include "sched/device/host.h"

#include "sched/device/half.h"

/* Elements are brought to fp32 (fp64 where one side is float64) in pieces that stay in the cache,
 * worked on there, and brought to the destination's dtype. */
#define BLOCK 512u

static int is_floating(pst_dtype dtype) {
    return dtype == PST_FLOAT32 || dtype == PST_FLOAT64 || dtype == PST_FLOAT16 ||
           dtype == PST_BFLOAT16;
}

/* ---- loading and storing a block -------------------------------------------------------- */

#define LOADER(name, wide, type, convert)                                                          \
    static void name(wide *restrict to, const void *restrict from, size_t count) {                 \
        const type *restrict source = from;                                                        \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = (wide)convert(source[i]);                                                      \
    }
#define STORER(name, wide, type, convert)                                                          \
    static void name(void *restrict to, const wide *restrict from, size_t count) {                 \
        type *restrict destination = to;                                                           \
        for (size_t i = 0; i < count; i++)                                                         \
            destination[i] = (type)convert(from[i]);                                               \
    }

LOADER(load_f32, float, float, )
LOADER(load_f16, float, uint16_t, pst__from_float16)
LOADER(load_bf16, float, uint16_t, pst__from_bfloat16)
STORER(store_f32, float, float, )
STORER(store_f16, float, uint16_t, pst__to_float16)
STORER(store_bf16, float, uint16_t, pst__to_bfloat16)
LOADER(wide_load_f32, double, float, )
LOADER(wide_load_f64, double, double, )
LOADER(wide_load_f16, double, uint16_t, pst__from_float16)
LOADER(wide_load_bf16, double, uint16_t, pst__from_bfloat16)
STORER(wide_store_f32, double, float, )
STORER(wide_store_f64, double, double, )
STORER(wide_store_f16, double, uint16_t, pst__double_to_float16)
STORER(wide_store_bf16, double, uint16_t, pst__double_to_bfloat16)

static void (*const load[])(float *restrict, const void *restrict, size_t) = {
    [PST_FLOAT32] = load_f32,
    [PST_FLOAT16] = load_f16,
    [PST_BFLOAT16] = load_bf16,
};
static void (*const store[])(void *restrict, const float *restrict, size_t) = {
    [PST_FLOAT32] = store_f32,
    [PST_FLOAT16] = store_f16,
    [PST_BFLOAT16] = store_bf16,
};
static void (*const wide_load[])(double *restrict, const void *restrict, size_t) = {
    [PST_FLOAT32] = wide_load_f32,
    [PST_FLOAT64] = wide_load_f64,
    [PST_FLOAT16] = wide_load_f16,
    [PST_BFLOAT16] = wide_load_bf16,
};
static void (*const wide_store[])(void *restrict, const double *restrict, size_t) = {
    [PST_FLOAT32] = wide_store_f32,
    [PST_FLOAT64] = wide_store_f64,
    [PST_FLOAT16] = wide_store_f16,
    [PST_BFLOAT16] = wide_store_bf16,
};

static void *element(const void *base, size_t index, pst_dtype dtype) {
    return (void *)((uintptr_t)base + index * pst_dtype_size(dtype));
}

static size_t block_at(size_t done, size_t count) {
    return count - done < BLOCK ? count - done : BLOCK;
}

/* ---- cast, scale, copy ------------------------------------------------------------------ */

#define CAST(name, wide, load, store)                                                              \
    static void name(const pst_cast *piece, wide scale) {                                          \
        wide block[BLOCK];                                                                         \
        const pst_dtype from = piece->source_dtype, to = piece->destination_dtype;                 \
        for (size_t done = 0; done < piece->count; done += BLOCK) {                                \
            const size_t count = block_at(done, piece->count);                                     \
            load[from](block, element(piece->source, done, from), count);                          \
            for (size_t i = 0; i < count; i++)                                                     \
                block[i] *= scale;                                                                 \
            store[to](element(piece->destination, done, to), block, count);                        \
        }                                                                                          \
    }

CAST(cast_narrow, float, load, store)
CAST(cast_wide, double, wide_load, wide_store)

pst_status pst__host_cast(const pst_cast *piece, double scale) {
    const size_t size = pst_dtype_size(piece->destination_dtype);
    if (size == 0) return PST_EUNSUPPORTED;
    if (piece->count == 0) return PST_OK;
    if (piece->source == NULL) {
        memset(piece->destination, 0, piece->count * size);
        return PST_OK;
    }
    if (piece->source_dtype == piece->destination_dtype && scale == 1.0) {
        memcpy(piece->destination, piece->source, piece->count * size);
        return PST_OK;
    }
    if (!is_floating(piece->source_dtype) || !is_floating(piece->destination_dtype))
        return PST_EUNSUPPORTED;
    if (piece->source_dtype == PST_FLOAT64 || piece->destination_dtype == PST_FLOAT64)
        cast_wide(piece, scale);
    else
        cast_narrow(piece, (float)scale);
    return PST_OK;
}

/* ---- sum of several sources ------------------------------------------------------------- */

#define SUM(name, wide, load, store)                                                               \
    static void name(const pst_sum *sum) {                                                         \
        wide total[BLOCK], block[BLOCK];                                                           \
        const wide scale = (wide)sum->scale;                                                       \
        const pst_dtype from = sum->source_dtype, to = sum->destination_dtype;                     \
        for (size_t done = 0; done < sum->count; done += BLOCK) {                                  \
            const size_t count = block_at(done, sum->count);                                       \
            void *destination = element(sum->destination, done, to);                               \
            for (size_t i = 0; i < count; i++)                                                     \
                total[i] = 0;                                                                      \
            for (size_t k = 0; k < sum->source_count; k++) {                                       \
                load[from](block, element(sum->sources[k], done, from), count);                    \
                for (size_t i = 0; i < count; i++)                                                 \
                    total[i] = k == 0 ? block[i] : total[i] + block[i];                            \
            }                                                                                      \
            for (size_t i = 0; i < count; i++)                                                     \
                total[i] *= scale;                                                                 \
            if (sum->accumulate) {                                                                 \
                load[to](block, destination, count);                                               \
                for (size_t i = 0; i < count; i++)                                                 \
                    total[i] += block[i];                                                          \
            }                                                                                      \
            store[to](destination, total, count);                                                  \
        }                                                                                          \
    }

SUM(sum_narrow, float, load, store)
SUM(sum_wide, double, wide_load, wide_store)

pst_status pst__host_sum(const pst_sum *sum) {
    if (!is_floating(sum->source_dtype) || !is_floating(sum->destination_dtype))
        return PST_EUNSUPPORTED;
    if (sum->source_dtype == PST_FLOAT64 || sum->destination_dtype == PST_FLOAT64)
        sum_wide(sum);
    else
        sum_narrow(sum);
    return PST_OK;
}

/* ---- largest of several sources --------------------------------------------------------- */

#define MAXIMUM(name, type)                                                                        \
    static void name(const pst_sum *given) {                                                       \
        type *to = given->destination;                                                             \
        for (size_t i = 0; i < given->count; i++) {                                                \
            type largest = ((const type *)given->sources[0])[i];                                   \
            for (size_t k = 1; k < given->source_count; k++) {                                     \
                const type value = ((const type *)given->sources[k])[i];                           \
                if (value > largest) largest = value;                                              \
            }                                                                                      \
            to[i] = largest;                                                                       \
        }                                                                                          \
    }

MAXIMUM(maximum_f32, float)
MAXIMUM(maximum_f64, double)
MAXIMUM(maximum_i8, int8_t)
MAXIMUM(maximum_u8, uint8_t)
MAXIMUM(maximum_i16, int16_t)
MAXIMUM(maximum_i32, int32_t)
MAXIMUM(maximum_i64, int64_t)

static void (*const maxima[PST_DTYPE_COUNT])(const pst_sum *) = {
    [PST_FLOAT32] = maximum_f32, [PST_FLOAT64] = maximum_f64, [PST_INT8] = maximum_i8,
    [PST_UINT8] = maximum_u8,    [PST_INT16] = maximum_i16,   [PST_INT32] = maximum_i32,
    [PST_INT64] = maximum_i64,   [PST_BOOL] = maximum_u8,
};

pst_status pst__host_maximum(const pst_sum *maximum) {
    const unsigned dtype = maximum->source_dtype;
    if (dtype != (unsigned)maximum->destination_dtype || dtype >= PST_DTYPE_COUNT ||
        maxima[dtype] == NULL)
        return PST_EUNSUPPORTED;
    if (maximum->source_count == 0) return PST_EINVAL;
    maxima[dtype](maximum);
    return PST_OK;
}

/* ---- rows by number --------------------------------------------------------------------- */

/* The part of a row that lies in a range. */
static void copy_row(const pst_row_range *range, size_t row, size_t row_bytes) {
    const size_t row_end = (row + 1) * row_bytes, range_end = range->first + range->bytes;
    const size_t begin = row * row_bytes > range->first ? row * row_bytes : range->first;
    const size_t end = row_end < range_end ? row_end : range_end;
    if (begin >= end) return;
    memcpy((char *)range->destination + (begin - range->first),
           (const char *)range->source + (begin - range->first), end - begin);
}

void pst__host_copy_rows(const pst_row_copy *copy) {
    for (size_t i = 0; i < copy->count; i++)
        for (size_t k = 0; k < copy->range_count && (uint64_t)copy->indices[i] < copy->rows; k++)
            copy_row(&copy->ranges[k], (size_t)copy->indices[i], copy->row_bytes);
}
