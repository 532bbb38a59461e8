#include "ops/zero/plan.h"

#include "base/hash.h"

#include "mem/arena.h"

#include <string.h>

/* The simulated pass. Time counts steps of the forward, then positions of the backward order. */
typedef struct simulation {
    const pst__plan_input *input;
    pst__plan *plan;
    pst__period *spans; /* by group: from its first use to the end of its last one */
    pst__backward backward;
    uint32_t *uses;            /* by group: open ones */
    size_t *open;              /* by group: its interval while it is gathered, or NOT_GATHERED */
    size_t *backward_interval; /* by group: of its gather in the backward */
    uint64_t *seen;            /* by group: the last window that has looked at it */
    uint64_t windows;
    uint32_t *window; /* groups that are to be gathered now, nearest use first */
    size_t window_count;
    uint32_t refused; /* the next one, where it is the budget that ends the window */
    size_t bytes_in_use;
    pst_interval *intervals;
    size_t interval_count, interval_capacity;
} simulation;

#define NOT_GATHERED SIZE_MAX

/* ---- memory of a simulation ------------------------------------------------------------------ */

static void simulation_free(simulation *sim) {
    const pst__heap *heap = sim->input->heap;
    size_t count = sim->input->group_count;
    pst__heap_free(heap, sim->spans, count * sizeof *sim->spans);
    pst__heap_free(heap, sim->uses, count * sizeof *sim->uses);
    pst__heap_free(heap, sim->open, count * sizeof *sim->open);
    pst__heap_free(heap, sim->backward_interval, count * sizeof *sim->backward_interval);
    pst__heap_free(heap, sim->seen, count * sizeof *sim->seen);
    pst__heap_free(heap, sim->window, count * sizeof *sim->window);
    pst__heap_free(heap, sim->intervals, sim->interval_capacity * sizeof *sim->intervals);
    pst__backward_free(heap, &sim->backward, count);
}

static pst_status simulation_alloc(simulation *sim) {
    const pst__heap *heap = sim->input->heap;
    size_t count = sim->input->group_count;
    sim->spans = pst__heap_alloc(heap, count * sizeof *sim->spans);
    sim->uses = pst__heap_alloc(heap, count * sizeof *sim->uses);
    sim->open = pst__heap_alloc(heap, count * sizeof *sim->open);
    sim->backward_interval = pst__heap_alloc(heap, count * sizeof *sim->backward_interval);
    sim->seen = pst__heap_alloc(heap, count * sizeof *sim->seen);
    sim->window = pst__heap_alloc(heap, count * sizeof *sim->window);
    if (sim->spans == NULL || sim->uses == NULL || sim->open == NULL ||
        sim->backward_interval == NULL || sim->seen == NULL || sim->window == NULL)
        return PST_ENOMEM;
    for (size_t i = 0; i < count; i++)
        sim->open[i] = sim->backward_interval[i] = NOT_GATHERED;
    return pst__backward_alloc(heap, &sim->backward, count);
}

/* ---- gathering and dropping in the simulation ------------------------------------------------ */

static pst_status open_interval(simulation *sim, uint32_t group, uint64_t now) {
    pst_status status =
        pst__heap_grow(sim->input->heap, (void **)&sim->intervals, &sim->interval_capacity,
                       sim->interval_count + 1, sizeof *sim->intervals);
    if (status != PST_OK) return status;
    sim->open[group] = sim->interval_count;
    sim->intervals[sim->interval_count++] =
        (pst_interval){.first = now, .last = now, .bytes = sim->input->bytes[group]};
    return PST_OK;
}

static void close_interval(simulation *sim, uint32_t group, uint64_t now) {
    sim->intervals[sim->open[group]].last = now;
    sim->open[group] = NOT_GATHERED;
}

static pst_status issue(simulation *sim, pst__plan_step *step, uint32_t group, uint64_t now) {
    pst__plan *plan = sim->plan;
    if (sim->open[group] != NOT_GATHERED) return PST_OK;
    pst_status status = open_interval(sim, group, now);
    if (status != PST_OK) return status;
    status = pst__heap_grow(sim->input->heap, (void **)&plan->issues, &plan->issue_capacity,
                            plan->issue_count + 1, sizeof *plan->issues);
    if (status != PST_OK) return status;
    plan->issues[plan->issue_count++] =
        (pst__plan_issue){.group = group, .interval = sim->open[group]};
    step->issues++;
    return PST_OK;
}

/* ---- the window: the next groups that fit ---------------------------------------------------- */

/* 0 when the window is full. */
static int look_at(simulation *sim, uint32_t group, size_t limit, size_t *alive) {
    const pst__plan_input *input = sim->input;
    if (sim->uses[group] > 0 || sim->seen[group] == sim->windows) return 1;
    if (sim->window_count == limit) return 0;
    size_t more = input->bytes[group];
    if (input->budget != 0 && (*alive > input->budget || more > input->budget - *alive)) {
        sim->refused = group;
        return 0;
    }
    *alive += more;
    sim->seen[group] = sim->windows;
    sim->window[sim->window_count++] = group;
    return 1;
}

/* Nothing goes ahead of a use that names what it reads, nor that itself. */
static int look_at_use(simulation *sim, uint32_t group, size_t limit, size_t *alive) {
    if (pst__plan_is_looked_up(sim->input, group)) return sim->uses[group] > 0;
    return look_at(sim, group, limit, alive);
}

/* At a release the group of the next use counts as one more: it will be in use before anything is
 * gathered again, and what would be gathered then need not be dropped now. */
static void build_window(simulation *sim, size_t step) {
    size_t alive = sim->bytes_in_use;
    size_t limit = (size_t)sim->input->ahead + !sim->plan->steps[step].is_use;
    int room = 1;
    sim->windows++;
    sim->window_count = 0;
    sim->refused = PST__NO_GROUP;
    for (size_t i = step + 1; room && i < sim->plan->step_count; i++)
        if (sim->plan->steps[i].is_use)
            room = look_at_use(sim, sim->plan->steps[i].group, limit, &alive);
    for (size_t i = 0; room && i < sim->backward.count; i++)
        if (!pst__plan_is_looked_up(sim->input, sim->backward.turns[i].group))
            room = look_at(sim, sim->backward.turns[i].group, limit, &alive);
}

/* ---- forward --------------------------------------------------------------------------------- */

static pst_status simulate_use(simulation *sim, size_t index) {
    pst__plan_step *step = &sim->plan->steps[index];
    step->first_issue = sim->plan->issue_count;
    if (sim->uses[step->group]++ == 0) sim->bytes_in_use += sim->input->bytes[step->group];
    pst_status status = issue(sim, step, step->group, index);
    build_window(sim, index);
    for (size_t i = 0; status == PST_OK && i < sim->window_count; i++)
        status = issue(sim, step, sim->window[i], index);
    step->refused = sim->refused;
    return status;
}

static void simulate_release(simulation *sim, size_t index) {
    pst__plan_step *step = &sim->plan->steps[index];
    if (--sim->uses[step->group] > 0) return;
    sim->bytes_in_use -= sim->input->bytes[step->group];
    build_window(sim, index);
    step->keep = sim->seen[step->group] == sim->windows ||
                 sim->plan->group_forecasts[step->group].keep == PST_ZERO_KEEP_PAID;
    if (!step->keep) close_interval(sim, step->group, index);
}

static pst_status simulate_forward(simulation *sim) {
    for (size_t i = 0; i < sim->plan->step_count; i++) {
        pst_status status = PST_OK;
        if (sim->plan->steps[i].is_use)
            status = simulate_use(sim, i);
        else
            simulate_release(sim, i);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

static pst_status simulate_backward(simulation *sim) {
    const pst__plan_input *input = sim->input;
    uint64_t start = sim->plan->step_count;
    size_t issued = 0;
    for (size_t i = 0; i < sim->backward.count; i++) {
        size_t limit =
            pst__backward_limit(&sim->backward, input->bytes, i, input->ahead, input->budget);
        for (; issued < limit; issued++) {
            uint32_t group = sim->backward.turns[issued].group;
            if (sim->open[group] != NOT_GATHERED) continue;
            pst_status status = open_interval(sim, group, start + i);
            if (status != PST_OK) return status;
            sim->backward_interval[group] = sim->open[group];
        }
    }
    for (size_t i = 0; i < sim->backward.count; i++)
        close_interval(sim, sim->backward.turns[i].group, start + sim->backward.turns[i].finished);
    return PST_OK;
}

/* Uses that the recording leaves open last to the end. */
static void close_all(simulation *sim) {
    for (uint32_t i = 0; i < sim->input->group_count; i++)
        if (sim->open[i] != NOT_GATHERED)
            close_interval(sim, i, sim->plan->step_count + sim->backward.count + 1);
}

static size_t alive_at(const simulation *sim, uint64_t now) {
    size_t alive = 0;
    for (size_t i = 0; i < sim->interval_count; i++)
        if (sim->intervals[i].first <= now && now <= sim->intervals[i].last)
            alive += pst__round_up(sim->intervals[i].bytes, PST_ARENA_ALIGNMENT);
    return alive;
}

/* The gathers of the backward's next step come right behind a release, and would wait for what
 * compute still does with that memory: they get other memory where there is some. */
static void delay_reuse(simulation *sim) {
    size_t most = 0;
    for (size_t i = 0; i < sim->interval_count; i++) {
        size_t alive = alive_at(sim, sim->intervals[i].first);
        if (alive > most) most = alive;
    }
    for (size_t i = 0; i < sim->interval_count; i++) {
        pst_interval *interval = &sim->intervals[i];
        int is_backward = interval->last >= sim->plan->step_count;
        size_t bytes = pst__round_up(interval->bytes, PST_ARENA_ALIGNMENT);
        if (is_backward && alive_at(sim, interval->last + 1) + bytes <= most) interval->last++;
    }
}

/* Stages 1 and 2: all that is used stays. */
static pst_status keep_everything(simulation *sim) {
    for (size_t i = 0; i < sim->plan->step_count; i++)
        sim->plan->steps[i].keep = !sim->plan->steps[i].is_use;
    for (uint32_t i = 0; i < sim->input->group_count; i++) {
        pst_status status = sim->spans[i].last == 0 ? PST_OK : open_interval(sim, i, 0);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static pst_status simulate(simulation *sim) {
    const pst__plan_input *input = sim->input;
    if (!input->window) return keep_everything(sim);
    pst_status status = PST_OK;
    if (input->grad)
        status = pst__backward_build(input->heap, &sim->backward, sim->spans, input->group_count,
                                     input->group_count, input->need, input->ahead);
    if (status == PST_OK) status = simulate_forward(sim);
    if (status == PST_OK) status = simulate_backward(sim);
    return status;
}

/* ---- from the recording, to the plan --------------------------------------------------------- */

pst_status pst__plan_spans(const pst_zero_op *operations, size_t count, size_t group_count,
                           pst__period *spans) {
    for (uint32_t i = 0; i < group_count; i++)
        spans[i] = (pst__period){.group = i};
    for (size_t i = 0; i < count; i++) {
        if (operations[i].group >= group_count) return PST_EINVAL;
        if (operations[i].backward || operations[i].kind == PST_ZERO_REDUCE) continue;
        pst__period *span = &spans[operations[i].group];
        if (span->first == 0 && operations[i].kind == PST_ZERO_RELEASE) return PST_EINVAL;
        if (span->first == 0) span->first = i + 1;
        span->last = i + 1;
    }
    return PST_OK;
}

/* Copies the forward's operations; every release must end a use. */
static pst_status take_steps(simulation *sim) {
    const pst__plan_input *input = sim->input;
    pst__plan *plan = sim->plan;
    for (size_t i = 0; i < input->count; i++) {
        const pst_zero_op *operation = &input->operations[i];
        if (!pst__plan_is_step(operation)) continue;
        int is_use = operation->kind == PST_ZERO_GATHER;
        if (!is_use && sim->uses[operation->group] == 0) return PST_EINVAL;
        sim->uses[operation->group] += is_use ? 1u : UINT32_MAX;
        plan->steps[plan->step_count++] =
            (pst__plan_step){.group = operation->group, .is_use = is_use, .refused = PST__NO_GROUP};
        plan->summary.uses += (size_t)is_use;
    }
    memset(sim->uses, 0, input->group_count * sizeof *sim->uses);
    return PST_OK;
}

static pst_status plan_alloc(const pst__plan_input *input, pst__plan **plan) {
    pst__plan *fresh = pst__heap_alloc(input->heap, sizeof *fresh);
    *plan = fresh;
    if (fresh == NULL) return PST_ENOMEM;
    fresh->group_count = input->group_count;
    fresh->ahead = input->ahead;
    fresh->budget = input->budget;
    fresh->step_capacity = input->count;
    fresh->steps = pst__heap_alloc(input->heap, input->count * sizeof *fresh->steps);
    fresh->backward_offsets =
        pst__heap_alloc(input->heap, input->group_count * sizeof *fresh->backward_offsets);
    fresh->group_forecasts =
        pst__heap_alloc(input->heap, input->group_count * sizeof *fresh->group_forecasts);
    return fresh->steps == NULL || fresh->backward_offsets == NULL || fresh->group_forecasts == NULL
               ? PST_ENOMEM
               : PST_OK;
}

static pst_status offsets_of(simulation *sim, pst_plan_result *result) {
    return pst_plan_offsets(sim->input->runtime, sim->intervals, sim->interval_count, result);
}

/* Released memory is used again a step later, if that takes no more. */
static pst_status find_offsets(simulation *sim, pst_plan_result *result) {
    const size_t bytes = sim->interval_count * sizeof *sim->intervals;
    pst_plan_result loose;
    if (bytes == 0) return PST_OK;
    pst_status status = offsets_of(sim, result);
    if (status != PST_OK) return status;
    pst_interval *tight = pst__heap_alloc(sim->input->heap, bytes);
    if (tight == NULL) return PST_ENOMEM;
    memcpy(tight, sim->intervals, bytes);
    delay_reuse(sim);
    status = offsets_of(sim, &loose);
    if (status == PST_OK && loose.peak <= result->peak)
        *result = loose;
    else
        memcpy(sim->intervals, tight, bytes);
    pst__heap_free(sim->input->heap, tight, bytes);
    return status;
}

static pst_status place(simulation *sim) {
    pst__plan *plan = sim->plan;
    pst_plan_result result = {0, 0};
    pst_status status = find_offsets(sim, &result);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < plan->issue_count; i++)
        plan->issues[i].offset = sim->intervals[plan->issues[i].interval].offset;
    for (size_t i = 0; i < plan->group_count; i++) {
        size_t interval = sim->backward_interval[i];
        plan->backward_offsets[i] =
            interval == NOT_GATHERED ? PST__ANYWHERE : sim->intervals[interval].offset;
        plan->summary.groups += sim->spans[i].last != 0;
    }
    plan->summary.peak_bytes = result.peak;
    plan->summary.lower_bound_bytes = result.lower_bound;
    return PST_OK;
}

/* Field by field: structs have padding. */
static void hash_plan(pst__plan *plan) {
    uint64_t hash = PST__HASH_SEED;
    for (size_t i = 0; i < plan->step_count; i++) {
        const pst__plan_step *step = &plan->steps[i];
        uint64_t fields[] = {step->group, (uint64_t)step->is_use, (uint64_t)step->keep,
                             step->issues};
        hash = pst__hash(hash, fields, sizeof fields);
    }
    for (size_t i = 0; i < plan->issue_count; i++) {
        uint64_t fields[] = {plan->issues[i].group, plan->issues[i].offset};
        hash = pst__hash(hash, fields, sizeof fields);
    }
    hash =
        pst__hash(hash, plan->backward_offsets, plan->group_count * sizeof *plan->backward_offsets);
    uint64_t fields[] = {plan->ahead, plan->budget, plan->summary.peak_bytes};
    plan->summary.hash = pst__hash(hash, fields, sizeof fields);
}

static pst_status run(simulation *sim) {
    const pst__plan_input *input = sim->input;
    pst_status status = simulation_alloc(sim);
    if (status == PST_OK)
        status = pst__plan_spans(input->operations, input->count, input->group_count, sim->spans);
    if (status == PST_OK) status = take_steps(sim);
    if (status == PST_OK) status = simulate(sim);
    if (status != PST_OK) return status;
    close_all(sim);
    return place(sim);
}

/* Again, with the groups that are to stay. */
static pst_status run_again(simulation *sim) {
    pst__plan *plan = sim->plan;
    const pst__plan_input *input = sim->input;
    simulation_free(sim);
    *sim = (simulation){.input = input, .plan = plan};
    plan->step_count = plan->issue_count = 0;
    plan->summary = (pst_zero_plan){0};
    return run(sim);
}

static pst_status build(simulation *sim) {
    pst__plan *plan = sim->plan;
    pst_status status = run(sim);
    if (status == PST_OK) status = pst__keep_choose(sim->input, plan);
    if (status == PST_OK && plan->forecast.kept_groups > 0) status = run_again(sim);
    if (status == PST_OK) status = pst__forecast(sim->input, &sim->backward, plan);
    if (status == PST_OK) hash_plan(plan);
    return status;
}

pst_status pst__plan_create(const pst__plan_input *input, pst__plan **plan) {
    simulation sim = {.input = input};
    pst_status status = plan_alloc(input, &sim.plan);
    if (status == PST_OK) status = build(&sim);
    simulation_free(&sim);
    if (status != PST_OK) {
        pst__plan_destroy(input->heap, sim.plan);
        sim.plan = NULL;
    }
    *plan = sim.plan;
    return status;
}

void pst__plan_destroy(const pst__heap *heap, pst__plan *plan) {
    if (plan == NULL) return;
    pst__heap_free(heap, plan->steps, plan->step_capacity * sizeof *plan->steps);
    pst__heap_free(heap, plan->issues, plan->issue_capacity * sizeof *plan->issues);
    pst__heap_free(heap, plan->backward_offsets,
                   plan->group_count * sizeof *plan->backward_offsets);
    pst__heap_free(heap, plan->group_forecasts, plan->group_count * sizeof *plan->group_forecasts);
    pst__heap_free(heap, plan, sizeof *plan);
}
