/* penstock/runtime.h - the runtime: its options, heap, log and error text, what poisons it, and how
 * a foreign event loop pumps it. No global state: several runtimes live side by side in one
 * process.
 *
 * Structs of parameters begin with their size, which the caller sets to sizeof; all else zeroed
 * means defaults. What a caller with an older header does not have counts as zeroed, and what an
 * older library does not know is not read. */
#ifndef PENSTOCK_RUNTIME_H
#define PENSTOCK_RUNTIME_H

#include <penstock/device.h>
#include <penstock/page.h>
#include <penstock/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_runtime pst_runtime;

typedef enum pst_log_level { PST_LOG_ERROR = 0, PST_LOG_WARNING, PST_LOG_INFO } pst_log_level;

/* Metadata memory. `alloc` returns memory aligned to `alignment` (a power of two) or NULL; `free`
 * gets the size and alignment that were asked for. Any thread, several at once. */
typedef struct pst_allocator {
    void *(*alloc)(void *context, size_t bytes, size_t alignment);
    void (*free)(void *context, void *memory, size_t bytes, size_t alignment);
    void *context;
} pst_allocator;

/* A wait that is under way: what for, and for how long. */
typedef struct pst_waiting {
    uint64_t waited_ns;
    const char *lane, *task; /* "" where it is for several tasks, or for a gate's lane */
    uint64_t ticket;
} pst_waiting;

#define PST_NO_FLIGHT_RECORD SIZE_MAX /* see pst_runtime_options.flight_records */

typedef struct pst_runtime_options {
    size_t size;             /* sizeof(pst_runtime_options) */
    pst_allocator allocator; /* all NULL: the built-in metadata heap */
    /* NULL: silent. Any thread, several at once, and with locks held: it does not block or call
     * this library. `text` is valid during the call. */
    void (*log)(void *context, pst_log_level level, const char *text);
    void *log_context;
    int rank;             /* shown in error texts and traces; 0 if there are no ranks */
    int world_size;       /* 0 counts as 1 */
    uint32_t spin;        /* idle turns before a worker or a waiting thread sleeps; 0: 2000 */
    uint64_t deadline_ns; /* how long a wait may take before PST_ETIMEDOUT; 0: no limit */
    size_t trace_records; /* ring size a thread while tracing; 0: 65536 */
    size_t task_capacity; /* tasks a growing graph makes room for at a time; 0: 1024 */
    /* How long the oldest launched task of a lane may take to end until the watchdog reports it,
     * and a thread to come back from a task's `start`, `test` or callback; 0: no watchdog. The
     * lanes are looked at eight times in that span, by a thread of the watchdog's own if the
     * runtime has any worker, else by the caller's pst_run_once and waits. A report goes to `log`
     * as an error, once a task, from the thread that looks: rank, lane, task, ticket, graph, what
     * it waits for. */
    uint64_t watchdog_ns;
    int watchdog_poisons; /* a report also poisons the runtime with PST_ETIMEDOUT, which ends every
                             wait and calls the poison hooks: communicators are aborted */
    /* NULL: none. Called about every 50 ms by a thread that waits, in pst_task_wait and its kin or
     * in an exchange between ranks, without locks: for what should not wait so long, as a signal's
     * handler in an interpreter. It may block, and call this library, but not wait or destroy. To
     * end the wait it poisons the runtime. */
    void (*waiting)(void *context, const pst_waiting *waiting);
    void *waiting_context;
    /* The flight record (trace.h): the newest records that each lane and thread always keeps;
     * 0: 2048, PST_NO_FLIGHT_RECORD: none. */
    size_t flight_records;
    /* The folder that it is written to when the runtime is poisoned or a wait passes its deadline,
     * by the thread that finds that: one on a file system that may hang holds it up. NULL: what the
     * environment variable PENSTOCK_DUMP says; "", or no such variable: none. `dump_name`: with
     * which the names of the files begin; NULL: "penstock". The runtimes of one job have one name,
     * and another one than those of other jobs and of others in the process. Both are copied. */
    const char *dump_folder, *dump_name;
    /* NULL: none. The page that this runtime shows its lanes on, and engines on it their figures;
     * it bears dump_name and the rank. Borrowed: it lives until the runtime is destroyed. */
    pst_page *page;
} pst_runtime_options;

/* Creates a runtime with its host device; options may be NULL. On error nothing is left to destroy
 * and *runtime is NULL. PST_EINVAL, PST_ENOMEM, PST_ESYSTEM. A runtime belongs to the process that
 * created it: a child of fork has none of its threads and uses or destroys nothing of it; what the
 * child creates itself works. */
PST_API pst_status pst_runtime_create(const pst_runtime_options *options, pst_runtime **runtime);

/* Cancels what is not launched, calls the poison hooks if something is, waits for that (at most the
 * deadline; without one, and with a watchdog that poisons, at most watchdog_ns), ends the workers
 * and frees everything that was created on this runtime and not destroyed yet. Blocks. NULL is
 * fine. No other thread may use the runtime any more. Not in a child of fork: see
 * pst_runtime_create.
 *
 * PST_ETIMEDOUT when a thread has not come back by then from a task's start, test or callback, or
 * from a hook: the error text says of which lane, and nothing is freed, as that thread will use it.
 * The runtime stays canceled, and can be destroyed again later. PST_ESTATE in a task's start, test
 * or callback. */
PST_API pst_status pst_runtime_destroy(pst_runtime *runtime);

/* The built-in host device of this runtime; owned by it. */
PST_API pst_device *pst_runtime_host(pst_runtime *runtime);

/* Copies the text of the most recent error (NUL-terminated, cut at `size`) and returns its full
 * length; "" if there was none. Any thread. */
PST_API size_t pst_runtime_error(const pst_runtime *runtime, char *buffer, size_t size);

/* PST_OK, or the first error that happened after a launch and so made all further results invalid
 * (a poisoned runtime): every later wait and launch returns it. Any thread. */
PST_API pst_status pst_runtime_status(const pst_runtime *runtime);

/* Poisons the runtime: pending tasks end as canceled, waits return `status`, which is negative
 * (else nothing happens). `text` goes into the error text; NULL: none. The first call counts. Any
 * thread, never blocks, but for the hooks, and for a dump where there is a folder for it, which is
 * written before (pst_runtime_options.dump_folder). */
PST_API void pst_runtime_poison(pst_runtime *runtime, pst_status status, const char *text);

typedef void (*pst_poison_hook)(void *context, pst_status status);

/* Has hook(context, status) called, once, when the runtime is poisoned by whatever cause (a destroy
 * that finds work unfinished counts as one): for what must be stopped then, so that launched work
 * can end, such as a communicator. If it is poisoned already, this call calls it. It runs on the
 * thread that poisons: the watchdog's, a lane's worker in the middle of a turn, or any that calls
 * this library. It may tell others (pst_lane_wake, a communicator's abort), but not block, wait,
 * destroy, or remove hooks. PST_EINVAL, PST_ENOMEM. Any thread. */
PST_API pst_status pst_runtime_add_poison_hook(pst_runtime *runtime, pst_poison_hook hook,
                                               void *context);

/* Takes one such registration back, before what `context` points to goes; none is fine. If another
 * thread is in the hook, waits until it has left: when this returns the hook is not running and
 * will not be called. Not from within a hook. Any thread. */
PST_API void pst_runtime_remove_poison_hook(pst_runtime *runtime, pst_poison_hook hook,
                                            void *context);

typedef void (*pst_health_check)(void *context);

/* Has check(context) called about every 20 ms while something launched is pending: for what may end
 * although nobody asks it, such as a communicator whose peer has died; it calls pst_runtime_poison
 * when all is not well. It runs on the worker or the caller that asks the device for what is
 * pending, and at each look of the watchdog; one call of it at a time, none any more when the
 * runtime is poisoned. It does not block, wait, destroy, or add or remove health checks.
 * PST_EINVAL, PST_ENOMEM. Any thread. */
PST_API pst_status pst_runtime_add_health_check(pst_runtime *runtime, pst_health_check check,
                                                void *context);

/* Takes one such registration back; none is fine. When this returns the check is not running and
 * will not be called. Not from within one. Any thread. */
PST_API void pst_runtime_remove_health_check(pst_runtime *runtime, pst_health_check check,
                                             const void *context);

/* One turn for all lanes that nobody owns at this moment: completions, then launches. Never
 * blocks. Returns PST_OK when something was done or nothing is unfinished, PST_PENDING when nothing
 * could be done and work is unfinished (PST_EINVAL without a runtime). *idle (may be NULL) becomes
 * 1 when no task is unfinished, else 0. Any thread; a runtime whose lanes are all PST_LANE_PUMPED
 * owns no thread and lives by this call. */
PST_API pst_status pst_run_once(pst_runtime *runtime, int *idle);

/* A descriptor that is readable when a lane without a worker may have host work: for the poll,
 * epoll or select of a foreign event loop, which then calls pst_run_once, once where it polls for
 * states, and as long as pst_timeout returns 0 where it polls for changes (EPOLLET). It stays
 * readable until a pst_run_once has found nothing to do, and may be readable once too often. It
 * says nothing of launched work that is to be asked again: pst_timeout does. Made on the first call
 * (it costs nothing before), owned by the runtime; the caller does not read from it, write to it or
 * close it. PST_EINVAL, PST_ESYSTEM. Any thread, never blocks. */
PST_API pst_status pst_fd(pst_runtime *runtime, int *descriptor);

/* How long a loop may sleep before pst_run_once is worth calling again even if pst_fd does not get
 * readable: nanoseconds; 0: call it at once; -1: for ever. While something launched is pending on a
 * lane without a worker the bound is 50 us, doubling with each idle turn up to 1 ms, and growing
 * to 20 ms from there with the time that it is pending (pst_lane_wake ends the sleep at once).
 * Asked after pst_run_once, on the thread that sleeps; never blocks. */
PST_API int64_t pst_timeout(const pst_runtime *runtime);

typedef struct pst_runtime_stats {
    size_t size;            /* sizeof(pst_runtime_stats); where it is not set, nothing is written */
    uint64_t late_launches; /* waits of a stream that blocked the caller until their task was
                               launched */
    uint64_t late_launch_ns; /* how long they blocked, all together */
    uint64_t watchdog_reports;
} pst_runtime_stats;

/* Since the runtime was created. Any thread, never blocks. */
PST_API void pst_runtime_get_stats(const pst_runtime *runtime, pst_runtime_stats *stats);

/* Has the flight record say where another rank is, by its page, mapped from its process (page.h),
 * which stays mapped until the runtime is destroyed. Once a rank. PST_EINVAL: there is no such
 * rank; PST_ENOMEM. Any thread. */
PST_API pst_status pst_runtime_follow(pst_runtime *runtime, int rank, const pst_page *page);

/* A launch of a task that has a name; names are cut. */
typedef struct pst_recent {
    char lane[32], task[64];
    uint64_t ticket;
} pst_recent;

/* Fills in the last launches of each lane, at most eight a lane, the latest of a lane first;
 * returns how many (at most `capacity`). Whether they have ended is not told. Any thread, never
 * blocks. */
PST_API size_t pst_runtime_recent(pst_runtime *runtime, pst_recent *launches, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
