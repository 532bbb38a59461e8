#include "ops/transfer/compare.h"

#include <stdio.h>

#define DIFFERENCE "rank %zu, engine '%s': rank %zu %s"

static size_t ranks_of(const pst__comparisons *comparisons) {
    return (size_t)pst__queue_of(comparisons->carrier, comparisons->lane)->comm->size;
}

static size_t words_bytes(const pst__comparisons *comparisons) {
    return PST__COMPARISONS * (ranks_of(comparisons) + 1) * sizeof(uint64_t);
}

static uint64_t *words_of(const pst__comparisons *comparisons, uint64_t number) {
    return comparisons->words + number % PST__COMPARISONS * (ranks_of(comparisons) + 1);
}

pst_status pst__comparisons_create(pst__carrier *carrier, pst__lane_index lane, const char *name,
                                   const char *meaning, pst__comparisons *comparisons) {
    pst_device *device = carrier->device;
    void *memory = NULL;
    *comparisons =
        (pst__comparisons){.carrier = carrier, .lane = lane, .name = name, .meaning = meaning};
    const pst_status status =
        device->ops->alloc(device, PST_MEMORY_PINNED, words_bytes(comparisons), &memory);
    comparisons->words = memory;
    return status;
}

void pst__comparisons_free(pst__comparisons *comparisons) {
    if (comparisons->carrier == NULL) return;
    pst_device *device = comparisons->carrier->device;
    if (comparisons->words != NULL)
        device->ops->free(device, PST_MEMORY_PINNED, comparisons->words, words_bytes(comparisons));
    *comparisons = (pst__comparisons){0};
}

/* Of `ranks` hashes; `ranks`: none does. */
static size_t rank_that_differs(const uint64_t *hashes, size_t ranks, uint64_t own) {
    size_t rank = 0;
    while (rank < ranks && hashes[rank] == own)
        rank++;
    return rank;
}

/* As all ranks call it. */
static size_t number_of(const pst__comparisons *comparisons, size_t rank) {
    const pst__carrier *carrier = comparisons->carrier;
    return comparisons->lane == PST__REPLICA_LANE ? rank * carrier->world + carrier->rank
                                                  : carrier->replica * carrier->world + rank;
}

static void poison_if_different(pst__operation *operation) {
    const pst__comparisons *comparisons = operation->owner;
    const pst__carrier *carrier = operation->carrier;
    const uint64_t *words = words_of(comparisons, operation->argument);
    const size_t ranks = ranks_of(comparisons);
    const size_t rank = rank_that_differs(words + 1, ranks, words[0]);
    if (rank == ranks) return;
    char text[PST__ERROR_BYTES];
    (void)snprintf(text, sizeof text, DIFFERENCE, pst__carrier_number(carrier), carrier->name,
                   number_of(comparisons, rank), comparisons->meaning);
    pst_runtime_poison(carrier->runtime, PST_EMISMATCH, text);
}

/* The last use of this place is several comparisons ago; in all but odd cases it has ended. */
static pst_status wait_for_place(const pst__comparisons *comparisons) {
    const uint64_t ticket = comparisons->tickets[comparisons->count % PST__COMPARISONS];
    const pst__operation *found = pst__queue_of(comparisons->carrier, comparisons->lane)->oldest;
    while (found != NULL && found->work.collective.ticket != ticket)
        found = found->next;
    return found == NULL ? PST_OK : pst__operation_wait_end(found, NULL);
}

pst_status pst__compare(pst__comparisons *comparisons, uint64_t hash) {
    uint64_t *words = words_of(comparisons, comparisons->count);
    pst__operation *operation;
    pst_status status = wait_for_place(comparisons);
    if (status == PST_OK)
        status = pst__take_gather_of_bytes(comparisons->carrier, comparisons->lane,
                                           comparisons->name, words, sizeof hash, &operation);
    if (status != PST_OK) return status;
    words[0] = hash;
    operation->owner = comparisons;
    operation->argument = comparisons->count;
    operation->done = poison_if_different;
    status = pst__operation_submit(operation, sizeof hash, NULL, 0);
    if (status != PST_OK) return status;
    comparisons->tickets[comparisons->count++ % PST__COMPARISONS] =
        operation->work.collective.ticket;
    return PST_OK;
}

pst_status pst__compare_now(pst__comparisons *comparisons, uint64_t hash) {
    pst__carrier *carrier = comparisons->carrier;
    const size_t ranks = pst__carrier_ranks(carrier);
    uint64_t *hashes = pst__heap_alloc(carrier->heap, ranks * sizeof hash);
    if (hashes == NULL)
        return pst__carrier_fail(carrier, PST_ENOMEM, "no memory for the %s", comparisons->name);
    const pst_status status =
        pst__gather_bytes(carrier, comparisons->name, &hash, sizeof hash, hashes);
    const size_t rank = rank_that_differs(hashes, ranks, hash);
    pst__heap_free(carrier->heap, hashes, ranks * sizeof hash);
    if (status != PST_OK || rank == ranks) return status;
    return pst__fail(carrier->error, PST_EMISMATCH, DIFFERENCE, pst__carrier_number(carrier),
                     carrier->name, rank, comparisons->meaning);
}
