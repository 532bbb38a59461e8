#include "sched/device/needs.h"

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
