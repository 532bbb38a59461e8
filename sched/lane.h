/* A lane: an in-order queue on one stream, served by whoever owns it at the moment. */
#ifndef PST_SCHED_LANE_H
#define PST_SCHED_LANE_H

#include "sched/budget.h"
#include "sched/levels.h"
#include "sched/recent.h"
#include "sched/runtime.h"

/* Whose turn it is, in two words that any thread may write:
 *
 *   owned  missed
 *     2            the lane is destroyed; its place waits for a new one (see place.c)
 *     0      0     nobody serves the lane; pst__lane_try_own takes it
 *     1      0     its owner takes turns; pst__lane_disown hands it back
 *     1      1     and the worker has come in vain: pst__lane_disown wakes it
 *     0      1     the worker asked while the lane was handed back: it takes it by its second try,
 *                  and the next helper's pst__lane_disown wakes it once too often
 *
 * What a turn does with a task is in states.h. */
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
    uint32_t missed; /* 1 when the worker found it owned and went on: it wants to be told */

    /* the owner's */
    _Alignas(PST__CACHE_LINE) pst__fifo ready; /* BY_PRIORITY: still to be put on its level */
    pst__fifo stopped;                         /* see pst__order_drain */
    uint64_t stops_seen;                       /* of the runtime, when that was last looked for */
    pst__node *current;                        /* a host device's launch that is pending */
    pst__node *flight_first, *flight_last; /* launched and not done, on an asynchronous device */
    pst__node *watched;    /* the oldest in flight that has an event: the one that is polled */
    pst__node *mark;       /* the newest when a busy lane last asked; NULL: it has ended */
    pst__node *newest;     /* the latest task put in flight that has one; NULL: it has ended */
    pst__node *tail;       /* in flight when tail_event was recorded */
    pst_event *tail_event; /* completion of the last tasks, which need no event themselves */
    unsigned texts;        /* the runtime's error texts before the latest launch or test */
    uint32_t unasked;      /* launches since in-flight tasks were last asked about */
    pst__pace pace;        /* how long its launches take */
    int needs_poll;        /* something launched, or a wait, is to be asked again */
    int untold;            /* something was launched or has ended since those who wait were woken */
    pst__levels levels;    /* BY_PRIORITY */
    uint64_t ends;         /* of tasks that were in flight or pending */
    uint64_t beats;        /* turns and launches so far; read by the watchdog at any time */
    pst__recent recent;    /* read by the watchdog at any time */

    /* the watchdog's */
    pst__still task_still, owner_still;
};

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

/* Hands the lane back. Its worker may have looked away while it was owned: a thread that is not the
 * worker wakes it when it changed something, or when something has arrived or the worker has come
 * in vain meanwhile. */
void pst__lane_disown(pst_lane *lane, int changed, const pst__worker *self);

/* Tells the watchdog that the lane's owner goes on. Relaxed: a sign of life, it orders nothing. */
static inline void pst__lane_beat(pst_lane *lane) {
    pst__store_relaxed(&lane->beats, lane->beats + 1);
}

/* One turn of the lane, which the caller owns, and of its followers: arrivals, completions, then
 * launches within the budget. Never blocks. 1 when something was done: then the caller takes
 * another turn at once, or tells those who wait. */
int pst__lane_turn(pst_lane *lane, const pst__budget *budget);

/* Wakes whoever serves the lane. */
void pst__lane_notify(pst_lane *lane);

/* 1 when a stream of this lane can wait for events of `device`. */
static inline int pst__lane_waits_on(const pst_lane *lane, const pst_device *device) {
    return lane != NULL && lane->asynchronous && lane->device == device;
}

/* What the device has said to the calling thread about its latest failure; "" if it says nothing.
 */
static inline const char *pst__device_text(pst_device *device) {
    const char *text = device->ops->error_text == NULL ? NULL : device->ops->error_text(device);
    return text == NULL ? "" : text;
}

/* Wakes those who wait, if the lane's turns have done something since the last time. The owner's,
 * before it hands the lane back or does something else. */
static inline void pst__lane_tell(pst_lane *lane) {
    if (!lane->untold) return;
    lane->untold = 0;
    pst__runtime_wake_waiters(lane->runtime);
}

/* The event that stands for a node of this lane that is launched or has ended; recorded now if
 * nobody foresaw the question, for which the caller waits until the lane's owner ends its turn.
 * PST_EDEVICE (no memory, or the device failed), PST_ETIMEDOUT. */
pst_status pst__lane_event_of(pst_lane *lane, pst__node *node, pst_event **event);

/* Gives back what the lane has, but not its place. */
void pst__lane_close(pst_lane *lane);
/* The same with its place, when no thread can find it. */
void pst__lane_free(pst_lane *lane);

/* A borrowed lane of an asynchronous device has events to poll: any worker may do it. Gives those
 * that have none to one. The caller holds the runtime's lock. */
void pst__lane_adopt_borrowed(pst_runtime *runtime);

/* ---- places (place.c) ------------------------------------------------------------------- */

/* The place of a lane that was destroyed and was served like the one to be created; owned. NULL:
 * there is none. */
pst_lane *pst__place_take(pst_runtime *runtime, const pst_lane_options *options);
/* Closes the lane and gives the place back: it could not be created, or is destroyed. */
void pst__place_give_back(pst_lane *lane);

#endif
