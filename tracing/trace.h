/* The trace of one runtime: a ring a track. A ring has one writer at a time and no lock. */
#ifndef PST_TRACING_TRACE_H
#define PST_TRACING_TRACE_H

#include "base/error.h"
#include "base/heap.h"

typedef struct pst__trace pst__trace;
typedef struct pst__track pst__track;

typedef enum pst__track_kind {
    PST__TRACK_LANE = 0, /* tasks from launch to completion */
    PST__TRACK_WORKER,   /* what a thread does: launches, waits, marks */
} pst__track_kind;

/* A disabled trace. Its tracks may be added at any time, before or after pst__trace_start. */
pst_status pst__trace_create(const pst__heap *heap, pst__error *error, int rank, int world_size,
                             size_t records, pst__trace **trace);
void pst__trace_destroy(pst__trace *trace);
pst_status pst__trace_start(pst__trace *trace);
pst_status pst__trace_stop(pst__trace *trace);
pst_status pst__trace_write(pst__trace *trace, const char *path);
void pst__trace_get_stats(const pst__trace *trace, uint64_t *records, uint64_t *overwritten);

/* A track lives as long as its trace. `name` is copied. Any thread. */
pst_status pst__track_create(pst__trace *trace, pst__track_kind kind, const char *name,
                             pst__track **track);
/* The calling thread's own worker track, made at its first use; NULL without memory. Any thread. */
pst__track *pst__track_of_thread(pst__trace *trace);

/* 1 while recording: the one branch that tracing costs when it is off. */
int pst__trace_on(const pst__trace *trace);

/* Records; the caller has checked pst__trace_on. `name` must live until the trace is written. Times
 * are pst__now() nanoseconds. Slices of one track nest or follow one another. One writer a track at
 * a time. */
void pst__trace_slice(pst__track *track, const char *name, uint64_t begin, uint64_t end,
                      uint64_t ticket, uint64_t bytes);
/* An edge: from a slice that contains `time` on one track to one on another; same id on both. */
void pst__trace_flow(pst__track *track, uint64_t id, uint64_t time, int is_end);
void pst__trace_count(pst__track *track, const char *name, uint64_t time, int64_t value);

#endif
