/* Two communicators that act as one: `hierarchy`, `crossover`. What they have in common: when one
 * part fails, the other is aborted, so that the ranks which share only that one learn it, too; and
 * the reason names the part. */
#ifndef PST_OPS_COMM_JOIN_PAIR_H
#define PST_OPS_COMM_JOIN_PAIR_H

#include "ops/comm/exchange.h"
#include "ops/comm/failure.h"

#include <penstock/comm.h>

/* The first member of a communicator's struct: `comm.context` is both. */
typedef struct pst__pair {
    pst_comm comm;
    pst_comm_ops ops; /* those that the parts have */
    pst_comm *parts[2];
    const char *const *roles; /* of the parts: "inner", "outer" */
    char *name;
    const pst__heap *heap;
    pst__error *error; /* of the runtime */
    pst__failure failure;
} pst__pair;

/* Fills in a zeroed pair; the place's name is copied, `roles` stays. Of the table `ops` it fills in
 * kinds, status, error_text, open_memory where a part has it, and abort where there is none.
 * PST_ENOMEM. */
pst_status pst__pair_init(pst__pair *pair, const pst__meeting_place *place, const pst_comm_ops *ops,
                          pst_comm *first, pst_comm *second, const char *const *roles);
void pst__pair_destroy_parts(const pst__pair *pair);

/* Those below may be called by any thread. */
static inline pst_status pst__pair_failure(const pst__pair *pair) {
    return pst__failure_status(&pair->failure);
}
/* Fails for good; the first reason counts. Returns its status. */
pst_status pst__pair_fail(pst__pair *pair, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Because part 0 or 1 has failed, which has the text. */
pst_status pst__pair_fail_part(pst__pair *pair, int side, pst_status status);
/* PST_EBUSY when that is what a part returns. */
pst_status pst__pair_abort(pst__pair *pair, pst_status status);

/* To the peers of both parts. A failure is of this call alone, and its text the runtime's. */
pst_status pst__pair_open_memory(const pst__pair *pair, void *memory, size_t bytes);

#endif
