/* What a pass costs: curves of its collectives over bytes, and compute by group. All of it comes
 * from words that the ranks have agreed on, by whole numbers, and so is the same on all of them. */
#ifndef PST_OPS_ZERO_COST_H
#define PST_OPS_ZERO_COST_H

#include "base/heap.h"

#include <penstock/zero.h>

typedef struct pst__curve_point {
    uint64_t bytes, ns;
    uint64_t count; /* of what was measured for it */
} pst__curve_point;

/* Piecewise linear between the sizes that were measured; below the smallest one as long as that,
 * above the largest one in proportion to it. */
typedef struct pst__curve {
    pst__curve_point *points;
    size_t count, capacity;
} pst__curve;

/* One that took so long; of 0 ns nothing is known. Then fit; then ask. PST_ENOMEM. */
pst_status pst__curve_add(const pst__heap *heap, pst__curve *curve, uint64_t bytes, uint64_t ns);
/* Equal sizes become their median, or the shortest of them; where something larger was faster than
 * what is smaller, both take their mean, by how often they were measured: a small one that has
 * waited once says little of many large ones. */
void pst__curve_fit(pst__curve *curve, int takes_shortest);
/* 0 where nothing was measured. */
uint64_t pst__curve_at(const pst__curve *curve, uint64_t bytes);
void pst__curve_free(const pst__heap *heap, pst__curve *curve);

/* What was measured, by group, in nanoseconds of a pass; 0: not known. */
typedef struct pst__measured {
    uint64_t gather;            /* its shortest one: others may have waited for a late rank */
    uint64_t reduce;            /* all of its gradients */
    uint64_t forward, backward; /* compute that came behind its operations */
    uint64_t hidden_forward, hidden_backward; /* gathers that ran beside compute: how many */
} pst__measured;

/* From a recording; operations of unknown groups are left out. `times` NULL: nothing is known. */
void pst__measure(const pst_zero_op *operations, const pst_zero_op_time *times, size_t count,
                  size_t group_count, pst__measured *measured);

typedef struct pst__costs {
    pst__curve gather, reduce;
    const pst__measured *measured; /* by group; the caller's */
    int is_local;                  /* gathers are copies within a device */
} pst__costs;

/* What a group that is looked up has gathered is no measure of others: see pst__plan_input. A copy
 * within a device has the multiprocessors and the memory that compute wants: compute loses what it
 * takes alone (0.4 ms of an 8B model's block on an H200, whatever runs beside), and as it is slow
 * beside compute the shortest one of a size counts. PST_ENOMEM. */
pst_status pst__costs_create(const pst__heap *heap, const pst__measured *measured,
                             size_t group_count, const size_t *gather_bytes,
                             const size_t *reduce_bytes, const unsigned char *is_looked_up,
                             int is_local, pst__costs *costs);
void pst__costs_free(const pst__heap *heap, pst__costs *costs);

/* a times b, and that by c, which is not 0. */
__extension__ typedef unsigned __int128 pst__wide;
static inline uint64_t pst__scale(uint64_t a, uint64_t b, uint64_t c) {
    return (uint64_t)((pst__wide)a * b / c);
}

#endif
