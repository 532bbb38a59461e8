/* penstock/device.h - the interface to a device: where memory lives and streams run.
 *
 * A device is {ops, context}. `host` (threads stand for streams) is built in; another device is
 * another filled-in table. Streams and events are opaque to the scheduler. All calls are
 * non-blocking unless they say otherwise. Slots marked (optional) may be NULL, and those of memory,
 * copies and kernels where only lanes use the device: who needs a slot that is NULL refuses the
 * device with PST_EINVAL, and names it.
 *
 * Asynchronous devices keep a stream's order themselves: `launch` enqueues and returns PST_OK,
 * stream_wait enqueues a wait. A device with PST_DEVICE_STREAM_IS_WORKER (the host device) has no
 * queue of its own: its stream is whoever launches on it. There stream_wait answers PST_PENDING
 * until the event is done, `launch` may answer PST_PENDING, and the scheduler asks again
 * (`progress`) and launches nothing else on that stream until then.
 */
#ifndef PENSTOCK_DEVICE_H
#define PENSTOCK_DEVICE_H

#include <penstock/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PST_DEVICE_API_VERSION 1u

typedef struct pst_device pst_device;
typedef struct pst_stream pst_stream; /* defined by each device */
typedef struct pst_event pst_event;   /* defined by each device */

typedef enum pst_dtype {
    PST_FLOAT32 = 0,
    PST_FLOAT64,
    PST_FLOAT16,
    PST_BFLOAT16,
    PST_INT8,
    PST_UINT8,
    PST_INT16,
    PST_INT32,
    PST_INT64,
    PST_BOOL,
    PST_FLOAT8_E4M3,
    PST_FLOAT8_E5M2,
    PST_DTYPE_COUNT
} pst_dtype;

/* Bytes an element; 0 for a value that is no dtype. */
PST_API size_t pst_dtype_size(pst_dtype dtype);
PST_API const char *pst_dtype_name(pst_dtype dtype);

/* Work for a stream. start(argument, stream): on the host device it does the work, or begins it and
 * returns PST_PENDING, and then `test` is called until it returns something else; neither may
 * block. On an asynchronous device `start` enqueues on `stream` and returns PST_OK; `test` is not
 * called. A negative status means that the work failed; PST_EINVAL is kept of one that is none of
 * pst_status. */
typedef struct pst_work {
    pst_status (*start)(void *argument, pst_stream *stream);
    pst_status (*test)(void *argument); /* (optional) */
    void *argument;
} pst_work;

typedef enum pst_device_caps {
    PST_DEVICE_STREAM_IS_WORKER = 1u << 0, /* see above */
    PST_DEVICE_TIMED_EVENTS = 1u << 1,     /* event_time works */
    PST_DEVICE_HOST_ACCESS = 1u << 2,      /* device memory can be read and written by the host */
} pst_device_caps;

typedef enum pst_memory_kind {
    PST_MEMORY_DEVICE = 0, /* where kernels of the device work */
    PST_MEMORY_PINNED,     /* host memory that the device copies from and to at full speed */
    PST_MEMORY_SHARED      /* the same, for flags: zeroed, other processes can import it, and
                              flag_write32 works there whatever streams do */
} pst_memory_kind;

typedef struct pst_copy {
    void *destination;
    const void *source;
    size_t bytes;
} pst_copy;

/* One piece of a cast-scale-copy: destination[i] = cast(source[i] * scale), i < count. With
 * source == NULL the piece is filled with zeros. Pieces do not overlap. */
typedef struct pst_cast {
    void *destination;
    const void *source;
    size_t count;
    pst_dtype destination_dtype;
    pst_dtype source_dtype;
} pst_cast;

/* destination[i] = cast((accumulate ? destination[i] : 0) + scale * sum over k of sources[k][i]),
 * summed in fp32 (fp64 for PST_FLOAT64) in the order of k, so that equal inputs give equal bits on
 * every rank. `destination` may be one of the sources. A device whose kernels share it with others
 * has at most `max_blocks` blocks of threads work on it (0: as many as are fast alone), and where
 * `is_passing` is not 0 keeps what it reads and writes in caches no longer than other things. */
typedef struct pst_sum {
    void *destination;
    const void *const *sources;
    size_t source_count;
    size_t count;
    double scale;
    int accumulate;
    pst_dtype destination_dtype;
    pst_dtype source_dtype;
    unsigned max_blocks;
    int is_passing;
} pst_sum;

/* A part of a table of rows, as many bytes as it says from `first` on, and where it goes. */
typedef struct pst_row_range {
    void *destination;
    const void *source;
    size_t first, bytes;
} pst_row_range;

/* Of each range those bytes that belong to one of the named rows, which may be named several times;
 * what lies between them stays as it is. Ranges do not overlap. A name that no row has counts for
 * nothing. */
typedef struct pst_row_copy {
    const int64_t *indices; /* in the device's memory, read in stream order */
    size_t count;
    size_t rows, row_bytes;      /* of the table */
    const pst_row_range *ranges; /* the host's; read before the call returns */
    size_t range_count;
} pst_row_copy;

/* What the pieces of a step of AdamW share. lr and eps are not negative, 0 <= beta < 1. What the
 * pointers name lies in the device's memory and is read in stream order, so that neither a captured
 * graph nor the host has to know its value. */
typedef struct pst_adamw_settings {
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_at;           /* (optional) takes the place of `lr` */
    const float *gradient_scale;  /* (optional) gradients are divided by it */
    const float *gradient_factor; /* (optional) gradients are multiplied by it */
    const float *found_inf;       /* (optional) where it is not 0 the step is skipped */
    uint64_t seed;                /* of stochastic rounding */
    int maximize;                 /* 1: against the gradient */
} pst_adamw_settings;

/* Bytes of a step's coefficients; their alignment is 16. */
#define PST_ADAMW_COEFFICIENTS_BYTES 64u

#define PST_ADAMW_MOST_SOURCES 8u

/* One piece of a step of AdamW, of `count` elements: parameter, moments and copy are written, all
 * aligned to their elements, and none overlaps another. Dtypes are PST_FLOAT32, PST_BFLOAT16 and
 * PST_FLOAT16; computed is in fp32. Where there are sources, PST_ADAMW_MOST_SOURCES at most, the
 * gradient is what `sum` would make of them, rounded to gradient_dtype, and is not written. */
typedef struct pst_adamw_piece {
    void *parameter;            /* the master, where there is a copy of fewer bits */
    const void *gradient;       /* NULL where there are sources */
    const void *const *sources; /* the host's; read before the call returns */
    size_t source_count;
    double scale; /* of the sum of sources */
    void *exp_avg, *exp_avg_sq;
    void *max_exp_avg_sq; /* (optional) makes it AMSGrad; as exp_avg_sq, never rounded randomly */
    void *copy;           /* (optional) gets the parameter, too */
    const void *coefficients; /* what adamw_prepare has written */
    size_t count;
    uint64_t first; /* the number of the first element, for stochastic rounding */
    pst_dtype parameter_dtype, gradient_dtype, moment_dtype, copy_dtype, source_dtype;
    int rounds_randomly; /* 1: exp_avg and exp_avg_sq, which are bfloat16, are rounded
                            stochastically: up or down by seed, step and number alone */
} pst_adamw_piece;

/* One of several writes of flags and waits for them. */
typedef struct pst_flag_step {
    uint32_t *address;
    uint32_t value;
    int is_wait;
} pst_flag_step;

/* The scheduler alone calls streams, events and `launch` (the slots up to event_query); arenas need
 * memory too, executors and offloads also copies and kernels. A user that finds a slot NULL which
 * it needs refuses the device by the slot's name. */
typedef struct pst_device_ops {
    unsigned api_version; /* PST_DEVICE_API_VERSION */
    unsigned caps;        /* pst_device_caps */
    const char *name;     /* "host", "cuda", ... */

    /* Streams. priority: 0 is normal, lower is more urgent. wrap borrows a stream of the caller's
     * (its native handle; on the host device NULL stands for the calling thread). */
    pst_status (*stream_create)(pst_device *device, int priority, pst_stream **stream);
    pst_status (*stream_wrap)(pst_device *device, void *native, pst_stream **stream);
    void (*stream_destroy)(pst_device *device, pst_stream *stream);
    pst_status (*launch)(pst_device *device, pst_stream *stream, const pst_work *work);
    /* (optional; required with STREAM_IS_WORKER) asks a launch that was pending again */
    pst_status (*progress)(pst_device *device, pst_stream *stream);

    /* Events: created in advance, recorded any number of times. A created event that was never
     * recorded counts as done. It is destroyed when its latest record is done, or when its device
     * is given up. One thread may record an event while others wait for it or query it: they get
     * the state before or after. */
    pst_status (*event_create)(pst_device *device, int timed, pst_event **event);
    void (*event_destroy)(pst_device *device, pst_event *event);
    pst_status (*event_record)(pst_device *device, pst_event *event, pst_stream *stream);
    pst_status (*stream_wait)(pst_device *device, pst_stream *stream, pst_event *event);
    pst_status (*event_query)(pst_device *device, pst_event *event); /* OK, PENDING or an error */
    /* (optional) host-clock nanoseconds at which a done, timed event happened */
    pst_status (*event_time)(pst_device *device, pst_event *event, uint64_t *nanoseconds);

    /* Copies, in stream order; those of one call in any order, so they do not overlap. */
    pst_status (*copy)(pst_device *device, pst_stream *stream, const pst_copy *copies,
                       size_t count);
    pst_status (*copy_2d)(pst_device *device, pst_stream *stream, void *destination,
                          size_t destination_pitch, const void *source, size_t source_pitch,
                          size_t row_bytes, size_t rows);

    /* Memory. alloc may block; alignment of what it returns is at least 512 bytes. */
    pst_status (*alloc)(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory);
    void (*free)(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes);
    /* (optional) Device or shared memory of one process, seen by another: a file descriptor out,
     * which the caller closes, an address in. `memory` is what alloc has returned, `bytes` what it
     * was asked for. memory_unmap ends an import. */
    pst_status (*memory_export)(pst_device *device, void *memory, int *descriptor);
    pst_status (*memory_import)(pst_device *device, int descriptor, size_t bytes, void **memory);
    void (*memory_unmap)(pst_device *device, void *memory, size_t bytes);

    /* (optional) 32-bit flags in stream order, at multiples of 4 in memory that the device can
     * reach: write a value, after everything before it in the stream is done and visible; wait
     * until (int32_t)(*address - value) >= 0, so that sequence numbers may wrap. */
    pst_status (*stream_write32)(pst_device *device, pst_stream *stream, uint32_t *address,
                                 uint32_t value);
    pst_status (*stream_wait32)(pst_device *device, pst_stream *stream, const uint32_t *address,
                                uint32_t value);
    /* (optional) Several of both, in their order, for less than one by one. */
    pst_status (*stream_flags32)(pst_device *device, pst_stream *stream, const pst_flag_step *steps,
                                 size_t count);
    /* (optional) Writes a flag now: releases streams that wait for it when its writer is dead. In
     * shared memory a plain store; elsewhere it may find no way past streams that wait, and then
     * ends with PST_ETIMEDOUT after a second. Any thread; blocks until it is written. */
    pst_status (*flag_write32)(pst_device *device, uint32_t *address, uint32_t value);

    /* Three kernels, in stream order. */
    pst_status (*cast_scale_copy)(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                                  size_t count, double scale);
    pst_status (*sum)(pst_device *device, pst_stream *stream, const pst_sum *sum);
    pst_status (*fill)(pst_device *device, pst_stream *stream, void *memory, int byte,
                       size_t bytes);
    /* (optional) And a fourth: destination[i] becomes the largest of sources[k][i]. Both dtypes are
     * the same one: a float of 32 or 64 bits, an integer or bool; there is at least one source;
     * scale and accumulate mean nothing. What comes of NaNs is not said. */
    pst_status (*maximum)(pst_device *device, pst_stream *stream, const pst_sum *maximum);

    /* (optional) Copies rows by number, in stream order. */
    pst_status (*copy_rows)(pst_device *device, pst_stream *stream, const pst_row_copy *copy);

    /* (optional) A step of AdamW, in stream order. adamw_prepare adds 1 to each of `count` steps (a
     * float in the device's memory; no two of them are one), unless the step is skipped, and writes
     * the coefficients that belong to it, PST_ADAMW_COEFFICIENTS_BYTES each; `steps` is the host's.
     * adamw updates pieces by coefficients, of which several pieces may share one. */
    pst_status (*adamw_prepare)(pst_device *device, pst_stream *stream,
                                const pst_adamw_settings *settings, float *const *steps,
                                size_t count, void *coefficients);
    pst_status (*adamw)(pst_device *device, pst_stream *stream, const pst_adamw_piece *pieces,
                        size_t count);

    /* (optional) PST_OK if a stream of the caller's takes work now, else why not, as stream_wait
     * would return it; enqueues nothing. Left out: it always does. */
    pst_status (*stream_ready)(pst_device *device, pst_stream *stream);

    /* (optional) `stream` is under capture by its owner: until capture_end what is enqueued on it,
     * and on streams that come to wait for its events, becomes a part of that graph instead of
     * running. Whoever launches the graph puts its stream in order with all that these streams do
     * beside it. Hence an event of before the capture counts as done within it, one recorded within
     * it is pending there and done for everybody else. One capture at a time: PST_EBUSY. */
    pst_status (*capture_begin)(pst_device *device, pst_stream *stream);
    void (*capture_end)(pst_device *device);

    /* (optional) text of the last error this device returned to the calling thread */
    const char *(*error_text)(pst_device *device);
    void (*destroy)(pst_device *device);
} pst_device_ops;

struct pst_device {
    const pst_device_ops *ops;
    void *context;
};

#ifdef __cplusplus
}
#endif
#endif
