/* The communicator `ce`, its parts: `ce.c` is its life and its table, `ce_pull.c` what is enqueued
 * for a collective, `ce_pieces.c` a reduce-scatter in pieces, `ce_sum.c` the sums. */
#ifndef PST_OPS_CE_H
#define PST_OPS_CE_H

#include "base/error.h"
#include "ops/ce_board.h"
#include "ops/ce_memory.h"
#include "ops/ce_turn.h"

#define PST__CE_TEXT        512
#define PST__CE_FLAG_REGION 1

/* Of reduce-scatters in pieces. */
enum {
    PST__CE_PIECES_IN_FLIGHT = 2, /* one is summed while the next one is pulled */
    PST__CE_SUMS_KNOWN = 16       /* collectives that combine can still wait for */
};

typedef struct pst__ce_sums {
    uint64_t ticket;
    pst_event *end;
} pst__ce_sums;

typedef struct pst__ce_pieces {
    ck_spinlock_t lock; /* of `sums`; not the communicator's, which an abort takes from within calls
                           of the device that are made under this one */
    size_t bytes;       /* a piece has from a peer; 0: none of what follows is there */
    pst_stream *adding; /* the sums, behind what has arrived */
    pst_event *arrived[PST__CE_PIECES_IN_FLIGHT], *added[PST__CE_PIECES_IN_FLIGHT];
    pst_event *pulled; /* by all collectives so far */
    pst__ce_sums sums[PST__CE_SUMS_KNOWN];
    uint64_t count; /* of collectives in pieces */
} pst__ce_pieces;

typedef struct pst__ce {
    pst_comm comm;
    const pst__heap *heap;
    pst__error *error; /* of the runtime, for set-up calls */
    pst_device *device;
    char *name;
    int no_verify;
    uint32_t first_sequence;
    size_t turn_bytes;
    int one_by_one;
    unsigned sum_blocks;
    int sums_pass;
    pst__ce_pieces pieces;

    pst__link link;
    pst__boards boards;
    pst__regions regions;
    pst__flags flags;
    pst__turns turns;
    pst_memory_kind flag_memory;
    void *own_flags;        /* this rank's, registered as the second region */
    char *bounce;           /* PST_CE_BOUNCE_BYTES, the first one */
    uint64_t bounce_ticket; /* of the last collective that went through it; 0: none */

    pst_stream *aside;      /* copies of this rank's own part, beside the pulls */
    pst_event *fork, *join; /* before and behind them */
    pst_event *ended;       /* behind all that `start` has enqueued */
    pst_copy *copies;       /* scratch of `start` */
    pst_cast *casts;        /* the same */
    size_t copy_capacity, cast_capacity;
    uint64_t tickets; /* of the latest start; one thread writes, abort reads */
    uint64_t marked;  /* up to which `ended` has been recorded */

    ck_spinlock_t lock; /* of the texts and of becoming failed */
    int failure;        /* pst_status; written once */
    char text[PST__CE_TEXT], told[PST__CE_TEXT];
} pst__ce;

/* This rank has failed, for good: says so here and on the board, for the first reason only. Returns
 * the reason's status. Any thread. */
pst_status pst__ce_fail(pst__ce *ce, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Enqueues a whole collective; of a reduce-scatter only the pulls. */
pst_status pst__ce_pull(pst__ce *ce, const pst_collective *collective, pst_stream *stream);
/* The ticket is used, and nothing is read: tells the peers so, behind what is on `stream`. */
pst_status pst__ce_pass(pst__ce *ce, const pst_collective *collective, pst_stream *stream);
size_t pst__ce_staging_bytes(const pst__ce *ce, const pst_collective *collective);

/* Where in staging the others' chunks lie, `slot` bytes each. */
static inline char *pst__ce_staged(const pst__ce *ce, void *staging, size_t slot, int peer) {
    const int index = peer < ce->comm.rank ? peer : peer - 1;
    return (char *)staging + (size_t)index * slot;
}

static inline size_t pst__ce_slot(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

/* This rank's chunk of an all-reduce's elements. */
typedef struct pst__ce_chunk {
    size_t offset, bytes; /* in bytes of the whole */
} pst__ce_chunk;
pst__ce_chunk pst__ce_chunk_of(const pst__ce *ce, const pst_collective *collective, int rank);

/* What of this rank's chunk the pieces of a reduce-scatter need. */
pst__ce_chunk pst__ce_span(const pst_collective *collective);

/* The sums behind the pulls: of a reduce-scatter, and of an all-reduce at `whole`. */
pst_status pst__ce_combine(pst__ce *ce, const pst_collective *collective, pst_stream *stream);
pst_status pst__ce_sum_chunk(pst__ce *ce, const pst_collective *collective, char *whole,
                             pst_stream *stream);

/* Bytes `begin` to `end` of this rank's chunk of a reduce-scatter, which the others' parts have
 * been staged of, `slot` bytes from each. */
typedef struct pst__ce_part {
    size_t begin, end;
    void *staging;
    size_t slot;
} pst__ce_part;
pst_status pst__ce_sum_part(pst__ce *ce, const pst_collective *collective, const pst__ce_part *part,
                            pst_stream *stream);

/* ---- ce_pieces.c ----------------------------------------------------------------------------- */

pst_status pst__ce_pieces_open(pst__ce *ce);
void pst__ce_pieces_close(const pst__ce *ce); /* after a failed open, too */
int pst__ce_is_pieced(const pst__ce *ce, const pst_collective *collective);
size_t pst__ce_pieces_staging(const pst__ce *ce);

/* Enqueues pulls and sums, where all sources are ready. */
pst_status pst__ce_pull_pieces(pst__ce *ce, const pst_collective *collective,
                               const pst__place *place, pst_stream *stream);
/* Makes `stream` wait for that collective's sums. Any thread. */
pst_status pst__ce_wait_for_sums(pst__ce *ce, const pst_collective *collective, pst_stream *stream);
/* `last` is the stream that comes to its end when all has ended that was enqueued: on `stream`, and
 * the sums. */
pst_status pst__ce_pieces_join(pst__ce *ce, pst_stream *stream, pst_stream **last);

#endif
