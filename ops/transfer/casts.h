/* Casts that are collected for one launch. */
#ifndef PST_OPS_TRANSFER_CASTS_H
#define PST_OPS_TRANSFER_CASTS_H

#include "base/heap.h"

#include <penstock/device.h>

typedef struct pst__casts {
    pst_cast *items;
    size_t count, capacity;
} pst__casts;

static inline pst_status pst__casts_add(const pst__heap *heap, pst__casts *casts, pst_cast cast) {
    const pst_status status = pst__heap_grow(heap, (void **)&casts->items, &casts->capacity,
                                             casts->count + 1, sizeof cast);
    if (status == PST_OK) casts->items[casts->count++] = cast;
    return status;
}

/* Launches nothing for an empty list. Afterwards the list is empty, whatever this returns. */
static inline pst_status pst__casts_launch(pst_device *device, pst_stream *stream,
                                           pst__casts *casts, double scale) {
    const size_t count = casts->count;
    casts->count = 0;
    if (count == 0) return PST_OK;
    return device->ops->cast_scale_copy(device, stream, casts->items, count, scale);
}

static inline void pst__casts_free(const pst__heap *heap, pst__casts *casts) {
    pst__heap_free(heap, casts->items, casts->capacity * sizeof *casts->items);
}

#endif
