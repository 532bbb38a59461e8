/* An exchange over a communicator of the host device. */
#include "base/clock.h"
#include "sched/runtime.h"
#include "sched/wait.h"

#include <penstock/exchange.h>
#include <sched.h>
#include <string.h>

typedef struct comm_exchange {
    pst_runtime *runtime;
    pst_comm *comm;
    uint64_t ticket;
} comm_exchange;

/* One all-gather's memory, in one block, so that it can be left alone as a whole when somebody may
 * still write there. */
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

/* The caller's hook may find that it is in vain, and poison. */
static void tell(const comm_exchange *own, pst_waiting *waiting, uint64_t waited_ns) {
    pst__wait_tell(own->runtime, waiting, waited_ns);
    const pst_status poison = pst_runtime_status(own->runtime);
    if (poison != PST_OK) (void)own->comm->ops->abort(own->comm, poison);
}

/* Asks until it is over or `until` is past; 0: no limit. */
static pst_status ask(const comm_exchange *own, void *request, uint64_t until) {
    const uint64_t begin = pst__now();
    pst_waiting waiting = {.lane = "", .task = "exchange", .ticket = own->ticket};
    pst_status status = PST_PENDING;
    for (uint64_t now = begin; status == PST_PENDING && (until == 0 || now < until);
         now = pst__now()) {
        tell(own, &waiting, now - begin);
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
