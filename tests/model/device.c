#include "device.h"

enum { STREAMS = 4, OPERATIONS = 16 };

struct pst_event {
    const pst_stream *stream; /* NULL: never recorded */
    unsigned place;           /* how much of the stream comes before it */
};

/* A call, or a wait for an event as it was recorded then. */
typedef struct operation {
    void (*run)(void *argument);
    void *argument;
    pst_event awaited;
} operation;

struct pst_stream {
    operation operations[OPERATIONS];
    unsigned enqueued, happened;
};

static struct {
    pst_device device;
    pst_stream streams[STREAMS];
    unsigned stream_count;
} device;

static int is_done(const pst_event *event) {
    return event->stream == NULL || event->stream->happened >= event->place;
}

static void enqueue(pst_stream *stream, operation added) {
    model_point();
    model_check(stream->enqueued < OPERATIONS, "a stream is too long for the device");
    stream->operations[stream->enqueued++] = added;
}

/* ---- what happens ----------------------------------------------------------------------- */

static int step_stream(pst_stream *stream) {
    if (stream->happened == stream->enqueued) return 0;
    const operation *first = &stream->operations[stream->happened];
    if (!is_done(&first->awaited)) return 0;
    if (first->run != NULL) first->run(first->argument);
    stream->happened++;
    return 1;
}

int model_device_step(void) {
    model_point();
    for (unsigned i = device.stream_count; i-- > 0;)
        if (step_stream(&device.streams[i])) return 1;
    return 0;
}

void model_device_call(pst_stream *stream, void (*run)(void *argument), void *argument) {
    enqueue(stream, (operation){run, argument, {NULL, 0}});
}

/* ---- the table -------------------------------------------------------------------------- */

static pst_status stream_create(pst_device *self, int priority, pst_stream **stream) {
    (void)self, (void)priority;
    if (device.stream_count == STREAMS) return PST_ENOMEM;
    *stream = &device.streams[device.stream_count++];
    return PST_OK;
}

static pst_status stream_wrap(pst_device *self, void *native, pst_stream **stream) {
    (void)native;
    return stream_create(self, 0, stream);
}

static void stream_destroy(pst_device *self, pst_stream *stream) {
    (void)self, (void)stream;
}

static pst_status launch(pst_device *self, pst_stream *stream, const pst_work *work) {
    (void)self;
    return work->start(work->argument, stream);
}

static pst_status event_create(pst_device *self, int timed, pst_event **event) {
    const pst_allocator allocator = model_allocator();
    (void)self, (void)timed;
    *event = allocator.alloc(allocator.context, sizeof **event, _Alignof(pst_event));
    if (*event == NULL) return PST_ENOMEM;
    **event = (pst_event){NULL, 0};
    return PST_OK;
}

static void event_destroy(pst_device *self, pst_event *event) {
    const pst_allocator allocator = model_allocator();
    (void)self;
    allocator.free(allocator.context, event, sizeof *event, _Alignof(pst_event));
}

static pst_status event_record(pst_device *self, pst_event *event, pst_stream *stream) {
    (void)self;
    model_point();
    *event = (pst_event){stream, stream->enqueued};
    return PST_OK;
}

static pst_status stream_wait(pst_device *self, pst_stream *stream, pst_event *event) {
    (void)self;
    enqueue(stream, (operation){NULL, NULL, *event});
    return PST_OK;
}

static pst_status event_query(pst_device *self, pst_event *event) {
    (void)self;
    model_point();
    return is_done(event) ? PST_OK : PST_PENDING;
}

/* What the scheduler calls; no memory, no kernels. */
static const pst_device_ops ops = {.api_version = PST_DEVICE_API_VERSION,
                                   .name = "model",
                                   .stream_create = stream_create,
                                   .stream_wrap = stream_wrap,
                                   .stream_destroy = stream_destroy,
                                   .launch = launch,
                                   .event_create = event_create,
                                   .event_destroy = event_destroy,
                                   .event_record = event_record,
                                   .stream_wait = stream_wait,
                                   .event_query = event_query};

pst_device *model_device_open(void) {
    device.device = (pst_device){&ops, NULL};
    device.stream_count = 0;
    for (unsigned i = 0; i < STREAMS; i++)
        device.streams[i].enqueued = device.streams[i].happened = 0;
    return &device.device;
}
