#include "ops/comm/exchange.h"

#include "base/clock.h"
#include "sched/runtime.h"

#include <sched.h>
#include <string.h>

pst_status pst__exchange_begin(pst_runtime *runtime, const pst_exchange *exchange, const char *what,
                               pst__meeting_place *place) {
    *place = (pst__meeting_place){exchange, pst__runtime_heap(runtime), pst__runtime_error(runtime),
                                  what};
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

/* ---- over a communicator of the host --------------------------------------------------------- */

typedef struct comm_exchange {
    pst_runtime *runtime;
    pst_comm *comm;
    uint64_t ticket;
} comm_exchange;

/* One all-gather's memory, in one block, so that it can stay as a whole when somebody may still
 * write there. */
typedef struct gather {
    pst_collective collective;
    size_t size; /* of the block */
    char *all;
    pst_segment segments[];
} gather;

static size_t rounded(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

static gather *gather_create(const comm_exchange *own, const void *mine, size_t bytes) {
    const pst__heap *heap = pst__runtime_heap(own->runtime);
    size_t ranks = (size_t)own->comm->size;
    pst_collective collective = {.kind = PST_ALL_GATHER,
                                 .name = "exchange",
                                 .ticket = own->ticket,
                                 .dtype = PST_UINT8,
                                 .source_bytes = bytes,
                                 .segment_count = ranks};
    size_t head = rounded(sizeof(gather) + ranks * sizeof(pst_segment));
    size_t staging = own->comm->ops->staging_bytes(own->comm, &collective);
    size_t size = head + rounded(bytes) + rounded(bytes * ranks) + staging;
    gather *fresh = pst__heap_alloc(heap, size);
    if (fresh == NULL) return NULL;
    char *source = (char *)fresh + head;
    fresh->all = source + rounded(bytes);
    memcpy(source, mine, bytes);
    for (size_t rank = 0; rank < ranks; rank++)
        fresh->segments[rank] = (pst_segment){(uint32_t)rank, 0, rank * bytes, bytes};
    collective.source = source;
    collective.destination = fresh->all;
    collective.segments = fresh->segments;
    collective.staging = staging == 0 ? NULL : fresh->all + rounded(bytes * ranks);
    fresh->collective = collective;
    fresh->size = size;
    return fresh;
}

/* The caller's hook may find that the wait cannot end, and poison. */
static void report_wait(const comm_exchange *own, pst_waiting *waiting, uint64_t waited_ns) {
    pst__wait_call_hook(own->runtime, waiting, waited_ns);
    const pst_status poison = pst_runtime_status(own->runtime);
    if (poison != PST_OK) (void)own->comm->ops->abort(own->comm, poison);
}

/* Asks until it has ended or `until` is past; 0: no limit. */
static pst_status ask(const comm_exchange *own, void *request, uint64_t until) {
    const uint64_t begin = pst__now();
    pst_waiting waiting = {.lane = "", .task = "exchange", .ticket = own->ticket};
    pst_status status = PST_PENDING;
    for (uint64_t now = begin; status == PST_PENDING && (until == 0 || now < until);
         now = pst__now()) {
        report_wait(own, &waiting, now - begin);
        (void)sched_yield();
        status = own->comm->ops->test(own->comm, request);
    }
    return status;
}

static pst_status run(const comm_exchange *own, const gather *gather) {
    pst_comm *comm = own->comm;
    uint64_t deadline = pst__runtime_deadline(own->runtime);
    void *request = NULL;
    pst_status status = comm->ops->start(comm, &gather->collective, NULL, &request);
    if (status != PST_PENDING) return status;
    status = ask(own, request, deadline == 0 ? 0 : pst__now() + deadline);
    if (status != PST_PENDING) return status;
    (void)comm->ops->abort(comm, PST_ETIMEDOUT);
    return ask(own, request, pst__now() + deadline); /* now it ends with that, and soon */
}

static int may_still_write(pst_comm *comm, pst_status status) {
    return status == PST_PENDING || comm->ops->abort(comm, status) != PST_OK;
}

static pst_status all_gather(void *context, const void *mine, size_t bytes, void *all) {
    comm_exchange *own = context;
    own->ticket++;
    gather *gather = gather_create(own, mine, bytes);
    if (gather == NULL) return PST_ENOMEM;
    pst_status status = run(own, gather);
    if (status != PST_OK && may_still_write(own->comm, status)) /* the block stays */
        return status == PST_PENDING ? PST_ETIMEDOUT : status;
    if (status == PST_OK) memcpy(all, gather->all, bytes * (size_t)own->comm->size);
    pst__heap_free(pst__runtime_heap(own->runtime), gather, gather->size);
    return status;
}

pst_status pst_comm_exchange_open(pst_runtime *runtime, pst_comm *comm, pst_exchange *exchange) {
    memset(exchange, 0, sizeof *exchange);
    pst__error *error = pst__runtime_error(runtime);
    if ((comm->ops->kinds & 1u << PST_ALL_GATHER) == 0)
        return pst__fail(error, PST_EUNSUPPORTED,
                         "exchange: the communicator '%s' has no all-gather", comm->ops->name);
    comm_exchange *own = pst__heap_alloc(pst__runtime_heap(runtime), sizeof *own);
    if (own == NULL) return pst__fail(error, PST_ENOMEM, "exchange: no memory");
    own->runtime = runtime;
    own->comm = comm;
    *exchange = (pst_exchange){all_gather, own, comm->rank, comm->size};
    return PST_OK;
}

void pst_comm_exchange_close(pst_exchange *exchange) {
    comm_exchange *own = exchange->context;
    if (own != NULL) pst__heap_free(pst__runtime_heap(own->runtime), own, sizeof *own);
    memset(exchange, 0, sizeof *exchange);
}
