/* A track and its ring; for tracing's own files. */
#ifndef PST_TRACING_TRACK_H
#define PST_TRACING_TRACK_H

#include "tracing/state.h"

/* Gives the track its ring if it has none. The trace's lock is held. PST_ENOMEM names the track. */
pst_status pst__track_prepare(pst__track *track);
void pst__track_destroy(pst__track *track);

#endif
