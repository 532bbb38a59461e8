/* The states of a task within one launch, and which may follow which. */
#ifndef PST_SCHED_STATES_H
#define PST_SCHED_STATES_H

#include <stdint.h>

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

#endif
