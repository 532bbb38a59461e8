/* The check at sealing that nothing waits for itself. */
#ifndef PST_SCHED_CYCLE_H
#define PST_SCHED_CYCLE_H

#include "sched/graph.h"

/* PST_ECYCLE with the cycle's names in the error text. */
pst_status pst__graph_check_cycles(pst_graph *graph);

#endif
