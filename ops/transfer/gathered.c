#include "ops/transfer/gathered.h"
#include "ops/transfer/operation.h"

#define NO PST__GATHER_STATE_COUNT

static const pst__gather_state next_state[PST__GATHER_STATE_COUNT][PST__GATHER_STEP_COUNT] = {
    /*                   issue           wait           keep            drop */
    [PST__SHARDED] = {PST__IN_FLIGHT, NO, NO, NO},
    [PST__IN_FLIGHT] = {NO, PST__GATHERED, PST__IN_FLIGHT, NO},
    [PST__GATHERED] = {PST__IN_FLIGHT, PST__GATHERED, PST__KEPT, PST__SHARDED},
    [PST__KEPT] = {PST__IN_FLIGHT, PST__GATHERED, PST__KEPT, PST__SHARDED},
};

static const char *const names[PST__GATHER_STATE_COUNT] = {"sharded", "in flight", "gathered",
                                                           "kept"};

pst_status pst__gather_state_step(pst__gather_state *state, pst__gather_step step) {
    pst__gather_state next = next_state[*state][step];
    if (next == NO) return PST_ESTATE;
    *state = next;
    return PST_OK;
}

const char *pst__gather_state_name(pst__gather_state state) {
    return names[state];
}

void pst__gathered_note(pst__gathered *gathered, pst__operation *operation) {
    gathered->gather = operation;
    gathered->ticket = operation->work.collective.ticket;
}

/* The gather that is on its way; NULL: none. */
static pst__operation *in_flight(const pst__gathered *gathered) {
    pst__operation *operation = gathered->gather;
    if (operation == NULL) return NULL;
    int is_own = operation->queue == pst__queue_of(operation->carrier, PST__GATHER_LANE) &&
                 operation->work.collective.ticket == gathered->ticket;
    /* Pairs with the release in finish_part: what it wrote is there. */
    return is_own && !pst__load_acquire(&operation->ended) ? operation : NULL;
}

pst_status pst__gathered_wait(pst__carrier *carrier, pst__gathered *gathered) {
    pst__operation *operation = in_flight(gathered);
    pst_status status = operation == NULL ? PST_OK : pst__operation_wait(operation);
    if (status == PST_OK) status = pst_runtime_status(carrier->runtime);
    return status == PST_OK ? pst__gather_state_step(&gathered->state, PST__STEP_WAIT) : status;
}

pst_status pst__gathered_drop(pst__carrier *carrier, pst_arena *arena, pst__gathered *gathered) {
    pst_status status = pst__carrier_record(carrier, gathered->released);
    if (status == PST_OK) status = pst__gather_state_step(&gathered->state, PST__STEP_DROP);
    if (status != PST_OK) return status;
    pst_arena_release(arena, &gathered->lease, gathered->released);
    gathered->lease = (pst_lease){0};
    return PST_OK;
}
