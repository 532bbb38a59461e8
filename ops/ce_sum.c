/* Sums in fp32 in the order of ranks: this rank's own part in place, the others' from staging. */
#include "ops/ce.h"

static const void *const *sources_at(const pst__ce *ce, const char *own, void *staging, size_t slot,
                                     size_t staged, const void **sources) {
    for (int rank = 0; rank < ce->comm.size; rank++)
        sources[rank] = rank == ce->comm.rank
                            ? own
                            : (const void *)(pst__ce_staged(ce, staging, slot, rank) + staged);
    return sources;
}

static double scale_of(const pst_collective *collective) {
    return collective->scale == 0 ? 1 : collective->scale;
}

/* As much of a piece as lies in `part`. */
static pst_status sum_piece(pst__ce *ce, const pst_collective *collective, const pst__ce_part *part,
                            const pst_reduce_piece *piece, pst_stream *stream) {
    const void *sources[PST_CE_MAX_RANKS];
    const char *own = (const char *)collective->source + (size_t)ce->comm.rank * collective->stride;
    const size_t element = pst_dtype_size(collective->dtype);
    const size_t piece_end = piece->offset + piece->count * element;
    const size_t begin = piece->offset > part->begin ? piece->offset : part->begin;
    const size_t end = piece_end < part->end ? piece_end : part->end;
    if (begin >= end) return PST_OK;
    const size_t first = (begin - piece->offset) / element;
    const pst_sum sum = {.destination = (char *)piece->destination +
                                        first * pst_dtype_size(piece->destination_dtype),
                         .sources = sources_at(ce, own + begin, part->staging, part->slot,
                                               begin - part->begin, sources),
                         .source_count = (size_t)ce->comm.size,
                         .count = (end - begin) / element,
                         .scale = scale_of(collective),
                         .accumulate = piece->accumulate,
                         .destination_dtype = piece->destination_dtype,
                         .source_dtype = collective->dtype,
                         .max_blocks = ce->sum_blocks,
                         .is_passing = ce->sums_pass};
    return ce->device->ops->sum(ce->device, stream, &sum);
}

pst_status pst__ce_sum_part(pst__ce *ce, const pst_collective *collective, const pst__ce_part *part,
                            pst_stream *stream) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < collective->piece_count && status == PST_OK; i++)
        status = sum_piece(ce, collective, part, &collective->pieces[i], stream);
    return status;
}

pst_status pst__ce_combine(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    const pst__ce_part whole = {0, SIZE_MAX, collective->staging,
                                pst__ce_slot(collective->source_bytes)};
    if (pst__ce_is_pieced(ce, collective)) return pst__ce_wait_for_sums(ce, collective, stream);
    return pst__ce_sum_part(ce, collective, &whole, stream);
}

pst_status pst__ce_sum_chunk(pst__ce *ce, const pst_collective *collective, char *whole,
                             pst_stream *stream) {
    const void *sources[PST_CE_MAX_RANKS];
    const pst__ce_chunk chunk = pst__ce_chunk_of(ce, collective, ce->comm.rank);
    const pst__ce_chunk first = pst__ce_chunk_of(ce, collective, 0);
    char *own = whole + chunk.offset;
    const pst_sum sum = {
        .destination = own,
        .sources = sources_at(ce, own, collective->staging, pst__ce_slot(first.bytes), 0, sources),
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
