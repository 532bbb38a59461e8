/* penstock/memory.h - arena, offline planner, event-ordered pool, buckets, pinned memory. Sizes and
 * offsets are bytes. Objects are used by one thread at a time unless a function says otherwise. */
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
    size_t lower_bound; /* the largest sum of sizes alive in one step */
} pst_plan_result;

/* Gives every interval an offset so that no two which are alive together overlap: greedy by size,
 * ties by first step and then by index, so that equal input gives equal offsets on every rank.
 * Intervals of 0 bytes get offset 0. PST_EINVAL (last < first, overflow), PST_ENOMEM. */
PST_API pst_status pst_plan_offsets(pst_runtime *runtime, pst_interval *intervals, size_t count,
                                    pst_plan_result *result);

/* ---- arena: a list of segments of device memory ----------------------------------------------- */

typedef struct pst_arena pst_arena;

typedef struct pst_arena_options {
    size_t size; /* sizeof(pst_arena_options) */
    const char *name;
    pst_device *device; /* NULL: the runtime's host device */
    pst_memory_kind kind;
    size_t segment_bytes; /* of segments after the first; 0: 64 MiB; a larger request gets its own */
    size_t limit_bytes;   /* the arena never grows beyond; 0: no limit */
    /* (optional) where segments come from instead of device->ops->alloc, e.g. torch's allocator */
    pst_status (*segment_alloc)(void *context, size_t bytes, void **memory);
    void (*segment_free)(void *context, void *memory, size_t bytes);
    void *segment_context;
} pst_arena_options;

PST_API pst_status pst_arena_create(pst_runtime *runtime, const pst_arena_options *options,
                                    pst_arena **arena);
PST_API void pst_arena_destroy(pst_arena *arena); /* frees its segments; leases must be over */

/* Adds a segment of at least `bytes`. Offsets count through all segments in order; no lease spans
 * two. With several ranks this is a collective decision: call it alike on all. */
PST_API pst_status pst_arena_add_segment(pst_arena *arena, size_t bytes);

/* A lease: the use of a piece of the arena. Before its first use the user's stream waits for
 * `after` (NULL: free at once). */
typedef struct pst_lease {
    void *memory;
    size_t offset, bytes; /* bytes as asked for, rounded up to the alignment */
    pst_event *after[4];
    size_t after_count;
} pst_lease;

/* Best fit over free pieces; pieces whose event is done first, then those that are still in use by
 * a device (the lease then names their events). Grows the arena by a segment when nothing fits.
 * PST_ENOMEM with the sizes in the text. */
PST_API pst_status pst_arena_acquire(pst_arena *arena, size_t bytes, pst_lease *lease);

/* The piece [offset, offset + bytes) of a plan. PST_EBUSY (with the text naming the range) when a
 * lease still holds a part of it; the caller then uses pst_arena_acquire. The arena is grown to
 * hold it. */
PST_API pst_status pst_arena_acquire_at(pst_arena *arena, size_t offset, size_t bytes,
                                        pst_lease *lease);

/* Ends a lease: the piece may be used again after `event` (NULL: now). The arena asks the device
 * for the event's completion and must find it alive until it is done or the arena is destroyed. */
PST_API void pst_arena_release(pst_arena *arena, const pst_lease *lease, pst_event *event);

/* Keeps the piece out of use until the arena is destroyed (after a failure nobody knows who still
 * writes to it). */
PST_API void pst_arena_quarantine(pst_arena *arena, const pst_lease *lease);

typedef struct pst_arena_stats {
    size_t reserved;   /* bytes of all segments */
    size_t leased;     /* bytes in leases now */
    size_t peak;       /* the most bytes in leases at once */
    size_t quarantined;
    uint64_t acquires, planned_hits, grows, event_waits;
} pst_arena_stats;

PST_API void pst_arena_get_stats(const pst_arena *arena, pst_arena_stats *stats);
PST_API void pst_arena_reset_peak(pst_arena *arena);

/* ---- buckets: where gradients wait for their reduction ---------------------------------------- */

/* Two buffers a dtype, filled in turn: while one is being reduced the other fills. A bucket is
 * rank-major: for each of `ranks` ranks a chunk of `chunk_bytes`, so that slot s of rank r lies at
 * memory + r * stride + s.offset. Slots are aligned and the bytes between them are zero. */
typedef struct pst_buckets pst_buckets;

typedef struct pst_buckets_options {
    size_t size; /* sizeof(pst_buckets_options) */
    pst_arena *arena;
    size_t ranks;
    size_t chunk_bytes; /* capacity of a rank's chunk; a larger slot gets a bucket of its own size */
    size_t alignment;   /* of slots; 0: 128 */
} pst_buckets_options;

typedef struct pst_slot {
    void *memory; /* the slot of rank 0 */
    size_t stride; /* bytes from one rank's slot to the next */
    size_t offset; /* in the chunk */
    size_t bytes;  /* usable bytes a rank */
    size_t padded_bytes; /* with the zeros up to the alignment */
} pst_slot;

typedef struct pst_bucket {
    void *memory;
    size_t stride;     /* bytes from one rank's chunk to the next */
    size_t used_bytes; /* filled bytes of each chunk */
    size_t slot_count;
    pst_dtype dtype;
    pst_event *after[4]; /* the filling stream waits for these before its first write */
    size_t after_count;
    uint64_t id; /* names the bucket in pst_buckets_retire */
} pst_bucket;

PST_API pst_status pst_buckets_create(pst_runtime *runtime, const pst_buckets_options *options,
                                      pst_buckets **buckets);
PST_API void pst_buckets_destroy(pst_buckets *buckets);

/* Room for `bytes` a rank in the current bucket of this dtype. PST_EBUSY when it does not fit: the
 * caller flushes and asks again. The slot's padding is zeroed on `stream` by the device's fill; its
 * own bytes are the caller's to fill. PST_ENOMEM. */
PST_API pst_status pst_buckets_slot(pst_buckets *buckets, pst_dtype dtype, size_t bytes,
                                    pst_stream *stream, pst_slot *slot);

/* Takes the current bucket of this dtype for reduction; the next slot goes to the other one (or to
 * an extra one while both are in use; counted). PST_ESTATE when nothing is in it. */
PST_API pst_status pst_buckets_flush(pst_buckets *buckets, pst_dtype dtype, pst_bucket *bucket);

/* The bucket's reduction is over behind `event` (NULL: now): its memory may be filled again. */
PST_API void pst_buckets_retire(pst_buckets *buckets, uint64_t id, pst_event *event);

/* Gives the memory of retired buckets back to the arena (after the last backward part that
 * reduces). */
PST_API void pst_buckets_trim(pst_buckets *buckets);

/* ---- pinned memory ------------------------------------------------------------------------------ */

typedef struct pst_pinned pst_pinned;

/* A cache of pinned host memory: registered in pieces of at least `piece_bytes` (0: 256 MiB) because
 * page-locking is slow, handed out in exact sizes (rounded to 512 bytes, never to powers of two).
 * Any thread. */
PST_API pst_status pst_pinned_create(pst_runtime *runtime, pst_device *device, size_t piece_bytes,
                                     pst_pinned **pinned);
PST_API void pst_pinned_destroy(pst_pinned *pinned);
PST_API pst_status pst_pinned_acquire(pst_pinned *pinned, size_t bytes, void **memory);
PST_API void pst_pinned_release(pst_pinned *pinned, void *memory);

#ifdef __cplusplus
}
#endif
#endif
