/* What a collective must be like to be started. */
#include "ops/comm/ce/ce.h"

const char *pst__ce_name_of(const pst_collective *collective) {
    return collective->name == NULL ? "" : collective->name;
}

static pst_status check_segments(pst__ce *ce, const pst_collective *collective) {
    for (size_t i = 0; i < collective->segment_count; i++) {
        const pst_segment *segment = &collective->segments[i];
        if (segment->peer >= (uint32_t)ce->comm.size ||
            segment->source > collective->source_bytes ||
            segment->bytes > collective->source_bytes - segment->source)
            return pst__ce_fail(
                ce, PST_EINVAL, "segment %zu of '%s' is not within %zu bytes of one of %d ranks", i,
                pst__ce_name_of(collective), collective->source_bytes, ce->comm.size);
    }
    return PST_OK;
}

static pst_status check_pieces(pst__ce *ce, const pst_collective *collective) {
    const size_t element = pst_dtype_size(collective->dtype);
    for (size_t i = 0; i < collective->piece_count; i++) {
        const pst_reduce_piece *piece = &collective->pieces[i];
        if (piece->offset > collective->source_bytes ||
            piece->count > (collective->source_bytes - piece->offset) / element)
            return pst__ce_fail(ce, PST_EINVAL, "piece %zu of '%s' is not within its %zu bytes", i,
                                pst__ce_name_of(collective), collective->source_bytes);
    }
    return PST_OK;
}

static uint64_t next_ticket(const pst__ce *ce, uint64_t ticket) {
    if (!ce->flags.is_captured) return ce->tickets + 1;
    return (ticket & ~(uint64_t)PST_MOST_CAPTURED) | ((ce->captured & PST_MOST_CAPTURED) + 1);
}

pst_status pst__ce_check_ticket(pst__ce *ce, uint64_t ticket, const char *name) {
    const uint64_t next = next_ticket(ce, ticket);
    if (ticket == next) return PST_OK;
    return pst__ce_fail(ce, PST_EINVAL,
                        "'%s' has ticket %llu, but the next one is %llu: tickets grow by one", name,
                        (unsigned long long)ticket, (unsigned long long)next);
}

static pst_status check_rows(pst__ce *ce, const pst_collective *collective) {
    if (collective->rows == NULL ||
        (collective->kind == PST_ALL_GATHER && collective->segment_count <= (size_t)ce->comm.size &&
         ce->device->ops->copy_rows != NULL) ||
        (collective->is_pushed && ce->device->ops->copy_rows != NULL))
        return PST_OK;
    return pst__ce_fail(ce, PST_EINVAL,
                        "'%s' has rows: an all-gather of one table may, and a reduce-scatter that "
                        "is pushed, on a device that copies them",
                        pst__ce_name_of(collective));
}

pst_status pst__ce_check(pst__ce *ce, const pst_collective *collective) {
    pst_status status = pst__ce_check_ticket(ce, collective->ticket, pst__ce_name_of(collective));
    if (status != PST_OK) return status;
    if (pst_dtype_size(collective->dtype) == 0)
        return pst__ce_fail(ce, PST_EINVAL, "'%s' has no dtype", pst__ce_name_of(collective));
    if (collective->staging == NULL && pst__ce_staging_bytes(ce, collective) > 0)
        return pst__ce_fail(ce, PST_EINVAL, "'%s' has no staging", pst__ce_name_of(collective));
    status = check_rows(ce, collective);
    if (status != PST_OK) return status;
    if (collective->kind == PST_ALL_GATHER) return check_segments(ce, collective);
    if (collective->kind == PST_REDUCE_SCATTER) return check_pieces(ce, collective);
    return PST_OK;
}
