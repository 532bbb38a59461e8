#include "leases.h"

#include "threads.h"

#define LEASES 1024u

typedef struct live {
    const pst_arena *arena;
    const char *memory;
    size_t bytes;
} live;

static live all[LEASES];
static size_t count;

void leases_begin(void) {
    count = 0;
}

/* Quarantined leases stay in the list: nobody may have that memory either. */
static void add(const pst_arena *arena, const pst_lease *lease) {
    const char *memory = lease->memory;
    if (lease->bytes == 0) return;
    for (size_t i = 0; i < count; i++)
        if (memory < all[i].memory + all[i].bytes && all[i].memory < memory + lease->bytes)
            sim_fail("a lease of %zu bytes overlaps one of %zu bytes that is alive", lease->bytes,
                     all[i].bytes);
    if (count == LEASES) sim_fail("more than %u leases are alive", LEASES);
    all[count++] = (live){arena, memory, lease->bytes};
}

pst_status __wrap_pst_arena_acquire(pst_arena *arena, size_t bytes, pst_lease *lease) {
    const pst_status status = __real_pst_arena_acquire(arena, bytes, lease);
    if (status == PST_OK) add(arena, lease);
    return status;
}

pst_status __wrap_pst_arena_acquire_at(pst_arena *arena, size_t offset, size_t bytes,
                                       pst_lease *lease) {
    const pst_status status = __real_pst_arena_acquire_at(arena, offset, bytes, lease);
    if (status == PST_OK) add(arena, lease);
    return status;
}

void __wrap_pst_arena_release(pst_arena *arena, const pst_lease *lease, pst_event *event) {
    for (size_t i = 0; i < count; i++)
        if (all[i].memory == lease->memory && all[i].arena == arena) {
            all[i] = all[--count];
            break;
        }
    __real_pst_arena_release(arena, lease, event);
}

void __wrap_pst_arena_destroy(pst_arena *arena) {
    for (size_t i = count; i-- > 0;)
        if (all[i].arena == arena) all[i] = all[--count];
    __real_pst_arena_destroy(arena);
}
