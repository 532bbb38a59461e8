/* What the driver answers, and the context of a thread. */
#include "sched/cuda/cuda.h"

#include <stdarg.h>
#include <stdio.h>

#define TEXT_BYTES 512

/* Of the calling thread, for all devices: a caller asks right after its call. */
static _Thread_local char text[TEXT_BYTES];

/* Errors after which the context answers nothing but them: its work and its memory are lost. */
static const CUresult sticky[] = {
    CUDA_ERROR_DEINITIALIZED,
    CUDA_ERROR_DEVICE_UNAVAILABLE,
    CUDA_ERROR_ECC_UNCORRECTABLE,
    CUDA_ERROR_NVLINK_UNCORRECTABLE,
    CUDA_ERROR_CONTAINED,
    CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_LAUNCH_TIMEOUT,
    CUDA_ERROR_CONTEXT_IS_DESTROYED,
    CUDA_ERROR_ASSERT,
    CUDA_ERROR_HARDWARE_STACK_ERROR,
    CUDA_ERROR_ILLEGAL_INSTRUCTION,
    CUDA_ERROR_MISALIGNED_ADDRESS,
    CUDA_ERROR_INVALID_ADDRESS_SPACE,
    CUDA_ERROR_INVALID_PC,
    CUDA_ERROR_LAUNCH_FAILED,
    CUDA_ERROR_TENSOR_MEMORY_LEAK,
    CUDA_ERROR_EXTERNAL_DEVICE,
    CUDA_ERROR_UNKNOWN,
};

static int is_sticky(CUresult result) {
    for (size_t i = 0; i < sizeof sticky / sizeof sticky[0]; i++)
        if (sticky[i] == result) return 1;
    return 0;
}

static pst_status status_of(CUresult result) {
    switch ((int)result) {
    case CUDA_SUCCESS:
        return PST_OK;
    case CUDA_ERROR_NOT_READY:
        return PST_PENDING;
    case CUDA_ERROR_INVALID_VALUE:
        return PST_EINVAL;
    case CUDA_ERROR_OUT_OF_MEMORY:
        return PST_ENOMEM;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
        return PST_EUNSUPPORTED;
    default:
        return PST_EDEVICE;
    }
}

pst_status pst__cuda_status(pst__cuda *cuda, CUresult result, const char *call, const char *format,
                            ...) {
    const pst_status status = status_of(result);
    if (status >= PST_OK) return status;
    char object[TEXT_BYTES / 2];
    const char *name = "unknown error", *meaning = "no text"; /* as a driver without them has it */
    (void)cuda->driver.cuGetErrorName(result, &name);
    (void)cuda->driver.cuGetErrorString(result, &meaning);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(object, sizeof object, format, arguments);
    va_end(arguments);
    (void)snprintf(text, sizeof text, "device %s: %s (%s): %s (%d): %s", cuda->name, call, object,
                   name == NULL ? "unknown error" : name, (int)result,
                   meaning == NULL ? "no text" : meaning);
    if (is_sticky(result) && cuda->opened) pst_runtime_poison(cuda->runtime, PST_EDEVICE, text);
    return status;
}

pst_status pst__cuda_refuse(pst__cuda *cuda, pst_status status, const char *format, ...) {
    const int length = snprintf(text, sizeof text, "device %s: ", cuda->name);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text + length, sizeof text - (size_t)length, format, arguments);
    va_end(arguments);
    return status;
}

void pst__cuda_forget_text(void) {
    text[0] = '\0';
}

const char *pst__cuda_error_text(pst_device *device) {
    (void)device;
    return text;
}

/* ---- the context -------------------------------------------------------------------- */

/* A thread's first entry: it captures nothing itself, and its calls shall not break the capture of
 * another thread's. */
static pst_status adopt_thread(pst__cuda *cuda) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    return pst__cuda_call(cuda, cuThreadExchangeStreamCaptureMode, (&mode), "relaxed");
}

pst_status pst__cuda_enter(pst__cuda *cuda, CUcontext *previous) {
    CUcontext current = NULL;
    *previous = NULL;
    pst_status status = pst__cuda_call(cuda, cuCtxGetCurrent, (&current), "of this thread");
    if (status != PST_OK || current == cuda->context) return status;
    status = pst__cuda_call(cuda, cuCtxSetCurrent, (cuda->context), "the primary context");
    if (status != PST_OK) return status;
    if (current == NULL) return adopt_thread(cuda);
    *previous = current;
    return PST_OK;
}

void pst__cuda_leave(pst__cuda *cuda, CUcontext previous) {
    if (previous != NULL) (void)cuda->driver.cuCtxSetCurrent(previous);
}

static pst_status check_capture(pst__cuda *cuda, const pst_stream *stream) {
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    const pst_status status = pst__cuda_call(cuda, cuStreamIsCapturing, (stream->native, &capture),
                                             "stream %p", (void *)stream->native);
    if (status != PST_OK || capture == CU_STREAM_CAPTURE_STATUS_NONE) return status;
    return pst__cuda_refuse(cuda, PST_ESTATE,
                            "stream %p is under CUDA-graph capture; open gates and wait for tasks "
                            "outside of what is captured",
                            (void *)stream->native);
}

pst_status pst__cuda_enter_stream(pst__cuda *cuda, const pst_stream *stream, CUcontext *previous) {
    pst_status status = pst__cuda_enter(cuda, previous);
    if (status != PST_OK || !stream->wrapped || pst__cuda_capture_of(cuda, stream) != 0)
        return status;
    status = check_capture(cuda, stream);
    if (status != PST_OK) pst__cuda_leave(cuda, *previous);
    return status;
}
