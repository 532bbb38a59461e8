#include "mem/arena.h"
#include "sched/runtime.h"

#include <pthread.h>

#define PIECE_BYTES ((size_t)256 << 20)

/* An arena whose segments are the registered pieces, and whose leases end at once. */
struct pst_pinned {
    const pst__heap *heap;
    pst__error *error;
    pst_arena *arena;
    /* Guards the arena. Held while a piece is registered, so that threads which find no room at the
     * same time do not register one each. */
    pthread_mutex_t lock;
};

pst_status pst_pinned_create(pst_runtime *runtime, pst_device *device, size_t piece_bytes,
                             pst_pinned **created) {
    if (created == NULL) return PST_EINVAL;
    *created = NULL;
    if (runtime == NULL) return PST_EINVAL;
    pst__error *error = pst__runtime_error(runtime);
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst_pinned *pinned = pst__heap_alloc(heap, sizeof *pinned);
    if (pinned == NULL) return pst__fail(error, PST_ENOMEM, "pinned: no memory for its metadata");
    pinned->heap = heap;
    pinned->error = error;
    pst_arena_options options = {.size = sizeof options,
                                 .name = "pinned",
                                 .device = device,
                                 .kind = PST_MEMORY_PINNED,
                                 .segment_bytes = piece_bytes == 0 ? PIECE_BYTES : piece_bytes};
    pst_status status = pst_arena_create(runtime, &options, &pinned->arena);
    if (status == PST_OK && pthread_mutex_init(&pinned->lock, NULL) != 0) {
        pst_arena_destroy(pinned->arena);
        status = pst__fail(error, PST_ESYSTEM, "pinned: the system gave no mutex");
    }
    if (status != PST_OK) {
        pst__heap_free(heap, pinned, sizeof *pinned);
        return status;
    }
    *created = pinned;
    return PST_OK;
}

void pst_pinned_destroy(pst_pinned *pinned) {
    if (pinned == NULL) return;
    pst_arena_destroy(pinned->arena);
    (void)pthread_mutex_destroy(&pinned->lock);
    pst__heap_free(pinned->heap, pinned, sizeof *pinned);
}

pst_status pst_pinned_acquire(pst_pinned *pinned, size_t bytes, void **memory) {
    pst_lease lease;
    (void)pthread_mutex_lock(&pinned->lock);
    pst_status status = pst_arena_acquire(pinned->arena, bytes, &lease);
    (void)pthread_mutex_unlock(&pinned->lock);
    *memory = lease.memory;
    return status;
}

void pst_pinned_release(pst_pinned *pinned, void *memory) {
    if (memory == NULL) return;
    pst_lease lease;
    (void)pthread_mutex_lock(&pinned->lock);
    pst_status status = pst__arena_find(pinned->arena, memory, &lease);
    if (status == PST_OK) pst_arena_release(pinned->arena, &lease, NULL);
    (void)pthread_mutex_unlock(&pinned->lock);
    if (status != PST_OK)
        (void)pst__fail(pinned->error, status, "pinned: release of %p, which is not acquired",
                        memory);
}

void pst_pinned_get_stats(pst_pinned *pinned, pst_arena_stats *stats) {
    (void)pthread_mutex_lock(&pinned->lock);
    pst_arena_get_stats(pinned->arena, stats);
    (void)pthread_mutex_unlock(&pinned->lock);
}
