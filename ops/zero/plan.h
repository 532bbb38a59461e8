/* A plan: what a pass of one kind will do, computed from a recording by simulating it. Nothing in
 * it depends on time or on a rank's local state. */
#ifndef PST_OPS_ZERO_PLAN_H
#define PST_OPS_ZERO_PLAN_H

#include "ops/zero/order.h"

#include <penstock/zero.h>

/* One use or release of the forward, in the recorded order. */
typedef struct pst__plan_step {
    uint32_t group;
    int is_use;
    int keep;           /* a release that leaves the group gathered: its next use is near */
    size_t first_issue; /* gathers that go out at this use: [first_issue, first_issue + issues) */
    size_t issues;
} pst__plan_step;

typedef struct pst__plan_issue {
    uint32_t group;
    size_t interval; /* whose offset it gets */
    size_t offset;   /* in the arena of gathered groups */
} pst__plan_issue;

#define PST__ANYWHERE SIZE_MAX

typedef struct pst__plan {
    pst__plan_step *steps;
    size_t step_count, step_capacity;
    pst__plan_issue *issues;
    size_t issue_count, issue_capacity;
    size_t *backward_offsets; /* by group: of its gather in the backward; PST__ANYWHERE: none */
    size_t group_count;
    uint32_t ahead; /* what it was made with; the backward goes by them too */
    size_t budget;
    pst_zero_plan summary;
} pst__plan;

/* What a plan is made from. */
typedef struct pst__plan_input {
    pst_runtime *runtime;
    const pst__heap *heap;
    const pst_zero_op *operations;
    size_t count;
    size_t group_count;
    const size_t *bytes;   /* by group */
    const pst__need *need; /* by group */
    int grad;              /* a backward follows */
    int window;            /* 0: everything stays gathered (stages 1 and 2) */
    uint32_t ahead;
    size_t budget;
} pst__plan_input;

/* PST_EINVAL when the operations are no pass (an unknown group, a release without a use). */
pst_status pst__plan_create(const pst__plan_input *input, pst__plan **plan);
void pst__plan_destroy(const pst__heap *heap, pst__plan *plan);

/* Is it a use or a release of the forward? */
static inline int pst__plan_is_step(const pst_zero_op *operation) {
    return !operation->backward && operation->kind != PST_ZERO_REDUCE;
}

/* By group, from the first use of a recorded forward to the end of the last one; the clock counts
 * from 1. */
pst_status pst__plan_spans(const pst_zero_op *operations, size_t count, size_t group_count,
                           pst__period *spans);

#endif
