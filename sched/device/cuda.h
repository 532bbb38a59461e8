/* The device `cuda`: its struct, and what its parts and the communicators ask of it. */
#ifndef PST_SCHED_DEVICE_CUDA_H
#define PST_SCHED_DEVICE_CUDA_H

#include "base/heap.h"
#include "sched/device/cuda_driver.h"

#include <penstock/cuda.h>

typedef struct pst__cuda_kernels pst__cuda_kernels;

/* Events that nobody uses, each of one kind. */
typedef struct pst__cuda_pool {
    ck_spinlock_t lock; /* held for a push or a pop */
    pst_event *first;
} pst__cuda_pool;

typedef struct pst__cuda {
    pst_device device;
    pst__heap heap;       /* a copy: the device outlives its runtime */
    pst_runtime *runtime; /* for poison and texts; not used by destroy and what it calls */
    pst__cuda_driver driver;
    CUdevice gpu;
    CUcontext context; /* the primary one */
    char name[32];     /* "cuda:0" */
    int ordinal;
    int major, minor;    /* compute capability */
    int processors;      /* streaming multiprocessors */
    int numa_node;       /* of the host, nearest to the GPU; -1: unknown */
    int lowest, highest; /* stream priorities: numerically from highest (<= 0) to lowest */
    size_t granularity;  /* of device memory that can be mapped */
    int exports;         /* device memory can be exported */
    pst__cuda_pool untimed, timed;
    pst__cuda_kernels *kernels; /* NULL: not loaded yet */
} pst__cuda;

struct pst_stream {
    CUstream native;
    int owned; /* made by the device; else wrapped */
};

static inline pst__cuda *pst__cuda_of(const pst_device *device) {
    return device->context;
}

static inline CUstream pst__cuda_stream(const pst_stream *stream) {
    return stream->native;
}

/* ---- the context -------------------------------------------------------------------------- */

/* What the thread had before, for pst__cuda_leave. */
typedef struct pst__cuda_previous {
    CUcontext context; /* NULL: nothing to restore */
} pst__cuda_previous;

/* Makes the device's context the calling thread's. A thread that had none keeps it afterwards, so
 * that a worker pays for it once. */
pst_status pst__cuda_enter(pst__cuda *cuda, pst__cuda_previous *previous);
void pst__cuda_leave(pst__cuda *cuda, const pst__cuda_previous *previous);

/* ---- errors ------------------------------------------------------------------------------- */

/* The status of what a driver call has answered. If that is an error, a text of it, which the
 * format completes (the object: a stream, bytes), becomes the calling thread's error_text; an error
 * that ends the context also poisons the runtime with it. */
pst_status pst__cuda_status(pst__cuda *cuda, CUresult result, const char *call, const char *format,
                            ...) __attribute__((format(printf, 4, 5)));

/* Any other failure: `status`, with a text for error_text. */
pst_status pst__cuda_refuse(pst__cuda *cuda, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The calling thread's error_text. */
const char *pst__cuda_error_text(pst_device *device);

/* pst__cuda_call(cuda, cuEventRecord, (event, stream), "stream %p", (void *)stream) */
#define pst__cuda_call(cuda, function, arguments, ...)                                             \
    pst__cuda_status((cuda), (cuda)->driver.function arguments, #function, __VA_ARGS__)

#endif
