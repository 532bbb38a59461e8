#include "ops/ce_flags.h"

static size_t count_of(int size) {
    return (size_t)PST__FLAG_KINDS * (size_t)size * PST__FLAG_RING;
}

size_t pst__flags_bytes(int size) {
    return count_of(size) * sizeof(uint32_t);
}

static size_t place_of(const pst__flags *flags, pst__flag_kind kind, int index, uint32_t sequence) {
    return ((size_t)kind * (size_t)flags->size + (size_t)index) * PST__FLAG_RING +
           sequence / 2u % PST__FLAG_RING;
}

pst_status pst__flag_write(const pst__flags *flags, pst_stream *stream, int peer,
                           pst__flag_kind kind, int index, uint32_t sequence) {
    uint32_t *flag = flags->rows[peer] + place_of(flags, kind, index, sequence);
    return flags->device->ops->stream_write32(flags->device, stream, flag, sequence);
}

pst_status pst__flag_wait(const pst__flags *flags, pst_stream *stream, pst__flag_kind kind,
                          int index, uint32_t sequence) {
    const uint32_t *flag = flags->rows[flags->rank] + place_of(flags, kind, index, sequence);
    return flags->device->ops->stream_wait32(flags->device, stream, flag, sequence);
}

pst_status pst__flags_set(const pst__flags *flags, uint32_t sequence) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < count_of(flags->size) && status == PST_OK; i++)
        status =
            flags->device->ops->flag_write32(flags->device, flags->rows[flags->rank] + i, sequence);
    return status;
}
