/* What a task of a sealed graph waits for in the end: against the edges and the order of lanes. */
#ifndef PST_SCHED_CAUSE_H
#define PST_SCHED_CAUSE_H

#include "sched/wait.h"

/* The unfinished task that the one asked about waits for and that itself waits for none of its
 * graph; the one asked about if that is so of itself, or without memory. Takes time and memory in
 * proportion to the graph. */
pst__node *pst__cause_of(const pst__question *asked);

/* Of the node in the launch asked about. */
int pst__cause_is_launched(const pst__question *asked, pst__node *node);

#endif
