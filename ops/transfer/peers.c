/* What peers read by themselves, and until when. */
#include "ops/transfer/carrier.h"
#include "ops/transfer/operation.h"

#include <string.h>

#define LEAST_OPENED ((size_t)16 << 20)

/* A peer maps all or nothing of what an allocator has taken from the device, and allocators take
 * more than what is asked for where that is little: how large a segment has to be that is opened
 * to peers. */
static size_t opened_bytes(const pst__carrier *carrier, size_t bytes) {
    bytes = pst__round_up(bytes, PST_ARENA_ALIGNMENT);
    return carrier->options.segment_alloc != NULL && bytes < LEAST_OPENED ? LEAST_OPENED : bytes;
}

pst_status pst__open_to_peers(pst__carrier *carrier, pst_comm *comm, const pst_lease *memory) {
    if (comm->ops->open_memory == NULL) return PST_OK;
    pst_status status = comm->ops->open_memory(comm, memory->memory, memory->bytes);
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail(carrier, status, "opening %zu bytes to the peers failed: %s",
                             memory->bytes, comm->ops->error_text(comm));
}

pst_status pst__open_segment(pst__carrier *carrier, pst_arena *arena, size_t bytes,
                             pst_lease *opened) {
    pst_arena_stats stats = {.size = sizeof stats};
    pst_arena_get_stats(arena, &stats);
    bytes = opened_bytes(carrier, bytes);
    pst_status status = pst_arena_add_segment(arena, bytes);
    if (status == PST_OK) status = pst_arena_acquire_at(arena, stats.reserved, bytes, opened);
    if (status == PST_OK)
        status = pst__open_to_peers(carrier, carrier->options.gather_comm, opened);
    if (status != PST_OK || carrier->one_comm) return status;
    return pst__open_to_peers(carrier, carrier->options.reduce_comm, opened);
}

pst_status pst__wait_readers(pst__carrier *carrier, pst_comm *comm, pst_stream *stream,
                             uint64_t ticket) {
    if (comm->ops->source_wait == NULL || ticket == 0) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, stream, ticket);
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail(carrier, status, "waiting for the readers of ticket %llu failed: %s",
                             (unsigned long long)ticket, comm->ops->error_text(comm));
}

pst_status pst__wait_all_readers(pst__carrier *carrier) {
    pst_status status = PST_OK;
    for (int lane = 0; lane < PST__LANE_COUNT && status == PST_OK; lane++) {
        const pst__queue *queue = &carrier->queues[lane];
        if (queue->lane == NULL) continue;
        status = pst__wait_readers(carrier, queue->comm, carrier->compute, queue->tickets);
    }
    return status;
}

pst_status pst__wait_gather_readers(pst__carrier *carrier) {
    return pst__wait_readers(carrier, carrier->options.gather_comm, carrier->compute,
                             carrier->gather_ticket);
}

/* ---- a small all-gather of host memory ------------------------------------------------------- */

pst_status pst__take_gather_of_bytes(pst__carrier *carrier, pst__lane_index lane, const char *name,
                                     void *memory, size_t bytes, pst__operation **taken) {
    const size_t ranks = (size_t)pst__queue_of(carrier, lane)->comm->size;
    pst__operation *operation;
    pst_status status = pst__operation_take(carrier, lane, &operation);
    if (status != PST_OK) return status;
    status = pst__heap_grow(carrier->heap, (void **)&operation->segments,
                            &operation->segment_capacity, ranks, sizeof *operation->segments);
    if (status != PST_OK) {
        pst__operation_give(carrier, operation);
        return pst__carrier_fail(carrier, status, "no memory for the gather of '%s'", name);
    }
    for (size_t rank = 0; rank < ranks; rank++)
        operation->segments[rank] = (pst_segment){(uint32_t)rank, 0, rank * bytes, bytes};
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_GATHER;
    collective->name = name;
    collective->dtype = PST_UINT8;
    collective->source = memory;
    collective->source_bytes = bytes;
    collective->destination = (char *)memory + bytes;
    collective->segments = operation->segments;
    collective->segment_count = ranks;
    *taken = operation;
    return PST_OK;
}

/* *is_ours becomes 0 where somebody may still write to the memory: it is lost then. */
static pst_status gather_bytes(pst__carrier *carrier, pst__lane_index lane, const char *name,
                               void *memory, size_t bytes, int *is_ours) {
    pst__operation *operation;
    pst_status status = pst__take_gather_of_bytes(carrier, lane, name, memory, bytes, &operation);
    if (status == PST_OK) status = pst__operation_submit(operation, bytes, NULL, 0);
    if (status != PST_OK) return status;
    status = pst__operation_wait_end(operation, NULL);
    *is_ours = status == PST_OK || pst__carrier_quiesce(carrier);
    return status;
}

/* Each rank's, then each replica's ranks', each behind what it is made of. */
pst_status pst__gather_bytes(pst__carrier *carrier, const char *name, const void *own, size_t bytes,
                             void *everyone) {
    pst_device *device = carrier->device;
    const int has_replicas = carrier->replicas > 1;
    const size_t replica = bytes * carrier->world, ranks = bytes * pst__carrier_ranks(carrier);
    const size_t before = has_replicas ? bytes + replica : bytes, all = before + ranks;
    void *memory = NULL;
    int is_ours = 1;
    if (device->ops->alloc(device, PST_MEMORY_PINNED, all, &memory) != PST_OK)
        return pst__carrier_fail(carrier, PST_ENOMEM, "%s", "no memory to compare the ranks");
    memcpy(memory, own, bytes);
    pst_status status = gather_bytes(carrier, PST__GATHER_LANE, name, memory, bytes, &is_ours);
    if (status == PST_OK && has_replicas)
        status = gather_bytes(carrier, PST__REPLICA_LANE, name, (char *)memory + bytes, replica,
                              &is_ours);
    if (status == PST_OK) memcpy(everyone, (char *)memory + before, ranks);
    if (is_ours) device->ops->free(device, PST_MEMORY_PINNED, memory, all);
    return status;
}
