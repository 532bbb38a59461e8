/* A reduce-scatter in pieces: each is summed, on a stream of the communicator's own, as soon as it
 * has been pulled, so that it is still in the device's cache, and staging has room for two. The
 * pulls of a piece wait for the sums of the one before the last.
 *
 * `combine` finds its collective's sums in a ring of events: they may be enqueued for collectives
 * further on, too, which must not be waited for. */
#include "ops/ce.h"

static const pst_device_ops *ops_of(const pst__ce *ce) {
    return ce->device->ops;
}

/* ---- life ------------------------------------------------------------------------------------ */

pst_status pst__ce_pieces_open(pst__ce *ce) {
    pst__ce_pieces *own = &ce->pieces;
    if (own->bytes == 0) return PST_OK;
    /* Ahead of what computes: pulls wait for the sums. */
    pst_status status = ops_of(ce)->stream_create(ce->device, -1, &own->adding);
    if (status == PST_OK) status = ops_of(ce)->event_create(ce->device, 0, &own->pulled);
    for (int i = 0; i < PST__CE_PIECES_IN_FLIGHT && status == PST_OK; i++) {
        status = ops_of(ce)->event_create(ce->device, 0, &own->arrived[i]);
        if (status == PST_OK) status = ops_of(ce)->event_create(ce->device, 0, &own->added[i]);
    }
    for (int i = 0; i < PST__CE_SUMS_KNOWN && status == PST_OK; i++)
        status = ops_of(ce)->event_create(ce->device, 0, &own->sums[i].end);
    return status;
}

static void destroy_event(const pst__ce *ce, pst_event *event) {
    if (event != NULL) ops_of(ce)->event_destroy(ce->device, event);
}

void pst__ce_pieces_close(const pst__ce *ce) {
    const pst__ce_pieces *own = &ce->pieces;
    for (int i = 0; i < PST__CE_SUMS_KNOWN; i++)
        destroy_event(ce, own->sums[i].end);
    for (int i = 0; i < PST__CE_PIECES_IN_FLIGHT; i++) {
        destroy_event(ce, own->arrived[i]);
        destroy_event(ce, own->added[i]);
    }
    destroy_event(ce, own->pulled);
    if (own->adding != NULL) ops_of(ce)->stream_destroy(ce->device, own->adding);
}

/* ---- which, and how much --------------------------------------------------------------------- */

int pst__ce_is_pieced(const pst__ce *ce, const pst_collective *collective) {
    const size_t bytes = ce->pieces.bytes;
    return bytes > 0 && collective->kind == PST_REDUCE_SCATTER && ce->comm.size > 1 &&
           collective->source_bytes / bytes >= PST__CE_PIECES_IN_FLIGHT;
}

static size_t slot_bytes(const pst__ce *ce) {
    return ce->pieces.bytes * (size_t)(ce->comm.size - 1);
}

size_t pst__ce_pieces_staging(const pst__ce *ce) {
    return PST__CE_PIECES_IN_FLIGHT * slot_bytes(ce);
}

/* ---- a piece --------------------------------------------------------------------------------- */

/* Bytes `begin` to `end` of this rank's chunk, and where the others' are staged. */
typedef struct piece {
    size_t begin, end;
    char *staging;
} piece;

static pst_status pull(pst__ce *ce, const pst_collective *collective, const pst__place *place,
                       const piece *piece, pst_stream *stream) {
    const int rank = ce->comm.rank, others = ce->comm.size - 1;
    const size_t at = place->offset + (size_t)rank * collective->stride + piece->begin;
    for (int step = 0; step < others; step++) {
        const int peer = pst__turn_source(rank, ce->comm.size, step);
        ce->copies[step] = (pst_copy){pst__ce_staged(ce, piece->staging, ce->pieces.bytes, peer),
                                      place->region->views[peer] + at, piece->end - piece->begin};
    }
    return ops_of(ce)->copy(ce->device, stream, ce->copies, (size_t)others);
}

static pst_status add(pst__ce *ce, const pst_collective *collective, const piece *piece, int slot,
                      pst_stream *stream) {
    pst__ce_pieces *own = &ce->pieces;
    const pst__ce_part part = {piece->begin, piece->end, piece->staging, own->bytes};
    pst_status status = ops_of(ce)->event_record(ce->device, own->arrived[slot], stream);
    if (status == PST_OK)
        status = ops_of(ce)->stream_wait(ce->device, own->adding, own->arrived[slot]);
    if (status == PST_OK) status = pst__ce_sum_part(ce, collective, &part, own->adding);
    if (status == PST_OK)
        status = ops_of(ce)->event_record(ce->device, own->added[slot], own->adding);
    return status;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* The lock keeps `combine` from waiting for an event while it is recorded anew. */
static pst_status note_sums(pst__ce *ce, uint64_t ticket) {
    pst__ce_pieces *own = &ce->pieces;
    ck_spinlock_lock(&own->lock);
    pst__ce_sums *sums = &own->sums[own->count++ % PST__CE_SUMS_KNOWN];
    pst_status status = ops_of(ce)->event_record(ce->device, sums->end, own->adding);
    sums->ticket = ticket;
    ck_spinlock_unlock(&own->lock);
    return status;
}

pst_status pst__ce_pull_pieces(pst__ce *ce, const pst_collective *collective,
                               const pst__place *place, pst_stream *stream) {
    const pst__ce_chunk span = pst__ce_span(collective);
    const size_t last = span.offset + span.bytes;
    pst_status status = PST_OK;
    size_t count = 0;
    /* Pieces begin on lines of memory, so that the kernel finds all sources alike. */
    for (size_t at = span.offset / 256 * 256; at < last && status == PST_OK; count++) {
        const size_t end = last - at < ce->pieces.bytes ? last : at + ce->pieces.bytes;
        const int slot = (int)(count % PST__CE_PIECES_IN_FLIGHT);
        const piece piece = {at, end, (char *)collective->staging + (size_t)slot * slot_bytes(ce)};
        if (count >= PST__CE_PIECES_IN_FLIGHT)
            status = ops_of(ce)->stream_wait(ce->device, stream, ce->pieces.added[slot]);
        if (status == PST_OK) status = pull(ce, collective, place, &piece, stream);
        if (status == PST_OK) status = add(ce, collective, &piece, slot, stream);
        at = end;
    }
    return status == PST_OK ? note_sums(ce, collective->ticket) : status;
}

pst_status pst__ce_wait_for_sums(pst__ce *ce, const pst_collective *collective,
                                 pst_stream *stream) {
    pst_status status = PST_ESTATE;
    int found = 0;
    ck_spinlock_lock(&ce->pieces.lock);
    for (int i = 0; i < PST__CE_SUMS_KNOWN && !found; i++) {
        found = ce->pieces.sums[i].ticket == collective->ticket;
        if (found) status = ops_of(ce)->stream_wait(ce->device, stream, ce->pieces.sums[i].end);
    }
    ck_spinlock_unlock(&ce->pieces.lock);
    if (found) return status;
    return pst__ce_fail(ce, PST_ESTATE,
                        "'%s' (ticket %llu) was not started, or %d reduce-scatters were started "
                        "behind it: combine each before that",
                        collective->name == NULL ? "" : collective->name,
                        (unsigned long long)collective->ticket, PST__CE_SUMS_KNOWN);
}

/* The stream of sums comes to its end behind `stream`. */
pst_status pst__ce_pieces_join(pst__ce *ce, pst_stream *stream, pst_stream **last) {
    pst__ce_pieces *own = &ce->pieces;
    *last = stream;
    if (own->bytes == 0) return PST_OK;
    *last = own->adding;
    pst_status status = ops_of(ce)->event_record(ce->device, own->pulled, stream);
    return status == PST_OK ? ops_of(ce)->stream_wait(ce->device, own->adding, own->pulled)
                            : status;
}
