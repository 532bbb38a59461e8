/* What is stored: a table sorted by key. */
#include "ops/offload.h"

#include <string.h>

/* The first whose key is not below `key`. */
static size_t place_of(const pst_offload *offload, uint64_t key) {
    size_t low = 0, high = offload->table_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (offload->table[middle]->key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int is_at(const pst_offload *offload, size_t place, uint64_t key) {
    return place < offload->table_count && offload->table[place]->key == key;
}

pst__stored *pst__stored_find(const pst_offload *offload, uint64_t key) {
    size_t place = place_of(offload, key);
    return is_at(offload, place, key) ? offload->table[place] : NULL;
}

void pst__stored_let_go(pst_offload *offload, pst__stored *stored) {
    if (--stored->holders > 0) return;
    if (stored->lease.memory != NULL) pst_arena_release(offload->host, &stored->lease, NULL);
    pst__heap_free(offload->heap, stored, sizeof *stored);
}

static pst_status create(pst_offload *offload, uint64_t key, void *memory, size_t bytes,
                         pst__stored **created) {
    pst__stored *stored = pst__heap_alloc(offload->heap, sizeof *stored);
    if (stored == NULL) return pst__offload_fail(offload, PST_ENOMEM, "%s", "no memory for a key");
    pst_status status = PST_OK;
    if (memory == NULL) status = pst_arena_acquire(offload->host, bytes, &stored->lease);
    if (status != PST_OK) {
        pst__heap_free(offload->heap, stored, sizeof *stored);
        return status;
    }
    stored->key = key;
    stored->memory = memory != NULL ? memory : stored->lease.memory;
    stored->bytes = bytes;
    stored->holders = 1;
    *created = stored;
    return PST_OK;
}

static void insert(pst_offload *offload, size_t place, pst__stored *stored) {
    pst__stored **at = &offload->table[place];
    memmove(at + 1, at, (offload->table_count - place) * sizeof(pst__stored *));
    *at = stored;
    offload->table_count++;
}

pst_status pst__stored_replace(pst_offload *offload, uint64_t key, void *memory, size_t bytes,
                               pst__stored **stored) {
    if (pst__heap_grow(offload->heap, (void **)&offload->table, &offload->table_capacity,
                       offload->table_count + 1, sizeof(pst__stored *)) != PST_OK)
        return pst__offload_fail(offload, PST_ENOMEM, "%s", "no memory for a key");
    size_t place = place_of(offload, key);
    pst__stored *old = is_at(offload, place, key) ? offload->table[place] : NULL;
    pst_status status = create(offload, key, memory, bytes, stored);
    if (status != PST_OK) return status;
    if (old == NULL) {
        insert(offload, place, *stored);
    } else {
        offload->table[place] = *stored;
        pst__stored_let_go(offload, old);
    }
    return PST_OK;
}

void pst__stored_remove(pst_offload *offload, uint64_t key) {
    size_t place = place_of(offload, key);
    if (!is_at(offload, place, key)) return;
    pst__stored **at = &offload->table[place];
    pst__stored_let_go(offload, *at);
    offload->table_count--;
    memmove(at, at + 1, (offload->table_count - place) * sizeof(pst__stored *));
}

void pst__stored_remove_all(pst_offload *offload) {
    while (offload->table_count > 0)
        pst__stored_let_go(offload, offload->table[--offload->table_count]);
}
