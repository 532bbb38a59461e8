/* The ranks compare a hash of what they do, beside it: a difference poisons the runtime. */
#ifndef PST_OPS_TRANSFER_COMPARE_H
#define PST_OPS_TRANSFER_COMPARE_H

#include "ops/transfer/operation.h"

#define PST__COMPARISONS 4u /* in flight at most: one more waits for the oldest */

typedef struct pst__comparisons {
    pst__carrier *carrier;
    pst__lane_index lane; /* whose ranks compare: this replica's, or those of all replicas that have
                             this rank's part */
    const char *name;     /* of the collective */
    const char *meaning;  /* "rank 3 " and this: what a difference says */
    uint64_t *words;      /* pinned: for each comparison this rank's hash, then everybody's */
    uint64_t tickets[PST__COMPARISONS];
    uint64_t count; /* so far */
} pst__comparisons;

pst_status pst__comparisons_create(pst__carrier *carrier, pst__lane_index lane, const char *name,
                                   const char *meaning, pst__comparisons *comparisons);
void pst__comparisons_free(pst__comparisons *comparisons);
pst_status pst__compare(pst__comparisons *comparisons, uint64_t hash);
/* The same over all replicas' ranks, but blocks, and a difference is an error that is returned. */
pst_status pst__compare_now(pst__comparisons *comparisons, uint64_t hash);

#endif
