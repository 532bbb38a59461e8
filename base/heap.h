/* The metadata heap: every struct, name and table of the library comes from here, so that a
 * runtime's allocator hook sees all of it. Bulk data does not (see mem/). */
#ifndef PST_BASE_HEAP_H
#define PST_BASE_HEAP_H

#include <penstock/runtime.h>

typedef struct pst__heap {
    pst_allocator allocator;
} pst__heap;

#define PST__CACHE_LINE 64u

/* Takes the caller's hooks, or the built-in jemalloc heap when they are all NULL. PST_EINVAL when
 * only one of alloc and free is set. */
pst_status pst__heap_init(pst__heap *heap, const pst_allocator *allocator);

/* Zeroed memory, aligned to a cache line; NULL when there is none. Any thread. */
void *pst__heap_alloc(const pst__heap *heap, size_t bytes);
/* Not zeroed: pages that nobody writes to cost nothing. */
void *pst__heap_alloc_unset(const pst__heap *heap, size_t bytes);
/* `bytes` is what was asked for. NULL memory is fine. */
void pst__heap_free(const pst__heap *heap, void *memory, size_t bytes);
/* A copy of `text` (NULL counts as ""), freed with pst__heap_free_text. */
char *pst__heap_text(const pst__heap *heap, const char *text);
void pst__heap_free_text(const pst__heap *heap, char *text);
/* Gives an array of `element` bytes each room for `count` of them, more or fewer than it had; new
 * elements are zero. PST_ENOMEM leaves array and capacity as they were. */
pst_status pst__heap_resize(const pst__heap *heap, void **array, size_t *capacity, size_t count,
                            size_t element);
/* Grows an array of `element` bytes to hold at least `needed`, doubling; new elements are zero.
 * PST_ENOMEM leaves array and capacity as they were. */
pst_status pst__heap_grow(const pst__heap *heap, void **array, size_t *capacity, size_t needed,
                          size_t element);

/* ---- slabs ---------------------------------------------------------------------------- */

/* Blocks of one size with addresses that stay, taken from chunks. One thread at a time takes
 * blocks; all chunks are freed together. */
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
