/* What a collective of all ranks consists of: collectives of the node and between nodes. In each
 * round a part of every chunk goes through the relay buffer. */
#include "ops/comm/join/hierarchy.h"

/* Chunks of reductions are cut where accesses stay aligned. */
#define ELEMENTS 64u

/* ---- sizes ----------------------------------------------------------------------------------- */

static size_t nodes_of(const pst__hierarchy *own) {
    return (size_t)own->parts[PST__OUTER].comm->size;
}

static size_t places_of(const pst__hierarchy *own) {
    return (size_t)own->parts[PST__INNER].comm->size;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* What sums between nodes are made of. */
static pst_dtype dtype_of_sums(const pst_collective *collective) {
    return collective->dtype == PST_FLOAT64 ? PST_FLOAT64 : PST_FLOAT32;
}

static int is_float(pst_dtype dtype) {
    return dtype == PST_FLOAT32 || dtype == PST_FLOAT64 || dtype == PST_FLOAT16 ||
           dtype == PST_BFLOAT16 || dtype == PST_FLOAT8_E4M3 || dtype == PST_FLOAT8_E5M2;
}

/* The order does not matter for others, so that each rank may reduce all of the array. */
static int is_summed_in_shares(const pst_collective *collective) {
    return collective->kind == PST_ALL_REDUCE && collective->reduce == PST_REDUCE_SUM &&
           is_float(collective->dtype);
}

static pst__hierarchy_course in_rounds(size_t whole, size_t most, size_t phases) {
    const size_t each = smaller(whole, most);
    return (pst__hierarchy_course){each == 0 ? 0 : (whole + each - 1) / each, phases, each};
}

static pst__hierarchy_course course_of_gather(const pst__hierarchy *own,
                                              const pst_collective *collective) {
    return in_rounds(collective->source_bytes, own->half_bytes / nodes_of(own) / 256 * 256, 2);
}

static pst__hierarchy_course course_of_scatter(const pst__hierarchy *own,
                                               const pst_collective *collective) {
    const size_t count = collective->source_bytes / pst_dtype_size(collective->dtype);
    const size_t sums = nodes_of(own) * pst_dtype_size(dtype_of_sums(collective));
    return in_rounds(count, own->half_bytes / sums / ELEMENTS * ELEMENTS, nodes_of(own) + 1);
}

/* Beside the array's part the relay buffer holds this rank's share of it. */
static pst__hierarchy_course course_of_shares(const pst__hierarchy *own,
                                              const pst_collective *collective) {
    const size_t places = places_of(own), element = pst_dtype_size(collective->dtype);
    const size_t share = (collective->count + places - 1) / places;
    const size_t most = own->half_bytes / element / (places + 1) / ELEMENTS * ELEMENTS;
    return in_rounds((share + ELEMENTS - 1) / ELEMENTS * ELEMENTS, most, 4);
}

pst__hierarchy_course pst__hierarchy_course_of(const pst__hierarchy *own,
                                               const pst_collective *collective) {
    const int has_root =
        collective->root % own->parts[PST__INNER].comm->size == own->parts[PST__INNER].comm->rank;
    switch (collective->kind) {
    case PST_ALL_GATHER:
        return course_of_gather(own, collective);
    case PST_REDUCE_SCATTER:
        return course_of_scatter(own, collective);
    case PST_BROADCAST:
        return (pst__hierarchy_course){1, has_root ? 2 : 1, 0};
    default:
        return is_summed_in_shares(collective) ? course_of_shares(own, collective)
                                               : (pst__hierarchy_course){1, 2, 0};
    }
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* A part of every chunk: its bytes or elements from `first` on. */
typedef struct share {
    const pst__hierarchy *own;
    const pst_collective *whole;
    size_t first, count;
    char *relay;
    const pst__hierarchy_lists *lists; /* NULL: sizes only */
} share;

static const char *source_at(const share *share, size_t offset) {
    return (const char *)share->whole->source + offset;
}

/* ---- all-gather ------------------------------------------------------------------------------ */

/* The parts of all ranks of this place, one behind the other. */
static void gather_between(const share *share, pst__hierarchy_step *step) {
    const size_t nodes = nodes_of(share->own);
    step->side = PST__OUTER;
    step->begins_half = 1;
    step->collective.source = source_at(share, share->first);
    step->collective.source_bytes = share->count;
    step->collective.destination = share->relay;
    if (share->lists == NULL) return;
    step->collective.segments = share->lists->segments;
    step->collective.segment_count = nodes;
    for (size_t node = 0; node < nodes; node++)
        share->lists->segments[node] =
            (pst_segment){(uint32_t)node, 0, node * share->count, share->count};
}

/* The part of a segment that is in the relay buffers of the node. */
static pst_segment cut_segment(const share *share, const pst_segment *segment) {
    const size_t places = places_of(share->own), node = segment->peer / places;
    const size_t begin = larger(segment->source, share->first);
    const size_t end = smaller(segment->source + segment->bytes, share->first + share->count);
    const uint32_t peer = (uint32_t)(segment->peer % places);
    if (begin >= end) return (pst_segment){.peer = peer};
    return (pst_segment){.peer = peer,
                         .source = node * share->count + begin - share->first,
                         .destination = segment->destination + begin - segment->source,
                         .bytes = end - begin};
}

static void gather_within(const share *share, pst__hierarchy_step *step) {
    const pst_collective *whole = share->whole;
    step->side = PST__INNER;
    step->reads_relay = 1;
    step->collective.source = share->relay;
    step->collective.source_bytes = nodes_of(share->own) * share->count;
    step->collective.destination = whole->destination;
    if (share->lists == NULL) return;
    step->collective.segments = share->lists->segments;
    step->collective.segment_count = whole->segment_count;
    for (size_t i = 0; i < whole->segment_count; i++)
        share->lists->segments[i] = cut_segment(share, &whole->segments[i]);
}

/* ---- reduce-scatter -------------------------------------------------------------------------- */

static void one_piece(const share *share, pst__hierarchy_step *step, pst_reduce_piece piece) {
    if (share->lists == NULL) return;
    step->collective.pieces = share->lists->pieces;
    step->collective.piece_count = 1;
    share->lists->pieces[0] = piece;
}

/* What the ranks of this node have for those of `node`: the sum for this place. */
static void scatter_within(const share *share, size_t node, pst__hierarchy_step *step) {
    const pst_collective *whole = share->whole;
    const size_t element = pst_dtype_size(whole->dtype);
    const pst_dtype sums = dtype_of_sums(whole);
    step->side = PST__INNER;
    step->begins_half = node == 0;
    step->collective.source =
        source_at(share, node * places_of(share->own) * whole->stride + share->first * element);
    step->collective.source_bytes = share->count * element;
    step->collective.stride = whole->stride;
    one_piece(
        share, step,
        (pst_reduce_piece){.count = share->count,
                           .destination = share->relay + node * share->count * pst_dtype_size(sums),
                           .destination_dtype = sums});
}

/* The part of a piece that this round's sums have. */
static pst_reduce_piece cut_piece(const share *share, const pst_reduce_piece *piece) {
    const size_t offset = piece->offset / pst_dtype_size(share->whole->dtype);
    const size_t begin = larger(offset, share->first);
    const size_t end = smaller(offset + piece->count, share->first + share->count);
    pst_reduce_piece cut = *piece;
    cut.count = begin < end ? end - begin : 0;
    if (cut.count == 0) {
        cut.offset = 0;
        return cut;
    }
    cut.offset = (begin - share->first) * pst_dtype_size(dtype_of_sums(share->whole));
    cut.destination =
        (char *)piece->destination + (begin - offset) * pst_dtype_size(piece->destination_dtype);
    return cut;
}

static void scatter_between(const share *share, pst__hierarchy_step *step) {
    const pst_collective *whole = share->whole;
    const pst_dtype sums = dtype_of_sums(whole);
    step->side = PST__OUTER;
    step->reads_relay = 1;
    step->collective.dtype = sums;
    step->collective.source = share->relay;
    step->collective.source_bytes = share->count * pst_dtype_size(sums);
    step->collective.stride = step->collective.source_bytes;
    step->collective.scale = whole->scale;
    if (share->lists == NULL) return;
    step->collective.pieces = share->lists->pieces;
    step->collective.piece_count = whole->piece_count;
    for (size_t i = 0; i < whole->piece_count; i++)
        share->lists->pieces[i] = cut_piece(share, &whole->pieces[i]);
}

/* ---- all-reduce in shares -------------------------------------------------------------------- */

/* In the relay buffer: `places` shares of the array, and behind them this place's sum. A round has
 * those elements of the array that come next: at most `places` shares. */
static size_t elements_begin(const share *share) {
    return share->first * places_of(share->own);
}

static size_t elements_left(const share *share) {
    return smaller(share->whole->count - elements_begin(share),
                   share->count * places_of(share->own));
}

static char *array_at(const share *share) {
    return (char *)share->whole->destination +
           elements_begin(share) * pst_dtype_size(share->whole->dtype);
}

static char *sum_at(const share *share) {
    return share->relay +
           places_of(share->own) * share->count * pst_dtype_size(share->whole->dtype);
}

/* What the last shares lack is whatever is there: nobody takes the sums of it. */
static void copy_shares(const share *share, pst__hierarchy_step *step) {
    step->side = PST__SIDES;
    step->begins_half = 1;
    step->copy = (pst_copy){share->relay, array_at(share),
                            elements_left(share) * pst_dtype_size(share->whole->dtype)};
}

static void sum_shares(const share *share, pst__hierarchy_step *step) {
    const size_t bytes = share->count * pst_dtype_size(share->whole->dtype);
    step->side = PST__INNER;
    step->reads_relay = 1;
    step->collective.kind = PST_REDUCE_SCATTER;
    step->collective.source = share->relay;
    step->collective.source_bytes = bytes;
    step->collective.stride = bytes;
    one_piece(share, step,
              (pst_reduce_piece){.count = share->count,
                                 .destination = sum_at(share),
                                 .destination_dtype = share->whole->dtype});
}

static void reduce_sums(const share *share, pst__hierarchy_step *step) {
    step->side = PST__OUTER;
    step->reads_relay = 1;
    step->collective.destination = sum_at(share);
    step->collective.count = share->count;
    step->collective.scale = share->whole->scale;
}

static void gather_sums(const share *share, pst__hierarchy_step *step) {
    const size_t bytes = share->count * pst_dtype_size(share->whole->dtype);
    const size_t places = places_of(share->own);
    const size_t left = elements_left(share) * pst_dtype_size(share->whole->dtype);
    step->side = PST__INNER;
    step->reads_relay = 1;
    step->collective.kind = PST_ALL_GATHER;
    step->collective.source = sum_at(share);
    step->collective.source_bytes = bytes;
    step->collective.destination = array_at(share);
    if (share->lists == NULL) return;
    step->collective.segments = share->lists->segments;
    step->collective.segment_count = places;
    for (size_t place = 0; place < places; place++) {
        const size_t begin = smaller(place * bytes, left);
        share->lists->segments[place] =
            (pst_segment){(uint32_t)place, 0, begin, smaller(left - begin, bytes)};
    }
}

/* ---- what goes as it is, first the one way, then the other ----------------------------------- */

static void pass_on(const share *share, pst__hierarchy_side side, pst__hierarchy_step *step) {
    const pst_collective *whole = share->whole;
    const int places = share->own->parts[PST__INNER].comm->size;
    step->side = side;
    step->collective.destination = whole->destination;
    step->collective.count = whole->count;
    step->collective.reduce = whole->reduce;
    step->collective.root = side == PST__INNER ? whole->root % places : whole->root / places;
    /* Integers are scaled at the end. */
    if (side == PST__OUTER) step->collective.scale = whole->scale;
}

/* ---- which ----------------------------------------------------------------------------------- */

static void all_reduce(const share *share, size_t phase, pst__hierarchy_step *step) {
    static void (*const phases[])(const struct share *share, pst__hierarchy_step *step) = {
        copy_shares, sum_shares, reduce_sums, gather_sums};
    if (is_summed_in_shares(share->whole))
        phases[phase](share, step);
    else
        pass_on(share, phase == 0 ? PST__INNER : PST__OUTER, step);
}

static size_t left_of(const share *share, size_t each) {
    const pst_collective *whole = share->whole;
    if (whole->kind == PST_ALL_GATHER) return smaller(each, whole->source_bytes - share->first);
    if (whole->kind != PST_REDUCE_SCATTER) return each;
    return smaller(each, whole->source_bytes / pst_dtype_size(whole->dtype) - share->first);
}

pst__hierarchy_step pst__hierarchy_step_of(const pst__hierarchy *own,
                                           const pst_collective *collective,
                                           const pst__hierarchy_course *course, size_t round,
                                           size_t phase, char *relay,
                                           const pst__hierarchy_lists *lists) {
    share share = {own, collective, round * course->each, 0, relay, lists};
    pst__hierarchy_step step = {
        .collective = {.kind = collective->kind, .dtype = collective->dtype}};
    share.count = left_of(&share, course->each);
    switch (collective->kind) {
    case PST_ALL_GATHER:
        (phase == 0 ? gather_between : gather_within)(&share, &step);
        break;
    case PST_REDUCE_SCATTER:
        if (phase < nodes_of(own))
            scatter_within(&share, phase, &step);
        else
            scatter_between(&share, &step);
        break;
    case PST_ALL_REDUCE:
        all_reduce(&share, phase, &step);
        break;
    case PST_BROADCAST:
        pass_on(&share, course->phases - phase == 1 ? PST__INNER : PST__OUTER, &step);
        break;
    default:
        step.side = phase == 0 ? PST__INNER : PST__OUTER;
    }
    return step;
}
