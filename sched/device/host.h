/* The host device: a stream is whoever launches on it; events count a stream's launches. */
#ifndef PST_SCHED_DEVICE_HOST_H
#define PST_SCHED_DEVICE_HOST_H

#include "base/heap.h"

#include <penstock/device.h>

/* `heap` must outlive the device. PST_ENOMEM. */
pst_status pst__host_create(const pst__heap *heap, pst_device **device);

#endif
