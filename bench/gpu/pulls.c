/* bench_gpu_pulls [--ranks N] [--driver PATH] [--cache FOLDER] [--tiny]
 * [--turn-bytes N] [--only PART]: what the communicator ce makes of the link, a process a GPU.
 *   turns     equal pulls from all peers in rounds, ranks delayed at random, with turns and without
 *   train     gathers and reduce-scatters as in a training step, sums on a stream of their own
 *   sizes     gathers alone and reduce-scatters alone
 *   rows      gathers of a table, whole and by the rows that each rank has named, drawn at random
 *   barrier   what signals cost
 * GB/s are those that one GPU pulls; times are the device's. --tiny: sizes for the fake driver. */
#include "ops/comm/ce/ce.h"
#include "tests/gpu/ranks.h"

#include <penstock/cuda.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEBIBYTE ((size_t)1 << 20)

enum { MOST_TIMES = 4096 };

typedef struct settings {
    const char *driver, *cache;
    size_t unit;      /* bytes of what counts as a MiB */
    const char *only; /* part; NULL: all */
    size_t turn_bytes;
} settings;

typedef struct bench {
    rank_context *context;
    const settings *settings;
    pst_runtime *runtime;
    pst_device *device;
    pst_comm *comm;
    pst_stream *pulls, *sums, *compute;
    pst_event *marks[2 * MOST_TIMES], *ready, *pulled;
    size_t mark_count;
    char *memory; /* source, destination, staging, scratch: `part` bytes each */
    size_t part;
    uint64_t tickets, dice;
    double times[MOST_TIMES]; /* us */
    size_t time_count;
} bench;

#define TRY(bench, call)                                                                           \
    do {                                                                                           \
        pst_status tried = (call);                                                                 \
        if (tried != PST_OK) {                                                                     \
            char text[512] = "";                                                                   \
            (void)pst_runtime_error((bench)->runtime, text, sizeof text);                          \
            rank_fail((bench)->context, __FILE__, __LINE__, "%s: %s (%s)", #call,                  \
                      pst_status_text(tried), text);                                               \
            return;                                                                                \
        }                                                                                          \
    } while (0)

static int has_failed(const bench *b) {
    return b->context->failure[0] != '\0';
}

static uint32_t draw(bench *b, uint32_t bound) {
    b->dice = b->dice * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(b->dice >> 33) % bound;
}

/* ---- times ----------------------------------------------------------------------------------- */

static void mark(bench *b, pst_stream *stream) {
    TRY(b, b->device->ops->event_record(b->device, b->marks[b->mark_count++], stream));
}

static void finish(bench *b, pst_stream *stream) {
    pst_status status;
    TRY(b, b->device->ops->event_record(b->device, b->ready, stream));
    do
        status = b->device->ops->event_query(b->device, b->ready);
    while (status == PST_PENDING && sched_yield() == 0);
    TRY(b, status);
}

/* Microseconds between two marks. */
static double between(bench *b, size_t first, size_t second) {
    uint64_t begin = 0, end = 0;
    if (b->device->ops->event_time(b->device, b->marks[first], &begin) != PST_OK ||
        b->device->ops->event_time(b->device, b->marks[second], &end) != PST_OK)
        rank_fail(b->context, __FILE__, __LINE__, "a mark has no time");
    return ((double)end - (double)begin) / 1e3;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(bench *b, double share) {
    qsort(b->times, b->time_count, sizeof *b->times, compare);
    return b->time_count == 0 ? 0 : b->times[(size_t)(share * (double)(b->time_count - 1))];
}

/* The mean of all ranks' values. */
static double mean(bench *b, double value) {
    double values[RANKS_MOST], sum = 0;
    const pst_exchange *exchange = &b->context->exchange;
    if (exchange->all_gather(exchange->context, &value, sizeof value, values) != PST_OK) return 0;
    for (int rank = 0; rank < exchange->size; rank++)
        sum += values[rank];
    return sum / exchange->size;
}

static void report(bench *b, const char *what, size_t bytes, double microseconds) {
    const double p10 = mean(b, quantile(b, 0.1)), p50 = mean(b, quantile(b, 0.5));
    const double p90 = mean(b, quantile(b, 0.9)), all = mean(b, microseconds);
    if (b->context->rank != 0) return;
    (void)printf("%-34s %9.1f us, p10 %8.1f p50 %8.1f p90 %8.1f, p90/p10 %5.2f, %6.1f GB/s\n", what,
                 all, p10, p50, p90, p90 / p10, (double)bytes / all / 1e3);
    (void)fflush(stdout);
}

/* ---- opening --------------------------------------------------------------------------------- */

static void open_streams(bench *b) {
    const pst_device_ops *ops = b->device->ops;
    TRY(b, ops->stream_create(b->device, -1, &b->pulls));
    TRY(b, ops->stream_create(b->device, 0, &b->sums));
    TRY(b, ops->stream_create(b->device, 0, &b->compute));
    TRY(b, ops->event_create(b->device, 0, &b->ready));
    TRY(b, ops->event_create(b->device, 0, &b->pulled));
    for (size_t i = 0; i < 2 * MOST_TIMES; i++)
        TRY(b, ops->event_create(b->device, 1, &b->marks[i]));
}

static void open_bench(bench *b) {
    const pst_runtime_options options = {
        .size = sizeof options, .rank = b->context->rank, .world_size = b->context->size};
    const pst_cuda_options cuda = {.size = sizeof cuda,
                                   .ordinal = b->context->rank,
                                   .driver = b->settings->driver,
                                   .nvrtc = b->settings->driver,
                                   .cache = b->settings->cache};
    const pst_ce_options ce = {.size = sizeof ce, .turn_bytes = b->settings->turn_bytes};
    void *memory = NULL;
    b->dice = (uint64_t)b->context->rank + 1;
    b->part = 1024 * b->settings->unit;
    TRY(b, pst_runtime_create(&options, &b->runtime));
    TRY(b, pst_cuda_device_create(b->runtime, &cuda, &b->device));
    TRY(b, pst_ce_create(b->runtime, b->device, &b->context->exchange, &ce, &b->comm));
    TRY(b, b->device->ops->alloc(b->device, PST_MEMORY_DEVICE, 4 * b->part, &memory));
    TRY(b, pst_ce_register(b->comm, memory, 4 * b->part));
    b->memory = memory;
    open_streams(b);
}

static void close_bench(bench *b) {
    b->comm->ops->destroy(b->comm);
    for (size_t i = 0; i < 2 * MOST_TIMES; i++)
        b->device->ops->event_destroy(b->device, b->marks[i]);
    b->device->ops->event_destroy(b->device, b->ready);
    b->device->ops->event_destroy(b->device, b->pulled);
    b->device->ops->stream_destroy(b->device, b->pulls);
    b->device->ops->stream_destroy(b->device, b->sums);
    b->device->ops->stream_destroy(b->device, b->compute);
    b->device->ops->free(b->device, PST_MEMORY_DEVICE, b->memory, 4 * b->part);
    b->device->ops->destroy(b->device);
    pst_runtime_destroy(b->runtime);
}

/* A rank's own work of random length: copies within the GPU. */
static void delay(bench *b, pst_stream *stream, size_t most) {
    const size_t bytes = (draw(b, 1000) * (most / 1000)) & ~(size_t)255;
    const pst_copy copy = {b->memory + 3 * b->part, b->memory + 3 * b->part + b->part / 2, bytes};
    if (bytes > 0) TRY(b, b->device->ops->copy(b->device, stream, &copy, 1));
}

static void begin(bench *b) {
    finish(b, b->pulls);
    finish(b, b->sums);
    b->mark_count = b->time_count = 0;
    rank_meet(b->context);
}

/* ---- turns ----------------------------------------------------------------------------------- */

static void pull_round(bench *b, uint32_t sequence, size_t bytes, int take_turns) {
    pst__ce *ce = b->comm->context;
    const int size = b->context->size;
    pst__flag_steps steps = {.count = 0};
    for (int step = 0; step < size - 1; step++) {
        const int source = pst__turn_source(b->context->rank, size, step);
        const pst_copy copy = {b->memory + b->part, ce->regions.regions[2].views[source], bytes};
        if (take_turns) pst__turn_wait(&ce->turns, &steps, sequence, step);
        TRY(b, pst__flags_enqueue(&ce->flags, b->pulls, &steps));
        mark(b, b->pulls);
        TRY(b, b->device->ops->copy(b->device, b->pulls, &copy, 1));
        mark(b, b->pulls);
        if (take_turns) pst__turn_pass(&ce->turns, &steps, sequence, step);
    }
    TRY(b, pst__flags_enqueue(&ce->flags, b->pulls, &steps));
}

static void run_turns(bench *b, size_t bytes, int take_turns) {
    enum { ROUNDS = 60 };
    pst__ce *ce = b->comm->context;
    const size_t pulls = (size_t)(b->context->size - 1);
    char what[64];
    begin(b);
    for (int i = 0; i < ROUNDS && !has_failed(b); i++) {
        delay(b, b->pulls, 64 * b->settings->unit);
        ce->tickets++;
        b->tickets++;
        pull_round(b, pst__flag_sequence(0, b->tickets, 1), bytes, take_turns);
    }
    ce->marked = ce->tickets;
    finish(b, b->pulls);
    for (size_t i = 0; i + 1 < b->mark_count && !has_failed(b); i += 2)
        b->times[b->time_count++] = between(b, i, i + 1);
    (void)snprintf(what, sizeof what, "%s, pulls of %zu MiB", take_turns ? "turns" : "no turns",
                   bytes / b->settings->unit);
    const double all = between(b, 0, b->mark_count - 1);
    report(b, what, pulls * ROUNDS * bytes, all);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static void start(bench *b, pst_collective *collective) {
    void *request;
    collective->ticket = ++b->tickets;
    collective->staging = b->memory + 2 * b->part;
    TRY(b, b->comm->ops->start(b->comm, collective, b->pulls, &request));
    if (collective->kind != PST_REDUCE_SCATTER) return;
    TRY(b, b->device->ops->event_record(b->device, b->pulled, b->pulls));
    TRY(b, b->device->ops->stream_wait(b->device, b->sums, b->pulled));
    TRY(b, b->comm->ops->combine(b->comm, collective, b->sums));
}

/* Each rank's part is `bytes`, and the own one in place. */
static void gather(bench *b, size_t bytes) {
    pst_segment segments[RANKS_MOST];
    const size_t size = (size_t)b->context->size;
    for (size_t i = 0; i < size; i++)
        segments[i] = (pst_segment){(uint32_t)i, i * bytes, i * bytes, bytes};
    pst_collective collective = {.kind = PST_ALL_GATHER,
                                 .name = "gather",
                                 .dtype = PST_BFLOAT16,
                                 .source = b->memory,
                                 .source_bytes = size * bytes,
                                 .destination = b->memory,
                                 .segments = segments,
                                 .segment_count = size};
    start(b, &collective);
}

static void reduce(bench *b, size_t bytes) {
    const pst_reduce_piece piece = {
        .count = bytes / 2, .destination = b->memory + b->part, .destination_dtype = PST_FLOAT32};
    pst_collective collective = {.kind = PST_REDUCE_SCATTER,
                                 .name = "reduce",
                                 .dtype = PST_BFLOAT16,
                                 .source = b->memory,
                                 .source_bytes = bytes,
                                 .stride = bytes,
                                 .pieces = &piece,
                                 .piece_count = 1};
    start(b, &collective);
}

static void barrier(bench *b, size_t bytes) {
    pst_collective collective = {.kind = PST_BARRIER, .name = "barrier"};
    (void)bytes;
    start(b, &collective);
}

static size_t row_bytes(const bench *b) {
    return b->settings->unit / 128;
}

/* `count` of the rows of a table of `part` bytes, by the numbers behind what is gathered. */
static void gather_rows(bench *b, size_t count) {
    pst_segment segments[RANKS_MOST];
    const size_t size = (size_t)b->context->size, each = b->part / size;
    for (size_t i = 0; i < size; i++)
        segments[i] = (pst_segment){(uint32_t)i, i * each, i * each, each};
    const pst_table_rows rows = {.indices = (const int64_t *)(const void *)(b->memory + b->part),
                                 .count = count,
                                 .rows = b->part / row_bytes(b),
                                 .row_bytes = row_bytes(b)};
    pst_collective collective = {.kind = PST_ALL_GATHER,
                                 .name = "rows",
                                 .dtype = PST_BFLOAT16,
                                 .source = b->memory,
                                 .source_bytes = b->part,
                                 .destination = b->memory,
                                 .segments = segments,
                                 .segment_count = size,
                                 .rows = &rows};
    start(b, &collective);
}

static void draw_rows(bench *b) {
    const size_t count = b->part / row_bytes(b);
    int64_t *drawn = malloc(count * sizeof *drawn);
    for (size_t i = 0; i < count; i++)
        drawn[i] = draw(b, (uint32_t)count);
    const pst_copy copy = {b->memory + b->part, drawn, count * sizeof *drawn};
    const pst_status status = b->device->ops->copy(b->device, b->pulls, &copy, 1);
    finish(b, b->pulls);
    free(drawn);
    TRY(b, status);
}

typedef void (*collective)(bench *b, size_t argument);

/* `count` of them one behind the other, a mark between each two; each pulls so many bytes. */
static void run_series(bench *b, const char *what, collective run, size_t argument, size_t pulled,
                       size_t count) {
    for (int i = 0; i < 3 && !has_failed(b); i++)
        run(b, argument);
    begin(b);
    mark(b, b->pulls);
    for (size_t i = 0; i < count && !has_failed(b); i++) {
        run(b, argument);
        mark(b, run == reduce ? b->sums : b->pulls);
    }
    finish(b, b->pulls);
    finish(b, b->sums);
    for (size_t i = 0; i + 1 < b->mark_count && !has_failed(b); i++)
        b->times[b->time_count++] = between(b, i, i + 1);
    const double all = between(b, 0, b->mark_count - 1) / (double)count;
    report(b, what, pulled, all);
}

static void run_sizes(bench *b, const char *name, collective run, size_t bytes) {
    char what[64];
    (void)snprintf(what, sizeof what, "%s, %zu KiB a rank", name, bytes * 1024 / b->settings->unit);
    run_series(b, what, run, bytes, (size_t)(b->context->size - 1) * bytes, 40);
}

/* Two gathers and a reduction by turns, each behind the rank's own work. */
static void run_train(bench *b, size_t bytes, size_t most_delay) {
    enum { TICKETS = 120 };
    const size_t pulled = (size_t)(b->context->size - 1) * bytes;
    char what[64];
    begin(b);
    mark(b, b->pulls);
    for (int i = 0; i < TICKETS && !has_failed(b); i++) {
        delay(b, b->compute, most_delay);
        TRY(b, b->device->ops->event_record(b->device, b->ready, b->compute));
        TRY(b, b->device->ops->stream_wait(b->device, b->pulls, b->ready));
        (i % 3 == 2 ? reduce : gather)(b, bytes);
        mark(b, b->pulls);
    }
    finish(b, b->pulls);
    finish(b, b->sums);
    for (size_t i = 0; i + 1 < b->mark_count && !has_failed(b); i++)
        b->times[b->time_count++] = between(b, i, i + 1);
    (void)snprintf(what, sizeof what, "train, %zu KiB a pull, delay %zu",
                   bytes * 1024 / b->settings->unit, most_delay * 1024 / b->settings->unit);
    report(b, what, TICKETS * pulled, between(b, 0, b->mark_count - 1));
}

static void all_turns(bench *b, size_t unit) {
    for (int round = 0; round < 2 && !has_failed(b); round++) {
        run_turns(b, 96 * unit, 0);
        run_turns(b, 96 * unit, 1);
    }
    run_turns(b, 12 * unit, 0);
    run_turns(b, 12 * unit, 1);
}

static void all_trains(bench *b, size_t unit) {
    for (int round = 0; round < 2 && !has_failed(b); round++) {
        run_train(b, 96 * unit, 0);
        run_train(b, 96 * unit, 256 * unit);
    }
    for (size_t bytes = unit / 4; bytes <= 48 * unit && !has_failed(b); bytes *= 3)
        run_train(b, bytes, bytes * 8 / 3);
}

static void all_barriers(bench *b, size_t unit) {
    (void)unit;
    run_series(b, "barrier", barrier, 0, 0, 300);
}

static void all_sizes(bench *b, size_t unit) {
    for (size_t bytes = unit / 64; bytes <= 128 * unit && !has_failed(b); bytes *= 4) {
        run_sizes(b, "gather", gather, bytes);
        run_sizes(b, "reduce", reduce, bytes);
    }
}

static void all_rows(bench *b, size_t unit) {
    const size_t size = (size_t)b->context->size, rows = b->part / row_bytes(b);
    char what[64];
    (void)unit;
    draw_rows(b);
    run_sizes(b, "table, whole", gather, b->part / size);
    for (size_t count = rows / 512; count <= rows && !has_failed(b); count *= 2) {
        (void)snprintf(what, sizeof what, "table, %zu of %zu rows", count, rows);
        run_series(b, what, gather_rows, count, count * row_bytes(b) * (size - 1) / size, 40);
    }
}

static const struct {
    const char *name;
    void (*run)(bench *b, size_t unit);
} parts[] = {{"turns", all_turns},
             {"train", all_trains},
             {"barrier", all_barriers},
             {"sizes", all_sizes},
             {"rows", all_rows}};
enum { PARTS = sizeof parts / sizeof parts[0] };

static void run_all(bench *b) {
    const char *only = b->settings->only;
    for (int i = 0; i < PARTS && !has_failed(b); i++)
        if (only == NULL || strcmp(only, parts[i].name) == 0) parts[i].run(b, b->settings->unit);
}

static void run_rank(rank_context *context) {
    bench *b = calloc(1, sizeof *b);
    b->context = context;
    b->settings = context->argument;
    open_bench(b);
    if (!has_failed(b)) run_all(b);
    if (!has_failed(b)) {
        rank_meet(context);
        close_bench(b);
    }
    free(b);
}

int main(int argc, char **argv) {
    settings settings = {.unit = MEBIBYTE};
    ranks_options options = {.count = 2, .seconds = 200};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--tiny") == 0)
            settings.unit = 4096;
        else if (i + 1 < argc && strcmp(argv[i], "--only") == 0)
            settings.only = argv[++i];
        else if (i + 1 < argc && strcmp(argv[i], "--ranks") == 0)
            options.count = atoi(argv[++i]);
        else if (i + 1 < argc && strcmp(argv[i], "--turn-bytes") == 0)
            settings.turn_bytes = strtoull(argv[++i], NULL, 0);
        else if (i + 1 < argc && strcmp(argv[i], "--driver") == 0)
            settings.driver = argv[++i];
        else if (i + 1 < argc && strcmp(argv[i], "--cache") == 0)
            settings.cache = argv[++i];
        else {
            (void)fprintf(stderr, "what is %s? The file's head has the usage.\n", argv[i]);
            return 2;
        }
    }
    (void)printf("%d ranks, turns from %zu bytes on (0: none)\n", options.count,
                 settings.turn_bytes);
    return ranks_run(&options, run_rank, &settings) != 0;
}
