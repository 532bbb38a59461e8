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

/* ---- the driver's own calls --------------------------------------------------------- */

static struct {
    CUresult (*get_current)(CUcontext *);
    CUresult (*record)(CUevent, CUstream);
    CUresult (*wait)(CUstream, CUevent, unsigned);
    CUresult (*query)(CUevent);
    CUresult (*create)(CUevent *, unsigned);
    CUresult (*host_alloc)(void **, size_t, unsigned);
    CUresult (*host_free)(void *);
    CUresult (*batch)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *,
                      size_t *, size_t, size_t *, CUstream);
} driver;

typedef CUresult (*get_address)(const char *, void **, int, cuuint64_t);

static int find(get_address get, const char *name, void *entry) {
    void *found = NULL;
    const int has = get(name, &found, 12080, 0) == CUDA_SUCCESS && found != NULL;
    memcpy(entry, &found, sizeof found);
    return has;
}

static void find_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol = dlsym(library, "cuGetProcAddress");
    get_address get = NULL;
    memcpy(&get, &symbol, sizeof get);
    if (!find(get, "cuCtxGetCurrent", &driver.get_current) ||
        !find(get, "cuEventRecord", &driver.record) ||
        !find(get, "cuStreamWaitEvent", &driver.wait) ||
        !find(get, "cuEventQuery", &driver.query) || !find(get, "cuEventCreate", &driver.create) ||
        !find(get, "cuMemHostAlloc", &driver.host_alloc) ||
        !find(get, "cuMemFreeHost", &driver.host_free)) {
        fprintf(stderr, "the driver lacks a call that is compared with\n");
        exit(1);
    }
    (void)find(get, "cuMemcpyBatchAsync", &driver.batch);
}

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY) return;
    fprintf(stderr, "%s: CUDA error %d\n", what, (int)result);
    exit(1);
}

/* ---- calls -------------------------------------------------------------------------- */

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

/* ---- batches ------------------------------------------------------------------------ */

typedef struct pieces {
    pst_copy copies[MOST_PIECES];
    size_t count;
} pieces;

static pieces cut(const bench *b, const unsigned char *from, size_t count) {
    pieces made = {.count = count};
    const size_t each = COPY_BYTES / count / 256 * 256;
    for (size_t i = 0; i < count; i++)
        made.copies[i] = (pst_copy){b->to + i * each, from + i * each, each};
    return made;
}

static void copy_pieces(const bench *b, const pieces *pieces, size_t in_a_call) {
    const bench_gpu *gpu = &b->gpu;
    for (size_t i = 0; i < pieces->count; i += in_a_call)
        bench_check(gpu,
                    gpu->device->ops->copy(gpu->device, gpu->stream, &pieces->copies[i], in_a_call),
                    "copy");
}

static void copy_singly(const bench *b, const pieces *pieces) {
    copy_pieces(b, pieces, 1);
}

static void copy_at_once(const bench *b, const pieces *pieces) {
    copy_pieces(b, pieces, pieces->count);
}

/* As the driver has it without a wish to leave the processors alone. */
static void copy_at_once_bare(const bench *b, const pieces *pieces) {
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    CUdeviceptr to[MOST_PIECES], from[MOST_PIECES];
    size_t bytes[MOST_PIECES], first = 0, failed = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        to[i] = (CUdeviceptr)(uintptr_t)pieces->copies[i].destination;
        from[i] = (CUdeviceptr)(uintptr_t)pieces->copies[i].source;
        bytes[i] = pieces->copies[i].bytes;
    }
    check(driver.batch(to, from, bytes, pieces->count, &attributes, &first, 1, &failed,
                       pst_cuda_stream(b->gpu.stream)),
          "cuMemcpyBatchAsync");
}

static void (*const ways_to_copy[])(const bench *b, const pieces *pieces) = {
    copy_singly, copy_at_once, copy_at_once_bare};
enum { WAYS = sizeof ways_to_copy / sizeof ways_to_copy[0] };

static void bench_copies(const bench *b, const char *title, const unsigned char *from,
                         size_t rounds) {
    static double seconds[WAYS][MOST_ROUNDS], host[WAYS][MOST_ROUNDS];
    const int ways = driver.batch == NULL ? 1 : WAYS;
    printf("\n%-24s | GB/s %8s %8s %8s | host us %8s %8s %8s\n", title, "single", "batch", "bare",
           "single", "batch", "bare");
    for (size_t count = 1; count <= MOST_PIECES; count *= 4) {
        const pieces pieces = cut(b, from, count);
        for (size_t round = 0; round < rounds; round++)
            for (int way = 0; way < ways; way++) {
                const double begin = bench_now();
                ways_to_copy[way](b, &pieces);
                host[way][round] = bench_now() - begin;
                bench_gpu_finish(&b->gpu, b->gpu.stream);
                seconds[way][round] = bench_now() - begin;
            }
        const double bytes = (double)(pieces.copies[0].bytes * count) / 1e9;
        printf("%17zu pieces |     ", count);
        for (int way = 0; way < ways; way++)
            printf(" %8.0f", bytes / bench_quantile(seconds[way], rounds, 0.5));
        printf(" |        ");
        for (int way = 0; way < ways; way++)
            printf(" %8.1f", bench_quantile(host[way], rounds, 0.5) * 1e6);
        printf("\n");
    }
}

/* From the second GPU's memory, if there is a second GPU. */
static void bench_pulls(bench *b, size_t rounds) {
    const pst_cuda_options second = {.size = sizeof second, .ordinal = 1};
    const pst_device_ops *ops = b->gpu.device->ops;
    pst_device *peer = NULL;
    void *there = NULL, *here = NULL;
    int descriptor = -1;
    if (pst_cuda_device_create(b->gpu.runtime, &second, &peer) != PST_OK) {
        printf("\nthere is no second GPU to pull from\n");
        return;
    }
    bench_check(&b->gpu, ops->alloc(peer, PST_MEMORY_DEVICE, COPY_BYTES, &there), "alloc");
    bench_check(&b->gpu, ops->memory_export(peer, there, &descriptor), "export");
    bench_check(&b->gpu, ops->memory_import(b->gpu.device, descriptor, COPY_BYTES, &here),
                "import");
    bench_copies(b, "96 MiB of a peer's", here, rounds);
    ops->memory_unmap(b->gpu.device, here, COPY_BYTES);
    ops->free(peer, PST_MEMORY_DEVICE, there, COPY_BYTES);
    ops->destroy(peer);
}

/* ---- pinned memory ------------------------------------------------------------------ */

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

/* ------------------------------------------------------------------------------------- */

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
    bench_copies(&b, "96 MiB of its own", b.from, rounds);
    bench_pulls(&b, rounds);
    bench_pinned(&b, rounds);
    b.gpu.device->ops->free(b.gpu.device, PST_MEMORY_DEVICE, b.flag, 4);
    b.gpu.device->ops->free(b.gpu.device, PST_MEMORY_DEVICE, b.from, SIDE_BYTES);
    b.gpu.device->ops->free(b.gpu.device, PST_MEMORY_DEVICE, b.to, SIDE_BYTES);
    b.gpu.device->ops->stream_destroy(b.gpu.device, b.other);
    bench_gpu_close(&b.gpu);
    return 0;
}
