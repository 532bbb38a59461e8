/* Work that is no part of the graph, and the events that stand for it: what tasks wait for by
 * after_events. On the device it is enqueued on a stream of its own; on the host it is pending
 * until outside_end. */
#ifndef PST_TESTS_SIM_OUTSIDE_H
#define PST_TESTS_SIM_OUTSIDE_H

#include <penstock/runtime.h>

#define OUTSIDE_EVENTS 4u

typedef enum outside_place { OUTSIDE_DEVICE, OUTSIDE_HOST, OUTSIDE_PLACES } outside_place;

/* A stream, with pieces of work in order and an event behind each. */
typedef struct outside_stream {
    pst_device *device;
    pst_stream *stream;
    pst_event *events[OUTSIDE_EVENTS]; /* NULL: could not be recorded */
    uint32_t happened;
} outside_stream;

typedef struct outside {
    outside_stream streams[OUTSIDE_PLACES];
    int is_pending; /* on the host */
} outside;

/* What fails leaves its events out; `host` NULL: none there. */
void outside_begin(outside *self, pst_device *device, pst_device *host, uint64_t seed);
/* Ends what is pending on the host. */
void outside_end(outside *self);
/* No task waits for the events any more. */
void outside_free(outside *self, outside_place place);

/* Those of the `wanted` events from `first` on (they go round) that there are. */
uint32_t outside_events(const outside *self, outside_place place, uint32_t first, uint32_t wanted,
                        pst_event **events);
/* 1 when what those stand for has happened. */
int outside_has_happened(const outside *self, outside_place place, uint32_t first, uint32_t wanted);

#endif
