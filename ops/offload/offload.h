/* Offload and reload: what is stored under a key, and the copies in flight. */
#ifndef PST_OPS_OFFLOAD_OFFLOAD_H
#define PST_OPS_OFFLOAD_OFFLOAD_H

#include "base/error.h"
#include "base/heap.h"

#include <penstock/offload.h>

typedef enum pst__direction { PST__STORE = 0, PST__LOAD, PST__DIRECTION_COUNT } pst__direction;

typedef struct pst__transfer pst__transfer;

/* What is stored under a key. One of another size is another one: the old one lives on until its
 * copies have ended. */
typedef struct pst__stored {
    uint64_t key;
    void *memory; /* on the host */
    size_t bytes;
    pst_lease lease;                           /* its memory; empty for memory of the caller's */
    size_t holders;                            /* the table, and each copy in flight */
    pst__transfer *last[PST__DIRECTION_COUNT]; /* in flight, or NULL */
    pst_status status[PST__DIRECTION_COUNT];   /* of the last one, once it has ended */
    int is_begun[PST__DIRECTION_COUNT];        /* there was one */
} pst__stored;

/* A copy in flight; pooled. */
struct pst__transfer {
    pst_offload *offload;
    pst__stored *stored;
    pst__direction direction;
    pst_copy copy;
    pst_event *ready; /* asynchronous devices: what compute was given before it */
    pst_task task;
    void *owner;
    int is_waited;     /* compute's stream comes behind it */
    pst_status status; /* the callback's, before `ended` */
    int ended;         /* atomic: the callback has run, the scheduler refers to this no more */
    pst__transfer *next;
};

/* One direction's lane with its copies, the oldest first. */
typedef struct pst__transfer_queue {
    pst_lane *lane;
    pst__transfer *oldest, *newest;
    pst__transfer *holding; /* the oldest whose owner's memory is not released */
} pst__transfer_queue;

struct pst_offload {
    pst_runtime *runtime;
    const pst__heap *heap;
    pst__error *error;
    char *name;
    pst_offload_options options;
    pst_device *device;
    pst_stream *compute;
    int asynchronous;
    pst_graph *graph;
    pst_arena *host;
    pst__transfer_queue queues[PST__DIRECTION_COUNT];
    pst_event *drained; /* asynchronous devices: the end of a lane */
    pst__transfer *spare;
    pst__stored **table; /* by key */
    size_t table_count, table_capacity;
    pst_offload_stats stats;
};

#define pst__offload_fail(offload, status, format, ...)                                            \
    pst__fail((offload)->error, (status), "offload '%s': " format, (offload)->name, __VA_ARGS__)

const char *pst__direction_name(pst__direction direction);

/* ---- offload.c: what is stored --------------------------------------------------------------- */

/* The holder lets go; the last one's memory goes back. */
void pst__stored_let_go(pst_offload *offload, pst__stored *stored);

/* ---- transfer.c: copies ---------------------------------------------------------------------- */

/* Submits a copy of what is stored: behind the copies of the other direction, and `after`, or, when
 * that is NULL, compute. */
pst_status pst__transfer_submit(pst_offload *offload, pst__stored *stored, pst__direction direction,
                                void *memory, pst_event *const *after, size_t after_count,
                                void *owner);
/* Compute waits for it. */
pst_status pst__transfer_wait(pst__transfer *transfer);
/* The calling thread does. */
pst_status pst__transfer_wait_end(const pst__transfer *transfer);
/* Takes back what has ended. */
void pst__transfer_reap(pst_offload *offload);
/* Waits until all have ended; 0 when some have not in time. */
int pst__transfer_drain(pst_offload *offload);
void pst__transfer_free_spare(pst_offload *offload);

#endif
