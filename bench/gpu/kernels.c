/* bench_gpu_kernels [--rounds N]: GB/s of the device's kernels, read and written together beside
 * the driver's copy on the device; and what a call costs the host. In each round all take turns. */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SOURCES = 8, MOST_PIECES = 400, MOST_CALL_PIECES = 1023 };
enum { MOST_ROUNDS = 1000, LAUNCHES = 10 };

/* Where all of it happens: `bytes` to read from and as many to write to. */
typedef struct memory {
    unsigned char *from, *to;
    size_t bytes;
} memory;

typedef enum kind { COPY, CAST, MANY, SUM, FILL, SUM_AND_STEP, STEP_OF_SUM } kind;

typedef struct subject {
    const char *name;
    kind kind;
    pst_dtype destination, source;
    size_t sources; /* of a sum, or what a step of AdamW adds up */
    int accumulate;
    size_t shift; /* elements that the source lies off its alignment */
    double scale;
    unsigned max_blocks; /* of a sum; 0: any number */
    int is_passing;
} subject;

/* What is left out of a subject is 0. */
#define TO(target, from) .destination = PST_##target, .source = PST_##from
#define FOUR_ONTO(...)                                                                             \
    .kind = SUM, TO(FLOAT32, BFLOAT16), .sources = 4, .accumulate = 1, .scale = 0.25, __VA_ARGS__

static const subject subjects[] = {
    {.name = "copy by the driver", .kind = COPY},
    {.name = "cast float32 to bfloat16", .kind = CAST, TO(BFLOAT16, FLOAT32), .scale = 1},
    {.name = "cast bfloat16 to float32", .kind = CAST, TO(FLOAT32, BFLOAT16), .scale = 1},
    {.name = "cast float32, scaled", .kind = CAST, TO(FLOAT32, FLOAT32), .scale = 0.5},
    {.name = "cast bfloat16, scaled", .kind = CAST, TO(BFLOAT16, BFLOAT16), .scale = 0.5},
    {.name = "cast float32 to float16", .kind = CAST, TO(FLOAT16, FLOAT32), .scale = 1},
    {.name = "cast float64 to float32", .kind = CAST, TO(FLOAT32, FLOAT64), .scale = 1},
    {.name = "copy without a cast", .kind = CAST, TO(UINT8, UINT8), .scale = 1},
    {.name = "400 pieces, float32 to bfloat16", .kind = MANY, TO(BFLOAT16, FLOAT32), .scale = 1},
    {.name = "one element off, bfloat16 to float32",
     .kind = CAST,
     TO(FLOAT32, BFLOAT16),
     .shift = 1,
     .scale = 1},
    {.name = "sum of 2 bfloat16 to float32",
     .kind = SUM,
     TO(FLOAT32, BFLOAT16),
     .sources = 2,
     .scale = 0.5},
    {.name = "sum of 4 bfloat16 to float32",
     .kind = SUM,
     TO(FLOAT32, BFLOAT16),
     .sources = 4,
     .scale = 0.25},
    {.name = "sum of 8 bfloat16 to float32",
     .kind = SUM,
     TO(FLOAT32, BFLOAT16),
     .sources = 8,
     .scale = 0.125},
    {.name = "sum of 4 bfloat16 onto float32", FOUR_ONTO(.max_blocks = 0)},
    {.name = "the same, by 16 blocks", FOUR_ONTO(.max_blocks = 16)},
    {.name = "the same, by 32 blocks", FOUR_ONTO(.max_blocks = 32)},
    {.name = "the same, by 64 blocks", FOUR_ONTO(.max_blocks = 64)},
    {.name = "the same, passing the cache", FOUR_ONTO(.is_passing = 1)},
    {.name = "sum of 4 bfloat16", .kind = SUM, TO(BFLOAT16, BFLOAT16), .sources = 4, .scale = 0.25},
    {.name = "sum of 4 float32", .kind = SUM, TO(FLOAT32, FLOAT32), .sources = 4, .scale = 0.25},
    {.name = "sum of 1 bfloat16 onto float32",
     .kind = SUM,
     TO(FLOAT32, BFLOAT16),
     .sources = 1,
     .accumulate = 1,
     .scale = 1},
    {.name = "fill", .kind = FILL},
    {.name = "sum of 2 bfloat16, then AdamW",
     .kind = SUM_AND_STEP,
     TO(BFLOAT16, BFLOAT16),
     .sources = 2,
     .scale = 0.5},
    {.name = "AdamW of the sum of 2 bfloat16",
     .kind = STEP_OF_SUM,
     TO(BFLOAT16, BFLOAT16),
     .sources = 2,
     .scale = 0.5},
};
enum { SUBJECTS = sizeof subjects / sizeof subjects[0] };

/* ---- what is measured ------------------------------------------------------------------- */

/* Each function returns how many bytes it moves: up to twice the memory's. */

static size_t copy(const bench_gpu *gpu, const memory *memory) {
    const pst_copy copy = {memory->to, memory->from, memory->bytes};
    bench_check(gpu, gpu->device->ops->copy(gpu->device, gpu->stream, &copy, 1), "copy");
    return 2 * memory->bytes;
}

static size_t fill(const bench_gpu *gpu, const memory *memory) {
    const pst_device_ops *ops = gpu->device->ops;
    bench_check(gpu, ops->fill(gpu->device, gpu->stream, memory->to, 1, memory->bytes), "fill");
    bench_check(gpu, ops->fill(gpu->device, gpu->stream, memory->from, 1, memory->bytes), "fill");
    return 2 * memory->bytes;
}

/* Elements whose wider side fills the memory. */
static size_t elements(const subject *subject, const memory *memory) {
    const size_t to = pst_dtype_size(subject->destination), from = pst_dtype_size(subject->source);
    return memory->bytes / (to > from ? to : from) - subject->shift;
}

static size_t moved_each(const subject *subject, size_t sources, int accumulate) {
    return pst_dtype_size(subject->destination) * (accumulate ? 2 : 1) +
           pst_dtype_size(subject->source) * sources;
}

/* Pieces of very different sizes, as the parameters of a model are. */
static size_t cut(const subject *subject, const memory *memory, pst_cast *pieces, size_t count) {
    size_t done = 0, weights = count * (count + 1) / 2;
    const size_t all = elements(subject, memory);
    for (size_t i = 0; i < count; i++) {
        const size_t share = all / weights * (i + 1) / 64 * 64;
        pieces[i] =
            (pst_cast){memory->to + done * pst_dtype_size(subject->destination),
                       memory->from + (done + subject->shift) * pst_dtype_size(subject->source),
                       count == 1 ? all : share, subject->destination, subject->source};
        done += pieces[i].count;
    }
    return done;
}

static size_t cast(const bench_gpu *gpu, const subject *subject, const memory *memory) {
    pst_cast pieces[MOST_PIECES];
    const size_t count = subject->kind == MANY ? MOST_PIECES : 1;
    const size_t done = cut(subject, memory, pieces, count);
    bench_check(
        gpu,
        gpu->device->ops->cast_scale_copy(gpu->device, gpu->stream, pieces, count, subject->scale),
        "cast_scale_copy");
    return done * moved_each(subject, 1, 0);
}

/* The sources share the memory to read from, as far as the destination has room for their sum. */
static size_t sum(const bench_gpu *gpu, const subject *subject, const memory *memory) {
    const void *sources[MOST_SOURCES];
    const size_t size = pst_dtype_size(subject->source);
    const size_t fits = memory->bytes / pst_dtype_size(subject->destination);
    const size_t part = memory->bytes / subject->sources / 512 * 512;
    const size_t count = part / size < fits ? part / size : fits;
    for (size_t k = 0; k < subject->sources; k++)
        sources[k] = memory->from + k * part;
    const pst_sum sum = {.destination = memory->to,
                         .sources = sources,
                         .source_count = subject->sources,
                         .count = count,
                         .scale = subject->scale,
                         .accumulate = subject->accumulate,
                         .destination_dtype = subject->destination,
                         .source_dtype = subject->source,
                         .max_blocks = subject->max_blocks,
                         .is_passing = subject->is_passing};
    bench_check(gpu, gpu->device->ops->sum(gpu->device, gpu->stream, &sum), "sum");
    return count * moved_each(subject, subject->sources, subject->accumulate);
}

static void prepare_step(const bench_gpu *gpu, float *step, void *coefficients) {
    const pst_device_ops *ops = gpu->device->ops;
    const pst_adamw_settings settings = {.lr = 1e-6, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    bench_check(gpu, ops->fill(gpu->device, gpu->stream, step, 0, sizeof *step), "fill");
    bench_check(gpu,
                ops->adamw_prepare(gpu->device, gpu->stream, &settings, &step, 1, coefficients),
                "adamw_prepare");
}

/* A step by the sum of sources, of as many elements as have room with what they need: parameter and
 * moments in `to`, with the sum where that is written; the sources in `from`. Both ways count as
 * what the step needs, the sum not being written. */
static size_t step(const bench_gpu *gpu, const subject *subject, const memory *memory) {
    enum { ARRAYS = 4, HEAD = 512 };
    const size_t size = pst_dtype_size(subject->source);
    const size_t part = (memory->bytes - HEAD) / ARRAYS / 512 * 512;
    unsigned char *const at = memory->to + HEAD;
    const void *sources[MOST_SOURCES];
    for (size_t k = 0; k < subject->sources; k++)
        sources[k] = memory->from + k * part;
    pst_adamw_piece piece = {.parameter = at,
                             .sources = sources,
                             .source_count = subject->sources,
                             .scale = subject->scale,
                             .exp_avg = at + part,
                             .exp_avg_sq = at + 2 * part,
                             .coefficients = memory->to,
                             .count = part / size,
                             .parameter_dtype = subject->destination,
                             .gradient_dtype = subject->destination,
                             .moment_dtype = subject->destination,
                             .source_dtype = subject->source};
    const pst_sum sum = {.destination = at + 3 * part,
                         .sources = sources,
                         .source_count = subject->sources,
                         .count = piece.count,
                         .scale = subject->scale,
                         .destination_dtype = subject->destination,
                         .source_dtype = subject->source};
    prepare_step(gpu, (float *)(void *)(memory->to + PST_ADAMW_COEFFICIENTS_BYTES), memory->to);
    if (subject->kind == SUM_AND_STEP) {
        bench_check(gpu, gpu->device->ops->sum(gpu->device, gpu->stream, &sum), "sum");
        piece.gradient = sum.destination;
        piece.source_count = 0;
    }
    bench_check(gpu, gpu->device->ops->adamw(gpu->device, gpu->stream, &piece, 1), "adamw");
    return piece.count * (subject->sources * size + 6 * pst_dtype_size(subject->destination));
}

static size_t run(const bench_gpu *gpu, const subject *subject, const memory *memory) {
    switch (subject->kind) {
    case COPY:
        return copy(gpu, memory);
    case FILL:
        return fill(gpu, memory);
    case SUM:
        return sum(gpu, subject, memory);
    case SUM_AND_STEP:
    case STEP_OF_SUM:
        return step(gpu, subject, memory);
    default:
        return cast(gpu, subject, memory);
    }
}

/* ---- measuring -------------------------------------------------------------------------- */

/* GB/s. The first launch is not counted, so that the others are enqueued while it runs. */
static double measure(const bench_gpu *gpu, const subject *subject, const memory *memory) {
    size_t bytes = run(gpu, subject, memory);
    bench_gpu_finish(gpu, gpu->stream);
    bytes = 0;
    const double begin = bench_now();
    for (int i = 0; i < LAUNCHES; i++)
        bytes += run(gpu, subject, memory);
    bench_gpu_finish(gpu, gpu->stream);
    return (double)bytes / (bench_now() - begin) * 1e-9;
}

static void report(const subject *subject, double *speed, const double *copy, size_t rounds) {
    double ratio[MOST_ROUNDS];
    for (size_t i = 0; i < rounds; i++)
        ratio[i] = speed[i] / copy[i];
    printf("%-38s %8.0f %8.3f   %.3f to %.3f\n", subject->name, bench_quantile(speed, rounds, 0.5),
           bench_quantile(ratio, rounds, 0.5), bench_quantile(ratio, rounds, 0.1),
           bench_quantile(ratio, rounds, 0.9));
}

static void measure_all(const bench_gpu *gpu, const memory *memory, size_t rounds) {
    static double speed[SUBJECTS][MOST_ROUNDS], copies[MOST_ROUNDS];
    for (size_t round = 0; round < rounds; round++)
        for (size_t i = 0; i < SUBJECTS; i++)
            speed[i][round] = measure(gpu, &subjects[i], memory);
    printf("\n%zu MiB: median of %zu\n%-38s %8s %8s   %s\n", memory->bytes >> 20, rounds, "",
           "GB/s", "of copy", "from 10 % to 90 %");
    memcpy(copies, speed[0], sizeof copies);
    for (size_t i = 0; i < SUBJECTS; i++)
        report(&subjects[i], speed[i], copies, rounds);
}

/* ---- the host's part -------------------------------------------------------------------- */

/* Microseconds until the call returns, with so many pieces of one element each. */
static double call_cost(const bench_gpu *gpu, const memory *memory, size_t count) {
    enum { CALLS = 100 };
    static pst_cast pieces[MOST_CALL_PIECES];
    for (size_t i = 0; i < count; i++)
        pieces[i] =
            (pst_cast){memory->to + 4 * i, memory->from + 4 * i, 1, PST_FLOAT32, PST_FLOAT32};
    const double begin = bench_now();
    for (int i = 0; i < CALLS; i++)
        bench_check(gpu,
                    gpu->device->ops->cast_scale_copy(gpu->device, gpu->stream, pieces, count, 2.0),
                    "cast_scale_copy");
    const double end = bench_now();
    bench_gpu_finish(gpu, gpu->stream);
    return (end - begin) / CALLS * 1e6;
}

static void report_calls(const bench_gpu *gpu, const memory *memory, size_t rounds) {
    static const size_t counts[] = {1, 8, 9, 64, 127, 128, 512, MOST_CALL_PIECES};
    enum { COUNTS = sizeof counts / sizeof counts[0] };
    static double cost[COUNTS][MOST_ROUNDS];
    for (size_t round = 0; round < rounds; round++)
        for (size_t i = 0; i < COUNTS; i++)
            cost[i][round] = call_cost(gpu, memory, counts[i]);
    printf("\npieces of a cast   us a call, on the host\n");
    for (size_t i = 0; i < COUNTS; i++)
        printf("%16zu   %8.2f\n", counts[i], bench_quantile(cost[i], rounds, 0.5));
}

int main(int count, char **arguments) {
    static const size_t sizes[] = {64, 256, 1024}; /* MiB */
    size_t rounds = 21;
    if (count == 3 && strcmp(arguments[1], "--rounds") == 0)
        rounds = strtoul(arguments[2], NULL, 10);
    else if (count != 1)
        rounds = 0;
    if (rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "usage: bench_gpu_kernels [--rounds N (1 to %d)]\n", MOST_ROUNDS);
        return 2;
    }
    bench_gpu gpu;
    bench_gpu_open(&gpu);
    void *both = NULL;
    const size_t most = sizes[sizeof sizes / sizeof sizes[0] - 1] << 20;
    bench_check(&gpu, gpu.device->ops->alloc(gpu.device, PST_MEMORY_DEVICE, 2 * most, &both),
                "alloc");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const memory memory = {both, (unsigned char *)both + most, sizes[i] << 20};
        measure_all(&gpu, &memory, rounds);
    }
    const memory whole = {both, (unsigned char *)both + most, most};
    report_calls(&gpu, &whole, rounds);
    gpu.device->ops->free(gpu.device, PST_MEMORY_DEVICE, both, 2 * most);
    bench_gpu_close(&gpu);
    return 0;
}
