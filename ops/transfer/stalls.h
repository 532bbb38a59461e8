/* How long compute's stream of an asynchronous device waits for collectives: a timed event before
 * each wait and one behind it, read when the device has passed them. Nobody waits for that. */
#ifndef PST_OPS_TRANSFER_STALLS_H
#define PST_OPS_TRANSFER_STALLS_H

#include "base/heap.h"
#include "tracing/trace.h"

#include <penstock/device.h>

#define PST__STALLS 256u /* not read yet, at most; waits beyond are not measured */

typedef struct pst__stall {
    pst_event *begin, *end; /* made at its first use */
    const char *name;       /* interned */
    uint64_t ticket;
    uint64_t *total; /* nanoseconds that it is added to */
} pst__stall;

typedef struct pst__stalls {
    const pst__heap *heap;
    pst_device *device;
    pst_stream *compute;
    pst__trace *trace;
    int is_wanted;     /* whether tracing or not */
    pst__track *track; /* made at the first traced one */
    pst__stall *ring;  /* made at the first use */
    size_t first, count;
    uint64_t last_end; /* waits of a stream follow one another */
    uint64_t measured, missed;
} pst__stalls;

/* Whether they are wanted, and the device can tell. */
int pst__stalls_measure(const pst__stalls *stalls);
/* Before compute is given a wait. NULL: it is not measured. */
pst__stall *pst__stall_begin(pst__stalls *stalls, const char *name, uint64_t ticket,
                             uint64_t *total);
/* Behind it. */
void pst__stall_end(pst__stalls *stalls, const pst__stall *stall);
/* Reads what the device has passed. */
void pst__stalls_collect(pst__stalls *stalls);
void pst__stalls_free(pst__stalls *stalls);

#endif
