/* The canonical orders of a backward. They follow from the forward's uses alone, which are the same
 * on all ranks, and not from what a rank's backward happens to reach. */
#ifndef PST_OPS_ZERO_ORDER_H
#define PST_OPS_ZERO_ORDER_H

#include "base/heap.h"

/* A time in which a group was used without a break: the clock of its first use's begin, and of its
 * last use's end; 0: it was not. */
typedef struct pst__period {
    uint32_t group;
    uint64_t first, last;
} pst__period;

#define PST__NO_GROUP UINT32_MAX

typedef enum pst__need { PST__NEED_UNKNOWN = 0, PST__NEED_NONE, PST__NEED_SOME } pst__need;

/* A group's turn to be gathered: for a period, or for some that are near each other. */
typedef struct pst__turn {
    uint32_t group;
    uint32_t periods;
    uint64_t first, last; /* as of one period */
    uint32_t next;        /* position of the group's next turn, or PST__NO_POSITION */
    size_t finished;      /* the position at which the first use is behind us */
} pst__turn;

/* The order in which a backward gathers: by the ends of the periods, descending. */
typedef struct pst__backward {
    pst__turn *turns;
    size_t count, capacity;
    uint32_t *position; /* by group: of its first turn; PST__NO_POSITION: it has none */
    uint32_t *latest;   /* by group: of the turn that has come last; PST__NO_POSITION: none yet */
} pst__backward;

#define PST__NO_POSITION UINT32_MAX

typedef struct pst__order {
    size_t group_count;
    size_t *bytes;        /* by group: gathered */
    pst__period *periods; /* by begin: since the last complete backward */
    size_t period_count, period_capacity;
    size_t *first_period; /* by group: its first one and its latest one, counted from 1; 0: none */
    size_t *last_period;
    uint64_t *first_uses; /* by group: since the last complete backward that reduced */
    pst__backward gathers;
    uint32_t *reduces;    /* groups by first use, descending */
    size_t *reduce_after; /* by position in `reduces`: gathers that come before it */
    size_t reduce_count;
} pst__order;

pst_status pst__order_alloc(const pst__heap *heap, pst__order *order, size_t group_count);
void pst__order_free(const pst__heap *heap, pst__order *order);
/* A use of the group begins; `is_open`: in the middle of another one. PST_ENOMEM. */
pst_status pst__order_begin_use(const pst__heap *heap, pst__order *order, uint32_t group,
                                uint64_t clock, int is_open);
/* A use of it ends. */
void pst__order_end_use(pst__order *order, uint32_t group, uint64_t clock);
void pst__order_forget_uses(pst__order *order);
/* Forwards that no backward comes for do not make it grow without an end: the oldest periods are
 * forgotten. Their groups are gathered when a use asks for them. */
void pst__order_bound_uses(pst__order *order);

pst_status pst__backward_alloc(const pst__heap *heap, pst__backward *backward, size_t group_count);
void pst__backward_free(const pst__heap *heap, pst__backward *backward, size_t group_count);
/* Makes the turns of a backward from the periods of groups that some rank needs. A period has no
 * turn of its own where the group is gathered at most `ahead` turns before, or right before.
 * PST_ENOMEM. */
pst_status pst__backward_build(const pst__heap *heap, pst__backward *backward,
                               const pst__period *periods, size_t period_count, size_t group_count,
                               const pst__need *need, uint32_t ahead);
/* How many turns come before the end of the backward of a period that ended at `clock`: those for
 * what was used until then, or longer. */
size_t pst__backward_before(const pst__backward *backward, uint64_t clock);
/* How many positions are gathered when position `position` is in use: itself, and then at most
 * `ahead` more, within `budget` bytes (0: no limit) of what is alive there. A group stays alive
 * until the step after its first use's backward, because its gradients end about then. */
size_t pst__backward_limit(const pst__backward *backward, const size_t *bytes, size_t position,
                           uint32_t ahead, size_t budget);

/* Sorts `groups` by descending key[group]; ties: the higher index first. */
void pst__sort_descending(uint32_t *groups, size_t count, const uint64_t *keys);

#endif
