/* penstock/copy_engine.h - the communicator `ce`: collectives by copy engines over peer memory.
 *
 * For ranks of one machine whose devices map each other's memory. Each rank reads what it needs out
 * of its peers' memory: a gather is one (batched) copy from each peer, straight to its destination,
 * a reduce-scatter one copy from each peer into staging and a sum in fp32 in the order of ranks.
 * No kernel moves data between devices or signals: ranks signal each other by flags, written and
 * waited for in stream order. It is written against the device's table alone.
 *
 * How it is used, beyond penstock/comm.h:
 * - All collectives of a communicator are started on one stream, gathers and reductions together.
 *   Tickets grow by one from 1.
 * - What peers read lies in registered memory, at the same place of the same registration on all
 *   ranks: the source of all_gather and reduce_scatter, the destination of all_reduce and
 *   broadcast. Up to PST_CE_BOUNCE_BYTES of other memory go through a buffer of the communicator's.
 * - When a collective has ended here, peers may still read its source: source_wait.
 * - A reduce-scatter has a second part, the sum: combine (pst_collective_as_work runs both).
 * - A result is valid if status() returns PST_OK after the collective has ended: a rank that fails
 *   or aborts says so before anything that it spoils can be seen.
 * - It is destroyed when no collective is in flight on any rank, or after an abort. What an abort
 *   has not been able to end keeps its memory.
 */
#ifndef PENSTOCK_COPY_ENGINE_H
#define PENSTOCK_COPY_ENGINE_H

#include <penstock/comm.h>
#include <penstock/exchange.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PST_CE_MAX_RANKS    32
#define PST_CE_MAX_REGIONS  64
#define PST_CE_BOUNCE_BYTES ((size_t)1 << 20)

typedef struct pst_ce_options {
    size_t size;             /* sizeof(pst_ce_options) */
    const char *name;        /* in error texts; NULL: "ce". Copied. */
    int no_verify;           /* do not compare what the ranks start */
    size_t turn_bytes;       /* what is so large is read from peer after peer, each when it is this
                                rank's turn, and other things from all peers with one call; 0: no
                                turns, as ranks that wait for each other's sources read different
                                ones anyway. Bytes of a peer; the same on all ranks */
    int sums_pass;           /* sums leave the GPU's cache to what computes beside them: they keep
                                nothing there that other things could use */
    uint32_t first_sequence; /* where the sequence numbers of the flags begin, the same on all
                                ranks; they wrap, so 0 is fine, and tests begin near the end */
} pst_ce_options;

/* All ranks of the exchange call it together; options may be NULL. It succeeds on all ranks or
 * fails on all, so a caller may take another communicator then. `device` and `runtime` outlive it.
 * Blocks until all ranks are in it. PST_EINVAL, PST_ENOMEM; PST_EUNSUPPORTED: the device has no
 * flags or no memory that peers can map, or there are more than PST_CE_MAX_RANKS ranks; PST_EPEER:
 * the ranks are not of one machine and one user, share neither /dev/shm nor /tmp, or one is gone;
 * PST_EDEVICE; PST_ESYSTEM: sockets, file descriptors. The error text of `runtime` says which. */
PST_API pst_status pst_ce_create(pst_runtime *runtime, pst_device *device,
                                 const pst_exchange *exchange, const pst_ce_options *options,
                                 pst_comm **comm);

/* Makes `memory`, which device->ops->alloc has returned for `bytes` bytes, readable by the peers.
 * All ranks call it together, in one order, with equal `bytes`; it succeeds on all or fails on all.
 * The memory stays the caller's and is not freed before pst_ce_unregister or the communicator's
 * destroy, on all ranks. Blocks until all ranks are in it; one thread at a time, also while
 * collectives on other memory are in flight. PST_EINVAL, PST_ENOMEM (more than PST_CE_MAX_REGIONS),
 * PST_EMISMATCH (unequal sizes), PST_EDEVICE: the communicator goes on as it was. PST_EPEER (a peer
 * has aborted or ended), PST_ETIMEDOUT (a peer does not answer): no rank can register any more. */
PST_API pst_status pst_ce_register(pst_comm *comm, void *memory, size_t bytes);

/* Gives the peers' views of a registration back. All ranks do it in the same order, each when no
 * collective of its own on this memory is in flight. Does not block. Unknown memory is ignored. */
PST_API void pst_ce_unregister(pst_comm *comm, void *memory);

#ifdef __cplusplus
}
#endif
#endif
