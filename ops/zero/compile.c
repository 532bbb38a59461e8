/* A recording becomes a plan, the same on all ranks: what they have measured is agreed on first. */
#include "ops/zero/compile.h"

#include "base/options.h"

#include <string.h>

/* ---- what the ranks have measured ------------------------------------------------------------ */

#define WORDS_A_GROUP (sizeof(pst__measured) / sizeof(uint64_t))

static pst__measured *measured_of(const pst__knowledge *known) {
    return (pst__measured *)(void *)(known->words + 1);
}

/* 0 stays: not known. Its own inverse. */
static uint64_t complement_of(uint64_t ns) {
    return ns == 0 ? 0 : ~ns;
}

/* A collective begins on each rank as that comes to it, and ends on all together: the rank that
 * comes last has measured what it takes, and the others what they have waited for that one, too. */
static void complement_collectives(const pst_zero *engine, pst__measured *measured) {
    for (size_t i = 0; i < engine->group_count; i++) {
        measured[i].gather = complement_of(measured[i].gather);
        measured[i].reduce = complement_of(measured[i].reduce);
    }
}

pst_status pst__knowledge_agree(pst_zero *engine, const pst_zero_compile_options *options,
                                pst__knowledge *known) {
    known->count = 1 + WORDS_A_GROUP * engine->group_count;
    known->words = pst__heap_alloc(engine->carrier.heap, known->count * sizeof *known->words);
    if (known->words == NULL) return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to plan");
    known->words[0] = ~(uint64_t)options->keep_bytes;
    pst__measure(options->operations, options->times, options->count, engine->group_count,
                 measured_of(known));
    if (!options->grad) return PST_OK;
    complement_collectives(engine, measured_of(known));
    const pst_status status = pst__agree_largest(engine, known->words, known->count);
    complement_collectives(engine, measured_of(known));
    return status;
}

void pst__knowledge_free(const pst_zero *engine, pst__knowledge *known) {
    if (known->words == NULL) return;
    pst__heap_free(engine->carrier.heap, known->words, known->count * sizeof *known->words);
}

/* ---- the plan -------------------------------------------------------------------------------- */

pst_status pst__plan_by(pst_zero *engine, const pst_zero_compile_options *options,
                        const pst__knowledge *known, pst__plan **plan) {
    const pst__heap *heap = engine->carrier.heap;
    pst__costs costs;
    pst__plan_input input = {.runtime = engine->carrier.runtime,
                             .heap = heap,
                             .operations = options->operations,
                             .count = options->count,
                             .group_count = engine->group_count,
                             .bytes = engine->order.bytes,
                             .reduce_bytes = engine->reduce_bytes,
                             .need = engine->need,
                             .is_looked_up = engine->is_looked_up,
                             .grad = options->grad,
                             .window = engine->options.stage == 3,
                             .ahead = options->prefetch_ahead,
                             .budget = options->prefetch_bytes,
                             .keep_bytes = (size_t)~known->words[0],
                             .costs = &costs};
    pst_status status = pst__costs_create(heap, measured_of(known), engine->group_count,
                                          input.bytes, input.reduce_bytes, input.is_looked_up,
                                          pst__carrier_copies_locally(&engine->carrier), &costs);
    if (status == PST_OK) status = pst__plan_create(&input, plan);
    pst__costs_free(heap, &costs);
    if (status == PST_EINVAL)
        return pst__zero_fail(engine, status, "%s",
                              "the operations are no pass: an unknown group, or a release "
                              "without a use");
    if (status != PST_OK) return pst__zero_fail(engine, status, "%s", "no memory for a plan");
    return PST_OK;
}

/* A plan wants its peak in one segment. What an eager pass has left behind goes first, for which
 * the host waits until compute has used it; where it cannot the plan's offsets are advice and the
 * pool serves. */
static void make_room(pst_zero *engine, size_t peak) {
    pst_arena_stats stats = {.size = sizeof stats};
    (void)pst__carrier_wait_compute(&engine->carrier, PST__PATIENCE_NS);
    pst_arena_trim(engine->carrier.gathered);
    pst_arena_get_stats(engine->carrier.gathered, &stats);
    if (stats.reserved == 0 && peak > 0)
        (void)pst_arena_add_segment(engine->carrier.gathered, peak);
}

static void adopt(pst_zero *engine, int grad, pst__plan *plan) {
    pst__history *history = &engine->history[grad];
    pst__plan_destroy(engine->carrier.heap, history->next_plan);
    history->next_plan = plan;
    if (!grad) return;
    engine->stats.plan_peak = plan->summary.peak_bytes;
    engine->stats.plan_lower_bound = plan->summary.lower_bound_bytes;
}

/* Within replicas and between them: a plan that differs does so from another one of either. */
static pst_status compare(pst_zero *engine, int grad, uint64_t hash) {
    const pst_status status = pst__compare(&engine->plans[grad], hash);
    if (status != PST_OK || engine->carrier.replicas == 1) return status;
    return pst__compare(&engine->replicas_plans[grad], hash);
}

static pst_status compile(pst_zero *engine, const pst_zero_compile_options *options,
                          int is_blocking) {
    pst__plan *plan = NULL;
    pst__knowledge known = {0};
    pst_status status = pst__knowledge_agree(engine, options, &known);
    if (status == PST_OK) status = pst__plan_by(engine, options, &known, &plan);
    pst__knowledge_free(engine, &known);
    if (status != PST_OK) return status;
    status = is_blocking ? pst__compare_now(&engine->plans[options->grad], plan->summary.hash)
                         : compare(engine, options->grad, plan->summary.hash);
    if (status != PST_OK) {
        pst__plan_destroy(engine->carrier.heap, plan);
        return status;
    }
    adopt(engine, options->grad, plan);
    if (engine->options.stage == 3 && engine->pass.kind == PST__NO_PASS)
        make_room(engine, pst__path_largest_peak(engine));
    return PST_OK;
}

/* The host waits for compute here anyway, to make room. */
pst_status pst__compile(pst_zero *engine, int grad) {
    pst__history *history = &engine->history[grad];
    if (grad && engine->options.stage == 3)
        (void)pst__carrier_wait_compute(&engine->carrier, PST__PATIENCE_NS);
    pst__notes_read(&history->notes);
    return compile(engine,
                   &(pst_zero_compile_options){
                       .grad = grad,
                       .operations = history->complete.operations,
                       .times = history->notes.time_count == 0 ? NULL : history->notes.times,
                       .count = history->complete.count,
                       .prefetch_ahead = engine->options.prefetch_ahead,
                       .prefetch_bytes = engine->options.prefetch_bytes,
                       .keep_bytes = engine->keep_bytes},
                   0);
}

/* ---- on request ------------------------------------------------------------------------------ */

pst_status pst__compile_options_read(pst_zero *engine, const pst_zero_compile_options *given,
                                     pst_zero_compile_options *options) {
    if (engine == NULL || !pst__read_options(options, sizeof *options, given) ||
        (options->operations == NULL && options->count > 0))
        return PST_EINVAL;
    if (!engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "compile needs a sealed engine");
    options->grad = options->grad != 0;
    return PST_OK;
}

pst_status pst_zero_compile(pst_zero *engine, const pst_zero_compile_options *given,
                            pst_zero_plan *plan) {
    pst_zero_compile_options options;
    pst_status status = pst__compile_options_read(engine, given, &options);
    if (status == PST_OK) status = compile(engine, &options, 1);
    if (status == PST_OK && plan != NULL) *plan = engine->history[options.grad].next_plan->summary;
    return status;
}

void pst_zero_plan_with(pst_zero *engine, uint32_t prefetch_ahead, size_t keep_bytes) {
    engine->options.prefetch_ahead = prefetch_ahead;
    engine->keep_bytes = keep_bytes;
}

/* ---- what plans say -------------------------------------------------------------------------- */

/* The plan that was made last, if it has no pass yet, or that of the latest pass. */
static const pst__plan *latest_plan(const pst_zero *engine, int grad) {
    const pst__history *history = &engine->history[grad != 0];
    if (history->next_plan != NULL) return history->next_plan;
    return history->latest == PST__NO_PATH ? NULL : history->paths[history->latest].plan;
}

static pst_status no_plan(const pst_zero *engine) {
    return pst__zero_fail(engine, PST_ESTATE, "%s",
                          "there is no plan: run a pass, or compile a recording");
}

pst_status pst_zero_get_forecast(const pst_zero *engine, int grad, pst_zero_forecast *forecast) {
    if (engine == NULL || forecast == NULL) return PST_EINVAL;
    const pst__plan *plan = latest_plan(engine, grad);
    if (plan == NULL) return no_plan(engine);
    pst__write_sized(forecast, &plan->forecast, sizeof plan->forecast);
    return PST_OK;
}

pst_status pst_zero_get_group_forecast(const pst_zero *engine, int grad, uint32_t group,
                                       pst_zero_group_forecast *forecast) {
    if (engine == NULL || forecast == NULL || group >= engine->group_count) return PST_EINVAL;
    const pst__plan *plan = latest_plan(engine, grad);
    if (plan == NULL) return no_plan(engine);
    pst__write_sized(forecast, &plan->group_forecasts[group], sizeof *plan->group_forecasts);
    return PST_OK;
}
