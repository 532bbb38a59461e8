/* Where the rows of parameters lie: in shards, in gathered groups, in flat gradients. Pure
 * functions of shapes, so that every rank computes the same.
 *
 * Shards of all dtypes of a group use the same element offsets (only the bytes an element differ),
 * so that a cast of a whole shard is one piece and a reduction is one piece a group.
 *
 * A shard may lie within what is gathered: then that is the shard, of which the rank owns its rows,
 * where the gather has them. Nothing of its own is copied, and all ranks read from each other where
 * they write to. */
#ifndef PST_OPS_ZERO_LAYOUT_H
#define PST_OPS_ZERO_LAYOUT_H

#include "base/heap.h"

#include <penstock/zero.h>

typedef struct pst__rows {
    size_t first, count;
} pst__rows;

/* The rows of `rank`, as torch.chunk deals them out. */
pst__rows pst__rows_of(size_t rows, size_t world, size_t rank);

/* One parameter as a member of a group. */
typedef struct pst__member {
    uint32_t parameter;
    int trainable;
    size_t rows, row_elements;
    size_t shard_element;    /* where the rank's rows begin in its shard */
    size_t gathered_offset;  /* bytes */
    size_t gradient_element; /* in a flat gradient; SIZE_MAX for frozen ones */
} pst__member;

typedef struct pst__layout {
    pst__member *members;
    size_t member_count;
    size_t element_bytes, gather_element_bytes, reduce_element_bytes;
    size_t shard_elements, gradient_elements;
    size_t gathered_bytes;
    size_t gradient_bytes_whole; /* of the whole trainable parameters, as they travel */
    int moves; /* what is gathered lies otherwise than in a shard: always, but for one rank alone */
    int is_within;         /* the shard lies within what is gathered; set before it is built */
    pst_segment *segments; /* of the group's all-gather */
    size_t segment_count, segment_capacity;
} pst__layout;

/* Fills in offsets and segments from the members' shapes and the element sizes. Only where a shard
 * lies within what is gathered does it differ between ranks where their rows begin. PST_EINVAL when
 * a size overflows, PST_ENOMEM. */
pst_status pst__layout_build(const pst__heap *heap, pst__layout *layout, size_t world, size_t rank);
void pst__layout_free(const pst__heap *heap, pst__layout *layout);

/* The first element behind the place of a trainable member in a flat gradient, padding included. */
size_t pst__layout_end(const pst__layout *layout, size_t member);

/* Elements of a group's flat gradient, the same in all ranks' chunks. */
typedef struct pst__part {
    size_t first, count;
} pst__part;

/* Pieces that fill one rank-major slot with a part of whole gradients: valid rows from `sources`
 * (by member; NULL: zeros), everything else zeros. Returns how many were written; at most
 * pst__layout_cast_limit. */
size_t pst__layout_cast_limit(const pst__layout *layout, size_t world);
size_t pst__layout_casts(const pst__layout *layout, size_t world, pst__part part, char *slot,
                         size_t stride, const void *const *sources, pst_dtype source_dtype,
                         pst_dtype reduce_dtype, pst_cast *pieces);

#endif
