/* penstock/trace.h - recording what ran when, and writing it as Chrome trace JSON. */
#ifndef PENSTOCK_TRACE_H
#define PENSTOCK_TRACE_H

#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Starts and stops recording on all threads of the runtime. Starting clears what was recorded.
 * Rings are allocated here, never while recording; a full ring overwrites its oldest records and
 * counts them. One thread at a time. PST_EINVAL, PST_ENOMEM, PST_ESTATE (it is started already, or
 * is not). */
PST_API pst_status pst_trace_start(pst_runtime *runtime);
PST_API pst_status pst_trace_stop(pst_runtime *runtime);

/* Writes what was recorded as Chrome trace JSON that Perfetto and chrome://tracing open: one
 * process (pid = rank + 1), a track a lane with its tasks, a track a worker with its launches,
 * flows for edges between lanes, counters. Where a device tells times (PST_DEVICE_TIMED_EVENTS), a
 * lane's tasks stand when its stream did them, and edges of growing graphs are left out there.
 * Needs memory for a copy of the records. Call after pst_trace_stop; beside threads that record it
 * writes what is whole. PST_EIO names the file and the reason, PST_ENOMEM. */
PST_API pst_status pst_trace_write(pst_runtime *runtime, const char *path);

/* Since the last start, also while recording. Any thread. */
typedef struct pst_trace_stats {
    uint64_t records;     /* all, the overwritten ones included */
    uint64_t overwritten; /* lost to full rings, or to threads beyond the 64th that recorded */
} pst_trace_stats;
PST_API void pst_trace_get_stats(const pst_runtime *runtime, pst_trace_stats *stats);

/* The caller's own marks on the calling thread's track: slices from begin to end, which nest, and
 * numbers over time. `name` must be a string that lives until the trace is written. Nested deeper
 * than 32 the inner ones are left out; an end without its begin is ignored. Without a started trace
 * they cost a branch. Any thread, never block; a thread's first mark allocates its ring. */
PST_API void pst_trace_begin(pst_runtime *runtime, const char *name);
PST_API void pst_trace_end(pst_runtime *runtime);
PST_API void pst_trace_counter(pst_runtime *runtime, const char *name, int64_t value);

#ifdef __cplusplus
}
#endif
#endif
