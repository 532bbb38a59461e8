/* A task or gate as the lanes see it: 64 bytes that every launch touches (pst__node) and, for tasks
 * that have more to say, a pst__detail. Both kinds of graphs use the same node. */
#ifndef PST_SCHED_NODE_H
#define PST_SCHED_NODE_H

#include "base/atomic.h"

#include <ck_spinlock.h>
#include <ck_stack.h>
#include <penstock/graph.h>

#define PST__AFTER_EVENTS 4u

typedef struct pst__node pst__node;

/* What only some tasks have; every gate and every task on an asynchronous device has one. What each
 * launch looks at comes first and fills a cache line. */
typedef struct pst__detail {
    pst_status (*test)(void *argument);
    pst_task_callback done;
    void *done_argument;
    pst_event *event;        /* owned; kept from launch to launch */
    uint32_t event_recorded; /* `event` stands for the task's latest launch */
    uint16_t after_count;
    int16_t priority;       /* lanes BY_PRIORITY */
    pst__node *flight_next; /* launched tasks of a lane, oldest first */
    uint64_t launched_at;   /* 0 unless tracing */
    const char *name;
    const char *path;
    const char *traced_name, *traced_path; /* the trace's copies, made when first recorded */
    uint64_t ticket, bytes;
    pst_device *event_device;
    pst_lane *event_lane;     /* gates: the borrowed lane on whose stream `event` was recorded */
    uint32_t event_number;    /* gates: the launch whose opening these are of, its low bits */
    ck_spinlock_t opening;    /* gates: held to open, and to ask about an opening */
    pst_event *began, *ended; /* timed; while it is traced in flight on a device that has such */
    pst_event *after[PST__AFTER_EVENTS];
} pst__detail;

/* Flags of a node: fixed when its graph is sealed or the task is added. */
enum {
    PST__NODE_GATE = 1u << 0,
    PST__NODE_GROWING = 1u << 1, /* the node is the head of a pst__grown */
    PST__NODE_BATCH = 1u << 2,   /* the node is the head of a pst__share and no task */
    PST__NODE_LOCAL = 1u << 3, /* all predecessors are on its own lane: `pending` has one writer */
    PST__NODE_LATE = 1u << 4,  /* some successors start when it is done, not when launched */
    PST__NODE_EVENT = 1u << 5, /* record an event after the launch */
};

/* pending: predecessors that are missing in the low bits; above them the status (negated) of the
 * first predecessor that failed, 0 if none did. */
#define PST__COUNT_BITS  26u
#define PST__COUNT_MASK  ((1u << PST__COUNT_BITS) - 1u)
#define PST__COUNT_LIMIT PST__COUNT_MASK

struct pst__node {
    ck_stack_entry_t link; /* in its lane's queue */
    pst_status (*start)(void *argument, pst_stream *stream);
    void *argument;
    pst_graph *graph;
    pst_lane *lane; /* NULL: a gate */
    pst__detail *detail;
    uint32_t word;              /* launch number (24 bits), status, state: see pst__word */
    uint32_t pending;           /* see above; armed again by whoever launches the node */
    uint32_t predecessors : 26; /* what `pending` starts from; counts a gate's opening too */
    uint32_t flags : 6;
    uint32_t first_edge; /* sealed graphs: its successors are edges[first_edge, the next node's) */
};

_Static_assert(sizeof(pst__node) == 64, "a node is a cache line");

/* ---- the states of a task within one launch, and which may follow which --------------- */

typedef enum pst__task_state {
    PST__TASK_PENDING = 0, /* predecessors are missing, or it stands in its lane's queue */
    PST__TASK_OPEN,        /* gates only: opened; its predecessors or its event may be missing */
    PST__TASK_LAUNCHED,    /* tasks only: its device has it */
    PST__TASK_DONE,
    PST__TASK_FAILED,   /* its launch, its test or its device said so */
    PST__TASK_CANCELED, /* it never ran */
    PST__TASK_STATES
} pst__task_state;

#define PST__MAY(state) (1u << PST__TASK_##state)
#define PST__MAY_END    (PST__MAY(DONE) | PST__MAY(FAILED) | PST__MAY(CANCELED))

/* Within one launch. A task that ends in the call that launches it skips LAUNCHED. */
static const uint8_t pst__task_successors[PST__TASK_STATES] = {
    [PST__TASK_PENDING] = PST__MAY(OPEN) | PST__MAY(LAUNCHED) | PST__MAY_END,
    [PST__TASK_OPEN] = PST__MAY_END,
    [PST__TASK_LAUNCHED] = PST__MAY(DONE) | PST__MAY(FAILED),
    [PST__TASK_DONE] = 0,
    [PST__TASK_FAILED] = 0,
    [PST__TASK_CANCELED] = 0,
};

static inline int pst__task_may_become(pst__task_state from, pst__task_state to) {
    return (pst__task_successors[from] >> to) & 1;
}

static inline int pst__task_has_ended(pst__task_state state) {
    return state >= PST__TASK_DONE;
}

/* ---- statuses that are kept ------------------------------------------------------------- */

/* From 1 (PENDING) down without a gap: see PST_STATUS_MAP. */
#define PST__ONE_STATUS(name, value, text) +1
enum { PST__STATUS_LOWEST = 2 - (0 PST_STATUS_MAP(PST__ONE_STATUS)) };
#undef PST__ONE_STATUS
_Static_assert((int)PST__STATUS_LOWEST == (int)PST_ESKIPPED && PST__STATUS_LOWEST >= -31,
               "the last status has the lowest value, which fits a word and a count");

/* What work, devices and callers answer with need not be a status; what is kept of it is one. */
static inline pst_status pst__kept_status(pst_status status) {
    return (int)status < PST__STATUS_LOWEST ? PST_EINVAL : status;
}

/* ---- the word: which launch, which state, which status ---------------------------------- */

#define PST__NUMBER_MASK 0xffffffu

static inline uint32_t pst__word(uint64_t number, pst__task_state state, pst_status status) {
    return (uint32_t)(number & PST__NUMBER_MASK) << 8 | (uint32_t)-status << 3 | (uint32_t)state;
}

static inline uint32_t pst__word_number(uint32_t word) {
    return word >> 8;
}

static inline pst__task_state pst__word_state(uint32_t word) {
    return (pst__task_state)(word & 7u);
}

static inline pst_status pst__word_status(uint32_t word) {
    return (pst_status) - (int)(word >> 3 & 31u);
}

/* ---- pending ---------------------------------------------------------------------------- */

static inline pst_status pst__pending_status(uint32_t pending) {
    return (pst_status) - (int)(pending >> PST__COUNT_BITS);
}

/* Pairs with the release in pst__node_arrive: whoever sees 0 sees what the predecessors wrote. */
static inline int pst__node_is_ready(const pst__node *node) {
    return (pst__load_acquire(&node->pending) & PST__COUNT_MASK) == 0;
}

/* Leaves the first failure of a predecessor with the node. Relaxed: the arrival that follows
 * publishes it. */
static inline void pst__node_inherit(pst__node *node, pst_status status) {
    uint32_t seen = pst__load_relaxed(&node->pending);
    while (seen >> PST__COUNT_BITS == 0) {
        uint32_t marked = seen | (uint32_t)-status << PST__COUNT_BITS;
        if (pst__cas_acq_rel(&node->pending, &seen, marked)) return;
    }
}

/* `count` predecessors have come; 1 when none is missing any more. Release: what they wrote is seen
 * by the launching thread; acquire: the last to come passes on what the others wrote. A LOCAL
 * node's predecessors all come by its lane's owner, and the lane's hand-over orders owners. */
static inline int pst__node_arrive(pst__node *node, uint32_t count) {
    uint32_t left;
    if (node->flags & PST__NODE_LOCAL) {
        left = pst__load_relaxed(&node->pending) - count;
        pst__store_relaxed(&node->pending, left);
    } else {
        left = pst__sub_acq_rel(&node->pending, count) - count;
    }
    return (left & PST__COUNT_MASK) == 0;
}

static inline const char *pst__node_name(const pst__node *node) {
    const char *name = node->detail == NULL ? NULL : node->detail->name;
    return name == NULL ? "" : name;
}

/* Relaxed: it is for people alone, and pst_task_set_ticket may change it between launches. */
static inline uint64_t pst__node_ticket(const pst__node *node) {
    return node->detail == NULL ? 0 : pst__load_relaxed(&node->detail->ticket);
}

#endif
