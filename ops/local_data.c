#include "ops/local.h"

static const pst_collective *of_rank(const pst__request *request, int rank) {
    return request->meeting->posted[rank];
}

static pst_status copy(pst__local_comm *local, pst_stream *stream, void *destination,
                       const void *source, size_t bytes) {
    if (bytes == 0 || destination == source) return PST_OK;
    pst_copy piece = {destination, source, bytes};
    return local->device->ops->copy(local->device, stream, &piece, 1);
}

static pst_status read_gather(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    for (size_t i = 0; i < own->segment_count; i++) {
        const pst_segment *segment = &own->segments[i];
        const char *source = of_rank(request, (int)segment->peer)->source;
        pst_status status =
            copy(local, request->stream, (char *)own->destination + segment->destination,
                 source + segment->source, segment->bytes);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static pst_status read_piece(pst__local_comm *local, const pst__request *request,
                             const pst_reduce_piece *piece) {
    const pst_collective *own = request->collective;
    for (int rank = 0; rank < local->comm.size; rank++) {
        const pst_collective *theirs = of_rank(request, rank);
        local->sources[rank] = (const char *)theirs->source +
                               (size_t)local->comm.rank * theirs->stride + piece->offset;
    }
    pst_sum sum = {.destination = piece->destination,
                   .sources = local->sources,
                   .source_count = (size_t)local->comm.size,
                   .count = piece->count,
                   .scale = own->scale == 0 ? 1 : own->scale,
                   .accumulate = piece->accumulate,
                   .destination_dtype = piece->destination_dtype,
                   .source_dtype = own->dtype};
    return local->device->ops->sum(local->device, request->stream, &sum);
}

static pst_status read_reduce_scatter(pst__local_comm *local, const pst__request *request) {
    for (size_t i = 0; i < request->collective->piece_count; i++) {
        pst_status status = read_piece(local, request, &request->collective->pieces[i]);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* In place, so the result waits in staging until every rank has read. */
static pst_status read_all_reduce(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    for (int rank = 0; rank < local->comm.size; rank++)
        local->sources[rank] = of_rank(request, rank)->destination;
    pst_sum sum = {.destination = own->staging,
                   .sources = local->sources,
                   .source_count = (size_t)local->comm.size,
                   .count = own->count,
                   .scale = own->scale == 0 ? 1 : own->scale,
                   .destination_dtype = own->dtype,
                   .source_dtype = own->dtype};
    const pst_device_ops *ops = local->device->ops;
    return own->reduce == PST_REDUCE_MAX ? ops->maximum(local->device, request->stream, &sum)
                                         : ops->sum(local->device, request->stream, &sum);
}

static size_t in_place_bytes(const pst_collective *collective) {
    return collective->count * pst_dtype_size(collective->dtype);
}

static pst_status read_broadcast(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    return copy(local, request->stream, own->destination, of_rank(request, own->root)->destination,
                in_place_bytes(own));
}

pst_status pst__local_read(pst__local_comm *local, const pst__request *request) {
    switch (request->collective->kind) {
    case PST_ALL_GATHER:
        return read_gather(local, request);
    case PST_REDUCE_SCATTER:
        return read_reduce_scatter(local, request);
    case PST_ALL_REDUCE:
        return read_all_reduce(local, request);
    case PST_BROADCAST:
        return read_broadcast(local, request);
    default:
        return PST_OK;
    }
}

pst_status pst__local_write_back(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    if (own->kind != PST_ALL_REDUCE) return PST_OK;
    return copy(local, request->stream, own->destination, own->staging, in_place_bytes(own));
}
