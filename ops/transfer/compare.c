#include "ops/transfer/compare.h"

#include <stdio.h>

#define DIFFERENCE "rank %zu, engine '%s': rank %zu %s"

static size_t words_bytes(const pst__carrier *carrier) {
    return PST__COMPARISONS * (carrier->world + 1) * sizeof(uint64_t);
}

static uint64_t *words_of(const pst__comparisons *comparisons, uint64_t number) {
    return comparisons->words + number % PST__COMPARISONS * (comparisons->carrier->world + 1);
}

pst_status pst__comparisons_create(pst__carrier *carrier, const char *name, const char *meaning,
                                   pst__comparisons *comparisons) {
    pst_device *device = carrier->device;
    void *memory = NULL;
    *comparisons = (pst__comparisons){.carrier = carrier, .name = name, .meaning = meaning};
    const pst_status status =
        device->ops->alloc(device, PST_MEMORY_PINNED, words_bytes(carrier), &memory);
    comparisons->words = memory;
    return status;
}

void pst__comparisons_free(pst__comparisons *comparisons) {
    pst__carrier *carrier = comparisons->carrier;
    if (carrier == NULL) return;
    pst_device *device = carrier->device;
    if (comparisons->words != NULL)
        device->ops->free(device, PST_MEMORY_PINNED, comparisons->words, words_bytes(carrier));
    *comparisons = (pst__comparisons){0};
}

/* `world`: none does. */
static size_t rank_that_differs(const pst__comparisons *comparisons, uint64_t number) {
    const uint64_t *words = words_of(comparisons, number);
    size_t rank = 0;
    while (rank < comparisons->carrier->world && words[1 + rank] == words[0])
        rank++;
    return rank;
}

static void poison_if_different(pst__operation *operation) {
    const pst__comparisons *comparisons = operation->owner;
    const pst__carrier *carrier = operation->carrier;
    const size_t rank = rank_that_differs(comparisons, operation->argument);
    if (rank == carrier->world) return;
    char text[PST__ERROR_BYTES];
    (void)snprintf(text, sizeof text, DIFFERENCE, carrier->rank, carrier->name, rank,
                   comparisons->meaning);
    pst_runtime_poison(carrier->runtime, PST_EMISMATCH, text);
}

/* The last use of this place is several comparisons ago; in all but odd cases it has ended. */
static pst_status wait_for_place(const pst__comparisons *comparisons) {
    const uint64_t ticket = comparisons->tickets[comparisons->count % PST__COMPARISONS];
    const pst__operation *found = pst__queue_of(comparisons->carrier, PST__GATHER_LANE)->oldest;
    while (found != NULL && found->work.collective.ticket != ticket)
        found = found->next;
    return found == NULL ? PST_OK : pst__operation_wait_end(found);
}

static pst_status submit(pst__comparisons *comparisons, uint64_t hash, int is_blocking) {
    uint64_t *words = words_of(comparisons, comparisons->count);
    pst__operation *operation;
    pst_status status = wait_for_place(comparisons);
    if (status == PST_OK)
        status = pst__take_gather_of_bytes(comparisons->carrier, comparisons->name, words,
                                           sizeof hash, &operation);
    if (status != PST_OK) return status;
    words[0] = hash;
    operation->owner = comparisons;
    operation->argument = comparisons->count;
    operation->done = is_blocking ? NULL : poison_if_different;
    status = pst__operation_submit(operation, sizeof hash, NULL, 0);
    if (status != PST_OK) return status;
    comparisons->tickets[comparisons->count++ % PST__COMPARISONS] =
        operation->work.collective.ticket;
    return is_blocking ? pst__operation_wait_end(operation) : PST_OK;
}

pst_status pst__compare(pst__comparisons *comparisons, uint64_t hash) {
    return submit(comparisons, hash, 0);
}

pst_status pst__compare_now(pst__comparisons *comparisons, uint64_t hash) {
    const pst__carrier *carrier = comparisons->carrier;
    const uint64_t number = comparisons->count;
    const pst_status status = submit(comparisons, hash, 1);
    if (status != PST_OK) return status;
    const size_t rank = rank_that_differs(comparisons, number);
    if (rank == carrier->world) return PST_OK;
    return pst__fail(carrier->error, PST_EMISMATCH, DIFFERENCE, carrier->rank, carrier->name, rank,
                     comparisons->meaning);
}
