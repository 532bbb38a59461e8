/* Tasks and gates are added to a growing graph one by one. */
#ifndef PST_SCHED_GROWING_H
#define PST_SCHED_GROWING_H

#include "sched/graph.h"

pst_status pst__grown_add(pst_graph *graph, const pst_task_options *options, pst_task *task);
pst_status pst__grown_add_gate(pst_graph *graph, const char *name, pst_task *gate);

#endif
