/* penstock/hierarchy.h - the communicator `hierarchy`: two communicators, one of the ranks of a
 * node and one of the ranks that have the same place in all nodes, act as one of all ranks.
 *
 * Rank = node * (ranks of a node) + place in it. Between nodes goes only what has to:
 * - all-gather: what all nodes have for this rank's place comes into a relay buffer, from where the
 *   ranks of the node read each other's.
 * - reduce-scatter: the ranks of a node sum, in fp32 (fp64 for PST_FLOAT64), what they have for
 * each node, and these sums are summed between nodes: one collective within the node for each node.
 * - all-reduce by sum of floats: each rank of a node sums its share of the array, these are reduced
 *   between nodes, and gathered within the node. Other all-reduces are reduced within the node,
 * then between nodes.
 * - broadcast: between the nodes from the root on, then within each node. Barrier: the same twice.
 * What is large goes through the relay buffer in several rounds.
 *
 * The bits of sums are the same on all ranks, but not those of a communicator without nodes, as
 * sums are made in another order.
 *
 * What it wants of its parts: on asynchronous devices, that they have read what a collective points
 * to (not the memory: segments, pieces) when `start` and `combine` return. What it does beyond
 * penstock/comm.h:
 * - `start` does all of a reduce-scatter, and what has ended has been read by all: no `combine`, no
 *   source_wait. Where a part reads one-sidedly the stream waits for its readers at the end.
 * - On the host device one collective is in flight at a time: PST_ESTATE for a second one.
 * - open_memory opens memory to the peers of both parts.
 * - When one part fails, the other is aborted: ranks that share neither learn it, too, but later
 *   than the others: on asynchronous devices the collective in flight may end there with status
 *   PST_OK and wrong data, and none after it.
 */
#ifndef PENSTOCK_HIERARCHY_H
#define PENSTOCK_HIERARCHY_H

#include <penstock/comm.h>
#include <penstock/exchange.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_hierarchy_options {
    size_t size;        /* sizeof(pst_hierarchy_options) */
    const char *name;   /* in error texts; NULL: "hierarchy". Copied. */
    size_t relay_bytes; /* of device memory; 0: 64 MiB. The same on all ranks, 2 KiB a rank at
                           least. */
} pst_hierarchy_options;

/* All ranks call it together; `exchange` is of all of them and not used after this call. `inner`
 * and `outer` work on `device`; with success they belong to the new communicator, which destroys
 * them. Nodes have equal numbers of ranks, and exchange->rank is outer->rank * inner->size +
 * inner->rank: else PST_EINVAL, naming the rank where it is not so. options may be NULL. Succeeds
 * on all ranks or fails on all. Blocks. PST_EINVAL, PST_ENOMEM, PST_EMISMATCH (options),
 * PST_EUNSUPPORTED (no kind that both parts have), and what the exchange, the device or a part's
 * open_memory returns. */
PST_API pst_status pst_hierarchy_create(pst_runtime *runtime, pst_device *device, pst_comm *inner,
                                        pst_comm *outer, const pst_exchange *exchange,
                                        const pst_hierarchy_options *options, pst_comm **comm);

#ifdef __cplusplus
}
#endif
#endif
