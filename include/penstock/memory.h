/* penstock/memory.h - arena, offline planner, event-ordered pool, buckets. Sizes and offsets are
 * bytes. Objects are used by one thread at a time, and are destroyed before their runtime. */
#ifndef PENSTOCK_MEMORY_H
#define PENSTOCK_MEMORY_H

#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PST_ARENA_ALIGNMENT 512u /* of segments and of every offset that planner and pool give */

/* ---- offline planner ------------------------------------------------------------------------ */

/* A buffer that lives from step `first` to step `last`, both included. */
typedef struct pst_interval {
    uint64_t first, last;
    size_t bytes;
    size_t offset; /* filled in by the planner */
} pst_interval;

typedef struct pst_plan_result {
    size_t peak;        /* bytes that the offsets need */
    size_t lower_bound; /* the largest sum of aligned sizes alive in one step */
} pst_plan_result;

/* Gives every interval an offset so that no two which are alive together overlap: the best of a few
 * placements, each greedy by size, with sizes that are nearly equal taken as equal in varying
 * degree; ties by first step and then by index. Equal input gives equal offsets on every rank.
 * Intervals of 0 bytes get offset 0. Any thread, as long as the intervals are one thread's.
 * PST_EINVAL (last < first, sizes whose sum overflows; the text names the interval), PST_ENOMEM; on
 * error no offset is changed. */
PST_API pst_status pst_plan_offsets(pst_runtime *runtime, pst_interval *intervals, size_t count,
                                    pst_plan_result *result);

/* ---- arena: a list of segments of device memory --------------------------------------------- */

typedef struct pst_arena pst_arena;

typedef struct pst_arena_options {
    size_t size; /* sizeof(pst_arena_options) */
    const char *name;
    pst_device *device; /* NULL: the runtime's host device */
    pst_memory_kind kind;
    size_t segment_bytes; /* of segments that growing adds, at least; 0: 64 MiB */
    size_t limit_bytes;   /* the arena never grows beyond; 0: no limit */
    /* (optional) where segments come from instead of device->ops->alloc, e.g. torch's allocator */
    pst_status (*segment_alloc)(void *context, size_t bytes, void **memory);
    void (*segment_free)(void *context, void *memory, size_t bytes);
    void *segment_context;
} pst_arena_options;

/* An arena without segments. `name` is copied; it names the arena in errors and traces, where the
 * leased bytes are a counter. The device and segment_context must outlive the arena. PST_EINVAL,
 * PST_ENOMEM; then *arena is NULL. */
PST_API pst_status pst_arena_create(pst_runtime *runtime, const pst_arena_options *options,
                                    pst_arena **arena);
/* Frees the segments: leases must be over and no device may use the memory any more. NULL is fine.
 */
PST_API void pst_arena_destroy(pst_arena *arena);

/* Adds a segment of at least `bytes`. Offsets count through all segments in order; no lease spans
 * two, so a plan wants its whole peak in one segment. May block in the device's alloc. With several
 * ranks this is a collective decision: call it alike on all. PST_EINVAL (0 bytes), PST_ENOMEM (with
 * the sizes in the text), and what the device returns. */
PST_API pst_status pst_arena_add_segment(pst_arena *arena, size_t bytes);

/* Frees segments from the last one on as long as nothing in them is leased, in quarantine or waits
 * for an event. Offsets of the others stay. */
PST_API void pst_arena_trim(pst_arena *arena);

#define PST_LEASE_EVENTS 4u

/* A lease: the use of a piece of the arena. Before its first use the user's stream waits for the
 * events in `after` (none: free at once). */
typedef struct pst_lease {
    void *memory;
    size_t offset, bytes; /* bytes as asked for, rounded up to the alignment */
    pst_event *after[PST_LEASE_EVENTS];
    size_t after_count;
} pst_lease;

/* Best fit over free pieces; pieces whose events are done first, then those that are still in use
 * by a device (the lease then names their events), then neighbours of either sort together. Grows
 * the arena by a segment when nothing fits. 0 bytes give an empty lease (memory NULL). Never waits
 * for an event; blocks only in the device's alloc. PST_ENOMEM with the sizes in the text. */
PST_API pst_status pst_arena_acquire(pst_arena *arena, size_t bytes, pst_lease *lease);

/* The piece [offset, offset + bytes) of a plan; the arena is grown to hold it. PST_EBUSY, with a
 * text naming the range and the reason, when a lease or the quarantine holds a part of it, when it
 * waits for more events than a lease can name, or when it spans segments; the caller then uses
 * pst_arena_acquire. PST_EINVAL (offset not aligned), PST_ENOMEM. */
PST_API pst_status pst_arena_acquire_at(pst_arena *arena, size_t offset, size_t bytes,
                                        pst_lease *lease);

/* Ends a lease: the piece may be used again after `event`, which is recorded already and comes
 * after all uses. NULL: now, or, for a lease that was never used, after what it waited for itself.
 * The arena asks the device for the event's completion: keep the event alive until the arena is
 * destroyed, or pst_arena_forget has returned PST_OK for it (it may be recorded again; the piece
 * then waits for that). So the event of a growing graph's task (pst_task_event) lives long enough
 * if the task's handle is released after that. A piece whose event fails goes to quarantine.
 * Releasing what is no lease is reported through the error text and changes nothing. */
PST_API void pst_arena_release(pst_arena *arena, const pst_lease *lease, pst_event *event);

/* May the event go? PST_OK: no piece waits for it any more, and the arena never asks for it again.
 * PST_PENDING: ask again when it is done, or when the leases that named it have ended. Whoever has
 * such a lease has made its stream wait by then, if need be. Does not block. */
PST_API pst_status pst_arena_forget(pst_arena *arena, const pst_event *event);

/* Ends a lease and keeps the piece out of use until the arena is destroyed (after a failure nobody
 * knows who still writes to it). */
PST_API void pst_arena_quarantine(pst_arena *arena, const pst_lease *lease);

typedef struct pst_arena_stats {
    size_t size;           /* sizeof(pst_arena_stats); where it is not set, nothing is written */
    size_t reserved;       /* bytes of all segments */
    size_t leased;         /* bytes in leases now */
    size_t peak;           /* the most bytes in leases at once */
    size_t quarantined;    /* bytes */
    uint64_t acquires;     /* leases given, empty ones not counted */
    uint64_t planned_hits; /* of them by pst_arena_acquire_at */
    uint64_t grows;        /* segments added */
    uint64_t event_waits;  /* leases that named an event */
} pst_arena_stats;

PST_API void pst_arena_get_stats(const pst_arena *arena, pst_arena_stats *stats);
PST_API void pst_arena_reset_peak(pst_arena *arena); /* to what is leased now */

/* ---- buckets: where gradients wait for their reduction -------------------------------------- */

/* Two buffers a dtype, filled in turn: while one is being reduced the other fills. A bucket is
 * rank-major: for each of `ranks` ranks a chunk, so that slot s of rank r lies at
 * memory + r * stride + s.offset. Slots are aligned and the bytes between them are zero. */
typedef struct pst_buckets pst_buckets;

typedef struct pst_buckets_options {
    size_t size;      /* sizeof(pst_buckets_options) */
    pst_arena *arena; /* outlives the buckets */
    size_t ranks;
    size_t chunk_bytes; /* of a rank's chunk; a larger slot gets a bucket of its own size */
    size_t alignment;   /* of slots, a power of two up to PST_ARENA_ALIGNMENT; 0: 128 */
    size_t per_dtype;   /* 0: two; 1: a bucket fills when the reduction of the one before is over */
    int fixed; /* 1, for asynchronous devices: exactly that many a dtype, in turn, which keep
                  their memory; the choice never depends on what a device has done by then */
    /* (optional) Before anything is written into an empty bucket: gives `stream` what it has to
     * wait for beside the event with which it was retired. */
    pst_status (*refill)(void *context, uint64_t id, pst_stream *stream);
    void *refill_context;
} pst_buckets_options;

typedef struct pst_slot {
    void *memory;        /* the slot of rank 0 */
    size_t stride;       /* bytes from one rank's slot to the next */
    size_t offset;       /* in the chunk */
    size_t bytes;        /* usable bytes a rank */
    size_t padded_bytes; /* with the zeros up to the alignment */
} pst_slot;

typedef struct pst_bucket {
    void *memory;
    size_t stride;     /* bytes from one rank's chunk to the next */
    size_t used_bytes; /* filled bytes of each chunk, padding included */
    size_t slot_count;
    pst_dtype dtype;
    uint64_t
        id; /* names the bucket in pst_buckets_retire; from 1, the same each time it is filled */
} pst_bucket;

/* Takes no memory from the arena yet. PST_EINVAL, PST_ENOMEM; then *buckets is NULL. */
PST_API pst_status pst_buckets_create(pst_runtime *runtime, const pst_buckets_options *options,
                                      pst_buckets **buckets);
/* Gives retired buckets back to the arena; those that are not retired go to its quarantine. NULL is
 * fine. */
PST_API void pst_buckets_destroy(pst_buckets *buckets);

/* Room for `bytes` > 0 a rank (whole elements) in the current bucket of this dtype; all slots of a
 * bucket are for one stream. Waits, in the
 * order of `stream`, for the memory's earlier use: where the stream is its worker this is
 * PST_PENDING until that is over, and the caller asks again. The slot's padding is zeroed on
 * `stream` by the device; its own bytes are the caller's to fill. PST_EBUSY when it does not fit
 * into what is left: the caller flushes and asks again. Fixed buckets: PST_PENDING while neither is
 * retired, PST_EINVAL for more than chunk_bytes. PST_EINVAL, PST_ENOMEM and what the device and
 * `refill` return. Only with PST_OK is anything taken. */
PST_API pst_status pst_buckets_slot(pst_buckets *buckets, pst_dtype dtype, size_t bytes,
                                    pst_stream *stream, pst_slot *slot);

/* Takes the current bucket of this dtype for reduction; the next slot goes to the other one (or to
 * an extra one while both are in use; counted). PST_ESTATE when nothing is in it. */
PST_API pst_status pst_buckets_flush(pst_buckets *buckets, pst_dtype dtype, pst_bucket *bucket);

/* Takes an empty bucket for `bytes` a rank, beside the current one, as if it had been filled and
 * flushed: for what is written into it otherwise, behind what `stream` is given. As
 * pst_buckets_slot besides. */
PST_API pst_status pst_buckets_take(pst_buckets *buckets, pst_dtype dtype, size_t bytes,
                                    pst_stream *stream, pst_bucket *bucket);

/* The bucket's reduction is over behind `event` (NULL: now; it lives until this bucket is retired
 * again, and besides as in pst_arena_release): its memory may be filled again. Extra buckets and
 * those of their own size go back to the arena. Retiring what is not flushed is reported through
 * the error text and changes nothing. */
PST_API void pst_buckets_retire(pst_buckets *buckets, uint64_t id, pst_event *event);

/* Gives the memory of retired buckets back to the arena (after the last backward part that
 * reduces); not of fixed ones. */
PST_API void pst_buckets_trim(pst_buckets *buckets);

typedef struct pst_buckets_stats {
    size_t size;    /* sizeof(pst_buckets_stats); where it is not set, nothing is written */
    size_t buckets; /* with memory now */
    size_t bytes;   /* of their memory */
    uint64_t flushes;
    uint64_t extra;    /* buckets beyond two of a dtype, made because both were in use */
    uint64_t own_size; /* buckets made for a slot larger than chunk_bytes */
} pst_buckets_stats;

PST_API void pst_buckets_get_stats(const pst_buckets *buckets, pst_buckets_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
