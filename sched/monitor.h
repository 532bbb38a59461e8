/* Who watches a runtime: observers of the program (a poison hook is called once, when the runtime
 * is poisoned; a health check again and again while something launched is pending), and the
 * watchdog, which looks at each lane's oldest launched task at intervals and reports one that is
 * the oldest for too many looks. It counts looks and not time, so that a process that was stopped
 * for a while is not at fault. */
#ifndef PST_SCHED_MONITOR_H
#define PST_SCHED_MONITOR_H

#include "sched/thread.h"

#include <ck_spinlock.h>
#include <penstock/runtime.h>
#include <pthread.h>

/* The least time between two rounds of the health checks. */
#define PST__HEALTH_CHECK_NS 20000000u

typedef struct pst__observer pst__observer;

/* For how many looks of the watchdog a count has not changed. */
typedef struct pst__lane_stall {
    uint64_t count;
    uint32_t looks; /* 0: there was nothing to look at */
} pst__lane_stall;

typedef struct pst__monitor {
    ck_spinlock_t lock;       /* of the observers; not held while one is called */
    pst__observer *observers; /* in order of registering */
    uint32_t check_count;     /* of the observers, the health checks */
    uint64_t next_check;      /* pst__now() */

    uint64_t interval_ns; /* between two looks of the watchdog; 0: there is none */
    int poisons;
    uint32_t is_looking; /* 1 while a thread looks: one at a time */
    uint64_t next_look;  /* a pump's, pst__now() */
    uint64_t reports;
    uint32_t has_thread, stop;
    uint32_t ended; /* the last word of the thread */
    pthread_t thread;
    pst__park park;
} pst__monitor;

void pst__monitor_init(pst_runtime *runtime, const pst_runtime_options *options);
/* No thread uses the runtime any more. */
void pst__monitor_free(pst_runtime *runtime);

/* Calls the poison hooks that were not called yet. The caller holds no lock. */
void pst__monitor_call_hooks(pst_runtime *runtime, pst_status status);
/* Calls the health checks if they are due. The caller holds no lock and owns no lane. */
void pst__monitor_check_health(pst_runtime *runtime);

/* The runtime is about to have workers: from now on the watchdog has a thread of its own. The
 * threads that create lanes may call it together. PST_ESYSTEM, with a text. */
pst_status pst__monitor_start(pst_runtime *runtime);
/* Ends the thread. PST_ETIMEDOUT after the runtime's deadline: it is in the user's log or hook. */
pst_status pst__monitor_stop(pst_runtime *runtime);

/* One look of the watchdog at all lanes, and the health checks, unless another thread looks just
 * now. The caller owns no lane. */
void pst__monitor_look(pst_runtime *runtime);
/* The same for threads that pump or wait, when the watchdog has no thread and a look is due. */
void pst__monitor_pump(pst_runtime *runtime);

#endif
