/* The kernels as machine code for one architecture: from the cache, or from the compiler. */
#ifndef PST_SCHED_DEVICE_CUDA_COMPILE_H
#define PST_SCHED_DEVICE_CUDA_COMPILE_H

#include "sched/device/cuda_nvrtc.h"

/* cuda_arguments.h and cuda_kernels.cu, as text. */
extern const char pst__cuda_kernels_source[];

typedef struct pst__cuda_compile_options {
    const char *nvrtc; /* path; NULL: see pst__nvrtc_open */
    const char *cache; /* folder; NULL and "": see pst__cuda_cache_find */
    int major, minor;  /* compute capability */
    int newest_cuda;   /* the driver's version as it tells it (12080), which limits NVRTC's */
} pst__cuda_compile_options;

/* PST_OK with the image, which the caller gives back to `heap`; *cached (may be NULL) says where it
 * came from. A cache that cannot be written is no error. May take seconds. PST_EUNSUPPORTED without
 * NVRTC, PST_EDEVICE if it refuses, PST_ENOMEM; `error` says why. */
pst_status pst__cuda_compile(const pst__heap *heap, const pst__cuda_compile_options *options,
                             pst__cuda_image *image, int *cached, pst__error *error);

#endif
