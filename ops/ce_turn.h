/* Turns: the right to read a source, which goes from reader to reader, as two readers of one source
 * halve each other. In each round rank r reads the sources r+1, r+2, ... r+size-1 in that order; it
 * reads the j-th when rank r+1 has read the same source at its step j-1, and the first when rank
 * r+2 has read that at the last step of the round before. */
#ifndef PST_OPS_CE_TURN_H
#define PST_OPS_CE_TURN_H

#include "ops/ce_flags.h"

typedef struct pst__turns {
    const pst__flags *flags;
    uint32_t previous; /* the sequence number of the latest round */
} pst__turns;

/* The first round comes after the sequence number `first`, which all flags have at the beginning.
 */
static inline pst__turns pst__turns_begin(const pst__flags *flags, uint32_t first) {
    return (pst__turns){flags, first};
}

/* The rank that `rank` reads at `step`, 0 to size - 2. */
static inline int pst__turn_source(int rank, int size, int step) {
    return (rank + 1 + step) % size;
}

/* `stream` waits for this rank's turn at `step` of the round `sequence`. */
pst_status pst__turn_wait(const pst__turns *turns, pst_stream *stream, uint32_t sequence, int step);
/* ... and hands it on; after the last step the round is over. All ranks take all steps of all
 * rounds, in one order, and on one stream. */
pst_status pst__turn_pass(pst__turns *turns, pst_stream *stream, uint32_t sequence, int step);

#endif
