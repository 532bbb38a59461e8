/* A launch begins, its gates are opened, it is canceled. */
#ifndef PST_SCHED_LAUNCH_H
#define PST_SCHED_LAUNCH_H

#include "sched/graph.h"

/* Ends what is not launched of the current launch with `status`. Any thread. */
void pst__graph_cancel(pst_graph *graph, pst_status status);

#endif
