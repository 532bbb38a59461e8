/* Pieces of an arena and sorted sets of them. A piece is in one set by offset and, while it is free
 * or pending, in one set by size. */
#ifndef PST_MEM_PIECES_H
#define PST_MEM_PIECES_H

#include "base/heap.h"

#include <penstock/memory.h>

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

int pst__piece_before_by_offset(const pst__piece *a, const pst__piece *b);
/* By bytes, then the longest released, then by offset. */
int pst__piece_before_by_size(const pst__piece *a, const pst__piece *b);

/* A sorted array: a few thousand pointers at most, so that moving them costs less than a tree. */
typedef struct pst__pieces {
    pst__piece **items;
    size_t count, capacity;
    pst__piece_before before;
} pst__pieces;

/* Makes room for `count` pieces in all. PST_ENOMEM. */
pst_status pst__pieces_reserve(const pst__heap *heap, pst__pieces *pieces, size_t count);
void pst__pieces_free(const pst__heap *heap, pst__pieces *pieces);
/* Index of the first piece that is not before `key`; `count` if there is none. */
size_t pst__pieces_find(const pst__pieces *pieces, const pst__piece *key);
/* There must be room. */
void pst__pieces_insert(pst__pieces *pieces, pst__piece *piece);
/* The piece must be in the set, its sort key unchanged since it was inserted. */
void pst__pieces_remove(pst__pieces *pieces, const pst__piece *piece);

#endif
