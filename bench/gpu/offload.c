/* bench_gpu_offload [--rounds N]: bandwidth of the offload lane, of the reload lane and of both at
 * once, beside the driver's own copies between the device and one pinned buffer a direction. In
 * each round all take turns; medians. */
#include "gpu.h"

#include <cuda.h>
#include <dlfcn.h>
#include <penstock/offload.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROUNDS = 100, OUT = 1, IN = 2, BOTH = 3 };

#define MEBIBYTE ((size_t)1 << 20)
#define LARGEST  (1024 * MEBIBYTE)
#define LEAST    (256 * MEBIBYTE) /* copied in a round each way, in as many copies as that takes */

typedef struct bench {
    bench_gpu gpu;
    pst_lane *compute;
    pst_stream *other;
    pst_offload *offload;
    unsigned char *from, *to;          /* on the device */
    unsigned char *bare_out, *bare_in; /* pinned, as the driver gives it */
    CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
    CUresult (*host_alloc)(void **, size_t, unsigned);
    CUresult (*host_free)(void *);
} bench;

static void check(CUresult result, const char *what) {
    if (result == CUDA_SUCCESS) return;
    fprintf(stderr, "%s: CUDA error %d\n", what, (int)result);
    exit(1);
}

static void find(void *library, const char *name, void *entry) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "the driver lacks %s\n", name);
        exit(1);
    }
    memcpy(entry, &found, sizeof found);
}

/* ---- the two ways to copy ------------------------------------------------------------------- */

static void copy_bare(const bench *b, size_t bytes, size_t count, int ways) {
    for (size_t i = 0; i < count; i++) {
        if (ways & OUT)
            check(b->copy((CUdeviceptr)(uintptr_t)b->bare_out, (CUdeviceptr)(uintptr_t)b->from,
                          bytes, pst_cuda_stream(b->gpu.stream)),
                  "out");
        if (ways & IN)
            check(b->copy((CUdeviceptr)(uintptr_t)b->to, (CUdeviceptr)(uintptr_t)b->bare_in, bytes,
                          pst_cuda_stream(b->other)),
                  "in");
    }
    if (ways & OUT) bench_gpu_finish(&b->gpu, b->gpu.stream);
    if (ways & IN) bench_gpu_finish(&b->gpu, b->other);
}

/* Keys below `count` are stored, those from there on are loaded: each has memory of its own. */
static void copy_by_lanes(const bench *b, size_t bytes, size_t count, int ways) {
    for (size_t i = 0; i < count; i++) {
        if (ways & OUT)
            bench_check(&b->gpu, pst_offload_store(b->offload, i, b->from + i * bytes, bytes, NULL),
                        "store");
        if (ways & IN)
            bench_check(
                &b->gpu,
                pst_offload_load(b->offload, count + i, b->to + i * bytes, bytes, NULL, 0, NULL),
                "load");
    }
    if (ways & OUT) bench_check(&b->gpu, pst_offload_wait_store(b->offload, count - 1), "wait");
    if (ways & IN) bench_check(&b->gpu, pst_offload_wait_load(b->offload, 2 * count - 1), "wait");
    bench_gpu_finish(&b->gpu, b->gpu.stream);
}

static void fill_keys(const bench *b, size_t bytes, size_t count) {
    for (size_t key = 0; key < 2 * count; key++)
        bench_check(&b->gpu, pst_offload_store(b->offload, key, b->from, bytes, NULL), "store");
    bench_check(&b->gpu, pst_offload_wait_store(b->offload, 2 * count - 1), "wait");
    bench_gpu_finish(&b->gpu, b->gpu.stream);
}

static void drop_keys(const bench *b, size_t count) {
    pst_offload_stats stats = {.size = sizeof stats};
    for (size_t key = 0; key < 2 * count; key++)
        pst_offload_drop(b->offload, key);
    do
        pst_offload_get_stats(b->offload, &stats);
    while (stats.in_flight > 0);
}

/* ---- rounds --------------------------------------------------------------------------------- */

static void bench_size(const bench *b, size_t bytes, size_t rounds) {
    static double rate[2][BOTH + 1][MOST_ROUNDS];
    const size_t count = bytes < LEAST ? LEAST / bytes : 1;
    fill_keys(b, bytes, count);
    for (size_t round = 0; round < rounds; round++)
        for (int ways = OUT; ways <= BOTH; ways++)
            for (int lanes = 0; lanes < 2; lanes++) {
                const double begin = bench_now();
                (lanes ? copy_by_lanes : copy_bare)(b, bytes, count, ways);
                rate[lanes][ways][round] = (double)(bytes * count) / (bench_now() - begin) / 1e9;
            }
    drop_keys(b, count);
    printf("%10zu |", bytes / MEBIBYTE);
    for (int ways = OUT; ways <= BOTH; ways++) {
        const double bare = bench_quantile(rate[0][ways], rounds, 0.5);
        const double lanes = bench_quantile(rate[1][ways], rounds, 0.5);
        printf(" %7.1f %7.1f %6.2f |", bare, lanes, lanes / bare);
    }
    printf("\n");
}

/* ------------------------------------------------------------------------------------- */

static void open_all(bench *b) {
    bench_gpu_open(&b->gpu);
    const bench_gpu *gpu = &b->gpu;
    const pst_device_ops *ops = gpu->device->ops;
    const pst_lane_options lane = {.size = sizeof lane,
                                   .name = "compute",
                                   .device = gpu->device,
                                   .stream = gpu->stream,
                                   .mode = PST_LANE_BORROWED};
    bench_check(gpu, pst_lane_create(gpu->runtime, &lane, &b->compute), "lane");
    const pst_offload_options options = {
        .size = sizeof options, .device = gpu->device, .compute = b->compute};
    bench_check(gpu, pst_offload_create(gpu->runtime, &options, &b->offload), "offload");
    bench_check(gpu, pst_offload_reserve(b->offload, 2 * LARGEST), "reserve");
    bench_check(gpu, ops->stream_create(gpu->device, 0, &b->other), "stream");
    void *memory[4] = {NULL, NULL, NULL, NULL};
    bench_check(gpu, ops->alloc(gpu->device, PST_MEMORY_DEVICE, LARGEST, &memory[0]), "alloc");
    bench_check(gpu, ops->alloc(gpu->device, PST_MEMORY_DEVICE, LARGEST, &memory[1]), "alloc");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    find(driver, "cuMemcpyAsync", &b->copy);
    find(driver, "cuMemHostAlloc", &b->host_alloc);
    find(driver, "cuMemFreeHost", &b->host_free);
    check(b->host_alloc(&memory[2], LARGEST, 0), "cuMemHostAlloc");
    check(b->host_alloc(&memory[3], LARGEST, 0), "cuMemHostAlloc");
    b->from = memory[0], b->to = memory[1], b->bare_out = memory[2], b->bare_in = memory[3];
    memset(b->bare_in, 1, LARGEST);
}

static void close_all(bench *b) {
    const pst_device_ops *ops = b->gpu.device->ops;
    check(b->host_free(b->bare_out), "cuMemFreeHost");
    check(b->host_free(b->bare_in), "cuMemFreeHost");
    pst_offload_destroy(b->offload);
    ops->free(b->gpu.device, PST_MEMORY_DEVICE, b->from, LARGEST);
    ops->free(b->gpu.device, PST_MEMORY_DEVICE, b->to, LARGEST);
    ops->stream_destroy(b->gpu.device, b->other);
    bench_gpu_close(&b->gpu);
}

int main(int count, char **arguments) {
    size_t rounds =
        count == 3 && strcmp(arguments[1], "--rounds") == 0 ? strtoul(arguments[2], NULL, 10) : 15;
    if (rounds == 0 || rounds > MOST_ROUNDS) rounds = MOST_ROUNDS;
    bench b;
    open_all(&b);
    printf("\nGB/s    | %-22s | %-22s | %-22s |\n", "to the host", "to the device",
           "both at once, each way");
    printf("MiB a copy |");
    for (int ways = OUT; ways <= BOTH; ways++)
        printf(" %7s %7s %6s |", "driver", "lane", "ratio");
    printf("\n");
    for (size_t bytes = MEBIBYTE; bytes <= LARGEST; bytes *= 4)
        bench_size(&b, bytes, rounds);
    close_all(&b);
    return 0;
}
