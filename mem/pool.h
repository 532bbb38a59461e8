/* The books of an arena: which range is free, waits for an event, is leased or lost. Knows offsets
 * only, never touches the memory that they stand for, and so keeps everything outside of it. */
#ifndef PST_MEM_POOL_H
#define PST_MEM_POOL_H

#include "base/heap.h"

#include <penstock/memory.h>

/* A piece is in one set by offset and, while it is free or pending, in one set by size. */
typedef enum pst__piece_state {
    PST__PIECE_FREE = 0, /* may be used at once */
    PST__PIECE_PENDING,  /* may be used behind its events */
    PST__PIECE_LEASED,
    PST__PIECE_QUARANTINED, /* never again */
} pst__piece_state;

typedef struct pst__piece {
    size_t offset, bytes;
    uint64_t released; /* order of the release that made it pending; 0 for other states */
    pst__piece_state state;
    int starts_segment; /* has no neighbour on its left */
    pst_event *after[PST_LEASE_EVENTS];
    size_t after_count;
    struct pst__piece *next_spare;
} pst__piece;

typedef int (*pst__piece_before)(const pst__piece *a, const pst__piece *b);

/* A sorted array: a few thousand pointers at most, so that moving them costs less than a tree. */
typedef struct pst__pieces {
    pst__piece **items;
    size_t count, capacity;
    pst__piece_before before;
} pst__pieces;

typedef struct pst__pool {
    const pst__heap *heap;
    pst_device *device;        /* whose events these are */
    pst__pieces by_offset;     /* all pieces; together they cover the segments */
    pst__pieces free, pending; /* by size; no two neighbours are both free */
    pst__piece *spare;         /* unused nodes */
    size_t spare_count;
    uint64_t releases;
    size_t quarantined; /* bytes */
} pst__pool;

void pst__pool_init(pst__pool *pool, const pst__heap *heap, pst_device *device);
void pst__pool_free(pst__pool *pool);

/* A new segment behind all others, as one free piece. PST_ENOMEM. */
pst_status pst__pool_add(pst__pool *pool, size_t offset, size_t bytes);
/* Takes the last segment out, if all of it is free and no event is pending. Returns 1 if so. */
int pst__pool_remove(pst__pool *pool, size_t offset);

/* Leases `bytes` > 0: best fit over free pieces, then over pending ones, then over neighbours that
 * together wait for few enough events. PST_EBUSY: nothing fits. PST_ENOMEM: no metadata. */
pst_status pst__pool_take(pst__pool *pool, size_t bytes, pst__piece **leased);

/* Leases [offset, offset + bytes), bytes > 0. PST_EBUSY with the reason. PST_ENOMEM. */
pst_status pst__pool_take_at(pst__pool *pool, size_t offset, size_t bytes, pst__piece **leased,
                             const char **reason);

/* The leased piece that starts at this offset, or NULL. */
pst__piece *pst__pool_find_leased(const pst__pool *pool, size_t offset);
/* Ends a lease. With event == NULL the piece still waits for what its taker was told to wait for: a
 * taker that never used it has not waited. Needs no memory. */
void pst__pool_give(pst__pool *pool, pst__piece *piece, pst_event *event);
void pst__pool_quarantine(pst__pool *pool, pst__piece *piece);

/* Asks the events of all pending pieces and merges those that are done. A piece whose event failed
 * goes to quarantine. */
void pst__pool_settle(pst__pool *pool);
/* PST_OK when no piece names the event, now that those that are done were dropped; PST_PENDING. */
pst_status pst__pool_forget(pst__pool *pool, const pst_event *event);
/* What is pending waits for its events no more: whoever gets the memory comes behind them anyway.
 */
void pst__pool_forget_events(pst__pool *pool);
size_t pst__pool_largest(const pst__pool *pool);

#endif
