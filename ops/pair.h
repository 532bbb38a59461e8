/* Two communicators that act as one: `hierarchy`, `crossover`. What they have in common: when one
 * part fails, the other is aborted, so that the ranks which share only that one learn it, too; and
 * the reason that is told names the part. */
#ifndef PST_OPS_PAIR_H
#define PST_OPS_PAIR_H

#include "base/error.h"
#include "base/heap.h"

#include <penstock/comm.h>

#define PST__PAIR_TEXT 512

typedef struct pst__pair {
    pst_comm *parts[2];
    const char *const *roles; /* of the parts: "inner", "outer" */
    char *name;
    int rank;
    pst__error *error;  /* of the runtime */
    ck_spinlock_t lock; /* of the texts and of becoming failed */
    int failure;        /* pst_status; written once */
    char text[PST__PAIR_TEXT], told[PST__PAIR_TEXT];
} pst__pair;

/* Fills in a zeroed pair; `name` is copied, `roles` stays. PST_ENOMEM. */
pst_status pst__pair_init(pst__pair *pair, const pst__heap *heap, pst__error *error,
                          const char *name, int rank, pst_comm *first, pst_comm *second,
                          const char *const *roles);
/* Does not destroy the parts. */
void pst__pair_clear(pst__pair *pair, const pst__heap *heap);
void pst__pair_destroy_parts(const pst__pair *pair);

/* Those below may be called by any thread. */
pst_status pst__pair_failure(const pst__pair *pair);
/* Fails for good; the first reason counts. Returns its status. */
pst_status pst__pair_fail(pst__pair *pair, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Because part 0 or 1 has failed, which has the text. */
pst_status pst__pair_fail_part(pst__pair *pair, int side, pst_status status);
/* Asks the parts, too. */
pst_status pst__pair_status(pst__pair *pair);
const char *pst__pair_text(pst__pair *pair);
/* PST_EBUSY when that is what a part returns. */
pst_status pst__pair_abort(pst__pair *pair, pst_status status);

/* To the peers of both parts. A failure here is one of this call alone, and its text the runtime's.
 */
pst_status pst__pair_open_memory(const pst__pair *pair, void *memory, size_t bytes);

#endif
