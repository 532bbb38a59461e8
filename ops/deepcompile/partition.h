/* A partition's structs. */
#ifndef PST_OPS_DEEPCOMPILE_PARTITION_H
#define PST_OPS_DEEPCOMPILE_PARTITION_H

#include "base/hash.h"
#include "ops/transfer/bucket.h"
#include "ops/transfer/compare.h"
#include "ops/transfer/gradients.h"

#include <penstock/partition.h>

/* Elements [first, first + count) of a parameter. */
typedef struct pst__partition_range {
    size_t first, count;
} pst__partition_range;

typedef struct pst__partition_owner {
    size_t rank;
    pst__partition_range range;
} pst__partition_owner;

typedef struct pst__partition_parameter {
    char *name;
    size_t elements;
    pst__partition_range own;        /* what was bound last */
    pst__target target;              /* no memory: nothing is bound */
    size_t first_owner, owner_count; /* in the table, once the ranks have compared */
} pst__partition_parameter;

/* A piece of a gradient that waits for its bucket to be full. */
typedef struct pst__partition_entry {
    uint32_t parameter;
    const void *source; /* of the piece's first element */
    pst_dtype source_dtype;
    pst__partition_range range;
    int is_last; /* of its gradient: then the token is consumed */
    void *token;
} pst__partition_entry;

/* What an open bucket will hold. Its bytes are those of the pieces with the padding between. */
typedef struct pst__partition_pending {
    pst__partition_entry *entries;
    size_t count, capacity;
} pst__partition_pending;

struct pst_partition {
    pst_partition_options options;
    pst__carrier carrier;
    pst_arena *memory;  /* of buckets */
    size_t chunk_bytes; /* of a rank, in a bucket */
    int is_opened;      /* peers read buckets by themselves: they stay, and have one size */

    pst__partition_parameter *parameters;
    size_t parameter_count, parameter_capacity;
    pst__partition_owner *owners;
    size_t owner_count, owner_capacity;
    int is_compared;

    pst__partition_pending pending[PST_DTYPE_COUNT];
    pst__sources_held held;
    size_t *chunk_used; /* by rank: bytes of a bucket that it owns */
    pst__casts casts;

    int is_last;                  /* this backward */
    uint64_t hash;                /* of what was reported */
    int has_reduced;              /* since the last comparison */
    pst__comparisons comparisons; /* of `hash` */
    pst_partition_stats stats;
};

#define pst__partition_fail(partition, status, format, ...)                                        \
    pst__carrier_fail(&(partition)->carrier, status, format, __VA_ARGS__)

/* ---- partition.c ----------------------------------------------------------------------------- */
/* The ranks exchange what they own. Blocks. PST_EMISMATCH names what is wrong. */
pst_status pst__partition_compare_owners(pst_partition *partition);

/* ---- partition_reduce.c ---------------------------------------------------------------------- */
/* A gradient, whose token is consumed in any case, joins what is pending. */
pst_status pst__partition_report(pst_partition *partition, uint32_t parameter, const void *source,
                                 pst_dtype dtype, void *token);
pst_status pst__partition_flush_all(pst_partition *partition);
void pst__partition_forget_pending(pst_partition *partition);

#endif
