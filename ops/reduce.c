/* Reductions of a backward: what is reported, whose turn it is, what comes late. */
#include "ops/engine.h"
#include "ops/operation.h"

#include "sched/runtime.h"

#include <string.h>

/* ---- a regular reduction, at its turn -------------------------------------------------------- */

static pst_status ask_target(pst_zero *engine, uint32_t index, int *accumulate) {
    pst__group *group = &engine->groups[index];
    pst_status status = engine->options.gradient_target(engine->options.callback_context, index,
                                                        &group->target, accumulate);
    if (status == PST_OK && group->target != NULL) return PST_OK;
    return pst__zero_fail(engine, status == PST_OK ? PST_EINVAL : status,
                          "group '%s': gradient_target gave no memory", group->name);
}

static pst_status reduce_nothing(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    group->target = NULL;
    pst_status status = pst__bucket_fill(engine, index, NULL, group->reduce_dtype, 0);
    if (status == PST_OK && group->reported) pst__fill_consumed(engine, index);
    return status;
}

static pst_status reduce_group(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    int accumulate = 0, has_sources = group->reported;
    if (engine->is_broken) return reduce_nothing(engine, index);
    pst_status status = ask_target(engine, index, &accumulate);
    if (status == PST_OK)
        status =
            pst__bucket_fill(engine, index, has_sources ? group->sources : NULL,
                             has_sources ? group->sources_dtype : group->reduce_dtype, accumulate);
    if (status == PST_OK && has_sources) pst__fill_consumed(engine, index);
    return status;
}

pst_status pst__reduce_give_up(pst_zero *engine, pst_status status) {
    char text[PST__ERROR_BYTES];
    if (status == PST_OK) return PST_OK;
    (void)pst_runtime_error(engine->runtime, text, sizeof text);
    pst_runtime_poison(engine->runtime, status, text);
    return status;
}

pst_status pst__reduce_next(pst_zero *engine) {
    uint32_t index = engine->order.reduces[engine->reduced++];
    engine->groups[index].reduced = 1;
    return pst__reduce_give_up(engine, reduce_group(engine, index));
}

/* ---- reports --------------------------------------------------------------------------------- */

static void note_presence(pst_zero *engine, const pst__group *group, const void *const *sources) {
    for (size_t i = 0; i < group->layout.member_count; i++) {
        const pst__member *member = &group->layout.members[i];
        if (member->trainable && sources[i] != NULL)
            engine->parameters[member->parameter].has_gradient_here = 1;
    }
}

static pst_status keep_late(pst_zero *engine, uint32_t index, const void *const *sources,
                            pst_dtype dtype) {
    pst__group *group = &engine->groups[index];
    size_t bytes = group->layout.member_count * sizeof *sources;
    pst_status status = pst__heap_grow(engine->heap, (void **)&engine->late, &engine->late_capacity,
                                       engine->late_count + 1, sizeof *engine->late);
    const void **copy = status == PST_OK ? pst__heap_alloc(engine->heap, bytes) : NULL;
    if (copy == NULL)
        return pst__zero_fail(engine, PST_ENOMEM, "group '%s': no memory for its gradients",
                              group->name);
    memcpy(copy, sources, bytes);
    engine->late[engine->late_count++] =
        (pst__late){index, group->late++, copy, group->layout.member_count, dtype};
    return PST_OK;
}

static const char *why_late(const pst__group *group) {
    if (group->reported) return "twice in one backward";
    if (group->reduced) return "after groups that follow them were needed";
    return "without a use in a forward since they were reduced last";
}

/* Other ranks hear of it only where the host waits for what they all tell. */
static pst_status report_late(pst_zero *engine, uint32_t index, const void *const *sources,
                              pst_dtype dtype) {
    const pst__group *group = &engine->groups[index];
    if (engine->careful) return keep_late(engine, index, sources, dtype);
    pst_status status = pst__zero_fail(
        engine, PST_EMISMATCH,
        "group '%s': its gradients were reported %s, unlike in the pass that was recorded; call "
        "pst_zero_set_replay(engine, 0) on all ranks if passes differ that much",
        group->name, why_late(group));
    return pst__reduce_give_up(engine, status);
}

/* Behind the gathers that were needed so far; and behind those that another backward needs first,
 * although this one has left them out: gradients are complete behind the group's first use. */
static size_t place_now(const pst_zero *engine, uint32_t group) {
    const pst__order *order = &engine->order;
    const size_t first = order->first_period[group];
    const size_t before =
        first == 0 ? 0 : pst__backward_before(&order->gathers, order->periods[first - 1].last);
    return before > engine->needed ? before : engine->needed;
}

pst_status pst__reduce_report(pst_zero *engine, uint32_t index, const void *const *sources,
                              pst_dtype dtype) {
    pst__group *group = &engine->groups[index];
    if (group->layout.gradient_elements == 0) { /* nothing to send, but to be known */
        note_presence(engine, group, sources);
        pst__fill_tell(engine, index);
        return PST_OK;
    }
    if (!group->was_used)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s' has gradients but was not used in a forward",
                              group->name);
    note_presence(engine, group, sources);
    if (group->reported_after == PST__NOT_REPORTED)
        group->reported_after = PST__REPORTED_FIRST + (uint32_t)place_now(engine, index);
    /* What only graphs of before the last reduction have used has no place in the order. */
    int has_place = engine->order.first_uses[index] != 0;
    if (!has_place || group->reported || group->reduced)
        return report_late(engine, index, sources, dtype);
    memcpy(group->sources, sources, group->layout.member_count * sizeof *sources);
    group->sources_dtype = dtype;
    group->reported = 1;
    return pst__backward_reported(engine);
}

void pst__reduce_begin(pst_zero *engine) {
    pst__order *order = &engine->order;
    engine->reduced = 0;
    for (size_t i = engine->group_count; i-- > 0;) {
        pst__group *group = &engine->groups[i];
        group->reported = group->reduced = group->is_filled = group->is_written = 0;
        group->reported_after = PST__NOT_REPORTED;
        group->late = 0;
        group->target = NULL;
        if (order->first_uses[i] != 0 && group->layout.gradient_elements > 0)
            order->reduces[order->reduce_count++] = (uint32_t)i;
    }
    pst__sort_descending(order->reduces, order->reduce_count, order->first_uses);
    for (size_t i = 0; i < engine->parameter_count; i++)
        engine->parameters[i].has_gradient_here = 0;
    pst__presence_begin(engine);
}

/* ---- what came late -------------------------------------------------------------------------- */

static const pst__late *find_late(const pst_zero *engine, uint32_t group, uint32_t round) {
    for (size_t i = 0; i < engine->late_count; i++)
        if (engine->late[i].group == group && engine->late[i].round == round)
            return &engine->late[i];
    return NULL;
}

static pst_status reduce_late_group(pst_zero *engine, uint32_t index, const pst__late *own) {
    const pst__group *group = &engine->groups[index];
    int accumulate = 1;
    pst_status status = PST_OK;
    if (group->target == NULL) status = ask_target(engine, index, &accumulate);
    if (status == PST_OK)
        status = pst__bucket_fill(engine, index, own == NULL ? NULL : own->sources,
                                  own == NULL ? group->reduce_dtype : own->dtype, accumulate);
    if (status == PST_OK && own != NULL) pst__fill_consumed(engine, index);
    return status;
}

/* Every rank takes part for every group that came late anywhere. */
static pst_status reduce_round(pst_zero *engine, uint32_t round) {
    pst_status status = PST_OK;
    for (uint32_t i = 0; status == PST_OK && i < engine->group_count; i++)
        if (engine->agreed->groups[i].late > round)
            status = reduce_late_group(engine, i, find_late(engine, i, round));
    return status;
}

static uint32_t count_rounds(const pst_zero *engine) {
    uint32_t rounds = 0;
    for (size_t i = 0; i < engine->group_count; i++)
        if (engine->agreed->groups[i].late > rounds) rounds = engine->agreed->groups[i].late;
    return rounds;
}

static pst_status reduce_late(pst_zero *engine) {
    pst_status status = PST_OK;
    uint32_t rounds = count_rounds(engine);
    for (uint32_t round = 0; status == PST_OK && round < rounds; round++)
        status = reduce_round(engine, round);
    if (status == PST_OK) status = pst__bucket_flush_all(engine);
    if (status == PST_OK) status = pst__fill_join(engine);
    return pst__reduce_give_up(engine, status);
}

static void forget_late(pst_zero *engine) {
    for (size_t i = 0; i < engine->late_count; i++)
        pst__heap_free(engine->heap, engine->late[i].sources,
                       engine->late[i].source_count * sizeof(void *));
    engine->late_count = 0;
}

/* ---- the end --------------------------------------------------------------------------------- */

static pst_status wait_all(pst_zero *engine) {
    const pst__queue *queue = pst__queue_of(engine, PST__REDUCE_LANE);
    for (pst__operation *operation = queue->oldest; operation != NULL;
         operation = operation->next) {
        if (engine->asynchronous && operation->work.collective.kind != PST_REDUCE_SCATTER) continue;
        pst_status status = pst__operation_wait(operation, "wait gradients", PST__REDUCE_LANE);
        if (status != PST_OK) return status;
    }
    return pst_runtime_status(engine->runtime);
}

pst_status pst__reduce_end(pst_zero *engine) {
    pst_status status = pst__reduce_give_up(engine, pst__bucket_flush_all(engine));
    if (status == PST_OK) status = pst__reduce_give_up(engine, pst__fill_join(engine));
    if (status == PST_OK) status = pst__reduce_give_up(engine, pst__presence_exchange(engine));
    if (status == PST_OK && engine->careful) status = wait_all(engine);
    if (status == PST_OK) status = pst__presence_read(engine);
    if (status == PST_OK && engine->careful) status = reduce_late(engine);
    if (status == PST_OK) status = wait_all(engine);
    forget_late(engine);
    pst__operation_reap(engine);
    if (status == PST_OK) pst_buckets_trim(engine->buckets);
    return status;
}

void pst__reduce_abandon(pst_zero *engine) {
    /* Gradients and their targets may be freed then, where compute does it or at once. */
    if (pst_runtime_status(engine->runtime) == PST_OK) (void)wait_all(engine);
    (void)pst__fill_join(engine);
    pst__bucket_abandon_all(engine);
    for (; engine->reduced < engine->order.reduce_count; engine->reduced++) {
        uint32_t index = engine->order.reduces[engine->reduced];
        if (engine->groups[index].reported) pst__fill_consumed(engine, index);
    }
    for (size_t i = 0; i < engine->late_count; i++)
        pst__fill_consumed(engine, engine->late[i].group);
    forget_late(engine);
}
