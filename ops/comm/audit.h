/* Ranks compare what they have started on a communicator that cannot do so itself, over one of the
 * host and beside it: nothing on the device waits for it. In rounds all ranks say how many
 * collectives they have started and what the first so many of them were, as a hash; where hashes
 * differ further rounds find the first collective that does. */
#ifndef PST_OPS_COMM_AUDIT_H
#define PST_OPS_COMM_AUDIT_H

#include "base/heap.h"

#include <penstock/comm.h>

typedef struct pst__audit pst__audit;

/* `host` has the same ranks, lives as long as the audit, and nobody else uses it meanwhile. NULL:
 * no memory. */
pst__audit *pst__audit_open(const pst__heap *heap, pst_comm *host);

/* This rank is about to start it. One thread at a time, in the order of starting. */
void pst__audit_note(pst__audit *audit, const pst_collective *collective);

/* Carries on with the rounds. PST_EMISMATCH with what two ranks have started in `text`: once, on
 * all ranks that go on looking. PST_ECANCELED with the reason, once, when `host` has failed: there
 * are no more rounds. Any thread; does not block, and does nothing beside another thread's look. */
pst_status pst__audit_look(pst__audit *audit, char *text, size_t size);

/* 1 when all that this rank has started has been compared, or never will be. */
int pst__audit_is_done(pst__audit *audit);

/* NULL is fine. What `host` may still write to stays behind. */
void pst__audit_close(pst__audit *audit);

#endif
