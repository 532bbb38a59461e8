/* Two communicators of the same ranks, one for what is large and one for what is small. */
#include "base/options.h"
#include "ops/comm/join/pair.h"
#include "sched/runtime.h"

#include <penstock/crossover.h>

#define SMALL_BELOW ((size_t)2 << 20)

enum { LARGE, SMALL };
static const char *const roles[] = {"large", "small"};

typedef struct crossover {
    pst__pair pair; /* its first member */
    size_t small_below[PST_COLLECTIVE_KIND_COUNT];
} crossover;

static crossover *crossover_of(const pst_comm *comm) {
    return comm->context;
}

static pst_comm *large_of(const pst_comm *comm) {
    return crossover_of(comm)->pair.parts[LARGE];
}

/* ---- which one ------------------------------------------------------------------------------- */

/* The same on all ranks. */
static size_t bytes_of(const pst_comm *comm, const pst_collective *collective) {
    size_t bytes = 0;
    switch (collective->kind) {
    case PST_ALL_GATHER:
        for (size_t i = 0; i < collective->segment_count; i++)
            bytes += collective->segments[i].bytes;
        return bytes;
    case PST_REDUCE_SCATTER:
        return collective->source_bytes * (size_t)comm->size;
    case PST_BARRIER:
        return 1;
    default:
        return collective->count * pst_dtype_size(collective->dtype);
    }
}

static int side_of(const pst_comm *comm, const pst_collective *collective) {
    const crossover *own = crossover_of(comm);
    if ((unsigned)collective->kind >= PST_COLLECTIVE_KIND_COUNT) return LARGE;
    return bytes_of(comm, collective) < own->small_below[collective->kind] ? SMALL : LARGE;
}

static pst_comm *part_of(const pst_comm *comm, const pst_collective *collective) {
    return crossover_of(comm)->pair.parts[side_of(comm, collective)];
}

/* ---- collectives ----------------------------------------------------------------------------- */

static size_t crossover_staging_bytes(pst_comm *comm, const pst_collective *collective) {
    pst_comm *part = part_of(comm, collective);
    return part->ops->staging_bytes(part, collective);
}

static pst_status pass(pst_comm *comm, const pst_collective *collective, pst_stream *stream) {
    pst_comm *large = large_of(comm);
    pst_status status =
        large->ops->pass == NULL ? PST_OK : large->ops->pass(large, collective, stream);
    return status == PST_OK ? PST_OK
                            : pst__pair_fail_part(&crossover_of(comm)->pair, LARGE, status);
}

static pst_status crossover_start(pst_comm *comm, const pst_collective *collective,
                                  pst_stream *stream, void **request) {
    crossover *own = crossover_of(comm);
    const int side = side_of(comm, collective);
    pst_comm *part = own->pair.parts[side];
    *request = NULL;
    pst_status status = pst__pair_failure(&own->pair);
    if (status != PST_OK) return status;
    status = part->ops->start(part, collective, stream, request);
    if (status == PST_PENDING) {
        (void)pst__pair_fail(&own->pair, PST_EUNSUPPORTED,
                             "its %s part '%s' does not enqueue: this is for asynchronous devices",
                             roles[side], part->ops->name);
        (void)pst__pair_abort(&own->pair, PST_EUNSUPPORTED);
        return PST_EUNSUPPORTED;
    }
    if (status != PST_OK) return pst__pair_fail_part(&own->pair, side, status);
    return side == SMALL ? pass(comm, collective, stream) : PST_OK;
}

/* Nothing is pending on an asynchronous device. */
static pst_status crossover_test(pst_comm *comm, void *request) {
    (void)request;
    return pst__pair_failure(&crossover_of(comm)->pair);
}

static pst_status crossover_combine(pst_comm *comm, const pst_collective *collective,
                                    pst_stream *stream) {
    crossover *own = crossover_of(comm);
    const int side = side_of(comm, collective);
    pst_comm *part = own->pair.parts[side];
    if (part->ops->combine == NULL) return PST_OK;
    pst_status status = part->ops->combine(part, collective, stream);
    return status == PST_OK ? PST_OK : pst__pair_fail_part(&own->pair, side, status);
}

static pst_status crossover_source_wait(pst_comm *comm, pst_stream *stream, uint64_t ticket) {
    pst_comm *large = large_of(comm);
    pst_status status = large->ops->source_wait(large, stream, ticket);
    return status == PST_OK ? PST_OK
                            : pst__pair_fail_part(&crossover_of(comm)->pair, LARGE, status);
}

static const char *crossover_path(pst_comm *comm, const pst_collective *collective) {
    return pst_comm_path(part_of(comm, collective), collective);
}

/* ---- the rest of the table ------------------------------------------------------------------- */

static void crossover_free(crossover *own) {
    const pst__heap *heap = own->pair.heap;
    pst__heap_free_text(heap, own->pair.name);
    pst__heap_free(heap, own, sizeof *own);
}

static void crossover_destroy(pst_comm *comm) {
    pst__pair_destroy_parts(&crossover_of(comm)->pair);
    crossover_free(crossover_of(comm));
}

static pst_comm_ops table_of(const pst_comm *large, const pst_comm *small) {
    pst_comm_ops ops = {.api_version = PST_COMM_API_VERSION,
                        .name = "crossover",
                        .staging_bytes = crossover_staging_bytes,
                        .start = crossover_start,
                        .test = crossover_test,
                        .destroy = crossover_destroy,
                        .path = crossover_path};
    if (large->ops->combine != NULL || small->ops->combine != NULL) ops.combine = crossover_combine;
    if (large->ops->source_wait != NULL) ops.source_wait = crossover_source_wait;
    return ops;
}

/* ---- creation -------------------------------------------------------------------------------- */

static int is_of(const pst_comm *part, const pst_exchange *exchange) {
    return part->rank == exchange->rank && part->size == exchange->size;
}

static pst_status check(const pst__meeting_place *place, const pst_comm *large,
                        const pst_comm *small, const pst_crossover_options *options) {
    if (options->size == 0)
        return pst__fail(place->error, PST_EINVAL, "%s: options->size is not set", place->what);
    if (!is_of(large, place->exchange) || !is_of(small, place->exchange))
        return pst__fail(place->error, PST_EINVAL,
                         "rank %d of %d, %s: '%s' is of rank %d of %d, '%s' of rank %d of %d; all "
                         "three must be the same",
                         place->exchange->rank, place->exchange->size, place->what,
                         large->ops->name, large->rank, large->size, small->ops->name, small->rank,
                         small->size);
    if (small->ops->source_wait != NULL ||
        (large->ops->source_wait != NULL && large->ops->pass == NULL))
        return pst__fail(place->error, PST_EUNSUPPORTED,
                         "%s: '%s' cannot be the large part or '%s' not the small one", place->what,
                         large->ops->name, small->ops->name);
    return PST_OK;
}

static pst_status allocate(const pst__meeting_place *place, pst_comm *large, pst_comm *small,
                           const pst_crossover_options *options, crossover **made) {
    crossover *own = pst__heap_alloc(place->heap, sizeof *own);
    *made = own;
    if (own == NULL) return pst__fail(place->error, PST_ENOMEM, "%s: no memory", place->what);
    for (int kind = 0; kind < PST_COLLECTIVE_KIND_COUNT; kind++)
        own->small_below[kind] =
            options->small_below[kind] == 0 ? SMALL_BELOW : options->small_below[kind];
    const pst_comm_ops ops = table_of(large, small);
    return pst__pair_init(&own->pair, place, &ops, large, small, roles);
}

static pst_status agree(const pst__meeting_place *place, const crossover *own) {
    pst_status status = PST_OK;
    for (int kind = 0; kind < PST_COLLECTIVE_KIND_COUNT && status == PST_OK; kind++)
        status = pst__exchange_agree(place, "small_below", own->small_below[kind]);
    return status;
}

pst_status pst_crossover_create(pst_runtime *runtime, pst_comm *large, pst_comm *small,
                                const pst_exchange *exchange, const pst_crossover_options *given,
                                pst_comm **comm) {
    pst_crossover_options options;
    pst__read_optional(&options, sizeof options, given);
    pst__meeting_place place;
    crossover *own = NULL;
    *comm = NULL;
    pst_status status = pst__exchange_begin(
        runtime, exchange, options.name == NULL ? "crossover" : options.name, &place);
    if (status != PST_OK) return status;
    status = check(&place, large, small, &options);
    if (status == PST_OK) status = allocate(&place, large, small, &options, &own);
    status = pst__exchange_settle(&place, status);
    if (status == PST_OK) status = agree(&place, own);
    if (status != PST_OK) {
        if (own != NULL) crossover_free(own);
        return status;
    }
    pst__log(place.error, PST_LOG_INFO,
             "rank %d, '%s': '%s', and for small collectives '%s': gathers of less than %zu bytes, "
             "reductions of less than %zu",
             own->pair.comm.rank, own->pair.name, large->ops->name, small->ops->name,
             own->small_below[PST_ALL_GATHER], own->small_below[PST_REDUCE_SCATTER]);
    *comm = &own->pair.comm;
    return PST_OK;
}
