#include "memory.h"

#include "threads.h"

#include <stdlib.h>
#include <string.h>

#define FREED_BYTE  0xdd
#define FREED_LIMIT 512u /* blocks that are watched at a time */

/* Before each block. */
typedef struct block {
    struct block *next, *previous;
    size_t bytes;
    uint64_t number;
} block;

#define HEAD_BYTES 64u
_Static_assert(sizeof(block) <= HEAD_BYTES, "the head fits in front of an aligned block");

static block alive = {&alive, &alive, 0, 0};
static block *freed[FREED_LIMIT];
static size_t freed_count;
static uint64_t allocations, fail_at;
static int has_failed;

static void check_freed(const block *block) {
    const unsigned char *bytes = (const unsigned char *)block + HEAD_BYTES;
    for (size_t i = 0; i < block->bytes; i++)
        if (bytes[i] != FREED_BYTE)
            sim_fail("allocation %llu of %zu bytes was written to at offset %zu after it was freed",
                     (unsigned long long)block->number, block->bytes, i);
}

static void forget_freed(void) {
    for (size_t i = 0; i < freed_count; i++)
        free(freed[i]);
    freed_count = 0;
}

void memory_begin(uint64_t nth) {
    forget_freed();
    alive.next = alive.previous = &alive; /* what a failed run has left is lost */
    allocations = 0;
    has_failed = 0;
    fail_at = nth;
}

void memory_stop_failing(void) {
    fail_at = 0;
}

int memory_has_failed(void) {
    return has_failed;
}

void memory_end(void) {
    if (alive.next != &alive)
        sim_fail("allocation %llu of %zu bytes was not freed",
                 (unsigned long long)alive.next->number, alive.next->bytes);
    for (size_t i = 0; i < freed_count; i++)
        check_freed(freed[i]);
    forget_freed();
}

static void *allocate(void *context, size_t bytes, size_t alignment) {
    (void)context;
    sim_point();
    if (++allocations == fail_at || alignment > HEAD_BYTES) {
        has_failed = 1;
        return NULL;
    }
    const size_t whole = (HEAD_BYTES + bytes + HEAD_BYTES - 1) / HEAD_BYTES * HEAD_BYTES;
    block *made = aligned_alloc(HEAD_BYTES, whole);
    if (made == NULL) return NULL;
    *made = (block){&alive, alive.previous, bytes, allocations};
    made->previous->next = made;
    alive.previous = made;
    return (char *)made + HEAD_BYTES;
}

static void watch(block *block) {
    const size_t slot = block->number % FREED_LIMIT;
    if (freed_count < FREED_LIMIT) {
        freed[freed_count++] = block;
        return;
    }
    check_freed(freed[slot]);
    free(freed[slot]);
    freed[slot] = block;
}

static void release(void *context, void *memory, size_t bytes, size_t alignment) {
    (void)context, (void)alignment;
    block *gone = (block *)(void *)((char *)memory - HEAD_BYTES);
    sim_flush();
    if (gone->bytes != bytes)
        sim_fail("allocation %llu of %zu bytes was freed as %zu bytes",
                 (unsigned long long)gone->number, gone->bytes, bytes);
    gone->previous->next = gone->next;
    gone->next->previous = gone->previous;
    memset(memory, FREED_BYTE, bytes);
    watch(gone);
}

pst_allocator memory_allocator(void) {
    return (pst_allocator){allocate, release, NULL};
}
