/* The device `cuda`: its struct, and what its parts and the communicators ask of it. */
#ifndef PST_SCHED_CUDA_CUDA_H
#define PST_SCHED_CUDA_CUDA_H

#include "base/atomic.h"
#include "base/heap.h"
#include "sched/cuda/driver.h"

#include <ck_spinlock.h>
#include <penstock/cuda.h>
#include <pthread.h>

typedef struct pst__cuda_kernels pst__cuda_kernels;

/* Events that nobody uses, of one kind. */
typedef struct pst__cuda_pool {
    ck_spinlock_t lock; /* held for a push or a pop */
    pst_event *first;
} pst__cuda_pool;

/* A moment that both clocks know: where the device's events stand on the host's clock. */
typedef struct pst__cuda_anchor {
    pthread_mutex_t lock;
    CUevent event, spare; /* the next anchor is taken with the spare one */
    uint64_t host_ns;     /* 0: never taken */
} pst__cuda_anchor;

/* Shared memory, own or imported. */
typedef struct pst__cuda_shared pst__cuda_shared;

typedef struct pst__cuda {
    pst_device device;
    pst__heap heap;       /* a copy: the device outlives its runtime */
    pst_runtime *runtime; /* for poison and the log, while opened */
    int opened;           /* 0 while it is being created or destroyed */
    pst__cuda_driver driver;
    CUdevice gpu;
    CUcontext context; /* the primary one */
    char name[16];     /* "cuda:0" */
    int ordinal;
    int major, minor;    /* compute capability */
    int processors;      /* streaming multiprocessors */
    int numa_node;       /* the host's, nearest to the GPU; -1: unknown */
    int lowest, highest; /* priorities of streams; the number of the highest is the smallest */
    size_t granularity;  /* of device memory */
    int exports;         /* device memory can be exported */
    CUstream service;    /* the device's own, above all others in priority: it never waits */
    pst__cuda_pool untimed, timed;
    pst__cuda_anchor anchor;
    ck_spinlock_t shared_lock; /* of the list: held for list surgery and walks */
    pst__cuda_shared *shared;
    pst__cuda_kernels *kernels; /* NULL: there are none, for the reason below */
    char no_kernels[256];
    uint64_t capture, captures; /* the number of the one that runs, or 0; how many have begun */
} pst__cuda;

struct pst_stream {
    CUstream native;
    int wrapped;
    uint64_t capture; /* the latest one that it took part in */
};

struct pst_event {
    CUevent native;
    pst__cuda_pool *pool;
    pst_event *next;  /* in the pool */
    uint64_t capture; /* that its latest record is a part of; 0: it was enqueued */
};

static inline pst__cuda *pst__cuda_of(const pst_device *device) {
    return device->context;
}

static inline CUdeviceptr pst__cuda_address(const void *memory) {
    return (CUdeviceptr)(uintptr_t)memory;
}

/* ---- capture (capture.c) ------------------------------------------------------------ */

/* The capture that the stream takes part in now; 0: none. Relaxed: threads that share a capture
 * follow each other. */
static inline uint64_t pst__cuda_capture_of(const pst__cuda *cuda, const pst_stream *stream) {
    const uint64_t running = pst__load_relaxed(&cuda->capture);
    return running != 0 && pst__load_relaxed(&stream->capture) == running ? running : 0;
}

/* The capture that the event's latest record is a part of; 0: of none, and the driver may be asked.
 * Acquire: pairs with the releases in pst__cuda_event_record. */
static inline uint64_t pst__cuda_event_capture(const pst_event *event) {
    return pst__load_acquire(&event->capture);
}

pst_status pst__cuda_capture_begin(pst_device *device, pst_stream *stream);
void pst__cuda_capture_end(pst_device *device);

/* ---- the context -------------------------------------------------------------------- */

/* Makes the device's context the calling thread's. *previous is for pst__cuda_leave, which puts
 * back what the thread had; a thread that had none keeps the device's, so that a worker pays for it
 * once. After a failure there is nothing to leave. */
pst_status pst__cuda_enter(pst__cuda *cuda, CUcontext *previous);

/* The same, to enqueue on `stream`: PST_ESTATE while a wrapped stream is under capture. */
pst_status pst__cuda_enter_stream(pst__cuda *cuda, const pst_stream *stream, CUcontext *previous);

void pst__cuda_leave(pst__cuda *cuda, CUcontext previous);

typedef struct pst__cuda_entry {
    pst__cuda *cuda;
    CUcontext previous;
    pst_status status;
} pst__cuda_entry;

static inline pst__cuda_entry pst__cuda_entry_begin(pst__cuda *cuda, const pst_stream *stream) {
    pst__cuda_entry entry = {cuda, NULL, PST_OK};
    entry.status = stream == NULL ? pst__cuda_enter(cuda, &entry.previous)
                                  : pst__cuda_enter_stream(cuda, stream, &entry.previous);
    return entry;
}

static inline void pst__cuda_entry_end(pst__cuda_entry *entry) {
    if (entry->status == PST_OK) pst__cuda_leave(entry->cuda, entry->previous);
}

/* Enters, for `stream` (NULL: for none), and leaves at the end of the C scope that this stands in;
 * where the entry fails the function returns its status. */
#define PST__CUDA_ENTER_OR_RETURN(cuda, stream)                                                    \
    __attribute__((cleanup(pst__cuda_entry_end))) pst__cuda_entry entry =                          \
        pst__cuda_entry_begin(cuda, stream);                                                       \
    if (entry.status != PST_OK) return entry.status

/* ---- errors ------------------------------------------------------------------------- */

/* The status of what a driver call has answered. If that is an error, a text of it, which the
 * format completes (the object: a stream, bytes), becomes the calling thread's error_text; an error
 * that ends the context also poisons the runtime with it. */
pst_status pst__cuda_status(pst__cuda *cuda, CUresult result, const char *call, const char *format,
                            ...) __attribute__((format(printf, 4, 5)));

/* Any other failure: `status`, with a text for error_text. */
pst_status pst__cuda_refuse(pst__cuda *cuda, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* pst__cuda_call(cuda, cuEventRecord, (event, stream), "stream %p", (void *)stream) */
#define pst__cuda_call(cuda, function, arguments, ...)                                             \
    pst__cuda_status((cuda), (cuda)->driver.function arguments, #function, __VA_ARGS__)

/* ---- the table's functions, by file ------------------------------------------------- */

/* status.c */
const char *pst__cuda_error_text(pst_device *device);
void pst__cuda_forget_text(void);

/* stream.c */
pst_status pst__cuda_stream_create(pst_device *device, int priority, pst_stream **stream);
pst_status pst__cuda_stream_wrap(pst_device *device, void *native, pst_stream **stream);
void pst__cuda_stream_destroy(pst_device *device, pst_stream *stream);
pst_status pst__cuda_launch(pst_device *device, pst_stream *stream, const pst_work *work);
pst_status pst__cuda_stream_ready(pst_device *device, pst_stream *stream);
pst_status pst__cuda_stream_wait(pst_device *device, pst_stream *stream, pst_event *event);
pst_status pst__cuda_stream_write32(pst_device *device, pst_stream *stream, uint32_t *address,
                                    uint32_t value);
pst_status pst__cuda_stream_wait32(pst_device *device, pst_stream *stream, const uint32_t *address,
                                   uint32_t value);
pst_status pst__cuda_stream_flags32(pst_device *device, pst_stream *stream,
                                    const pst_flag_step *steps, size_t count);
pst_status pst__cuda_flag_write32(pst_device *device, uint32_t *address, uint32_t value);

/* event.c */
pst_status pst__cuda_event_create(pst_device *device, int timed, pst_event **event);
void pst__cuda_event_destroy(pst_device *device, pst_event *event);
pst_status pst__cuda_event_record(pst_device *device, pst_event *event, pst_stream *stream);
pst_status pst__cuda_event_query(pst_device *device, pst_event *event);
pst_status pst__cuda_event_time(pst_device *device, pst_event *event, uint64_t *nanoseconds);
void pst__cuda_events_free(pst__cuda *cuda); /* those that are in the pools */
pst_status pst__cuda_copy(pst_device *device, pst_stream *stream, const pst_copy *copies,
                          size_t count);
pst_status pst__cuda_copy_2d(pst_device *device, pst_stream *stream, void *destination,
                             size_t destination_pitch, const void *source, size_t source_pitch,
                             size_t row_bytes, size_t rows);

/* memory.c */
pst_status pst__cuda_alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory);
void pst__cuda_free(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes);
pst_status pst__cuda_memory_export(pst_device *device, void *memory, int *descriptor);
pst_status pst__cuda_memory_import(pst_device *device, int descriptor, size_t bytes, void **memory);
void pst__cuda_memory_unmap(pst_device *device, void *memory, size_t bytes);

/* shared.c: within the context; `descriptor` is not taken over */
pst_status pst__cuda_shared_alloc(pst__cuda *cuda, size_t bytes, void **memory);
pst_status pst__cuda_shared_import(pst__cuda *cuda, int descriptor, size_t bytes, void **memory);
/* 0: `memory` is not shared memory. */
int pst__cuda_shared_free(pst__cuda *cuda, void *memory);
int pst__cuda_shared_export(pst__cuda *cuda, const void *memory, int *descriptor);
int pst__cuda_shared_contains(pst__cuda *cuda, const void *address);
/* Is this descriptor one of shared memory? */
int pst__cuda_is_shared(int descriptor);

#endif
