#include "ops/states.h"

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
