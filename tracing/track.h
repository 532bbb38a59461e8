/* The tracks of a trace; for tracing's own files. The trace's lock is held for all of these. */
#ifndef PST_TRACING_TRACK_H
#define PST_TRACING_TRACK_H

#include "tracing/state.h"

/* With its ring, if the trace records. NULL without memory, with a text. */
pst__track *pst__track_add(pst__trace *trace, pst__track_kind kind, const char *name);
/* Gives the track its ring if it has none. PST_ENOMEM names the track. */
pst_status pst__track_prepare(pst__track *track);
/* Takes the track, which has no writer any more, out of the trace, but for what it holds. */
void pst__track_remove(pst__track *track);
/* Frees a track that is in no trace any more, or whose trace goes. */
void pst__track_free(pst__track *track);

/* Removes the tracks of threads that have ended. `caller` is the calling thread's number if it has
 * no track, else 0. */
void pst__threads_reap(pst__trace *trace, pid_t caller);

#endif
