/* What the kernels of kernels.cu and adamw.cu take. This text is compiled by the host's compiler
 * and, put in front of the kernels, by NVRTC, which has no headers: hence plain C types only. */
#ifndef PST_SCHED_CUDA_ARGUMENTS_H
#define PST_SCHED_CUDA_ARGUMENTS_H

#ifndef __CUDACC_RTC__ /* which has read it before */
#include "sched/device/adamw.h"
#endif

#ifdef __CUDACC_RTC__
#define PST_CUDA_INT64 long long
#else
#define PST_CUDA_INT64 int64_t
#endif

/* Threads of a block; and of one of the few blocks of a limited sum, so that each multiprocessor
 * that it takes has as much under way as fits. */
#define PST_CUDA_THREADS      256
#define PST_CUDA_WIDE_THREADS 1024

/* What is done to a piece: a conversion, PST_CUDA_CONVERT(destination, source) of two pst_dtype
 * below 4, or one of the last two, for which `count` is bytes. */
#define PST_CUDA_CONVERT(destination, source) ((destination)*4 + (source))
#define PST_CUDA_COPY                         16
#define PST_CUDA_ZERO                         17

typedef struct pst_cuda_piece {
    void *destination;
    const void *source;
    unsigned long long count;
    unsigned first_block; /* of the grid; those up to the next piece's first are this one's */
    unsigned action;
} pst_cuda_piece;

/* A launch of pst_cast_scale_copy or pst_cast_scale_copy_many: a block takes `block_bytes` of a
 * piece, counted in the wider of its two dtypes; a multiple of 4096. */
#define PST_CUDA_CAST_TABLE(pieces)                                                                \
    struct {                                                                                       \
        double scale;                                                                              \
        unsigned piece_count;                                                                      \
        unsigned block_bytes;                                                                      \
        pst_cuda_piece piece[pieces];                                                              \
    }

/* As many as fit in the kernel parameters: for any driver (4 KiB), and for one that knows CUDA 12.1
 * (32,764 bytes). */
#define PST_CUDA_PIECES      127
#define PST_CUDA_MANY_PIECES 1023

typedef PST_CUDA_CAST_TABLE(PST_CUDA_PIECES) pst_cuda_cast;
typedef PST_CUDA_CAST_TABLE(PST_CUDA_MANY_PIECES) pst_cuda_cast_many;

#define PST_CUDA_SOURCES 64

/* A launch of pst_sum or pst_sum_passing, or of pst_maximum, whose action is the dtype: a block
 * takes `block_bytes`, counted as above. */
typedef struct pst_cuda_sum {
    void *destination;
    unsigned long long count;
    double scale;
    unsigned source_count; /* at most PST_CUDA_SOURCES */
    unsigned accumulate;
    unsigned action; /* PST_CUDA_CONVERT */
    unsigned block_bytes;
    const void *source[PST_CUDA_SOURCES];
} pst_cuda_sum;

/* A launch of pst_copy_rows: block i takes row number indices[i]; a range has the bytes of the
 * table from `first` to `end`. */
#define PST_CUDA_ROW_RANGES 64

typedef struct pst_cuda_row_range {
    void *destination;
    const void *source;
    unsigned long long first, end;
} pst_cuda_row_range;

typedef struct pst_cuda_rows {
    const PST_CUDA_INT64 *indices;
    unsigned long long rows;
    unsigned row_bytes;
    unsigned count;
    unsigned range_count;
    pst_cuda_row_range range[PST_CUDA_ROW_RANGES];
} pst_cuda_rows;

/* A piece of pst_adamw: what pst_adamw_piece has. `kinds`: two bits a dtype, those of parameter,
 * gradient, moments and copy, and above them whether moments are rounded randomly. `way`: which
 * vectors serve, PST_CUDA_ADAMW_SINGLES none; `before`: elements before the first of them. */
#define PST_CUDA_ADAMW_FLOAT  0u
#define PST_CUDA_ADAMW_BFLOAT 1u
#define PST_CUDA_ADAMW_HALF   2u
#define PST_CUDA_ADAMW_KINDS(parameter, gradient, moment, copy, rounds)                            \
    ((parameter) | (gradient) << 2 | (moment) << 4 | (copy) << 6 | (rounds) << 8)
#define PST_CUDA_ADAMW_PARAMETER(kinds) ((kinds)&3u)
#define PST_CUDA_ADAMW_GRADIENT(kinds)  ((kinds) >> 2 & 3u)
#define PST_CUDA_ADAMW_MOMENT(kinds)    ((kinds) >> 4 & 3u)
#define PST_CUDA_ADAMW_COPY(kinds)      ((kinds) >> 6 & 3u)
#define PST_CUDA_ADAMW_ROUNDS(kinds)    ((kinds) >> 8)
#define PST_CUDA_ADAMW_SINGLES          8u
#define PST_CUDA_ADAMW_SOURCES          8 /* as PST_ADAMW_MOST_SOURCES */

/* Elements of a vector, by the bytes of one of parameter, gradient and moments; and of a line of
 * memory, at most: what a warp reads lies in few. */
#define PST_CUDA_ADAMW_VECTOR(parameter, gradient, moment)                                         \
    ((parameter) + (gradient) + (moment) == 6 ? 8u : 4u)
#define PST_CUDA_ADAMW_LINE 64

typedef struct pst_cuda_adamw_piece {
    void *parameter;
    const void *gradient;
    void *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *copy;
    const void *coefficients;
    unsigned long long count;
    unsigned long long first;
    unsigned first_block;
    unsigned short kinds;
    unsigned char way, before;
} pst_cuda_adamw_piece;

/* A launch of pst_adamw or pst_adamw_many: a block takes `block_elements` of a piece, a multiple of
 * what lines of memory have, and the first one what lies before the first vector as well. */
#define PST_CUDA_ADAMW_TABLE(pieces)                                                               \
    struct {                                                                                       \
        unsigned piece_count;                                                                      \
        unsigned block_elements;                                                                   \
        pst_cuda_adamw_piece piece[pieces];                                                        \
    }

#define PST_CUDA_ADAMW_PIECES      51
#define PST_CUDA_ADAMW_MANY_PIECES 409

typedef PST_CUDA_ADAMW_TABLE(PST_CUDA_ADAMW_PIECES) pst_cuda_adamw;
typedef PST_CUDA_ADAMW_TABLE(PST_CUDA_ADAMW_MANY_PIECES) pst_cuda_adamw_many;

/* What is the gradient of a piece that has none, and the sources' dtype in its kinds; `rounds_to`
 * is the gradient's. */
typedef struct pst_cuda_adamw_sum {
    const void *source[PST_CUDA_ADAMW_SOURCES];
    float scale;
    unsigned short source_count, rounds_to;
} pst_cuda_adamw_sum;

/* A launch of pst_adamw_sums: as pst_adamw, with a sum for each piece. */
#define PST_CUDA_ADAMW_SUMS 26

typedef struct pst_cuda_adamw_sums {
    unsigned piece_count;
    unsigned block_elements;
    pst_cuda_adamw_piece piece[PST_CUDA_ADAMW_SUMS];
    pst_cuda_adamw_sum sum[PST_CUDA_ADAMW_SUMS];
} pst_cuda_adamw_sums;

/* A launch of pst_adamw_prepare. */
#define PST_CUDA_ADAMW_STEPS 480

typedef struct pst_cuda_adamw_steps {
    pst__adamw_settings settings;
    void *coefficients;
    unsigned count;
    float *step[PST_CUDA_ADAMW_STEPS];
} pst_cuda_adamw_steps;

/* A launch of pst_fill. */
typedef struct pst_cuda_fill {
    void *destination;
    unsigned long long bytes;
    unsigned byte;
    unsigned block_bytes;
} pst_cuda_fill;

#endif
