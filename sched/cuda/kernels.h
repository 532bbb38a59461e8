/* The device's kernels, in stream order. The device's context is the calling thread's in all
 * of these calls. Sizes, dtypes and results: penstock/device.h and host_kernels.c; addresses are
 * aligned to their elements, except those of plain copies and of fills. */
#ifndef PST_SCHED_CUDA_KERNELS_H
#define PST_SCHED_CUDA_KERNELS_H

#include "sched/cuda/cuda.h"

struct pst__cuda_kernels {
    CUmodule module;
    CUfunction cast, cast_many; /* by size of the table; the second may be missing: NULL */
    CUfunction sum, sum_passing, maximum, fill, copy_rows;
    CUfunction adamw_prepare, adamw, adamw_many, adamw_sums; /* adamw_many as cast_many */
};

/* Compiles the kernels, or takes them from the cache (see pst_cuda_options for both paths), and
 * sets cuda->kernels. May take seconds. PST_EUNSUPPORTED, PST_EDEVICE, PST_ENOMEM, with error_text.
 */
pst_status pst__cuda_kernels_load(pst__cuda *cuda, const char *nvrtc, const char *cache);
void pst__cuda_kernels_unload(pst__cuda *cuda); /* not loaded: fine */

/* PST_EUNSUPPORTED for dtypes that cannot be converted, or more than 64 sources; PST_EINVAL for an
 * address that is not aligned; then nothing is launched. PST_EDEVICE. */
pst_status pst__cuda_cast_scale_copy(pst__cuda *cuda, CUstream stream, const pst_cast *pieces,
                                     size_t count, double scale);
pst_status pst__cuda_sum(pst__cuda *cuda, CUstream stream, const pst_sum *sum);
pst_status pst__cuda_maximum(pst__cuda *cuda, CUstream stream, const pst_sum *maximum);
pst_status pst__cuda_fill(pst__cuda *cuda, CUstream stream, void *memory, int byte, size_t bytes);
pst_status pst__cuda_copy_rows(pst__cuda *cuda, CUstream stream, const pst_row_copy *copy);

/* In adamw.c. The same statuses. */
pst_status pst__cuda_adamw_prepare(pst__cuda *cuda, CUstream stream,
                                   const pst_adamw_settings *settings, float *const *steps,
                                   size_t count, void *coefficients);
pst_status pst__cuda_adamw(pst__cuda *cuda, CUstream stream, const pst_adamw_piece *pieces,
                           size_t count);

/* `arguments` is the kernel's one parameter. */
pst_status pst__cuda_launch_kernel(pst__cuda *cuda, CUfunction kernel, size_t blocks,
                                   unsigned threads, CUstream stream, void *arguments,
                                   const char *name);

#endif
