/* The host device's kernels: plain loops that the compiler vectorises. They return PST_EUNSUPPORTED
 * for dtypes they cannot convert. */
#ifndef PST_SCHED_DEVICE_HOST_KERNELS_H
#define PST_SCHED_DEVICE_HOST_KERNELS_H

#include <penstock/device.h>

pst_status pst__host_cast(const pst_cast *piece, double scale);
pst_status pst__host_sum(const pst_sum *sum);
pst_status pst__host_maximum(const pst_sum *maximum);

#endif
