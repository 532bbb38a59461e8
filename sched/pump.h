/* Turns by threads that are not the lanes' workers: those that wait, and foreign loops (pst_fd,
 * pst_timeout, pst_run_once). */
#ifndef PST_SCHED_PUMP_H
#define PST_SCHED_PUMP_H

#include "sched/budget.h"
#include "sched/runtime.h"

/* Lanes that a thread serves which is not their worker. */
typedef enum pst__helped {
    PST__HELP_PUMPED = 1 << 0,  /* those that have no worker: they live by it */
    PST__HELP_WORKERS = 1 << 1, /* those that have one, and take help */
    PST__HELP_ALL = PST__HELP_PUMPED | PST__HELP_WORKERS
} pst__helped;

typedef struct pst__help {
    pst_lane *lane;
    int did;     /* something was done */
    int pending; /* a lane without a worker is to be asked again soon */
    int is_slow; /* the launches of some lane take long */
} pst__help;

/* One turn over those of the lanes that nobody owns. */
pst__help pst__runtime_help(pst_runtime *runtime, pst__helped which, const pst__budget *budget);

#endif
