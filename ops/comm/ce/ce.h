/* The communicator `ce`, its parts: `ce.c` is its life and its table, `pull.c` what is enqueued for
 * a collective, and its sums, `captured.c` how a graph ends. */
#ifndef PST_OPS_COMM_CE_CE_H
#define PST_OPS_COMM_CE_CE_H

#include "base/error.h"
#include "ops/comm/ce/board.h"
#include "ops/comm/ce/flags.h"
#include "ops/comm/ce/memory.h"
#include "ops/comm/failure.h"

#define PST__CE_TEXT        512
#define PST__CE_FLAG_REGION 1

typedef struct pst__ce {
    pst_comm comm;
    const pst__heap *heap;
    pst__error *error; /* of the runtime, for set-up calls */
    pst_device *device;
    char *name;
    int no_verify;
    uint32_t first_sequence;
    size_t turn_bytes;
    int sums_pass;

    pst__link link;
    pst__boards boards;
    pst__regions regions;
    pst__flags flags;
    pst__turns turns;
    void *own_flags;        /* this rank's, registered as the second region */
    char *bounce;           /* PST_CE_BOUNCE_BYTES, the first one */
    uint64_t bounce_ticket; /* of the last collective that went through it; 0: none */

    pst_stream *aside;      /* copies of this rank's own part, beside the pulls */
    pst_event *fork, *join; /* before and behind them */
    pst_event *ended;       /* behind all that `start` has enqueued */
    pst_copy *copies;       /* scratch of `start` */
    pst_cast *casts;        /* the same */
    size_t copy_capacity, cast_capacity;
    uint64_t tickets;  /* of the latest start; one thread writes, abort reads */
    uint64_t captured; /* of the latest start within a capture; 0: none in this one */
    uint64_t marked;   /* up to which `ended` has been recorded */

    pst__failure failure;
} pst__ce;

/* This rank has failed, for good: says so here and on the board, for the first reason only. Returns
 * the reason's status. Any thread. */
pst_status pst__ce_fail(pst__ce *ce, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The numbers of a collective's flags; see flags.h. Those of graphs count within the graph. */
static inline uint32_t pst__ce_sequence(const pst__ce *ce, uint64_t ticket, int phase) {
    return ce->flags.is_captured ? pst__flag_sequence(0, ticket & PST_MOST_CAPTURED, phase)
                                 : pst__flag_sequence(ce->first_sequence, ticket, phase);
}

/* Enqueues a whole collective; of a reduce-scatter only the pulls. */
pst_status pst__ce_pull(pst__ce *ce, const pst_collective *collective, pst_stream *stream);
/* The ticket is used, and nothing is read: signals that to the peers, behind what is on `stream`.
 */
pst_status pst__ce_pass(pst__ce *ce, const pst_collective *collective, pst_stream *stream);
size_t pst__ce_staging_bytes(const pst__ce *ce, const pst_collective *collective);

/* check.c: PST_EINVAL, with a text, for what cannot be started, and tickets that come out of turn.
 */
pst_status pst__ce_check(pst__ce *ce, const pst_collective *collective);
pst_status pst__ce_check_ticket(pst__ce *ce, uint64_t ticket, const char *name);
const char *pst__ce_name_of(const pst_collective *collective); /* "" without one */

/* captured.c: as pst_comm_ops has them. */
pst_status pst__ce_capture_begin(pst_comm *comm);
pst_status pst__ce_capture_end(pst_comm *comm, pst_stream *stream);

/* Marks the end of all that was enqueued; nothing within a capture, but behind a launch. */
pst_status pst__ce_mark_end(pst__ce *ce, pst_stream *stream);

/* The sums of a reduce-scatter, behind its pulls. */
pst_status pst__ce_combine(pst__ce *ce, const pst_collective *collective, pst_stream *stream);

#endif
