/* The host device: a stream is whoever launches on it; events count a stream's launches. And its
 * kernels: plain loops that the compiler vectorises. */
#ifndef PST_SCHED_DEVICE_HOST_H
#define PST_SCHED_DEVICE_HOST_H

#include "base/heap.h"
#include "sched/device/adamw.h"

#include <penstock/device.h>

/* `heap` must outlive the device. PST_ENOMEM. */
pst_status pst__host_create(const pst__heap *heap, pst_device **device);

/* PST_EUNSUPPORTED for dtypes that cannot be converted. */
pst_status pst__host_cast(const pst_cast *piece, double scale);
pst_status pst__host_sum(const pst_sum *sum);
pst_status pst__host_maximum(const pst_sum *maximum);
void pst__host_copy_rows(const pst_row_copy *copy);

/* A step of AdamW. PST_EUNSUPPORTED for dtypes that it does not take, of any device. */
pst_status pst__adamw_check(const pst_adamw_piece *piece);
/* What kernels take of the public settings. */
pst__adamw_settings pst__adamw_settings_of(const pst_adamw_settings *given);
pst_status pst__host_adamw(const pst_adamw_piece *piece);
void pst__host_adamw_prepare(const pst_adamw_settings *settings, float *const *steps, size_t count,
                             void *coefficients);

#endif
