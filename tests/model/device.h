/* An asynchronous device: each operation of a stream happens when model_device_step says so, so
 * that the explorer chooses between what, on the host, it comes. */
#ifndef PST_TESTS_MODEL_DEVICE_H
#define PST_TESTS_MODEL_DEVICE_H

#include "explorer.h"

#include <penstock/device.h>

/* The device of this run, with no stream yet; its events are model_allocator's. */
pst_device *model_device_open(void);

/* For the start of a work: run(argument) happens on `stream` when all before it has. */
void model_device_call(pst_stream *stream, void (*run)(void *argument), void *argument);

/* One operation happens, of the youngest stream that can go on: what nobody has ordered happens
 * out of order. 0 when there is none. */
int model_device_step(void);

#endif
