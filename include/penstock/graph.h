/* penstock/graph.h - lanes, tasks, gates, edges, graphs and launches.
 *
 * A graph is a DAG of tasks and gates. A *sealed* graph is built, checked once and launched any
 * number of times; a *growing* graph takes tasks one by one, each may start at once. A task is
 * ready when its predecessors are launched (not done): the device keeps the order from there on,
 * by stream order on one lane and by events between lanes.
 *
 *   pending -> ready -> launched -> done | failed,  pending -> canceled
 */
#ifndef PENSTOCK_GRAPH_H
#define PENSTOCK_GRAPH_H

#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- lanes ------------------------------------------------------------------------------ */

typedef struct pst_lane pst_lane;

typedef enum pst_lane_mode {
    PST_LANE_WORKER = 0, /* a worker thread of its own, on which its tasks run (see takes_help) */
    PST_LANE_SHARED,     /* served by the worker of `share_with`; such lanes take turns of 0.1 ms */
    PST_LANE_PUMPED,     /* served by pst_run_once and by threads that wait */
    PST_LANE_BORROWED    /* the caller's own stream ("compute"): no tasks, only events */
} pst_lane_mode;

typedef enum pst_lane_order {
    PST_LANE_BY_READINESS = 0, /* tasks launch in the order in which they get ready */
    PST_LANE_BY_SUBMISSION,    /* tasks launch in the order in which they were added (tickets):
                                  the same on all ranks whatever the timing */
    PST_LANE_BY_PRIORITY       /* of the tasks that are ready when the lane takes its next one, the
                                  most urgent launches; in the order of getting ready among equals */
} pst_lane_order;

/* Priorities of tasks on lanes BY_PRIORITY: 0 is normal, lower is more urgent. */
#define PST_PRIORITY_MOST_URGENT  (-4)
#define PST_PRIORITY_LEAST_URGENT 3

typedef struct pst_lane_options {
    size_t size;        /* sizeof(pst_lane_options) */
    const char *name;   /* "gather"; copied; shown in errors and traces; required */
    pst_device *device; /* NULL: the runtime's host device; must outlive the runtime */
    pst_stream *stream; /* NULL: a stream of the lane's own, on BORROWED lanes the device's default
                           (host: the calling thread). Else the caller's, who has wrapped it and
                           destroys it after the runtime */
    pst_lane_mode mode;
    pst_lane *share_with; /* SHARED: a lane in mode WORKER */
    pst_lane_order order;
    int priority; /* of the lane's own stream */
    /* BY_SUBMISSION: this lane and that one, which is BY_SUBMISSION too, have one order: a task of
     * either launches when all that were added before it to either are launched. So the launches of
     * several communicators come in one order, the same on all ranks that add alike. Any number of
     * lanes can join, and they are served together, as that lane is: `mode` and `share_with` stay
     * zero. */
    pst_lane *order_with;
    /* WORKER and SHARED: threads that wait or pump serve the lane, too, when its worker is not at
     * it: so a launch need not wait until the worker wakes up. Its tasks then run on any thread
     * that waits for something of this runtime, one at a time, and beside those of other lanes of
     * the same worker. 0: they run on the worker alone. */
    int takes_help;
} pst_lane_options;

/* Any thread; never waits for a task. PST_EINVAL (a device without a required slot is named, too),
 * PST_ENOMEM, PST_ESYSTEM, PST_EUNSUPPORTED (a device of another interface version), and what the
 * device returns. */
PST_API pst_status pst_lane_create(pst_runtime *runtime, const pst_lane_options *options,
                                   pst_lane **lane);
/* Destroys a lane and ends its worker; with its runtime it is destroyed, too. NULL is fine.
 * PST_EBUSY names what holds it: tasks of a growing graph that have not ended, a sealed graph that
 * has tasks on it (which is destroyed first), a gate's event, lanes that share its worker or its
 * order. PST_ETIMEDOUT after the runtime's deadline: its thread is in a task of another lane; the
 * lane stays. PST_ESTATE in a task's start, test or callback. No other thread may use the lane. */
PST_API pst_status pst_lane_destroy(pst_lane *lane);
PST_API pst_stream *pst_lane_stream(const pst_lane *lane);
PST_API const char *pst_lane_name(const pst_lane *lane);

/* Tells the lane's worker that a pending `test` is worth asking again (a communicator's completion
 * callback calls it, so nobody has to poll fast). Any thread, never blocks. */
PST_API void pst_lane_wake(pst_lane *lane);

/* ---- building graphs -------------------------------------------------------------------- */

typedef struct pst_graph pst_graph;

/* A task or gate of a graph: an index in sealed graphs, opaque in growing ones. Belongs to the
 * graph that returned it. Zeroed is "no task". */
typedef struct pst_task {
    pst_graph *graph;
    uint64_t id;
} pst_task;

typedef enum pst_graph_kind { PST_GRAPH_SEALED = 0, PST_GRAPH_GROWING } pst_graph_kind;

/* Called once for each task that ends, with PST_OK or the task's own error if it ran; a task that
 * never ran gets PST_ECANCELED when its launch was canceled, and PST_ESKIPPED when a task before it
 * failed or the runtime was poisoned (pst_task_test and the waits return that error). Runs on the
 * thread that serves the lane: its worker, or one that pumps or waits. The launch counts the task
 * as launched and ended by then, so that the last callback of a launch may launch the graph again.
 * It must return (an exception or the end of its thread fails the task, and goes on), and must not
 * block, wait or destroy the graph; it may add tasks, launch, open gates, cancel and poison. A wait
 * in it is refused with PST_ESTATE, and so it is in `start` and `test`. */
typedef void (*pst_task_callback)(void *argument, pst_status status);

typedef struct pst_task_options {
    size_t size;           /* sizeof(pst_task_options) */
    const char *name;      /* for errors and traces (which copy it); must live as long as the graph;
                              NULL: "" */
    pst_lane *lane;        /* where it runs; required, and not BORROWED */
    pst_work work;         /* work.start == NULL makes a task that only orders others */
    const pst_task *after; /* predecessors: edges added with the task */
    size_t after_count;
    pst_event *const *after_events; /* events of the lane's device that its stream waits for first
                                       (at most 4; a lease's last use); must live until it ends */
    size_t after_event_count;
    pst_task_callback done; /* (optional) */
    void *done_argument;
    uint64_t ticket;  /* shown in traces and errors; 0: none */
    uint64_t bytes;   /* shown in traces; 0: none */
    int priority;     /* on lanes BY_PRIORITY, see there; 0 on all others */
    const char *path; /* of a task with a ticket, shown in traces: which way a collective goes.
                         Lives as long as the graph; NULL: none */
} pst_task_options;

/* `graph` is owned by the caller until destroyed; it is used by one thread at a time while it is
 * built. `name` is copied; NULL: "". Any thread. PST_EINVAL, PST_ENOMEM. */
PST_API pst_status pst_graph_create(pst_runtime *runtime, pst_graph_kind kind, const char *name,
                                    pst_graph **graph);

/* Destroys a graph; handles of its tasks, released or not, are void from then on. PST_EBUSY while
 * tasks or gates of a launch are unfinished (wait first, or cancel and wait); not after a wait or a
 * callback has told that all have ended: then the call waits for callbacks that still run.
 * PST_ETIMEDOUT after the runtime's deadline: one has not returned, and the graph stays. PST_ESTATE
 * in a start, test or callback of this graph. NULL is fine. No other thread may be in a call on
 * this graph, but for one that has opened a gate: it may still be on its way out of pst_gate_open.
 */
PST_API pst_status pst_graph_destroy(pst_graph *graph);

/* Adds a task. In a sealed graph: while building only (PST_ESTATE later). In a growing graph the
 * task is submitted by this call and may start, end and call back before it returns; `task` may be
 * NULL when nobody asks for it, otherwise the caller owns the handle and gives it back with
 * pst_task_release. One thread at a time adds to a graph. PST_EINVAL names what is wrong (a
 * predecessor of another graph, a lane of another runtime, a BORROWED lane), PST_ENOMEM, and what
 * the device returns. */
PST_API pst_status pst_graph_add(pst_graph *graph, const pst_task_options *options, pst_task *task);

/* Adds a gate: a task with no work and no lane, opened from outside with pst_gate_open. `name`
 * lives as long as the graph; NULL: "". In a sealed graph pst_graph_add_edge can give it
 * predecessors, in a growing one it has none, and its handle is given back with pst_task_release.
 * PST_EINVAL, PST_ESTATE, PST_ENOMEM, and a poisoned runtime's status in a growing graph. */
PST_API pst_status pst_graph_add_gate(pst_graph *graph, const char *name, pst_task *gate);

/* Adds an edge of a graph that is being built: `to` starts after `from`. Both must be of this
 * graph: PST_EINVAL otherwise. Growing graphs take their edges with the task. Also PST_ESTATE when
 * the graph is sealed already or growing, PST_ENOMEM. */
PST_API pst_status pst_graph_add_edge(pst_graph *graph, pst_task from, pst_task to);

/* The outer thread's own program, in order: "here I open this gate", "here I wait for this task".
 * Sealing checks it together with the edges, so that a wait which can only end after a later
 * opening is found as a cycle and not as a hang. Optional: a graph without these lines is checked
 * for its edges alone. PST_EINVAL (no gate, or no task, of this graph), PST_ESTATE, PST_ENOMEM. */
PST_API pst_status pst_graph_outer_open(pst_graph *graph, pst_task gate);
PST_API pst_status pst_graph_outer_wait(pst_graph *graph, pst_task task);

/* Checks and freezes a graph: PST_ECYCLE with a text that names the cycle's tasks in order, and the
 * graph can still be changed. Lanes BY_SUBMISSION take part: the order of adding is an order of
 * launching there, of lanes with one order together. A sealed graph can be launched. Also
 * PST_ENOMEM, PST_ESTATE. */
PST_API pst_status pst_graph_seal(pst_graph *graph);
PST_API size_t pst_graph_size(const pst_graph *graph); /* tasks and gates */

/* The ticket that traces and errors show for a task of a sealed graph from now on: set it before
 * the task can start, behind a gate, or between launches. PST_EINVAL: no task of a sealed graph, or
 * one that was added without a ticket. Any thread, never blocks. */
PST_API pst_status pst_task_set_ticket(pst_task task, uint64_t ticket);

/* Gives back the caller's handle of a growing graph's task, once. Zeroed handles and those of
 * sealed graphs are fine. Any thread, never blocks. */
PST_API void pst_task_release(pst_task task);

/* ---- running ---------------------------------------------------------------------------- */

/* One run of a sealed graph; number counts from 1. For growing graphs (which run once): {graph, 0}.
 */
typedef struct pst_launch {
    pst_graph *graph;
    uint64_t number;
} pst_launch;

/* Starts run k+1. PST_EBUSY (without an error text) until every task of run k is launched and every
 * task of run k-1 has ended, PST_ESTATE when not sealed, or a poisoned runtime's status. What has
 * been seen to be launched or to have ended, by a wait, a test or a callback, is counted: so it is
 * not busy after pst_launch_wait, nor after pst_task_wait on all tasks without successors, nor in
 * the callback of a run's last task. On lanes BY_SUBMISSION a launch comes to all its lanes at
 * once: launches of several threads stand in one order on all of them. Does not allocate. `launch`
 * may be NULL. One thread at a time. */
PST_API pst_status pst_graph_launch(pst_graph *graph, pst_launch *launch);

/* Makes a sealed graph a part of what the caller captures: `stream` is a native stream of `device`
 * under capture (a CUDA graph's), and gets the tasks behind what it was given so far and before
 * what it is given next. The calling thread calls each task's `start` once, and no worker: a launch
 * of the captured graph is then a run of this one. It can still be launched by itself, not at the
 * same time. after_events count as done. PST_EUNSUPPORTED names what cannot be captured (a gate, a
 * task with a callback or on a lane of another device; a device that captures nothing), PST_ESTATE
 * (not sealed; in a task's start, test or callback), PST_EBUSY (a launch has not ended; another
 * capture on the device), PST_ETIMEDOUT (a lane's task does not come back from its start),
 * PST_ENOMEM, and what tasks and device return; then the caller gives its capture up. One thread at
 * a time. */
PST_API pst_status pst_graph_capture(pst_graph *graph, pst_device *device, void *stream);

/* Opens a gate of the current launch (or of a growing graph). `borrowed`: what must come first on
 * the caller's side: an event is recorded on that lane's stream and the gate's successors wait for
 * it; NULL: what the calling thread has done so far. PST_EINVAL (no gate of this graph, no borrowed
 * lane of this runtime), PST_ESTATE when it is open already or the launch is not the current one,
 * the status of a cancel or poison that came first, and what the device returns: then all behind
 * the gate ends with that status. Any thread, never blocks. */
PST_API pst_status pst_gate_open(pst_launch launch, pst_task gate, pst_lane *borrowed);

/* Makes `borrowed` (a BORROWED lane; NULL: the calling thread) wait until the task is done. A
 * stream of an asynchronous device is only given the wait, so the call blocks until the task is
 * launched and no longer; the calling thread of the host device waits until it is done. While it
 * waits the thread serves lanes that nobody owns and that have no worker, or take help; it looks
 * after each of their tasks whether what it waits for has come, and after 0.1 ms at its deadline.
 * Returns the task's status: PST_OK, its error,
 * PST_ECANCELED, or PST_ETIMEDOUT after the runtime's deadline with a text that names rank, lane,
 * task and ticket and what it waits for; a poisoned runtime's status; PST_EINVAL (no task of this
 * graph, no borrowed lane of this runtime), PST_ESTATE (neither the latest launch nor the one
 * before; a gate that was opened again since then; a call in a task's start, test or callback), and
 * what the device returns. Any thread. */
PST_API pst_status pst_task_wait(pst_launch launch, pst_task task, pst_lane *borrowed);

/* The same, but no stream waits for the task: blocks until it is launched on its asynchronous lane,
 * so that what it was given may be used again behind that lane, and on others until it is done. */
PST_API pst_status pst_task_wait_launch(pst_launch launch, pst_task task);

/* PST_PENDING until the task has ended, then its status. Of a sealed graph the latest launch can be
 * asked about, and the one before; a task that has been launched again since then answers with the
 * first error of the launch asked about. PST_ESTATE for other launches, PST_EINVAL. Any thread,
 * never blocks. */
PST_API pst_status pst_task_test(pst_launch launch, pst_task task);

/* Waits until every task of this launch (growing graph: every task submitted so far) has ended;
 * returns the first error (of a growing graph: the first one ever). Serves lanes meanwhile, and
 * fails, as pst_task_wait. */
PST_API pst_status pst_launch_wait(pst_launch launch);

/* Cancels what is not launched yet; those tasks end with PST_ECANCELED, and on lanes BY_SUBMISSION
 * hold up no others and are held up by none. Launched ones go on. A
 * growing graph cancels what is added, too, until all of it has ended. Of a launch before the
 * latest nothing is left to cancel: PST_OK. PST_EINVAL, PST_ESTATE (there is no such launch). Any
 * thread, never blocks. */
PST_API pst_status pst_launch_cancel(pst_launch launch);

/* Says, in a task's start on an asynchronous lane, that its work begins here, behind what the
 * stream was given to wait for before: a trace shows the task from here on. Elsewhere, and where
 * nothing is traced, it does nothing. Never blocks. */
PST_API void pst_task_begins(void);

/* An event recorded after the task on its lane's stream, for use as after_events elsewhere; valid
 * until the task's handle is released, of a sealed graph until the graph is destroyed. NULL until
 * the task is launched, and without memory. Of a gate, once it has passed, the event that its
 * opening in this launch has recorded, until it is opened again; NULL if that recorded none. NULL
 * once the task's lane is destroyed. Any thread, but not from a task's start, test or callback: if
 * nobody could foresee the question it waits for the end of the lane's turn, at most the runtime's
 * deadline (NULL). */
PST_API pst_event *pst_task_event(pst_launch launch, pst_task task);

#ifdef __cplusplus
}
#endif
#endif
