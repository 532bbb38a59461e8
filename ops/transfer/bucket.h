/* Buckets: gradients on their way out, each bucket as one reduction. A bucket of each dtype is open
 * at a time; its operation collects what is delivered where. */
#ifndef PST_OPS_TRANSFER_BUCKET_H
#define PST_OPS_TRANSFER_BUCKET_H

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
/* A slot of `bytes` a rank. A bucket without room is sent by `flush`; while all are on their way
 * and one is not launched yet, the host waits for that, and the device for the rest. */
pst_status pst__bucket_slot(pst__carrier *carrier, pst_dtype dtype, size_t bytes,
                            pst_status (*flush)(void *context, pst_dtype dtype), void *context,
                            pst_slot *slot);
/* The open bucket of this dtype goes out as a reduce-scatter of means, behind all copies into it.
 */
pst_status pst__bucket_send(pst__carrier *carrier, pst_dtype dtype, const char *name);
/* A bucket has gone out with this operation: its peers read it by this ticket. */
void pst__bucket_note_ticket(const pst__operation *operation);
/* What is in buckets that have not gone out goes nowhere on this rank. */
void pst__bucket_deliver_nothing(pst__carrier *carrier);
void pst__bucket_abandon_all(pst__carrier *carrier);
/* Bytes of all buckets now. */
size_t pst__bucket_bytes(const pst__carrier *carrier);

#endif
