/* Reductions over all ranks of several replicas: the ranks of a replica reduce among themselves,
 * and behind that, on a communicator of its own, those of all replicas that have the same part. */
#ifndef PST_OPS_TRANSFER_REPLICAS_H
#define PST_OPS_TRANSFER_REPLICAS_H

#include "ops/transfer/operation.h"

/* The reduce-scatter of a bucket, not submitted yet, is to sum up into memory in between, and
 * `*across`, an all-reduce of that, to deliver and update what it was to. The memory is that of
 * *across: `within` has to wait for across->summed.after. */
pst_status pst__replicas_split(pst__operation *within, pst__operation **across);
/* Submits an all-reduce in place of maxima, and behind it the same between replicas, if there are
 * several. Both or none are submitted but where the runtime is given up. `*last` calls back. */
pst_status pst__replicas_submit_maxima(pst__operation *operation, size_t bytes,
                                       pst__operation **last);

#endif
