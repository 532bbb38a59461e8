#include "collectives.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MOST_IN_ROUND 6
#define MOST_SEGMENTS 64
#define MOST_PIECES   6
#define GAP           0x5a

/* One collective of a round. Offsets are into the region's halves, the same on all ranks. */
typedef struct draw {
    pst_collective_work work;
    pst_segment segments[MOST_SEGMENTS];
    pst_reduce_piece pieces[MOST_PIECES];
    size_t piece_places[MOST_PIECES]; /* in the half of destinations */
    size_t source, source_bytes;
    size_t destination, destination_bytes;
} draw;

typedef struct round {
    draw draws[MOST_IN_ROUND];
    size_t count;
    size_t source_bytes, destination_bytes; /* used of each half */
    uint64_t seed;
    char *sources[RANKS_MOST]; /* every rank's half of sources, on the host */
    char *starts[RANKS_MOST];  /* every rank's half of destinations before */
    char *expected, *found;    /* the own half of destinations after */
    size_t half;
} round;

/* ---- chance ---------------------------------------------------------------------------------- */

static uint64_t next(uint64_t *state) {
    uint64_t value = *state += 0x9e3779b97f4a7c15u;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

/* 0 .. limit - 1 */
static size_t below(uint64_t *state, size_t limit) {
    return (size_t)(next(state) % limit);
}

static int chance(uint64_t *state, size_t one_in) {
    return below(state, one_in) == 0;
}

/* 1 .. largest, each power of two as likely as the next. */
static size_t size_up_to(uint64_t *state, size_t largest) {
    size_t bits = 0;
    while (bits < 62 && largest >> (bits + 1) != 0)
        bits++;
    size_t top = (size_t)1 << below(state, bits + 1);
    size_t size = top + below(state, top);
    return size > largest ? largest : size;
}

/* ---- drawing --------------------------------------------------------------------------------- */

static const pst_dtype floats[] = {PST_FLOAT32, PST_FLOAT64, PST_FLOAT16, PST_BFLOAT16};
static const pst_dtype with_maximum[] = {PST_FLOAT32, PST_FLOAT64, PST_INT32, PST_INT64, PST_UINT8};

static size_t aligned(size_t value, size_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

/* Room in the half of sources, at any multiple of `alignment`. */
static size_t take(size_t *used, size_t bytes, size_t alignment, uint64_t *chances) {
    size_t place = aligned(*used, 256) + alignment * below(chances, 3);
    *used = place + bytes;
    return place;
}

/* A parameter's rows over the ranks, as Shard(0) has them, the last ones fewer or none. */
static size_t shard(draw *draw, size_t segments, int ranks, size_t rows, size_t row_bytes,
                    size_t *source, size_t *destination) {
    size_t each = (rows + (size_t)ranks - 1) / (size_t)ranks;
    for (size_t rank = 0; rank < (size_t)ranks; rank++) {
        size_t first = rank * each < rows ? rank * each : rows;
        size_t count = rows - first < each ? rows - first : each;
        if (count == 0) continue;
        draw->segments[segments++] = (pst_segment){
            (uint32_t)rank, *source, *destination + first * row_bytes, count * row_bytes};
    }
    *source += each * row_bytes;
    *destination += rows * row_bytes;
    return segments;
}

/* The same of each rank's source, apart from each other, maybe not in the order of ranks. */
static size_t spread(draw *draw, int ranks, size_t largest, uint64_t *chances, size_t *source,
                     size_t *destination) {
    size_t bytes = size_up_to(chances, largest / (size_t)ranks + 1), gap = below(chances, 3);
    size_t from = below(chances, 64), turn = chance(chances, 2) ? 0 : below(chances, 16);
    for (size_t i = 0; i < (size_t)ranks; i++) {
        uint32_t peer = (uint32_t)((i + turn) % (size_t)ranks);
        draw->segments[i] = (pst_segment){peer, from, *destination, bytes};
        *destination += bytes + gap;
    }
    *source = from + bytes;
    return (size_t)ranks;
}

/* Any pieces of anybody, in any order, with gaps. */
static size_t scatter(draw *draw, int ranks, size_t largest, uint64_t *chances, size_t *source,
                      size_t *destination) {
    size_t count = 1 + below(chances, 12);
    for (size_t i = 0; i < count; i++) {
        size_t bytes = size_up_to(chances, largest / 16 + 1), skip = below(chances, 40);
        draw->segments[i] = (pst_segment){(uint32_t)below(chances, (size_t)ranks),
                                          below(chances, 64), *destination + skip, bytes};
        *destination += skip + bytes;
        if (draw->segments[i].source + bytes > *source) *source = draw->segments[i].source + bytes;
    }
    return count;
}

static void draw_gather(round *round, draw *draw, int ranks, size_t largest, uint64_t *chances) {
    pst_collective *collective = &draw->work.collective;
    size_t source = 0, destination = 0, segments = 0;
    size_t parameters = 1 + below(chances, 3);
    if (chance(chances, 3)) {
        segments = scatter(draw, ranks, largest, chances, &source, &destination);
    } else if (chance(chances, 3)) {
        segments = spread(draw, ranks, largest, chances, &source, &destination);
    } else {
        for (size_t i = 0; i < parameters; i++) {
            size_t row_bytes = 1 + below(chances, 64);
            size_t rows = size_up_to(chances, largest / parameters / row_bytes + 1);
            if (!chance(chances, 3)) rows = aligned(rows, (size_t)ranks);
            segments = shard(draw, segments, ranks, rows, row_bytes, &source, &destination);
            destination += chance(chances, 2) ? 0 : below(chances, 100);
        }
    }
    collective->dtype = (pst_dtype)below(chances, PST_DTYPE_COUNT);
    collective->segment_count = segments;
    collective->segments = draw->segments;
    collective->source_bytes = source;
    draw->source_bytes = source;
    draw->destination_bytes = destination;
    draw->source = take(&round->source_bytes, source, 1, chances);
    draw->destination = take(&round->destination_bytes, destination, 1, chances);
}

/* Its own on each rank: which elements of the chunk go where, and as what. */
static void draw_pieces(draw *draw, size_t elements, uint64_t chances) {
    pst_collective *collective = &draw->work.collective;
    size_t pieces = chance(&chances, 3) ? 1 : 1 + below(&chances, MOST_PIECES - 1);
    size_t element = pst_dtype_size(collective->dtype), done = 0, place = draw->destination;
    int whole = pieces == 1;
    for (size_t i = 0; i < pieces; i++) {
        size_t left = (elements - done) / (pieces - i);
        size_t skip = whole || left == 0 ? 0 : below(&chances, left / 4 + 1);
        pst_dtype to = chance(&chances, 2) ? collective->dtype : floats[below(&chances, 4)];
        place = aligned(place, pst_dtype_size(to));
        draw->piece_places[i] = place;
        draw->pieces[i] = (pst_reduce_piece){.offset = (done + skip) * element,
                                             .count = whole ? elements : left - skip,
                                             .destination_dtype = to,
                                             .accumulate = chance(&chances, 3)};
        done += left;
        place += draw->pieces[i].count * pst_dtype_size(to);
    }
    collective->pieces = draw->pieces;
    collective->piece_count = pieces;
}

static void draw_scatter(round *round, draw *draw, int rank, int ranks, size_t largest,
                         uint64_t *chances) {
    pst_collective *collective = &draw->work.collective;
    collective->dtype = floats[below(chances, 4)];
    size_t element = pst_dtype_size(collective->dtype);
    size_t elements = size_up_to(chances, largest / element / (size_t)ranks + 1);
    size_t gap = chance(chances, 2) ? 0 : element * below(chances, 100);
    collective->source_bytes = elements * element;
    collective->stride = collective->source_bytes + gap;
    static const double scales[] = {0, 1, 0.5, 0.25};
    collective->scale = scales[below(chances, 4)];
    draw->source_bytes = collective->stride * (size_t)ranks;
    draw->destination_bytes = elements * 8 + MOST_PIECES * 8;
    draw->source = take(&round->source_bytes, draw->source_bytes, element, chances);
    draw->destination = take(&round->destination_bytes, draw->destination_bytes, 8, chances);
    draw_pieces(draw, elements, next(chances) + (uint64_t)rank);
}

static void draw_in_place(round *round, draw *draw, int ranks, size_t largest, uint64_t *chances) {
    pst_collective *collective = &draw->work.collective;
    collective->dtype = (pst_dtype)below(chances, PST_DTYPE_COUNT);
    collective->root = (int)below(chances, (size_t)ranks);
    if (collective->kind == PST_ALL_REDUCE) {
        collective->root = 0;
        collective->reduce = chance(chances, 3) ? PST_REDUCE_MAX : PST_REDUCE_SUM;
        collective->dtype = collective->reduce == PST_REDUCE_MAX ? with_maximum[below(chances, 5)]
                                                                 : floats[below(chances, 4)];
        if (collective->reduce == PST_REDUCE_SUM && chance(chances, 2)) collective->scale = 0.25;
    }
    size_t element = pst_dtype_size(collective->dtype);
    collective->count = size_up_to(chances, largest / element + 1);
    draw->destination_bytes = collective->count * element;
    draw->destination = take(&round->destination_bytes, draw->destination_bytes, element, chances);
}

static void draw_one(round *round, draw *draw, const collectives_options *options, int rank,
                     int ranks, size_t largest, uint64_t *chances) {
    memset(draw, 0, sizeof *draw);
    pst_collective *collective = &draw->work.collective;
    do
        collective->kind = (pst_collective_kind)below(chances, PST_COLLECTIVE_KIND_COUNT);
    while ((options->kinds >> collective->kind & 1u) == 0);
    collective->name = "drawn";
    if (collective->kind == PST_ALL_GATHER)
        draw_gather(round, draw, ranks, largest, chances);
    else if (collective->kind == PST_REDUCE_SCATTER)
        draw_scatter(round, draw, rank, ranks, largest, chances);
    else if (collective->kind != PST_BARRIER)
        draw_in_place(round, draw, ranks, largest, chances);
}

static void draw_round(round *round, const collectives_options *options, int rank, int ranks,
                       size_t most) {
    uint64_t chances = round->seed;
    round->source_bytes = round->destination_bytes = 0;
    round->count = 1 + below(&chances, MOST_IN_ROUND);
    if (round->count > most) round->count = most;
    /* One in eight rounds may be as large as it gets, the others stay small and quick. */
    size_t largest = chance(&chances, 8) ? options->largest_bytes : options->largest_bytes / 256;
    for (size_t i = 0; i < round->count; i++)
        draw_one(round, &round->draws[i], options, rank, ranks, largest + 64, &chances);
}

/* ---- contents -------------------------------------------------------------------------------- */

static void fill_bytes(char *memory, size_t bytes, uint64_t chances) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = next(&chances);
        memcpy(memory + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
}

static double number(uint64_t *chances, int any) {
    return any ? (double)(next(chances) % 2000003u) / 1000001.0 - 1.0
               : (double)(int)below(chances, 17) - 8.0;
}

static void fill_numbers(pst_device *host, char *memory, size_t bytes, pst_dtype dtype, int any,
                         uint64_t chances) {
    enum { BLOCK = 256 };
    double block[BLOCK];
    size_t element = pst_dtype_size(dtype), count = bytes / element;
    for (size_t done = 0; done < count; done += BLOCK) {
        size_t part = count - done < BLOCK ? count - done : BLOCK;
        for (size_t i = 0; i < part; i++)
            block[i] = number(&chances, any);
        pst_cast cast = {memory + done * element, block, part, dtype, PST_FLOAT64};
        (void)host->ops->cast_scale_copy(host, NULL, &cast, 1, 1.0);
    }
}

static int is_integer(pst_dtype dtype) {
    return dtype == PST_INT32 || dtype == PST_INT64 || dtype == PST_UINT8;
}

static uint64_t seed_of(const round *round, size_t index, int rank, int half) {
    uint64_t state = round->seed + 1000003u * index + 7919u * (uint64_t)rank + (uint64_t)half;
    return next(&state);
}

static void fill_one(round *round, size_t index, int rank, pst_device *host, unsigned exact) {
    const draw *draw = &round->draws[index];
    const pst_collective *collective = &draw->work.collective;
    int any = (int)(exact >> collective->kind & 1u);
    char *source = round->sources[rank] + draw->source;
    char *start = round->starts[rank] + draw->destination;
    uint64_t seed = seed_of(round, index, rank, 0);
    if (collective->kind == PST_REDUCE_SCATTER)
        fill_numbers(host, source, draw->source_bytes, collective->dtype, any, seed);
    else if (collective->kind == PST_ALL_GATHER)
        fill_bytes(source, draw->source_bytes, seed);
    else if (collective->kind == PST_ALL_REDUCE && !is_integer(collective->dtype))
        fill_numbers(host, start, draw->destination_bytes, collective->dtype, any, seed);
    else if (collective->kind != PST_BARRIER)
        fill_bytes(start, draw->destination_bytes, seed);
}

/* Where a reduction accumulates there has to be a number. */
static void fill_targets(round *round, int rank, pst_device *host) {
    for (size_t i = 0; i < round->count; i++) {
        const draw *draw = &round->draws[i];
        for (size_t j = 0; j < draw->work.collective.piece_count; j++) {
            const pst_reduce_piece *piece = &draw->pieces[j];
            size_t bytes = piece->count * pst_dtype_size(piece->destination_dtype);
            fill_numbers(host, round->starts[rank] + draw->piece_places[j], bytes,
                         piece->destination_dtype, 0, seed_of(round, i, rank, (int)j + 1));
        }
    }
}

static void fill_round(round *round, int rank, int ranks, pst_device *host, unsigned exact) {
    for (int peer = 0; peer < ranks; peer++) {
        memset(round->sources[peer], GAP, round->source_bytes);
        memset(round->starts[peer], GAP, round->destination_bytes);
        for (size_t i = 0; i < round->count; i++)
            fill_one(round, i, peer, host, exact);
    }
    fill_targets(round, rank, host);
}

/* ---- the reference --------------------------------------------------------------------------- */

static void expect_gather(const round *round, const draw *draw) {
    for (size_t i = 0; i < draw->work.collective.segment_count; i++) {
        const pst_segment *segment = &draw->segments[i];
        memcpy(round->expected + draw->destination + segment->destination,
               round->sources[segment->peer] + draw->source + segment->source, segment->bytes);
    }
}

static void expect_scatter(const round *round, const draw *draw, int rank, int ranks,
                           pst_device *host) {
    const pst_collective *collective = &draw->work.collective;
    const void *sources[RANKS_MOST];
    for (size_t i = 0; i < collective->piece_count; i++) {
        const pst_reduce_piece *piece = &draw->pieces[i];
        for (int peer = 0; peer < ranks; peer++)
            sources[peer] = round->sources[peer] + draw->source +
                            (size_t)rank * collective->stride + piece->offset;
        pst_sum sum = {.destination = round->expected + draw->piece_places[i],
                       .sources = sources,
                       .source_count = (size_t)ranks,
                       .count = piece->count,
                       .scale = collective->scale == 0 ? 1 : collective->scale,
                       .accumulate = piece->accumulate,
                       .destination_dtype = piece->destination_dtype,
                       .source_dtype = collective->dtype};
        (void)host->ops->sum(host, NULL, &sum);
    }
}

#define LARGEST(type)                                                                              \
    do {                                                                                           \
        for (size_t i = 0; i < collective->count; i++) {                                           \
            type largest = ((const type *)sources[0])[i];                                          \
            for (int peer = 1; peer < ranks; peer++)                                               \
                if (((const type *)sources[peer])[i] > largest)                                    \
                    largest = ((const type *)sources[peer])[i];                                    \
            ((type *)(void *)to)[i] = largest;                                                     \
        }                                                                                          \
    } while (0)

static void expect_largest(const pst_collective *collective, const void *const *sources, int ranks,
                           char *to) {
    switch (collective->dtype) {
    case PST_FLOAT32:
        LARGEST(float);
        break;
    case PST_FLOAT64:
        LARGEST(double);
        break;
    case PST_INT32:
        LARGEST(int32_t);
        break;
    case PST_INT64:
        LARGEST(int64_t);
        break;
    default:
        LARGEST(uint8_t);
    }
}

static void expect_all_reduce(const round *round, const draw *draw, int ranks, pst_device *host) {
    const pst_collective *collective = &draw->work.collective;
    const void *sources[RANKS_MOST];
    for (int peer = 0; peer < ranks; peer++)
        sources[peer] = round->starts[peer] + draw->destination;
    char *to = round->expected + draw->destination;
    if (collective->reduce == PST_REDUCE_MAX) {
        expect_largest(collective, sources, ranks, to);
        return;
    }
    pst_sum sum = {.destination = to,
                   .sources = sources,
                   .source_count = (size_t)ranks,
                   .count = collective->count,
                   .scale = collective->scale == 0 ? 1 : collective->scale,
                   .destination_dtype = collective->dtype,
                   .source_dtype = collective->dtype};
    (void)host->ops->sum(host, NULL, &sum);
}

static void expect_round(const round *round, int rank, int ranks, pst_device *host) {
    memcpy(round->expected, round->starts[rank], round->destination_bytes);
    for (size_t i = 0; i < round->count; i++) {
        const draw *draw = &round->draws[i];
        const pst_collective *collective = &draw->work.collective;
        if (collective->kind == PST_ALL_GATHER) expect_gather(round, draw);
        if (collective->kind == PST_REDUCE_SCATTER) expect_scatter(round, draw, rank, ranks, host);
        if (collective->kind == PST_ALL_REDUCE) expect_all_reduce(round, draw, ranks, host);
        if (collective->kind == PST_BROADCAST)
            memcpy(round->expected + draw->destination,
                   round->starts[collective->root] + draw->destination, draw->destination_bytes);
    }
}

/* ---- running --------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

pst_status collectives_finish(collectives_rank *rank, double seconds) {
    pst_device *device = rank->device;
    double until = now() + seconds;
    pst_status status = device->ops->event_record(device, rank->event, rank->stream);
    while (status == PST_OK) {
        status = device->ops->event_query(device, rank->event);
        if (status != PST_PENDING) return status;
        if (now() > until) return PST_ETIMEDOUT;
        (void)sched_yield();
        status = PST_OK;
    }
    return status;
}

pst_status collectives_launch(collectives_rank *rank, pst_collective_work *work) {
    pst_device *device = rank->device;
    work->comm = rank->comm;
    work->collective.ticket = ++rank->tickets;
    size_t bytes = rank->comm->ops->staging_bytes(rank->comm, &work->collective);
    pst_status status = PST_OK;
    if (bytes > 0)
        status = device->ops->alloc(device, PST_MEMORY_DEVICE, bytes, &work->collective.staging);
    if (status != PST_OK) return status;
    pst_work task = pst_collective_as_work(work);
    return device->ops->launch(device, rank->stream, &task);
}

void collectives_free_staging(collectives_rank *rank, pst_collective_work *work) {
    pst_device *device = rank->device;
    if (work->collective.staging == NULL) return;
    size_t bytes = rank->comm->ops->staging_bytes(rank->comm, &work->collective);
    device->ops->free(device, PST_MEMORY_DEVICE, work->collective.staging, bytes);
    work->collective.staging = NULL;
}

static pst_status copy(collectives_rank *rank, void *to, const void *from, size_t bytes) {
    pst_copy copy = {to, from, bytes};
    return bytes == 0 ? PST_OK : rank->device->ops->copy(rank->device, rank->stream, &copy, 1);
}

static void place(collectives_rank *rank, round *round, draw *draw) {
    pst_collective *collective = &draw->work.collective;
    char *destinations = rank->region + round->half;
    collective->source = rank->region + draw->source;
    collective->destination = destinations + draw->destination;
    for (size_t i = 0; i < collective->piece_count; i++)
        draw->pieces[i].destination = destinations + draw->piece_places[i];
}

static pst_status enqueue_round(collectives_rank *rank, round *round) {
    int me = rank->context->rank;
    pst_status status = copy(rank, rank->region, round->sources[me], round->source_bytes);
    if (status == PST_OK)
        status =
            copy(rank, rank->region + round->half, round->starts[me], round->destination_bytes);
    for (size_t i = 0; status == PST_OK && i < round->count; i++) {
        place(rank, round, &round->draws[i]);
        status = collectives_launch(rank, &round->draws[i].work);
    }
    if (status != PST_OK) return status;
    return copy(rank, round->found, rank->region + round->half, round->destination_bytes);
}

static void compare(collectives_rank *rank, const round *round, const char *head) {
    for (size_t at = 0; at < round->destination_bytes; at++) {
        if (round->found[at] == round->expected[at]) continue;
        size_t i = round->count - 1;
        while (i > 0 &&
               (round->draws[i].destination_bytes == 0 || round->draws[i].destination > at))
            i--;
        const pst_collective *collective = &round->draws[i].work.collective;
        rank_fail(rank->context, __FILE__, __LINE__,
                  "%s: byte %zu is %02x and not %02x; %s of %s, its destination at %zu + %zu", head,
                  at, (unsigned char)round->found[at], (unsigned char)round->expected[at],
                  pst_collective_name(collective->kind), pst_dtype_name(collective->dtype),
                  round->draws[i].destination, round->draws[i].destination_bytes);
        return;
    }
}

static void report(collectives_rank *rank, const char *head, pst_status status) {
    char text[512] = "";
    (void)pst_runtime_error(rank->runtime, text, sizeof text);
    const char *of_device =
        rank->device->ops->error_text == NULL ? "" : rank->device->ops->error_text(rank->device);
    rank_fail(rank->context, __FILE__, __LINE__, "%s: %s [%s] [%s]", head, pst_status_text(status),
              text, of_device);
}

/* Before the sources are written again the peers have to have read them. */
static pst_status wait_for_readers(collectives_rank *rank) {
    if (rank->comm->ops->source_wait == NULL || rank->tickets == 0) return PST_OK;
    return rank->comm->ops->source_wait(rank->comm, rank->stream, rank->tickets);
}

static void run_round(collectives_rank *rank, round *round, const collectives_options *options,
                      size_t number, size_t most) {
    int me = rank->context->rank, ranks = rank->context->size;
    pst_device *host = pst_runtime_host(rank->runtime);
    char head[96];
    (void)snprintf(head, sizeof head, "seed %llu, round %zu", (unsigned long long)options->seed,
                   number);
    uint64_t chances = options->seed * 1000003u + number;
    round->seed = next(&chances);
    draw_round(round, options, me, ranks, most);
    fill_round(round, me, ranks, host, options->exact);
    expect_round(round, me, ranks, host);
    pst_status status = wait_for_readers(rank);
    if (status == PST_OK) status = enqueue_round(rank, round);
    if (status == PST_OK) status = collectives_finish(rank, options->seconds);
    if (status == PST_OK) status = rank->comm->ops->status(rank->comm);
    if (status != PST_OK) {
        report(rank, head, status);
        return;
    }
    for (size_t i = 0; i < round->count; i++)
        collectives_free_staging(rank, &round->draws[i].work);
    compare(rank, round, head);
}

/* Of the most that a round can have: a reduction's target is at most 4 / ranks of its source. */
static size_t half_bytes(const collectives_options *options) {
    return aligned(MOST_IN_ROUND * (3 * options->largest_bytes + 65536), 4096);
}

size_t collectives_region_bytes(const collectives_options *options) {
    return 2 * half_bytes(options);
}

void collectives_run(collectives_rank *rank, const collectives_options *options) {
    static _Thread_local round round; /* large */
    int ranks = rank->context->size;
    round.half = half_bytes(options);
    round.expected = malloc(round.half);
    round.found = malloc(round.half);
    for (int peer = 0; peer < ranks; peer++) {
        round.sources[peer] = malloc(round.half);
        round.starts[peer] = malloc(round.half);
    }
    size_t number = 0;
    for (size_t done = 0; done < options->count && rank->context->failure[0] == '\0'; number++) {
        run_round(rank, &round, options, number, options->count - done);
        done += round.count;
    }
    for (int peer = 0; peer < ranks; peer++) {
        free(round.sources[peer]);
        free(round.starts[peer]);
    }
    free(round.expected);
    free(round.found);
}
