/* penstock/crossover.h - the communicator `crossover`: two communicators of the same ranks, of
 * which each collective takes the one that suits its size.
 *
 * On GPUs of one node `ce` moves large messages without a multiprocessor, and `nccl` needs less
 * time for small ones. Both work on one stream in one order. The limits are options, equal on all
 * ranks, and not measured when it is created: sums of the two may differ in their last bits, and a
 * limit that hangs on a measurement would let two runs of a program differ.
 *
 * It is for asynchronous devices. Beyond penstock/comm.h:
 * - tickets are those of both parts: the large one counts those that it does not carry
 *   (`pass`), and compares them over the ranks with its own; source_wait, combine and open_memory
 *   are its own.
 * - When one part fails, the other is aborted.
 */
#ifndef PENSTOCK_CROSSOVER_H
#define PENSTOCK_CROSSOVER_H

#include <penstock/comm.h>
#include <penstock/exchange.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_crossover_options {
    size_t size;      /* sizeof(pst_crossover_options) */
    const char *name; /* in error texts; NULL: "crossover". Copied. */
    /* By kind: a collective of fewer bytes is a small one. All-gather: bytes gathered;
     * reduce-scatter: chunks of all ranks; all-reduce and broadcast: of the array; a barrier counts
     * as one byte. 0: 2 MiB; 1: none is small. The same on all ranks. */
    size_t small_below[PST_COLLECTIVE_KIND_COUNT];
} pst_crossover_options;

/* All ranks call it together; `exchange` is not used after this call. With success the parts belong
 * to the new communicator, which destroys them; both have its ranks and sizes. options may be NULL.
 * Succeeds on all ranks or fails on all. Blocks. PST_EINVAL, PST_ENOMEM, PST_EMISMATCH (options);
 * PST_EUNSUPPORTED: `small` is one-sided, or `large` is and cannot pass tickets. */
PST_API pst_status pst_crossover_create(pst_runtime *runtime, pst_comm *large, pst_comm *small,
                                        const pst_exchange *exchange,
                                        const pst_crossover_options *options, pst_comm **comm);

#ifdef __cplusplus
}
#endif
#endif
