/* A random graph, what its tasks do when they run, and what must hold while they do. */
#ifndef PST_TESTS_SIM_PLAN_H
#define PST_TESTS_SIM_PLAN_H

#include "outside.h"

#include <penstock/graph.h>

#define PLAN_TASKS        24u
#define PLAN_PREDECESSORS 6u
#define PLAN_LAUNCHES     4u
#define PLAN_LANES        5u
#define PLAN_GATES        4u

typedef enum plan_kind {
    PLAN_GOOD,     /* all tasks run */
    PLAN_FAILS,    /* some tasks fail at their launch */
    PLAN_CANCELED, /* canceled at some moment */
    PLAN_POISONED, /* the runtime is stopped at some moment */
    PLAN_STUCK,    /* a task never ends: the watchdog stops the runtime */
    PLAN_FAULTY,   /* an allocation, a thread or a device call fails */
    PLAN_KINDS
} plan_kind;

typedef struct plan plan;

typedef struct plan_lane {
    pst_lane *lane;
    pst_lane_options options;
    struct plan_lane *leader;             /* of the lanes that have one order with this one */
    int is_busy;                          /* a host task is between its start and its end */
    uint32_t last_started[PLAN_LAUNCHES]; /* index + 1; leaders in order of submission */
} plan_lane;

typedef struct plan_task plan_task;

/* A task in one launch. */
typedef struct plan_turn {
    plan_task *task;
    uint32_t launch;
} plan_turn;

struct plan_task {
    plan *plan;
    int is_gate, fails, is_stuck;
    uint32_t lane, asks_first, asks, duration;
    int priority;
    uint32_t before[PLAN_PREDECESSORS], before_count, last_use;
    uint32_t events_wanted; /* that many of the outside come first, from events_first on */
    uint32_t events_first;
    uint32_t added, ends; /* how often it was added or launched, and has ended */
    uint32_t started[PLAN_LAUNCHES], finished[PLAN_LAUNCHES], opened[PLAN_LAUNCHES];
    pst_status status[PLAN_LAUNCHES];
    int is_canceled; /* by the oracle: a predecessor fails */
    pst_task handle;
    plan_turn turns[PLAN_LAUNCHES];
};

struct plan {
    uint64_t random;
    plan_kind kind;
    pst_device *device; /* an asynchronous one */
    pst_lane *borrowed; /* on it; NULL: none */
    outside outside;    /* what tasks wait for by after_events */
    int is_growing, has_backward_edges;
    uint32_t count, lane_count, launches;
    uint64_t stuck_since; /* the clock, when the task that never ends was launched */
    plan_lane lanes[PLAN_LANES];
    plan_task tasks[PLAN_TASKS];
};

/* Draws tasks and edges; lanes are there already. */
void plan_draw(plan *self, uint64_t seed, plan_kind kind);
/* The options of a task, with room for PLAN_PREDECESSORS handles and OUTSIDE_EVENTS events. */
pst_task_options plan_options(plan *self, uint32_t index, pst_task *after, pst_event **events);

/* The gate is open on this side of the call: from now on, or where the borrowed stream is. */
void plan_open(plan_task *gate, uint32_t launch, int on_stream);
/* The borrowed stream was made to wait for the task: it had better have run by then. */
void plan_expect_before(plan_task *task, uint32_t launch);

/* The task has been given to the library once more. */
void plan_added(plan_task *task);
/* 1 when all that was added has called back. */
int plan_has_ended(const plan *self);
/* All that was added has ended: exactly once, and as the oracle says. */
void plan_check(const plan *self);

#endif
