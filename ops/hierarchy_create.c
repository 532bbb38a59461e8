/* Making a communicator `hierarchy` of two others. */
#include "base/options.h"
#include "ops/exchange.h"
#include "ops/hierarchy.h"
#include "sched/runtime.h"

#include <stdio.h>

#define RELAY_BYTES ((size_t)64 << 20)
#define LEAST_HALF  ((size_t)1024) /* a rank */

static const char *const roles[] = {"inner", "outer"};

static pst_status open_memory(pst_comm *comm, void *memory, size_t bytes) {
    const pst__hierarchy *own = comm->context;
    return pst__pair_open_memory(&own->pair, memory, bytes);
}

/* What a rank says of itself when all meet. */
typedef struct shape {
    int places, place, nodes, node;
} shape;

static pst_status check_shape(const pst__meeting_place *place, const shape *all) {
    for (int rank = 0; rank < place->exchange->size; rank++) {
        const shape *its = &all[rank];
        if (its->places == all->places && its->nodes == all->nodes &&
            its->places * its->nodes == place->exchange->size &&
            its->node * its->places + its->place == rank)
            continue;
        return pst__fail(
            place->error, PST_EINVAL,
            "rank %d, %s: rank %d is place %d of %d in node %d of %d; with rank 0 in a "
            "node of %d and %d ranks in all, nodes must be equal and full, and ranks "
            "count from node to node",
            place->exchange->rank, place->what, rank, its->place, its->places, its->node,
            its->nodes, all->places, place->exchange->size);
    }
    return PST_OK;
}

static pst_status compare_shapes(const pst__meeting_place *place, const pst_comm *inner,
                                 const pst_comm *outer) {
    const size_t bytes = sizeof(shape) * (size_t)place->exchange->size;
    const shape mine = {inner->size, inner->rank, outer->size, outer->rank};
    shape *all = pst__heap_alloc(place->heap, bytes);
    pst_status status =
        all != NULL ? PST_OK : pst__fail(place->error, PST_ENOMEM, "%s: no memory", place->what);
    status = pst__exchange_settle(place, status);
    if (status == PST_OK) status = pst__exchange_all_gather(place, &mine, sizeof mine, all);
    if (status == PST_OK) status = check_shape(place, all);
    pst__heap_free(place->heap, all, bytes);
    return status;
}

static pst_status check_options(const pst__meeting_place *place, const pst_comm *inner,
                                const pst_comm *outer, const pst_hierarchy_options *options,
                                size_t half) {
    if (options->size == 0)
        return pst__fail(place->error, PST_EINVAL, "%s: options->size is not set", place->what);
    if ((inner->ops->kinds & outer->ops->kinds) == 0)
        return pst__fail(place->error, PST_EUNSUPPORTED,
                         "%s: '%s' and '%s' have no kind of collective in common", place->what,
                         inner->ops->name, outer->ops->name);
    if (half < LEAST_HALF * (size_t)place->exchange->size)
        return pst__fail(place->error, PST_EINVAL,
                         "%s: a relay buffer of %zu bytes is too small for %d ranks, which need "
                         "%zu",
                         place->what, options->relay_bytes, place->exchange->size,
                         2 * LEAST_HALF * (size_t)place->exchange->size);
    return PST_OK;
}

static pst_status allocate(const pst__meeting_place *place, pst_device *device, pst_comm *inner,
                           pst_comm *outer, size_t half, pst__hierarchy **made) {
    pst__hierarchy *own = pst__heap_alloc(place->heap, sizeof *own);
    void *relay = NULL;
    *made = own;
    if (own == NULL) return pst__fail(place->error, PST_ENOMEM, "%s: no memory", place->what);
    own->ops = pst__hierarchy_ops;
    own->ops.kinds = inner->ops->kinds & outer->ops->kinds;
    if (inner->ops->open_memory != NULL || outer->ops->open_memory != NULL)
        own->ops.open_memory = open_memory;
    own->comm = (pst_comm){&own->ops, own, place->exchange->rank, place->exchange->size};
    own->heap = place->heap;
    own->device = device;
    own->parts[PST__INNER].comm = inner;
    own->parts[PST__OUTER].comm = outer;
    own->half_bytes = half;
    (void)snprintf(own->path, sizeof own->path, "%s+%s", inner->ops->name, outer->ops->name);
    ck_spinlock_init(&own->driving);
    pst_status status = pst__pair_init(&own->pair, place->heap, place->error, place->what,
                                       place->exchange->rank, inner, outer, roles);
    if (status == PST_OK) status = device->ops->alloc(device, PST_MEMORY_DEVICE, 2 * half, &relay);
    own->relay = relay;
    if (status == PST_OK) return PST_OK;
    return pst__fail(place->error, status, "rank %d, %s: no memory for a relay buffer of %zu bytes",
                     place->exchange->rank, place->what, 2 * half);
}

static pst_status create(const pst__meeting_place *place, pst_device *device, pst_comm *inner,
                         pst_comm *outer, const pst_hierarchy_options *options,
                         pst__hierarchy **made) {
    const size_t wanted = options->relay_bytes == 0 ? RELAY_BYTES : options->relay_bytes;
    const size_t half = wanted / 2 / 512 * 512;
    pst_status status = check_options(place, inner, outer, options, half);
    status = pst__exchange_settle(place, status);
    if (status == PST_OK) status = compare_shapes(place, inner, outer);
    if (status == PST_OK) status = pst__exchange_agree(place, "relay_bytes", wanted);
    if (status != PST_OK) return status;
    status = allocate(place, device, inner, outer, half, made);
    status = pst__exchange_settle(place, status);
    return status == PST_OK
               ? pst__exchange_settle(
                     place, pst__pair_open_memory(&(*made)->pair, (*made)->relay, 2 * half))
               : status;
}

pst_status pst_hierarchy_create(pst_runtime *runtime, pst_device *device, pst_comm *inner,
                                pst_comm *outer, const pst_exchange *exchange,
                                const pst_hierarchy_options *given, pst_comm **comm) {
    pst_hierarchy_options options;
    pst__read_optional(&options, sizeof options, given);
    const pst__meeting_place place = {exchange, pst__runtime_heap(runtime),
                                      pst__runtime_error(runtime),
                                      options.name == NULL ? "hierarchy" : options.name};
    pst__hierarchy *own = NULL;
    *comm = NULL;
    pst_status status = pst__exchange_check(&place);
    if (status == PST_OK) status = create(&place, device, inner, outer, &options, &own);
    if (status != PST_OK) {
        if (own != NULL) pst__hierarchy_free(own);
        return status;
    }
    pst__log(place.error, PST_LOG_INFO,
             "rank %d, '%s': %d nodes of %d ranks, '%s' within a node and '%s' between nodes",
             own->comm.rank, own->pair.name, outer->size, inner->size, inner->ops->name,
             outer->ops->name);
    *comm = &own->comm;
    return PST_OK;
}
