/* penstock/exchange.h - how ranks talk while they set something up: the caller's process group.
 *
 * Communicators need the ranks to exchange a few small things before they exist: ids, addresses,
 * sizes. They do it through this table, which the caller fills in with what it has: torch's
 * process group, MPI, or a communicator of the host device. It is used only inside calls that
 * create, register or destroy, never while training runs.
 */
#ifndef PENSTOCK_EXCHANGE_H
#define PENSTOCK_EXCHANGE_H

#include <penstock/comm.h>
#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_exchange {
    /* Gathers `bytes` bytes of every rank into `all`, in the order of ranks; `bytes` is the same on
     * all ranks and the memory the host's. Blocks until all ranks have called it. PST_EPEER when a
     * rank is gone, PST_ETIMEDOUT; whatever it returns but PST_OK ends the call that asked. One
     * thread a rank at a time. */
    pst_status (*all_gather)(void *context, const void *mine, size_t bytes, void *all);
    void *context;
    int rank, size;
} pst_exchange;

/* An exchange over a communicator of the host device (`local`, c10d's), which it drives as long as
 * a call lasts and does not own. A call that passes the runtime's deadline aborts the communicator
 * and returns PST_ETIMEDOUT. The context is allocated from the runtime: give it back by
 * pst_comm_exchange_close before the communicator and the runtime go. PST_ENOMEM,
 * PST_EUNSUPPORTED (no all-gather). Never blocks. */
PST_API pst_status pst_comm_exchange_open(pst_runtime *runtime, pst_comm *comm,
                                          pst_exchange *exchange);
PST_API void pst_comm_exchange_close(pst_exchange *exchange);

#ifdef __cplusplus
}
#endif
#endif
