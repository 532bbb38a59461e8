/* In place of the device `cuda` where the library is built without CUDA's headers. */
#include "sched/runtime.h"

#include <penstock/cuda.h>

pst_status pst_cuda_device_create(pst_runtime *runtime, const pst_cuda_options *options,
                                  pst_device **device) {
    (void)options;
    if (runtime == NULL || device == NULL) return PST_EINVAL;
    *device = NULL;
    return pst__runtime_fail(
        runtime, PST_EUNSUPPORTED,
        "device cuda: this library was built without CUDA's headers; install them (12.8 or "
        "later) and build it again");
}

void *pst_cuda_event(const pst_event *event) {
    (void)event;
    return NULL;
}

void *pst_cuda_stream(const pst_stream *stream) {
    (void)stream;
    return NULL;
}
