/* bench_gpu_device [--rounds N]: what the device's calls cost the host beside the driver's own,
 * what copies in a batch gain over single ones, what pinned memory takes to get and how fast copies
 * from and to it are. In each round all take turns; medians. */
#include "gpu.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 1000, CALLS = 200, MOST_PIECES = 256 };

#define MEBIBYTE     ((size_t)1 << 20)
#define COPY_BYTES   (96 * MEBIBYTE)
#define PINNED_BYTES (1024 * MEBIBYTE)
#define SIDE_BYTES   (256 * MEBIBYTE)

/* ---- the driver's own calls -------------------------------------------------------------------
 */

static struct {
    CUresult (*get_current)(CUcontext *);
    CUresult (*record)(CUevent, CUstream);
    CUresult (*wait)(CUstream, CUevent, unsigned);
    CUresult (*query)(CUevent);
    CUresult (*create)(CUevent *, unsigned);
    CUresult (*host_alloc)(void **, size_t, unsigned);
    CUresult (*host_free)(void *);
} driver;

static void find(void *library, const char *name, void *entry) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    memcpy(entry, &found, sizeof found);
}

static void find_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    find(library, "cuCtxGetCurrent", &driver.get_current);
    find(library, "cuEventRecord", &driver.record);
    find(library, "cuStreamWaitEvent", &driver.wait);
    find(library, "cuEventQuery", &driver.query);
    find(library, "cuEventCreate", &driver.create);
    find(library, "cuMemHostAlloc", &driver.host_alloc);
    find(library, "cuMemFreeHost", &driver.host_free);
}

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) return;
    fprintf(stderr, "%s: CUDA error %d\n", what, (int)result);
    exit(1);
}

/* ---- calls ------------------------------------------------------------------------------------
 */

typedef struct bench {
    bench_gpu gpu;
    pst_stream *other;
    CUevent event;
    unsigned *flag;
    unsigned char *from, *to; /* on the device */
} bench;

typedef void (*subject)(bench *b);

static void ask_context(bench *b) {
    CUcontext context;
    (void)b;
    check(driver.get_current(&context), "cuCtxGetCurrent");
}
static void record(bench *b) {
    const bench_gpu *gpu = &b->gpu;
    bench_check(gpu, gpu->device->ops->event_record(gpu->device, gpu->event, gpu->stream),
                "record");
}
static void bare_record(bench *b) {
    check(driver.record(b->event, pst_cuda_stream(b->gpu.stream)), "cuEventRecord");
}
static void wait(bench *b) {
    const bench_gpu *gpu = &b->gpu;
    bench_check(gpu, gpu->device->ops->stream_wait(gpu->device, b->other, gpu->event), "wait");
}
static void bare_wait(bench *b) {
    check(driver.wait(pst_cuda_stream(b->other), b->event, 0), "cuStreamWaitEvent");
}
static void query(bench *b) {
    (void)b->gpu.device->ops->event_query(b->gpu.device, b->gpu.event);
}
static void bare_query(bench *b) {
    check(driver.query(b->event), "cuEventQuery");
}
static void write_flag(bench *b) {
    const bench_gpu *gpu = &b->gpu;
    bench_check(gpu, gpu->device->ops->stream_write32(gpu->device, gpu->stream, b->flag, 1),
                "write32");
}
static void wait_flag(bench *b) {
    const bench_gpu *gpu = &b->gpu;
    bench_check(gpu, gpu->device->ops->stream_wait32(gpu->device, gpu->stream, b->flag, 1),
                "wait32");
}
static void write_flag_now(bench *b) {
    const bench_gpu *gpu = &b->gpu;
    bench_check(gpu, gpu->device->ops->flag_write32(gpu->device, b->flag, 1), "flag_write32");
}
static void copy_small(bench *b) {
    const bench_gpu *gpu = &b->gpu;
    const pst_copy copy = {b->to, b->from, 4096};
    bench_check(gpu, gpu->device->ops->copy(gpu->device, gpu->stream, &copy, 1), "copy");
}

static const struct {
    const char *name;
    subject call;
} subjects[] = {
    {"cuCtxGetCurrent", ask_context},
    {"event_record", record},
    {"  cuEventRecord", bare_record},
    {"stream_wait", wait},
    {"  cuStreamWaitEvent", bare_wait},
    {"event_query", query},
    {"  cuEventQuery", bare_query},
    {"stream_write32", write_flag},
    {"stream_wait32, satisfied", wait_flag},
    {"flag_write32, until written", write_flag_now},
    {"copy, 4 KiB on the device", copy_small},
};
enum { SUBJECTS = sizeof subjects / sizeof subjects[0] };

static void bench_calls(bench *b, size_t rounds) {
    static double ns[SUBJECTS][MOST_ROUNDS];
    for (size_t round = 0; round < rounds; round++)
        for (size_t s = 0; s < SUBJECTS; s++) {
            const double begin = bench_now();
            for (int i = 0; i < CALLS; i++)
                subjects[s].call(b);
            ns[s][round] = (bench_now() - begin) * 1e9 / CALLS;
            bench_gpu_finish(&b->gpu, b->gpu.stream);
            bench_gpu_finish(&b->gpu, b->other);
        }
    printf("\n%-32s %8s %8s %8s\n", "host, ns a call", "p10", "median", "p90");
    for (size_t s = 0; s < SUBJECTS; s++)
        printf("%-32s %8.0f %8.0f %8.0f\n", subjects[s].name, bench_quantile(ns[s], rounds, 0.1),
               bench_quantile(ns[s], rounds, 0.5), bench_quantile(ns[s], rounds, 0.9));
}

/* ---- batches ----------------------------------------------------------------------------------
 */

typedef struct pieces {
    pst_copy copies[MOST_PIECES];
    size_t count;
} pieces;

static pieces cut(const bench *b, size_t count) {
    pieces made = {.count = count};
    const size_t each = COPY_BYTES / count / 256 * 256;
    for (size_t i = 0; i < count; i++)
        made.copies[i] = (pst_copy){b->to + i * each, b->from + i * each, each};
    return made;
}

/* Seconds until it is done; *host: until the calls have returned. */
static double time_copies(const bench *b, const pieces *pieces, size_t in_a_call, double *host) {
    const bench_gpu *gpu = &b->gpu;
    const double begin = bench_now();
    for (size_t i = 0; i < pieces->count; i += in_a_call)
        bench_check(gpu,
                    gpu->device->ops->copy(gpu->device, gpu->stream, &pieces->copies[i], in_a_call),
                    "copy");
    *host = bench_now() - begin;
    bench_gpu_finish(gpu, gpu->stream);
    return bench_now() - begin;
}

static void bench_batches(const bench *b, size_t rounds) {
    static double single[MOST_ROUNDS], batch[MOST_ROUNDS], host_single[MOST_ROUNDS],
        host_batch[MOST_ROUNDS];
    printf("\n%-32s %10s %10s %16s %16s\n", "96 MiB within the device", "single", "batch",
           "host us, single", "host us, batch");
    for (size_t count = 1; count <= MOST_PIECES; count *= 4) {
        const pieces pieces = cut(b, count);
        for (size_t round = 0; round < rounds; round++) {
            single[round] = time_copies(b, &pieces, 1, &host_single[round]);
            batch[round] = time_copies(b, &pieces, count, &host_batch[round]);
        }
        const double bytes = (double)(pieces.copies[0].bytes * count) / 1e9;
        printf("%4zu pieces, GB/s copied         %10.0f %10.0f %16.1f %16.1f\n", count,
               bytes / bench_quantile(single, rounds, 0.5),
               bytes / bench_quantile(batch, rounds, 0.5),
               bench_quantile(host_single, rounds, 0.5) * 1e6,
               bench_quantile(host_batch, rounds, 0.5) * 1e6);
    }
}

/* ---- pinned memory ----------------------------------------------------------------------------
 */

static void *timed_alloc(const bench *b, int bare, double *seconds) {
    void *memory = NULL;
    const double begin = bench_now();
    if (bare)
        check(driver.host_alloc(&memory, PINNED_BYTES, CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc");
    else
        bench_check(
            &b->gpu,
            b->gpu.device->ops->alloc(b->gpu.device, PST_MEMORY_PINNED, PINNED_BYTES, &memory),
            "alloc");
    *seconds = bench_now() - begin;
    return memory;
}

/* GB/s of 256 MiB each way: in (bit 0), out (bit 1), or both at once. */
static double time_ways(const bench *b, unsigned char *host, int ways) {
    const bench_gpu *gpu = &b->gpu;
    const pst_copy in = {b->to, host, SIDE_BYTES}, out = {host + SIDE_BYTES, b->from, SIDE_BYTES};
    const double begin = bench_now();
    if (ways & 1) bench_check(gpu, gpu->device->ops->copy(gpu->device, gpu->stream, &in, 1), "in");
    if (ways & 2) bench_check(gpu, gpu->device->ops->copy(gpu->device, b->other, &out, 1), "out");
    bench_gpu_finish(gpu, gpu->stream);
    bench_gpu_finish(gpu, b->other);
    return (double)SIDE_BYTES / (bench_now() - begin) / 1e9;
}

static void bench_pinned(const bench *b, size_t rounds) {
    static const char *const names[] = {"alloc of the device", "cuMemHostAlloc"};
    static double alloc_ms[2][MOST_ROUNDS], ways[2][4][MOST_ROUNDS];
    if (rounds > 10) rounds = 10;
    for (size_t round = 0; round < rounds; round++)
        for (int bare = 0; bare < 2; bare++) {
            double seconds = 0;
            unsigned char *memory = timed_alloc(b, bare, &seconds);
            alloc_ms[bare][round] = seconds * 1e3;
            for (int way = 1; way < 4; way++)
                ways[bare][way][round] = time_ways(b, memory, way);
            if (bare)
                check(driver.host_free(memory), "cuMemFreeHost");
            else
                b->gpu.device->ops->free(b->gpu.device, PST_MEMORY_PINNED, memory, PINNED_BYTES);
        }
    printf("\n%-32s %10s %10s %10s %14s\n", "pinned, 1 GiB", "ms to get", "in, GB/s", "out",
           "both, each way");
    for (int bare = 0; bare < 2; bare++)
        printf(
            "%-32s %10.0f %10.1f %10.1f %14.1f\n", names[bare],
            bench_quantile(alloc_ms[bare], rounds, 0.5), bench_quantile(ways[bare][1], rounds, 0.5),
            bench_quantile(ways[bare][2], rounds, 0.5), bench_quantile(ways[bare][3], rounds, 0.5));
}

/* -----------------------------------------------------------------------------------------------
 */

static void *alloc(const bench *b, size_t bytes) {
    void *memory = NULL;
    bench_check(&b->gpu,
                b->gpu.device->ops->alloc(b->gpu.device, PST_MEMORY_DEVICE, bytes, &memory),
                "alloc");
    return memory;
}

int main(int count, char **arguments) {
    size_t rounds =
        count == 3 && strcmp(arguments[1], "--rounds") == 0 ? strtoul(arguments[2], NULL, 10) : 21;
    if (rounds == 0 || rounds > MOST_ROUNDS) rounds = MOST_ROUNDS;
    bench b;
    bench_gpu_open(&b.gpu);
    find_driver();
    bench_check(&b.gpu, b.gpu.device->ops->stream_create(b.gpu.device, 0, &b.other), "stream");
    b.flag = alloc(&b, 4);
    b.from = alloc(&b, SIDE_BYTES);
    b.to = alloc(&b, SIDE_BYTES);
    bench_check(&b.gpu, b.gpu.device->ops->fill(b.gpu.device, b.gpu.stream, b.flag, 1, 4), "fill");
    bench_gpu_finish(&b.gpu, b.gpu.stream);
    check(driver.create(&b.event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    bench_calls(&b, rounds);
    bench_batches(&b, rounds);
    bench_pinned(&b, rounds);
    b.gpu.device->ops->free(b.gpu.device, PST_MEMORY_DEVICE, b.flag, 4);
    b.gpu.device->ops->free(b.gpu.device, PST_MEMORY_DEVICE, b.from, SIDE_BYTES);
    b.gpu.device->ops->free(b.gpu.device, PST_MEMORY_DEVICE, b.to, SIDE_BYTES);
    b.gpu.device->ops->stream_destroy(b.gpu.device, b.other);
    bench_gpu_close(&b.gpu);
    return 0;
}
