/* A plan: what a pass of one kind will do, computed from a recording by simulating it. Nothing in
 * it depends on a rank's own clock or state: times are those that the ranks have agreed on. */
#ifndef PST_OPS_ZERO_PLAN_H
#define PST_OPS_ZERO_PLAN_H

#include "ops/zero/cost.h"
#include "ops/zero/order.h"

#include <penstock/zero.h>

/* One use or release of the forward, in the recorded order. */
typedef struct pst__plan_step {
    uint32_t group;
    int is_use;
    int keep;           /* a release that leaves the group gathered: its next use is near */
    size_t first_issue; /* gathers that go out at this use: [first_issue, first_issue + issues) */
    size_t issues;
    uint32_t refused; /* and the group that would be the next of them had the budget room for it, or
                         PST__NO_GROUP */
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
    pst_zero_forecast forecast;
    pst_zero_group_forecast *group_forecasts; /* by group */
} pst__plan;

/* What a plan is made from. */
typedef struct pst__plan_input {
    pst_runtime *runtime;
    const pst__heap *heap;
    const pst_zero_op *operations;
    size_t count;
    size_t group_count;
    const size_t *bytes;               /* by group: gathered */
    const size_t *reduce_bytes;        /* by group */
    const pst__need *need;             /* by group */
    const unsigned char *is_looked_up; /* by group: gathered at its uses alone; NULL: none is */
    int grad;                          /* a backward follows */
    int window;                        /* 0: everything stays gathered (stages 1 and 2) */
    uint32_t ahead;
    size_t budget;
    size_t keep_bytes;
    const pst__costs *costs;
} pst__plan_input;

/* PST_EINVAL when the operations are no pass (an unknown group, a release without a use). */
pst_status pst__plan_create(const pst__plan_input *input, pst__plan **plan);
void pst__plan_destroy(const pst__heap *heap, pst__plan *plan);

/* keep.c: which groups are to stay gathered from forward to backward, and what becomes of each, by
 * a plan that keeps none beside those that are near. PST_ENOMEM. */
pst_status pst__keep_choose(const pst__plan_input *input, pst__plan *plan);

/* forecast.c: fills in the forecasts, by the order of the backward. PST_ENOMEM. */
pst_status pst__forecast(const pst__plan_input *input, const pst__backward *backward,
                         pst__plan *plan);

static inline int pst__plan_is_looked_up(const pst__plan_input *input, size_t group) {
    return input->is_looked_up != NULL && input->is_looked_up[group];
}

/* Is it a use or a release of the forward? */
static inline int pst__plan_is_step(const pst_zero_op *operation) {
    return !operation->backward && operation->kind != PST_ZERO_REDUCE;
}

/* By group, from the first use of a recorded forward to the end of the last one; the clock counts
 * from 1. */
pst_status pst__plan_spans(const pst_zero_op *operations, size_t count, size_t group_count,
                           pst__period *spans);

#endif
