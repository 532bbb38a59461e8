/* Which groups stay gathered from forward to backward: by the time that their gathers take a byte
 * of theirs, within keep_bytes. What the plan gathers ahead at the end of the forward stays anyway.
 * The choice follows from what the ranks have agreed on alone. */
#include "ops/zero/plan.h"

/* Of a group that would be gathered again. */
typedef struct candidate {
    uint64_t saved; /* by keeping it: nanoseconds, or bytes where no gather was measured */
    size_t last;    /* counted from 1: the step of its last use; 0: it has none */
    size_t gathers; /* in the forward */
    int is_open;    /* not decided on yet */
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
    if (!input->window || input->bytes[group] == 0) return PST_ZERO_KEEP_ALL;
    if (!input->grad || input->need[group] == PST__NEED_NONE) return PST_ZERO_KEEP_NO_NEED;
    return plan->backward_offsets[group] == PST__ANYWHERE ? PST_ZERO_KEEP_NEAR
                                                          : PST_ZERO_KEEP_TOO_DEAR;
}

/* The first gather in the forward has to be, the others and that of the backward are saved. */
static void value(const pst__plan_input *input, uint32_t group, candidate *candidate) {
    const uint64_t ns = pst__curve_at(&input->costs->gather, input->bytes[group]);
    candidate->saved = (ns == 0 ? input->bytes[group] : ns) * candidate->gathers;
    candidate->is_open = 1;
}

/* Saves `a` more time a byte? Of equals the one that was used last stays the shortest time. */
static int is_better(const pst__plan_input *input, const candidate *candidates, uint32_t a,
                     uint32_t b) {
    const pst__wide left = (pst__wide)candidates[a].saved * input->bytes[b];
    const pst__wide right = (pst__wide)candidates[b].saved * input->bytes[a];
    return left > right || (left == right && candidates[a].last > candidates[b].last);
}

#define NONE UINT32_MAX

static uint32_t best_of(const pst__plan_input *input, const candidate *candidates) {
    uint32_t best = NONE;
    for (uint32_t i = 0; i < input->group_count; i++)
        if (candidates[i].is_open && (best == NONE || is_better(input, candidates, i, best)))
            best = i;
    return best;
}

static void pay(const pst__plan_input *input, pst__plan *plan, candidate *candidates) {
    pst_zero_forecast *forecast = &plan->forecast;
    uint32_t group;
    while ((group = best_of(input, candidates)) != NONE) {
        candidates[group].is_open = 0;
        if (input->bytes[group] > input->keep_bytes - forecast->kept_bytes) continue;
        plan->group_forecasts[group].keep = PST_ZERO_KEEP_PAID;
        forecast->kept_bytes += input->bytes[group];
        forecast->kept_groups++;
    }
}

pst_status pst__keep_choose(const pst__plan_input *input, pst__plan *plan) {
    const size_t bytes = input->group_count * sizeof(candidate);
    candidate *candidates = pst__heap_alloc(input->heap, bytes);
    if (candidates == NULL) return PST_ENOMEM;
    look_at_forward(plan, candidates);
    for (uint32_t i = 0; i < input->group_count; i++) {
        pst_zero_keep *keep = &plan->group_forecasts[i].keep;
        *keep = without_payment(input, plan, i, candidates[i].last > 0);
        if (*keep == PST_ZERO_KEEP_TOO_DEAR) value(input, i, &candidates[i]);
    }
    pay(input, plan, candidates);
    pst__heap_free(input->heap, candidates, bytes);
    return PST_OK;
}
