#include "base/atomic.h"
#include "base/clock.h"
#include "ops/nccl.h"
#include "sched/runtime.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- the gate: one word says whether it is closed and how many are inside, so closing it and
 * entering it cannot miss each other ---------------------------------------------------------- */

pst_status pst__nccl_enter(pst__nccl *own) {
    /* Acquire: the handle is seen as create has left it. Release pairs with wait_empty. */
    uint32_t before = pst__add_acq_rel(&own->gate, 1);
    if ((before & PST__NCCL_CLOSED) == 0) return PST_OK;
    pst__nccl_leave(own);
    pst_status status =
        (pst_status)pst__load_acquire(&own->status); /* pairs with the cas in fail */
    return status != PST_OK ? status : PST_ECANCELED;
}

void pst__nccl_leave(pst__nccl *own) {
    (void)pst__sub_acq_rel(&own->gate,
                           1); /* pairs with the load in wait_empty: our calls are over */
}

int pst__nccl_is_closed(pst__nccl *own) {
    return (pst__load_relaxed(&own->gate) & PST__NCCL_CLOSED) != 0; /* a hint: only ends a loop */
}

int pst__nccl_close(pst__nccl *own) {
    uint32_t before = pst__load_relaxed(&own->gate); /* the cas below checks it */
    do {
        if ((before & PST__NCCL_CLOSED) != 0) return 0;
        /* Acquire and release: pairs with the add in enter, which sees it closed from here on. */
    } while (!pst__cas_acq_rel(&own->gate, &before, before | PST__NCCL_CLOSED));
    return 1;
}

void pst__nccl_wait_empty(pst__nccl *own, uint64_t nanoseconds) {
    uint64_t until = pst__now() + nanoseconds;
    while (pst__load_acquire(&own->gate) != PST__NCCL_CLOSED && pst__now() < until)
        (void)sched_yield(); /* acquire pairs with the release in leave */
}

/* ---- errors ---------------------------------------------------------------------------------- */

pst_status pst__nccl_fail(pst__nccl *own, pst_status status, const char *format, ...) {
    char text[PST__NCCL_TEXT - 128];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ck_spinlock_lock(&own->lock);
    pst_status first = (pst_status)pst__load_relaxed(&own->status); /* written under the lock */
    if (first == PST_OK) {
        (void)snprintf(own->text, sizeof own->text, "rank %d, communicator '%.64s': %s",
                       own->comm.rank, own->name, text);
        pst__store_release(&own->status, (int)status); /* pairs with the loads in enter, status */
    }
    ck_spinlock_unlock(&own->lock);
    if (first != PST_OK) return first;
    return pst__fail(pst__runtime_error(own->runtime), status, "%s", own->text);
}

pst_status pst__nccl_answer(pst__nccl *own, ncclResult_t result, const char *call,
                            const char *what) {
    if (result == ncclSuccess) return PST_OK;
    const char *detail = own->library.ncclGetLastError(own->handle);
    return pst__nccl_fail(own, pst__nccl_status_of(result),
                          "%s for %s failed: %s: %s (NCCL_DEBUG=WARN in the environment says more)",
                          call, what, own->library.ncclGetErrorString(result),
                          detail == NULL || *detail == '\0' ? "no details" : detail);
}

pst_status pst__nccl_settle(pst__nccl *own, ncclResult_t result, const char *call,
                            const char *what) {
    uint64_t until = pst__now() + own->deadline_ns;
    while (result == ncclInProgress) {
        if (pst__nccl_is_closed(own)) return PST_ECANCELED; /* abort wants us out of here */
        if (pst__now() > until)
            return pst__nccl_fail(own, PST_ETIMEDOUT,
                                  "%s for %s is not through by the deadline of %.1f s: look for a "
                                  "rank that does not come, or that starts something else",
                                  call, what, (double)own->deadline_ns * 1e-9);
        ncclResult_t asked = own->library.ncclCommGetAsyncError(own->handle, &result);
        if (asked != ncclSuccess) result = asked;
        if (result == ncclInProgress) (void)sched_yield();
    }
    return pst__nccl_answer(own, result, call, what);
}
