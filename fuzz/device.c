#include "device.h"

#include <stdlib.h>

static fuzz_device *device_of(const pst_device *device) {
    return device->context;
}

static int fails(fuzz_device *self) {
    if (self->fail_in == 0 || --self->fail_in != 0) return 0;
    return self->has_failed = 1;
}

/* ---- what happens ----------------------------------------------------------------------- */

static int is_done(const pst_event *event) {
    return event->stream == NULL || event->stream->happened >= event->place;
}

int fuzz_device_step(fuzz_device *self, unsigned index) {
    if (index >= self->stream_count) return 0;
    pst_stream *stream = &self->streams[index];
    if (stream->happened == stream->enqueued) return 0;
    const fuzz_operation *first = &stream->operations[stream->happened];
    if (!is_done(&first->awaited)) return 0;
    if (first->run != NULL) first->run(first->argument);
    stream->happened++;
    return 1;
}

void fuzz_device_run(fuzz_device *self) {
    for (int again = 1; again;) {
        again = 0;
        for (unsigned i = 0; i < self->stream_count; i++)
            while (fuzz_device_step(self, i))
                again = 1;
    }
}

static pst_status enqueue(pst_stream *stream, fuzz_operation added) {
    if (stream->enqueued == DEVICE_OPERATIONS) return PST_ENOMEM;
    stream->operations[stream->enqueued++] = added;
    return PST_OK;
}

pst_status fuzz_device_call(pst_stream *stream, void (*run)(void *argument), void *argument) {
    return enqueue(stream, (fuzz_operation){run, argument, {NULL, 0}});
}

/* ---- the table -------------------------------------------------------------------------- */

static pst_status stream_create(pst_device *device, int priority, pst_stream **stream) {
    fuzz_device *self = device_of(device);
    (void)priority;
    if (fails(self) || self->stream_count == DEVICE_STREAMS) return PST_EDEVICE;
    *stream = &self->streams[self->stream_count++];
    return PST_OK;
}

static pst_status stream_wrap(pst_device *device, void *native, pst_stream **stream) {
    return native != NULL ? PST_EUNSUPPORTED : stream_create(device, 0, stream);
}

/* Streams lie in the device. */
static void stream_destroy(pst_device *device, pst_stream *stream) {
    (void)device, (void)stream;
}

static pst_status launch(pst_device *device, pst_stream *stream, const pst_work *work) {
    return fails(device_of(device)) ? PST_EDEVICE : work->start(work->argument, stream);
}

static pst_status event_create(pst_device *device, int timed, pst_event **event) {
    fuzz_device *self = device_of(device);
    (void)timed;
    *event = fails(self) ? NULL : calloc(1, sizeof **event);
    self->live_events += *event != NULL;
    return *event == NULL ? PST_EDEVICE : PST_OK;
}

static void event_destroy(pst_device *device, pst_event *event) {
    device_of(device)->live_events--;
    free(event);
}

static pst_status event_record(pst_device *device, pst_event *event, pst_stream *stream) {
    if (fails(device_of(device))) return PST_EDEVICE;
    *event = (pst_event){stream, stream->enqueued};
    return PST_OK;
}

static pst_status stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    if (fails(device_of(device))) return PST_EDEVICE;
    return enqueue(stream, (fuzz_operation){NULL, NULL, *event});
}

static pst_status event_query(pst_device *device, pst_event *event) {
    fuzz_device *self = device_of(device);
    if (fails(self)) return PST_EDEVICE;
    if (self->is_eager) fuzz_device_run(self);
    return is_done(event) ? PST_OK : PST_PENDING;
}

static pst_status alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory) {
    (void)kind;
    *memory = NULL;
    if (fails(device_of(device))) return PST_EDEVICE;
    return posix_memalign(memory, 512, bytes) == 0 ? PST_OK : PST_ENOMEM;
}

static void release(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    (void)device, (void)kind, (void)bytes;
    free(memory);
}

static const pst_device_ops ops = {.api_version = PST_DEVICE_API_VERSION,
                                   .caps = PST_DEVICE_HOST_ACCESS,
                                   .name = "fuzzed",
                                   .stream_create = stream_create,
                                   .stream_wrap = stream_wrap,
                                   .stream_destroy = stream_destroy,
                                   .launch = launch,
                                   .event_create = event_create,
                                   .event_destroy = event_destroy,
                                   .event_record = event_record,
                                   .stream_wait = stream_wait,
                                   .event_query = event_query,
                                   .alloc = alloc,
                                   .free = release};

void fuzz_device_open(fuzz_device *self) {
    self->device = (pst_device){&ops, self};
    self->stream_count = self->fail_in = 0;
    self->live_events = 0;
    self->has_failed = self->is_eager = 0;
    for (unsigned i = 0; i < DEVICE_STREAMS; i++)
        self->streams[i].enqueued = self->streams[i].happened = 0;
}
