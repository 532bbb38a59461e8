/* Copies that are collected for one call. */
#ifndef PST_OPS_TRANSFER_COPIES_H
#define PST_OPS_TRANSFER_COPIES_H

#include "base/heap.h"

#include <penstock/device.h>

typedef struct pst__copies {
    pst_copy *items;
    size_t count, capacity;
} pst__copies;

static inline pst_status pst__copies_add(const pst__heap *heap, pst__copies *copies,
                                         pst_copy copy) {
    const pst_status status = pst__heap_grow(heap, (void **)&copies->items, &copies->capacity,
                                             copies->count + 1, sizeof copy);
    if (status == PST_OK) copies->items[copies->count++] = copy;
    return status;
}

/* Enqueues nothing for an empty list. */
static inline pst_status pst__copies_launch(pst_device *device, pst_stream *stream,
                                            const pst__copies *copies) {
    if (copies->count == 0) return PST_OK;
    return device->ops->copy(device, stream, copies->items, copies->count);
}

static inline void pst__copies_free(const pst__heap *heap, pst__copies *copies) {
    pst__heap_free(heap, copies->items, copies->capacity * sizeof *copies->items);
}

#endif
