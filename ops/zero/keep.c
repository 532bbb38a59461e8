/* Which groups stay gathered from forward to backward: by the time that their gathers take a byte
 * of theirs, within keep_bytes. What the plan gathers ahead at the end of the forward stays anyway.
 * The choice follows from what the ranks have agreed on alone. */
#include "ops/zero/plan.h"

#include <stdlib.h>

/* Of a group that would be gathered again. */
typedef struct candidate {
    uint32_t group;
    size_t bytes;
    uint64_t saved; /* by keeping it: nanoseconds, or bytes where no gather was measured */
    size_t last;    /* counted from 1: the step of its last use; 0: it has none */
    size_t gathers; /* in the forward */
} candidate;

static void look_at_forward(const pst__plan *plan, candidate *candidates) {
    for (size_t i = 0; i < plan->step_count; i++)
        candidates[plan->steps[i].group].last = i + 1;
    for (size_t i = 0; i < plan->issue_count; i++)
        candidates[plan->issues[i].group].gathers++;
}

static pst_zero_keep without_payment(const pst__plan_input *input, const pst__plan *plan,
                                     uint32_t group, int is_used) {
    if (!is_used) return PST_ZERO_KEEP_UNUSED;
    if (pst__plan_is_looked_up(input, group)) return PST_ZERO_KEEP_ROWS;
    if (!input->window || input->bytes[group] == 0) return PST_ZERO_KEEP_ALL;
    if (!input->grad || input->need[group] == PST__NEED_NONE) return PST_ZERO_KEEP_NO_NEED;
    return plan->backward_offsets[group] == PST__ANYWHERE ? PST_ZERO_KEEP_NEAR
                                                          : PST_ZERO_KEEP_TOO_DEAR;
}

/* The first gather in the forward has to be, the others and that of the backward are saved. */
static void value(const pst__plan_input *input, uint32_t group, candidate *candidate) {
    candidate->group = group;
    candidate->bytes = input->bytes[group];
    const uint64_t ns = pst__curve_at(&input->costs->gather, candidate->bytes);
    candidate->saved = (ns == 0 ? candidate->bytes : ns) * candidate->gathers;
}

/* The one that saves more time a byte comes first; of equals the one that was used last, which
 * stays the shortest time. */
static int by_worth(const void *left, const void *right) {
    const candidate *a = left, *b = right;
    const pst__wide of_a = (pst__wide)a->saved * b->bytes, of_b = (pst__wide)b->saved * a->bytes;
    if (of_a != of_b) return of_a > of_b ? -1 : 1;
    return a->last > b->last ? -1 : a->last < b->last;
}

static void pay(const pst__plan_input *input, pst__plan *plan, candidate *candidates,
                size_t count) {
    pst_zero_forecast *forecast = &plan->forecast;
    qsort(candidates, count, sizeof *candidates, by_worth);
    for (size_t i = 0; i < count; i++) {
        if (candidates[i].bytes > input->keep_bytes - forecast->kept_bytes) continue;
        plan->group_forecasts[candidates[i].group].keep = PST_ZERO_KEEP_PAID;
        forecast->kept_bytes += candidates[i].bytes;
        forecast->kept_groups++;
    }
}

pst_status pst__keep_choose(const pst__plan_input *input, pst__plan *plan) {
    const size_t bytes = input->group_count * sizeof(candidate);
    candidate *candidates = pst__heap_alloc(input->heap, bytes);
    if (candidates == NULL) return PST_ENOMEM;
    look_at_forward(plan, candidates);
    size_t count = 0; /* of those in question, which move to the front */
    for (uint32_t i = 0; i < input->group_count; i++) {
        pst_zero_keep *keep = &plan->group_forecasts[i].keep;
        *keep = without_payment(input, plan, i, candidates[i].last > 0);
        if (*keep != PST_ZERO_KEEP_TOO_DEAR) continue;
        value(input, i, &candidates[i]);
        candidates[count++] = candidates[i];
    }
    pay(input, plan, candidates, count);
    pst__heap_free(input->heap, candidates, bytes);
    return PST_OK;
}
