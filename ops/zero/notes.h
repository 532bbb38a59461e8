/* When compute got to each operation of a recorded pass, how long it waited there, and how long the
 * collectives took that belong to them. */
#ifndef PST_OPS_ZERO_NOTES_H
#define PST_OPS_ZERO_NOTES_H

#include "ops/transfer/timings.h"

#include <penstock/zero.h>

/* A part of a collective, which belongs to an operation of the recording. */
typedef struct pst__share {
    size_t operation;
    pst__timing *timing;
    size_t bytes;
} pst__share;

typedef struct pst__notes {
    int is_on;       /* this pass is timed */
    int is_complete; /* and has ended: what is left of it can be read */
    pst__timings timings;
    pst__timing **reached; /* by operation: from compute's coming to what it waits for there */
    size_t count, capacity;
    pst__share *shares;
    size_t share_count, share_capacity;
    pst_zero_op_time *times; /* of the complete pass, as far as they are read */
    size_t time_count, time_capacity;
} pst__notes;

/* A pass begins; what was noted of the one before is forgotten. */
void pst__notes_begin(pst__notes *notes, int is_on);
/* Operations from `count` on are forgotten. */
void pst__notes_cut(pst__notes *notes, size_t count);
/* Compute gets to the next operation: now, or when it was noted. NULL: not timed. */
pst__timing *pst__notes_reach(pst__notes *notes, pst__timing *noted, pst_stream *compute);
/* A collective, or a part of it, that belongs to the next operation; NULL: none that is timed. */
void pst__notes_share(pst__notes *notes, pst__timing *timing, size_t bytes);
/* A pass of `count` operations is complete. */
void pst__notes_complete(pst__notes *notes, size_t count);
/* Reads of a complete pass what the device has passed; until the next one begins. Time in which
 * several collectives run is charged to each in equal parts, as they share the link. */
void pst__notes_read(pst__notes *notes);
void pst__notes_free(pst__notes *notes);

#endif
