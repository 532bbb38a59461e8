/* The watchdog: looks at each lane's oldest launched task at intervals, and reports one that is the
 * oldest for too many looks. It counts looks and not time, so that a process that was stopped for a
 * while is not at fault. */
#ifndef PST_SCHED_WATCHDOG_H
#define PST_SCHED_WATCHDOG_H

#include "sched/park.h"

#include <penstock/runtime.h>
#include <pthread.h>

/* What the watchdog remembers of a lane: for how many looks a count has stood still. */
typedef struct pst__still {
    uint64_t count;
    uint32_t looks; /* 0: there was nothing to look at */
} pst__still;

typedef struct pst__watchdog {
    uint64_t interval_ns; /* between two looks; 0: there is no watchdog */
    int poisons;
    uint32_t looking; /* 1 while a thread looks: one at a time */
    uint64_t next;    /* a pump's next look, pst__now() */
    uint64_t reports;
    uint32_t has_thread, stop;
    uint32_t ended; /* the last word of the thread */
    pthread_t thread;
    pst__park park;
} pst__watchdog;

void pst__watchdog_init(pst_runtime *runtime, const pst_runtime_options *options);

/* The runtime is about to have workers: from now on the watchdog has a thread of its own. The
 * threads that create lanes may call it together. PST_ESYSTEM, with a text. */
pst_status pst__watchdog_start(pst_runtime *runtime);
/* Ends the thread. PST_ETIMEDOUT after the runtime's deadline: it is in the user's log or hook. */
pst_status pst__watchdog_stop(pst_runtime *runtime);

/* One look at all lanes, unless another thread looks just now. The caller owns no lane. */
void pst__watchdog_look(pst_runtime *runtime);

/* The same for threads that pump or wait, when there is no other thread for it and a look is due.
 */
void pst__watchdog_pump(pst_runtime *runtime);

#endif
