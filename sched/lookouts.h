/* What is to be asked now and then whether it is still well: such as a communicator, whose peer may
 * have died while launched work waits for it and no thread asks. */
#ifndef PST_SCHED_LOOKOUTS_H
#define PST_SCHED_LOOKOUTS_H

#include <ck_spinlock.h>
#include <penstock/runtime.h>

/* Not more often than that. */
#define PST__LOOK_NS 20000000u

typedef struct pst__lookout pst__lookout;

typedef struct pst__lookouts {
    ck_spinlock_t lock; /* of the list and of `looking`; not held while a look runs */
    pst__lookout *first;
    int looking;   /* a thread goes through the list */
    uint64_t next; /* when a look is due, pst__now() */
} pst__lookouts;

/* Has call(context) called about every 20 ms while something launched is pending: by the worker or
 * the caller that asks the device for it, and at each look of the watchdog. One call at a time;
 * none any more when the runtime is poisoned, which is what `call` does when all is not well. It
 * does not block, wait, destroy, add or remove lookouts. PST_ENOMEM. Any thread. */
pst_status pst__lookouts_add(pst_runtime *runtime, void (*call)(void *context), void *context);
/* Takes that back; none is fine. When this returns the call is not running and does not come again.
 * Not from within one. Any thread. */
void pst__lookouts_remove(pst_runtime *runtime, void (*call)(void *context), const void *context);

/* Looks if one is due. The caller holds no lock and owns no lane. */
void pst__lookouts_take(pst_runtime *runtime);

void pst__lookouts_free(pst_runtime *runtime);

#endif
