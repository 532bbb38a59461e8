/* penstock/cuda.h - the device `cuda`: one NVIDIA GPU through the driver's interface.
 *
 * The driver is loaded at run time, so the library has no link dependency on it. The device works
 * in the GPU's primary context, which CUDA's runtime and torch use too: pointers, streams and
 * events are exchanged freely with them. No header of CUDA is needed to include this one: native
 * streams and events (CUstream, cudaStream_t; CUevent, cudaEvent_t) are passed as void *. What an
 * event of the caller's stands for opens a gate by way of a stream: let a stream wait for it, and
 * give its borrowed lane to pst_gate_open.
 */
#ifndef PENSTOCK_CUDA_H
#define PENSTOCK_CUDA_H

#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_cuda_options {
    size_t size;        /* sizeof(pst_cuda_options) */
    int ordinal;        /* which GPU, as the driver counts them (after CUDA_VISIBLE_DEVICES) */
    const char *driver; /* path of the driver; NULL: "libcuda.so.1" */
    const char *nvrtc;  /* path of the run-time compiler; NULL: the process's, torch's, or the
                           toolkit's, whichever is found first */
    const char *cache;  /* directory for compiled kernels; NULL: penstock in $XDG_CACHE_HOME, or in
                           ~/.cache */
} pst_cuda_options;

/* Opens a GPU; options may be NULL. The caller owns the device, ends it with
 * device->ops->destroy(device) after the runtimes and arenas that use it, and hands it to
 * lanes and arenas of `runtime` (two runtimes: two devices, also on one GPU). Blocks while the
 * driver starts. PST_EINVAL, PST_ENOMEM; PST_EUNSUPPORTED where there is no driver or no such GPU,
 * or where the library was built without CUDA's headers; PST_EDEVICE. The error text of `runtime`
 * says which.
 *
 * What its table does beyond penstock/device.h:
 * - any thread may call; where the thread's current context is another one, the call switches to
 *   the device's and back.
 * - stream_wrap takes a CUstream (NULL: the legacy default stream), which must outlive the wrap.
 *   Under CUDA-graph capture a wrapped stream takes nothing but steps of AdamW, which become a part
 *   of the graph: PST_ESTATE.
 * - errors that end the context (an illegal address, a failed launch, an uncorrectable memory
 *   error) poison `runtime`; others are of the call alone. error_text names call and error. */
PST_API pst_status pst_cuda_device_create(pst_runtime *runtime, const pst_cuda_options *options,
                                          pst_device **device);

/* The CUstream behind a stream of a device that pst_cuda_device_create has made: for the `start` of
 * a task that enqueues work of its own. The device's context is current while `start` runs. */
PST_API void *pst_cuda_stream(const pst_stream *stream);

/* The CUevent behind an event of such a device (pst_task_event), for streams and libraries that
 * know nothing of this one: they may wait for it and ask it, as long as the event is valid, and
 * neither record nor destroy it. NULL for NULL. Any thread, never blocks. */
PST_API void *pst_cuda_event(const pst_event *event);

#ifdef __cplusplus
}
#endif
#endif
