#include "ops/engine.h"
#include "ops/operation.h"

#include "sched/runtime.h"

#include <string.h>

/* ---- a bucket that fills, and goes out ------------------------------------------------------- */

static pst_status flush(pst_zero *engine, pst_dtype dtype) {
    pst__open_bucket *open = &engine->open[dtype];
    pst__operation *operation = open->operation;
    if (operation == NULL) return PST_OK;
    pst_bucket bucket;
    pst_status status = pst_buckets_flush(engine->buckets, dtype, &bucket);
    if (status == PST_OK) status = pst__zero_record(engine, operation->ready);
    if (status != PST_OK) return status;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_REDUCE_SCATTER;
    collective->name = engine->bucket_names[dtype];
    collective->dtype = dtype;
    collective->source = bucket.memory;
    collective->source_bytes = bucket.used_bytes;
    collective->stride = bucket.stride;
    collective->pieces = operation->pieces;
    collective->scale = 1.0;
    operation->bucket = bucket.id;
    operation->has_bucket = 1;
    size_t bytes = open->whole_bytes;
    *open = (pst__open_bucket){0};
    status = pst__operation_submit(operation, bytes, &operation->ready, 1);
    if (status != PST_OK) return status;
    engine->stats.reduces++;
    engine->stats.reduce_bytes += bytes;
    return PST_OK;
}

static pst_status flush_all(pst_zero *engine) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = flush(engine, (pst_dtype)dtype);
    return status;
}

static void note_bucket_bytes(pst_zero *engine) {
    pst_buckets_stats stats;
    pst_buckets_get_stats(engine->buckets, &stats);
    if (stats.bytes > engine->stats.bucket_peak) engine->stats.bucket_peak = stats.bytes;
}

static pst_status take_slot(pst_zero *engine, const pst__group *group, pst_slot *slot) {
    size_t bytes = group->layout.gradient_elements * group->layout.reduce_element_bytes;
    pst_dtype dtype = group->reduce_dtype;
    pst_status status = pst_buckets_slot(engine->buckets, dtype, bytes, engine->compute, slot);
    if (status != PST_EBUSY) return status;
    status = flush(engine, dtype);
    if (status != PST_OK) return status;
    return pst_buckets_slot(engine->buckets, dtype, bytes, engine->compute, slot);
}

static pst_status add_piece(pst_zero *engine, pst__group *group, const pst_slot *slot,
                            int accumulate) {
    pst__open_bucket *open = &engine->open[group->reduce_dtype];
    pst__operation *operation = open->operation;
    size_t count = operation->work.collective.piece_count;
    pst_status status =
        pst__heap_grow(engine->heap, (void **)&operation->pieces, &operation->piece_capacity,
                       count + 1, sizeof *operation->pieces);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "group '%s': no memory to reduce it", group->name);
    operation->pieces[count] = (pst_reduce_piece){.offset = slot->offset,
                                                  .count = group->layout.gradient_elements,
                                                  .destination = group->target,
                                                  .destination_dtype = group->dtype,
                                                  .accumulate = accumulate};
    operation->work.collective.piece_count++;
    open->whole_bytes += group->layout.gradient_bytes_whole;
    return PST_OK;
}

/* ---- one group's gradients into a slot ------------------------------------------------------- */

static pst_status ask_target(pst_zero *engine, uint32_t index, int *accumulate) {
    pst__group *group = &engine->groups[index];
    pst_status status = engine->options.gradient_target(engine->options.callback_context, index,
                                                        &group->target, accumulate);
    if (status == PST_OK && group->target != NULL) return PST_OK;
    return pst__zero_fail(engine, status == PST_OK ? PST_EINVAL : status,
                          "group '%s': gradient_target gave no memory", group->name);
}

static void consumed(pst_zero *engine, uint32_t index) {
    if (engine->options.gradients_consumed != NULL)
        engine->options.gradients_consumed(engine->options.callback_context, index);
}

/* `sources` NULL: zeros. */
static pst_status fill(pst_zero *engine, uint32_t index, const void *const *sources,
                       pst_dtype dtype, int accumulate) {
    pst__group *group = &engine->groups[index];
    pst_slot slot;
    pst_status status = take_slot(engine, group, &slot);
    pst__open_bucket *open = &engine->open[group->reduce_dtype];
    if (status == PST_OK && open->operation == NULL)
        status = pst__operation_take(engine, PST__REDUCE_LANE, &open->operation);
    if (status == PST_OK) status = add_piece(engine, group, &slot, accumulate);
    if (status != PST_OK) return status;
    note_bucket_bytes(engine);
    size_t count = pst__layout_casts(&group->layout, engine->world, slot.memory, slot.stride,
                                     sources, dtype, group->reduce_dtype, engine->casts);
    pst_device *device = engine->device;
    status = device->ops->cast_scale_copy(device, engine->compute, engine->casts, count,
                                          1.0 / (double)engine->world);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "group '%s': copying its %s gradients failed",
                              group->name, pst_dtype_name(dtype));
    return pst__record(engine, PST_ZERO_REDUCE, index, group->layout.gradient_bytes_whole);
}

/* A regular reduction at its turn. */
static pst_status reduce_group(pst_zero *engine, uint32_t index) {
    pst__group *group = &engine->groups[index];
    int accumulate = 0, has_sources = group->reported;
    pst_status status = ask_target(engine, index, &accumulate);
    if (status == PST_OK)
        status = fill(engine, index, has_sources ? group->sources : NULL,
                      has_sources ? group->sources_dtype : group->reduce_dtype, accumulate);
    if (status == PST_OK && has_sources) consumed(engine, index);
    return status;
}

/* A failure here leaves the ranks with different sequences, so nothing may go on. */
static pst_status give_up(pst_zero *engine, pst_status status) {
    char text[PST__ERROR_BYTES];
    if (status == PST_OK) return PST_OK;
    (void)pst_runtime_error(engine->runtime, text, sizeof text);
    pst_runtime_poison(engine->runtime, status, text);
    return status;
}

/* All whose turn it is; `missing`: also those that were never reported. */
static pst_status drain(pst_zero *engine, int missing) {
    pst_status status = PST_OK;
    while (status == PST_OK && engine->reduced < engine->order.reduce_count) {
        uint32_t index = engine->order.reduces[engine->reduced];
        if (!missing && !engine->groups[index].reported) break;
        status = reduce_group(engine, index);
        engine->reduced++;
    }
    return give_up(engine, status);
}

/* ---- reports --------------------------------------------------------------------------------- */

static void note_presence(pst_zero *engine, const pst__group *group, const void *const *sources) {
    for (size_t i = 0; i < group->layout.member_count; i++) {
        const pst__member *member = &group->layout.members[i];
        if (member->trainable && sources[i] != NULL)
            engine->parameters[member->parameter].has_gradient_here = 1;
    }
}

static pst_status report_late(pst_zero *engine, uint32_t index, const void *const *sources,
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

pst_status pst__reduce_report(pst_zero *engine, uint32_t index, const void *const *sources,
                              pst_dtype dtype) {
    pst__group *group = &engine->groups[index];
    if (group->layout.gradient_elements == 0) { /* nothing to send, but to be known */
        note_presence(engine, group, sources);
        consumed(engine, index);
        return PST_OK;
    }
    if (engine->order.first_uses[index] == 0)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s' has gradients but was not used in a forward",
                              group->name);
    note_presence(engine, group, sources);
    if (group->reported) return report_late(engine, index, sources, dtype);
    memcpy(group->sources, sources, group->layout.member_count * sizeof *sources);
    group->sources_dtype = dtype;
    group->reported = 1;
    return engine->one_comm ? PST_OK : drain(engine, 0);
}

void pst__reduce_begin(pst_zero *engine) {
    pst__order *order = &engine->order;
    order->reduce_count = 0;
    engine->reduced = 0;
    for (size_t i = engine->group_count; i-- > 0;) {
        pst__group *group = &engine->groups[i];
        group->reported = 0;
        group->late = 0;
        group->target = NULL;
        if (order->first_uses[i] != 0 && group->layout.gradient_elements > 0)
            order->reduces[order->reduce_count++] = (uint32_t)i;
    }
    pst__sort_descending(order->reduces, order->reduce_count, order->first_uses, 1);
    for (size_t i = 0; i < engine->parameter_count; i++)
        engine->parameters[i].has_gradient_here = 0;
}

/* ---- the end: what is missing, what anybody has, what came late ------------------------------ */

#define MOST_LATE 255u

static void write_presence(pst_zero *engine) {
    unsigned char *byte = engine->presence;
    for (size_t i = 0; i < engine->parameter_count; i++)
        *byte++ = (unsigned char)engine->parameters[i].has_gradient_here;
    memcpy(byte, engine->needed_here, engine->group_count);
    byte += engine->group_count;
    for (size_t i = 0; i < engine->group_count; i++) {
        uint32_t late = engine->groups[i].late;
        *byte++ = (unsigned char)(late < MOST_LATE ? late : MOST_LATE);
    }
}

/* Frozen groups of this backward's order that no rank needed leave it; who was needed once stays. A
 * group with trainable parameters never leaves: the next backward may reach it on one rank alone.
 */
static void learn_need(pst_zero *engine, const unsigned char *needed) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__need *need = &engine->need[i];
        int may_leave = engine->groups[i].layout.gradient_elements == 0 &&
                        engine->order.gathers.position[i] != PST__NO_POSITION;
        if (needed[i])
            *need = PST__NEED_SOME;
        else if (may_leave && *need == PST__NEED_UNKNOWN)
            *need = PST__NEED_NONE;
    }
    memset(engine->needed_here, 0, engine->group_count);
}

static uint32_t read_presence(pst_zero *engine) {
    const unsigned char *byte = engine->presence;
    uint32_t rounds = 0;
    for (size_t i = 0; i < engine->parameter_count; i++)
        engine->parameters[i].has_gradient = *byte++;
    learn_need(engine, byte);
    byte += engine->group_count;
    for (size_t i = 0; i < engine->group_count; i++)
        if (byte[i] > rounds) rounds = byte[i];
    return rounds;
}

static pst_status exchange_presence(pst_zero *engine) {
    pst__operation *operation;
    pst_status status = pst__operation_take(engine, PST__REDUCE_LANE, &operation);
    if (status != PST_OK) return status;
    write_presence(engine);
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_REDUCE;
    collective->name = "presence";
    collective->dtype = PST_UINT8;
    collective->destination = engine->presence;
    collective->count = engine->presence_bytes;
    collective->reduce = PST_REDUCE_MAX;
    return pst__operation_submit(operation, engine->presence_bytes, NULL, 0);
}

static pst_status wait_all(pst_zero *engine) {
    const pst__queue *queue = pst__queue_of(engine, PST__REDUCE_LANE);
    for (pst__operation *operation = queue->oldest; operation != NULL;
         operation = operation->next) {
        pst_status status =
            pst__operation_wait(operation, "wait gradients", &engine->stats.exposed_reduce_ns);
        if (status != PST_OK) return status;
    }
    return pst_runtime_status(engine->runtime);
}

/* The host reads what the presence exchange wrote. */
static pst_status wait_presence(pst_zero *engine) {
    const pst__queue *queue = pst__queue_of(engine, PST__REDUCE_LANE);
    if (queue->newest == NULL || queue->oldest == NULL) return PST_OK;
    pst_launch launch = {engine->graph, 0};
    return pst__operation_lost(engine, pst_task_wait(launch, queue->newest->task, NULL));
}

static const pst__late *find_late(const pst_zero *engine, uint32_t group, uint32_t round) {
    for (size_t i = 0; i < engine->late_count; i++)
        if (engine->late[i].group == group && engine->late[i].round == round)
            return &engine->late[i];
    return NULL;
}

/* Every rank takes part for every group that came late anywhere. */
static pst_status reduce_round(pst_zero *engine, uint32_t round) {
    const unsigned char *late = engine->presence + engine->parameter_count + engine->group_count;
    for (size_t i = 0; i < engine->order.reduce_count; i++) {
        uint32_t index = engine->order.reduces[i];
        if (late[index] <= round) continue;
        const pst__late *own = find_late(engine, index, round);
        pst_status status = fill(engine, index, own == NULL ? NULL : own->sources,
                                 own == NULL ? engine->groups[index].reduce_dtype : own->dtype, 1);
        if (status != PST_OK) return status;
        if (own != NULL) consumed(engine, index);
    }
    return PST_OK;
}

static pst_status reduce_late(pst_zero *engine, uint32_t rounds) {
    pst_status status = PST_OK;
    if (rounds == 0) return PST_OK;
    if (rounds == MOST_LATE)
        status = pst__zero_fail(engine, PST_EUNSUPPORTED,
                                "a group's gradients were reported more than %u times in one "
                                "backward: report them less often",
                                MOST_LATE);
    for (uint32_t round = 0; status == PST_OK && round < rounds; round++)
        status = reduce_round(engine, round);
    if (status == PST_OK) status = flush_all(engine);
    status = give_up(engine, status);
    return status == PST_OK ? wait_all(engine) : status;
}

static void forget_late(pst_zero *engine) {
    for (size_t i = 0; i < engine->late_count; i++)
        pst__heap_free(engine->heap, engine->late[i].sources,
                       engine->late[i].source_count * sizeof(void *));
    engine->late_count = 0;
}

pst_status pst__reduce_end(pst_zero *engine) {
    pst_status status = drain(engine, 1);
    if (status == PST_OK) status = give_up(engine, flush_all(engine));
    if (status == PST_OK) status = give_up(engine, exchange_presence(engine));
    if (status == PST_OK) status = wait_all(engine);
    if (status == PST_OK) status = wait_presence(engine);
    if (status == PST_OK) status = reduce_late(engine, read_presence(engine));
    forget_late(engine);
    pst__operation_reap(engine);
    if (status == PST_OK) pst_buckets_trim(engine->buckets);
    return status;
}

void pst__reduce_abandon(pst_zero *engine) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__operation *operation = engine->open[dtype].operation;
        if (operation == NULL) continue;
        pst_bucket bucket;
        engine->open[dtype] = (pst__open_bucket){0};
        if (pst_buckets_flush(engine->buckets, (pst_dtype)dtype, &bucket) == PST_OK)
            pst_buckets_retire(engine->buckets, bucket.id, NULL);
        pst__operation_give(engine, operation);
    }
    for (; engine->reduced < engine->order.reduce_count; engine->reduced++) {
        uint32_t index = engine->order.reduces[engine->reduced];
        if (engine->groups[index].reported) consumed(engine, index);
    }
    for (size_t i = 0; i < engine->late_count; i++)
        consumed(engine, engine->late[i].group);
    forget_late(engine);
}
