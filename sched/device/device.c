/* What all devices share: which of their slots are needed by whom, waiting for a stream, dtypes. */
#include "sched/device/device.h"

#include "base/clock.h"

#include <stddef.h>

#define SLOT(need, slot)                                                                           \
    { PST__NEEDS_##need, #slot, offsetof(pst_device_ops, slot) }

static const struct {
    unsigned need;
    const char *name;
    size_t offset;
} required[] = {
    SLOT(STREAMS, name),
    SLOT(STREAMS, stream_create),
    SLOT(STREAMS, stream_wrap),
    SLOT(STREAMS, stream_destroy),
    SLOT(STREAMS, launch),
    SLOT(STREAMS, event_create),
    SLOT(STREAMS, event_destroy),
    SLOT(STREAMS, event_record),
    SLOT(STREAMS, stream_wait),
    SLOT(STREAMS, event_query),
    SLOT(MEMORY, alloc),
    SLOT(MEMORY, free),
    SLOT(COPIES, copy),
    SLOT(COPIES, cast_scale_copy),
    SLOT(COPIES, sum),
    SLOT(COPIES, fill),
};

/* All slots are pointers. */
static int is_missing(const pst_device_ops *ops, size_t offset) {
    return *(void *const *)(const void *)((const char *)ops + offset) == NULL;
}

const char *pst__device_lacks(const pst_device *device, unsigned needs) {
    const pst_device_ops *ops = device->ops;
    for (size_t i = 0; i < sizeof required / sizeof *required; i++)
        if ((required[i].need & needs) && is_missing(ops, required[i].offset))
            return required[i].name;
    const int is_worker = (ops->caps & PST_DEVICE_STREAM_IS_WORKER) != 0;
    return (needs & PST__NEEDS_STREAMS) && is_worker && ops->progress == NULL ? "progress" : NULL;
}

int pst__device_wait_stream(pst_device *device, pst_stream *stream, pst_event *event,
                            uint64_t until) {
    const struct timespec pause = {0, 50000};
    pst_status status = PST_OK;
    if (device->ops->event_record(device, event, stream) != PST_OK) return 0;
    while ((status = device->ops->event_query(device, event)) == PST_PENDING) {
        if (pst__now() > until) return 0;
        (void)nanosleep(&pause, NULL);
    }
    return status == PST_OK;
}

/* ---- dtypes ----------------------------------------------------------------------------- */

static const struct {
    size_t size;
    const char *name;
} dtypes[PST_DTYPE_COUNT] = {
    [PST_FLOAT32] = {4, "float32"},
    [PST_FLOAT64] = {8, "float64"},
    [PST_FLOAT16] = {2, "float16"},
    [PST_BFLOAT16] = {2, "bfloat16"},
    [PST_INT8] = {1, "int8"},
    [PST_UINT8] = {1, "uint8"},
    [PST_INT16] = {2, "int16"},
    [PST_INT32] = {4, "int32"},
    [PST_INT64] = {8, "int64"},
    [PST_BOOL] = {1, "bool"},
    [PST_FLOAT8_E4M3] = {1, "float8_e4m3"},
    [PST_FLOAT8_E5M2] = {1, "float8_e5m2"},
};

size_t pst_dtype_size(pst_dtype dtype) {
    return (unsigned)dtype < PST_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *pst_dtype_name(pst_dtype dtype) {
    return (unsigned)dtype < PST_DTYPE_COUNT ? dtypes[dtype].name : "unknown dtype";
}
