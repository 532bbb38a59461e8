#include "ops/exchange.h"

#include <string.h>

pst_status pst__exchange_check(const pst__meeting_place *place) {
    const pst_exchange *exchange = place->exchange;
    if (exchange == NULL || exchange->all_gather == NULL)
        return pst__fail(place->error, PST_EINVAL, "%s: an exchange between the ranks is needed",
                         place->what);
    if (exchange->size < 1 || exchange->rank < 0 || exchange->rank >= exchange->size)
        return pst__fail(place->error, PST_EINVAL, "%s: rank %d of %d in its exchange is none",
                         place->what, exchange->rank, exchange->size);
    return PST_OK;
}

pst_status pst__exchange_all_gather(const pst__meeting_place *place, const void *mine, size_t bytes,
                                    void *all) {
    const pst_exchange *exchange = place->exchange;
    if (exchange->size == 1) {
        memcpy(all, mine, bytes);
        return PST_OK;
    }
    pst_status status = exchange->all_gather(exchange->context, mine, bytes, all);
    if (status == PST_OK) return PST_OK;
    return pst__fail(place->error, status, "rank %d, %s: the exchange between the ranks failed: %s",
                     exchange->rank, place->what, pst_status_text(status));
}

/* Room for `bytes` of every rank. */
static pst_status take(const pst__meeting_place *place, size_t bytes, char **all) {
    *all = pst__heap_alloc(place->heap, bytes * (size_t)place->exchange->size);
    if (*all != NULL) return PST_OK;
    return pst__fail(place->error, PST_ENOMEM, "rank %d, %s: no memory to exchange %zu bytes",
                     place->exchange->rank, place->what, bytes);
}

static void give(const pst__meeting_place *place, size_t bytes, char *all) {
    pst__heap_free(place->heap, all, bytes * (size_t)place->exchange->size);
}

pst_status pst__exchange_broadcast(const pst__meeting_place *place, int root, void *memory,
                                   size_t bytes) {
    char *all;
    pst_status status = take(place, bytes, &all);
    if (status != PST_OK) return status;
    status = pst__exchange_all_gather(place, memory, bytes, all);
    if (status == PST_OK) memcpy(memory, all + (size_t)root * bytes, bytes);
    give(place, bytes, all);
    return status;
}

/* Every rank's word, ended by the first one that is not `expected`; -1 if there is none. */
static pst_status find_other(const pst__meeting_place *place, uint64_t mine, uint64_t expected,
                             int *rank, uint64_t *other) {
    char *all;
    *rank = -1;
    pst_status status = take(place, sizeof mine, &all);
    if (status != PST_OK) return status;
    status = pst__exchange_all_gather(place, &mine, sizeof mine, all);
    for (int i = 0; status == PST_OK && *rank < 0 && i < place->exchange->size; i++) {
        memcpy(other, all + (size_t)i * sizeof mine, sizeof mine);
        if (*other != expected) *rank = i;
    }
    give(place, sizeof mine, all);
    return status;
}

pst_status pst__exchange_settle(const pst__meeting_place *place, pst_status own) {
    int rank;
    uint64_t other = 0;
    pst_status status = find_other(place, (uint64_t)(int64_t)own, PST_OK, &rank, &other);
    if (own != PST_OK) return own;
    if (status != PST_OK || rank < 0) return status;
    status = (pst_status)(int64_t)other;
    return pst__fail(place->error, status, "rank %d, %s: rank %d failed: %s", place->exchange->rank,
                     place->what, rank, pst_status_text(status));
}

pst_status pst__exchange_agree(const pst__meeting_place *place, const char *name, uint64_t value) {
    int rank;
    uint64_t first = value, other = 0;
    pst_status status = pst__exchange_broadcast(place, 0, &first, sizeof first);
    if (status == PST_OK) status = find_other(place, value, first, &rank, &other);
    if (status != PST_OK || rank < 0) return status;
    return pst__fail(place->error, PST_EMISMATCH,
                     "rank %d, %s: rank %d has other %s than rank 0; all ranks must give the same",
                     place->exchange->rank, place->what, rank, name);
}
