/* Gradients into flat shards: reported, copied into buckets a batch at a time, and what a backward
 * waits for. */
#include "ops/flat.h"

#include <time.h>

/* ---- batches --------------------------------------------------------------------------------- */

static void consumed(const pst_flat *flat, void *token) {
    if (flat->options.consumed != NULL)
        flat->options.consumed(flat->options.callback_context, token);
}

/* What was reported goes into buckets. */
static pst_status fill(pst_flat *flat) {
    if (flat->report_count == 0) return PST_OK;
    pst_status status = pst__flat_held_room(flat);
    if (status == PST_OK) status = pst__fill_begin(flat->engine);
    for (size_t i = 0; status == PST_OK && i < flat->report_count; i++)
        status = pst__flat_bucket_add(flat, &flat->reports[i]);
    if (status == PST_OK) status = pst__flat_bucket_copy(flat);
    return status == PST_OK ? pst__flat_hold(flat) : status;
}

static pst_status flush_all(pst_flat *flat) {
    pst_status status = fill(flat);
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = pst__flat_bucket_flush(flat, (pst_dtype)dtype);
    return pst__reduce_give_up(flat->engine, status);
}

/* Compute waits for copies that were begun, those of a batch that failed in its middle too. */
static void wait_for_copies(pst_flat *flat) {
    if (flat->held_count + flat->report_count == 0) return;
    if (pst__fill_end(flat->engine) == PST_OK) (void)pst__fill_join(flat->engine);
}

/* Gradients that have not gone out are forgotten. */
void pst__flat_abandon_all(pst_flat *flat) {
    wait_for_copies(flat);
    pst__flat_held_forget(flat);
    for (size_t i = 0; i < flat->report_count; i++)
        consumed(flat, flat->reports[i].token);
    flat->report_count = flat->report_bytes = 0;
    pst__flat_bucket_abandon(flat);
}

/* ---- reports --------------------------------------------------------------------------------- */

static int waits(const pst_flat *flat, uint32_t parameter) {
    for (size_t i = 0; i < flat->report_count; i++)
        if (flat->reports[i].parameter == parameter) return 1;
    return pst__flat_bucket_has(flat, &flat->parameters[parameter]);
}

static pst_status check_report(pst_flat *flat, const pst__flat_report *report) {
    pst_status status = pst__flat_check(flat, report->parameter);
    if (status != PST_OK) return status;
    const pst__flat_parameter *parameter = &flat->parameters[report->parameter];
    if (parameter->target == NULL || parameter->elements == 0) return PST_OK;
    if (report->source != NULL && pst_dtype_size(report->dtype) != 0 &&
        pst_dtype_size(report->travels) != 0)
        return PST_OK;
    return pst__flat_fail(flat, PST_EINVAL,
                          "parameter '%s': its gradient has no memory, or no dtype",
                          parameter->name);
}

static pst_status keep(pst_flat *flat, const pst__flat_report *report) {
    /* No two of a parameter travel together: the second is added to the first. */
    pst_status status = waits(flat, report->parameter) ? flush_all(flat) : PST_OK;
    if (status == PST_OK)
        status = pst__heap_grow(flat->engine->heap, (void **)&flat->reports, &flat->report_capacity,
                                flat->report_count + 1, sizeof *flat->reports);
    if (status != PST_OK) return status;
    flat->reports[flat->report_count++] = *report;
    flat->report_bytes +=
        flat->parameters[report->parameter].elements * pst_dtype_size(report->travels);
    return PST_OK;
}

pst_status pst_flat_reduce(pst_flat *flat, uint32_t index, const void *source, pst_dtype dtype,
                           pst_dtype travels, void *token) {
    const pst__flat_report report = {index, source, dtype, travels, token};
    pst_status status = check_report(flat, &report);
    int is_dropped = status != PST_OK || flat->parameters[index].target == NULL ||
                     flat->parameters[index].elements == 0;
    if (!is_dropped) {
        status = pst__reduce_give_up(flat->engine, keep(flat, &report));
        is_dropped = status != PST_OK;
    }
    if (is_dropped) {
        if (flat != NULL) consumed(flat, token);
        return status;
    }
    if (flat->report_bytes < flat->options.batch_bytes) return PST_OK;
    return pst__reduce_give_up(flat->engine, fill(flat));
}

/* ---- backwards ------------------------------------------------------------------------------- */

pst_status pst_flat_begin_backward(pst_flat *flat, int is_last) {
    if (flat == NULL) return PST_EINVAL;
    pst__flat_abandon_all(flat);
    for (size_t i = 0; flat->is_last && i < flat->parameter_count; i++) {
        pst__flat_parameter *parameter = &flat->parameters[i];
        parameter->is_old |= parameter->has_sum;
        parameter->has_sum = 0;
    }
    flat->is_last = is_last != 0;
    return pst__operation_check_comms(flat->engine);
}

static pst_status zero(pst_flat *flat, const pst__flat_parameter *parameter) {
    pst_device *device = flat->engine->device;
    const pst_cast zeros = {.destination = parameter->target,
                            .count = parameter->chunk,
                            .destination_dtype = parameter->target_dtype,
                            .source_dtype = parameter->target_dtype};
    return device->ops->cast_scale_copy(device, flat->engine->compute, &zeros, 1, 1.0);
}

/* The optimizer finds zeros where nothing had a gradient since the last update. */
static pst_status zero_old(pst_flat *flat) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->parameter_count; i++) {
        pst__flat_parameter *parameter = &flat->parameters[i];
        if (parameter->target != NULL && parameter->is_old && !parameter->has_sum)
            status = zero(flat, parameter);
        parameter->is_old = 0;
    }
    return status;
}

static pst_status wait_reductions(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    pst_status status = PST_OK;
    for (pst__operation *operation = pst__queue_of(engine, PST__REDUCE_LANE)->oldest;
         status == PST_OK && operation != NULL; operation = operation->next)
        if (operation->work.collective.kind == PST_REDUCE_SCATTER)
            status = pst__operation_wait(operation, "wait gradients", PST__REDUCE_LANE);
    return status == PST_OK ? pst_runtime_status(engine->runtime) : status;
}

/* On the host a reduction's callback may be behind its task's end. */
static void release_buckets(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    const struct timespec pause = {0, 50000};
    const pst__queue *queue = pst__queue_of(engine, PST__REDUCE_LANE);
    if (engine->buckets == NULL) return;
    pst__operation_reap(engine);
    for (int i = 0; i < 2000 && queue->holding != NULL && queue->holding->has_bucket; i++) {
        (void)nanosleep(&pause, NULL);
        pst__operation_reap(engine);
    }
    pst_buckets_trim(engine->buckets);
    pst_arena_trim(engine->sources);
}

pst_status pst_flat_end_backward(pst_flat *flat, int release) {
    if (flat == NULL) return PST_EINVAL;
    pst_status status = pst_runtime_status(flat->engine->runtime);
    if (status == PST_OK) status = flush_all(flat);
    if (status == PST_OK) status = wait_reductions(flat);
    if (status == PST_OK) status = pst__flat_held_join(flat);
    if (status == PST_OK && flat->is_last) status = zero_old(flat);
    if (status == PST_OK && flat->is_last) status = pst__flat_wait_readers(flat, PST__FLAT_ALL);
    if (status == PST_OK && flat->is_last) status = pst_flat_updated(flat);
    if (status == PST_OK) status = pst__operation_check_comms(flat->engine);
    if (status == PST_OK && release) release_buckets(flat);
    return pst__flat_give_up(flat, status);
}
