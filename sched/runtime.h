/* The runtime's struct, what the layers above may ask of it, and where threads wait. */
#ifndef PST_SCHED_RUNTIME_H
#define PST_SCHED_RUNTIME_H

#include "base/atomic.h"
#include "base/error.h"
#include "base/heap.h"
#include "sched/thread.h"
#include "tracing/page.h"
#include "tracing/trace.h"

#include <ck_spinlock.h>
#include <penstock/graph.h>

typedef struct pst__worker pst__worker;
typedef struct pst__observer pst__observer;

/* A thread that goes on until it is told to stop. */
typedef struct pst__loop {
    pthread_t thread;
    uint32_t has_thread;                      /* also one that has ended and is not joined */
    uint32_t stop;                            /* set by pst__loop_stop, which wakes the thread */
    uint32_t ended;                           /* the thread's last word, by pst__loop_leave */
    _Alignas(PST__CACHE_LINE) pst__park park; /* where it sleeps; written by all who wake it */
} pst__loop;

/* How those who pump are called. `signalled` is 1 from a notification until a turn for which it was
 * taken back has found nothing to do. The descriptor is readable then; it may be readable once too
 * often, never too seldom. */
typedef struct pst__pump {
    uint32_t signalled;
    int descriptor; /* an eventfd; -1 until somebody asks for it */
    uint64_t poll;  /* low half: ns until what is launched is worth asking again, 0: nothing is;
                       high half: counts the changes */
} pst__pump;

/* See poison.h. */
typedef struct pst__observers {
    ck_spinlock_t lock;   /* not held while one is called */
    pst__observer *first; /* in order of registering */
    uint32_t check_count; /* of them, the health checks */
    uint64_t next_check;  /* pst__now() */
} pst__observers;

/* See watchdog.h. */
typedef struct pst__watchdog {
    uint64_t interval_ns;   /* between two visits to the lanes; 0: there are none */
    uint32_t visits_a_look; /* every so many of them is a look for what is overdue; 0: none is */
    uint32_t visits;
    int poisons;
    uint32_t is_visiting; /* 1 while a thread visits: one at a time */
    uint64_t next_visit;  /* a pump's, pst__now() */
    uint64_t reports;
    pst__loop loop;
} pst__watchdog;

/* See flight.h. */
typedef struct pst__long_wait pst__long_wait;
typedef struct pst__followed pst__followed; /* a rank, and its page */
typedef struct pst__flight {
    char *folder; /* where failures are written to; NULL: nowhere */
    char *name;
    int world_size;
    pst__followed *followed; /* in order of following; only added to, so readers take no lock */
    uint32_t is_writing;     /* 1 while a thread writes: one at a time */
    uint64_t written;        /* pst__now() when a failure was written last; that thread's */
    ck_spinlock_t lock;      /* of the waits, and of who adds to `followed` */
    pst__long_wait *waits;
} pst__flight;

struct pst_runtime {
    pst__heap heap;
    pst__error error;
    pst__trace *trace;
    pst_page *page; /* NULL: none; the caller's */
    pst_device *host;
    pst_event *done_event; /* of the host device, never recorded: counts as done for ever */
    int rank;
    uint32_t spin;
    uint64_t deadline_ns, watchdog_ns;
    uint64_t grace_ns; /* after a poison: for launched work to end; 0: no limit */
    size_t task_capacity;

    ck_spinlock_t lock; /* of the lists below; held for list surgery and for a cancel's walk */
    uint32_t lane_count;
    pst_lane *lanes;      /* newest first; lanes are only added, so readers walk without the lock */
    pst__worker *workers; /* newest first; only the lock's holder looks at them */
    pst_graph *graphs;
    uint64_t graph_ids;

    uint64_t stops;          /* how often something was stopped that may stand in a lane's queue */
    ck_spinlock_t launching; /* held while a launch comes to several queues that have an order */

    int poison;         /* the first pst_runtime_poison's status */
    uint64_t poison_at; /* pst__now() then */

    pst__park waiting; /* where pst_task_wait and its kin sleep */
    uint32_t waiters;  /* how many of them look at `waiting` */
    pst__pump pump;    /* where those who pump are called */

    pst__observers observers;
    pst__watchdog watchdog;
    pst__flight flight;
    void (*waiting_hook)(void *context, const pst_waiting *waiting); /* see pst_runtime_options */
    void *waiting_context;
    uint64_t late_launches, late_launch_ns; /* see pst_runtime_stats */
};

/* ---- for mem/ and ops/: any thread, the runtime owns what is returned ------------------- */

static inline pst__heap *pst__runtime_heap(pst_runtime *runtime) {
    return &runtime->heap;
}
static inline pst__error *pst__runtime_error(pst_runtime *runtime) {
    return &runtime->error;
}
static inline pst__trace *pst__runtime_trace(pst_runtime *runtime) {
    return runtime->trace;
}
static inline pst_page *pst__runtime_page(pst_runtime *runtime) {
    return runtime->page; /* NULL: none */
}
static inline uint64_t pst__runtime_deadline(const pst_runtime *runtime) {
    return runtime->deadline_ns; /* 0: no limit */
}

/* ---- within sched/ ---------------------------------------------------------------------- */

/* Leaves an error text, which names the runtime's rank first, and returns `status`. */
pst_status pst__runtime_fail(pst_runtime *runtime, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The newest lane; the others follow by `next`. Acquire: pairs with the release in pst_lane_create,
 * so that each lane is found complete. */
static inline pst_lane *pst__runtime_lanes(const pst_runtime *runtime) {
    return pst__load_acquire(&runtime->lanes);
}

/* Something was stopped that may stand in a lane's queue. Release: pairs with the acquire in
 * set_aside (turn.c). The caller notifies the lanes. */
static inline void pst__runtime_note_stop(pst_runtime *runtime) {
    (void)pst__add_acq_rel(&runtime->stops, 1);
}

/* ---- waiting ---------------------------------------------------------------------------- */

/* Wakes the threads that wait for something, if there are any. The caller has published it; the
 * fence orders that with the look at `waiters`, and pairs with the one in sleep_until (wait.c),
 * which registers first and then looks for what was published. */
void pst__runtime_wake_waiters(pst_runtime *runtime);

/* The same for each task of a turn, without the fence: a waiter that this look misses is woken by
 * pst__lane_wake_waiters. */
static inline void pst__runtime_wake_seen_waiters(pst_runtime *runtime) {
    if (pst__load_relaxed(&runtime->waiters) != 0) pst__runtime_wake_waiters(runtime);
}

/* Waits until `holds` answers other than 0, for what other threads are about to do, the user's
 * callbacks at most: the caller serves no lane meanwhile, and a poison does not end it. `holds` may
 * take what it answers with 1 for, so that answer is the last. PST_OK, or PST_ETIMEDOUT past the
 * runtime's deadline. */
pst_status pst__wait_aside(pst_runtime *runtime, int (*holds)(const void *argument),
                           const void *argument);

/* The last call of the thread of a loop: it touches nothing of the runtime behind it. */
void pst__loop_leave(pst__loop *loop, pst_runtime *runtime);
/* Has the thread end, if there is one. Any thread may wake it still, also when it has ended. */
void pst__loop_stop(pst__loop *loop);
/* Joins the thread, if there is one, which pst__loop_stop has ended. PST_ETIMEDOUT after the
 * runtime's deadline: it is in a task, a hook or a log of the user's. */
pst_status pst__loop_join(pst__loop *loop, pst_runtime *runtime);

/* The least time between two calls of the caller's hook for long waits. */
#define PST__WAITING_HOOK_NS 50000000u

/* Calls that hook if it is due. `waiting` says what for. */
void pst__wait_call_hook(pst_runtime *runtime, pst_waiting *waiting, uint64_t waited_ns);

#endif
