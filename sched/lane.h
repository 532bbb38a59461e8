/* A lane: an in-order queue on one stream, served by whoever owns it at the moment; and the worker,
 * the thread that serves one lane or several. */
#ifndef PST_SCHED_LANE_H
#define PST_SCHED_LANE_H

#include "sched/budget.h"
#include "sched/device/device.h"
#include "sched/queue.h"
#include "sched/runtime.h"

/* The last launches of a lane, of tasks that have a name, for the watchdog's report. The lane's
 * owner writes, anybody reads at any time. */
#define PST__LOGGED_LAUNCHES 8u

typedef struct pst__logged_launch {
    uint64_t graph_id; /* the name lives as long as this graph */
    uint64_t ticket;
    const char *name;
} pst__logged_launch;

typedef struct pst__launch_log {
    pst__logged_launch launches[PST__LOGGED_LAUNCHES]; /* the n-th one at n modulo that */
    uint64_t count;
} pst__launch_log;

/* Release, each of them: who reads a field of the n-th launch, by an acquire in
 * pst__launch_log_read, finds the count at n at least; and who finds it at n + 1, all fields. */
static inline void pst__launch_log_add(pst__launch_log *log, uint64_t graph_id, const char *name,
                                       uint64_t ticket) {
    const uint64_t n = log->count;
    pst__logged_launch *launch = &log->launches[n % PST__LOGGED_LAUNCHES];
    pst__store_release(&launch->graph_id, graph_id);
    pst__store_release(&launch->ticket, ticket);
    pst__store_release(&launch->name, name);
    pst__store_release(&log->count, n + 1);
}

/* The launch that is `back` launches ago, 0 the last one; 0 when there is none or when it was
 * overwritten meanwhile. */
static inline int pst__launch_log_read(const pst__launch_log *log, uint64_t back,
                                       pst__logged_launch *read) {
    const uint64_t count = pst__load_acquire(&log->count); /* see pst__launch_log_add */
    if (back >= count || back >= PST__LOGGED_LAUNCHES) return 0;
    const uint64_t n = count - 1 - back;
    const pst__logged_launch *launch = &log->launches[n % PST__LOGGED_LAUNCHES];
    read->graph_id = pst__load_acquire(&launch->graph_id);
    read->ticket = pst__load_acquire(&launch->ticket);
    read->name = pst__load_acquire(&launch->name);
    /* While the count stands at n + PST__LOGGED_LAUNCHES the n-th one is being overwritten.
     * Relaxed: the acquires above come first. */
    return pst__load_relaxed(&log->count) < n + PST__LOGGED_LAUNCHES;
}

/* The launched tasks that an asynchronous device has not done, oldest first. The lane owner's. */
typedef struct pst__in_flight {
    pst__node *first, *last;
    pst__node *watched;    /* the oldest that has an event: the one that is polled */
    pst__node *mark;       /* the newest when a busy lane last asked; NULL: it has ended */
    pst__node *newest;     /* the latest that has an event; NULL: it has ended */
    pst__node *tail;       /* the last when tail_event was recorded */
    pst_event *tail_event; /* completion of the last tasks, which need no event themselves */
    uint32_t unasked;      /* launches since the device was last asked */
} pst__in_flight;

/* For how many looks of the watchdog a count has not changed. */
typedef struct pst__stall {
    uint64_t count;
    uint32_t looks; /* 0: there was nothing to look at */
} pst__stall;

/* When a count was first seen as it is. */
typedef struct pst__first_seen {
    uint64_t count, since; /* 0: it was not seen */
} pst__first_seen;

/* By what the watchdog knows that a lane goes on. */
typedef struct pst__watch {
    uint64_t ends;            /* of tasks that were in flight or pending; the lane owner's */
    uint64_t heartbeats;      /* turns and launches so far; read by the watchdog at any time */
    pst__launch_log launches; /* read by the watchdog at any time */
    const pst_lane *latest;   /* a leader's: of the lanes with its order that of the last of these
                                 launches, read at any time, for comparing; NULL: none */
    pst__stall task, owner;   /* the watchdog's: since when `ends` and `heartbeats` stand */
    pst__first_seen unknown;  /* of its visits: what is not known otherwise */
} pst__watch;

/* What has ended on a lane and moved a known number of bytes: see pst_page_lane. The owner
 * writes, the watchdog's visits read. */
typedef struct pst__moved {
    uint64_t ended, bytes, busy_ns;
    uint64_t until; /* up to then time is counted; the owner's */
} pst__moved;

/* Whose turn it is, in two words that any thread may write:
 *
 *   owned  missed
 *     2            the lane is destroyed; its place waits for a new one (see place.c)
 *     0      0     nobody serves the lane; pst__lane_try_own takes it
 *     1      0     its owner takes turns; pst__lane_disown hands it back
 *     1      1     and the worker has missed it: pst__lane_disown wakes it
 *     0      1     the worker asked while the lane was handed back: it takes it by its second try,
 *                  and the next helper's pst__lane_disown wakes it once too often
 *
 * What a turn does with a task is in node.h. */
struct pst_lane {
    /* fixed after creation; of a new lane in this place: what only its owner looks at */
    pst_runtime *runtime;
    char *name;
    pst_device *device;
    pst_stream *stream;
    int owns_stream;
    int is_taken;   /* gone, and a new lane is being made in its place; under the runtime's lock */
    uint32_t index; /* among the runtime's lanes, from 0 */
    int asynchronous; /* the device keeps the stream's order itself */
    pst_lane_mode mode;
    pst_lane_order order;
    pst__track *track;
    pst_lane *next;           /* of the runtime */
    pst__worker *worker;      /* NULL: pumped; set once, also later (borrowed lanes) */
    pst_lane *next_of_worker; /* of the worker */
    /* Lanes with one order have one queue and one owner, those of the lane that came first. */
    pst_lane *leader;   /* that lane; of all others the lane itself */
    pst_lane *follower; /* the next lane of the order; the owner's */

    /* any thread */
    _Alignas(PST__CACHE_LINE) pst__arrivals arrivals;
    uint32_t owned;  /* 1 while a thread serves the lane */
    uint32_t asked;  /* what those look at who do not own it: see pst__asked */
    uint32_t missed; /* 1 when the worker found it owned and went on: it is to be woken */

    /* the owner's */
    _Alignas(PST__CACHE_LINE) pst__fifo ready; /* BY_PRIORITY: still to be put on its level */
    pst__fifo stopped;                         /* see set_aside (turn.c) */
    uint64_t stops_seen;                       /* of the runtime, when that was last looked for */
    pst__node *current;                        /* a host device's launch that is pending */
    pst__in_flight in_flight;                  /* on an asynchronous device */
    unsigned texts;     /* the runtime's error texts before the latest launch or test */
    pst__pace pace;     /* how long its launches take */
    int needs_poll;     /* something launched, or a wait, is to be asked again */
    int has_news;       /* something was launched or has ended since those who wait were woken */
    pst__levels levels; /* BY_PRIORITY */
    pst__watch watch;
    pst__moved moved;
};

struct pst__worker {
    pst_runtime *runtime;
    pst__worker *next;
    pst_lane *lanes; /* newest first; lanes are only added */
    pst__track *track;
    pst__loop loop; /* woken by all who have something for its lanes */
};

/* ---- the orders of a lane ---------------------------------------------------------------
 *
 *                  a task enters the queue   the head, which launches next
 *   BY_READINESS   when it is ready          the first
 *   BY_SUBMISSION  when it is added, or      the first, once it is ready
 *                  its graph launched
 *   BY_PRIORITY    when it is ready          the first of the most urgent level
 *
 * A new order is a line here and a case in order.h: nothing else looks at what order a lane has. */

#define PST__LANE_ORDERS (PST_LANE_BY_PRIORITY + 1)

/* A task holds up those that were added behind it. Several lanes can have such an order together.
 */
static inline int pst__order_is_by_adding(pst_lane_order order) {
    return order == PST_LANE_BY_SUBMISSION;
}

static inline int pst__order_has_priorities(pst_lane_order order) {
    return order == PST_LANE_BY_PRIORITY;
}

/* ---- whose turn ------------------------------------------------------------------------- */

#define PST__LANE_GONE 2u

/* Bits of `asked`. Relaxed, all of it: who finds them old looks once too often or too seldom, as if
 * it had looked a moment before. */
enum pst__asked {
    PST__ASKED_HAS_TURNS = 1u << 0,  /* not only a name for the calling thread */
    PST__ASKED_TAKES_HELP = 1u << 1, /* those who wait serve it beside its worker */
};

static inline int pst__lane_is_gone(const pst_lane *lane) {
    /* Acquire: pairs with the release in pst_lane_destroy. */
    return pst__load_acquire(&lane->owned) == PST__LANE_GONE;
}

/* Takes the lane, which is a leader, if nobody owns it; its followers come with it. */
static inline int pst__lane_try_own(pst_lane *lane) {
    uint32_t expected = 0;
    /* Relaxed look first, so that a busy lane's line is not taken from its owner. The exchange
     * acquires what the last owner released in pst__lane_disown. */
    return pst__load_relaxed(&lane->owned) == 0 && pst__cas_acq_rel(&lane->owned, &expected, 1);
}

/* Waits until the calling thread owns the lane, whose owner may be in a task, which may take its
 * time. PST_OK or PST_ETIMEDOUT. */
pst_status pst__lane_await(pst_lane *leader);

/* Hands the lane back. Its worker may have looked away while it was owned: a thread that is not the
 * worker wakes it when it changed something, or when something has arrived or the worker has
 * missed it meanwhile. */
void pst__lane_disown(pst_lane *lane, int changed, const pst__worker *self);

/* Shows the watchdog that the lane's owner goes on. Relaxed: a sign of life, it orders nothing. */
static inline void pst__lane_heartbeat(pst_lane *lane) {
    pst__store_relaxed(&lane->watch.heartbeats, lane->watch.heartbeats + 1);
}

/* Wakes whoever serves the lane: its worker, or those who wait and those who pump. Any thread,
 * never blocks. */
void pst__lane_notify(pst_lane *lane);

/* 1 when a stream of this lane can wait for events of `device`. */
static inline int pst__lane_waits_on(const pst_lane *lane, const pst_device *device) {
    return lane != NULL && lane->asynchronous && lane->device == device;
}

/* Wakes those who wait, if the lane's turns have done something since the last time. The owner's,
 * before it hands the lane back or does something else. */
static inline void pst__lane_wake_waiters(pst_lane *lane) {
    if (!lane->has_news) return;
    lane->has_news = 0;
    pst__runtime_wake_waiters(lane->runtime);
}

/* Gives back what the lane has, but not its place. */
void pst__lane_close(pst_lane *lane);
/* The same, and its memory, when no thread can find it. */
void pst__lane_free(pst_lane *lane);

#endif
