#include "tests/device/sim_queue.h"

#include "base/atomic.h"
#include "sched/device/host.h"

#include <string.h>

typedef pst__sim sim;
typedef pst__sim_operation operation;

static uint64_t cost_of(const sim *sim, size_t bytes) {
    const pst__sim_options *options = &sim->options;
    uint64_t cost = options->latency_ns;
    if (options->bytes_each_us != 0) cost += (uint64_t)bytes * 1000u / options->bytes_each_us;
    if (options->jitter != NULL) cost += options->jitter(options->context);
    return cost;
}

pst_status pst__sim_call(pst_device *device, pst_stream *stream, uint64_t nanoseconds,
                         void (*run)(void *argument), void *argument) {
    sim *sim = pst__sim_of(device);
    operation *call = pst__sim_operation_create(sim, PST__SIM_CALL, 0);
    if (call == NULL) return PST_ENOMEM;
    call->run = run;
    call->argument = argument;
    pst__sim_enqueue(sim, stream, call, nanoseconds + cost_of(sim, 0));
    return PST_OK;
}

static pst_status enqueue_rows(sim *sim, pst_stream *stream, const pst__sim_rows *rows) {
    if (rows->bytes == 0 || rows->count == 0) return PST_OK;
    operation *made = pst__sim_operation_create(sim, PST__SIM_ROWS, 0);
    if (made == NULL) return PST_ENOMEM;
    made->rows = *rows;
    pst__sim_enqueue(sim, stream, made, cost_of(sim, rows->bytes * rows->count));
    return PST_OK;
}

/* ---- streams ---------------------------------------------------------------------------- */

static pst_status stream_create(pst_device *device, int priority, pst_stream **stream) {
    sim *sim = pst__sim_of(device);
    (void)priority;
    const pst_status fault = pst__sim_fault(sim, "stream_create");
    if (fault != PST_OK) return fault;
    *stream = pst__heap_alloc(sim->heap, sizeof **stream);
    if (*stream == NULL) return PST_ENOMEM;
    ck_spinlock_lock(&sim->lock);
    (*stream)->next = sim->streams;
    sim->streams = *stream;
    ck_spinlock_unlock(&sim->lock);
    return PST_OK;
}

static pst_status stream_wrap(pst_device *device, void *native, pst_stream **stream) {
    return native != NULL ? PST_EUNSUPPORTED : stream_create(device, 0, stream);
}

/* What it has before it happens nevertheless. */
static void stream_destroy(pst_device *device, pst_stream *stream) {
    sim *sim = pst__sim_of(device);
    if (stream == NULL) return;
    ck_spinlock_lock(&sim->lock);
    stream->destroyed = 1;
    pst__sim_sweep(sim);
    ck_spinlock_unlock(&sim->lock);
}

static pst_status launch(pst_device *device, pst_stream *stream, const pst_work *work) {
    const pst_status fault = pst__sim_fault(pst__sim_of(device), "launch");
    return fault != PST_OK ? fault : work->start(work->argument, stream);
}

/* ---- events ----------------------------------------------------------------------------- */

static pst_status event_create(pst_device *device, int timed, pst_event **event) {
    const sim *sim = pst__sim_of(device);
    (void)timed; /* all are */
    const pst_status fault = pst__sim_fault(sim, "event_create");
    if (fault != PST_OK) return fault;
    *event = pst__heap_alloc(sim->heap, sizeof **event);
    return *event == NULL ? PST_ENOMEM : PST_OK;
}

/* The event's mark becomes `mark`, for which it holds. */
static void event_mark(sim *sim, pst_event *event, pst__sim_mark *mark) {
    ck_spinlock_lock(&sim->lock);
    pst__sim_mark_drop(sim, event->mark);
    event->mark = mark;
    ck_spinlock_unlock(&sim->lock);
}

static void event_destroy(pst_device *device, pst_event *event) {
    sim *sim = pst__sim_of(device);
    if (event == NULL) return;
    event_mark(sim, event, NULL);
    pst__heap_free(sim->heap, event, sizeof *event);
}

static pst_status event_record(pst_device *device, pst_event *event, pst_stream *stream) {
    sim *sim = pst__sim_of(device);
    const pst__sim_options *options = &sim->options;
    const pst_status fault = pst__sim_fault(sim, "event_record");
    if (fault != PST_OK) return fault;
    operation *record = pst__sim_operation_create(sim, PST__SIM_RECORD, 0);
    pst__sim_mark *mark = pst__heap_alloc(sim->heap, sizeof *mark);
    if (record == NULL || mark == NULL) {
        pst__heap_free(sim->heap, record, sizeof *record);
        pst__heap_free(sim->heap, mark, sizeof *mark);
        return PST_ENOMEM;
    }
    mark->holders = 2; /* the event and the operation */
    mark->late = options->late == NULL ? 0 : options->late(options->context);
    record->mark = mark;
    event_mark(sim, event, mark);
    pst__sim_enqueue(sim, stream, record, 0);
    return PST_OK;
}

/* The event's latest record, held for the caller; NULL if there is none or it has been. */
static pst__sim_mark *mark_to_wait_for(sim *sim, const pst_event *event) {
    ck_spinlock_lock(&sim->lock);
    pst__sim_mark *mark = event->mark;
    if (mark != NULL) mark->holders++;
    ck_spinlock_unlock(&sim->lock);
    return mark;
}

static pst_status stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    sim *sim = pst__sim_of(device);
    const pst_status fault = pst__sim_fault(sim, "stream_wait");
    if (fault != PST_OK) return fault;
    operation *wait = pst__sim_operation_create(sim, PST__SIM_WAIT_EVENT, 0);
    if (wait == NULL) return PST_ENOMEM;
    wait->mark = mark_to_wait_for(sim, event);
    if (wait->mark != NULL)
        pst__sim_enqueue(sim, stream, wait, 0);
    else
        pst__heap_free(sim->heap, wait, sizeof *wait);
    return PST_OK;
}

static pst_status event_query(pst_device *device, pst_event *event) {
    sim *sim = pst__sim_of(device);
    const pst_status fault = pst__sim_fault(sim, "event_query");
    if (fault != PST_OK) return fault;
    const uint64_t now = sim->options.now(sim->options.context);
    ck_spinlock_lock(&sim->lock);
    pst__sim_settle(sim, now);
    const pst__sim_mark *mark = event->mark;
    const int seen = mark == NULL || (mark->done && mark->end + mark->late <= now);
    ck_spinlock_unlock(&sim->lock);
    return seen ? PST_OK : PST_PENDING;
}

static pst_status event_time(pst_device *device, pst_event *event, uint64_t *nanoseconds) {
    sim *sim = pst__sim_of(device);
    ck_spinlock_lock(&sim->lock);
    *nanoseconds = event->mark == NULL ? 0 : event->mark->end;
    ck_spinlock_unlock(&sim->lock);
    return PST_OK;
}

/* ---- flags ------------------------------------------------------------------------------ */

static pst_status enqueue_flag(pst_device *device, pst_stream *stream, pst__sim_kind kind,
                               const uint32_t *address, uint32_t value) {
    sim *sim = pst__sim_of(device);
    operation *made = pst__sim_operation_create(sim, kind, 0);
    if (made == NULL) return PST_ENOMEM;
    made->flag = (uint32_t *)(uintptr_t)address;
    made->value = value;
    pst__sim_enqueue(sim, stream, made, kind == PST__SIM_WRITE32 ? cost_of(sim, 0) : 0);
    return PST_OK;
}

static pst_status stream_write32(pst_device *device, pst_stream *stream, uint32_t *address,
                                 uint32_t value) {
    const pst_status fault = pst__sim_fault(pst__sim_of(device), "stream_write32");
    if (fault != PST_OK) return fault;
    return enqueue_flag(device, stream, PST__SIM_WRITE32, address, value);
}

static pst_status stream_wait32(pst_device *device, pst_stream *stream, const uint32_t *address,
                                uint32_t value) {
    const pst_status fault = pst__sim_fault(pst__sim_of(device), "stream_wait32");
    if (fault != PST_OK) return fault;
    return enqueue_flag(device, stream, PST__SIM_WAIT32, address, value);
}

/* Release: pairs with the acquire of a stream that waits for the flag. */
static pst_status flag_write32(pst_device *device, uint32_t *address, uint32_t value) {
    const pst_status fault = pst__sim_fault(pst__sim_of(device), "flag_write32");
    if (fault == PST_OK) pst__store_release(address, value);
    return fault;
}

/* ---- copies and kernels ----------------------------------------------------------------- */

static pst_status copy(pst_device *device, pst_stream *stream, const pst_copy *copies,
                       size_t count) {
    sim *sim = pst__sim_of(device);
    pst_status status = pst__sim_fault(sim, "copy");
    for (size_t i = 0; i < count && status == PST_OK; i++) {
        const pst__sim_rows rows = {.destination = copies[i].destination,
                                    .source = copies[i].source,
                                    .bytes = copies[i].bytes,
                                    .count = 1};
        status = enqueue_rows(sim, stream, &rows);
    }
    return status;
}

static pst_status copy_2d(pst_device *device, pst_stream *stream, void *destination,
                          size_t destination_pitch, const void *source, size_t source_pitch,
                          size_t row_bytes, size_t row_count) {
    sim *sim = pst__sim_of(device);
    const pst__sim_rows rows = {destination, source, destination_pitch, source_pitch, row_bytes,
                                row_count,   0};
    const pst_status fault = pst__sim_fault(sim, "copy_2d");
    return fault != PST_OK ? fault : enqueue_rows(sim, stream, &rows);
}

static pst_status fill(pst_device *device, pst_stream *stream, void *memory, int byte,
                       size_t bytes) {
    sim *sim = pst__sim_of(device);
    const pst__sim_rows rows = {.destination = memory, .bytes = bytes, .count = 1, .byte = byte};
    const pst_status fault = pst__sim_fault(sim, "fill");
    return fault != PST_OK ? fault : enqueue_rows(sim, stream, &rows);
}

static pst_status enqueue_cast(sim *sim, pst_stream *stream, const pst_cast *piece, double scale) {
    pst_cast nothing = *piece;
    nothing.count = 0;
    const pst_status status = pst__host_cast(&nothing, scale);
    if (status != PST_OK || piece->count == 0) return status;
    operation *made = pst__sim_operation_create(sim, PST__SIM_CAST, 0);
    if (made == NULL) return PST_ENOMEM;
    made->cast = *piece;
    made->scale = scale;
    pst__sim_enqueue(sim, stream, made,
                     cost_of(sim, piece->count * pst_dtype_size(piece->destination_dtype)));
    return PST_OK;
}

static pst_status cast_scale_copy(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                                  size_t count, double scale) {
    sim *sim = pst__sim_of(device);
    pst_status status = pst__sim_fault(sim, "cast_scale_copy");
    for (size_t i = 0; i < count && status == PST_OK; i++)
        status = enqueue_cast(sim, stream, &pieces[i], scale);
    return status;
}

static pst_status enqueue_sum(sim *sim, pst_stream *stream, pst__sim_kind kind,
                              const pst_sum *given) {
    if (given->count == 0) return PST_OK;
    operation *made = pst__sim_operation_create(sim, kind, given->source_count);
    if (made == NULL) return PST_ENOMEM;
    made->sum = *given;
    made->sum.sources = made->sources;
    memcpy(made->sources, given->sources, given->source_count * sizeof *given->sources);
    pst__sim_enqueue(
        sim, stream, made,
        cost_of(sim, given->source_count * given->count * pst_dtype_size(given->source_dtype)));
    return PST_OK;
}

static pst_status sum(pst_device *device, pst_stream *stream, const pst_sum *given) {
    sim *sim = pst__sim_of(device);
    pst_sum nothing = *given;
    nothing.count = 0;
    pst_status status = pst__sim_fault(sim, "sum");
    if (status == PST_OK) status = pst__host_sum(&nothing);
    return status == PST_OK ? enqueue_sum(sim, stream, PST__SIM_SUM, given) : status;
}

static pst_status maximum(pst_device *device, pst_stream *stream, const pst_sum *given) {
    sim *sim = pst__sim_of(device);
    pst_sum nothing = *given;
    nothing.count = 0;
    pst_status status = pst__sim_fault(sim, "maximum");
    if (status == PST_OK) status = pst__host_maximum(&nothing);
    return status == PST_OK ? enqueue_sum(sim, stream, PST__SIM_MAXIMUM, given) : status;
}

static pst_status copy_rows(pst_device *device, pst_stream *stream, const pst_row_copy *given) {
    sim *sim = pst__sim_of(device);
    const size_t bytes = given->range_count * sizeof *given->ranges;
    pst_status status = pst__sim_fault(sim, "copy_rows");
    if (status != PST_OK || bytes == 0) return status;
    operation *made = pst__sim_operation_create(sim, PST__SIM_NAMED, bytes / sizeof *made->sources);
    if (made == NULL) return PST_ENOMEM;
    made->named = *given;
    made->named.ranges = (const pst_row_range *)(const void *)made->sources;
    memcpy(made->sources, given->ranges, bytes);
    pst__sim_enqueue(sim, stream, made, cost_of(sim, given->count * given->row_bytes));
    return PST_OK;
}

static pst_status adamw_prepare(pst_device *device, pst_stream *stream,
                                const pst_adamw_settings *settings, float *const *steps,
                                size_t count, void *coefficients) {
    sim *sim = pst__sim_of(device);
    pst_status status = pst__sim_fault(sim, "adamw_prepare");
    for (size_t i = 0; i < count && status == PST_OK; i++) {
        operation *made = pst__sim_operation_create(sim, PST__SIM_PREPARE, 0);
        if (made == NULL) return PST_ENOMEM;
        made->settings = *settings;
        made->step = steps[i];
        made->coefficients = (char *)coefficients + i * PST_ADAMW_COEFFICIENTS_BYTES;
        pst__sim_enqueue(sim, stream, made, cost_of(sim, PST_ADAMW_COEFFICIENTS_BYTES));
    }
    return status;
}

static pst_status enqueue_update(sim *sim, pst_stream *stream, const pst_adamw_piece *piece) {
    if (piece->count == 0) return PST_OK;
    operation *made = pst__sim_operation_create(sim, PST__SIM_ADAMW, piece->source_count);
    if (made == NULL) return PST_ENOMEM;
    made->update = *piece;
    made->update.sources = made->sources;
    for (size_t i = 0; i < piece->source_count; i++)
        made->sources[i] = piece->sources[i];
    pst__sim_enqueue(sim, stream, made,
                     cost_of(sim, piece->count * (pst_dtype_size(piece->parameter_dtype) +
                                                  2 * pst_dtype_size(piece->moment_dtype))));
    return PST_OK;
}

static pst_status adamw(pst_device *device, pst_stream *stream, const pst_adamw_piece *pieces,
                        size_t count) {
    sim *sim = pst__sim_of(device);
    pst_status status = pst__sim_fault(sim, "adamw");
    for (size_t i = 0; i < count && status == PST_OK; i++)
        status = pst__adamw_check(&pieces[i]);
    for (size_t i = 0; i < count && status == PST_OK; i++)
        status = enqueue_update(sim, stream, &pieces[i]);
    return status;
}

/* ---- the device ------------------------------------------------------------------------- */

/* What is still enqueued never happens. */
static void destroy(pst_device *device) {
    sim *sim = pst__sim_of(device);
    pst__sim_drop_streams(sim);
    pst__sim_drop_memory(sim);
    pst__heap_free(sim->heap, sim, sizeof *sim);
}

static const pst_device_ops sim_ops = {
    .api_version = PST_DEVICE_API_VERSION,
    .caps = PST_DEVICE_TIMED_EVENTS | PST_DEVICE_HOST_ACCESS,
    .name = "sim",
    .stream_create = stream_create,
    .stream_wrap = stream_wrap,
    .stream_destroy = stream_destroy,
    .launch = launch,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .event_time = event_time,
    .copy = copy,
    .copy_2d = copy_2d,
    .alloc = pst__sim_alloc,
    .free = pst__sim_free,
    .memory_export = pst__sim_memory_export,
    .memory_import = pst__sim_memory_import,
    .memory_unmap = pst__sim_memory_unmap,
    .stream_write32 = stream_write32,
    .stream_wait32 = stream_wait32,
    .flag_write32 = flag_write32,
    .cast_scale_copy = cast_scale_copy,
    .sum = sum,
    .fill = fill,
    .maximum = maximum,
    .copy_rows = copy_rows,
    .adamw_prepare = adamw_prepare,
    .adamw = adamw,
    .destroy = destroy,
};

pst_status pst__sim_create(const pst__heap *heap, const pst__sim_options *options,
                           pst_device **created) {
    sim *made = pst__heap_alloc(heap, sizeof *made);
    *created = NULL;
    if (made == NULL) return PST_ENOMEM;
    made->device = (pst_device){&sim_ops, made};
    made->heap = heap;
    made->options = *options;
    ck_spinlock_init(&made->lock);
    *created = &made->device;
    return PST_OK;
}
