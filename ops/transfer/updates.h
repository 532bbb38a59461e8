/* Pieces of AdamW that are collected for one launch. */
#ifndef PST_OPS_TRANSFER_UPDATES_H
#define PST_OPS_TRANSFER_UPDATES_H

#include "base/heap.h"

#include <penstock/device.h>

typedef struct pst__updates {
    pst_adamw_piece *pieces;
    size_t count, capacity;
} pst__updates;

static inline pst_status pst__updates_add(const pst__heap *heap, pst__updates *updates,
                                          const pst_adamw_piece *piece) {
    const pst_status status = pst__heap_grow(heap, (void **)&updates->pieces, &updates->capacity,
                                             updates->count + 1, sizeof *piece);
    if (status == PST_OK) updates->pieces[updates->count++] = *piece;
    return status;
}

/* Launches nothing for an empty list. */
static inline pst_status pst__updates_launch(pst_device *device, pst_stream *stream,
                                             const pst__updates *updates) {
    if (updates->count == 0) return PST_OK;
    return device->ops->adamw(device, stream, updates->pieces, updates->count);
}

static inline void pst__updates_free(const pst__heap *heap, pst__updates *updates) {
    pst__heap_free(heap, updates->pieces, updates->capacity * sizeof *updates->pieces);
}

#endif
