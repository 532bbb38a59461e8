/* A gathered copy of what is sharded: its memory, its uses, the state that both are in. */
#ifndef PST_OPS_TRANSFER_GATHERED_H
#define PST_OPS_TRANSFER_GATHERED_H

#include "ops/transfer/carrier.h"

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

typedef struct pst__gathered {
    pst__gather_state state;
    uint32_t uses;
    int is_stale; /* gathered before the shard changed */
    pst_lease lease;
    pst_event *released; /* compute's last use of the lease */
    pst__operation *gather;
    uint64_t ticket; /* of `gather`, which may be somebody else's by now */
} pst__gathered;

/* Takes the step, or returns PST_ESTATE and leaves the state when the table has none. */
pst_status pst__gather_state_step(pst__gather_state *state, pst__gather_step step);
const char *pst__gather_state_name(pst__gather_state state);

/* There, and as the shard is; or in use, when nobody may change it. */
static inline int pst__gathered_is_current(const pst__gathered *gathered) {
    return gathered->state != PST__SHARDED && (!gathered->is_stale || gathered->uses > 0);
}
/* The operation is on its way with the gather; the caller takes the step. */
void pst__gathered_note(pst__gathered *gathered, pst__operation *operation);
/* Compute waits for what is not PST__SHARDED. */
pst_status pst__gathered_wait(pst__carrier *carrier, pst__gathered *gathered);
/* The memory goes back to its arena, behind what compute was given so far. */
pst_status pst__gathered_drop(pst__carrier *carrier, pst_arena *arena, pst__gathered *gathered);

#endif
