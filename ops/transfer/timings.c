#include "ops/transfer/timings.h"

#include "base/clock.h"

static int has_streams(const pst_device *device) {
    return (device->ops->caps & PST_DEVICE_STREAM_IS_WORKER) == 0;
}

static void timing_free(const pst__heap *heap, pst__timing *timing) {
    for (int side = 0; side < PST__TIMING_SIDES; side++)
        if (timing->events[side] != NULL)
            timing->device->ops->event_destroy(timing->device, timing->events[side]);
    pst__heap_free(heap, timing, sizeof *timing);
}

static pst_status create_events(pst__timing *timing) {
    pst_device *device = timing->device;
    pst_status status = PST_OK;
    for (int side = 0; has_streams(device) && side < PST__TIMING_SIDES && status == PST_OK; side++)
        status = device->ops->event_create(device, 1, &timing->events[side]);
    return status;
}

static pst__timing *timing_create(pst__timings *timings) {
    pst__timing *timing = pst__heap_alloc(timings->heap, sizeof *timing);
    if (timing == NULL) return NULL;
    timing->device = timings->device;
    if (create_events(timing) == PST_OK &&
        pst__heap_grow(timings->heap, (void **)&timings->all, &timings->capacity, timings->made + 1,
                       sizeof(void *)) == PST_OK)
        return timings->all[timings->made++] = timing;
    timing_free(timings->heap, timing);
    return NULL;
}

pst__timing *pst__timings_take(pst__timings *timings) {
    const pst_device *device = timings->device;
    if (has_streams(device) && (device->ops->caps & PST_DEVICE_TIMED_EVENTS) == 0) return NULL;
    pst__timing *timing =
        timings->count < timings->made ? timings->all[timings->count] : timing_create(timings);
    if (timing == NULL) return NULL;
    timings->count++;
    pst__timing_forget(timing);
    return timing;
}

void pst__timings_reset(pst__timings *timings) {
    timings->count = 0;
}

void pst__timings_free(pst__timings *timings) {
    for (size_t i = 0; i < timings->made; i++)
        timing_free(timings->heap, timings->all[i]);
    pst__heap_free(timings->heap, timings->all, timings->capacity * sizeof(void *));
    *timings = (pst__timings){0};
}

void pst__timing_forget(pst__timing *timing) {
    timing->bytes = 0;
    timing->charged = 0;
    for (int side = 0; side < PST__TIMING_SIDES; side++) {
        timing->is_noted[side] = 0;
        timing->at[side] = 0;
    }
}

void pst__timing_note(pst__timing *timing, pst__timing_side side, pst_stream *stream) {
    if (timing == NULL || timing->is_noted[side]) return;
    pst_device *device = timing->device;
    if (timing->events[side] == NULL)
        timing->at[side] = pst__now();
    else if (device->ops->event_record(device, timing->events[side], stream) != PST_OK)
        return;
    timing->is_noted[side] = 1;
}

uint64_t pst__timing_read(pst__timing *timing, pst__timing_side side) {
    if (timing == NULL || !timing->is_noted[side]) return 0;
    pst_device *device = timing->device;
    pst_event *event = timing->events[side];
    if (timing->at[side] == 0 && event != NULL &&
        device->ops->event_query(device, event) == PST_OK &&
        device->ops->event_time(device, event, &timing->at[side]) != PST_OK)
        timing->at[side] = 0;
    return timing->at[side];
}
