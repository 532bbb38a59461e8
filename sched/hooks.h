/* What is to be called when the runtime is poisoned: in order of registering, each at most once. */
#ifndef PST_SCHED_HOOKS_H
#define PST_SCHED_HOOKS_H

#include <ck_spinlock.h>
#include <penstock/runtime.h>

typedef struct pst__hook pst__hook;

typedef struct pst__hooks {
    ck_spinlock_t lock; /* of the list; not held while a hook runs */
    pst__hook *first;
} pst__hooks;

/* Calls those that were not called yet. The caller holds no lock. */
void pst__hooks_call(pst_runtime *runtime, pst_status status);

void pst__hooks_free(pst_runtime *runtime);

#endif
