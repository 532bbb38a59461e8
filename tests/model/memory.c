#include "memory.h"

#include "explorer.h"

#include <string.h>

#define MEMORY_BYTES (4u << 20)
#define MAX_FREED    64u /* blocks that are watched */
#define FREED_BYTE   0xdb

static _Alignas(4096) unsigned char memory[MEMORY_BYTES];

static struct {
    size_t used; /* no block is used twice in a run */
    long live;
    size_t freed_count;
    struct freed {
        const unsigned char *bytes;
        size_t size;
    } freed[MAX_FREED];
} heap;

void model_memory_begin(void) {
    heap.used = heap.freed_count = 0;
    heap.live = 0;
}

static void *take(void *context, size_t bytes, size_t alignment) {
    (void)context;
    const size_t at = (heap.used + alignment - 1) / alignment * alignment;
    if (at + bytes > MEMORY_BYTES) return NULL;
    heap.used = at + bytes;
    heap.live++;
    return memory + at;
}

static void give(void *context, void *block, size_t bytes, size_t alignment) {
    (void)context;
    (void)alignment;
    memset(block, FREED_BYTE, bytes);
    heap.live--;
    if (heap.freed_count < MAX_FREED) heap.freed[heap.freed_count++] = (struct freed){block, bytes};
}

pst_allocator model_allocator(void) {
    return (pst_allocator){take, give, NULL};
}

static int is_untouched(const struct freed *freed) {
    const unsigned char *bytes = freed->bytes;
    return freed->size == 0 ||
           (bytes[0] == FREED_BYTE && memcmp(bytes, bytes + 1, freed->size - 1) == 0);
}

const char *model_memory_fault(void) {
    if (heap.live != 0) return "memory is left";
    for (size_t i = 0; i < heap.freed_count; i++)
        if (!is_untouched(&heap.freed[i])) return "memory was written to after it was freed";
    return NULL;
}
