/* What a track holds, copied: it outlives the track, and the export works on it. */
#ifndef PST_TRACING_COPY_H
#define PST_TRACING_COPY_H

#include "base/heap.h"
#include "tracing/ring.h"
#include "tracing/trace.h"

/* One block of memory. */
typedef struct pst__copy {
    struct pst__copy *next; /* of the list that it is in */
    size_t bytes;           /* of the block */
    const char *name;       /* the track's, behind the records */
    unsigned index;
    pst__track_kind kind;
    size_t count;
    pst__record records[];
} pst__copy;

/* Beside the track's writer: the records that are whole, oldest first. The trace's lock is held.
 * NULL without memory. */
pst__copy *pst__copy_of_track(const pst__track *track);
pst__copy *pst__copy_of_copy(const pst__heap *heap, const pst__copy *copy);
void pst__copy_free(const pst__heap *heap, pst__copy *copy);

#endif
