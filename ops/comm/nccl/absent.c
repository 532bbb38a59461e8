/* In place of the communicator `nccl` where the library is built without NCCL's header. */
#include "sched/runtime.h"

#include <penstock/nccl.h>

pst_status pst_nccl_comm_create(pst_runtime *runtime, pst_device *device,
                                const pst_exchange *exchange, const pst_nccl_options *options,
                                pst_comm **comm) {
    (void)device;
    (void)exchange;
    (void)options;
    if (runtime == NULL || comm == NULL) return PST_EINVAL;
    *comm = NULL;
    return pst__runtime_fail(
        runtime, PST_EUNSUPPORTED,
        "communicator nccl: this library was built without the headers of NCCL and CUDA; install "
        "them (2.27 and 12.8 or later) and build it again");
}
