/* What the GPU benchmarks share: the device, the clock, medians. All of it ends the program with a
 * message where it cannot go on. */
#ifndef BENCH_GPU_GPU_H
#define BENCH_GPU_GPU_H

#include <penstock/cuda.h>
#include <stddef.h>

typedef struct bench_gpu {
    pst_runtime *runtime;
    pst_device *device;
    pst_stream *stream;
    pst_event *event;
} bench_gpu;

void bench_gpu_open(bench_gpu *gpu);
void bench_gpu_close(bench_gpu *gpu);

void bench_check(const bench_gpu *gpu, pst_status status, const char *what);

/* Until all that is on the stream is done. */
void bench_gpu_finish(const bench_gpu *gpu, pst_stream *stream);

double bench_now(void); /* seconds */

/* Sorts `values`; `share` of them are smaller than the result. */
double bench_quantile(double *values, size_t count, double share);

#endif
