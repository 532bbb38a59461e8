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
 * - reduce-scatter, PST_NCCL_SUM_BY_NCCL: chunks without gaps are one ncclReduceScatter, others one
 *   ncclReduce a rank in one group. NCCL sums in the source's dtype, in an order of its own. A
 *   single piece that takes the whole chunk as it is gets it from NCCL, else it lands in staging
 *   and the device casts, scales and accumulates.
 * - reduce-scatter, PST_NCCL_SUM_IN_FP32, and any of float16, whose sums overflow where their means
 *   do not: each rank sends each other rank its chunk (as many bytes
 *   as above), and the device sums in fp32 in the order of ranks: the same bits as the
 *   communicators `local` and `ce`.
 * - all-reduce (sums and maxima, in the array's dtype) and broadcast are the calls of these names,
 *   in place; a barrier is an all-reduce of one byte, and orders streams, not hosts.
 * Reductions of int16 and bool are PST_EUNSUPPORTED, gathers and broadcasts take every dtype.
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

typedef enum pst_nccl_sum { PST_NCCL_SUM_BY_NCCL = 0, PST_NCCL_SUM_IN_FP32 } pst_nccl_sum;

typedef struct pst_nccl_options {
    size_t size;         /* sizeof(pst_nccl_options) */
    const char *name;    /* for errors and traces; NULL: "nccl" */
    const char *library; /* path; NULL: see above */
    pst_nccl_sum sum;    /* of reduce-scatters; the same on all ranks */
    /* NCCL's calls answer at once and go on in threads of NCCL's, so that an abort never meets one
     * that blocks. Costs a lane's worker some 130 us more a collective (four H200). Otherwise an
     * abort gives a call that blocks a second, and then ends it with all the rest. */
    int nonblocking;
    int min_ctas, max_ctas; /* how many multiprocessors its kernels take; 0: NCCL's choice */
    int zero_cta;           /* NCCL's policy "zero": copy engines where it can; wants registered
                               symmetric memory */
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
 * - `abort` returns at once; NCCL is ended by a thread made for it, since that can block. PST_EBUSY
 *   until it has ended, then PST_OK.
 * - `destroy` gives NCCL the deadline to finish with the peers, and aborts it then; if even that
 *   does not end, it leaves everything as it is, with a warning to the log. */
PST_API pst_status pst_nccl_comm_create(pst_runtime *runtime, pst_device *device,
                                        const pst_exchange *exchange,
                                        const pst_nccl_options *options, pst_comm **comm);

/* Memory that NCCL is told of, so that it can reach it without copies of its own. */
typedef struct pst_nccl_registration pst_nccl_registration;

typedef enum pst_nccl_registration_kind {
    PST_NCCL_LOCAL = 0, /* each rank for itself */
    PST_NCCL_SYMMETRIC  /* all ranks together, with buffers of the same size: the sources and
                           destinations of a collective then lie at equal offsets of them */
} pst_nccl_registration_kind;

/* Registers device memory with a communicator of pst_nccl_comm_create; blocks. It stays registered
 * until deregistered or the communicator is destroyed, and is freed only after that. Symmetric
 * memory is aligned to 4096 bytes. No collective is started meanwhile. PST_EUNSUPPORTED with
 * PST_NCCL_SUM_IN_FP32, and where NCCL has no such call; PST_ENOMEM, and NCCL's errors. */
PST_API pst_status pst_nccl_register(pst_comm *comm, void *memory, size_t bytes,
                                     pst_nccl_registration_kind kind,
                                     pst_nccl_registration **registration);
PST_API pst_status pst_nccl_deregister(pst_comm *comm, pst_nccl_registration *registration);

#ifdef __cplusplus
}
#endif
#endif
