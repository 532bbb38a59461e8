/* penstock/nccl.h - the communicator `nccl`: collectives of GPUs by NVIDIA's library.
 *
 * The library is loaded at run time: the copy that the process has already (torch brings one), else
 * "libnccl.so.2". A communicator is one queue: gathers and reductions that shall overlap need one
 * each, and all ranks start the collectives of all their communicators in one order.
 *
 * How a collective becomes calls of the library, chosen by its layout alone, so alike on all ranks:
 * - all-gather: segments that stand in order of ranks, take the same bytes of each rank's source
 *   and land one behind the other are one ncclAllGather; any other segment is one ncclBroadcast;
 *   all in one group.
 * - reduce-scatter: each rank sends each other rank its chunk, as many bytes as ncclReduceScatter
 *   moves, and the device sums in fp32 in the order of ranks: the same bits as the communicators
 *   `local` and `ce`.
 * - all-reduce (sums and maxima, in the array's dtype) and broadcast are the calls of these names,
 *   in place; a barrier is an all-reduce of one byte, and orders streams, not hosts.
 * All-reduces of int16 and bool are PST_EUNSUPPORTED, gathers and broadcasts take every dtype.
 *
 * NCCL mixes up data, or never ends, where ranks start different collectives. With
 * options.verify_over the ranks compare what they have started, some milliseconds later:
 * PST_EMISMATCH names both. What never ends is ended by `abort`.
 */
#ifndef PENSTOCK_NCCL_H
#define PENSTOCK_NCCL_H

#include <penstock/comm.h>
#include <penstock/exchange.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_nccl_options {
    size_t size;         /* sizeof(pst_nccl_options) */
    const char *name;    /* for errors and traces; NULL: "nccl" */
    const char *library; /* path; NULL: see above */
    /* (optional) A communicator of the host and of the same ranks, which nobody else uses as long
     * as this one lives: whoever calls `start` or `status` also drives it, and never blocks for it.
     */
    pst_comm *verify_over;
    uint64_t deadline_ns; /* for all ranks to come when creating, and for peers when destroying
                             (there 30 s at most); 0: the runtime's, without one 10 minutes */
} pst_nccl_options;

/* Creates this rank's communicator on `device` (of pst_cuda_device_create). All ranks call it with
 * the same options, one after the other for several communicators; the unique id travels over
 * `exchange`, which is not used after this call. All connections are made, and used once, so
 * that collectives do not wait for that. Blocks until all ranks have come or the deadline is past.
 * On failure nothing is left, on no rank.
 *
 * PST_EUNSUPPORTED without NCCL, or when this library was built without its header; PST_EINVAL,
 * PST_ENOMEM; PST_EMISMATCH when options or NCCL's version differ; PST_ETIMEDOUT; PST_EDEVICE,
 * PST_ESYSTEM, PST_EPEER from NCCL; and what another rank failed with. The runtime's error text
 * says which.
 *
 * What its table does beyond penstock/comm.h:
 * - `start` enqueues on a stream of `device` from within a task's start. An error of NCCL is final.
 * - `status` asks NCCL for errors of what is in flight, and compares what the ranks have started;
 *   so does each `start`.
 * - `abort` returns at once; NCCL is ended by a thread made for it, since that can block: a call of
 *   NCCL that blocks has a second left then. What runs on the device ends soon, also in launches of
 *   CUDA graphs. PST_EBUSY until NCCL has ended, which takes that all graphs that its collectives
 *   were captured into are destroyed; then PST_OK.
 * - `destroy` gives NCCL twice the deadline to finish with the peers, from an abort on if there was
 *   one; what has not ended then it leaves as it is, with a warning to the log. */
PST_API pst_status pst_nccl_comm_create(pst_runtime *runtime, pst_device *device,
                                        const pst_exchange *exchange,
                                        const pst_nccl_options *options, pst_comm **comm);

#ifdef __cplusplus
}
#endif
#endif
