/* What the kernels of kernels.cu take. This text is compiled by the host's compiler and, put
 * in front of the kernels, by NVRTC, which has no headers: hence plain C types only. */
#ifndef PST_SCHED_CUDA_ARGUMENTS_H
#define PST_SCHED_CUDA_ARGUMENTS_H

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

/* A launch of pst_fill. */
typedef struct pst_cuda_fill {
    void *destination;
    unsigned long long bytes;
    unsigned byte;
    unsigned block_bytes;
} pst_cuda_fill;

#endif
