/* penstock/partition.h - gradients reduced into flat partitions, as DeepSpeed's ZeRO-1 and ZeRO-2
 * lay them out: all parameters in one flat space that is cut evenly over the ranks, so that a
 * parameter's elements belong to one rank or to several. Knows nothing of torch.
 *
 * Each rank binds the elements that it owns to memory of its own. Gradients are reported in the
 * order in which a backward makes them, the same on all ranks; they gather in buckets, travel, and
 * each rank gets the mean over the ranks of what it owns, and nothing else. For each backward
 *
 *     pst_partition_begin_backward
 *         pst_partition_reduce            for each gradient
 *     pst_partition_end_backward          at the end, and wherever else gradients are to go out
 *
 * Backwards between two updates add up: a parameter's first gradient since the last update is
 * written, whatever graph or backward it comes from, and every further one is added.
 *
 * How a bucket travels: by reduce-scatter, if what the ranks own of it is about equal, and else by
 * all-reduce. A backward comes to the parameters of one rank after those of another, so that most
 * buckets belong to one or two ranks; all ranks' chunks are as large as the largest, and a
 * reduce-scatter of such a bucket would move up to `world` times its size to one rank. All ranks
 * know what the others own and choose alike. Buckets that peers read by themselves (one-sided
 * communicators) stay where they are; of others the memory goes back when it is released.
 *
 * One thread at a time uses a partition (which one may change). Nothing blocks until a device is
 * done: on an asynchronous device memory is in the order of the compute stream. On the host device
 * end_backward waits. The first gradients that go out after parameters were added are preceded by a
 * comparison of what the ranks own, which blocks.
 */
#ifndef PENSTOCK_PARTITION_H
#define PENSTOCK_PARTITION_H

#include <penstock/comm.h>
#include <penstock/graph.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_partition pst_partition;

typedef enum pst_partition_route {
    PST_PARTITION_AUTO = 0,
    PST_PARTITION_ALL_REDUCE,
    PST_PARTITION_REDUCE_SCATTER,
} pst_partition_route;

typedef struct pst_partition_options {
    size_t size;         /* sizeof(pst_partition_options) */
    const char *name;    /* copied; NULL: "partition" */
    pst_comm *comm;      /* of reductions only; the caller's, outlives the partition */
    pst_device *device;  /* NULL: the runtime's host device */
    pst_lane *compute;   /* BORROWED lane; NULL: the calling thread of the host device */
    int pumped;          /* 1: the lane is pumped (no worker thread) */
    size_t bucket_bytes; /* of gradients that travel together; 0: 64 MiB. Two such buckets for each
                            dtype; gradients may be larger */
    int single_buffer;   /* 1: one bucket for each dtype: less memory, less overlap */
    int reduce_in_fp32;  /* 1: gradients travel as fp32; 0: in their own dtype */
    pst_partition_route route;
    /* (optional) where buckets come from, see memory.h */
    pst_status (*segment_alloc)(void *context, size_t bytes, void **memory);
    void (*segment_free)(void *context, void *memory, size_t bytes);
    void *segment_context;
    /* segment_free takes effect in the order of the compute stream, so that memory which compute
     * waits for may be freed at once (torch's allocator is like that). */
    int frees_in_compute_order;
    /* (optional) The source that was reported with this token is not needed any more (on an
     * asynchronous device: behind what the compute stream was given so far). Called once for each
     * report, from within calls on the partition. */
    void (*consumed)(void *context, void *token);
    void *callback_context;
} pst_partition_options;

/* PST_EINVAL, PST_ENOMEM, and what the device returns. */
PST_API pst_status pst_partition_create(pst_runtime *runtime, const pst_partition_options *options,
                                        pst_partition **partition);
/* Waits for what is in flight, then aborts the communicator, as pst_zero_destroy does; NULL is
 * fine. */
PST_API void pst_partition_destroy(pst_partition *partition);

/* A parameter of so many elements; all ranks add the same ones in the same order. *parameter counts
 * from 0. `name` is copied. Any time between backwards. PST_EINVAL (more elements than can be
 * counted in bytes), PST_ENOMEM. */
PST_API pst_status pst_partition_add(pst_partition *partition, const char *name, size_t elements,
                                     uint32_t *parameter);

/* This rank owns elements [first, first + count) of the parameter, whose gradient goes to `target`,
 * in `dtype`. What was accumulated is forgotten: the next gradient is written. count = 0 (target
 * NULL): owned, if at all, but not bound now; what belongs to it is dropped. Once the ranks have
 * compared what they own, PST_EINVAL for other elements than then. `target` is the caller's, and
 * lives until it is unbound or bound anew and compute has waited (end_backward). Gradients that
 * were reported but did not go out are forgotten. */
PST_API pst_status pst_partition_bind(pst_partition *partition, uint32_t parameter, void *target,
                                      pst_dtype dtype, size_t first, size_t count);

/* A backward begins; is_last: it is the last one before an update, so that the one after it begins
 * anew. The one before may have been broken off: what had not gone out is forgotten, what had gone
 * out counts as any gradient does. So whoever accumulates begins anew behind the next one that
 * is_last, be it broken off too. */
PST_API pst_status pst_partition_begin_backward(pst_partition *partition, int is_last);

/* The whole gradient of a parameter: contiguous, not written until `consumed` is called with the
 * token (which is within this call if it fails). PST_EINVAL, PST_ENOMEM, PST_EMISMATCH. */
PST_API pst_status pst_partition_reduce(pst_partition *partition, uint32_t parameter,
                                        const void *source, pst_dtype dtype, void *token);

/* All gradients so far go out, and compute waits for them: it may read the targets. Those without a
 * gradient since the last update are zeroed in a backward that is the last one. release: the
 * buckets' memory goes back. PST_EMISMATCH poisons the runtime, possibly later: the ranks reported
 * different gradients. */
PST_API pst_status pst_partition_end_backward(pst_partition *partition, int release);

typedef struct pst_partition_stats {
    size_t size;         /* sizeof(pst_partition_stats); where it is not set, nothing is written */
    uint64_t reductions; /* buckets that went out */
    uint64_t by_reduce_scatter; /* of them */
    uint64_t bytes;             /* of whole gradients */
    uint64_t exposed_ns;        /* the calling thread waited */
    size_t bucket_bytes;        /* of buckets' memory now */
    size_t bucket_peak;
} pst_partition_stats;
PST_API void pst_partition_get_stats(const pst_partition *partition, pst_partition_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
