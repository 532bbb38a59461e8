/* Training steps as CUDA graphs: a capture of passes, and what is around a launch of the graph. */
#include "ops/zero/engine.h"

/* Captured passes begin as they do behind an update: so each launch gathers what it has updated.
 * Copies that are cast are so behind the update, those that the caller fills before a forward. */
static void mark_stale(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        group->gathered.is_stale = 1;
        if (group->is_filled_outside) group->copy_is_old = 1;
    }
}

int pst_zero_is_steady(const pst_zero *engine) {
    return engine != NULL && engine->is_steady && engine->pass.kind == PST__NO_PASS;
}

pst_status pst_zero_drain(pst_zero *engine) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status == PST_OK) status = pst__pass_end_broken(engine);
    return status == PST_OK ? pst__carrier_drain(&engine->carrier) : status;
}

static pst_status check_no_pass(pst_zero *engine, const char *what) {
    const pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK || engine->pass.kind == PST__NO_PASS) return status;
    return pst__zero_fail(engine, PST_ESTATE, "%s within a pass: end it before", what);
}

/* Compute's own stream may be the one that is under capture, and is not asked. */
pst_status pst_zero_begin_capture(pst_zero *engine, void *stream) {
    if (engine == NULL) return PST_EINVAL;
    pst_status status = pst_runtime_status(engine->carrier.runtime);
    if (status != PST_OK) return status;
    if (!engine->sealed || engine->pass.kind != PST__NO_PASS || engine->carrier.outside != NULL)
        return pst__zero_fail(engine, PST_ESTATE, "begin_capture %s",
                              !engine->sealed                   ? "before seal"
                              : engine->carrier.outside != NULL ? "within a capture"
                                                                : "within a pass");
    if (engine->options.shards_on_host)
        return pst__zero_fail(engine, PST_EUNSUPPORTED, "%s",
                              "the host trains its shards, which no graph can hold");
    status = pst__carrier_begin_capture(&engine->carrier, stream);
    if (status == PST_OK) mark_stale(engine);
    return status;
}

pst_status pst_zero_end_capture(pst_zero *engine) {
    if (engine == NULL) return PST_EINVAL;
    const pst_status status = engine->pass.kind == PST__NO_PASS ? PST_OK : PST_ESTATE;
    const pst_status joined = pst__carrier_end_capture(&engine->carrier);
    if (status == PST_OK) return joined;
    return pst__zero_fail(engine, status, "%s",
                          "end_capture within a pass: the graph is of no use");
}

pst_status pst_zero_before_graph(pst_zero *engine) {
    pst_status status = check_no_pass(engine, "before_graph");
    if (status == PST_OK) status = pst__operation_check_comms(&engine->carrier);
    if (status == PST_OK) status = pst__carrier_before_graph(&engine->carrier);
    if (status == PST_OK) pst__clock_begin(&engine->graphs, engine->carrier.compute);
    return status;
}

pst_status pst_zero_after_graph(pst_zero *engine) {
    const pst_status status = check_no_pass(engine, "after_graph");
    if (status != PST_OK) return status;
    pst__clock_end(&engine->graphs, engine->carrier.compute);
    mark_stale(engine);
    pst__zero_post(engine);
    return pst__carrier_give_up(&engine->carrier, pst__carrier_after_graph(&engine->carrier));
}
