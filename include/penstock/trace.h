/* penstock/trace.h - recording what ran when, and writing it as Chrome trace JSON. */
#ifndef PENSTOCK_TRACE_H
#define PENSTOCK_TRACE_H

#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The flight record: beside what is recorded from a start to a stop, each lane and each thread that
 * waits keeps its newest records, always: tasks that have a name, from their launch to the moment
 * when their end was noticed (a task that ends in its `start`: when that began), and waits for
 * collectives. That costs such a task the record and one or two readings of the clock.
 * pst_runtime_options.flight_records says how many records there are, or that there are none; the
 * 2048 of 56 bytes that a lane or thread has by default are given back when it ends, but for what
 * it had recorded: of all those that have ended as much as four have is kept.
 *
 * A file of it (a dump) is a trace as pst_trace_write's, of what is newest, and has in its head
 * what the runtime has under way: unfinished tasks, waits, closed gates, the last launches of each
 * lane and where ranks are (pst_runtime_options.page, pst_runtime_follow). It is written when the
 * runtime is poisoned, before anything is canceled, and when a wait passes its deadline, if there
 * is a folder for it (pst_runtime_options.dump_folder, PENSTOCK_DUMP), no more than once a second;
 * and by this call. A rank has one file, folder/NAME-rankN.json, which is replaced as a whole.
 * `python -m penstock.trace hang FOLDER` reads the files of all ranks.
 *
 * `folder` is made if it is not there; NULL: that of the options. `cause` and `reason` (NULL: none)
 * stand in the file. Writes its path to `path`, cut at `size`, unless that is NULL. Any thread,
 * also while others wait or record; in a task's code its own lane's tasks are left out. It needs
 * memory for a copy of the records, and writes: so not in a signal's handler. PST_EINVAL (no
 * folder), PST_ENOMEM, PST_EIO. */
typedef enum pst_dump_cause {
    PST_DUMP_REQUEST = 0, /* somebody wants to know */
    PST_DUMP_SIGNAL,      /* the process is to end */
    PST_DUMP_DEADLINE,    /* a wait has taken too long */
    PST_DUMP_FAILURE,     /* this rank has failed */
} pst_dump_cause;
PST_API pst_status pst_trace_dump(pst_runtime *runtime, const char *folder, pst_dump_cause cause,
                                  const char *reason, char *path, size_t size);

/* Starts and stops recording on all threads of the runtime. Starting clears what was recorded. A
 * full ring overwrites its oldest records and counts them. One thread at a time. PST_EINVAL,
 * PST_ENOMEM, PST_ESTATE (it is started already, or is not).
 *
 * Memory: each lane, each worker and each other thread that records (64 such threads at a time) has
 * a ring of `trace_records` records of 56 bytes, 3.7 MB by default, whose pages cost nothing until
 * something is recorded in them. Lanes and workers get theirs here, or when they are created while
 * recording; a thread gets its own with its first record. pst_lane_destroy gives a lane's and its
 * worker's back; that of a thread that has ended goes when another thread records for the first
 * time, or a recording starts. What such lanes and threads recorded stays in the trace until the
 * next start: of the last 1024 of them, and as many records as four rings hold. */
PST_API pst_status pst_trace_start(pst_runtime *runtime);
PST_API pst_status pst_trace_stop(pst_runtime *runtime);

/* Writes what was recorded as Chrome trace JSON that Perfetto and chrome://tracing open: one
 * process (pid = rank + 1), a track a lane with its tasks, a track a worker with its launches,
 * flows for edges between lanes, counters. Where a device tells times (PST_DEVICE_TIMED_EVENTS), a
 * lane's tasks stand when its stream did them, and edges of growing graphs are left out there.
 * Needs memory for a copy of the records. Call after pst_trace_stop; beside threads that record it
 * writes what is whole. PST_EIO names the file and the reason, PST_ENOMEM. */
PST_API pst_status pst_trace_write(pst_runtime *runtime, const char *path);

/* The same, of the newest records: as many, from one moment on for all tracks, as make a file of
 * about `most_bytes` at most; 0: all. What is left out counts as overwritten in the file. */
PST_API pst_status pst_trace_write_newest(pst_runtime *runtime, const char *path,
                                          uint64_t most_bytes);

/* Since the last start, also while recording. Any thread. */
typedef struct pst_trace_stats {
    size_t size;          /* sizeof(pst_trace_stats); where it is not set, nothing is written */
    uint64_t records;     /* all, the overwritten ones included */
    uint64_t overwritten; /* lost to full rings, with lanes and threads that ended (see
                           * pst_trace_start), or on threads for which there was no ring */
} pst_trace_stats;
PST_API void pst_trace_get_stats(const pst_runtime *runtime, pst_trace_stats *stats);

/* The caller's own marks on the calling thread's track, and for a profiler, if one is attached:
 * slices from begin to end, which nest, and numbers over time. `name` must be a string that lives
 * until the trace is written. Nested deeper than 32 the inner ones are left out; an end without its
 * begin is ignored. Without a started trace they cost a branch. Any thread. They never block but
 * for a thread's first mark, which allocates its ring and may wait for a copy of the others' that
 * is being made; while 64 other threads have one, the thread's marks are lost, and each pair counts
 * once. */
PST_API void pst_trace_begin(pst_runtime *runtime, const char *name);
PST_API void pst_trace_end(pst_runtime *runtime);
PST_API void pst_trace_counter(pst_runtime *runtime, const char *name, int64_t value);

/* A slice whose times are known when it has ended, in nanoseconds of CLOCK_MONOTONIC, so that what
 * fails half-way leaves none open; on the calling thread's track, whichever thread began it. `name`
 * is copied: a lookup under a lock. Else as the marks. */
PST_API void pst_trace_slice(pst_runtime *runtime, const char *name, uint64_t begin, uint64_t end);

/* A profiler that NVTX attaches to the process, as Nsight Systems does (NVTX_INJECTION64_PATH), is
 * shown ranges of the domain "penstock" while they last: of the calling thread, the launch of each
 * task that has a name, and the caller's marks, also while no trace is started; of the process,
 * these. Nothing is loaded without that variable, and nobody is there where the library was built
 * without NVTX's headers. Any thread. */
PST_API int pst_profiler_is_attached(void);
/* Begins a range of the process; any thread ends it by the number that this returns. 0, and no
 * name is looked at, where no profiler is attached; to end that does nothing. */
PST_API uint64_t pst_profiler_begin(const char *name);
PST_API void pst_profiler_end(uint64_t range);

#ifdef __cplusplus
}
#endif
#endif
