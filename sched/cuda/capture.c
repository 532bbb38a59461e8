/* Streams of the device cuda under capture: which of them take part, and what that makes of events.
 *
 *   recorded   asked for, or waited for,    is
 *              by streams that are
 *   before     captured                     done: nothing is enqueued
 *   within     captured                     pending: an edge of the graph
 *   within     captured later, or not       done: nothing is enqueued
 *
 * A stream takes part once it waits for an event recorded within, as the driver has it. */
#include "sched/cuda/cuda.h"

pst_status pst__cuda_capture_begin(pst_device *device, pst_stream *stream) {
    pst__cuda *cuda = pst__cuda_of(device);
    uint64_t none = 0;
    const uint64_t number = pst__add_relaxed(&cuda->captures, 1) + 1;
    /* Acquire-release only because it is one operation for all: see pst__cuda_capture_of. */
    if (!pst__cas_acq_rel(&cuda->capture, &none, number))
        return pst__cuda_refuse(cuda, PST_EBUSY, "another capture runs on this device");
    pst__store_relaxed(&stream->capture, number);
    return PST_OK;
}

void pst__cuda_capture_end(pst_device *device) {
    pst__store_relaxed(&pst__cuda_of(device)->capture, 0);
}
