/* How a plan is made of a recording; internal to the engine. */
#ifndef PST_OPS_ZERO_COMPILE_H
#define PST_OPS_ZERO_COMPILE_H

#include "ops/zero/engine.h"

/* What the ranks agree on: words of which all take the largest one, or, as complements, the
 * smallest. The first is the complement of keep_bytes, of which the smallest counts; behind it is
 * what was measured, by group: of compute the slowest rank counts, of a collective the one that
 * came last. */
typedef struct pst__knowledge {
    uint64_t *words;
    size_t count;
} pst__knowledge;

/* A collective of all ranks, where the plan is for passes with a backward. */
pst_status pst__knowledge_agree(pst_zero *engine, const pst_zero_compile_options *options,
                                pst__knowledge *known);
void pst__knowledge_free(const pst_zero *engine, pst__knowledge *known);

/* The same on all ranks: by what is known, and the options' operations and prefetch limits. */
pst_status pst__plan_by(pst_zero *engine, const pst_zero_compile_options *options,
                        const pst__knowledge *known, pst__plan **plan);

/* PST_EINVAL, PST_ESTATE: nothing can be compiled by what was given. */
pst_status pst__compile_options_read(pst_zero *engine, const pst_zero_compile_options *given,
                                     pst_zero_compile_options *options);

#endif
