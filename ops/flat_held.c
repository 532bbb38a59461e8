/* Sources of gradients that are being copied beside compute, a batch at a time. Compute does not
 * wait for a batch as long as little is held behind it: one that is larger than the buckets leaves
 * no faster than the link takes it. */
#include "ops/flat.h"

#define HELD_BYTES ((size_t)256 << 20) /* behind the oldest batch, which compute then waits for */

static pst_device *device_of(const pst_flat *flat) {
    return flat->engine->device;
}

static pst__flat_batch *batch_at(pst_flat *flat, size_t index) {
    return &flat->held[(flat->held_first + index) % PST__FLAT_HELD];
}

static void let_go(pst_flat *flat, size_t tokens) {
    for (size_t i = 0; i < tokens && flat->options.consumed != NULL; i++)
        flat->options.consumed(flat->options.callback_context, flat->copied[i]);
    for (size_t i = tokens; i < flat->copied_count; i++)
        flat->copied[i - tokens] = flat->copied[i];
    flat->copied_count -= tokens;
}

static void let_oldest_go(pst_flat *flat) {
    const pst__flat_batch *oldest = batch_at(flat, 0);
    flat->held_first = (flat->held_first + 1) % PST__FLAT_HELD;
    flat->held_count--;
    flat->held_bytes -= oldest->bytes;
    let_go(flat, oldest->tokens);
}

void pst__flat_held_forget(pst_flat *flat) {
    flat->held_count = flat->held_bytes = 0;
    let_go(flat, flat->copied_count);
}

static pst_status wait_for(pst_flat *flat, const pst__flat_batch *batch) {
    return device_of(flat)->ops->stream_wait(device_of(flat), flat->engine->compute, batch->copied);
}

pst_status pst__flat_held_join(pst_flat *flat) {
    pst_status status = PST_OK;
    if (flat->held_count > 0) status = wait_for(flat, batch_at(flat, flat->held_count - 1));
    if (status == PST_OK) pst__flat_held_forget(flat);
    return status;
}

static int is_copied(pst_flat *flat, const pst__flat_batch *batch) {
    return device_of(flat)->ops->event_query(device_of(flat), batch->copied) == PST_OK;
}

static int is_full(pst_flat *flat) {
    return flat->held_count == PST__FLAT_HELD ||
           flat->held_bytes - batch_at(flat, 0)->bytes + flat->report_bytes > HELD_BYTES;
}

/* For the tokens of the reports, and a batch of them. */
pst_status pst__flat_held_room(pst_flat *flat) {
    pst_status status =
        pst__heap_grow(flat->engine->heap, (void **)&flat->copied, &flat->copied_capacity,
                       flat->copied_count + flat->report_count, sizeof *flat->copied);
    while (status == PST_OK && flat->held_count > 0) {
        const pst__flat_batch *oldest = batch_at(flat, 0);
        if (!is_copied(flat, oldest)) {
            if (!is_full(flat)) break;
            status = wait_for(flat, oldest);
        }
        if (status == PST_OK) let_oldest_go(flat);
    }
    pst__flat_batch *batch = batch_at(flat, flat->held_count);
    if (status == PST_OK && flat->engine->asynchronous && batch->copied == NULL)
        status = device_of(flat)->ops->event_create(device_of(flat), 0, &batch->copied);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "%s", "keeping gradients until they are copied failed");
}

pst_status pst__flat_hold(pst_flat *flat) {
    pst__flat_batch *batch = batch_at(flat, flat->held_count);
    const int is_apart = flat->engine->asynchronous;
    pst_status status = PST_OK;
    if (is_apart)
        status = device_of(flat)->ops->event_record(device_of(flat), batch->copied,
                                                    flat->engine->filling.stream);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < flat->report_count; i++)
        flat->copied[flat->copied_count++] = flat->reports[i].token;
    if (!is_apart) {
        let_go(flat, flat->report_count);
    } else {
        batch->tokens = flat->report_count;
        batch->bytes = flat->report_bytes;
        flat->held_bytes += batch->bytes;
        flat->held_count++;
    }
    flat->report_count = flat->report_bytes = 0;
    return PST_OK;
}

void pst__flat_held_free(const pst__heap *heap, pst_flat *flat) {
    for (int i = 0; i < PST__FLAT_HELD; i++)
        if (flat->held[i].copied != NULL)
            device_of(flat)->ops->event_destroy(device_of(flat), flat->held[i].copied);
    pst__heap_free(heap, flat->copied, flat->copied_capacity * sizeof *flat->copied);
}
