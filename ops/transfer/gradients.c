#include "ops/transfer/gradients.h"

/* Bytes behind the oldest batch, which compute then waits for: a gradient that is larger than the
 * buckets leaves no faster than the link takes it. */
#define MOST_HELD ((size_t)256 << 20)

static pst__source_batch *batch_at(pst__sources_held *held, size_t index) {
    return &held->batches[(held->first + index) % PST__SOURCE_BATCHES];
}

static void release(pst__sources_held *held, size_t tokens) {
    for (size_t i = 0; i < tokens; i++)
        pst__sources_drop(held, held->tokens[i]);
    for (size_t i = tokens; i < held->token_count; i++)
        held->tokens[i - tokens] = held->tokens[i];
    held->token_count -= tokens;
}

void pst__sources_release_all(pst__sources_held *held) {
    held->count = held->bytes = 0;
    release(held, held->token_count);
}

static pst_status wait_for(const pst__sources_held *held, const pst__source_batch *batch) {
    pst_device *device = held->carrier->device;
    return device->ops->stream_wait(device, held->carrier->compute, batch->copied);
}

pst_status pst__sources_join(pst__sources_held *held) {
    pst_status status = PST_OK;
    if (held->count > 0) status = wait_for(held, batch_at(held, held->count - 1));
    if (status == PST_OK) pst__sources_release_all(held);
    return status;
}

void pst__sources_abandon(pst__sources_held *held, size_t more) {
    if (held->token_count + more == 0) return;
    if (pst__fill_end(held->carrier) == PST_OK) (void)pst__fill_join(held->carrier);
    pst__sources_release_all(held);
}

static pst_status make_room(pst__sources_held *held, size_t bytes) {
    pst_device *device = held->carrier->device;
    while (held->count > 0) {
        const pst__source_batch *oldest = batch_at(held, 0);
        if (device->ops->event_query(device, oldest->copied) != PST_OK) {
            const int is_full = held->count == PST__SOURCE_BATCHES ||
                                held->bytes - oldest->bytes + bytes > MOST_HELD;
            const pst_status status = is_full ? wait_for(held, oldest) : PST_OK;
            if (status != PST_OK || !is_full) return status;
        }
        held->first = (held->first + 1) % PST__SOURCE_BATCHES;
        held->count--;
        held->bytes -= oldest->bytes;
        release(held, oldest->tokens);
    }
    return PST_OK;
}

pst_status pst__sources_reserve(pst__sources_held *held, size_t tokens, size_t bytes) {
    pst__carrier *carrier = held->carrier;
    pst_status status = pst__heap_grow(carrier->heap, (void **)&held->tokens, &held->token_capacity,
                                       held->token_count + tokens, sizeof *held->tokens);
    if (status == PST_OK) status = make_room(held, bytes);
    pst__source_batch *batch = batch_at(held, held->count);
    if (status == PST_OK && carrier->asynchronous && batch->copied == NULL)
        status = carrier->device->ops->event_create(carrier->device, 0, &batch->copied);
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail_device(carrier, status, "%s",
                                    "keeping gradients until they are copied failed");
}

void pst__sources_add(pst__sources_held *held, void *token) {
    held->tokens[held->token_count++] = token;
}

pst_status pst__sources_submit(pst__sources_held *held, size_t bytes) {
    pst__carrier *carrier = held->carrier;
    if (!carrier->asynchronous) {
        pst__sources_release_all(held);
        return PST_OK;
    }
    pst__source_batch *batch = batch_at(held, held->count);
    pst_status status =
        carrier->device->ops->event_record(carrier->device, batch->copied, carrier->filling.stream);
    if (status != PST_OK) return status;
    batch->tokens = held->token_count;
    for (size_t i = 0; i < held->count; i++)
        batch->tokens -= batch_at(held, i)->tokens;
    batch->bytes = bytes;
    held->bytes += bytes;
    held->count++;
    return PST_OK;
}

void pst__sources_free(pst__sources_held *held) {
    if (held->carrier == NULL) return; /* nothing was held yet */
    pst_device *device = held->carrier->device;
    for (int i = 0; i < PST__SOURCE_BATCHES; i++)
        if (held->batches[i].copied != NULL)
            device->ops->event_destroy(device, held->batches[i].copied);
    pst__heap_free(held->carrier->heap, held->tokens, held->token_capacity * sizeof *held->tokens);
}

pst_status pst__target_zero_old(const pst__carrier *carrier, pst__target *target) {
    if (target->memory == NULL || !target->is_old || target->has_sum) return PST_OK;
    const pst_status status =
        carrier->device->ops->fill(carrier->device, carrier->compute, target->memory, 0,
                                   target->count * pst_dtype_size(target->dtype));
    if (status == PST_OK) target->is_old = 0;
    return status;
}
