#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void bench_check(const bench_gpu *gpu, pst_status status, const char *what) {
    if (status == PST_OK) return;
    char text[1024] = "";
    (void)pst_runtime_error(gpu->runtime, text, sizeof text);
    fprintf(stderr, "%s: %s: %s; %s\n", what, pst_status_name(status),
            gpu->device != NULL ? gpu->device->ops->error_text(gpu->device) : "", text);
    exit(1);
}

void bench_gpu_open(bench_gpu *gpu) {
    *gpu = (bench_gpu){.device = NULL};
    bench_check(gpu, pst_runtime_create(NULL, &gpu->runtime), "runtime");
    bench_check(gpu, pst_cuda_device_create(gpu->runtime, NULL, &gpu->device), "device");
    bench_check(gpu, gpu->device->ops->stream_create(gpu->device, 0, &gpu->stream), "stream");
    bench_check(gpu, gpu->device->ops->event_create(gpu->device, 0, &gpu->event), "event");
}

void bench_gpu_close(bench_gpu *gpu) {
    gpu->device->ops->event_destroy(gpu->device, gpu->event);
    gpu->device->ops->stream_destroy(gpu->device, gpu->stream);
    pst_runtime_destroy(gpu->runtime);
    gpu->device->ops->destroy(gpu->device);
}

void bench_gpu_finish(const bench_gpu *gpu, pst_stream *stream) {
    const pst_device_ops *ops = gpu->device->ops;
    bench_check(gpu, ops->event_record(gpu->device, gpu->event, stream), "event_record");
    pst_status status;
    do
        status = ops->event_query(gpu->device, gpu->event);
    while (status == PST_PENDING);
    bench_check(gpu, status, "event_query");
}

double bench_now(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_quantile(double *values, size_t count, double share) {
    qsort(values, count, sizeof *values, compare);
    return values[(size_t)(share * (double)(count - 1) + 0.5)];
}
