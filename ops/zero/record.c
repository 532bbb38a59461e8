/* The recorder: what passes did, and the plans made from it. */
#include "ops/zero/engine.h"

#include <string.h>

static size_t bytes_of(const pst__recording *recording) {
    return recording->capacity * sizeof *recording->operations;
}

static pst_status append(pst_zero *engine, pst__recording *recording, pst_zero_op operation) {
    pst_status status =
        pst__heap_grow(engine->carrier.heap, (void **)&recording->operations, &recording->capacity,
                       recording->count + 1, sizeof operation);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "no memory to record a pass of %zu operations",
                              recording->count);
    recording->operations[recording->count++] = operation;
    return PST_OK;
}

/* Uses of a forward with gradients decide the orders of its backward. */
static pst_status note_use(pst_zero *engine, pst_zero_op_kind kind, uint32_t group) {
    pst__order *order = &engine->order;
    const uint64_t now = ++engine->pass.clock;
    if (kind == PST_ZERO_RELEASE) {
        pst__order_end_use(order, group, now);
        return PST_OK;
    }
    engine->groups[group].was_used = 1;
    if (order->first_uses[group] == 0) order->first_uses[group] = now;
    return pst__order_begin_use(engine->carrier.heap, order, group, now,
                                engine->groups[group].gathered.uses > 0);
}

pst_status pst__record(pst_zero *engine, pst_zero_op_kind kind, uint32_t group, size_t bytes) {
    const pst__pass *pass = &engine->pass;
    if (pass->kind == PST__NO_PASS) return PST_OK;
    int backward = pass->kind == PST__BACKWARD;
    if (!backward && pass->grad && note_use(engine, kind, group) != PST_OK)
        return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to record a pass");
    pst__history *history = &engine->history[backward ? 1 : pass->grad];
    return append(
        engine, &history->current,
        (pst_zero_op){.kind = kind, .group = group, .backward = backward, .bytes = bytes});
}

void pst__record_begin(pst_zero *engine, int grad) {
    pst__history *history = &engine->history[grad];
    history->current.count = 0;
    if (history->next_plan != NULL) pst__path_add(engine, grad, history->next_plan);
    history->next_plan = NULL;
}

/* ---- compiling ------------------------------------------------------------------------------- */

static pst_status create_plan(pst_zero *engine, int grad, const pst_zero_op *operations,
                              size_t count, uint32_t ahead, size_t budget, pst__plan **plan) {
    pst__plan_input input = {.runtime = engine->carrier.runtime,
                             .heap = engine->carrier.heap,
                             .operations = operations,
                             .count = count,
                             .group_count = engine->group_count,
                             .bytes = engine->order.bytes,
                             .need = engine->need,
                             .grad = grad,
                             .window = engine->options.stage == 3,
                             .ahead = ahead,
                             .budget = budget};
    pst_status status = pst__plan_create(&input, plan);
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

static size_t larger_peak(size_t peak, const pst__plan *plan) {
    return plan != NULL && plan->summary.peak_bytes > peak ? plan->summary.peak_bytes : peak;
}

static size_t largest_peak(const pst_zero *engine) {
    size_t peak = 0;
    for (int grad = 0; grad < 2; grad++) {
        peak = larger_peak(peak, engine->history[grad].next_plan);
        for (size_t i = 0; i < PST__MOST_PATHS; i++)
            peak = larger_peak(peak, engine->history[grad].paths[i].plan);
    }
    return peak;
}

static void adopt(pst_zero *engine, int grad, pst__plan *plan) {
    pst__history *history = &engine->history[grad];
    pst__plan_destroy(engine->carrier.heap, history->next_plan);
    history->next_plan = plan;
    if (!grad) return;
    engine->stats.plan_peak = plan->summary.peak_bytes;
    engine->stats.plan_lower_bound = plan->summary.lower_bound_bytes;
}

static pst_status compile(pst_zero *engine, int grad, const pst_zero_op *operations, size_t count,
                          uint32_t ahead, size_t budget, int blocking) {
    pst__plan *plan;
    pst_status status = create_plan(engine, grad, operations, count, ahead, budget, &plan);
    if (status != PST_OK) return status;
    status = blocking ? pst__compare_now(&engine->plans[grad], plan->summary.hash)
                      : pst__compare(&engine->plans[grad], plan->summary.hash);
    if (status != PST_OK) {
        pst__plan_destroy(engine->carrier.heap, plan);
        return status;
    }
    adopt(engine, grad, plan);
    if (engine->options.stage == 3 && engine->pass.kind == PST__NO_PASS)
        make_room(engine, largest_peak(engine));
    return PST_OK;
}

static void swap(pst__recording *a, pst__recording *b) {
    pst__recording kept = *a;
    *a = *b;
    *b = kept;
}

/* The complete pass, of which a second backward may still need the forward. */
static pst_status keep(pst_zero *engine, pst__history *history) {
    const pst__recording *current = &history->current;
    pst__recording *complete = &history->complete;
    pst_status status =
        pst__heap_grow(engine->carrier.heap, (void **)&complete->operations, &complete->capacity,
                       current->count, sizeof *complete->operations);
    if (status != PST_OK) return pst__zero_fail(engine, status, "%s", "no memory to keep a pass");
    if (current->count > 0)
        memcpy(complete->operations, current->operations,
               current->count * sizeof *complete->operations);
    complete->count = current->count;
    return PST_OK;
}

pst_status pst__record_complete(pst_zero *engine, int grad) {
    pst__history *history = &engine->history[grad];
    pst_status status = PST_OK;
    if (grad)
        status = keep(engine, history);
    else
        swap(&history->current, &history->complete);
    const pst__path *path = grad ? engine->pass.backward_path : engine->pass.path;
    if (status != PST_OK || !engine->replay || path != NULL || engine->carrier.outside != NULL ||
        pst__path_is_known(engine, grad, &history->complete))
        return status;
    return compile(engine, grad, history->complete.operations, history->complete.count,
                   engine->options.prefetch_ahead, engine->options.prefetch_bytes, 0);
}

pst_status pst_zero_compile(pst_zero *engine, int grad, const pst_zero_op *operations, size_t count,
                            uint32_t prefetch_ahead, size_t prefetch_bytes, pst_zero_plan *plan) {
    if (engine == NULL || (operations == NULL && count > 0)) return PST_EINVAL;
    if (!engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "compile needs a sealed engine");
    int kind = grad != 0;
    pst_status status = compile(engine, kind, operations, count, prefetch_ahead, prefetch_bytes, 1);
    if (status == PST_OK && plan != NULL) *plan = engine->history[kind].next_plan->summary;
    return status;
}

pst_status pst_zero_recorded(const pst_zero *engine, int grad, pst_zero_op *operations,
                             size_t capacity, size_t *count) {
    if (engine == NULL || count == NULL || (operations == NULL && capacity > 0)) return PST_EINVAL;
    const pst__recording *complete = &engine->history[grad != 0].complete;
    size_t copied = complete->count < capacity ? complete->count : capacity;
    if (copied > 0) memcpy(operations, complete->operations, copied * sizeof *operations);
    *count = complete->count;
    return PST_OK;
}

void pst_zero_set_replay(pst_zero *engine, int enabled) {
    engine->replay = enabled != 0;
}

void pst__record_free(pst_zero *engine) {
    for (int grad = 0; grad < 2; grad++) {
        pst__history *history = &engine->history[grad];
        pst__heap_free(engine->carrier.heap, history->current.operations,
                       bytes_of(&history->current));
        pst__heap_free(engine->carrier.heap, history->complete.operations,
                       bytes_of(&history->complete));
        pst__plan_destroy(engine->carrier.heap, history->next_plan);
    }
    pst__path_free_all(engine);
}
