/* Gradients on their way out: a bucket of each dtype fills, and goes out as one reduce-scatter.
 * What is larger than part_bytes goes in parts, so that it needs no bucket of its size. */
#include "ops/engine.h"
#include "ops/operation.h"

static void note_written(pst_zero *engine, pst_dtype dtype) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        if (!group->is_filled || group->reduce_dtype != dtype) continue;
        group->is_filled = 0;
        group->is_written = 1;
    }
}

static pst_status flush(void *context, pst_dtype dtype) {
    pst_zero *engine = context;
    pst__open_bucket *open = &engine->open[dtype];
    pst__operation *operation = open->operation;
    if (operation == NULL) return PST_OK;
    pst_bucket bucket;
    pst_status status = pst_buckets_flush(engine->buckets, dtype, &bucket);
    if (status == PST_OK)
        status = engine->device->ops->event_record(engine->device, operation->ready,
                                                   engine->filling.stream);
    if (status != PST_OK) return status;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_REDUCE_SCATTER;
    collective->name = engine->bucket_names[dtype];
    collective->dtype = dtype;
    collective->source = bucket.memory;
    collective->source_bytes = bucket.used_bytes;
    collective->stride = bucket.stride;
    collective->pieces = operation->pieces;
    collective->scale = 1.0 / (double)engine->world; /* the sums are in fp32 */
    operation->bucket = bucket.id;
    operation->has_bucket = 1;
    size_t bytes = open->whole_bytes;
    *open = (pst__open_bucket){0};
    status = pst__operation_submit(operation, bytes, &operation->ready, 1);
    if (status != PST_OK) return status;
    note_written(engine, dtype);
    if (engine->asynchronous) engine->bucket_tickets[bucket.id] = collective->ticket;
    engine->stats.reduces++;
    engine->stats.reduce_bytes += bytes;
    return PST_OK;
}

pst_status pst__bucket_flush_all(pst_zero *engine) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = flush(engine, (pst_dtype)dtype);
    return status;
}

void pst__bucket_deliver_nothing(pst_zero *engine) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        if (engine->open[dtype].operation != NULL)
            engine->open[dtype].operation->work.collective.piece_count = 0;
}

void pst__bucket_abandon_all(pst_zero *engine) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__operation *operation = engine->open[dtype].operation;
        if (operation == NULL) continue;
        pst_bucket bucket;
        engine->open[dtype] = (pst__open_bucket){0};
        if (pst_buckets_flush(engine->buckets, (pst_dtype)dtype, &bucket) == PST_OK)
            pst_buckets_retire(engine->buckets, bucket.id, NULL);
        pst__operation_give(engine, operation);
    }
}

/* ---- filling --------------------------------------------------------------------------------- */

static void note_bucket_bytes(pst_zero *engine) {
    pst_buckets_stats stats = {.size = sizeof stats};
    pst_buckets_get_stats(engine->buckets, &stats);
    if (stats.bytes > engine->stats.bucket_peak) engine->stats.bucket_peak = stats.bytes;
}

static pst_status wait_for_bucket(pst_zero *engine) {
    pst__operation *operation = pst__queue_of(engine, PST__REDUCE_LANE)->holding;
    while (operation != NULL && !operation->has_bucket)
        operation = operation->next;
    pst_status status = operation == NULL ? PST_ESTATE : pst__operation_wait_launch(operation);
    pst__operation_reap(engine);
    return status;
}

pst_status pst__bucket_slot(pst_zero *engine, pst_dtype dtype, size_t bytes,
                            pst_status (*flush)(void *context, pst_dtype dtype), void *context,
                            pst_slot *slot) {
    for (;;) {
        pst_status status =
            pst_buckets_slot(engine->buckets, dtype, bytes, engine->filling.stream, slot);
        if (status == PST_EBUSY)
            status = flush(context, dtype);
        else if (status == PST_PENDING)
            status = wait_for_bucket(engine);
        else
            return status;
        if (status != PST_OK) return status;
    }
}

size_t pst__part_elements(const pst_zero *engine, const pst__group *group) {
    size_t bytes = engine->options.part_bytes / PST_ZERO_ALIGNMENT * PST_ZERO_ALIGNMENT;
    size_t most = bytes / group->layout.reduce_element_bytes;
    return most < group->layout.gradient_elements ? most : group->layout.gradient_elements;
}

static pst_status add_piece(pst_zero *engine, pst__group *group, pst__part part,
                            const pst_slot *slot, int accumulate) {
    pst__open_bucket *open = &engine->open[group->reduce_dtype];
    pst__operation *operation = open->operation;
    size_t count = operation->work.collective.piece_count;
    if (part.first == 0) open->whole_bytes += group->layout.gradient_bytes_whole;
    if (group->target == NULL) return PST_OK;
    pst_status status =
        pst__heap_grow(engine->heap, (void **)&operation->pieces, &operation->piece_capacity,
                       count + 1, sizeof *operation->pieces);
    if (status != PST_OK)
        return pst__zero_fail(engine, status, "group '%s': no memory to reduce it", group->name);
    char *target = (char *)group->target + part.first * group->layout.element_bytes;
    operation->pieces[count] = (pst_reduce_piece){.offset = slot->offset,
                                                  .count = part.count,
                                                  .destination = target,
                                                  .destination_dtype = group->dtype,
                                                  .accumulate = accumulate};
    operation->work.collective.piece_count++;
    group->is_filled = 1;
    return PST_OK;
}

static pst_status copy_in(pst_zero *engine, const pst__group *group, pst__part part,
                          const pst_slot *slot, const void *const *sources, pst_dtype dtype) {
    pst_device *device = engine->device;
    size_t count =
        pst__layout_casts(&group->layout, engine->world, part, slot->memory, slot->stride, sources,
                          dtype, group->reduce_dtype, engine->casts);
    pst_status status =
        device->ops->cast_scale_copy(device, engine->filling.stream, engine->casts, count, 1.0);
    if (status == PST_OK) return PST_OK;
    return pst__zero_fail(engine, status, "group '%s': copying its %s gradients failed",
                          group->name, pst_dtype_name(dtype));
}

static pst_status fill_part(pst_zero *engine, pst__group *group, pst__part part,
                            const void *const *sources, pst_dtype dtype, int accumulate) {
    pst_slot slot;
    pst__open_bucket *open = &engine->open[group->reduce_dtype];
    pst_status status =
        pst__bucket_slot(engine, group->reduce_dtype,
                         part.count * pst_dtype_size(group->reduce_dtype), flush, engine, &slot);
    if (status == PST_OK && open->operation == NULL)
        status = pst__operation_take(engine, PST__REDUCE_LANE, &open->operation);
    if (status == PST_OK) status = add_piece(engine, group, part, &slot, accumulate);
    if (status != PST_OK) return status;
    note_bucket_bytes(engine);
    status = copy_in(engine, group, part, &slot, sources, dtype);
    if (status != PST_OK || slot.offset + slot.padded_bytes < engine->options.bucket_bytes)
        return status;
    return flush(engine, group->reduce_dtype);
}

pst_status pst__bucket_fill(pst_zero *engine, uint32_t index, const void *const *sources,
                            pst_dtype dtype, int accumulate) {
    pst__group *group = &engine->groups[index];
    size_t most = pst__part_elements(engine, group), left = group->layout.gradient_elements;
    pst_status status = pst__fill_begin(engine);
    for (pst__part part = {0, 0}; status == PST_OK && left > 0; left -= part.count) {
        part.first += part.count;
        part.count = left < most ? left : most;
        status = fill_part(engine, group, part, sources, dtype, accumulate);
    }
    if (status == PST_OK) status = pst__fill_end(engine);
    if (status != PST_OK) return status;
    return pst__record(engine, PST_ZERO_REDUCE, index, group->layout.gradient_bytes_whole);
}
