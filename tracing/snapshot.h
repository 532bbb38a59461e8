/* A copy of what all tracks hold, put in order for the export. */
#ifndef PST_TRACING_SNAPSHOT_H
#define PST_TRACING_SNAPSHOT_H

#include "tracing/state.h"

/* What the layout makes of records besides the kinds of ring.h. */
#define PST__RECORD_OVERLAP (PST__RECORD_COUNT + 1u) /* a slice that neither nests nor follows */
#define PST__RECORD_DROPPED (PST__RECORD_COUNT + 2u) /* a flow's end that lies in no slice */

/* Records stand by begin; an outer slice before the inner, slices before the rest. */
typedef struct pst__snapshot {
    const pst__heap *heap;
    pst__copy *first; /* tracks that have ended, in that order, then the others by age */
} pst__snapshot;

/* PST_ENOMEM leaves nothing to destroy. */
pst_status pst__snapshot_create(pst__trace *trace, pst__snapshot *snapshot);
void pst__snapshot_destroy(pst__snapshot *snapshot);

/* Sorts in place, without memory. */
void pst__records_sort(pst__record *records, size_t count,
                       int (*before)(const pst__record *, const pst__record *));

#endif
