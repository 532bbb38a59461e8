#include "ops/transfer/stalls.h"

int pst__stalls_measure(const pst__stalls *stalls) {
    return (stalls->is_wanted || pst__trace_on(stalls->trace)) &&
           (stalls->device->ops->caps & PST_DEVICE_TIMED_EVENTS) != 0 &&
           (stalls->device->ops->caps & PST_DEVICE_STREAM_IS_WORKER) == 0;
}

static int has_events(const pst__stalls *stalls, pst__stall *stall) {
    pst_device *device = stalls->device;
    if (stall->begin == NULL && device->ops->event_create(device, 1, &stall->begin) != PST_OK)
        stall->begin = NULL;
    if (stall->end == NULL && device->ops->event_create(device, 1, &stall->end) != PST_OK)
        stall->end = NULL;
    return stall->begin != NULL && stall->end != NULL;
}

static pst__stall *next_free(pst__stalls *stalls) {
    if (stalls->ring == NULL)
        stalls->ring = pst__heap_alloc(stalls->heap, PST__STALLS * sizeof *stalls->ring);
    if (stalls->ring == NULL || stalls->count == PST__STALLS) return NULL;
    pst__stall *stall = &stalls->ring[(stalls->first + stalls->count) % PST__STALLS];
    return has_events(stalls, stall) ? stall : NULL;
}

pst__stall *pst__stall_begin(pst__stalls *stalls, const char *name, uint64_t ticket,
                             uint64_t *total) {
    if (!pst__stalls_measure(stalls)) return NULL;
    pst__stalls_collect(stalls);
    pst_device *device = stalls->device;
    pst__stall *stall = next_free(stalls);
    if (stall == NULL ||
        device->ops->event_record(device, stall->begin, stalls->compute) != PST_OK) {
        stalls->missed++;
        return NULL;
    }
    stall->name = name;
    stall->ticket = ticket;
    stall->total = total;
    return stall;
}

void pst__stall_end(pst__stalls *stalls, const pst__stall *stall) {
    if (stall == NULL) return;
    pst_device *device = stalls->device;
    if (device->ops->event_record(device, stall->end, stalls->compute) == PST_OK)
        stalls->count++;
    else
        stalls->missed++;
}

static void trace_stall(pst__stalls *stalls, const pst__stall *stall, uint64_t begin,
                        uint64_t end) {
    if (!pst__trace_on(stalls->trace)) return;
    if (stalls->track == NULL && pst__track_create(stalls->trace, PST__TRACK_WORKER,
                                                   "compute stream", &stalls->track) != PST_OK)
        stalls->track = NULL;
    if (stalls->track != NULL)
        pst__trace_slice(stalls->track, stall->name, begin, end, stall->ticket, 0);
}

static void read_times(pst__stalls *stalls, const pst__stall *stall) {
    pst_device *device = stalls->device;
    uint64_t begin = 0, end = 0;
    if (device->ops->event_time(device, stall->begin, &begin) != PST_OK ||
        device->ops->event_time(device, stall->end, &end) != PST_OK) {
        stalls->missed++;
        return;
    }
    /* The device's clock may have been set anew between two readings. */
    if (begin < stalls->last_end) begin = stalls->last_end;
    if (end < begin) end = begin;
    stalls->last_end = end;
    stalls->measured++;
    *stall->total += end - begin;
    trace_stall(stalls, stall, begin, end);
}

void pst__stalls_collect(pst__stalls *stalls) {
    pst_device *device = stalls->device;
    while (stalls->count > 0) {
        const pst__stall *oldest = &stalls->ring[stalls->first];
        pst_status status = device->ops->event_query(device, oldest->end);
        if (status == PST_PENDING) return;
        if (status == PST_OK)
            read_times(stalls, oldest);
        else
            stalls->missed++;
        stalls->first = (stalls->first + 1) % PST__STALLS;
        stalls->count--;
    }
}

void pst__stalls_free(pst__stalls *stalls) {
    pst_device *device = stalls->device;
    pst__track_end(stalls->track);
    if (stalls->ring == NULL) return;
    for (size_t i = 0; i < PST__STALLS; i++) {
        if (stalls->ring[i].begin != NULL)
            device->ops->event_destroy(device, stalls->ring[i].begin);
        if (stalls->ring[i].end != NULL) device->ops->event_destroy(device, stalls->ring[i].end);
    }
    pst__heap_free(stalls->heap, stalls->ring, PST__STALLS * sizeof *stalls->ring);
}
