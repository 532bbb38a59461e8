/* Buckets: gradients on their way out, each bucket as one reduction. A bucket of each dtype is open
 * at a time; its operation collects what is delivered where. */
#ifndef PST_OPS_TRANSFER_BUCKET_H
#define PST_OPS_TRANSFER_BUCKET_H

#include "ops/transfer/gradients.h"
#include "ops/transfer/operation.h"

#define PST__SLOT_ALIGNMENT 128u /* bytes */
#define PST__WAIT_GRADIENTS "wait gradients"

/* Makes the carrier's buckets, in memory of `arena`. Fixed ones are all there is: they are filled
 * again when their peers have read them. */
pst_status pst__buckets_create(pst__carrier *carrier, pst_arena *arena, size_t chunk_bytes,
                               size_t per_dtype, int is_fixed);
/* Before a dtype's first bucket is filled: fixed ones lie in a segment that is opened to peers, at
 * the same place on all ranks, since all of them come here for the same dtype. */
pst_status pst__buckets_open(pst__carrier *carrier, pst_dtype dtype);
/* Begins the bucket of this dtype if none is open. */
pst_status pst__bucket_begin(pst__carrier *carrier, pst_dtype dtype);
/* The dtype of the open bucket that has the target's latest gradient; PST_DTYPE_COUNT: none has. */
pst_dtype pst__bucket_of(const pst__carrier *carrier, const pst__target *target);
/* A slot of `bytes` a rank in the open bucket, which is begun if there is none. One without room is
 * sent by `flush`, which an empty one does not need; while all are on their way and one is not
 * launched yet, the host waits for that, and the device for the rest. */
pst_status pst__bucket_slot(pst__carrier *carrier, pst_dtype dtype, size_t bytes,
                            pst_status (*flush)(void *context, pst_dtype dtype), void *context,
                            pst_slot *slot);
/* Elements from `first` of the target are delivered from `offset` of this rank's sums. */
pst_status pst__bucket_deliver(pst__operation *operation, const pst__target *target, size_t first,
                               size_t count, size_t offset);
/* The open bucket of this dtype goes out as a reduce-scatter of means, behind all copies into it;
 * and its sums, where there are several replicas, as an all-reduce behind that. */
pst_status pst__bucket_send(pst__carrier *carrier, pst_dtype dtype, const char *name);
/* The same step by step, for an executor that fills a bucket only when it goes out, or sends it
 * otherwise. First the bucket is closed: it takes no more slots, and belongs to its operation. */
pst_status pst__bucket_close(pst__carrier *carrier, pst_dtype dtype, pst_bucket *bucket);
/* Then its operation is described: by this function as a reduce-scatter of sums times `scale`. */
void pst__bucket_describe(pst__operation *operation, const pst_bucket *bucket, const char *name,
                          double scale);
/* Then it goes out, behind all copies into it. */
pst_status pst__bucket_submit(pst__carrier *carrier, pst_dtype dtype);
/* 1: the reductions' communicator can push, from any memory of the device into a bucket of each
 * peer's, which then needs no copy to go out from. */
int pst__bucket_pushes(const pst__carrier *carrier);
/* Makes an operation that is new a reduce-scatter of means of that kind, of `bytes` a rank; the
 * stream of landings waits until the bucket is free. On failure the operation stays. */
pst_status pst__bucket_land(pst__operation *operation, pst_dtype dtype, size_t bytes);
/* It goes out, behind what the stream of landings was given: with a name, a source and pieces. */
pst_status pst__bucket_push(pst__operation *operation);
/* How many buckets have gone out and hold their memory still. */
size_t pst__bucket_held(pst__carrier *carrier);
/* The host waits until the oldest of them is launched; its memory can be used again behind it. */
pst_status pst__bucket_wait(pst__carrier *carrier);
/* What is in buckets that have not gone out goes nowhere on this rank. */
void pst__bucket_deliver_nothing(pst__carrier *carrier);
/* The open buckets do not go out: their memory and operations are given back. */
void pst__bucket_abandon_all(pst__carrier *carrier);
/* Bytes of all buckets now. */
size_t pst__bucket_bytes(const pst__carrier *carrier);

#endif
