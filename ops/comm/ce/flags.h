/* Flags of ranks, in memory that all can write: each rank waits for its own and writes its peers',
 * in stream order. A flag is a sequence number that grows, compared across the wrap. */
#ifndef PST_OPS_COMM_CE_FLAGS_H
#define PST_OPS_COMM_CE_FLAGS_H

#include <penstock/copy_engine.h>

/* A flag of each kind for each peer (or step of the turns), and each of them so many times over, by
 * sequence number: so a flag that an abort has raised is lowered again by a slow peer only for
 * those that this peer has reached, and not for those behind, up to so many tickets. A host is a
 * few steps ahead of a peer at most: of some hundred to a thousand tickets each. */
#define PST__FLAG_RING 4096u

typedef enum pst__flag_kind {
    PST__FLAG_READY = 0, /* by source: its memory of this collective may be read */
    PST__FLAG_DONE,      /* by reader: it has read this rank's memory of this collective */
    PST__FLAG_TURN,      /* by step: this rank may read */
    PST__FLAG_KINDS,
    /* In graphs alone, in place of turns, by peer: it has lowered its flags, and may be written. */
    PST__FLAG_LOWERED = PST__FLAG_TURN
} pst__flag_kind;

/* A graph writes the same numbers in each launch. So its flags are others, one of each kind for
 * each peer, whose numbers begin at 0 in each launch; its end lowers them (captured.c): to 0, or to
 * what an abort has put where that is copied from, so that later launches do not wait either. */

typedef struct pst__flags {
    pst_device *device;
    int rank, size;
    uint32_t *rows[PST_CE_MAX_RANKS]; /* by rank: its flags, as this device sees them */
    int is_captured;                  /* those of graphs are meant */
} pst__flags;

/* Sequence numbers: two a ticket, for the two phases of an all-reduce; others use the second. */
static inline uint32_t pst__flag_sequence(uint32_t first, uint64_t ticket, int phase) {
    return (first + (uint32_t)ticket) * 2u + (uint32_t)phase;
}

size_t pst__flags_bytes(int size); /* of one rank's flags */

/* Writes and waits that are enqueued together. */
typedef struct pst__flag_steps {
    size_t count;
    pst_flag_step steps[2 * PST_CE_MAX_RANKS];
} pst__flag_steps;

void pst__flag_write(const pst__flags *flags, pst__flag_steps *steps, int peer, pst__flag_kind kind,
                     int index, uint32_t sequence);
void pst__flag_wait(const pst__flags *flags, pst__flag_steps *steps, pst__flag_kind kind, int index,
                    uint32_t sequence);
/* On `stream`, in their order; then there are none. */
pst_status pst__flags_enqueue(const pst__flags *flags, pst_stream *stream, pst__flag_steps *steps);

/* Lowers the flags of these kinds in a graph, at the end of a launch. */
pst_status pst__flags_lower(const pst__flags *flags, pst_stream *stream, pst__flag_kind first,
                            pst__flag_kind last);

/* Sets all flags of this rank, past all streams, those of graphs to a number of their own. Any
 * thread; blocks until they are written. */
pst_status pst__flags_set(const pst__flags *flags, uint32_t sequence, uint32_t captured);

/* ---- turns ----------------------------------------------------------------------------------- */

/* The right to read a source, which goes from reader to reader, as two readers of one source halve
 * each other. In each round rank r reads the sources r+1, r+2, ... r+size-1 in that order; it reads
 * the j-th when rank r+1 has read the same source at its step j-1, and the first when rank r+2 has
 * read that at the last step of the round before. */
typedef struct pst__turns {
    const pst__flags *flags;
    uint32_t previous; /* the latest round's sequence number; at the beginning, the flags' */
} pst__turns;

/* The rank that `rank` reads at `step`, 0 to size - 2. */
static inline int pst__turn_source(int rank, int size, int step) {
    return (rank + 1 + step) % size;
}

/* Adds the wait for this rank's turn at `step` of the round `sequence`. */
void pst__turn_wait(const pst__turns *turns, pst__flag_steps *steps, uint32_t sequence, int step);
/* Adds the handing on of the turn; after the last step the round has ended. All ranks take all
 * steps of all rounds, in one order, and on one stream. */
void pst__turn_pass(pst__turns *turns, pst__flag_steps *steps, uint32_t sequence, int step);

#endif
