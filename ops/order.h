/* The canonical orders of a backward. They follow from the forward's uses alone, which are the same
 * on all ranks, and not from what a rank's backward happens to reach. */
#ifndef PST_OPS_ORDER_H
#define PST_OPS_ORDER_H

#include "base/heap.h"

/* When a group was used: the clock of its first use and of its last use's end; 0: never. */
typedef struct pst__span {
    uint64_t first, last;
} pst__span;

typedef enum pst__need { PST__NEED_UNKNOWN = 0, PST__NEED_NONE, PST__NEED_SOME } pst__need;

/* Groups in the order in which a backward gathers them: by the end of their last use, descending.
 */
typedef struct pst__backward {
    uint32_t *groups;
    size_t count;
    size_t *finished;   /* by position: the position at which the group's first use is behind us */
    uint32_t *position; /* by group; PST__NO_POSITION when it is not in the order */
} pst__backward;

#define PST__NO_POSITION UINT32_MAX

typedef struct pst__order {
    size_t group_count;
    size_t *bytes;        /* by group: gathered */
    pst__span *uses;      /* by group: since the last complete backward */
    uint64_t *first_uses; /* by group: since the last complete backward that reduced */
    pst__backward gathers;
    uint32_t *reduces;    /* groups by first use, descending */
    size_t *reduce_after; /* by position in `reduces`: gathers that come before it */
    size_t reduce_count;
} pst__order;

pst_status pst__order_alloc(const pst__heap *heap, pst__order *order, size_t group_count);
void pst__order_free(const pst__heap *heap, pst__order *order);

pst_status pst__backward_alloc(const pst__heap *heap, pst__backward *backward, size_t group_count);
void pst__backward_free(const pst__heap *heap, pst__backward *backward, size_t group_count);
/* Groups with a span, without those that nobody needs. */
void pst__backward_build(pst__backward *backward, const pst__span *uses, size_t group_count,
                         const pst__need *need);
/* How many groups of the order come before the end of this group's backward: those that were used
 * until the end of its own last use, or longer; itself too, if it is in the order. */
size_t pst__backward_before(const pst__backward *backward, const pst__span *uses, uint32_t group);
/* How many positions are gathered when position `position` is in use: itself, and then at most
 * `ahead` more, within `budget` bytes (0: no limit) of what is alive there. A group stays alive
 * until the step after its first use's backward, because its gradients end about then. */
size_t pst__backward_limit(const pst__backward *backward, const size_t *bytes, size_t position,
                           uint32_t ahead, size_t budget);

/* Sorts `groups` by descending key[group]; ties: the higher index first. */
void pst__sort_descending(uint32_t *groups, size_t count, const uint64_t *keys, size_t stride);

#endif
