/* A ring of fixed records: one writer at a time, readers at any time, nobody waits. The newest
 * records stay; one slot is always left to the write in progress. */
#ifndef PST_TRACING_RING_H
#define PST_TRACING_RING_H

#include "base/atomic.h"
#include "base/heap.h"

typedef enum pst__record_kind {
    PST__RECORD_SLICE = 0,
    PST__RECORD_FLOW_START, /* id in `ticket`, time in `begin` */
    PST__RECORD_FLOW_END,
    PST__RECORD_COUNT, /* value in `bytes`, time in `begin` */
} pst__record_kind;

typedef struct pst__record {
    const char *name;
    const char *path;    /* of slices: which way a collective went; NULL: none */
    uint64_t begin, end; /* pst__now() nanoseconds */
    uint64_t ticket;
    uint64_t bytes;
    uint64_t kind; /* pst__record_kind */
} pst__record;

_Static_assert(sizeof(pst__record) <= 64, "a record fits a cache line");

typedef struct pst__ring {
    pst__record *records;
    uint64_t capacity; /* a power of two */
    uint64_t head;     /* records ever pushed; the writer's */
    uint64_t first;    /* where the present recording begins; the reader's */
} pst__ring;

/* Fills in a zeroed ring; threads may be looking at it. `capacity` must be a power of two >= 2. */
pst_status pst__ring_create(const pst__heap *heap, pst__ring *ring, uint64_t capacity);
/* Acquire, partner: the release in pst__ring_create. */
static inline int pst__ring_exists(const pst__ring *ring) {
    return pst__load_acquire(&ring->records) != NULL;
}
/* Nobody may be looking. */
void pst__ring_destroy(const pst__heap *heap, pst__ring *ring);

/* Forgets what was pushed. Not beside pst__ring_copy. */
void pst__ring_clear(pst__ring *ring);

/* Records pushed since the clear, and how many of them are overwritten. */
uint64_t pst__ring_count(const pst__ring *ring, uint64_t *overwritten);

/* Copies at most `room` of the newest records, oldest first, and returns how many. Leaves out those
 * that a writer may have touched meanwhile. */
size_t pst__ring_copy(const pst__ring *ring, pst__record *out, size_t room);

/* The ring exists. Each field is an atomic of its own, so that a reader who is too slow reads a
 * mixture of two records and no undefined value. Release, partner: the acquires in pst__ring_copy;
 * who sees a field of push n also sees head >= n and so knows that slot n - capacity is gone. The
 * head is loaded relaxed: this writer or the one before it, who handed the track over, has stored
 * it. */
static inline void pst__ring_push(pst__ring *ring, const pst__record *record) {
    uint64_t head = pst__load_relaxed(&ring->head);
    pst__record *slot = &ring->records[head & (ring->capacity - 1)];
    pst__store_release(&slot->name, record->name);
    pst__store_release(&slot->path, record->path);
    pst__store_release(&slot->begin, record->begin);
    pst__store_release(&slot->end, record->end);
    pst__store_release(&slot->ticket, record->ticket);
    pst__store_release(&slot->bytes, record->bytes);
    pst__store_release(&slot->kind, record->kind);
    /* Partner: the first load of pst__ring_copy, which then sees the record complete. */
    pst__store_release(&ring->head, head + 1);
}

#endif
