/* The watchdog looks at each lane's oldest launched task at intervals and reports one that is the
 * oldest for too many looks. It counts looks and not time, so that a process that was stopped for a
 * while is not at fault. Where the runtime has a page, its thread visits the lanes more often, to
 * post what is on them; then every so many visits are a look. */
#ifndef PST_SCHED_WATCHDOG_H
#define PST_SCHED_WATCHDOG_H

#include "sched/runtime.h"

void pst__watchdog_init(pst_runtime *runtime, const pst_runtime_options *options);

/* The runtime is about to have workers: from now on the watchdog has a thread of its own. The
 * threads that create lanes may call it together. PST_ESYSTEM, with a text. */
pst_status pst__watchdog_start(pst_runtime *runtime);

/* One look at all lanes, and the health checks, unless another thread looks just now. The caller
 * owns no lane. */
void pst__watchdog_look(pst_runtime *runtime);
/* A visit, for threads that pump or wait, when the watchdog has no thread and one is due. */
void pst__watchdog_pump(pst_runtime *runtime);

#endif
