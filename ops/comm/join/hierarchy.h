/* The communicator `hierarchy`, its parts: `hierarchy.c` is its life and its table, and drives what
 * a collective consists of, `hierarchy_steps.c` says what that is. */
#ifndef PST_OPS_COMM_JOIN_HIERARCHY_H
#define PST_OPS_COMM_JOIN_HIERARCHY_H

#include "ops/comm/join/pair.h"

#include <penstock/hierarchy.h>

#define PST__HIERARCHY_PATH 64

typedef enum pst__hierarchy_side { PST__INNER = 0, PST__OUTER, PST__SIDES } pst__hierarchy_side;

/* One of the two communicators. */
typedef struct pst__hierarchy_part {
    pst_comm *comm;
    uint64_t tickets;
    uint64_t caller_read; /* the latest ticket that reads the caller's memory, in this collective */
    uint64_t relay_read[2]; /* the latest that reads this half of the relay buffer, ever */
} pst__hierarchy_part;

/* How often a collective goes round: `phases` steps, `rounds` times, each time with the next `each`
 * bytes (gathers) or elements (reductions) of a chunk. */
typedef struct pst__hierarchy_course {
    size_t rounds, phases, each;
} pst__hierarchy_course;

/* Segments and pieces of a step, rewritten by the next one. */
typedef struct pst__hierarchy_lists {
    pst_segment *segments;
    pst_reduce_piece *pieces;
    size_t segment_capacity, piece_capacity;
} pst__hierarchy_lists;

typedef struct pst__hierarchy {
    pst__pair pair; /* its first member */
    pst_device *device;
    char path[PST__HIERARCHY_PATH]; /* "ce+nccl" */
    pst__hierarchy_part parts[PST__SIDES];
    char *relay; /* two halves, used in turn */
    size_t half_bytes;
    pst__hierarchy_lists lists;

    ck_spinlock_t
        driving; /* held by who starts or tests; guards all up to here, and what follows */
    const pst_collective *collective; /* in flight; NULL: none */
    pst_collective step;              /* the part's */
    pst__hierarchy_part *stepping;    /* whose `request` is pending */
    pst_stream *stream;
    pst__hierarchy_course course;
    size_t round, phase;
    unsigned half; /* of the relay buffer, in this round */
    void *request;
} pst__hierarchy;

/* A step: a collective of one part, or (side PST__SIDES) a copy on this device. */
typedef struct pst__hierarchy_step {
    pst__hierarchy_side side;
    pst_collective collective; /* without name, ticket, staging */
    pst_copy copy;
    int begins_half; /* writes this round's half of the relay buffer from here on */
    int reads_relay; /* its source is there; else it is the caller's */
} pst__hierarchy_step;

pst__hierarchy_course pst__hierarchy_course_of(const pst__hierarchy *own,
                                               const pst_collective *collective);

/* Step `phase` of `round`; `relay` is this round's half. With lists NULL the step has its sizes,
 * but no segments and pieces. */
pst__hierarchy_step pst__hierarchy_step_of(const pst__hierarchy *own,
                                           const pst_collective *collective,
                                           const pst__hierarchy_course *course, size_t round,
                                           size_t phase, char *relay,
                                           const pst__hierarchy_lists *lists);

#endif
