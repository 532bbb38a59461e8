/* What set-up calls do with an exchange. `what` names the thing that is being set up, for error
 * texts. Each call blocks until all ranks are in it, and all ranks make the same calls in the same
 * order: a rank that has failed goes on to the next pst__exchange_settle, which lets the others
 * know.
 */
#ifndef PST_OPS_COMM_EXCHANGE_H
#define PST_OPS_COMM_EXCHANGE_H

#include "base/error.h"
#include "base/heap.h"

#include <penstock/exchange.h>

typedef struct pst__meeting_place {
    const pst_exchange *exchange;
    const pst__heap *heap;
    pst__error *error;
    const char *what;
} pst__meeting_place;

/* Makes the place where the ranks meet. PST_EINVAL with a text if the exchange cannot be used. Does
 * not talk to anybody. `what` has to outlive the place. */
pst_status pst__exchange_begin(pst_runtime *runtime, const pst_exchange *exchange, const char *what,
                               pst__meeting_place *place);

/* `bytes` of every rank into `all`, by rank; what the exchange returns, with a text. */
pst_status pst__exchange_all_gather(const pst__meeting_place *place, const void *mine, size_t bytes,
                                    void *all);

/* Rank `root`'s bytes end up in `memory` on all ranks. */
pst_status pst__exchange_broadcast(const pst__meeting_place *place, int root, void *memory,
                                   size_t bytes);

/* How all ranks fared: PST_OK if all give PST_OK; the own error if this rank gives one; else the
 * error of the first rank that has one, with a text that names it. */
pst_status pst__exchange_settle(const pst__meeting_place *place, pst_status own);

/* PST_EMISMATCH, with a text that names the first rank that differs from rank 0, unless `value` is
 * the same everywhere; `name` says what it is ("options", "number of segments"). */
pst_status pst__exchange_agree(const pst__meeting_place *place, const char *name, uint64_t value);

#endif
