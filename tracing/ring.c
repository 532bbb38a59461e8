#include "tracing/ring.h"

pst_status pst__ring_create(const pst__heap *heap, pst__ring *ring, uint64_t capacity) {
    if (capacity > SIZE_MAX / sizeof(pst__record)) return PST_ENOMEM;
    pst__record *records = pst__heap_alloc_unset(heap, capacity * sizeof(pst__record));
    if (records == NULL) return PST_ENOMEM;
    ring->capacity = capacity;
    /* Partner: the acquire in pst__ring_exists; who sees the records sees their capacity. */
    pst__store_release(&ring->records, records);
    return PST_OK;
}

void pst__ring_destroy(const pst__heap *heap, pst__ring *ring) {
    pst__heap_free(heap, ring->records, ring->capacity * sizeof(pst__record));
    *ring = (pst__ring){0};
}

void pst__ring_clear(pst__ring *ring) {
    /* Relaxed: `first` only selects among records that the head's acquire has made visible. */
    pst__store_relaxed(&ring->first, pst__load_relaxed(&ring->head));
}

uint64_t pst__ring_count(const pst__ring *ring, uint64_t *overwritten) {
    *overwritten = 0;
    if (!pst__ring_exists(ring)) return 0;
    /* Relaxed: numbers to show, nothing is read through them. */
    uint64_t first = pst__load_relaxed(&ring->first);
    uint64_t count = pst__load_relaxed(&ring->head) - first;
    if (count >= ring->capacity) *overwritten = count - (ring->capacity - 1);
    return count;
}

/* Acquire, partner: the field stores of pst__ring_push (see there). */
static pst__record read_slot(const pst__record *slot) {
    return (pst__record){
        .name = pst__load_acquire(&slot->name),
        .path = pst__load_acquire(&slot->path),
        .begin = pst__load_acquire(&slot->begin),
        .end = pst__load_acquire(&slot->end),
        .ticket = pst__load_acquire(&slot->ticket),
        .bytes = pst__load_acquire(&slot->bytes),
        .kind = pst__load_acquire(&slot->kind),
    };
}

/* The oldest push that a copy may hold when `head` records have been pushed. */
static uint64_t oldest(const pst__ring *ring, uint64_t head) {
    uint64_t first = pst__load_relaxed(&ring->first);
    return head - first < ring->capacity ? first : head - ring->capacity + 1;
}

size_t pst__ring_copy(const pst__ring *ring, pst__record *out, size_t room) {
    if (!pst__ring_exists(ring)) return 0;
    /* Acquire, partner: the last store of pst__ring_push. */
    uint64_t head = pst__load_acquire(&ring->head);
    uint64_t from = oldest(ring, head);
    if (head - from > room) from = head - room;
    for (uint64_t push = from; push != head; ++push)
        out[push - from] = read_slot(&ring->records[push & (ring->capacity - 1)]);
    /* Relaxed: read_slot's acquires order it; whatever they saw written, this head counts it. */
    uint64_t sure = oldest(ring, pst__load_relaxed(&ring->head));
    if (sure <= from) return (size_t)(head - from);
    if (sure >= head) return 0;
    for (uint64_t push = sure; push != head; ++push)
        out[push - sure] = out[push - from];
    return (size_t)(head - sure);
}
