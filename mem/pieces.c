#include "mem/pieces.h"

#include <string.h>

int pst__piece_before_by_offset(const pst__piece *a, const pst__piece *b) {
    return a->offset < b->offset;
}

int pst__piece_before_by_size(const pst__piece *a, const pst__piece *b) {
    if (a->bytes != b->bytes) return a->bytes < b->bytes;
    if (a->released != b->released) return a->released < b->released;
    return a->offset < b->offset;
}

pst_status pst__pieces_reserve(const pst__heap *heap, pst__pieces *pieces, size_t count) {
    return pst__heap_grow(heap, (void **)&pieces->items, &pieces->capacity, count,
                          sizeof *pieces->items);
}

void pst__pieces_free(const pst__heap *heap, pst__pieces *pieces) {
    pst__heap_free(heap, pieces->items, pieces->capacity * sizeof *pieces->items);
    pieces->items = NULL;
    pieces->count = pieces->capacity = 0;
}

size_t pst__pieces_find(const pst__pieces *pieces, const pst__piece *key) {
    size_t low = 0, high = pieces->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (pieces->before(pieces->items[middle], key))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void pst__pieces_insert(pst__pieces *pieces, pst__piece *piece) {
    size_t at = pst__pieces_find(pieces, piece);
    memmove(pieces->items + at + 1, pieces->items + at,
            (pieces->count - at) * sizeof *pieces->items);
    pieces->items[at] = piece;
    pieces->count++;
}

void pst__pieces_remove(pst__pieces *pieces, const pst__piece *piece) {
    size_t at = pst__pieces_find(pieces, piece);
    pieces->count--;
    memmove(pieces->items + at, pieces->items + at + 1,
            (pieces->count - at) * sizeof *pieces->items);
}
