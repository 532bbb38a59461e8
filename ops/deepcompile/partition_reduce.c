/* Gradients on their way into partitions: they wait until they fill a bucket (one that is larger
 * than what is left is cut); which way a bucket goes, and where what lies in it. All gradients are
 * copied into it in one launch, on asynchronous devices beside compute. */
#include "ops/deepcompile/partition.h"

/* Bytes of so many elements in a bucket. */
static size_t padded(size_t count, pst_dtype dtype) {
    return pst__round_up(count * pst_dtype_size(dtype), PST__SLOT_ALIGNMENT);
}

/* ---- where the pieces of a bucket lie -------------------------------------------------------- */

/* The part of a range that another one holds. */
static pst__partition_range meet(pst__partition_range a, pst__partition_range b) {
    size_t first = a.first > b.first ? a.first : b.first;
    size_t a_end = a.first + a.count, b_end = b.first + b.count;
    size_t end = a_end < b_end ? a_end : b_end;
    return (pst__partition_range){first, end > first ? end - first : 0};
}

/* A bucket that is being put together. */
typedef struct bucket_plan {
    pst_partition *partition;
    pst__operation *operation;
    pst_dtype dtype;
    int by_reduce_scatter;
    size_t bytes; /* of all pieces */
    pst_bucket bucket;
} bucket_plan;

/* A part of an entry, and zeros behind it up to the alignment, at `offset` of the bucket. */
static pst_status copy_in(const bucket_plan *plan, const pst__partition_entry *entry,
                          pst__partition_range part, size_t offset) {
    const pst__heap *heap = plan->partition->carrier.heap;
    pst__casts *casts = &plan->partition->casts;
    char *destination = (char *)plan->bucket.memory + offset;
    size_t skipped = (part.first - entry->range.first) * pst_dtype_size(entry->source_dtype);
    size_t bytes = part.count * pst_dtype_size(plan->dtype);
    size_t gap = padded(part.count, plan->dtype) - bytes;
    pst_status status =
        pst__casts_add(heap, casts,
                       (pst_cast){destination, (const char *)entry->source + skipped, part.count,
                                  plan->dtype, entry->source_dtype});
    if (status != PST_OK || gap == 0) return status;
    return pst__casts_add(heap, casts,
                          (pst_cast){destination + bytes, NULL, gap, PST_UINT8, PST_UINT8});
}

/* What this rank gets of a part that lies at `offset` of the bucket, or of its chunk. After an
 * all-reduce it is copied out of the bucket, and added there where it accumulates. */
static pst_status take_out(const bucket_plan *plan, const pst__partition_entry *entry,
                           pst__partition_range part, size_t offset) {
    const pst__partition_parameter *parameter = &plan->partition->parameters[entry->parameter];
    pst__partition_range mine = meet(part, parameter->own);
    if (mine.count == 0 || parameter->target.memory == NULL) return PST_OK;
    const pst__target *target = &parameter->target;
    const size_t first = mine.first - parameter->own.first;
    offset += (mine.first - part.first) * pst_dtype_size(plan->dtype);
    if (plan->by_reduce_scatter || target->adds)
        return pst__bucket_deliver(plan->operation, target, first, mine.count, offset);
    return pst__casts_add(plan->partition->carrier.heap, &plan->operation->casts,
                          (pst_cast){pst__target_at(target, first),
                                     (char *)plan->bucket.memory + offset, mine.count,
                                     target->dtype, plan->dtype});
}

/* ---- which way ------------------------------------------------------------------------------- */

/* Bytes of the largest chunk of a reduce-scatter. */
static size_t largest_chunk(pst_partition *partition, const pst__partition_pending *pending,
                            pst_dtype dtype) {
    size_t largest = 0, *used = partition->chunk_used;
    for (size_t rank = 0; rank < partition->carrier.world; rank++)
        used[rank] = 0;
    for (size_t i = 0; i < pending->count; i++) {
        const pst__partition_parameter *parameter =
            &partition->parameters[pending->entries[i].parameter];
        for (size_t j = 0; j < parameter->owner_count; j++) {
            const pst__partition_owner *owner = &partition->owners[parameter->first_owner + j];
            pst__partition_range part = meet(pending->entries[i].range, owner->range);
            if (part.count > 0) used[owner->rank] += padded(part.count, dtype);
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
    return 2 * largest * partition->carrier.world <= 3 * bytes;
}

static pst_status name_unowned(pst_partition *partition, const pst__partition_pending *pending) {
    for (size_t i = 0; i < pending->count; i++) {
        const pst__partition_parameter *parameter =
            &partition->parameters[pending->entries[i].parameter];
        if (parameter->owner_count == 0)
            return pst__partition_fail(partition, PST_EINVAL,
                                       "parameter '%s' has a gradient, but no rank has bound it",
                                       parameter->name);
    }
    return PST_OK;
}

/* ---- going out ------------------------------------------------------------------------------- */

/* At most two buckets are in use, or one: the host waits for the launch of an older one, and the
 * device for its end. */
static pst_status wait_for_bucket(pst_partition *partition) {
    const size_t most = partition->options.single_buffer ? 1 : 2;
    pst_status status = PST_OK;
    pst__operation_reap(&partition->carrier);
    while (status == PST_OK && pst__bucket_held(&partition->carrier) >= most)
        status = pst__bucket_wait(&partition->carrier);
    return status;
}

static void note_memory(pst_partition *partition) {
    const size_t bytes = pst__bucket_bytes(&partition->carrier);
    if (bytes > partition->stats.bucket_peak) partition->stats.bucket_peak = bytes;
}

static pst_status take_bucket(bucket_plan *plan, size_t chunk_bytes) {
    pst_partition *partition = plan->partition;
    pst__carrier *carrier = &partition->carrier;
    pst_slot slot;
    pst_status status = pst__buckets_open(carrier, plan->dtype);
    if (status == PST_OK) status = wait_for_bucket(partition);
    if (status == PST_OK)
        status = pst__bucket_slot(carrier, plan->dtype, chunk_bytes, NULL, NULL, &slot);
    if (status == PST_OK) status = pst__bucket_close(carrier, plan->dtype, &plan->bucket);
    if (status == PST_OK) note_memory(partition);
    return status;
}

/* By reduce-scatter: the parts of each rank go into its chunk. */
static pst_status place_in_chunks(const bucket_plan *plan, const pst__partition_pending *pending) {
    pst_partition *partition = plan->partition;
    size_t *used = partition->chunk_used;
    pst_status status = PST_OK;
    for (size_t rank = 0; rank < partition->carrier.world; rank++)
        used[rank] = 0;
    for (size_t i = 0; i < pending->count; i++) {
        const pst__partition_entry *entry = &pending->entries[i];
        const pst__partition_parameter *parameter = &partition->parameters[entry->parameter];
        for (size_t j = 0; status == PST_OK && j < parameter->owner_count; j++) {
            const pst__partition_owner *owner = &partition->owners[parameter->first_owner + j];
            pst__partition_range part = meet(entry->range, owner->range);
            size_t offset = used[owner->rank];
            if (part.count == 0) continue;
            status = copy_in(plan, entry, part, owner->rank * plan->bucket.stride + offset);
            if (status == PST_OK && owner->rank == partition->carrier.rank)
                status = take_out(plan, entry, part, offset);
            used[owner->rank] += padded(part.count, plan->dtype);
        }
    }
    return status;
}

static pst_status place_in_a_row(const bucket_plan *plan, const pst__partition_pending *pending) {
    pst_status status = PST_OK;
    size_t offset = 0;
    for (size_t i = 0; status == PST_OK && i < pending->count; i++) {
        const pst__partition_entry *entry = &pending->entries[i];
        status = copy_in(plan, entry, entry->range, offset);
        if (status == PST_OK) status = take_out(plan, entry, entry->range, offset);
        offset += padded(entry->range.count, plan->dtype);
    }
    return status;
}

/* What this rank owns leaves the bucket behind the all-reduce. */
static pst_status deliver(pst__operation *operation, pst_stream *stream) {
    const pst_status status =
        pst__casts_launch(operation->carrier->device, stream, &operation->casts, 1.0);
    if (status != PST_OK) return status;
    return pst__operation_deliver(operation, operation->work.collective.piece_count, stream);
}

/* What lies in the bucket is scaled already. */
static void describe(const bucket_plan *plan, const char *name) {
    pst__operation *operation = plan->operation;
    pst_collective *collective = &operation->work.collective;
    if (plan->by_reduce_scatter) {
        pst__bucket_describe(operation, &plan->bucket, name, 1.0);
        return;
    }
    collective->kind = PST_ALL_REDUCE;
    collective->name = name;
    collective->dtype = plan->dtype;
    collective->scale = 1.0;
    collective->destination = plan->bucket.memory;
    collective->count = plan->bytes / pst_dtype_size(plan->dtype);
    operation->wait_name = PST__WAIT_GRADIENTS;
    operation->then = deliver;
}

static pst_status fill(bucket_plan *plan, const pst__partition_pending *pending,
                       size_t chunk_bytes) {
    pst_partition *partition = plan->partition;
    pst__carrier *carrier = &partition->carrier;
    pst_status status = take_bucket(plan, chunk_bytes);
    if (status != PST_OK) return status;
    partition->casts.count = 0;
    status =
        plan->by_reduce_scatter ? place_in_chunks(plan, pending) : place_in_a_row(plan, pending);
    if (status == PST_ENOMEM)
        return pst__partition_fail(partition, status, "%s", "no memory to reduce gradients");
    if (status != PST_OK) return status;
    status = pst__casts_launch(carrier->device, carrier->filling.stream, &partition->casts,
                               1.0 / (double)carrier->world);
    if (status == PST_OK) return PST_OK;
    return pst__partition_fail(partition, status, "copying gradients into a %s bucket failed",
                               pst_dtype_name(plan->dtype));
}

static int some_add(const pst_partition *partition, const pst__partition_pending *pending) {
    for (size_t i = 0; i < pending->count; i++)
        if (partition->parameters[pending->entries[i].parameter].target.adds) return 1;
    return 0;
}

/* A reduce-scatter adds to what an all-reduce before it has maybe not delivered yet, if that has a
 * lane of its own. */
static pst_status wait_for_deliveries(const bucket_plan *plan,
                                      const pst__partition_pending *pending) {
    pst__carrier *carrier = &plan->partition->carrier;
    pst__queue *queue = &carrier->queues[PST__GATHER_LANE];
    pst_status status = PST_OK;
    if (!plan->by_reduce_scatter || !some_add(plan->partition, pending)) return PST_OK;
    if (queue->then_lane == queue->lane || queue->then_lane == queue->sum_lane) return PST_OK;
    for (pst__operation *found = queue->oldest; status == PST_OK && found != NULL;
         found = found->next) {
        if (found->then == NULL) continue;
        status = pst__operation_wait_launch(found);
        if (status == PST_OK)
            status = carrier->device->ops->stream_wait(carrier->device, carrier->filling.stream,
                                                       found->finished);
    }
    return status;
}

static pst_status submit(bucket_plan *plan, const pst__partition_pending *pending,
                         size_t chunk_bytes) {
    pst_partition *partition = plan->partition;
    pst__carrier *carrier = &partition->carrier;
    pst_status status = pst__fill_begin(carrier);
    if (status == PST_OK) status = wait_for_deliveries(plan, pending);
    if (status == PST_OK) status = fill(plan, pending, chunk_bytes);
    if (status != PST_OK) return status;
    describe(plan, partition->parameters[pending->entries[0].parameter].name);
    status = pst__bucket_submit(carrier, plan->dtype);
    if (status != PST_OK) return status;
    partition->stats.reductions++;
    partition->stats.by_reduce_scatter += (uint64_t)plan->by_reduce_scatter;
    partition->stats.bytes += plan->bytes;
    return PST_OK;
}

static pst_status send(pst_partition *partition, const pst__partition_pending *pending,
                       pst_dtype dtype) {
    const size_t world = partition->carrier.world;
    const pst__open_bucket *open = &partition->carrier.open[dtype];
    bucket_plan plan = {.partition = partition,
                        .operation = open->operation,
                        .dtype = dtype,
                        .bytes = open->whole_bytes};
    pst_status status = partition->is_compared ? PST_OK : pst__partition_compare_owners(partition);
    if (status == PST_OK) status = name_unowned(partition, pending);
    if (status != PST_OK) return status;
    size_t largest = largest_chunk(partition, pending, dtype);
    size_t even = pst__round_up((plan.bytes + world - 1) / world, PST__SLOT_ALIGNMENT);
    plan.by_reduce_scatter = is_even(partition, largest, plan.bytes);
    return submit(&plan, pending, plan.by_reduce_scatter ? largest : even);
}

/* ---- what is pending ------------------------------------------------------------------------- */

/* What is pending does not go out, and its sources are let go. */
void pst__partition_forget_pending(pst_partition *partition) {
    size_t count = 0;
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        count += partition->pending[dtype].count;
    pst__sources_abandon(&partition->held, count);
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__partition_pending *pending = &partition->pending[dtype];
        for (size_t i = 0; i < pending->count; i++) {
            const pst__partition_entry *entry = &pending->entries[i];
            pst__target_forget(&partition->parameters[entry->parameter].target);
            if (entry->is_last) pst__sources_drop(&partition->held, entry->token);
        }
        pending->count = 0;
    }
    pst__bucket_abandon_all(&partition->carrier);
}

/* Its sources are being copied. */
static pst_status hold(pst_partition *partition, pst__partition_pending *pending) {
    for (size_t i = 0; i < pending->count; i++)
        if (pending->entries[i].is_last)
            pst__sources_add(&partition->held, pending->entries[i].token);
    pending->count = 0;
    return pst__sources_submit(&partition->held, 0);
}

static pst_status flush(pst_partition *partition, pst_dtype dtype) {
    pst__partition_pending *pending = &partition->pending[dtype];
    if (pending->count == 0) return PST_OK;
    pst_status status = pst__sources_join(&partition->held);
    if (status == PST_OK) status = pst__sources_reserve(&partition->held, pending->count, 0);
    if (status == PST_OK) status = send(partition, pending, dtype);
    if (status == PST_OK)
        status = hold(partition, pending);
    else
        pst__partition_forget_pending(partition);
    return pst__carrier_give_up(&partition->carrier, status);
}

pst_status pst__partition_flush_all(pst_partition *partition) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = flush(partition, (pst_dtype)dtype);
    return status;
}

/* ---- reports --------------------------------------------------------------------------------- */

static pst_status append(pst_partition *partition, pst_dtype travels,
                         const pst__partition_entry *entry) {
    pst__carrier *carrier = &partition->carrier;
    pst__partition_pending *pending = &partition->pending[travels];
    pst__partition_parameter *parameter = &partition->parameters[entry->parameter];
    pst_status status =
        pst__heap_grow(carrier->heap, (void **)&pending->entries, &pending->capacity,
                       pending->count + 1, sizeof *pending->entries);
    if (status != PST_OK)
        return pst__partition_fail(partition, status, "parameter '%s': no memory to reduce it",
                                   parameter->name);
    status = pst__bucket_begin(carrier, travels);
    if (status != PST_OK) return status;
    pending->entries[pending->count++] = *entry;
    carrier->open[travels].whole_bytes += padded(entry->range.count, travels);
    parameter->target.bucket = carrier->open[travels].number;
    return PST_OK;
}

/* Adds as much of a gradient as the bucket has room for. */
static pst_status add_part(pst_partition *partition, pst_dtype travels, pst__partition_entry *entry,
                           size_t end) {
    const pst__open_bucket *open = &partition->carrier.open[travels];
    size_t room = partition->options.bucket_bytes - open->whole_bytes;
    size_t most = room / pst_dtype_size(travels), left = end - entry->range.first;
    entry->range.count = left < most ? left : most;
    entry->is_last = entry->range.count == left;
    pst_status status = append(partition, travels, entry);
    if (status != PST_OK) entry->is_last = 0; /* nobody will consume it */
    if (status == PST_OK && open->whole_bytes == partition->options.bucket_bytes)
        status = flush(partition, travels);
    return status;
}

/* A bucket holds no two gradients of one parameter, and no second one goes out before the first:
 * it has to be added to it. */
static pst_status flush_earlier(pst_partition *partition, const pst__target *target) {
    const pst_dtype dtype = pst__bucket_of(&partition->carrier, target);
    return dtype == PST_DTYPE_COUNT ? PST_OK : flush(partition, dtype);
}

pst_status pst__partition_report(pst_partition *partition, uint32_t index, const void *source,
                                 pst_dtype dtype, void *token) {
    pst__partition_parameter *parameter = &partition->parameters[index];
    pst_dtype travels = partition->options.reduce_in_fp32 ? PST_FLOAT32 : dtype;
    pst__partition_entry entry = {.parameter = index, .source_dtype = dtype, .token = token};
    pst_status status = flush_earlier(partition, &parameter->target);
    pst__target_add(&parameter->target);
    while (status == PST_OK && !entry.is_last) {
        entry.source = (const char *)source + entry.range.first * pst_dtype_size(dtype);
        status = add_part(partition, travels, &entry, parameter->elements);
        entry.range.first += entry.range.count;
    }
    if (!entry.is_last) pst__sources_drop(&partition->held, token);
    return pst__carrier_give_up(&partition->carrier, status);
}
