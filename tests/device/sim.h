/* The device `sim`: asynchronous streams under a clock of the caller's. An operation begins when
 * its stream has come to it and takes what the model says; its effect happens at its end, when the
 * clock has come there and the device is asked next, in the order of the ends over all streams:
 * work that nobody ordered is seen out of order, and memory that is reused too early is spoilt.
 * Ranks of one process share one `sim`, which sees their flags change; what a host thread stores
 * into a flag is seen when the device is asked next. */
#ifndef PST_TESTS_DEVICE_SIM_H
#define PST_TESTS_DEVICE_SIM_H

#include "base/heap.h"

typedef struct pst__sim_options {
    uint64_t (*now)(void *context); /* nanoseconds; never goes back */
    /* (optional) asked in every call that can fail, with its name in the table: a status other than
     * PST_OK is returned instead of the call being made */
    pst_status (*fault)(void *context, const char *call);
    /* (optional) nanoseconds that this operation takes longer than the model says */
    uint64_t (*jitter)(void *context);
    /* (optional) nanoseconds after its end at which this record of an event is seen as done */
    uint64_t (*late)(void *context);
    /* (optional) told of each copy when it happens, with the time that it took */
    void (*copied)(void *context, const void *destination, const void *source, uint64_t begin,
                   uint64_t end);
    void *context;
    uint64_t latency_ns;    /* of each operation */
    uint64_t bytes_each_us; /* bandwidth of copies and kernels; 0: unlimited */
} pst__sim_options;

/* Lives until destroyed, after all runtimes that use it. PST_ENOMEM. */
pst_status pst__sim_create(const pst__heap *heap, const pst__sim_options *options,
                           pst_device **device);

/* For the start of a work: run(argument) happens when `stream` gets there, `nanoseconds` later than
 * what is before it. It may not call the device. PST_ENOMEM. */
pst_status pst__sim_call(pst_device *device, pst_stream *stream, uint64_t nanoseconds,
                         void (*run)(void *argument), void *argument);

#endif
