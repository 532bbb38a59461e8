/* The communicator `nccl`, its parts: nccl.c (life: create, status, abort, destroy; entering NCCL
 * and what it answers), connect.c (its begin), data.c (collectives as calls of NCCL). */
#ifndef PST_OPS_COMM_NCCL_NCCL_H
#define PST_OPS_COMM_NCCL_NCCL_H

#include "base/heap.h"
#include "ops/comm/audit.h"
#include "ops/comm/failure.h"
#include "ops/comm/nccl/library.h"

#include <penstock/nccl.h>

/* In pst__nccl.gate: no thread may enter any more. Below it: how many threads are inside. */
#define PST__NCCL_CLOSED 0x80000000u

/* The first collectives. */
typedef struct pst__nccl_trial {
    pst_stream *stream;
    pst_event *event;
    void *memory;
} pst__nccl_trial;

typedef struct pst__nccl {
    pst_comm comm;
    pst_runtime *runtime;
    pst_device *device;
    pst__nccl_library library;
    ncclComm_t handle;
    char *name;
    uint64_t deadline_ns;
    pst__audit *audit; /* NULL: none */

    uint32_t gate; /* who may call NCCL with `handle`; see pst__nccl_enter */
    pst__failure failure;

    int connecting;          /* a thread connects the ranks */
    int end;                 /* of NCCL's communicator: see nccl.c */
    uint64_t end_began;      /* pst__now(); 0: not yet */
    int aborts;              /* it ends by ncclCommAbort */
    ncclResult_t end_result; /* of the call that has ended it */
    ncclConfig_t config;
    ncclUniqueId id;
    pst__nccl_trial trial;
    pst_status connected; /* what the connecting thread has come to */

    const void **sources; /* scratch of `start`: one a rank */
} pst__nccl;

/* ---- nccl.c ---------------------------------------------------------------------------------- */

/* Lets the caller call NCCL until pst__nccl_leave; the first error if there was one, or
 * PST_ECANCELED when the communicator is being ended. Any thread, never blocks. */
pst_status pst__nccl_enter(pst__nccl *own);
void pst__nccl_leave(pst__nccl *own);
int pst__nccl_is_closed(pst__nccl *own);

/* Makes `status` the communicator's for good, unless it has one; returns its status. */
pst_status pst__nccl_fail(pst__nccl *own, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* What NCCL has answered to `call`, about `what`: PST_OK, or the error, which is final. Inside. */
pst_status pst__nccl_answer(pst__nccl *own, ncclResult_t result, const char *call,
                            const char *what);

/* What has happened to NCCL meanwhile: PST_OK, or the first error. Inside. */
pst_status pst__nccl_look(pst__nccl *own);
/* See the table's abort. */
pst_status pst__nccl_abort(pst__nccl *own, pst_status status);

/* ---- connect.c ------------------------------------------------------------------------------- */

/* Makes `handle` and every connection that collectives need, or fails by the deadline. */
pst_status pst__nccl_connect(pst__nccl *own, const ncclUniqueId *id);
void pst__nccl_close_trial(pst__nccl *own);

/* ---- data.c ---------------------------------------------------------------------------------- */

size_t pst__nccl_staging_bytes(const pst__nccl *own, const pst_collective *collective);
/* Enqueues it. Inside. */
pst_status pst__nccl_enqueue(pst__nccl *own, const pst_collective *collective, pst_stream *stream);

#endif
