/* A runtime's poison, and the program's functions that have to do with it, its observers: a poison
 * hook is called once, when the runtime is poisoned; a health check again and again while something
 * launched is pending, and may poison. */
#ifndef PST_SCHED_POISON_H
#define PST_SCHED_POISON_H

#include "sched/runtime.h"

/* The least time between two rounds of the health checks. */
#define PST__HEALTH_CHECK_NS 20000000u

/* Poisons without a text and without calling the hooks. 0 if it was poisoned already. */
int pst__runtime_stop(pst_runtime *runtime, pst_status status);

/* Calls the poison hooks that were not called yet. The caller holds no lock. */
void pst__hooks_call(pst_runtime *runtime, pst_status status);
/* Calls the health checks if they are due. The caller holds no lock and owns no lane. */
void pst__health_check(pst_runtime *runtime);

/* No thread uses the runtime any more. */
void pst__observers_free(pst_runtime *runtime);

#endif
