#include "sched/device/sim.h"

#include "sched/device/host_kernels.h"

#include <ck_spinlock.h>
#include <string.h>

struct pst_stream {
    uint64_t end; /* of all that is enqueued */
};

struct pst_event {
    uint64_t end;  /* of what was enqueued before the latest record; 0: never recorded */
    uint64_t seen; /* when a query tells so */
};

typedef struct rows {
    char *destination;
    const char *source; /* NULL: fill with `byte` */
    size_t destination_pitch, source_pitch, bytes, count;
    int byte;
} rows;

typedef enum operation_kind { CALL, ROWS, CAST, SUM } operation_kind;

typedef struct operation {
    struct operation *next;
    uint64_t end;
    operation_kind kind;
    void (*run)(void *argument);
    void *argument;
    rows rows;
    pst_cast cast;
    double scale;
    pst_sum sum;
    const void *sources[]; /* SUM */
} operation;

typedef struct sim {
    pst_device device;
    const pst__heap *heap;
    pst__sim_options options;
    ck_spinlock_t lock;    /* of the list and of the streams' ends; held while effects happen */
    operation *operations; /* by end; equal ends in the order of enqueuing */
} sim;

static sim *sim_of(const pst_device *device) {
    return device->context;
}

static pst_status fault_of(const sim *sim, const char *call) {
    return sim->options.fault == NULL ? PST_OK : sim->options.fault(sim->options.context, call);
}

/* ---- operations ------------------------------------------------------------------------- */

static size_t size_of(const operation *operation) {
    return sizeof *operation + operation->sum.source_count * sizeof(void *);
}

static void do_rows(const rows *rows) {
    for (size_t i = 0; i < rows->count; i++) {
        char *destination = rows->destination + i * rows->destination_pitch;
        if (rows->source == NULL)
            memset(destination, rows->byte, rows->bytes);
        else
            memmove(destination, rows->source + i * rows->source_pitch, rows->bytes);
    }
}

/* Arguments that the kernels refuse were refused when the operation was enqueued. */
static void happen(const operation *operation) {
    switch (operation->kind) {
    case CALL:
        operation->run(operation->argument);
        break;
    case ROWS:
        do_rows(&operation->rows);
        break;
    case CAST:
        (void)pst__host_cast(&operation->cast, operation->scale);
        break;
    case SUM:
        (void)pst__host_sum(&operation->sum);
        break;
    }
}

/* Under the lock. */
static void settle(sim *sim, uint64_t now) {
    while (sim->operations != NULL && sim->operations->end <= now) {
        operation *first = sim->operations;
        sim->operations = first->next;
        happen(first);
        pst__heap_free(sim->heap, first, size_of(first));
    }
}

static uint64_t cost_of(const sim *sim, size_t bytes) {
    const pst__sim_options *options = &sim->options;
    uint64_t cost = options->latency_ns;
    if (options->bytes_each_us != 0) cost += (uint64_t)bytes * 1000u / options->bytes_each_us;
    if (options->jitter != NULL) cost += options->jitter(options->context);
    return cost;
}

static void enqueue(sim *sim, pst_stream *stream, operation *added, uint64_t cost) {
    const uint64_t now = sim->options.now(sim->options.context);
    ck_spinlock_lock(&sim->lock);
    settle(sim, now);
    stream->end = (stream->end > now ? stream->end : now) + cost;
    added->end = stream->end;
    operation **link = &sim->operations;
    while (*link != NULL && (*link)->end <= added->end)
        link = &(*link)->next;
    added->next = *link;
    *link = added;
    ck_spinlock_unlock(&sim->lock);
}

static operation *operation_create(const sim *sim, operation_kind kind, size_t source_count) {
    operation *made =
        pst__heap_alloc(sim->heap, sizeof *made + source_count * sizeof *made->sources);
    if (made == NULL) return NULL;
    made->kind = kind;
    made->sum.source_count = source_count;
    return made;
}

pst_status pst__sim_call(pst_device *device, pst_stream *stream, uint64_t nanoseconds,
                         void (*run)(void *argument), void *argument) {
    sim *sim = sim_of(device);
    operation *call = operation_create(sim, CALL, 0);
    if (call == NULL) return PST_ENOMEM;
    call->run = run;
    call->argument = argument;
    enqueue(sim, stream, call, nanoseconds + cost_of(sim, 0));
    return PST_OK;
}

static pst_status enqueue_rows(sim *sim, pst_stream *stream, const rows *rows) {
    if (rows->bytes == 0 || rows->count == 0) return PST_OK;
    operation *made = operation_create(sim, ROWS, 0);
    if (made == NULL) return PST_ENOMEM;
    made->rows = *rows;
    enqueue(sim, stream, made, cost_of(sim, rows->bytes * rows->count));
    return PST_OK;
}

/* ---- streams ---------------------------------------------------------------------------- */

static pst_status stream_create(pst_device *device, int priority, pst_stream **stream) {
    const sim *sim = sim_of(device);
    (void)priority;
    const pst_status fault = fault_of(sim, "stream_create");
    if (fault != PST_OK) return fault;
    *stream = pst__heap_alloc(sim->heap, sizeof **stream);
    return *stream == NULL ? PST_ENOMEM : PST_OK;
}

static pst_status stream_wrap(pst_device *device, void *native, pst_stream **stream) {
    return native != NULL ? PST_EUNSUPPORTED : stream_create(device, 0, stream);
}

static void stream_destroy(pst_device *device, pst_stream *stream) {
    pst__heap_free(sim_of(device)->heap, stream, sizeof *stream);
}

static pst_status launch(pst_device *device, pst_stream *stream, const pst_work *work) {
    const pst_status fault = fault_of(sim_of(device), "launch");
    return fault != PST_OK ? fault : work->start(work->argument, stream);
}

/* ---- events ----------------------------------------------------------------------------- */

static pst_status event_create(pst_device *device, int timed, pst_event **event) {
    const sim *sim = sim_of(device);
    (void)timed; /* all are */
    const pst_status fault = fault_of(sim, "event_create");
    if (fault != PST_OK) return fault;
    *event = pst__heap_alloc(sim->heap, sizeof **event);
    return *event == NULL ? PST_ENOMEM : PST_OK;
}

static void event_destroy(pst_device *device, pst_event *event) {
    pst__heap_free(sim_of(device)->heap, event, sizeof *event);
}

static pst_status event_record(pst_device *device, pst_event *event, pst_stream *stream) {
    sim *sim = sim_of(device);
    const pst__sim_options *options = &sim->options;
    const pst_status fault = fault_of(sim, "event_record");
    if (fault != PST_OK) return fault;
    const uint64_t late = options->late == NULL ? 0 : options->late(options->context);
    ck_spinlock_lock(&sim->lock);
    event->end = stream->end;
    event->seen = stream->end + late;
    ck_spinlock_unlock(&sim->lock);
    return PST_OK;
}

static pst_status stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    sim *sim = sim_of(device);
    const pst_status fault = fault_of(sim, "stream_wait");
    if (fault != PST_OK) return fault;
    ck_spinlock_lock(&sim->lock);
    if (stream->end < event->end) stream->end = event->end;
    ck_spinlock_unlock(&sim->lock);
    return PST_OK;
}

static pst_status event_query(pst_device *device, pst_event *event) {
    sim *sim = sim_of(device);
    const pst_status fault = fault_of(sim, "event_query");
    if (fault != PST_OK) return fault;
    const uint64_t now = sim->options.now(sim->options.context);
    ck_spinlock_lock(&sim->lock);
    settle(sim, now);
    const pst_status status = event->seen <= now ? PST_OK : PST_PENDING;
    ck_spinlock_unlock(&sim->lock);
    return status;
}

static pst_status event_time(pst_device *device, pst_event *event, uint64_t *nanoseconds) {
    sim *sim = sim_of(device);
    ck_spinlock_lock(&sim->lock);
    *nanoseconds = event->end;
    ck_spinlock_unlock(&sim->lock);
    return PST_OK;
}

/* ---- copies and kernels ----------------------------------------------------------------- */

static pst_status copy(pst_device *device, pst_stream *stream, const pst_copy *copies,
                       size_t count) {
    sim *sim = sim_of(device);
    pst_status status = fault_of(sim, "copy");
    for (size_t i = 0; i < count && status == PST_OK; i++) {
        const rows rows = {.destination = copies[i].destination,
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
    sim *sim = sim_of(device);
    const rows rows = {destination, source, destination_pitch, source_pitch, row_bytes,
                       row_count,   0};
    const pst_status fault = fault_of(sim, "copy_2d");
    return fault != PST_OK ? fault : enqueue_rows(sim, stream, &rows);
}

static pst_status fill(pst_device *device, pst_stream *stream, void *memory, int byte,
                       size_t bytes) {
    sim *sim = sim_of(device);
    const rows rows = {.destination = memory, .bytes = bytes, .count = 1, .byte = byte};
    const pst_status fault = fault_of(sim, "fill");
    return fault != PST_OK ? fault : enqueue_rows(sim, stream, &rows);
}

static pst_status enqueue_cast(sim *sim, pst_stream *stream, const pst_cast *piece, double scale) {
    pst_cast nothing = *piece;
    nothing.count = 0;
    const pst_status status = pst__host_cast(&nothing, scale);
    if (status != PST_OK || piece->count == 0) return status;
    operation *made = operation_create(sim, CAST, 0);
    if (made == NULL) return PST_ENOMEM;
    made->cast = *piece;
    made->scale = scale;
    enqueue(sim, stream, made,
            cost_of(sim, piece->count * pst_dtype_size(piece->destination_dtype)));
    return PST_OK;
}

static pst_status cast_scale_copy(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                                  size_t count, double scale) {
    sim *sim = sim_of(device);
    pst_status status = fault_of(sim, "cast_scale_copy");
    for (size_t i = 0; i < count && status == PST_OK; i++)
        status = enqueue_cast(sim, stream, &pieces[i], scale);
    return status;
}

static pst_status sum(pst_device *device, pst_stream *stream, const pst_sum *given) {
    sim *sim = sim_of(device);
    pst_sum nothing = *given;
    nothing.count = 0;
    pst_status status = fault_of(sim, "sum");
    if (status == PST_OK) status = pst__host_sum(&nothing);
    if (status != PST_OK || given->count == 0) return status;
    operation *made = operation_create(sim, SUM, given->source_count);
    if (made == NULL) return PST_ENOMEM;
    made->sum = *given;
    made->sum.sources = made->sources;
    memcpy(made->sources, given->sources, given->source_count * sizeof *given->sources);
    enqueue(sim, stream, made,
            cost_of(sim, given->source_count * given->count * pst_dtype_size(given->source_dtype)));
    return PST_OK;
}

/* ---- memory, and the device ------------------------------------------------------------- */

static pst_status alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory) {
    const sim *sim = sim_of(device);
    const pst_status fault = fault_of(sim, "alloc");
    (void)kind;
    *memory = NULL;
    if (fault != PST_OK || bytes == 0) return bytes == 0 ? PST_EINVAL : fault;
    *memory = pst__heap_alloc(sim->heap, bytes);
    return *memory == NULL ? PST_ENOMEM : PST_OK;
}

static void release(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    (void)kind;
    pst__heap_free(sim_of(device)->heap, memory, bytes);
}

/* What is still enqueued never happens. */
static void destroy(pst_device *device) {
    sim *sim = sim_of(device);
    while (sim->operations != NULL) {
        operation *next = sim->operations->next;
        pst__heap_free(sim->heap, sim->operations, size_of(sim->operations));
        sim->operations = next;
    }
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
    .alloc = alloc,
    .free = release,
    .cast_scale_copy = cast_scale_copy,
    .sum = sum,
    .fill = fill,
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
