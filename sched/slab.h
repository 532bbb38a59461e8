/* Blocks of one size with addresses that stay, taken from chunks. One thread at a time takes
 * blocks; all chunks are freed together. */
#ifndef PST_SCHED_SLAB_H
#define PST_SCHED_SLAB_H

#include "base/heap.h"

typedef struct pst__chunk pst__chunk;

typedef struct pst__slab {
    const pst__heap *heap;
    size_t block_bytes, per_chunk;
    pst__chunk *chunks; /* the newest first */
    size_t used;        /* blocks taken from the newest chunk */
} pst__slab;

void pst__slab_init(pst__slab *slab, const pst__heap *heap, size_t block_bytes, size_t per_chunk);
/* A zeroed block, aligned to a cache line, or NULL. */
void *pst__slab_take(pst__slab *slab);
/* Calls `visit` on every block that was ever taken. */
void pst__slab_each(const pst__slab *slab, void (*visit)(void *context, void *block),
                    void *context);
void pst__slab_free(pst__slab *slab);

#endif
