/* Gradients into flat shards: reported, copied into buckets a batch at a time beside compute, sent
 * as one reduce-scatter a full bucket; and what a backward waits for. */
#include "ops/deepcompile/flat.h"

/* ---- going out ------------------------------------------------------------------------------- */

/* What was put into buckets so far is copied there, in one launch. */
static pst_status bucket_copy(pst_flat *flat) {
    const size_t casts = flat->casts.count;
    const pst_status status =
        pst__casts_launch(flat->carrier.device, flat->carrier.filling.stream, &flat->casts, 1.0);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "copying %zu pieces of gradients failed", casts);
}

static pst_status bucket_flush(void *context, pst_dtype dtype) {
    pst_flat *flat = context;
    const size_t bytes = flat->carrier.open[dtype].whole_bytes;
    if (flat->carrier.open[dtype].operation == NULL) return PST_OK;
    pst_status status = bucket_copy(flat);
    if (status == PST_OK) status = pst__bucket_send(&flat->carrier, dtype, "gradients");
    if (status != PST_OK) return status;
    flat->stats.reduces++;
    flat->stats.reduce_bytes += bytes;
    return PST_OK;
}

/* ---- coming in ------------------------------------------------------------------------------- */

/* Elements [first, first + count) of every rank's chunk of a gradient. */
typedef struct part {
    pst__flat_parameter *parameter;
    const char *source;
    pst_dtype dtype, travels;
    size_t first, count;
} part;

/* What there is of the gradient, and zeros behind its end. */
static pst_status add_casts(pst_flat *flat, const part *part, const pst_slot *slot) {
    const size_t world = flat->carrier.world, size = pst_dtype_size(part->travels);
    const pst__heap *heap = flat->carrier.heap;
    const pst__flat_parameter *parameter = part->parameter;
    pst_status status = PST_OK;
    for (size_t rank = 0; status == PST_OK && rank < world; rank++) {
        size_t begin = rank * parameter->chunk + part->first;
        size_t left = begin < parameter->elements ? parameter->elements - begin : 0;
        size_t real = left < part->count ? left : part->count;
        char *memory = (char *)slot->memory + rank * slot->stride;
        if (real > 0)
            status = pst__casts_add(heap, &flat->casts,
                                    (pst_cast){memory,
                                               part->source + begin * pst_dtype_size(part->dtype),
                                               real, part->travels, part->dtype});
        if (status == PST_OK && real < part->count)
            status = pst__casts_add(heap, &flat->casts,
                                    (pst_cast){memory + real * size, NULL, part->count - real,
                                               part->travels, part->travels});
    }
    return status;
}

static pst_status add_part(pst_flat *flat, const part *part) {
    pst__carrier *carrier = &flat->carrier;
    pst__open_bucket *open = &carrier->open[part->travels];
    pst_slot slot;
    pst_status status =
        pst__bucket_slot(carrier, part->travels, part->count * pst_dtype_size(part->travels),
                         bucket_flush, flat, &slot);
    if (status != PST_OK) return status;
    open->whole_bytes += slot.padded_bytes * carrier->world;
    status = pst__bucket_deliver(open->operation, &part->parameter->target, part->first,
                                 part->count, slot.offset);
    return status == PST_OK ? add_casts(flat, part, &slot) : status;
}

/* Room for a gradient; its copy is launched by the next bucket_copy. Full buckets go out. */
static pst_status bucket_add(pst_flat *flat, const pst__flat_report *report) {
    pst__flat_parameter *parameter = &flat->parameters[report->parameter];
    part part = {.parameter = parameter,
                 .source = report->source,
                 .dtype = report->dtype,
                 .travels = report->travels};
    size_t most = flat->chunk_bytes / pst_dtype_size(part.travels);
    pst_status status = pst__buckets_open(&flat->carrier, part.travels);
    pst__target_add(&parameter->target);
    for (; status == PST_OK && part.first < parameter->chunk; part.first += part.count) {
        size_t left = parameter->chunk - part.first;
        part.count = left < most ? left : most;
        status = add_part(flat, &part);
    }
    parameter->target.bucket = flat->carrier.open[part.travels].number;
    return status;
}

/* Buckets that have not gone out are forgotten. */
static void bucket_abandon(pst_flat *flat) {
    for (size_t i = 0; i < flat->parameter_count; i++) {
        pst__target *target = &flat->parameters[i].target;
        if (pst__bucket_of(&flat->carrier, target) != PST_DTYPE_COUNT) pst__target_forget(target);
    }
    pst__bucket_abandon_all(&flat->carrier);
    flat->casts.count = 0;
}

/* ---- batches --------------------------------------------------------------------------------- */

/* What was reported goes into buckets. */
static pst_status fill(pst_flat *flat) {
    if (flat->report_count == 0) return PST_OK;
    pst_status status = pst__sources_reserve(&flat->held, flat->report_count, flat->report_bytes);
    if (status == PST_OK) status = pst__fill_begin(&flat->carrier);
    for (size_t i = 0; status == PST_OK && i < flat->report_count; i++)
        status = bucket_add(flat, &flat->reports[i]);
    if (status == PST_OK) status = bucket_copy(flat);
    if (status != PST_OK) return status;
    const size_t bytes = flat->report_bytes;
    for (size_t i = 0; i < flat->report_count; i++)
        pst__sources_add(&flat->held, flat->reports[i].token);
    flat->report_count = flat->report_bytes = 0;
    return pst__sources_submit(&flat->held, bytes);
}

static pst_status flush_all(pst_flat *flat) {
    pst_status status = fill(flat);
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = bucket_flush(flat, (pst_dtype)dtype);
    return pst__carrier_give_up(&flat->carrier, status);
}

/* Gradients that have not gone out are forgotten. */
void pst__flat_abandon_all(pst_flat *flat) {
    pst__sources_abandon(&flat->held, flat->report_count);
    for (size_t i = 0; i < flat->report_count; i++)
        pst__sources_drop(&flat->held, flat->reports[i].token);
    flat->report_count = flat->report_bytes = 0;
    bucket_abandon(flat);
}

/* ---- reports --------------------------------------------------------------------------------- */

static int waits(const pst_flat *flat, uint32_t parameter) {
    for (size_t i = 0; i < flat->report_count; i++)
        if (flat->reports[i].parameter == parameter) return 1;
    return pst__bucket_of(&flat->carrier, &flat->parameters[parameter].target) != PST_DTYPE_COUNT;
}

static pst_status check_report(pst_flat *flat, const pst__flat_report *report) {
    pst_status status = pst__flat_check(flat, report->parameter);
    if (status != PST_OK) return status;
    const pst__flat_parameter *parameter = &flat->parameters[report->parameter];
    if (parameter->target.memory == NULL || parameter->elements == 0) return PST_OK;
    if (report->source != NULL && pst_dtype_size(report->dtype) != 0 &&
        pst_dtype_size(report->travels) != 0)
        return PST_OK;
    return pst__flat_fail(flat, PST_EINVAL,
                          "parameter '%s': its gradient has no memory, or no dtype",
                          parameter->name);
}

static pst_status add_report(pst_flat *flat, const pst__flat_report *report) {
    /* No two of a parameter travel together: the second is added to the first. */
    pst_status status = waits(flat, report->parameter) ? flush_all(flat) : PST_OK;
    if (status == PST_OK)
        status = pst__heap_grow(flat->carrier.heap, (void **)&flat->reports, &flat->report_capacity,
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
    int is_dropped = status != PST_OK || flat->parameters[index].target.memory == NULL ||
                     flat->parameters[index].elements == 0;
    if (!is_dropped) {
        status = pst__carrier_give_up(&flat->carrier, add_report(flat, &report));
        is_dropped = status != PST_OK;
    }
    if (is_dropped) {
        if (flat != NULL) pst__sources_drop(&flat->held, token);
        return status;
    }
    if (flat->report_bytes < flat->options.batch_bytes) return PST_OK;
    return pst__carrier_give_up(&flat->carrier, fill(flat));
}

/* ---- backwards ------------------------------------------------------------------------------- */

pst_status pst_flat_begin_backward(pst_flat *flat, int is_last) {
    if (flat == NULL) return PST_EINVAL;
    pst__flat_abandon_all(flat);
    for (size_t i = 0; flat->is_last && i < flat->parameter_count; i++)
        pst__target_begin(&flat->parameters[i].target);
    flat->is_last = is_last != 0;
    return pst__operation_check_comms(&flat->carrier);
}

static void release_buckets(pst_flat *flat) {
    pst__carrier *carrier = &flat->carrier;
    pst__operation_reap_buckets(carrier);
    pst_buckets_trim(carrier->buckets);
    pst_arena_trim(carrier->sources);
}

pst_status pst_flat_end_backward(pst_flat *flat, int release) {
    if (flat == NULL) return PST_EINVAL;
    pst_status status = pst_runtime_status(flat->carrier.runtime);
    if (status == PST_OK) status = flush_all(flat);
    if (status == PST_OK) status = pst__operation_wait_reductions(&flat->carrier);
    if (status == PST_OK) status = pst__sources_join(&flat->held);
    for (size_t i = 0; status == PST_OK && flat->is_last && i < flat->parameter_count; i++)
        status = pst__target_zero_old(&flat->carrier, &flat->parameters[i].target);
    if (status == PST_OK && flat->is_last) status = pst__flat_wait_readers(flat, PST__FLAT_ALL);
    if (status == PST_OK && flat->is_last) status = pst_flat_updated(flat);
    if (status == PST_OK) status = pst__operation_check_comms(&flat->carrier);
    if (status == PST_OK && release) release_buckets(flat);
    return pst__flat_give_up(flat, status);
}
