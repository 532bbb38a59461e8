/* Sums in fp32 in the order of ranks: this rank's own part in place, the others' from staging. */
#include "ops/ce.h"

static const void *const *sources_at(const pst__ce *ce, const pst_collective *collective,
                                     const char *own, size_t slot, size_t offset,
                                     const void **sources) {
    for (int rank = 0; rank < ce->comm.size; rank++)
        sources[rank] = rank == ce->comm.rank
                            ? own + offset
                            : (const void *)(pst__ce_staged(ce, collective, slot, rank) + offset);
    return sources;
}

static double scale_of(const pst_collective *collective) {
    return collective->scale == 0 ? 1 : collective->scale;
}

pst_status pst__ce_combine(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    const void *sources[PST_CE_MAX_RANKS];
    const char *own = (const char *)collective->source + (size_t)ce->comm.rank * collective->stride;
    const size_t slot = pst__ce_slot(collective->source_bytes);
    for (size_t i = 0; i < collective->piece_count; i++) {
        const pst_reduce_piece *piece = &collective->pieces[i];
        const pst_sum sum = {.destination = piece->destination,
                             .sources =
                                 sources_at(ce, collective, own, slot, piece->offset, sources),
                             .source_count = (size_t)ce->comm.size,
                             .count = piece->count,
                             .scale = scale_of(collective),
                             .accumulate = piece->accumulate,
                             .destination_dtype = piece->destination_dtype,
                             .source_dtype = collective->dtype,
                             .max_blocks = ce->sum_blocks,
                             .is_passing = ce->sums_pass};
        pst_status status = ce->device->ops->sum(ce->device, stream, &sum);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

pst_status pst__ce_sum_chunk(pst__ce *ce, const pst_collective *collective, char *whole,
                             pst_stream *stream) {
    const void *sources[PST_CE_MAX_RANKS];
    const pst__ce_chunk chunk = pst__ce_chunk_of(ce, collective, ce->comm.rank);
    const pst__ce_chunk first = pst__ce_chunk_of(ce, collective, 0);
    char *own = whole + chunk.offset;
    const pst_sum sum = {.destination = own,
                         .sources =
                             sources_at(ce, collective, own, pst__ce_slot(first.bytes), 0, sources),
                         .source_count = (size_t)ce->comm.size,
                         .count = chunk.bytes / pst_dtype_size(collective->dtype),
                         .scale = scale_of(collective),
                         .destination_dtype = collective->dtype,
                         .source_dtype = collective->dtype,
                         .max_blocks = ce->sum_blocks,
                         .is_passing = ce->sums_pass};
    const pst_device_ops *ops = ce->device->ops;
    if (collective->reduce != PST_REDUCE_MAX) return ops->sum(ce->device, stream, &sum);
    return ops->maximum == NULL ? PST_EUNSUPPORTED : ops->maximum(ce->device, stream, &sum);
}
