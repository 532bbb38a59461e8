/* A bucket of gradients on its way into partitions: which way it goes, and where what lies in it.
 * All gradients are copied into it in one launch, on asynchronous devices beside compute. */
#include "ops/partition.h"

/* ---- where the pieces of a bucket lie -------------------------------------------------------- */

/* The part of a range that another one holds. */
static pst__range meet(pst__range a, pst__range b) {
    size_t first = a.first > b.first ? a.first : b.first;
    size_t a_end = a.first + a.count, b_end = b.first + b.count;
    size_t end = a_end < b_end ? a_end : b_end;
    return (pst__range){first, end > first ? end - first : 0};
}

/* A bucket that is being put together. */
typedef struct bucket_plan {
    pst_partition *partition;
    pst__operation *operation;
    pst_dtype dtype;
    int by_reduce_scatter;
    char *memory;
    size_t stride; /* by reduce-scatter: from one rank's chunk to the next */
} bucket_plan;

static pst_status add_cast(pst_partition *partition, pst_cast cast) {
    pst_status status =
        pst__heap_grow(partition->engine->heap, (void **)&partition->casts,
                       &partition->cast_capacity, partition->cast_count + 1, sizeof(pst_cast));
    if (status == PST_OK) partition->casts[partition->cast_count++] = cast;
    return status;
}

/* A part of an entry, and zeros behind it up to the alignment, at `offset` of the bucket. */
static pst_status copy_in(const bucket_plan *plan, const pst__entry *entry, pst__range part,
                          size_t offset) {
    char *destination = plan->memory + offset;
    size_t skipped = (part.first - entry->range.first) * pst_dtype_size(entry->source_dtype);
    size_t bytes = part.count * pst_dtype_size(plan->dtype);
    size_t gap = pst__padded(part.count, plan->dtype) - bytes;
    pst_status status =
        add_cast(plan->partition, (pst_cast){destination, (const char *)entry->source + skipped,
                                             part.count, plan->dtype, entry->source_dtype});
    if (status != PST_OK || gap == 0) return status;
    return add_cast(plan->partition,
                    (pst_cast){destination + bytes, NULL, gap, PST_UINT8, PST_UINT8});
}

static pst_status add_piece(pst__operation *operation, pst_reduce_piece piece) {
    size_t *count = &operation->work.collective.piece_count;
    pst_status status =
        pst__heap_grow(operation->engine->heap, (void **)&operation->pieces,
                       &operation->piece_capacity, *count + 1, sizeof *operation->pieces);
    if (status == PST_OK) operation->pieces[(*count)++] = piece;
    return status;
}

static pst_status add_delivery(pst__operation *operation, pst_cast cast) {
    pst_status status =
        pst__heap_grow(operation->engine->heap, (void **)&operation->casts,
                       &operation->cast_capacity, operation->cast_count + 1, sizeof(pst_cast));
    if (status == PST_OK) operation->casts[operation->cast_count++] = cast;
    return status;
}

/* What this rank gets of a part that lies at `offset` of the bucket, or of its chunk. After an
 * all-reduce it is copied out of the bucket, and added there where it accumulates. */
static pst_status take_out(const bucket_plan *plan, const pst__entry *entry, pst__range part,
                           size_t offset) {
    const pst__split *split = &plan->partition->splits[entry->parameter];
    pst__range mine = meet(part, split->own);
    if (mine.count == 0 || split->target == NULL) return PST_OK;
    offset += (mine.first - part.first) * pst_dtype_size(plan->dtype);
    char *target =
        (char *)split->target + (mine.first - split->own.first) * pst_dtype_size(split->dtype);
    if (!plan->by_reduce_scatter && !entry->accumulate)
        return add_delivery(plan->operation, (pst_cast){target, plan->memory + offset, mine.count,
                                                        split->dtype, plan->dtype});
    return add_piece(plan->operation, (pst_reduce_piece){.offset = offset,
                                                         .count = mine.count,
                                                         .destination = target,
                                                         .destination_dtype = split->dtype,
                                                         .accumulate = entry->accumulate});
}

/* ---- which way ------------------------------------------------------------------------------- */

/* Bytes of the largest chunk of a reduce-scatter. */
static size_t largest_chunk(pst_partition *partition, const pst__pending *pending,
                            pst_dtype dtype) {
    size_t largest = 0, *used = partition->chunk_used;
    for (size_t rank = 0; rank < partition->engine->world; rank++)
        used[rank] = 0;
    for (size_t i = 0; i < pending->count; i++) {
        const pst__split *split = &partition->splits[pending->entries[i].parameter];
        for (size_t j = 0; j < split->owner_count; j++) {
            const pst__owner *owner = &partition->owners[split->first_owner + j];
            pst__range part = meet(pending->entries[i].range, owner->range);
            if (part.count > 0) used[owner->rank] += pst__padded(part.count, dtype);
            if (used[owner->rank] > largest) largest = used[owner->rank];
        }
    }
    return largest;
}

/* A reduce-scatter takes each link world - 1 times the largest chunk, an all-reduce 2 (world - 1) /
 * world times the bucket. Half as much again as an even reduce-scatter is the limit: it bounds the
 * bucket's memory, too. */
static int is_even(const pst_partition *partition, size_t largest, size_t bytes) {
    const pst_comm *comm = partition->options.comm;
    if (partition->is_opened && largest > partition->chunk_bytes) return 0;
    if (partition->options.route != PST_PARTITION_AUTO)
        return partition->options.route == PST_PARTITION_REDUCE_SCATTER;
    if ((comm->ops->kinds & 1u << PST_ALL_REDUCE) == 0) return 1;
    if ((comm->ops->kinds & 1u << PST_REDUCE_SCATTER) == 0) return 0;
    return 2 * largest * partition->engine->world <= 3 * bytes;
}

static pst_status name_unowned(pst_partition *partition, const pst__pending *pending) {
    for (size_t i = 0; i < pending->count; i++) {
        const pst__split *split = &partition->splits[pending->entries[i].parameter];
        if (split->owner_count == 0)
            return pst__partition_fail(partition, PST_EINVAL,
                                       "parameter '%s' has a gradient, but no rank has bound it",
                                       split->name);
    }
    return PST_OK;
}

/* ---- going out ------------------------------------------------------------------------------- */

/* At most two buckets are in use, or one: the host waits for the launch of an older one, and the
 * device for its end. */
static pst_status wait_for_bucket(const pst_partition *partition) {
    pst_zero *engine = partition->engine;
    const size_t most = partition->options.single_buffer ? 1 : 2;
    for (;;) {
        pst__operation *oldest = NULL;
        size_t held = 0;
        pst__operation_reap(engine);
        for (pst__operation *found = engine->queues[PST__GATHER_LANE].holding; found != NULL;
             found = found->next) {
            if (found->has_bucket && oldest == NULL) oldest = found;
            held += (size_t)found->has_bucket;
        }
        if (held < most) return PST_OK;
        pst_status status = pst__operation_wait_launch(oldest);
        if (status != PST_OK) return status;
    }
}

static void note_memory(pst_partition *partition) {
    pst_buckets_stats stats = {.size = sizeof stats};
    pst_buckets_get_stats(partition->engine->buckets, &stats);
    if (stats.bytes > partition->stats.bucket_peak) partition->stats.bucket_peak = stats.bytes;
}

/* The two buckets of a dtype, where peers can read them: at the same place on all ranks, since all
 * of them come here for the same dtype. */
static pst_status open_buckets(pst_partition *partition, pst_dtype dtype) {
    pst_comm *comm = partition->options.comm;
    const size_t each = partition->chunk_bytes * partition->engine->world;
    const size_t bytes = 2 * pst__round_up(each, PST_ARENA_ALIGNMENT);
    pst_lease both;
    if (!partition->is_opened || partition->has_memory[dtype]) return PST_OK;
    pst_status status = pst_arena_acquire(partition->memory,
                                          pst__zero_opened_bytes(partition->engine, bytes), &both);
    if (status != PST_OK) return status;
    pst_arena_release(partition->memory, &both, NULL);
    partition->has_memory[dtype] = 1;
    status = comm->ops->open_memory(comm, both.memory, both.bytes);
    if (status == PST_OK) return PST_OK;
    return pst__partition_fail(partition, status, "opening %zu bytes to the peers failed: %s",
                               both.bytes, comm->ops->error_text(comm));
}

static pst_status take_bucket(bucket_plan *plan, size_t chunk_bytes, pst_bucket *bucket) {
    pst_partition *partition = plan->partition;
    pst_zero *engine = partition->engine;
    pst_slot slot;
    pst_status status = open_buckets(partition, plan->dtype);
    if (status == PST_OK) status = wait_for_bucket(partition);
    if (status == PST_OK)
        status = pst_buckets_slot(engine->buckets, plan->dtype, chunk_bytes, engine->filling.stream,
                                  &slot);
    if (status == PST_OK) status = pst_buckets_flush(engine->buckets, plan->dtype, bucket);
    if (status != PST_OK) return status;
    plan->operation->bucket = bucket->id;
    plan->operation->has_bucket = 1;
    plan->memory = bucket->memory;
    plan->stride = bucket->stride;
    note_memory(partition);
    return PST_OK;
}

/* By reduce-scatter: the parts of each rank go into its chunk. */
static pst_status place_in_chunks(const bucket_plan *plan, const pst__pending *pending) {
    pst_partition *partition = plan->partition;
    size_t *used = partition->chunk_used;
    pst_status status = PST_OK;
    for (size_t rank = 0; rank < partition->engine->world; rank++)
        used[rank] = 0;
    for (size_t i = 0; i < pending->count; i++) {
        const pst__entry *entry = &pending->entries[i];
        const pst__split *split = &partition->splits[entry->parameter];
        for (size_t j = 0; status == PST_OK && j < split->owner_count; j++) {
            const pst__owner *owner = &partition->owners[split->first_owner + j];
            pst__range part = meet(entry->range, owner->range);
            size_t offset = used[owner->rank];
            if (part.count == 0) continue;
            status = copy_in(plan, entry, part, owner->rank * plan->stride + offset);
            if (status == PST_OK && owner->rank == partition->engine->rank)
                status = take_out(plan, entry, part, offset);
            used[owner->rank] += pst__padded(part.count, plan->dtype);
        }
    }
    return status;
}

static pst_status place_in_a_row(const bucket_plan *plan, const pst__pending *pending) {
    pst_status status = PST_OK;
    size_t offset = 0;
    for (size_t i = 0; status == PST_OK && i < pending->count; i++) {
        const pst__entry *entry = &pending->entries[i];
        status = copy_in(plan, entry, entry->range, offset);
        if (status == PST_OK) status = take_out(plan, entry, entry->range, offset);
        offset += pst__padded(entry->range.count, plan->dtype);
    }
    return status;
}

/* What this rank owns leaves the bucket behind the all-reduce. */
static pst_status deliver(pst__operation *operation, pst_stream *stream) {
    pst_device *device = operation->engine->device;
    const pst_collective *collective = &operation->work.collective;
    pst_status status = PST_OK;
    if (operation->cast_count > 0)
        status = device->ops->cast_scale_copy(device, stream, operation->casts,
                                              operation->cast_count, 1.0);
    for (size_t i = 0; status == PST_OK && i < collective->piece_count; i++) {
        const pst_reduce_piece *piece = &operation->pieces[i];
        const void *source = (const char *)collective->destination + piece->offset;
        pst_sum sum = {.destination = piece->destination,
                       .sources = &source,
                       .source_count = 1,
                       .count = piece->count,
                       .scale = 1.0,
                       .accumulate = piece->accumulate,
                       .destination_dtype = piece->destination_dtype,
                       .source_dtype = collective->dtype};
        status = device->ops->sum(device, stream, &sum);
    }
    return status;
}

static void describe(const bucket_plan *plan, const pst__pending *pending, size_t chunk_bytes) {
    pst_collective *collective = &plan->operation->work.collective;
    collective->name = plan->partition->splits[pending->entries[0].parameter].name;
    collective->dtype = plan->dtype;
    collective->scale = 1.0;
    if (plan->by_reduce_scatter) {
        collective->kind = PST_REDUCE_SCATTER;
        collective->source = plan->memory;
        collective->source_bytes = chunk_bytes;
        collective->stride = plan->stride;
        collective->pieces = plan->operation->pieces;
        return;
    }
    collective->kind = PST_ALL_REDUCE;
    collective->destination = plan->memory;
    collective->count = pending->bytes / pst_dtype_size(plan->dtype);
    plan->operation->then = deliver;
}

static pst_status fill(bucket_plan *plan, const pst__pending *pending, size_t chunk_bytes) {
    pst_partition *partition = plan->partition;
    pst_zero *engine = partition->engine;
    pst_bucket bucket;
    pst_status status = take_bucket(plan, chunk_bytes, &bucket);
    if (status != PST_OK) return status;
    partition->cast_count = 0;
    status =
        plan->by_reduce_scatter ? place_in_chunks(plan, pending) : place_in_a_row(plan, pending);
    if (status == PST_ENOMEM)
        return pst__partition_fail(partition, status, "%s", "no memory to reduce gradients");
    if (status != PST_OK) return status;
    status = engine->device->ops->cast_scale_copy(engine->device, engine->filling.stream,
                                                  partition->casts, partition->cast_count,
                                                  1.0 / (double)engine->world);
    if (status != PST_OK)
        return pst__partition_fail(partition, status, "copying gradients into a %s bucket failed",
                                   pst_dtype_name(plan->dtype));
    describe(plan, pending, chunk_bytes);
    return engine->device->ops->event_record(engine->device, plan->operation->ready,
                                             engine->filling.stream);
}

static int accumulates(const pst__pending *pending) {
    for (size_t i = 0; i < pending->count; i++)
        if (pending->entries[i].accumulate) return 1;
    return 0;
}

/* A reduce-scatter adds to what an all-reduce before it has maybe not delivered yet, if that has a
 * lane of its own. */
static pst_status wait_for_deliveries(const bucket_plan *plan, const pst__pending *pending) {
    const pst_partition *partition = plan->partition;
    pst_zero *engine = partition->engine;
    pst__queue *queue = &engine->queues[PST__GATHER_LANE];
    pst_status status = PST_OK;
    if (!plan->by_reduce_scatter || !accumulates(pending)) return PST_OK;
    if (queue->then_lane == queue->lane || queue->then_lane == queue->sum_lane) return PST_OK;
    for (pst__operation *found = queue->oldest; status == PST_OK && found != NULL;
         found = found->next) {
        if (found->then == NULL) continue;
        status = pst__operation_wait_launch(found);
        if (status == PST_OK)
            status = engine->device->ops->stream_wait(engine->device, engine->filling.stream,
                                                      found->finished);
    }
    return status;
}

static pst_status submit(bucket_plan *plan, const pst__pending *pending, size_t chunk_bytes) {
    pst_partition *partition = plan->partition;
    pst_status status = pst__operation_take(partition->engine, PST__REDUCE_LANE, &plan->operation);
    if (status != PST_OK) return status;
    status = pst__fill_begin(partition->engine);
    if (status == PST_OK) status = wait_for_deliveries(plan, pending);
    if (status == PST_OK) status = fill(plan, pending, chunk_bytes);
    if (status == PST_OK) status = pst__fill_end(partition->engine);
    if (status != PST_OK) {
        pst__operation_give(partition->engine, plan->operation);
        return status;
    }
    status = pst__operation_submit(plan->operation, pending->bytes, &plan->operation->ready, 1);
    if (status != PST_OK) return status;
    if (partition->is_opened)
        partition->bucket_tickets[plan->operation->bucket] =
            plan->operation->work.collective.ticket;
    partition->stats.reductions++;
    partition->stats.by_reduce_scatter += (uint64_t)plan->by_reduce_scatter;
    partition->stats.bytes += pending->bytes;
    return PST_OK;
}

pst_status pst__bucket_send(pst_partition *partition, const pst__pending *pending,
                            pst_dtype dtype) {
    const size_t world = partition->engine->world;
    bucket_plan plan = {.partition = partition, .dtype = dtype};
    pst_status status = partition->is_compared ? PST_OK : pst__owners_compare(partition);
    if (status == PST_OK) status = name_unowned(partition, pending);
    if (status != PST_OK) return status;
    size_t largest = largest_chunk(partition, pending, dtype);
    size_t even = pst__round_up((pending->bytes + world - 1) / world, PST_ZERO_ALIGNMENT);
    plan.by_reduce_scatter = is_even(partition, largest, pending->bytes);
    return submit(&plan, pending, plan.by_reduce_scatter ? largest : even);
}
