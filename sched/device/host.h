/* The host device: a stream is whoever launches on it; events count a stream's launches. And its
 * kernels: plain loops that the compiler vectorises. */
#ifndef PST_SCHED_DEVICE_HOST_H
#define PST_SCHED_DEVICE_HOST_H

#include "base/heap.h"

#include <penstock/device.h>

/* `heap` must outlive the device. PST_ENOMEM. */
pst_status pst__host_create(const pst__heap *heap, pst_device **device);

/* PST_EUNSUPPORTED for dtypes that cannot be converted. */
pst_status pst__host_cast(const pst_cast *piece, double scale);
pst_status pst__host_sum(const pst_sum *sum);
pst_status pst__host_maximum(const pst_sum *maximum);

#endif
