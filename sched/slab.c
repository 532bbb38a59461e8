#include "sched/slab.h"

#include <stdint.h>

struct pst__chunk {
    pst__chunk *next;
    _Alignas(PST__CACHE_LINE) unsigned char blocks[];
};

void pst__slab_init(pst__slab *slab, const pst__heap *heap, size_t block_bytes, size_t per_chunk) {
    size_t rounded = (block_bytes + PST__CACHE_LINE - 1) / PST__CACHE_LINE * PST__CACHE_LINE;
    *slab = (pst__slab){.heap = heap, .block_bytes = rounded, .per_chunk = per_chunk};
}

static size_t chunk_bytes(const pst__slab *slab) {
    return sizeof(pst__chunk) + slab->block_bytes * slab->per_chunk;
}

static pst__chunk *alloc_chunk(const pst__slab *slab) {
    const size_t most = (SIZE_MAX - sizeof(pst__chunk)) / slab->block_bytes;
    return slab->per_chunk > most ? NULL : pst__heap_alloc(slab->heap, chunk_bytes(slab));
}

void *pst__slab_take(pst__slab *slab) {
    if (slab->chunks == NULL || slab->used == slab->per_chunk) {
        pst__chunk *chunk = alloc_chunk(slab);
        if (chunk == NULL) return NULL;
        chunk->next = slab->chunks;
        slab->chunks = chunk;
        slab->used = 0;
    }
    return slab->chunks->blocks + slab->block_bytes * slab->used++;
}

void pst__slab_each(const pst__slab *slab, void (*visit)(void *context, void *block),
                    void *context) {
    size_t used = slab->used;
    for (pst__chunk *chunk = slab->chunks; chunk != NULL; chunk = chunk->next) {
        for (size_t i = 0; i < used; i++)
            visit(context, chunk->blocks + slab->block_bytes * i);
        used = slab->per_chunk;
    }
}

void pst__slab_free(pst__slab *slab) {
    while (slab->chunks != NULL) {
        pst__chunk *next = slab->chunks->next;
        pst__heap_free(slab->heap, slab->chunks, chunk_bytes(slab));
        slab->chunks = next;
    }
}
