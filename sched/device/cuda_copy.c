/* Copies of the device cuda: by the copy engines, several as one batch. */
#include "sched/device/cuda.h"

#define BATCH 128u

/* Between any two memories: addresses are unique over host and devices. */
static pst_status copy_one(pst__cuda *cuda, CUstream stream, const pst_copy *copy) {
    return pst__cuda_call(cuda, cuMemcpyAsync,
                          (pst__cuda_address(copy->destination), pst__cuda_address(copy->source),
                           copy->bytes, stream),
                          "stream %p, %zu bytes from %p to %p", (void *)stream, copy->bytes,
                          copy->source, copy->destination);
}

typedef struct batch {
    CUdeviceptr destinations[BATCH], sources[BATCH];
    size_t bytes[BATCH];
    size_t count;
} batch;

static pst_status copy_batch(pst__cuda *cuda, CUstream stream, batch *batch) {
    /* Sources are read in stream order, and no kernel is to do the copying. */
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                                     .flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE};
    size_t first = 0, failed = 0;
    return pst__cuda_call(cuda, cuMemcpyBatchAsync,
                          (batch->destinations, batch->sources, batch->bytes, batch->count,
                           &attributes, &first, 1, &failed, stream),
                          "stream %p, %zu copies", (void *)stream, batch->count);
}

/* The driver takes no batch on the default streams. */
static int takes_batches(const pst__cuda *cuda, CUstream stream) {
    return cuda->driver.cuMemcpyBatchAsync != NULL && stream != NULL &&
           stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

static pst_status copy_each(pst__cuda *cuda, CUstream stream, const pst_copy *copies,
                            size_t count) {
    pst_status status = PST_OK;
    for (size_t i = 0; i < count && status == PST_OK; i++)
        if (copies[i].bytes > 0) status = copy_one(cuda, stream, &copies[i]);
    return status;
}

static pst_status copy_batched(pst__cuda *cuda, CUstream stream, const pst_copy *copies,
                               size_t count) {
    batch batch;
    pst_status status = PST_OK;
    batch.count = 0;
    for (size_t i = 0; i < count && status == PST_OK; i++) {
        if (copies[i].bytes == 0) continue;
        batch.destinations[batch.count] = pst__cuda_address(copies[i].destination);
        batch.sources[batch.count] = pst__cuda_address(copies[i].source);
        batch.bytes[batch.count++] = copies[i].bytes;
        if (batch.count < BATCH) continue;
        status = copy_batch(cuda, stream, &batch);
        batch.count = 0;
    }
    return status == PST_OK && batch.count > 0 ? copy_batch(cuda, stream, &batch) : status;
}

pst_status pst__cuda_copy(pst_device *device, pst_stream *stream, const pst_copy *copies,
                          size_t count) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    status = count > 1 && takes_batches(cuda, stream->native)
                 ? copy_batched(cuda, stream->native, copies, count)
                 : copy_each(cuda, stream->native, copies, count);
    pst__cuda_leave(cuda, previous);
    return status;
}

pst_status pst__cuda_copy_2d(pst_device *device, pst_stream *stream, void *destination,
                             size_t destination_pitch, const void *source, size_t source_pitch,
                             size_t row_bytes, size_t rows) {
    pst__cuda *cuda = pst__cuda_of(device);
    const CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                                .srcDevice = pst__cuda_address(source),
                                .srcPitch = source_pitch,
                                .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                                .dstDevice = pst__cuda_address(destination),
                                .dstPitch = destination_pitch,
                                .WidthInBytes = row_bytes,
                                .Height = rows};
    CUcontext previous;
    if (row_bytes == 0 || rows == 0) return PST_OK;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    status = pst__cuda_call(cuda, cuMemcpy2DAsync, (&copy, stream->native),
                            "stream %p, %zu rows of %zu bytes from %p to %p",
                            (void *)stream->native, rows, row_bytes, source, destination);
    pst__cuda_leave(cuda, previous);
    return status;
}
