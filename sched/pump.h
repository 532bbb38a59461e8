/* Lanes without a thread of their own, and what calls the thread that pumps them back. */
#ifndef PST_SCHED_PUMP_H
#define PST_SCHED_PUMP_H

#include "sched/budget.h"

#include <penstock/graph.h>

/* `signalled` is 1 from a notification until a turn for which it was taken back has found nothing
 * to do. The descriptor is readable then; it may be readable once too often, never too seldom. */
typedef struct pst__pump {
    uint32_t signalled;
    int descriptor; /* an eventfd; -1 until somebody asks for it */
    uint64_t poll;  /* low half: ns until what is launched is worth asking again, 0: nothing is;
                       high half: counts the changes */
} pst__pump;

void pst__pump_init(pst__pump *pump);
void pst__pump_close(pst__pump *pump);

/* There is something for a lane that has no worker. The caller has published it, and a store-load
 * fence lies between that and this call. Any thread, never blocks. */
void pst__pump_signal(pst__pump *pump);

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
