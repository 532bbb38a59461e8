/* penstock/flat.h - ZeRO-3 over flat shards, in the caller's order: what DeepSpeed's DeepCompile
 * asks for. A parameter is a number of elements; rank r of W holds elements [r*c, (r+1)*c) with
 * c = ceil(elements / W), padded with zeros to c. Knows nothing of torch.
 *
 * Unlike pst_zero there are no passes and no groups: the caller's program, the same on all ranks,
 * says gather, wait, release and reduce, and collectives go out in the order of these calls. What
 * followed a use the last time is gathered ahead the next time, several parameters in one
 * collective: this choice depends on nothing but the order of calls and sizes, so it is the same on
 * all ranks.
 *
 * A *copy* is a parameter gathered in one dtype; each has a state of its own:
 *
 *     sharded -> in flight -> gathered -> sharded
 *
 * One thread at a time calls (which one may change). On an asynchronous device all is in the order
 * of the compute stream: what a call says of memory holds for what the stream is given after it,
 * and the host waits for launches only. On the host device wait and end_backward block.
 */
#ifndef PENSTOCK_FLAT_H
#define PENSTOCK_FLAT_H

#include <penstock/comm.h>
#include <penstock/graph.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_flat pst_flat;

typedef struct pst_flat_options {
    size_t size;           /* sizeof(pst_flat_options) */
    const char *name;      /* copied; NULL: "flat" */
    pst_comm *gather_comm; /* both the caller's, alive until destroy; the same one twice is fine */
    pst_comm *reduce_comm;
    pst_device *device;  /* NULL: the runtime's host device */
    pst_lane *compute;   /* BORROWED lane; NULL: the calling thread of the host device */
    int pumped;          /* 1: lanes are pumped (no worker thread) */
    size_t ahead_bytes;  /* at most so much is gathered ahead of its use, and beside it one copy
                            that is larger, in memory apart; 0: nothing is */
    size_t fuse_bytes;   /* of copies gathered in one collective; 0: one copy each */
    size_t bucket_bytes; /* of gradients that travel together; 0: 64 MiB. Two such buckets for each
                            dtype; larger gradients travel in parts */
    size_t batch_bytes;  /* of gradients that are copied into buckets at once; 0: 32 MiB, or a
                            bucket where that is less. On asynchronous devices they are copied
                            beside compute, which waits for a batch when 256 MiB more (in the
                            buckets' dtype) were reported behind it, or 8 batches, or the backward
                            ends */
    int single_buffer;   /* 1: one bucket for each dtype: less memory, less overlap */
    /* (optional) where arenas lie, see memory.h. Where a communicator opens memory to peers, it is
     * asked for 16 MiB or more at once, and gives memory that the device's memory_export takes, of
     * that size rounded up as the device rounds it. */
    pst_status (*segment_alloc)(void *context, size_t bytes, void **memory);
    void (*segment_free)(void *context, void *memory, size_t bytes);
    void *segment_context;
    /* (optional) The source that was reported with this token is not needed any more (on an
     * asynchronous device: behind what the compute stream was given so far). Called once for each
     * report, from within calls on this object. */
    void (*consumed)(void *context, void *token);
    void *callback_context;
} pst_flat_options;

PST_API pst_status pst_flat_create(pst_runtime *runtime, const pst_flat_options *options,
                                   pst_flat **flat);
/* Waits for what is in flight, then aborts the communicators, as pst_zero_destroy does; NULL is
 * fine. */
PST_API void pst_flat_destroy(pst_flat *flat);

/* All ranks add the same parameters in the same order, at any time. `name` is copied. PST_EINVAL
 * (more elements than can be counted in bytes), PST_ENOMEM. */
PST_API pst_status pst_flat_add(pst_flat *flat, const char *name, size_t elements,
                                uint32_t *parameter);

/* This rank's shard: c elements, the caller's, alive until bound anew or destroyed. `home`: the
 * memory that it is a piece of, at the same distance from its begin on all ranks, or the shard
 * itself: what has one home can be gathered in one collective. Copies of it are stale. */
PST_API pst_status pst_flat_bind(pst_flat *flat, uint32_t parameter, const void *shard,
                                 const void *home, pst_dtype dtype);

/* The shard is not there now: the next use of the parameter is an error until it is bound again.
 * Compute waits until nothing reads the shard: its memory is free, behind what compute was given so
 * far. Copies stay. */
PST_API pst_status pst_flat_unbind(pst_flat *flat, uint32_t parameter);

/* Memory of the device that shards lie in, at the same distance from its begin on all ranks. Where
 * a communicator reads only memory that was opened to the peers (see open_memory in comm.h), shards
 * in it are gathered from where they are, in their dtype, and need no copy for the peers to read.
 * They are written when nobody reads them: behind an end_backward that was the last one before the
 * update. Other communicators: nothing is done. All ranks call it alike. The memory lives until the
 * communicators are destroyed. May block. */
PST_API pst_status pst_flat_open_memory(pst_flat *flat, void *memory, size_t bytes);

/* Where the reduced gradient goes: c elements, the caller's. NULL: frozen, gradients are dropped.
 * The next gradient is written, not added. */
PST_API pst_status pst_flat_bind_gradient(pst_flat *flat, uint32_t parameter, void *target,
                                          pst_dtype dtype);

/* The copy of a parameter in this dtype; made at the first call, in the same order on all ranks.
 * Any number of calls. */
PST_API pst_status pst_flat_copy(pst_flat *flat, uint32_t parameter, pst_dtype dtype,
                                 uint32_t *copy);

/* A use begins: the copy is gathered unless it is gathered or in flight already, and so is what
 * follows. *memory is where it lies, or will lie when compute has waited; W * c elements. */
PST_API pst_status pst_flat_gather(pst_flat *flat, uint32_t copy, void **memory);
/* Gathers these, as hints say, in as few collectives as can be, up to the first one for which
 * ahead_bytes has no room: no use begins. All ranks call it alike. */
PST_API pst_status pst_flat_prefetch(pst_flat *flat, const uint32_t *copies, size_t count);
/* Gathers into the caller's memory of W * c elements, beside all that is said above: nothing is
 * kept or recorded, and compute has waited when the call returns. */
PST_API pst_status pst_flat_gather_to(pst_flat *flat, uint32_t copy, void *memory);
/* Compute waits for the copy. PST_ESTATE: it was not gathered. */
PST_API pst_status pst_flat_wait(pst_flat *flat, uint32_t copy);
/* A use ends. After the last one the memory is free, behind what compute was given so far, unless
 * the copy is resident or soon used again. */
PST_API pst_status pst_flat_release(pst_flat *flat, uint32_t copy);
PST_API size_t pst_flat_uses(const pst_flat *flat, uint32_t copy);

/* Resident copies stay gathered, at one address, and are gathered anew there when they are stale.
 */
PST_API pst_status pst_flat_set_resident(pst_flat *flat, uint32_t copy, int resident);
/* The copy is gathered anew at its next use: one in use when that has ended, a resident one where
 * it is. */
PST_API pst_status pst_flat_invalidate(pst_flat *flat, uint32_t copy);
/* Ends all uses (of a program that was broken off). */
PST_API pst_status pst_flat_end_uses(pst_flat *flat);

/* The shards change before the next use: copies of trainable parameters (with a gradient target)
 * are stale, and nothing is gathered ahead beyond this point. */
PST_API pst_status pst_flat_updated(pst_flat *flat);
/* The same for one parameter, frozen or not. */
PST_API pst_status pst_flat_touched(pst_flat *flat, uint32_t parameter);

/* A backward begins. is_last: the shards are updated after it, and gradients of the backward behind
 * it are written, not added. The one before may have been broken off: what had not gone out is
 * forgotten, what had gone out counts as any gradient does. So whoever accumulates begins anew
 * behind the next one that is_last, be it broken off too. */
PST_API pst_status pst_flat_begin_backward(pst_flat *flat, int is_last);
/* The whole gradient of a parameter: contiguous, not written until `consumed` is called with the
 * token (which is within this call if it fails, or if the gradient is dropped). It travels as
 * `travels`, its mean over the ranks is written to the target, or added if there was one since the
 * last update. */
PST_API pst_status pst_flat_reduce(pst_flat *flat, uint32_t parameter, const void *source,
                                   pst_dtype dtype, pst_dtype travels, void *token);
/* All gradients so far go out, and compute waits for them; in a backward that is the last one,
 * targets without a gradient since the update before are zeroed, compute waits for peers that still
 * read shards, and copies count as updated. release: the buckets' memory goes back. */
PST_API pst_status pst_flat_end_backward(pst_flat *flat, int release);

typedef struct pst_flat_stats {
    size_t size;           /* sizeof(pst_flat_stats); where it is not set, nothing is written */
    uint64_t gathers;      /* collectives */
    uint64_t gathered;     /* copies */
    uint64_t gather_bytes; /* of whole copies */
    uint64_t ahead;        /* copies gathered before their use asked for it */
    uint64_t unused;       /* of them, given back without a use */
    uint64_t reduces, reduce_bytes;
    size_t source_bytes; /* of copies of shards that peers read */
    uint64_t exposed_ns; /* the calling thread waited */
    uint64_t late_launches;
    size_t arena_reserved, arena_peak, bucket_bytes;
} pst_flat_stats;
PST_API void pst_flat_get_stats(const pst_flat *flat, pst_flat_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
