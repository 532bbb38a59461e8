/* The communicator `nccl`, its parts: nccl.c (life: create, status, abort, destroy), nccl_connect.c
 * (its begin), nccl_calls.c (entering NCCL and what it answers), nccl_data.c (collectives as calls
 * of NCCL), nccl_memory.c (registered memory). */
#ifndef PST_OPS_NCCL_H
#define PST_OPS_NCCL_H

#include "base/heap.h"
#include "ops/audit.h"
#include "ops/nccl_library.h"

#include <penstock/nccl.h>

#define PST__NCCL_TEXT 768

/* In pst__nccl.gate: no thread may enter any more. Below it: how many threads are inside. */
#define PST__NCCL_CLOSED 0x80000000u

struct pst_nccl_registration {
    void *handle;        /* of PST_NCCL_LOCAL */
    ncclWindow_t window; /* of PST_NCCL_SYMMETRIC */
    struct pst_nccl_registration *next;
};

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
    pst_nccl_sum sum;
    int nonblocking;
    uint64_t deadline_ns;
    pst__audit *audit; /* NULL: none */

    uint32_t gate;      /* who may call NCCL with `handle`; see pst__nccl_enter */
    int status;         /* the first error, for good */
    ck_spinlock_t lock; /* of the two texts; held for a copy, on error paths */
    char text[PST__NCCL_TEXT], reported[PST__NCCL_TEXT];

    int connecting; /* a thread connects the ranks */
    int ended;      /* a thread has ended NCCL's communicator */
    int aborts;     /* by ncclCommAbort */
    ncclConfig_t config;
    ncclUniqueId id;
    pst__nccl_trial trial;
    pst_status connected; /* what the connecting thread has come to */

    pst_nccl_registration *registrations;
    pst_cast *casts;      /* scratch of `start` */
    const void **sources; /* the same: one a rank */
    size_t cast_capacity;
} pst__nccl;

/* ---- nccl_calls.c ---------------------------------------------------------------------------- */

/* Lets the caller call NCCL until pst__nccl_leave; the first error if there was one, or
 * PST_ECANCELED when the communicator is being ended. Any thread, never blocks. */
pst_status pst__nccl_enter(pst__nccl *own);
void pst__nccl_leave(pst__nccl *own);
/* 1 when this call has closed it: nobody enters any more. */
int pst__nccl_close(pst__nccl *own);
int pst__nccl_is_closed(pst__nccl *own);
/* Of a closed one: until nobody is inside, or at most `nanoseconds`. */
void pst__nccl_wait_empty(pst__nccl *own, uint64_t nanoseconds);

/* Makes `status` the communicator's for good, unless it has one; returns its status. */
pst_status pst__nccl_fail(pst__nccl *own, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* What NCCL has answered to `call`, about `what`: PST_OK, or the error, which is final. Inside. */
pst_status pst__nccl_answer(pst__nccl *own, ncclResult_t result, const char *call,
                            const char *what);

/* Waits until what is in progress on `handle` has been done, the communicator is closed, or the
 * deadline is past. Inside. */
pst_status pst__nccl_settle(pst__nccl *own, ncclResult_t result, const char *call,
                            const char *what);

/* ---- nccl.c ---------------------------------------------------------------------------------- */

/* What has happened to NCCL meanwhile: PST_OK, or the first error. Inside. */
pst_status pst__nccl_look(pst__nccl *own);
/* See the table's abort. */
pst_status pst__nccl_abort(pst__nccl *own, pst_status status);

/* ---- nccl_connect.c -------------------------------------------------------------------------- */

/* Makes `handle` and every connection that collectives need, or fails by the deadline. */
pst_status pst__nccl_connect(pst__nccl *own, const pst_nccl_options *options,
                             const ncclUniqueId *id);
void pst__nccl_close_trial(pst__nccl *own);

/* ---- nccl_data.c ----------------------------------------------------------------------------- */

size_t pst__nccl_staging_bytes(const pst__nccl *own, const pst_collective *collective);
/* Enqueues it. Inside. */
pst_status pst__nccl_enqueue(pst__nccl *own, const pst_collective *collective, pst_stream *stream);

#endif
