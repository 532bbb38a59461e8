/* Waiting for something that other threads or lanes bring about, and helping meanwhile. */
#ifndef PST_SCHED_WAIT_H
#define PST_SCHED_WAIT_H

#include "sched/graph.h"

/* Serves lanes until `holds` answers other than 0. PST_OK, PST_ETIMEDOUT past the runtime's
 * deadline, or the status of a poisoned runtime. `holds` must be cheap. */
pst_status pst__wait_until(pst_runtime *runtime, int (*holds)(const void *argument),
                           const void *argument);

#endif
