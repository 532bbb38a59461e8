/* What is enqueued for a collective: one round of pulls, two for an all-reduce. In a round a rank
 * first signals all peers that its source is ready, before it waits for anything, so that no wait
 * of one rank can stand before what another waits for; then step by step, from each source: wait
 * until it is ready and for the turn, copy, hand the turn on, signal the source that it has been
 * read. Where the options ask for no turns, all is pulled at once when all sources are ready: ranks
 * that have waited for each other begin together, and then read different sources without any
 * turns.
 *
 * A reduce-scatter that is pushed takes one round of pushes instead, so that its sources need not
 * be opened to peers: the same with destinations in place of sources, ready to be written, and then
 * written; the sums wait for that.
 *
 * No cycle: what a rank waits for in a round is written by others in the same round ahead of their
 * waits (ready), at an earlier step (turn), or in an earlier round (the first turn, the bounce
 * buffer). */
#include "ops/comm/ce/ce.h"

#include "base/atomic.h"
#include "ops/comm/sums.h"

#include <string.h>

typedef enum part {
    NOTHING,     /* barrier */
    SEGMENTS,    /* all-gather */
    ROWS,        /* all-gather, of those that this rank has named */
    CHUNK,       /* reduce-scatter, and the first round of an all-reduce: this rank's chunk */
    PUSHED,      /* reduce-scatter: the peer's chunk, to its staging */
    PUSHED_ROWS, /* of it those that this rank has named */
    RESULT,      /* the second: the peer's chunk, summed */
    WHOLE        /* broadcast: all of the root's */
} part;

/* A part of a collective's memory, in bytes. */
typedef struct chunk {
    size_t offset, bytes;
} chunk;

typedef struct round {
    pst__ce *ce;
    const pst_collective *collective;
    pst_stream *stream;
    pst__place place; /* where peers read, or write; no region: nowhere */
    char *own;        /* the same as this rank sees it */
    uint32_t sequence;
    part part;
} round;

static size_t slot_bytes(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

/* Where in the staging of `rank` a peer's chunk lies, `slot` bytes each. */
static char *staged_on(int rank, void *staging, size_t slot, int peer) {
    const int index = peer < rank ? peer : peer - 1;
    return (char *)staging + (size_t)index * slot;
}

static char *staged(const pst__ce *ce, void *staging, size_t slot, int peer) {
    return staged_on(ce->comm.rank, staging, slot, peer);
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static int is_in_place(const pst_collective *collective) {
    return collective->kind == PST_ALL_REDUCE || collective->kind == PST_BROADCAST;
}

static size_t whole_bytes(const pst_collective *collective) {
    return collective->count * pst_dtype_size(collective->dtype);
}

/* Chunks of whole lines of memory: the last ones may be short or empty. */
static chunk chunk_of(const pst__ce *ce, const pst_collective *collective, int rank) {
    const size_t whole = whole_bytes(collective), size = (size_t)ce->comm.size;
    const size_t each = slot_bytes((whole + size - 1) / size);
    const size_t begin = each * (size_t)rank < whole ? each * (size_t)rank : whole;
    const size_t end = whole - begin < each ? whole : begin + each;
    return (chunk){begin, end - begin};
}

size_t pst__ce_staging_bytes(const pst__ce *ce, const pst_collective *collective) {
    size_t each = 0;
    if (collective->kind == PST_REDUCE_SCATTER) each = collective->source_bytes;
    if (collective->kind == PST_ALL_REDUCE) each = chunk_of(ce, collective, 0).bytes;
    return slot_bytes(each) * (size_t)(ce->comm.size - 1);
}

/* About what is pulled from a peer: the same on all ranks. */
static size_t pulled_bytes(const pst__ce *ce, const pst_collective *collective) {
    const size_t size = (size_t)ce->comm.size;
    size_t all = 0;
    switch (collective->kind) {
    case PST_ALL_GATHER:
        for (size_t i = 0; i < collective->segment_count; i++)
            all += collective->segments[i].bytes;
        return (all + size - 1) / size;
    case PST_REDUCE_SCATTER:
        return collective->source_bytes;
    case PST_ALL_REDUCE:
        return (whole_bytes(collective) + size - 1) / size;
    case PST_BROADCAST:
        return whole_bytes(collective);
    default:
        return 0;
    }
}

/* What peers may read of this rank's memory, from its source on; or write, from its staging on. */
static size_t opened_extent(const pst__ce *ce, const pst_collective *collective) {
    if (collective->is_pushed) return pst__ce_staging_bytes(ce, collective);
    if (is_in_place(collective)) return whole_bytes(collective);
    if (collective->kind == PST_REDUCE_SCATTER && collective->source_bytes > 0)
        return (size_t)(ce->comm.size - 1) * collective->stride + collective->source_bytes;
    return collective->source_bytes;
}

/* ---- what is copied from a peer -------------------------------------------------------------- */

/* A segment that goes on where the one before it ends, on both sides, belongs to the same copy. */
static size_t add_copy(pst_copy *copies, size_t count, char *destination, const char *source,
                       size_t bytes) {
    if (bytes == 0 || destination == source) return count;
    pst_copy *last = count == 0 ? NULL : &copies[count - 1];
    if (last != NULL && (char *)last->destination + last->bytes == destination &&
        (const char *)last->source + last->bytes == source) {
        last->bytes += bytes;
        return count;
    }
    copies[count] = (pst_copy){destination, source, bytes};
    return count + 1;
}

static size_t collect_segments(const round *round, int peer, const char *source, pst_copy *copies) {
    const pst_collective *collective = round->collective;
    size_t count = 0;
    for (size_t i = 0; i < collective->segment_count; i++) {
        const pst_segment *segment = &collective->segments[i];
        if ((int)segment->peer == peer)
            count = add_copy(copies, count, (char *)collective->destination + segment->destination,
                             source + segment->source, segment->bytes);
    }
    return count;
}

/* The part of this rank's chunk that the pieces of a reduce-scatter need. */
static chunk span_of(const pst_collective *collective) {
    size_t low = SIZE_MAX, high = 0;
    for (size_t i = 0; i < collective->piece_count; i++) {
        const pst_reduce_piece *piece = &collective->pieces[i];
        const size_t end = piece->offset + piece->count * pst_dtype_size(collective->dtype);
        if (piece->count == 0) continue;
        if (piece->offset < low) low = piece->offset;
        if (end > high) high = end;
    }
    return high == 0 ? (chunk){0, 0} : (chunk){low, high - low};
}

static size_t collect_span(const round *round, int peer, const char *source, pst_copy *copies) {
    const pst_collective *collective = round->collective;
    const chunk span = span_of(collective);
    const size_t slot = slot_bytes(collective->source_bytes);
    return add_copy(copies, 0, staged(round->ce, collective->staging, slot, peer) + span.offset,
                    source + (size_t)round->ce->comm.rank * collective->stride + span.offset,
                    span.bytes);
}

static size_t collect_chunk(const round *round, int peer, const char *source, pst_copy *copies) {
    const pst__ce *ce = round->ce;
    const pst_collective *collective = round->collective;
    if (collective->kind == PST_REDUCE_SCATTER) return collect_span(round, peer, source, copies);
    const chunk mine = chunk_of(ce, collective, ce->comm.rank);
    const size_t slot = slot_bytes(chunk_of(ce, collective, 0).bytes);
    return add_copy(copies, 0, staged(ce, collective->staging, slot, peer), source + mine.offset,
                    mine.bytes);
}

static size_t collect_push(const round *round, int peer, pst_copy *copies) {
    const pst_collective *collective = round->collective;
    const pst__place *place = &round->place;
    char *staging = place->region->views[peer] + place->offset;
    return add_copy(
        copies, 0,
        staged_on(peer, staging, slot_bytes(collective->source_bytes), round->ce->comm.rank),
        round->own + (size_t)peer * collective->stride, collective->source_bytes);
}

static size_t collect(const round *round, int peer, pst_copy *copies) {
    const pst__ce *ce = round->ce;
    const pst__place *place = &round->place;
    if (place->region == NULL) return 0; /* nothing to read anywhere */
    const char *source = place->region->views[peer] + place->offset;
    char *own = round->own;
    const chunk theirs = chunk_of(ce, round->collective, peer);
    switch (round->part) {
    case SEGMENTS:
        return collect_segments(round, peer, source, copies);
    case ROWS:
    case PUSHED_ROWS:
        return 0; /* see copy_rows */
    case CHUNK:
        return collect_chunk(round, peer, source, copies);
    case PUSHED:
        return collect_push(round, peer, copies);
    case RESULT:
        return add_copy(copies, 0, own + theirs.offset, source + theirs.offset, theirs.bytes);
    case WHOLE:
        if (peer != round->collective->root) return 0;
        return add_copy(copies, 0, own, source, whole_bytes(round->collective));
    case NOTHING:
        break;
    }
    return 0;
}

/* ---- rows that this rank has named ----------------------------------------------------------- */

/* NULL: nothing is to be read there. */
static char *seen_of(const round *round, int peer) {
    if (peer == round->ce->comm.rank) return round->own;
    const pst__place *place = &round->place;
    return place->region == NULL ? NULL : place->region->views[peer] + place->offset;
}

static size_t gathered_ranges(const round *round, pst_row_range *ranges) {
    const pst_collective *collective = round->collective;
    size_t count = 0;
    for (size_t i = 0; i < collective->segment_count; i++) {
        const pst_segment *segment = &collective->segments[i];
        char *to = (char *)collective->destination + segment->destination;
        const char *seen = seen_of(round, (int)segment->peer);
        if (segment->bytes == 0 || seen == NULL || seen + segment->source == to) continue;
        ranges[count++] =
            (pst_row_range){to, seen + segment->source,
                            segment->destination - collective->rows->offset, segment->bytes};
    }
    return count;
}

static size_t pushed_ranges(const round *round, pst_row_range *ranges) {
    const pst_collective *collective = round->collective;
    size_t count = 0;
    for (int peer = 0; round->place.region != NULL && peer < round->ce->comm.size; peer++) {
        pst_copy copy;
        if (peer == round->ce->comm.rank || collect_push(round, peer, &copy) == 0) continue;
        ranges[count++] = (pst_row_range){
            copy.destination, copy.source,
            collective->rows->offset + (size_t)peer * collective->stride, copy.bytes};
    }
    return count;
}

static int names_rows(const pst_collective *collective) {
    return collective->rows != NULL && collective->rows->indices != NULL;
}

/* From or to all peers by one kernel, without turns: of these each rank would have its own. */
static pst_status copy_rows(const round *round) {
    pst_row_range ranges[PST_CE_MAX_RANKS];
    pst_device *device = round->ce->device;
    const pst_table_rows *rows = round->collective->rows;
    const size_t count =
        round->part == ROWS ? gathered_ranges(round, ranges) : pushed_ranges(round, ranges);
    const pst_row_copy copy = {.indices = rows->indices,
                               .count = rows->count,
                               .rows = rows->rows,
                               .row_bytes = rows->row_bytes,
                               .ranges = ranges,
                               .range_count = count};
    return device->ops->copy_rows(device, round->stream, &copy);
}

/* Peers may push rows: of what they do not write this rank adds up zeros. */
static pst_status clear_staging(const round *round) {
    const pst__ce *ce = round->ce;
    const pst_collective *collective = round->collective;
    return ce->device->ops->fill(ce->device, round->stream, collective->staging, 0,
                                 pst__ce_staging_bytes(ce, collective));
}

/* ---- a round --------------------------------------------------------------------------------- */

/* The rank whose first source this is comes first. */
static void signal_ready(const round *round, pst__flag_steps *steps) {
    const pst__ce *ce = round->ce;
    const int rank = ce->comm.rank, size = ce->comm.size;
    for (int i = 1; i < size; i++)
        pst__flag_write(&ce->flags, steps, (rank + size - i) % size, PST__FLAG_READY, rank,
                        round->sequence);
}

static void signal_done(const round *round, int source, pst__flag_steps *steps) {
    pst__flag_write(&round->ce->flags, steps, source, PST__FLAG_DONE, round->ce->comm.rank,
                    round->sequence);
}

static void wait_until_ready(const round *round, int source, pst__flag_steps *steps) {
    pst__flag_wait(&round->ce->flags, steps, PST__FLAG_READY, source, round->sequence);
}

static int source_at(const round *round, int step) {
    return pst__turn_source(round->ce->comm.rank, round->ce->comm.size, step);
}

static int is_by_rows(const round *round) {
    return round->part == ROWS || round->part == PUSHED_ROWS;
}

static pst_status copy_collected(const round *round, size_t count) {
    pst_device *device = round->ce->device;
    if (count == 0) return PST_OK;
    return device->ops->copy(device, round->stream, round->ce->copies, count);
}

/* From source to source, each at this rank's turn. `steps` go from copy to copy: what follows one
 * and what the next one waits for are enqueued together. */
static pst_status pull_by_turns(const round *round, pst__flag_steps *steps) {
    pst__ce *ce = round->ce;
    pst_status status = PST_OK;
    for (int step = 0; step < ce->comm.size - 1 && status == PST_OK; step++) {
        const int source = source_at(round, step);
        wait_until_ready(round, source, steps);
        pst__turn_wait(&ce->turns, steps, round->sequence, step);
        status = pst__flags_enqueue(&ce->flags, round->stream, steps);
        if (status == PST_OK) status = copy_collected(round, collect(round, source, ce->copies));
        pst__turn_pass(&ce->turns, steps, round->sequence, step);
        signal_done(round, source, steps);
    }
    return status;
}

/* From all sources with one call. */
static pst_status pull_together(const round *round, pst__flag_steps *steps) {
    pst__ce *ce = round->ce;
    const int last = ce->comm.size - 1;
    size_t count = 0;
    for (int step = 0; step < last; step++) {
        wait_until_ready(round, source_at(round, step), steps);
        count += collect(round, source_at(round, step), ce->copies + count);
    }
    pst_status status = pst__flags_enqueue(&ce->flags, round->stream, steps);
    if (status == PST_OK && is_by_rows(round)) status = copy_rows(round);
    if (status == PST_OK) status = copy_collected(round, count);
    for (int step = 0; step < last; step++)
        signal_done(round, source_at(round, step), steps);
    return status;
}

static pst_status run_round(round *round, part part, int phase) {
    const pst__ce *ce = round->ce;
    pst__flag_steps steps = {.count = 0};
    round->part = part;
    round->sequence = pst__ce_sequence(ce, round->collective->ticket, phase);
    signal_ready(round, &steps);
    const int by_turns = !ce->flags.is_captured && round->collective->rows == NULL &&
                         pulled_bytes(ce, round->collective) >= ce->turn_bytes;
    pst_status status = by_turns ? pull_by_turns(round, &steps) : pull_together(round, &steps);
    return status == PST_OK ? pst__flags_enqueue(&ce->flags, round->stream, &steps) : status;
}

/* ---- sums: in fp32 in the order of ranks, the own part in place, the others' from staging ---- */

static const void *const *sources_at(const pst__ce *ce, const char *own, void *staging, size_t slot,
                                     size_t offset, const void **sources) {
    for (int rank = 0; rank < ce->comm.size; rank++)
        sources[rank] =
            rank == ce->comm.rank ? own : (const void *)(staged(ce, staging, slot, rank) + offset);
    return sources;
}

static const void *const *sources_of(const pst__ce *ce, const pst_collective *collective,
                                     const pst_reduce_piece *piece, const void **sources) {
    const char *own = (const char *)collective->source + (size_t)ce->comm.rank * collective->stride;
    return sources_at(ce, own + piece->offset, collective->staging,
                      slot_bytes(collective->source_bytes), piece->offset, sources);
}

static pst_status sum_piece(pst__ce *ce, const pst_collective *collective,
                            const pst_reduce_piece *piece, pst_stream *stream) {
    const void *sources[PST_CE_MAX_RANKS];
    pst_sum sum = pst__sum_of(collective, piece, sources_of(ce, collective, piece, sources),
                              (size_t)ce->comm.size);
    sum.is_passing = ce->sums_pass;
    return piece->count == 0 ? PST_OK : ce->device->ops->sum(ce->device, stream, &sum);
}

static pst_status sum_pieces(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < collective->piece_count && status == PST_OK; i++)
        if (collective->pieces[i].destination != NULL)
            status = sum_piece(ce, collective, &collective->pieces[i], stream);
    return status;
}

#define UPDATES 16u /* in a call */

/* As many in a call as have room. */
static pst_status update_pieces(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    const void *sources[UPDATES][PST_ADAMW_MOST_SOURCES];
    pst_adamw_piece updates[UPDATES];
    const pst_adamw_piece *next = collective->updates;
    size_t count = 0;
    pst_status status = PST_OK;
    for (size_t i = 0; i < collective->piece_count && status == PST_OK; i++) {
        const pst_reduce_piece *piece = &collective->pieces[i];
        if (piece->destination != NULL) continue;
        (void)sources_of(ce, collective, piece, sources[count]);
        updates[count] = pst__update_of(collective, next++, sources[count], (size_t)ce->comm.size);
        if (++count < UPDATES) continue;
        status = ce->device->ops->adamw(ce->device, stream, updates, count);
        count = 0;
    }
    if (status != PST_OK || count == 0) return status;
    return ce->device->ops->adamw(ce->device, stream, updates, count);
}

/* Until all peers have written their chunks. */
static pst_status wait_for_pushes(const pst__ce *ce, uint64_t ticket, pst_stream *stream) {
    pst__flag_steps steps = {.count = 0};
    for (int peer = 0; peer < ce->comm.size; peer++)
        if (peer != ce->comm.rank)
            pst__flag_wait(&ce->flags, &steps, PST__FLAG_DONE, peer,
                           pst__ce_sequence(ce, ticket, 1));
    return pst__flags_enqueue(&ce->flags, stream, &steps);
}

pst_status pst__ce_combine(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    pst_status status =
        collective->is_pushed ? wait_for_pushes(ce, collective->ticket, stream) : PST_OK;
    if (status == PST_OK) status = sum_pieces(ce, collective, stream);
    return status == PST_OK ? update_pieces(ce, collective, stream) : status;
}

static pst_status sum_chunk(pst__ce *ce, const pst_collective *collective, char *whole,
                            pst_stream *stream) {
    const void *sources[PST_CE_MAX_RANKS];
    const chunk mine = chunk_of(ce, collective, ce->comm.rank);
    const chunk first = chunk_of(ce, collective, 0);
    char *own = whole + mine.offset;
    const pst_sum sum = {
        .destination = own,
        .sources = sources_at(ce, own, collective->staging, slot_bytes(first.bytes), 0, sources),
        .source_count = (size_t)ce->comm.size,
        .count = mine.bytes / pst_dtype_size(collective->dtype),
        .scale = pst__scale_of(collective),
        .destination_dtype = collective->dtype,
        .source_dtype = collective->dtype,
        .is_passing = ce->sums_pass};
    const pst_device_ops *ops = ce->device->ops;
    if (collective->reduce != PST_REDUCE_MAX) return ops->sum(ce->device, stream, &sum);
    return ops->maximum == NULL ? PST_EUNSUPPORTED : ops->maximum(ce->device, stream, &sum);
}

/* ---- this rank's own part of a gather -------------------------------------------------------- */

/* Within a device a copy is a launch, in a batch too: several are one of a kernel, where there are
 * kernels. In a graph the driver copies by a kernel that takes the multiprocessors for long. */
static pst_status copy_own(const pst__ce *ce, size_t count) {
    enum { FEW = 2 };
    const pst_device_ops *ops = ce->device->ops;
    if (count <= FEW && !ce->flags.is_captured)
        return ops->copy(ce->device, ce->aside, ce->copies, count);
    for (size_t i = 0; i < count; i++)
        ce->casts[i] = (pst_cast){.destination = ce->copies[i].destination,
                                  .source = ce->copies[i].source,
                                  .count = ce->copies[i].bytes,
                                  .destination_dtype = PST_UINT8,
                                  .source_dtype = PST_UINT8};
    const pst_status status = ops->cast_scale_copy(ce->device, ce->aside, ce->casts, count, 1.0);
    return status == PST_EUNSUPPORTED ? ops->copy(ce->device, ce->aside, ce->copies, count)
                                      : status;
}

/* Beside the pulls, as it does not need the link. */
static pst_status begin_own_copies(const round *round, int *begun) {
    pst__ce *ce = round->ce;
    const pst_device_ops *ops = ce->device->ops;
    const size_t count =
        collect_segments(round, ce->comm.rank, round->collective->source, ce->copies);
    *begun = count > 0;
    if (count == 0) return PST_OK;
    pst_status status = ops->event_record(ce->device, ce->fork, round->stream);
    if (status == PST_OK) status = ops->stream_wait(ce->device, ce->aside, ce->fork);
    if (status == PST_OK) status = copy_own(ce, count);
    if (status == PST_OK) status = ops->event_record(ce->device, ce->join, ce->aside);
    return status;
}

static pst_status gather(round *round) {
    pst__ce *ce = round->ce;
    int begun;
    if (names_rows(round->collective)) return run_round(round, ROWS, 1);
    pst_status status = begin_own_copies(round, &begun);
    if (status == PST_OK) status = run_round(round, SEGMENTS, 1);
    if (status == PST_OK && begun)
        status = ce->device->ops->stream_wait(ce->device, round->stream, ce->join);
    return status;
}

/* The second round needs no further wait: a rank that signals its sum has read before. */
static pst_status all_reduce(round *round) {
    pst__ce *ce = round->ce;
    pst_status status = run_round(round, CHUNK, 0);
    if (status == PST_OK) status = sum_chunk(ce, round->collective, round->own, round->stream);
    return status == PST_OK ? run_round(round, RESULT, 1) : status;
}

static pst_status scatter(round *round) {
    const pst_collective *collective = round->collective;
    if (!collective->is_pushed) return run_round(round, CHUNK, 1);
    const pst_status status = collective->rows != NULL ? clear_staging(round) : PST_OK;
    if (status != PST_OK) return status;
    return run_round(round, names_rows(collective) ? PUSHED_ROWS : PUSHED, 1);
}

static pst_status run(round *round) {
    switch (round->collective->kind) {
    case PST_ALL_GATHER:
        return gather(round);
    case PST_REDUCE_SCATTER:
        return scatter(round);
    case PST_ALL_REDUCE:
        return all_reduce(round);
    case PST_BROADCAST:
        return run_round(round, WHOLE, 1);
    default:
        return run_round(round, NOTHING, 1);
    }
}

/* ---- the bounce buffer ----------------------------------------------------------------------- */

static const void *source_of(const pst_collective *collective) {
    return is_in_place(collective) ? collective->destination : collective->source;
}

static pst_status copy_one(const round *round, void *destination, const void *source,
                           size_t bytes) {
    const pst_copy copy = {destination, source, bytes};
    return round->ce->device->ops->copy(round->ce->device, round->stream, &copy, 1);
}

/* Finds where the peers read: in registered memory, else in the bounce buffer; or write. */
static pst_status expose(round *round, size_t bytes, int *bounced) {
    pst__ce *ce = round->ce;
    const int is_pushed = round->collective->is_pushed;
    const void *source = source_of(round->collective);
    const void *opened = is_pushed ? round->collective->staging : source;
    round->own = (char *)(uintptr_t)source;
    *bounced = 0;
    if (bytes == 0 || ce->comm.size == 1) return PST_OK;
    if (pst__regions_find(&ce->regions, opened, bytes, &round->place)) return PST_OK;
    if (is_pushed || bytes > PST_CE_BOUNCE_BYTES)
        return pst__ce_fail(ce, PST_EINVAL,
                            "'%s': the %zu bytes at %p that peers %s are not in registered "
                            "memory; pst_ce_register it",
                            pst__ce_name_of(round->collective), bytes, opened,
                            is_pushed ? "write" : "read");
    round->own = ce->bounce;
    *bounced = 1;
    (void)pst__regions_find(&ce->regions, ce->bounce, bytes, &round->place);
    return PST_OK;
}

/* Once the peers have read what was there before. */
static pst_status fill_bounce(const round *round, size_t bytes) {
    pst__ce *ce = round->ce;
    pst_status status = PST_OK;
    if (ce->bounce_ticket != 0)
        status = ce->comm.ops->source_wait(&ce->comm, round->stream, ce->bounce_ticket);
    ce->bounce_ticket = round->collective->ticket;
    return status == PST_OK ? copy_one(round, ce->bounce, source_of(round->collective), bytes)
                            : status;
}

/* ---- tickets --------------------------------------------------------------------------------- */

/* Release: pairs with the acquire in abort, which raises the flags beyond this ticket. */
static void take_ticket(pst__ce *ce, uint64_t ticket) {
    if (ce->flags.is_captured)
        ce->captured = ticket;
    else
        pst__store_release(&ce->tickets, ticket);
}

/* Far from those that are not captured. */
#define CAPTURED_ON_BOARDS (UINT32_C(1) << 30)

static pst_status compare(const round *round) {
    pst__ce *ce = round->ce;
    const pst_collective *collective = round->collective;
    char text[PST__CE_TEXT];
    int peer;
    if (ce->no_verify) return PST_OK;
    const pst__fingerprint mine =
        pst__fingerprint_of(collective, round->place.index, round->place.offset);
    const int is_captured = ce->flags.is_captured;
    const uint32_t first = is_captured ? CAPTURED_ON_BOARDS : ce->first_sequence;
    const uint64_t ticket = collective->ticket, index = ticket & PST_MOST_CAPTURED;
    pst_status status =
        pst__boards_compare(&ce->boards, pst__flag_sequence(first, ticket, 1),
                            is_captured ? index : ticket, &mine, &peer, text, sizeof text);
    return status == PST_OK ? PST_OK : pst__ce_fail(ce, status, "%s", text);
}

/* Room for the copies from all peers: of segments, or one from each. */
static pst_status make_room(pst__ce *ce, const pst_collective *collective) {
    const size_t ranks = (size_t)ce->comm.size;
    const size_t most = collective->segment_count > ranks ? collective->segment_count : ranks;
    void *copies = ce->copies, *casts = ce->casts;
    pst_status status =
        pst__heap_grow(ce->heap, &copies, &ce->copy_capacity, most, sizeof *ce->copies);
    if (status == PST_OK)
        status = pst__heap_grow(ce->heap, &casts, &ce->cast_capacity, most, sizeof *ce->casts);
    ce->copies = copies;
    ce->casts = casts;
    return status;
}

static pst_status enqueue(round *round, size_t bytes, int bounced) {
    pst__ce *ce = round->ce;
    const pst_collective *collective = round->collective;
    pst_status status = bounced ? fill_bounce(round, bytes) : PST_OK;
    if (status == PST_OK) status = run(round);
    if (status == PST_OK && bounced && is_in_place(collective))
        status = copy_one(round, collective->destination, ce->bounce, bytes);
    return status;
}

pst_status pst__ce_mark_end(pst__ce *ce, pst_stream *stream) {
    if (ce->flags.is_captured) return PST_OK;
    const pst_status status = ce->device->ops->event_record(ce->device, ce->ended, stream);
    /* Release: pairs with the acquire in is_idle, which then asks for the event. */
    if (status == PST_OK) pst__store_release(&ce->marked, ce->tickets);
    return status;
}

/* What was broken off may have begun copies of the own part. */
static pst_status mark_broken_end(pst__ce *ce, pst_stream *stream) {
    const pst_device_ops *ops = ce->device->ops;
    pst_status status = ops->event_record(ce->device, ce->join, ce->aside);
    if (status == PST_OK) status = ops->stream_wait(ce->device, stream, ce->join);
    return status == PST_OK ? pst__ce_mark_end(ce, stream) : status;
}

pst_status pst__ce_pull(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    round round = {.ce = ce, .collective = collective, .stream = stream};
    const size_t bytes = opened_extent(ce, collective);
    int bounced;
    pst_status status = pst__ce_check(ce, collective);
    if (status == PST_OK) status = make_room(ce, collective);
    if (status == PST_OK) status = expose(&round, bytes, &bounced);
    if (status == PST_OK) status = compare(&round);
    if (status != PST_OK) return status;
    take_ticket(ce, collective->ticket);
    status = enqueue(&round, bytes, bounced);
    if (status == PST_OK) return pst__ce_mark_end(ce, stream);
    (void)mark_broken_end(ce, stream);
    return status;
}

pst_status pst__ce_pass(pst__ce *ce, const pst_collective *collective, pst_stream *stream) {
    const round round = {.ce = ce, .collective = collective, .stream = stream};
    const uint64_t ticket = collective->ticket;
    pst__flag_steps steps = {.count = 0};
    pst_status status = pst__ce_check_ticket(ce, ticket, pst__ce_name_of(collective));
    if (status == PST_OK) status = compare(&round);
    if (status != PST_OK) return status;
    take_ticket(ce, ticket);
    for (int peer = 0; peer < ce->comm.size; peer++)
        if (peer != ce->comm.rank)
            pst__flag_write(&ce->flags, &steps, peer, PST__FLAG_DONE, ce->comm.rank,
                            pst__ce_sequence(ce, ticket, 1));
    status = pst__flags_enqueue(&ce->flags, stream, &steps);
    const pst_status marked = pst__ce_mark_end(ce, stream);
    return status == PST_OK ? marked : status;
}
