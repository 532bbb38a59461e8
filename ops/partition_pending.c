/* Gradients that were reported and wait until they fill a bucket. One that is larger than what is
 * left is cut. */
#include "ops/partition.h"

/* ---- going out ------------------------------------------------------------------------------- */

static void consumed(const pst_partition *partition, void *token) {
    if (partition->options.consumed != NULL)
        partition->options.consumed(partition->options.callback_context, token);
}

void pst__pending_forget_copied(pst_partition *partition) {
    for (size_t i = 0; i < partition->copied_count; i++)
        consumed(partition, partition->copied[i]);
    partition->copied_count = 0;
}

pst_status pst__pending_join(pst_partition *partition) {
    pst_status status = pst__fill_join(partition->engine);
    if (status == PST_OK) pst__pending_forget_copied(partition);
    return status;
}

static void clear(pst__pending *pending) {
    pending->count = pending->bytes = 0;
    pending->number = 0;
}

/* The entries' sources will not be copied. */
static void forget(pst_partition *partition, pst__pending *pending) {
    for (size_t i = 0; i < pending->count; i++)
        if (pending->entries[i].is_last) consumed(partition, pending->entries[i].token);
    clear(pending);
}

/* They are being copied. */
static void keep_copied(pst_partition *partition, pst__pending *pending) {
    for (size_t i = 0; i < pending->count; i++)
        if (pending->entries[i].is_last)
            partition->copied[partition->copied_count++] = pending->entries[i].token;
    clear(pending);
    if (!partition->engine->asynchronous) pst__pending_forget_copied(partition);
}

static pst_status send(pst_partition *partition, const pst__pending *pending, pst_dtype dtype) {
    pst_status status = pst__pending_join(partition);
    if (status == PST_OK)
        status = pst__heap_grow(partition->engine->heap, (void **)&partition->copied,
                                &partition->copied_capacity,
                                partition->copied_count + pending->count, sizeof(void *));
    return status == PST_OK ? pst__bucket_send(partition, pending, dtype) : status;
}

static pst_status flush(pst_partition *partition, pst_dtype dtype) {
    pst__pending *pending = &partition->pending[dtype];
    if (pending->count == 0) return PST_OK;
    pst_status status = send(partition, pending, dtype);
    if (status == PST_OK)
        keep_copied(partition, pending);
    else
        forget(partition, pending);
    return pst__reduce_give_up(partition->engine, status);
}

pst_status pst__pending_flush_all(pst_partition *partition) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = flush(partition, (pst_dtype)dtype);
    return status;
}

void pst__pending_forget_all(pst_partition *partition) {
    (void)pst__pending_join(partition);
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__pending *pending = &partition->pending[dtype];
        for (size_t i = 0; i < pending->count; i++)
            if (!pending->entries[i].accumulate)
                partition->splits[pending->entries[i].parameter].has_sum = 0;
        forget(partition, pending);
    }
}

/* ---- coming in ------------------------------------------------------------------------------- */

static pst_status append(pst_partition *partition, pst__pending *pending, const pst__entry *entry,
                         size_t bytes) {
    pst_status status =
        pst__heap_grow(partition->engine->heap, (void **)&pending->entries, &pending->capacity,
                       pending->count + 1, sizeof *pending->entries);
    if (status != PST_OK)
        return pst__partition_fail(partition, status, "parameter '%s': no memory to reduce it",
                                   partition->splits[entry->parameter].name);
    if (pending->number == 0) pending->number = ++partition->buckets;
    pending->entries[pending->count++] = *entry;
    pending->bytes += bytes;
    partition->splits[entry->parameter].bucket = pending->number;
    return PST_OK;
}

/* As much of a gradient as the bucket still takes. */
static pst_status add_part(pst_partition *partition, pst_dtype travels, pst__entry *entry,
                           size_t end) {
    pst__pending *pending = &partition->pending[travels];
    size_t room = partition->options.bucket_bytes - pending->bytes;
    size_t most = room / pst_dtype_size(travels), left = end - entry->range.first;
    entry->range.count = left < most ? left : most;
    entry->is_last = entry->range.count == left;
    pst_status status = append(partition, pending, entry, pst__padded(entry->range.count, travels));
    if (status != PST_OK) entry->is_last = 0; /* nobody will consume it */
    if (status == PST_OK && pending->bytes == partition->options.bucket_bytes)
        status = flush(partition, travels);
    return status;
}

/* A bucket holds no two gradients of one parameter, and no second one goes out before the first:
 * it has to be added to it. */
static pst_status flush_earlier(pst_partition *partition, uint32_t parameter) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++) {
        uint64_t number = partition->pending[dtype].number;
        if (number != 0 && partition->splits[parameter].bucket == number)
            status = flush(partition, (pst_dtype)dtype);
    }
    return status;
}

pst_status pst__pending_add(pst_partition *partition, uint32_t parameter, const void *source,
                            pst_dtype dtype, void *token) {
    pst__split *split = &partition->splits[parameter];
    pst_dtype travels = partition->options.reduce_in_fp32 ? PST_FLOAT32 : dtype;
    pst__entry entry = {.parameter = parameter,
                        .source_dtype = dtype,
                        .accumulate = split->has_sum,
                        .token = token};
    pst_status status = flush_earlier(partition, parameter);
    split->has_sum = 1;
    while (status == PST_OK && !entry.is_last) {
        entry.source = (const char *)source + entry.range.first * pst_dtype_size(dtype);
        status = add_part(partition, travels, &entry, split->elements);
        entry.range.first += entry.range.count;
    }
    if (!entry.is_last) consumed(partition, token);
    return pst__reduce_give_up(partition->engine, status);
}
