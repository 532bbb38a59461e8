/* Collectives beyond 4 GiB: sources repeat a block whose length is no power of two, and what
 * arrives is compared in windows: the first, the last, and some anywhere. */
#include "collectives.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_BYTES  (8u * 1000003u)
#define WINDOW_BYTES 65536u
#define WINDOWS      64u

static const size_t gib = (size_t)1 << 30;

typedef struct large {
    collectives_rank *rank;
    char *blocks[RANKS_MOST]; /* every rank's, on the host */
    char *source, *destination;
    char window[WINDOW_BYTES], expected[WINDOW_BYTES];
    uint64_t chances;
} large;

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
    value = (value ^ value >> 27) * 0x94d049bb133111ebu;
    return value ^ value >> 31;
}

/* Small integers as bfloat16, whose sums are exact; as bytes they are as good as any. */
static uint16_t element(int rank, size_t index) {
    float value = (float)(int)(mix(index * 16 + (uint64_t)rank) % 17) - 8.0f;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float value_of(const large *large, int rank, size_t index) {
    uint16_t half;
    memcpy(&half, large->blocks[rank] + index * 2 % BLOCK_BYTES, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void make_blocks(large *large) {
    for (int rank = 0; rank < large->rank->context->size; rank++) {
        large->blocks[rank] = malloc(BLOCK_BYTES);
        for (size_t i = 0; i < BLOCK_BYTES / 2; i++) {
            uint16_t value = element(rank, i);
            memcpy(large->blocks[rank] + 2 * i, &value, sizeof value);
        }
    }
}

static pst_status copy(large *large, void *to, const void *from, size_t bytes) {
    pst_device *device = large->rank->device;
    pst_copy copy = {to, from, bytes};
    return device->ops->copy(device, large->rank->stream, &copy, 1);
}

/* The own block over and over. */
static pst_status fill(large *large, char *memory, size_t bytes) {
    const char *block = large->blocks[large->rank->context->rank];
    pst_status status = PST_OK;
    for (size_t at = 0; status == PST_OK && at < bytes; at += BLOCK_BYTES)
        status =
            copy(large, memory + at, block, bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES);
    return status;
}

typedef void (*expect)(large *large, size_t at, size_t bytes);

static int window_differs(large *large, size_t at, size_t bytes, expect expect) {
    if (copy(large, large->window, large->destination + at, bytes) != PST_OK) return 1;
    if (collectives_finish(large->rank, 60) != PST_OK) return 1;
    expect(large, at, bytes);
    return memcmp(large->window, large->expected, bytes) != 0;
}

static void check(large *large, const char *name, size_t bytes, expect expect) {
    for (size_t i = 0; i < WINDOWS; i++) {
        size_t at = mix(large->chances++) % (bytes - WINDOW_BYTES) / 4 * 4;
        if (i == 0) at = 0;
        size_t left = i == 1 ? bytes % 4096 + 4096 : WINDOW_BYTES;
        if (i == 1) at = bytes - left; /* the tail */
        RANK_CHECK(large->rank->context, !window_differs(large, at, left, expect),
                   "%s: something differs in the %zu bytes from %zu on", name, left, at);
    }
}

static void launch(large *large, pst_collective_work *work) {
    pst_status status = collectives_launch(large->rank, work);
    if (status == PST_OK) status = collectives_finish(large->rank, 60);
    collectives_free_staging(large->rank, work);
    char text[512] = "";
    (void)pst_runtime_error(large->rank->runtime, text, sizeof text);
    RANK_CHECK(large->rank->context, status == PST_OK, "%s: %s [%s]", work->collective.name,
               pst_status_text(status), text);
}

/* ---- the collectives ------------------------------------------------------------------------- */

static size_t chunk_bytes(const large *large) {
    return (4 * gib + gib / 4) / (size_t)large->rank->context->size | 1;
}

static void expect_gathered(large *large, size_t at, size_t bytes) {
    size_t chunk = chunk_bytes(large);
    for (size_t i = 0; i < bytes; i++)
        large->expected[i] = large->blocks[(at + i) / chunk][(at + i) % chunk % BLOCK_BYTES];
}

static void gather(large *large) {
    pst_segment segments[RANKS_MOST];
    size_t ranks = (size_t)large->rank->context->size, chunk = chunk_bytes(large);
    for (size_t i = 0; i < ranks; i++)
        segments[i] = (pst_segment){(uint32_t)i, 0, i * chunk, chunk};
    pst_collective_work work = {.collective = {.kind = PST_ALL_GATHER,
                                               .name = "large gather",
                                               .dtype = PST_UINT8,
                                               .source = large->source,
                                               .source_bytes = chunk,
                                               .destination = large->destination,
                                               .segments = segments,
                                               .segment_count = ranks}};
    if (fill(large, large->source, chunk) != PST_OK) return;
    launch(large, &work);
    if (large->rank->context->failure[0] == '\0')
        check(large, "large gather", ranks * chunk, expect_gathered);
}

static void expect_scattered(large *large, size_t at, size_t bytes) {
    const rank_context *context = large->rank->context;
    size_t first = (size_t)context->rank * (chunk_bytes(large) / 2) + at / 4;
    for (size_t i = 0; i < bytes / 4; i++) {
        float sum = 0;
        for (int rank = 0; rank < context->size; rank++)
            sum += value_of(large, rank, first + i);
        memcpy(large->expected + 4 * i, &sum, sizeof sum);
    }
}

static void scatter(large *large) {
    size_t ranks = (size_t)large->rank->context->size, count = chunk_bytes(large) / 2;
    pst_reduce_piece piece = {
        .count = count, .destination = large->destination, .destination_dtype = PST_FLOAT32};
    pst_collective_work work = {.collective = {.kind = PST_REDUCE_SCATTER,
                                               .name = "large scatter",
                                               .dtype = PST_BFLOAT16,
                                               .source = large->source,
                                               .source_bytes = count * 2,
                                               .stride = count * 2,
                                               .pieces = &piece,
                                               .piece_count = 1}};
    if (fill(large, large->source, ranks * count * 2) != PST_OK) return;
    launch(large, &work);
    if (large->rank->context->failure[0] == '\0')
        check(large, "large scatter", count * 4, expect_scattered);
}

static void expect_reduced(large *large, size_t at, size_t bytes) {
    for (size_t i = 0; i < bytes / 2; i++) {
        float sum = 0;
        for (int rank = 0; rank < large->rank->context->size; rank++)
            sum += value_of(large, rank, at / 2 + i);
        uint32_t bits;
        memcpy(&bits, &sum, sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(large->expected + 2 * i, &half, sizeof half);
    }
}

static void reduce(large *large) {
    size_t count = 2 * gib + 5;
    pst_collective_work work = {.collective = {.kind = PST_ALL_REDUCE,
                                               .name = "large reduce",
                                               .dtype = PST_BFLOAT16,
                                               .destination = large->destination,
                                               .count = count}};
    if (fill(large, large->destination, count * 2) != PST_OK) return;
    launch(large, &work);
    if (large->rank->context->failure[0] == '\0')
        check(large, "large reduce", count * 2, expect_reduced);
}

static void expect_sent(large *large, size_t at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        large->expected[i] = large->blocks[1][(at + i) % BLOCK_BYTES];
}

static void broadcast(large *large) {
    size_t count = 4 * gib + 3;
    pst_collective_work work = {.collective = {.kind = PST_BROADCAST,
                                               .name = "large broadcast",
                                               .dtype = PST_UINT8,
                                               .destination = large->destination,
                                               .count = count,
                                               .root = 1}};
    if (fill(large, large->destination, count) != PST_OK) return;
    launch(large, &work);
    if (large->rank->context->failure[0] == '\0')
        check(large, "large broadcast", count, expect_sent);
}

size_t collectives_large_bytes(void) {
    return 10 * gib;
}

void collectives_run_large(collectives_rank *rank) {
    static void (*const all[])(large *) = {gather, scatter, reduce, broadcast};
    large *large = calloc(1, sizeof *large);
    large->rank = rank;
    large->source = rank->region;
    large->destination = rank->region + 5 * gib;
    make_blocks(large);
    for (size_t i = 0; i < sizeof all / sizeof all[0] && rank->context->failure[0] == '\0'; i++) {
        all[i](large);
        rank_meet(rank->context); /* nobody writes what another one still reads */
    }
    for (int peer = 0; peer < rank->context->size; peer++)
        free(large->blocks[peer]);
    free(large);
}
