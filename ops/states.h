/* The state of a gathered group, which is the state of each of its (parameter, gather dtype). */
#ifndef PST_OPS_STATES_H
#define PST_OPS_STATES_H

#include <penstock/status.h>

typedef enum pst__gather_state {
    PST__SHARDED = 0, /* no gathered memory */
    PST__IN_FLIGHT,   /* its gather is issued; compute has not waited for it yet */
    PST__GATHERED,    /* compute may read it */
    PST__KEPT,        /* no use is open, the memory stays */
    PST__GATHER_STATE_COUNT
} pst__gather_state;

typedef enum pst__gather_step {
    PST__STEP_ISSUE = 0, /* a gather goes out (again: into the same memory) */
    PST__STEP_WAIT,      /* compute waits for it */
    PST__STEP_KEEP,      /* the last use ended */
    PST__STEP_DROP,      /* the memory goes back */
    PST__GATHER_STEP_COUNT
} pst__gather_step;

/* Takes the step, or returns PST_ESTATE and leaves the state when the table has none. */
pst_status pst__gather_state_step(pst__gather_state *state, pst__gather_step step);
const char *pst__gather_state_name(pst__gather_state state);

#endif
