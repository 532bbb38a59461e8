/* When something began and ended on a stream: by the device's clock, from timed events that are
 * read once the device has passed them, which nobody waits for; on the host device by the host's
 * clock, at once. */
#ifndef PST_OPS_TRANSFER_TIMINGS_H
#define PST_OPS_TRANSFER_TIMINGS_H

#include "base/heap.h"

#include <penstock/device.h>

typedef enum pst__timing_side { PST__BEGAN = 0, PST__ENDED, PST__TIMING_SIDES } pst__timing_side;

/* Written by the thread that launches what is timed, read once that is known to be launched. */
typedef struct pst__timing {
    pst_device *device;
    pst_event *events[PST__TIMING_SIDES]; /* NULL: the host's clock serves */
    int is_noted[PST__TIMING_SIDES];
    uint64_t at[PST__TIMING_SIDES]; /* nanoseconds of the host's clock, once read; 0: unknown */
    size_t bytes;                   /* of all that shares it */
    uint64_t charged;               /* of its time, where others run beside it: see notes.h */
} pst__timing;

/* Those of a pass. They are used again by the next one. */
typedef struct pst__timings {
    const pst__heap *heap;
    pst_device *device;
    pst__timing **all;
    size_t count, made, capacity;
} pst__timings;

/* NULL: the device has no timed events, or there is no memory; then nothing is noted. */
pst__timing *pst__timings_take(pst__timings *timings);
/* What was taken is not used by anybody any more. */
void pst__timings_reset(pst__timings *timings);
void pst__timings_free(pst__timings *timings);

/* Nothing is noted. */
void pst__timing_forget(pst__timing *timing);
/* Behind what the stream was given so far. A timing that is NULL notes nothing. */
void pst__timing_note(pst__timing *timing, pst__timing_side side, pst_stream *stream);
/* Nanoseconds of the host's clock; 0: not known, or not yet. */
uint64_t pst__timing_read(pst__timing *timing, pst__timing_side side);

#endif
