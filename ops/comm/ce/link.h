/* How ranks of one machine talk while memory is set up: a Unix socket between each two, over which
 * file descriptors go. The sockets stay open, so that a rank whose process has ended is noticed. */
#ifndef PST_OPS_COMM_CE_LINK_H
#define PST_OPS_COMM_CE_LINK_H

#include "ops/comm/exchange.h"

#include <penstock/copy_engine.h>

typedef struct pst__link {
    int rank, size;
    int sockets[PST_CE_MAX_RANKS]; /* by rank; -1: none, and to oneself */
} pst__link;

/* Connects all ranks; a descriptor that waits longer than `deadline_ns` (0: no limit) is an error.
 * It succeeds on all ranks or fails on all. PST_EPEER, PST_ESYSTEM, and what the exchange returns,
 * with a text. After an error nothing is left to close. Blocks. */
pst_status pst__link_open(const pst__meeting_place *place, uint64_t deadline_ns, pst__link *link);
void pst__link_close(pst__link *link);

/* What one rank says to all. */
typedef struct pst__message {
    pst_status status; /* of what it did before */
    uint32_t index;
    uint64_t bytes;
} pst__message;

/* Each rank gives `mine` and, unless it is -1, a descriptor, and gets everybody's (its own message
 * too; descriptors[rank] = -1, and -1 where none came, or this process has no descriptor left),
 * by rank. The caller closes the descriptors it gets. PST_EPEER with the rank that has gone in
 * *culprit, PST_ETIMEDOUT with the one that kept silent: then no descriptors are left. Blocks. */
pst_status pst__link_swap(const pst__link *link, const pst__message *mine, int descriptor,
                          pst__message *messages, int *descriptors, int *culprit);

/* A swap that waits for this rank ends, here and on the peers: this rank has gone. Any
 * thread, does not block. */
void pst__link_shut(const pst__link *link);

/* By bit: the ranks whose end of the socket is closed. Any thread, does not block. */
uint32_t pst__link_closed(const pst__link *link);

#endif
