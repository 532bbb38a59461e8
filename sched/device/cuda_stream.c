/* Streams of the device cuda, and what waits and flags do to them. */
#include "base/atomic.h"
#include "base/clock.h"
#include "sched/device/cuda.h"

#include <sched.h>
#include <string.h>

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
    CUcontext previous;
    pst_status status = pst__cuda_enter(cuda, &previous);
    if (status != PST_OK) return status;
    const int clamped = clamp_priority(cuda, priority);
    status = pst__cuda_call(cuda, cuStreamCreateWithPriority,
                            (native, CU_STREAM_NON_BLOCKING, clamped), "priority %d", clamped);
    pst__cuda_leave(cuda, previous);
    return status;
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
    CUcontext previous;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    pst__cuda_forget_text(); /* the work may fail without a call of the device's */
    status = work->start(work->argument, stream);
    pst__cuda_leave(cuda, previous);
    return status;
}

pst_status pst__cuda_stream_ready(pst_device *device, pst_stream *stream) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    const pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status == PST_OK) pst__cuda_leave(cuda, previous);
    return status;
}

pst_status pst__cuda_stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    status = pst__cuda_call(cuda, cuStreamWaitEvent,
                            (stream->native, event->native, CU_EVENT_WAIT_DEFAULT),
                            "stream %p, event %p", (void *)stream->native, (void *)event->native);
    pst__cuda_leave(cuda, previous);
    return status;
}

pst_status pst__cuda_stream_write32(pst_device *device, pst_stream *stream, uint32_t *address,
                                    uint32_t value) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    status = pst__cuda_call(
        cuda, cuStreamWriteValue32,
        (stream->native, pst__cuda_address(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "stream %p, flag %p, value %u", (void *)stream->native, (void *)address, value);
    pst__cuda_leave(cuda, previous);
    return status;
}

pst_status pst__cuda_stream_wait32(pst_device *device, pst_stream *stream, const uint32_t *address,
                                   uint32_t value) {
    pst__cuda *cuda = pst__cuda_of(device);
    CUcontext previous;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    status = pst__cuda_call(
        cuda, cuStreamWaitValue32,
        (stream->native, pst__cuda_address(address), value, CU_STREAM_WAIT_VALUE_GEQ),
        "stream %p, flag %p, value %u", (void *)stream->native, (const void *)address, value);
    pst__cuda_leave(cuda, previous);
    return status;
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
    CUcontext previous;
    pst_status status = pst__cuda_enter_stream(cuda, stream, &previous);
    if (status != PST_OK) return status;
    status = enqueue_steps(cuda, stream, steps, count);
    pst__cuda_leave(cuda, previous);
    return status;
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
    CUcontext previous;
    if (pst__cuda_shared_contains(cuda, address)) {
        /* Release: what the caller wrote before is seen by whoever waits for the flag. */
        pst__store_release(address, value);
        return PST_OK;
    }
    pst_status status = pst__cuda_enter(cuda, &previous);
    if (status != PST_OK) return status;
    status = pst__cuda_call(
        cuda, cuStreamWriteValue32,
        (cuda->service, pst__cuda_address(address), value, CU_STREAM_WRITE_VALUE_DEFAULT),
        "flag %p, value %u", (void *)address, value);
    if (status == PST_OK) status = await_service(cuda);
    pst__cuda_leave(cuda, previous);
    return status;
}
