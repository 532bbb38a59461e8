/* The trace of one runtime: a ring a track. A ring has one writer at a time, who takes no lock.
 *
 * Beside what a program records between a start and a stop there is the flight record: the newest
 * records of named tasks and of waits, always, in small rings of the same kind. It stands still
 * while the program records, and a dump has both. */
#ifndef PST_TRACING_TRACE_H
#define PST_TRACING_TRACE_H

#include "base/atomic.h"
#include "base/error.h"
#include "base/heap.h"

typedef struct pst__trace pst__trace;
typedef struct pst__track pst__track;
struct pst__json;

typedef enum pst__track_kind {
    PST__TRACK_LANE = 0, /* tasks from launch to completion */
    PST__TRACK_WORKER,   /* what a thread does: launches, waits, marks */
} pst__track_kind;

/* A trace that is not started. Its tracks may be added at any time, before or after
 * pst__trace_start. `world_size` 0 counts as 1. `records`: ring size a track, rounded up to a power
 * of two of which one stays free; 0: 65536. `flight_records`: the same of the flight record; 0:
 * there is none. PST_ENOMEM, PST_ESYSTEM (no thread-specific key left). */
pst_status pst__trace_create(const pst__heap *heap, pst__error *error, int rank, int world_size,
                             size_t records, size_t flight_records, pst__trace **trace);
/* No thread may record any more. NULL is fine. */
void pst__trace_destroy(pst__trace *trace);

/* See pst_trace_start, pst_trace_stop, pst_trace_write. Writing copies the rings first and is safe
 * while threads still record: records that change under the copy are left out. `most_bytes`: see
 * pst_trace_write_newest; 0: no limit. */
pst_status pst__trace_start(pst__trace *trace);
pst_status pst__trace_stop(pst__trace *trace);
pst_status pst__trace_write(pst__trace *trace, const char *path, uint64_t most_bytes);
/* Writes the flight record, and what is recorded: about `most_bytes` of what is newest, with what
 * `head` adds. Leaves no text: PST_EIO, with the reason in *error (an errno), PST_ENOMEM. */
typedef struct pst__trace_head {
    /* Adds members of the object "penstock", each after a comma. */
    void (*write)(const void *context, struct pst__json *json);
    const void *context;
} pst__trace_head;
pst_status pst__trace_dump(pst__trace *trace, const char *path, uint64_t most_bytes,
                           const pst__trace_head *head, int *error);
/* `records` counts all since the start, `overwritten` those of them that are lost. Any thread. */
void pst__trace_get_stats(pst__trace *trace, uint64_t *records, uint64_t *overwritten);

/* A copy of `text` that lives as long as the trace, for names whose owner may be gone when the
 * trace is written; equal texts share one copy. Takes a lock and looks the text up, for each
 * task of a growing graph while it is traced, once for each of a sealed one. NULL without memory.
 * Any thread. */
const char *pst__trace_intern(pst__trace *trace, const char *text);
/* The same for the name of a record; NULL, too, where only the flight record runs and the trace has
 * thousands of names already: a program that gives each task a name of its own goes on for ever. */
const char *pst__trace_name(pst__trace *trace, const char *text);

/* A track lives until pst__track_end, or as long as its trace. `name` is copied. Any thread. */
pst_status pst__track_create(pst__trace *trace, pst__track_kind kind, const char *name,
                             pst__track **track);
/* Gives the track back, with its ring: nobody records on it any more. What it holds of the present
 * recording stays in the trace, as long as it is not too much (state.h). Not for the tracks of
 * pst__track_of_thread. NULL is fine. Any thread. */
void pst__track_end(pst__track *track);

/* The calling thread's own worker track, made at its first use and given back at some time after
 * the thread has ended: when another thread makes one, or a recording starts. NULL without memory,
 * and while PST__TRACE_THREADS_MAX other threads have one, which counts as a lost record. Any
 * thread. */
#define PST__TRACE_THREADS_MAX 64
pst__track *pst__track_of_thread(pst__trace *trace);
/* The same if the thread has one already, else NULL. */
pst__track *pst__track_of_thread_if_any(pst__trace *trace);
/* Makes `track` the calling thread's own: what pst__track_of_thread returns on it. PST_ENOMEM. */
pst_status pst__track_bind(pst__track *track);

/* What is done with what happens now: a sum of these, 0 for nothing. */
typedef enum pst__trace_level {
    PST__TRACE_FLIGHT = 1, /* the flight record is kept */
    PST__TRACE_ALL = 2,    /* what there is is recorded: the trace is started */
    PST__TRACE_SHOWN = 4,  /* a profiler is shown tasks and marks as they begin and end */
} pst__trace_level;

/* The one load that tracing costs when nothing is recorded. The word is the first of a trace, so
 * that it needs no call. Acquire, partner: the release in pst__trace_start; who sees
 * PST__TRACE_ALL sees the rings that were allocated there. */
static inline int pst__trace_get_level(const pst__trace *trace) {
    return pst__load_acquire((const int *)(const void *)trace);
}
/* Whether the trace is started. */
static inline int pst__trace_on(const pst__trace *trace) {
    return (pst__trace_get_level(trace) & PST__TRACE_ALL) != 0;
}
/* Whether anything is recorded. */
static inline int pst__trace_keeps(const pst__trace *trace) {
    return (pst__trace_get_level(trace) & (PST__TRACE_FLIGHT | PST__TRACE_ALL)) != 0;
}

/* Records; the caller has checked pst__trace_on, or pst__trace_keeps where `name` lives as long as
 * the trace. A NULL track is fine: nothing is recorded. `name`
 * must live until the trace is written (pst__trace_intern helps). Times are pst__now() nanoseconds.
 * One writer a track at a time. Slices of one track nest or follow one another; on an asynchronous
 * device's lane they may overlap. */
void pst__trace_slice(pst__track *track, const char *name, uint64_t begin, uint64_t end,
                      uint64_t ticket, uint64_t bytes);
/* The same for a collective that went `path`, which lives as long as `name`; NULL: unknown. */
void pst__trace_collective(pst__track *track, const char *name, const char *path, uint64_t begin,
                           uint64_t end, uint64_t ticket, uint64_t bytes);
/* One end of an edge. `time` lies in a slice of the track (begin <= time < end) to which the arrow
 * is drawn. An end belongs to the latest start of the same id before it, so one start serves
 * several ends and ids may be used again; what finds no partner is not written. */
void pst__trace_flow(pst__track *track, uint64_t id, uint64_t time, int is_end);
void pst__trace_count(pst__track *track, const char *name, uint64_t time, int64_t value);

/* A slice from mark to mark: begin and end nest, on the track's own thread only. Deeper than
 * PST__TRACE_MARKS_MAX the inner ones are left out; so is an end whose begin was not recorded. */
#define PST__TRACE_MARKS_MAX 32
void pst__trace_mark_begin(pst__track *track, const char *name);
void pst__trace_mark_end(pst__track *track);

#endif
