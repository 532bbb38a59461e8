#include "outside.h"

#include "tests/device/sim.h"
#include "tests/random.h"

/* ---- work ------------------------------------------------------------------------------- */

static void happen_on_stream(void *argument) {
    ((outside_stream *)argument)->happened++;
}

static pst_status begin_pending(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    return PST_PENDING;
}

static pst_status test_pending(void *argument) {
    outside *self = argument;
    if (self->is_pending) return PST_PENDING;
    self->streams[OUTSIDE_HOST].happened = OUTSIDE_EVENTS;
    return PST_OK;
}

static void record(outside_stream *stream, uint32_t index) {
    const pst_device_ops *ops = stream->device->ops;
    pst_event *event = NULL;
    if (ops->event_create(stream->device, 0, &event) != PST_OK) return;
    if (ops->event_record(stream->device, event, stream->stream) == PST_OK)
        stream->events[index] = event;
    else
        ops->event_destroy(stream->device, event);
}

/* ---- begin and end ---------------------------------------------------------------------- */

static int open_stream(outside_stream *stream, pst_device *device) {
    stream->device = device;
    return device->ops->stream_create(device, 0, &stream->stream) == PST_OK;
}

static void begin_on_device(outside_stream *stream, uint64_t *random) {
    for (uint32_t i = 0; i < OUTSIDE_EVENTS; i++) {
        const uint64_t cost = random_below(random, 100000);
        if (pst__sim_call(stream->device, stream->stream, cost, happen_on_stream, stream) != PST_OK)
            return;
        record(stream, i);
    }
}

/* All four events stand for one piece of work. */
static void begin_on_host(outside *self, outside_stream *stream) {
    const pst_work work = {begin_pending, test_pending, self};
    self->is_pending = 1;
    (void)stream->device->ops->launch(stream->device, stream->stream, &work);
    for (uint32_t i = 0; i < OUTSIDE_EVENTS; i++)
        record(stream, i);
}

void outside_begin(outside *self, pst_device *device, pst_device *host, uint64_t seed) {
    uint64_t random = seed;
    if (open_stream(&self->streams[OUTSIDE_DEVICE], device))
        begin_on_device(&self->streams[OUTSIDE_DEVICE], &random);
    if (host != NULL && open_stream(&self->streams[OUTSIDE_HOST], host))
        begin_on_host(self, &self->streams[OUTSIDE_HOST]);
}

void outside_end(outside *self) {
    const outside_stream *host = &self->streams[OUTSIDE_HOST];
    self->is_pending = 0;
    if (host->stream != NULL) (void)host->device->ops->progress(host->device, host->stream);
}

void outside_free(outside *self, outside_place place) {
    outside_stream *stream = &self->streams[place];
    for (uint32_t i = 0; i < OUTSIDE_EVENTS; i++)
        if (stream->events[i] != NULL)
            stream->device->ops->event_destroy(stream->device, stream->events[i]);
    if (stream->stream != NULL) stream->device->ops->stream_destroy(stream->device, stream->stream);
    *stream = (outside_stream){.device = NULL};
}

/* ---- what tasks wait for ---------------------------------------------------------------- */

uint32_t outside_events(const outside *self, outside_place place, uint32_t first, uint32_t wanted,
                        pst_event **events) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < wanted; i++) {
        pst_event *event = self->streams[place].events[(first + i) % OUTSIDE_EVENTS];
        if (event != NULL) events[count++] = event;
    }
    return count;
}

int outside_has_happened(const outside *self, outside_place place, uint32_t first,
                         uint32_t wanted) {
    const outside_stream *stream = &self->streams[place];
    for (uint32_t i = 0; i < wanted; i++) {
        const uint32_t index = (first + i) % OUTSIDE_EVENTS;
        if (stream->events[index] != NULL && stream->happened <= index) return 0;
    }
    return 1;
}
