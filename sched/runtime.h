/* The runtime's struct, and what the layers above may ask of it. */
#ifndef PST_SCHED_RUNTIME_H
#define PST_SCHED_RUNTIME_H

#include "base/atomic.h"
#include "base/error.h"
#include "base/heap.h"
#include "sched/monitor.h"
#include "sched/pump.h"
#include "sched/thread.h"
#include "tracing/trace.h"

#include <penstock/graph.h>

typedef struct pst__worker pst__worker;

struct pst_runtime {
    pst__heap heap;
    pst__error error;
    pst__trace *trace;
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

    pst__monitor monitor;
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
static inline uint64_t pst__runtime_deadline(const pst_runtime *runtime) {
    return runtime->deadline_ns; /* 0: no limit */
}

/* ---- within sched/ ---------------------------------------------------------------------- */

/* Wakes the threads that wait for something, if there are any. The caller has published it; the
 * fence orders that with the look at `waiters`, and pairs with the one in pst__wait_until, which
 * registers first and then looks for what was published. */
void pst__runtime_wake_waiters(pst_runtime *runtime);

/* The same for each task of a turn, without the fence: a waiter that this look misses is woken by
 * pst__lane_wake_waiters. */
static inline void pst__runtime_wake_seen_waiters(pst_runtime *runtime) {
    if (pst__load_relaxed(&runtime->waiters) != 0) pst__runtime_wake_waiters(runtime);
}

/* The newest lane; the others follow by `next`. Acquire: pairs with the release in pst_lane_create,
 * so that each lane is found complete. */
static inline pst_lane *pst__runtime_lanes(const pst_runtime *runtime) {
    return pst__load_acquire(&runtime->lanes);
}

/* Something was stopped that may stand in a lane's queue. Release: pairs with the acquire in
 * pst__order_set_aside. The caller notifies the lanes. */
static inline void pst__runtime_note_stop(pst_runtime *runtime) {
    (void)pst__add_acq_rel(&runtime->stops, 1);
}

/* 1 when no graph has unfinished tasks. */
int pst__runtime_is_idle(pst_runtime *runtime);

/* Leaves an error text, which names the runtime's rank first, and returns `status`. */
pst_status pst__runtime_fail(pst_runtime *runtime, pst_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
