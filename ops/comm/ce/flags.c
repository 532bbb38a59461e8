#include "ops/comm/ce/flags.h"

/* The ring, the flags of graphs, and what these are lowered to. */
static size_t ring_count(int size) {
    return (size_t)PST__FLAG_KINDS * (size_t)size * PST__FLAG_RING;
}

static size_t captured_count(int size) {
    return (size_t)PST__FLAG_KINDS * (size_t)size;
}

static size_t captured_place(const pst__flags *flags, pst__flag_kind kind, int index) {
    return ring_count(flags->size) + (size_t)kind * (size_t)flags->size + (size_t)index;
}

size_t pst__flags_bytes(int size) {
    return (ring_count(size) + 2 * captured_count(size)) * sizeof(uint32_t);
}

static size_t place_of(const pst__flags *flags, pst__flag_kind kind, int index, uint32_t sequence) {
    if (flags->is_captured) return captured_place(flags, kind, index);
    return ((size_t)kind * (size_t)flags->size + (size_t)index) * PST__FLAG_RING +
           sequence / 2u % PST__FLAG_RING;
}

static void add(const pst__flags *flags, pst__flag_steps *steps, int rank, size_t place,
                uint32_t sequence, int is_wait) {
    steps->steps[steps->count++] = (pst_flag_step){flags->rows[rank] + place, sequence, is_wait};
}

void pst__flag_write(const pst__flags *flags, pst__flag_steps *steps, int peer, pst__flag_kind kind,
                     int index, uint32_t sequence) {
    add(flags, steps, peer, place_of(flags, kind, index, sequence), sequence, 0);
}

void pst__flag_wait(const pst__flags *flags, pst__flag_steps *steps, pst__flag_kind kind, int index,
                    uint32_t sequence) {
    add(flags, steps, flags->rank, place_of(flags, kind, index, sequence), sequence, 1);
}

static pst_status enqueue_one(pst_device *device, pst_stream *stream, const pst_flag_step *step) {
    return step->is_wait ? device->ops->stream_wait32(device, stream, step->address, step->value)
                         : device->ops->stream_write32(device, stream, step->address, step->value);
}

pst_status pst__flags_enqueue(const pst__flags *flags, pst_stream *stream, pst__flag_steps *steps) {
    pst_device *device = flags->device;
    const size_t count = steps->count;
    pst_status status = PST_OK;
    steps->count = 0;
    if (count > 1 && device->ops->stream_flags32 != NULL)
        return device->ops->stream_flags32(device, stream, steps->steps, count);
    for (size_t i = 0; i < count && status == PST_OK; i++)
        status = enqueue_one(device, stream, &steps->steps[i]);
    return status;
}

pst_status pst__flags_lower(const pst__flags *flags, pst_stream *stream, pst__flag_kind first,
                            pst__flag_kind last) {
    uint32_t *flag = flags->rows[flags->rank] + captured_place(flags, first, 0);
    const pst_cast lower = {.destination = flag,
                            .source = flag + captured_count(flags->size),
                            .count = (size_t)(last - first + 1) * (size_t)flags->size,
                            .destination_dtype = PST_FLOAT32, /* of that size: no number changes */
                            .source_dtype = PST_FLOAT32};
    return flags->device->ops->cast_scale_copy(flags->device, stream, &lower, 1, 1.0);
}

static pst_status set(const pst__flags *flags, size_t first, size_t count, uint32_t value) {
    pst_status status = PST_OK;
    for (size_t i = first; i < first + count && status == PST_OK; i++)
        status =
            flags->device->ops->flag_write32(flags->device, flags->rows[flags->rank] + i, value);
    return status;
}

/* What flags are lowered to comes first, and they themselves last: a launch that has read that
 * before it was set has lowered them long before. */
pst_status pst__flags_set(const pst__flags *flags, uint32_t sequence, uint32_t captured) {
    const size_t ring = ring_count(flags->size), others = captured_count(flags->size);
    pst_status status = set(flags, ring + others, others, captured);
    if (status == PST_OK) status = set(flags, 0, ring, sequence);
    return status == PST_OK ? set(flags, ring, others, captured) : status;
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* With two ranks each source has one reader. */
static int is_needless(const pst__turns *turns) {
    return turns->flags->size <= 2;
}

void pst__turn_wait(const pst__turns *turns, pst__flag_steps *steps, uint32_t sequence, int step) {
    if (is_needless(turns)) return;
    pst__flag_wait(turns->flags, steps, PST__FLAG_TURN, step,
                   step == 0 ? turns->previous : sequence);
}

void pst__turn_pass(pst__turns *turns, pst__flag_steps *steps, uint32_t sequence, int step) {
    const int rank = turns->flags->rank, size = turns->flags->size;
    if (is_needless(turns)) return;
    if (step < size - 2) {
        pst__flag_write(turns->flags, steps, (rank + size - 1) % size, PST__FLAG_TURN, step + 1,
                        sequence);
        return;
    }
    pst__flag_write(turns->flags, steps, (rank + size - 2) % size, PST__FLAG_TURN, 0, sequence);
    turns->previous = sequence;
}
