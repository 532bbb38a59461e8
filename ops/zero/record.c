/* The recorder: what passes did, and when. */
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

/* Of the pass that runs. */
static pst__notes *notes_of(pst_zero *engine) {
    const pst__pass *pass = &engine->pass;
    return &engine->history[pass->kind == PST__BACKWARD ? 1 : pass->grad].notes;
}

pst__timing *pst__record_timing(pst_zero *engine) {
    pst__notes *notes = notes_of(engine);
    if (engine->pass.kind == PST__NO_PASS || !notes->is_on) return NULL;
    return pst__timings_take(&notes->timings);
}

void pst__record_joining(pst_zero *engine) {
    engine->joining = engine->lent_count > 0 ? pst__record_timing(engine) : NULL;
    pst__timing_note(engine->joining, PST__BEGAN, engine->carrier.compute);
}

/* The first use behind a gather is what that was for. */
static void note_time(pst_zero *engine, pst__notes *notes, pst_zero_op_kind kind, uint32_t index) {
    pst__group *group = &engine->groups[index];
    if (kind == PST_ZERO_GATHER) {
        pst__notes_share(notes, group->gather_timing, group->layout.gathered_bytes);
        group->gather_timing = NULL;
    }
    pst__timing *joining = kind == PST_ZERO_REDUCE ? engine->joining : NULL;
    pst__timing *timing = pst__notes_reach(notes, joining, engine->carrier.compute);
    engine->joining = NULL;
    if (kind == PST_ZERO_GATHER) group->use_timing = timing;
}

void pst__record_reduction(pst_zero *engine, pst__operation *operation, size_t bytes) {
    if (operation->timing == NULL) operation->timing = pst__record_timing(engine);
    pst__notes_share(notes_of(engine), operation->timing, bytes);
}

pst_status pst__record(pst_zero *engine, pst_zero_op_kind kind, uint32_t group, size_t bytes) {
    const pst__pass *pass = &engine->pass;
    if (pass->kind == PST__NO_PASS) return PST_OK;
    int backward = pass->kind == PST__BACKWARD;
    if (!backward && pass->grad && note_use(engine, kind, group) != PST_OK)
        return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to record a pass");
    pst__history *history = &engine->history[backward ? 1 : pass->grad];
    note_time(engine, &history->notes, kind, group);
    return append(
        engine, &history->current,
        (pst_zero_op){.kind = kind, .group = group, .backward = backward, .bytes = bytes});
}

void pst__record_begin(pst_zero *engine, int grad) {
    pst__history *history = &engine->history[grad];
    history->current.count = 0;
    pst__notes_read(&history->notes);
    engine->joining = NULL;
    for (size_t i = 0; i < engine->group_count; i++)
        engine->groups[i].gather_timing = engine->groups[i].use_timing = NULL;
    if (history->next_plan != NULL) pst__path_add(engine, grad, history->next_plan);
    history->next_plan = NULL;
}

/* ---- complete passes ------------------------------------------------------------------------- */

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
    pst__notes_complete(&history->notes, history->complete.count);
    const pst__path *path = grad ? engine->pass.backward_path : engine->pass.path;
    if (status != PST_OK || !engine->replay || path != NULL || engine->carrier.outside != NULL ||
        pst__path_is_known(engine, grad, &history->complete))
        return status;
    return pst__compile(engine, grad);
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

pst_status pst_zero_recorded_times(pst_zero *engine, int grad, pst_zero_op_time *times,
                                   size_t capacity, size_t *count) {
    if (engine == NULL || count == NULL || (times == NULL && capacity > 0)) return PST_EINVAL;
    pst__notes *notes = &engine->history[grad != 0].notes;
    pst__notes_read(notes);
    size_t copied = notes->time_count < capacity ? notes->time_count : capacity;
    if (copied > 0) memcpy(times, notes->times, copied * sizeof *times);
    *count = notes->time_count;
    return PST_OK;
}

void pst_zero_set_replay(pst_zero *engine, int enabled) {
    engine->replay = enabled != 0;
}

void pst_zero_set_timing(pst_zero *engine, int enabled) {
    engine->is_timed = enabled != 0;
}

void pst__record_free(pst_zero *engine) {
    for (int grad = 0; grad < 2; grad++) {
        pst__history *history = &engine->history[grad];
        pst__heap_free(engine->carrier.heap, history->current.operations,
                       bytes_of(&history->current));
        pst__heap_free(engine->carrier.heap, history->complete.operations,
                       bytes_of(&history->complete));
        pst__notes_free(&history->notes);
        pst__plan_destroy(engine->carrier.heap, history->next_plan);
    }
    pst__path_free_all(engine);
}
