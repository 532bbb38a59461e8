/* Streams of the device cuda, and what is enqueued on them: waits, flags, copies by the copy
 * engines. */
#include "base/atomic.h"
#include "base/clock.h"
#include "sched/cuda/cuda.h"

#include <sched.h>
#include <string.h>

#define BATCH               128u
#define FLAG_WRITE_LIMIT_NS 1000000000u

void *pst_cuda_stream(const pst_stream *stream) {
    return stream == NULL ? NULL : stream->native;
}

/* ---- creation ----------------------------------------------------------------------- */

static int clamp_priority(const pst__cuda *cuda, int priority) {
    if (priority > cuda->lowest) return cuda->lowest;
    return priority < cuda->highest ? cuda->highest : priority;
}

static pst_status create_native(pst__cuda *cuda, int priority, CUstream *native) {
    const int clamped = clamp_priority(cuda, priority);
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    return pst__cuda_call(cuda, cuStreamCreateWithPriority,
                          (native, CU_STREAM_NON_BLOCKING, clamped), "priority %d", clamped);
}

static pst_status fill(pst__cuda *cuda, CUstream native, int wrapped, pst_stream **created) {
    pst_stream *stream = pst__heap_alloc(&cuda->heap, sizeof *stream);
    if (stream == NULL) return pst__cuda_refuse(cuda, PST_ENOMEM, "no memory for a stream");
    stream->native = native;
    stream->wrapped = wrapped;
    *created = stream;
    return PST_OK;
}

pst_status pst__cuda_stream_create(pst_device *device, int priority, pst_stream **stream) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUstream native = NULL;
    *stream = NULL;
    pst_status status = create_native(cuda, priority, &native);
    if (status != PST_OK) return status;
    status = fill(cuda, native, 0, stream);
    if (status != PST_OK) (void)cuda->driver.cuStreamDestroy(native);
    return status;
}

pst_status pst__cuda_stream_wrap(pst_device *device, void *native, pst_stream **stream) {
    *stream = NULL;
    return fill(pst__cuda_of(device), native, 1, stream);
}

void pst__cuda_stream_destroy(pst_device *device, pst_stream *stream) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    if (stream == NULL) return;
    if (!stream->wrapped && pst__cuda_enter(cuda, &previous) == PST_OK) {
        (void)cuda->driver.cuStreamDestroy(stream->native);
        pst__cuda_leave(cuda, previous);
    }
    pst__heap_free(&cuda->heap, stream, sizeof *stream);
}

/* ---- in stream order ---------------------------------------------------------------- */

pst_status pst__cuda_launch(pst_device *device, pst_stream *stream, const pst_work *work) {
    pst__cuda *cuda = pst__cuda_of(device);
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    pst__cuda_forget_text(); /* the work may fail without a call of the device's */
    return work->start(work->argument, stream);
}

pst_status pst__cuda_stream_ready(pst_device *device, pst_stream *stream) {
    PST__CUDA_ENTER_OR_RETURN(pst__cuda_of(device), stream);
    return PST_OK;
}

pst_status pst__cuda_stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    pst__cuda *cuda = pst__cuda_of(device);
    const uint64_t recorded = pst__cuda_event_capture(event);
    const uint64_t running = pst__load_relaxed(&cuda->capture);
    if (recorded != 0 && recorded == running)
        pst__store_relaxed(&stream->capture, running);
    else if (recorded != 0 || pst__cuda_capture_of(cuda, stream) != 0)
        return PST_OK; /* see capture.c */
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    return pst__cuda_call(cuda, cuStreamWaitEvent,
                          (stream->native, event->native, CU_EVENT_WAIT_DEFAULT),
                          "stream %p, event %p", (void *)stream->native, (void *)event->native);
}

pst_status pst__cuda_stream_write32(pst_device *device, pst_stream *stream, uint32_t *address,
                                    uint32_t value) {
    pst__cuda *cuda = pst__cuda_of(device);
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    return pst__cuda_call(
        cuda, cuStreamWriteValue32,
        (stream->native, pst__cuda_address(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "stream %p, flag %p, value %u", (void *)stream->native, (void *)address, value);
}

pst_status pst__cuda_stream_wait32(pst_device *device, pst_stream *stream, const uint32_t *address,
                                   uint32_t value) {
    pst__cuda *cuda = pst__cuda_of(device);
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    return pst__cuda_call(
        cuda, cuStreamWaitValue32,
        (stream->native, pst__cuda_address(address), value, CU_STREAM_WAIT_VALUE_GEQ),
        "stream %p, flag %p, value %u", (void *)stream->native, (const void *)address, value);
}

/* Each write orders what is before it in the stream: the driver refuses writes that do not. */
static CUstreamBatchMemOpParams operation_of(const pst_flag_step *step) {
    CUstreamBatchMemOpParams made;
    memset(&made, 0, sizeof made);
    if (step->is_wait) {
        made.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        made.waitValue.address = pst__cuda_address(step->address);
        made.waitValue.value = step->value;
        made.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
    } else {
        made.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        made.writeValue.address = pst__cuda_address(step->address);
        made.writeValue.value = step->value;
        made.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    }
    return made;
}

static pst_status enqueue_steps(pst__cuda *cuda, const pst_stream *stream,
                                const pst_flag_step *steps, size_t count) {
    enum { MOST = 64 };
    CUstreamBatchMemOpParams operations[MOST];
    pst_status status = PST_OK;
    for (size_t done = 0; done < count && status == PST_OK; done += MOST) {
        const size_t part = count - done < MOST ? count - done : MOST;
        for (size_t i = 0; i < part; i++)
            operations[i] = operation_of(&steps[done + i]);
        status = pst__cuda_call(cuda, cuStreamBatchMemOp,
                                (stream->native, (unsigned)part, operations, 0),
                                "stream %p, %zu flags", (void *)stream->native, part);
    }
    return status;
}

pst_status pst__cuda_stream_flags32(pst_device *device, pst_stream *stream,
                                    const pst_flag_step *steps, size_t count) {
    pst__cuda *cuda = pst__cuda_of(device);
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    return enqueue_steps(cuda, stream, steps, count);
}

/* ---- past all streams --------------------------------------------------------------- */

/* By asking and not by waiting, for which there is no limit of time. */
static pst_status await_service(pst__cuda *cuda) {
    const uint64_t begin = pst__now();
    for (;;) {
        const pst_status status =
            pst__cuda_call(cuda, cuStreamQuery, (cuda->service), "the service stream");
        if (status != PST_PENDING) return status;
        if (pst__now() - begin > FLAG_WRITE_LIMIT_NS)
            return pst__cuda_refuse(cuda, PST_ETIMEDOUT,
                                    "flag is not written after a second: streams that wait are in "
                                    "the way; keep flags in shared memory");
        (void)sched_yield();
    }
}

pst_status pst__cuda_flag_write32(pst_device *device, uint32_t *address, uint32_t value) {
    pst__cuda *cuda = pst__cuda_of(device);
    if (pst__cuda_shared_contains(cuda, address)) {
        /* Release: what the caller wrote before is seen by whoever waits for the flag. */
        pst__store_release(address, value);
        return PST_OK;
    }
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    const pst_status status = pst__cuda_call(
        cuda, cuStreamWriteValue32,
        (cuda->service, pst__cuda_address(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "flag %p, value %u", (void *)address, value);
    return status == PST_OK ? await_service(cuda) : status;
}

/* ---- copies ------------------------------------------------------------------------- */

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
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    /* No batch becomes a node of a graph. */
    return count > 1 && takes_batches(cuda, stream->native) &&
                   pst__cuda_capture_of(cuda, stream) == 0
               ? copy_batched(cuda, stream->native, copies, count)
               : copy_each(cuda, stream->native, copies, count);
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
    if (row_bytes == 0 || rows == 0) return PST_OK;
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    return pst__cuda_call(cuda, cuMemcpy2DAsync, (&copy, stream->native),
                          "stream %p, %zu rows of %zu bytes from %p to %p", (void *)stream->native,
                          rows, row_bytes, source, destination);
}
