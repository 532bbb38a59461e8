/* Arrows: the recorded ends of edges, in pairs. */
#ifndef PST_TRACING_FLOW_H
#define PST_TRACING_FLOW_H

#include "tracing/snapshot.h"

typedef struct pst__flow_end {
    unsigned track; /* index */
    uint64_t time;
} pst__flow_end;

typedef struct pst__flow {
    pst__flow_end from, to;
} pst__flow;

typedef struct pst__flows {
    pst__flow *pairs;
    size_t count, room;
} pst__flows;

/* Pairs each end with the latest start of its id; an end without one is left out, and so is a start
 * that nobody ends. PST_ENOMEM leaves nothing to destroy. */
pst_status pst__flows_create(const pst__snapshot *snapshot, pst__flows *flows);
void pst__flows_destroy(const pst__heap *heap, pst__flows *flows);

#endif
