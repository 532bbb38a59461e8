/* Memory that NCCL is told of. */
#include "ops/nccl.h"
#include "sched/runtime.h"

#include <stdio.h>

static pst_status tell(pst__nccl *own, void *memory, size_t bytes, pst_nccl_registration_kind kind,
                       pst_nccl_registration *registration) {
    char what[64];
    (void)snprintf(what, sizeof what, "%zu bytes at %p", bytes, memory);
    if (kind == PST_NCCL_SYMMETRIC) {
        ncclResult_t result = own->library.ncclCommWindowRegister(
            own->handle, memory, bytes, &registration->window, NCCL_WIN_COLL_SYMMETRIC);
        return pst__nccl_settle(own, result, "ncclCommWindowRegister", what);
    }
    ncclResult_t result =
        own->library.ncclCommRegister(own->handle, memory, bytes, &registration->handle);
    return pst__nccl_settle(own, result, "ncclCommRegister", what);
}

static int can_register(const pst__nccl *own, pst_nccl_registration_kind kind) {
    const pst__nccl_library *library = &own->library;
    if (kind == PST_NCCL_SYMMETRIC)
        return library->ncclCommWindowRegister != NULL && library->ncclCommWindowDeregister != NULL;
    return library->ncclCommRegister != NULL && library->ncclCommDeregister != NULL;
}

pst_status pst_nccl_register(pst_comm *comm, void *memory, size_t bytes,
                             pst_nccl_registration_kind kind,
                             pst_nccl_registration **registration) {
    pst__nccl *own = comm->context;
    const pst__heap *heap = pst__runtime_heap(own->runtime);
    *registration = NULL;
    /* Where the sender's memory is registered and the receiver's staging is not, NCCL's sends have
     * been seen to wait for ever (2.28.9). */
    if (own->sum == PST_NCCL_SUM_IN_FP32)
        return pst__fail(pst__runtime_error(own->runtime), PST_EUNSUPPORTED,
                         "communicator '%s': memory is registered for sums by NCCL only",
                         own->name);
    if (!can_register(own, kind))
        return pst__fail(pst__runtime_error(own->runtime), PST_EUNSUPPORTED,
                         "communicator '%s': this NCCL registers no memory of that kind",
                         own->name);
    pst_nccl_registration *fresh = pst__heap_alloc(heap, sizeof *fresh);
    if (fresh == NULL) return PST_ENOMEM;
    pst_status status = pst__nccl_enter(own);
    if (status == PST_OK) {
        status = tell(own, memory, bytes, kind, fresh);
        pst__nccl_leave(own);
    }
    if (status != PST_OK) {
        pst__heap_free(heap, fresh, sizeof *fresh);
        return status;
    }
    fresh->next = own->registrations;
    own->registrations = fresh;
    *registration = fresh;
    return PST_OK;
}

static pst_status untell(pst__nccl *own, const pst_nccl_registration *registration) {
    ncclResult_t result =
        registration->window != NULL
            ? own->library.ncclCommWindowDeregister(own->handle, registration->window)
            : own->library.ncclCommDeregister(own->handle, registration->handle);
    return pst__nccl_settle(own, result, "deregistering", "memory");
}

pst_status pst_nccl_deregister(pst_comm *comm, pst_nccl_registration *registration) {
    pst__nccl *own = comm->context;
    pst_nccl_registration **link = &own->registrations;
    while (*link != NULL && *link != registration)
        link = &(*link)->next;
    if (*link == NULL) return PST_EINVAL;
    pst_status status = pst__nccl_enter(own);
    if (status == PST_OK) {
        status = untell(own, registration);
        pst__nccl_leave(own);
    }
    *link = registration->next;
    pst__heap_free(pst__runtime_heap(own->runtime), registration, sizeof *registration);
    return status;
}
