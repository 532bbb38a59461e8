/* What tracks that have ended have left of the present recording; for tracing's own files. */
#ifndef PST_TRACING_PAST_H
#define PST_TRACING_PAST_H

#include "tracing/copy.h"

/* What is kept at most, so that a recording over which threads and lanes come and go needs no
 * memory without end. */
#define PST__PAST_RINGS  4u /* as many records as so many rings have */
#define PST__PAST_TRACKS 1024u

typedef struct pst__past {
    pst__copy *first; /* the track that ended first */
    pst__copy **end;  /* where the next one goes, unless this is empty */
    size_t tracks, records;
} pst__past;

/* All of these: the trace's lock is held. */

/* Keeps what the track holds; beyond the bounds what ended first goes. What goes, and what there is
 * no memory for, counts as lost. */
void pst__past_keep(pst__trace *trace, const pst__track *track);
void pst__past_forget(pst__trace *trace);

#endif
