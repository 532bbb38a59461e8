/* The flight record on its way to a file: the newest records of the trace, and what the runtime has
 * under way: its tasks, its waits, its closed gates. */
#ifndef PST_SCHED_FLIGHT_H
#define PST_SCHED_FLIGHT_H

#include "sched/graph.h"

#include <penstock/trace.h>

/* A wait that has come to sleep. It lies on its thread's stack. */
struct pst__long_wait {
    pst__long_wait *next, *previous;
    pst_waiting what;
    pst__question asked; /* its node is NULL where it is for a whole launch */
    uint64_t begin;      /* pst__now(); 0: it is not on the runtime's list */
    pst_runtime *runtime;
};

/* Puts the wait on the list, if it is not there. The calling thread waits. */
void pst__flight_enter(pst__long_wait *wait);
/* Takes it off. */
void pst__flight_leave(pst__long_wait *wait);

/* PST_ENOMEM leaves what pst__flight_free frees. */
pst_status pst__flight_init(pst_runtime *runtime, const pst_runtime_options *options);
void pst__flight_free(pst_runtime *runtime);

/* Something has failed for good, before anything is canceled: writes the record, if there is a
 * folder for it, but not more than once a second. Leaves no error text, and says in the log where
 * it is. Any thread, which may own lanes. */
void pst__flight_failed(pst_runtime *runtime, pst_dump_cause cause, pst_status status,
                        const char *reason);

#endif
