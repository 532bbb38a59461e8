#include "base/heap.h"

#include <jemalloc/jemalloc.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

/* Arrays from here on lie in huge pages where the kernel has them: those of a large graph are fresh
 * memory, and its 4 KiB pages would cost more than all that is written to them. */
#define HUGE_PAGE ((size_t)2 << 20)

static size_t builtin_alignment(size_t bytes, size_t alignment) {
    return bytes < HUGE_PAGE ? alignment : HUGE_PAGE;
}

static void *builtin_alloc(void *context, size_t bytes, size_t alignment) {
    (void)context;
    void *memory = pst_je_mallocx(bytes, MALLOCX_ALIGN(builtin_alignment(bytes, alignment)));
    /* Advice: where it is not taken the memory is as good. */
    if (memory != NULL && bytes >= HUGE_PAGE) (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static void builtin_free(void *context, void *memory, size_t bytes, size_t alignment) {
    (void)context;
    pst_je_sdallocx(memory, bytes, MALLOCX_ALIGN(builtin_alignment(bytes, alignment)));
}

pst_status pst__heap_init(pst__heap *heap, const pst_allocator *allocator) {
    if (allocator == NULL || (allocator->alloc == NULL && allocator->free == NULL)) {
        heap->allocator = (pst_allocator){builtin_alloc, builtin_free, NULL};
        return PST_OK;
    }
    if (allocator->alloc == NULL || allocator->free == NULL) return PST_EINVAL;
    heap->allocator = *allocator;
    return PST_OK;
}

/* A size of zero still yields memory of its own. */
static size_t at_least_one(size_t bytes) {
    return bytes == 0 ? 1 : bytes;
}

void *pst__heap_alloc_unset(const pst__heap *heap, size_t bytes) {
    return heap->allocator.alloc(heap->allocator.context, at_least_one(bytes), PST__CACHE_LINE);
}

void *pst__heap_alloc(const pst__heap *heap, size_t bytes) {
    void *memory = pst__heap_alloc_unset(heap, bytes);
    if (memory != NULL) memset(memory, 0, at_least_one(bytes));
    return memory;
}

void pst__heap_free(const pst__heap *heap, void *memory, size_t bytes) {
    if (memory == NULL) return;
    heap->allocator.free(heap->allocator.context, memory, at_least_one(bytes), PST__CACHE_LINE);
}

char *pst__heap_text(const pst__heap *heap, const char *text) {
    const char *source = text == NULL ? "" : text;
    size_t bytes = strlen(source) + 1;
    char *copy = pst__heap_alloc(heap, bytes);
    if (copy != NULL) memcpy(copy, source, bytes);
    return copy;
}

void pst__heap_free_text(const pst__heap *heap, char *text) {
    if (text != NULL) pst__heap_free(heap, text, strlen(text) + 1);
}

pst_status pst__heap_resize(const pst__heap *heap, void **array, size_t *capacity, size_t count,
                            size_t element) {
    if (count == *capacity) return PST_OK;
    if (count > SIZE_MAX / element) return PST_ENOMEM;
    unsigned char *moved = pst__heap_alloc_unset(heap, count * element);
    if (moved == NULL) return PST_ENOMEM;
    const size_t kept = (count < *capacity ? count : *capacity) * element;
    if (kept > 0) memcpy(moved, *array, kept);
    memset(moved + kept, 0, count * element - kept);
    pst__heap_free(heap, *array, *capacity * element);
    *array = moved;
    *capacity = count;
    return PST_OK;
}

pst_status pst__heap_grow(const pst__heap *heap, void **array, size_t *capacity, size_t needed,
                          size_t element) {
    if (needed <= *capacity) return PST_OK;
    size_t grown = *capacity < 8 ? 8 : *capacity;
    while (grown < needed)
        grown = grown > SIZE_MAX / 2 ? needed : grown * 2;
    return pst__heap_resize(heap, array, capacity, grown, element);
}

/* ---- slabs ---------------------------------------------------------------------------- */

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
