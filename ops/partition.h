/* A partition's structs. Its engine has no parameters and no groups: it carries collectives. */
#ifndef PST_OPS_PARTITION_H
#define PST_OPS_PARTITION_H

#include "mem/arena.h"
#include "ops/operation.h"

#include <penstock/partition.h>

/* Elements [first, first + count) of a parameter. */
typedef struct pst__range {
    size_t first, count;
} pst__range;

typedef struct pst__owner {
    size_t rank;
    pst__range range;
} pst__owner;

typedef struct pst__split {
    char *name;
    size_t elements;
    pst__range own;                  /* what was bound last */
    void *target;                    /* NULL: nothing is bound */
    pst_dtype dtype;                 /* of the target */
    int has_sum;                     /* gradients since the last update are in the target */
    int is_old;                      /* those of an earlier update are, still */
    uint64_t bucket;                 /* the last one that it was put into */
    size_t first_owner, owner_count; /* in the table, once the ranks have compared */
} pst__split;

/* A piece of a gradient that waits for its bucket to be full. */
typedef struct pst__entry {
    uint32_t parameter;
    const void *source; /* of the piece's first element */
    pst_dtype source_dtype;
    pst__range range;
    int accumulate;
    int is_last; /* of its gradient: then the token is consumed */
    void *token;
} pst__entry;

typedef struct pst__pending {
    pst__entry *entries;
    size_t count, capacity;
    size_t bytes;    /* as they travel, with the padding between them */
    uint64_t number; /* of the bucket that they will be; 0: none yet */
} pst__pending;

/* Ranks tell each other a hash of what they reported. */
#define PST__COMPARISONS 4u

typedef struct pst__comparison {
    pst_partition *partition;
    uint64_t *words; /* pinned: own one, then everybody's */
    pst__operation *exchange;
} pst__comparison;

struct pst_partition {
    pst_partition_options options;
    pst_zero *engine;
    pst_arena *memory;  /* of buckets */
    size_t chunk_bytes; /* of a rank, in a bucket */
    int is_opened;      /* peers read buckets by themselves: they stay, and have one size */
    int has_memory[PST_DTYPE_COUNT];                  /* opened, for buckets of this dtype */
    uint64_t bucket_tickets[2 * PST_DTYPE_COUNT + 1]; /* opened: by id, of its last reduction */

    pst__split *splits;
    size_t split_count, split_capacity;
    pst__owner *owners;
    size_t owner_count, owner_capacity;
    int is_compared;

    pst__pending pending[PST_DTYPE_COUNT];
    void **copied; /* tokens of sources that are copied beside compute */
    size_t copied_count, copied_capacity;
    uint64_t buckets;   /* numbered so far */
    size_t *chunk_used; /* by rank: bytes of a bucket that it owns */
    pst_cast *casts;
    size_t cast_count, cast_capacity;

    int is_last; /* this backward */
    uint64_t hash;
    int has_reduced; /* since the last comparison */
    pst__comparison comparisons[PST__COMPARISONS];
    pst_segment *segments; /* of a comparison */
    uint64_t compared;
    pst_partition_stats stats;
};

#define pst__partition_fail(partition, status, format, ...)                                        \
    pst__zero_fail((partition)->engine, status, format, __VA_ARGS__)

/* Bytes of so many elements in a bucket. */
static inline size_t pst__padded(size_t count, pst_dtype dtype) {
    return pst__round_up(count * pst_dtype_size(dtype), PST_ZERO_ALIGNMENT);
}

/* ---- partition_owners.c ---------------------------------------------------------------------- */
/* The ranks tell each other what they own. Blocks. PST_EMISMATCH names what is wrong. */
pst_status pst__owners_compare(pst_partition *partition);
pst_status pst__comparisons_alloc(pst_partition *partition);
void pst__comparisons_free(pst_partition *partition);
/* What was reported since the last comparison is compared over the ranks, without blocking; a
 * difference poisons the runtime. */
pst_status pst__comparison_begin(pst_partition *partition);

/* ---- partition_bucket.c ---------------------------------------------------------------------- */
/* All that is pending in this dtype goes out as one collective. */
pst_status pst__bucket_send(pst_partition *partition, const pst__pending *pending, pst_dtype dtype);

/* ---- partition_pending.c --------------------------------------------------------------------- */
pst_status pst__pending_add(pst_partition *partition, uint32_t parameter, const void *source,
                            pst_dtype dtype, void *token);
pst_status pst__pending_flush_all(pst_partition *partition);
void pst__pending_forget_all(pst_partition *partition);
/* Compute waits for the copies into buckets so far: their sources are not needed any more. */
pst_status pst__pending_join(pst_partition *partition);
/* Sources whose copies are over. */
void pst__pending_forget_copied(pst_partition *partition);

#endif
