/* What others see of the lanes: see penstock/page.h. */
#ifndef PST_SCHED_POST_H
#define PST_SCHED_POST_H

#include "sched/runtime.h"

/* Writes what is on the lanes to the runtime's page, which it has. One thread at a time, which owns
 * no lane. */
void pst__post_lanes(pst_runtime *runtime);

#endif
