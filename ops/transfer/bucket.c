#include "ops/transfer/bucket.h"

#include "ops/transfer/replicas.h"

/* ---- memory ---------------------------------------------------------------------------------- */

/* Peers may still read what a bucket has held. */
static pst_status refill(void *context, uint64_t id, pst_stream *stream) {
    pst__carrier *carrier = context;
    return pst__wait_readers(carrier, carrier->options.reduce_comm, stream,
                             carrier->bucket_tickets[id]);
}

pst_status pst__buckets_create(pst__carrier *carrier, pst_arena *arena, size_t chunk_bytes,
                               size_t per_dtype, int is_fixed) {
    pst_buckets_options options = {.size = sizeof options,
                                   .arena = arena,
                                   .ranks = carrier->world,
                                   .chunk_bytes = chunk_bytes,
                                   .alignment = PST__SLOT_ALIGNMENT,
                                   .per_dtype = per_dtype,
                                   .fixed = is_fixed,
                                   .refill = is_fixed ? refill : NULL,
                                   .refill_context = carrier};
    carrier->keeps_tickets = is_fixed;
    carrier->bucket_arena = arena;
    carrier->opened_bytes =
        per_dtype * pst__round_up(chunk_bytes * carrier->world, PST_ARENA_ALIGNMENT);
    return pst_buckets_create(carrier->runtime, &options, &carrier->buckets);
}

pst_status pst__buckets_open(pst__carrier *carrier, pst_dtype dtype) {
    pst_lease all;
    if (!carrier->keeps_tickets || carrier->has_opened[dtype]) return PST_OK;
    const pst_status status =
        pst__open_segment(carrier, carrier->bucket_arena, carrier->opened_bytes, &all);
    if (status != PST_OK) return status;
    pst_arena_release(carrier->bucket_arena, &all, NULL);
    carrier->has_opened[dtype] = 1;
    return PST_OK;
}

size_t pst__bucket_bytes(const pst__carrier *carrier) {
    pst_buckets_stats stats = {.size = sizeof stats};
    if (carrier->buckets != NULL) pst_buckets_get_stats(carrier->buckets, &stats);
    return stats.bytes;
}

size_t pst__bucket_held(pst__carrier *carrier) {
    size_t count = 0;
    const pst__operation *operation = pst__queue_of(carrier, PST__REDUCE_LANE)->holding;
    for (; operation != NULL; operation = operation->next)
        count += (size_t)operation->has_bucket;
    return count;
}

pst_status pst__bucket_wait(pst__carrier *carrier) {
    pst__operation *operation = pst__queue_of(carrier, PST__REDUCE_LANE)->holding;
    while (operation != NULL && !operation->has_bucket)
        operation = operation->next;
    pst_status status = operation == NULL ? PST_ESTATE : pst__operation_wait_launch(operation);
    pst__operation_reap(carrier);
    return status;
}

/* ---- coming in ------------------------------------------------------------------------------- */

pst_status pst__bucket_begin(pst__carrier *carrier, pst_dtype dtype) {
    pst__open_bucket *open = &carrier->open[dtype];
    if (open->operation != NULL) return PST_OK;
    const pst_status status = pst__operation_take(carrier, PST__REDUCE_LANE, &open->operation);
    if (status == PST_OK) open->number = ++carrier->bucket_count;
    return status;
}

pst_dtype pst__bucket_of(const pst__carrier *carrier, const pst__target *target) {
    int dtype = 0;
    while (dtype < PST_DTYPE_COUNT &&
           (carrier->open[dtype].number == 0 || carrier->open[dtype].number != target->bucket))
        dtype++;
    return (pst_dtype)dtype;
}

pst_status pst__bucket_slot(pst__carrier *carrier, pst_dtype dtype, size_t bytes,
                            pst_status (*flush)(void *context, pst_dtype dtype), void *context,
                            pst_slot *slot) {
    for (;;) {
        pst_status status =
            pst_buckets_slot(carrier->buckets, dtype, bytes, carrier->filling.stream, slot);
        if (status == PST_EBUSY)
            status = flush(context, dtype);
        else if (status == PST_PENDING)
            status = pst__bucket_wait(carrier);
        else if (status == PST_OK)
            break;
        if (status != PST_OK) return status;
    }
    const pst_status status = pst__bucket_begin(carrier, dtype);
    carrier->open[dtype].has_slots = status == PST_OK;
    return status;
}

pst_status pst__bucket_deliver(pst__operation *operation, const pst__target *target, size_t first,
                               size_t count, size_t offset) {
    return pst__operation_add_piece(
        operation, &(pst_reduce_piece){.offset = offset,
                                       .count = count,
                                       .destination = pst__target_at(target, first),
                                       .destination_dtype = target->dtype,
                                       .accumulate = target->adds});
}

/* ---- going out ------------------------------------------------------------------------------- */

pst_status pst__bucket_close(pst__carrier *carrier, pst_dtype dtype, pst_bucket *bucket) {
    pst__open_bucket *open = &carrier->open[dtype];
    const pst_status status = pst_buckets_flush(carrier->buckets, dtype, bucket);
    if (status != PST_OK) return status;
    open->has_slots = 0;
    open->operation->bucket = bucket->id;
    open->operation->has_bucket = 1;
    return PST_OK;
}

void pst__bucket_describe(pst__operation *operation, const pst_bucket *bucket, const char *name,
                          double scale) {
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_REDUCE_SCATTER;
    collective->name = name;
    collective->dtype = bucket->dtype;
    collective->source = bucket->memory;
    collective->source_bytes = bucket->used_bytes;
    collective->stride = bucket->stride;
    collective->pieces = operation->pieces;
    collective->updates = operation->updates.pieces;
    collective->scale = scale;
    operation->wait_name = PST__WAIT_GRADIENTS;
}

static pst_status record_ready(const pst__operation *operation, pst_stream *stream) {
    pst_device *device = operation->carrier->device;
    return device->ops->event_record(device, operation->ready, stream);
}

/* Behind the copies into the bucket, and the last use of memory for its sums. */
static pst_status submit_within(pst__operation *operation, const pst__operation *across,
                                size_t bytes) {
    pst__carrier *carrier = operation->carrier;
    pst_event *after[1 + PST_LEASE_EVENTS] = {operation->ready};
    size_t count = 1;
    for (size_t i = 0; across != NULL && i < across->summed.after_count; i++)
        after[count++] = across->summed.after[i];
    const pst_status status = pst__operation_submit(operation, bytes, after, count);
    if (status == PST_OK && carrier->keeps_tickets)
        carrier->bucket_tickets[operation->bucket] = operation->work.collective.ticket;
    return status;
}

static pst_status submit_across(pst__operation *across, const pst__operation *within) {
    const pst_collective *sums = &across->work.collective;
    return pst__operation_submit_behind(across, within, sums->count * pst_dtype_size(sums->dtype));
}

pst_status pst__bucket_submit(pst__carrier *carrier, pst_dtype dtype) {
    const pst__open_bucket open = carrier->open[dtype];
    pst__operation *operation = open.operation, *across = NULL;
    carrier->open[dtype] = (pst__open_bucket){0};
    pst_status status = carrier->replicas > 1 ? pst__replicas_split(operation, &across) : PST_OK;
    if (status == PST_OK) status = record_ready(operation, carrier->filling.stream);
    if (status != PST_OK)
        pst__operation_give(carrier, operation);
    else
        status = submit_within(operation, across, open.whole_bytes);
    if (across == NULL) return status;
    if (status == PST_OK) return submit_across(across, operation);
    pst__operation_give(carrier, across);
    return status;
}

pst_status pst__bucket_send(pst__carrier *carrier, pst_dtype dtype, const char *name) {
    pst_bucket bucket;
    const pst_status status = pst__bucket_close(carrier, dtype, &bucket);
    if (status != PST_OK) return status;
    /* The sums are in fp32. */
    pst__bucket_describe(carrier->open[dtype].operation, &bucket, name,
                         1.0 / (double)pst__carrier_ranks(carrier));
    return pst__bucket_submit(carrier, dtype);
}

/* ---- landing --------------------------------------------------------------------------------- */

int pst__bucket_pushes(const pst__carrier *carrier) {
    return carrier->keeps_tickets && carrier->replicas == 1 &&
           carrier->options.reduce_comm->ops->pushes;
}

static pst_status take(pst__carrier *carrier, pst_dtype dtype, size_t bytes, pst_bucket *bucket) {
    pst_stream *stream = carrier->filling.landing;
    pst_status status = pst_buckets_take(carrier->buckets, dtype, bytes, stream, bucket);
    while (status == PST_PENDING) {
        status = pst__bucket_wait(carrier);
        if (status == PST_OK)
            status = pst_buckets_take(carrier->buckets, dtype, bytes, stream, bucket);
    }
    return status;
}

pst_status pst__bucket_land(pst__operation *operation, pst_dtype dtype, size_t bytes) {
    pst__carrier *carrier = operation->carrier;
    pst_collective *collective = &operation->work.collective;
    pst_bucket bucket;
    pst_status status = pst__fill_land(carrier);
    if (status == PST_OK) status = take(carrier, dtype, bytes, &bucket);
    if (status != PST_OK) return status;
    operation->bucket = bucket.id;
    operation->has_bucket = 1;
    operation->wait_name = PST__WAIT_GRADIENTS;
    collective->kind = PST_REDUCE_SCATTER;
    collective->is_pushed = 1;
    collective->dtype = dtype;
    collective->source_bytes = bytes;
    collective->staging = bucket.memory;
    collective->scale = 1.0 / (double)pst__carrier_ranks(carrier);
    return PST_OK;
}

pst_status pst__bucket_push(pst__operation *operation) {
    pst__carrier *carrier = operation->carrier;
    pst_collective *collective = &operation->work.collective;
    carrier->is_pushed_to = 1;
    collective->pieces = operation->pieces;
    collective->updates = operation->updates.pieces;
    const pst_status status = record_ready(operation, carrier->filling.landing);
    if (status == PST_OK)
        return submit_within(operation, NULL, collective->source_bytes * carrier->world);
    pst__operation_give(carrier, operation);
    return status;
}

/* ---- nowhere --------------------------------------------------------------------------------- */

void pst__bucket_deliver_nothing(pst__carrier *carrier) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__operation *operation = carrier->open[dtype].operation;
        if (operation != NULL)
            operation->work.collective.piece_count = operation->updates.count =
                operation->copies.count = 0;
    }
}

void pst__bucket_abandon_all(pst__carrier *carrier) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__open_bucket *open = &carrier->open[dtype];
        pst_bucket bucket;
        if (open->has_slots) (void)pst__bucket_close(carrier, (pst_dtype)dtype, &bucket);
        if (open->operation != NULL) pst__operation_give(carrier, open->operation);
        *open = (pst__open_bucket){0};
    }
}
