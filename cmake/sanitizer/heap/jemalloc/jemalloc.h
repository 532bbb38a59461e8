/* The two calls of jemalloc that base/heap.c makes, on the system's allocator: sanitizers see that
 * one, so a leak, an overrun or a use after free of metadata is found. Sanitizer builds only. */
#ifndef PST_SANITIZER_JEMALLOC_H
#define PST_SANITIZER_JEMALLOC_H

#include <stddef.h>
#include <stdlib.h>

/* The flags are the alignment itself. */
#define MALLOCX_ALIGN(alignment) (alignment)

static inline void *pst_je_mallocx(size_t bytes, size_t alignment) {
    void *memory = NULL;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

static inline void pst_je_sdallocx(void *memory, size_t bytes, size_t alignment) {
    (void)bytes;
    (void)alignment;
    free(memory);
}

#endif
