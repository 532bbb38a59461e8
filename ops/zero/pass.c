/* Where the training step is: what a hook of the training loop does in the pass that it is in. */
#include "ops/zero/engine.h"

#include <string.h>

/* ---- following a plan ------------------------------------------------------------------------ */

static int is_following(const pst__pass *pass) {
    return pass->kind == PST__FORWARD && pass->path != NULL;
}

/* A pass that leaves its path is on another one that is known, or goes on eagerly. */
static void stay_on_path(pst_zero *engine, uint32_t group, int is_use) {
    pst__pass *pass = &engine->pass;
    if (pst__path_goes_on(pass->path, pass->position, group, is_use)) return;
    pst__replay_leave(engine);
    pass->path = pst__path_other(engine, pass->grad, pass->path, pass->position, group, is_use);
    engine->stats.deviations++;
}

/* The plan's step for this use or release; NULL when there is none (any more). */
static const pst__plan_step *follow(pst_zero *engine, uint32_t group, int is_use) {
    pst__pass *pass = &engine->pass;
    if (!is_following(pass)) return NULL;
    stay_on_path(engine, group, is_use);
    return pass->path == NULL ? NULL : &pass->path->plan->steps[pass->position++];
}

static void finish_following(pst_zero *engine) {
    pst__pass *pass = &engine->pass;
    if (!is_following(pass)) return;
    stay_on_path(engine, PST__NO_GROUP, 0);
    if (pass->path == NULL) return;
    pst__path_taken(engine, pass->grad, pass->path);
    engine->stats.planned_passes++;
}

/* ---- stages 1 and 2 -------------------------------------------------------------------------- */

/* The group of a place in the order of recorded uses, or without a plan of all groups. */
static uint32_t group_at(const pst__plan *plan, size_t place) {
    if (plan == NULL) return (uint32_t)place;
    return plan->steps[place].is_use ? plan->steps[place].group : PST__NO_GROUP;
}

/* What an update made stale is gathered before anybody asks, but not ahead of a group whose use
 * names what it reads of it. */
static pst_status refresh(pst_zero *engine) {
    pst__pass *pass = &engine->pass;
    const size_t count = pass->refresh == NULL ? engine->group_count : pass->refresh->step_count;
    pst_status status = PST_OK;
    for (; status == PST_OK && pass->refreshed < count; pass->refreshed++) {
        const uint32_t group = group_at(pass->refresh, pass->refreshed);
        if (group == PST__NO_GROUP || !engine->groups[group].is_bound) continue;
        if (engine->groups[group].is_looked_up) return PST_OK;
        status = pst__gather_issue(engine, group, PST__ANYWHERE, 1);
    }
    return status;
}

static pst_status begin_refreshing(pst_zero *engine) {
    pst__pass *pass = &engine->pass;
    pass->refresh = pass->path == NULL ? NULL : pass->path->plan;
    pass->refreshed = 0;
    const pst_status status = pst__gather_sources_written(engine);
    return status == PST_OK ? refresh(engine) : status;
}

/* The use came that the others have waited for. */
static pst_status go_on_refreshing(pst_zero *engine, uint32_t group) {
    pst__pass *pass = &engine->pass;
    const size_t count = pass->refresh == NULL ? engine->group_count : pass->refresh->step_count;
    if (pass->kind != PST__FORWARD || !engine->groups[group].is_looked_up ||
        pass->refreshed >= count || group_at(pass->refresh, pass->refreshed) != group)
        return PST_OK;
    pass->refreshed++;
    return refresh(engine);
}

/* ---- gathers of a use ------------------------------------------------------------------------ */

/* What the plan has for this use: the group itself first, where it is not there yet. */
static pst_status gather_by_plan(pst_zero *engine, uint32_t group, const pst__plan_step *step) {
    const pst__plan_issue *issues = engine->pass.path->plan->issues + step->first_issue;
    pst_status status = PST_OK;
    if (step->issues == 0 || issues[0].group != group)
        status = pst__gather_issue(engine, group, PST__ANYWHERE, 0);
    for (size_t i = 0; status == PST_OK && i < step->issues; i++)
        status =
            pst__gather_issue(engine, issues[i].group, issues[i].offset, issues[i].group != group);
    if (step->refused != PST__NO_GROUP) pst__gather_refused(engine, step->refused);
    return status;
}

static pst_status gather_forward(pst_zero *engine, uint32_t group) {
    const pst__plan_step *step = follow(engine, group, 1);
    if (step != NULL && engine->options.stage == 3) return gather_by_plan(engine, group, step);
    const pst_status status = pst__gather_issue(engine, group, PST__ANYWHERE, 0);
    if (status != PST_OK || engine->options.stage == 3) return status;
    return go_on_refreshing(engine, group);
}

pst_status pst_zero_gather(pst_zero *engine, uint32_t group) {
    pst_status status = pst__zero_check(engine, group);
    if (status != PST_OK) return status;
    status = engine->pass.kind == PST__BACKWARD ? pst__backward_gather(engine, group)
                                                : gather_forward(engine, group);
    if (status == PST_OK)
        status = pst__record(engine, PST_ZERO_GATHER, group,
                             engine->groups[group].layout.gathered_bytes);
    if (status == PST_OK) engine->groups[group].gathered.uses++;
    pst__lookup_note_use(engine, group);
    pst__operation_keep_order(&engine->carrier);
    return status;
}

pst_status pst_zero_wait(pst_zero *engine, uint32_t index, void **memory) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    pst__group *group = &engine->groups[index];
    if (group->gathered.uses == 0)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s' is waited for without a use: call pst_zero_gather first",
                              group->name);
    status = pst__gather_wait(engine, group);
    if (status != PST_OK) return status;
    pst__timing_note(group->use_timing, PST__ENDED, engine->carrier.compute);
    group->use_timing = NULL;
    *memory = group->gathered.lease.memory;
    return PST_OK;
}

pst_status pst_zero_release(pst_zero *engine, uint32_t index) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    pst__group *group = &engine->groups[index];
    if (group->gathered.uses == 0)
        return pst__zero_fail(engine, PST_ESTATE, "group '%s' is released more often than gathered",
                              group->name);
    const pst__plan_step *step = follow(engine, index, 0);
    status = pst__record(engine, PST_ZERO_RELEASE, index, group->layout.gathered_bytes);
    if (status != PST_OK || --group->gathered.uses > 0) return status;
    int keep =
        engine->options.stage < 3 || (step != NULL && step->keep) ||
        group->gathered.state == PST__IN_FLIGHT || /* nobody waited: the pass's end takes it back */
        pst__backward_keeps(engine, group);
    if (!keep) return pst__gather_drop(engine, group);
    return pst__gather_state_step(&group->gathered.state, PST__STEP_KEEP);
}

uint32_t pst_zero_uses(const pst_zero *engine, uint32_t group) {
    return engine == NULL || group >= engine->group_count ? 0 : engine->groups[group].gathered.uses;
}

static void end_replay(pst_zero *engine, pst_status status, pst__path *path,
                       pst__program_kind kind) {
    if (status == PST_OK && path != NULL)
        pst__replay_end(engine, path, kind);
    else
        pst__replay_leave(engine);
}

/* ---- forward --------------------------------------------------------------------------------- */

static void begin_uses(pst_zero *engine) {
    pst__pass *pass = &engine->pass;
    pst__order *order = &engine->order;
    if (pass->after_backward)
        pst__order_forget_uses(order);
    else
        pst__order_bound_uses(order);
    if (pass->after_reduce) {
        memset(order->first_uses, 0, order->group_count * sizeof *order->first_uses);
        pst__lookup_forget(engine);
    }
    pass->after_backward = pass->after_reduce = 0;
}

pst_status pst__pass_end_broken(pst_zero *engine) {
    pst_status status = PST_OK;
    pst__replay_leave(engine);
    if (engine->pass.kind == PST__BACKWARD) {
        status = pst__backward_break_off(engine);
        pst__reduce_abandon(engine);
    }
    engine->pass.kind = PST__NO_PASS;
    return status == PST_OK ? pst__gather_settle(engine) : status;
}

pst_status pst_zero_begin_forward(pst_zero *engine, int grad) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    pst__pass *pass = &engine->pass;
    if (status == PST_OK) status = pst__carrier_join_graph(&engine->carrier);
    if (status == PST_OK) status = pst__pass_end_broken(engine);
    if (status == PST_OK) status = pst__operation_check_comms(&engine->carrier);
    if (status == PST_OK) status = pst__gather_refresh(engine);
    if (status == PST_OK) status = pst__gather_fill(engine);
    if (status != PST_OK) return status;
    pass->grad = grad != 0;
    if (pass->grad) begin_uses(engine);
    pst__record_begin(engine, pass->grad);
    pass->kind = PST__FORWARD;
    pass->path = engine->replay ? pst__path_expected(engine, pass->grad) : NULL;
    pass->position = 0;
    pst__notes_begin(&engine->history[pass->grad].notes,
                     (pass->path == NULL || engine->is_timed) && engine->carrier.outside == NULL);
    if (pass->grad && engine->carrier.outside == NULL)
        pst__clock_begin(&engine->passes, engine->carrier.compute);
    pst__replay_begin(engine, pass->path, PST__PROGRAM_FORWARD);
    engine->stats.forwards++;
    if (engine->options.stage < 3) status = begin_refreshing(engine);
    pst__operation_keep_order(&engine->carrier);
    return status;
}

pst_status pst_zero_end_forward(pst_zero *engine) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK) return status;
    pst__pass *pass = &engine->pass;
    if (pass->kind != PST__FORWARD)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "end_forward without begin_forward");
    finish_following(engine);
    pass->kind = PST__NO_PASS;
    pst__history *history = &engine->history[pass->grad];
    history->forward_count = history->current.count;
    if (pass->grad) pass->backward_path = pass->path;
    status = pass->grad ? pst__gather_wait_all(engine) : pst__gather_settle(engine);
    if (status == PST_OK) status = pst__gather_guard_shards(engine);
    end_replay(engine, status, pass->path, PST__PROGRAM_FORWARD);
    pst__zero_post(engine);
    if (status == PST_OK && !pass->grad) status = pst__record_complete(engine, 0);
    pst__operation_keep_order(&engine->carrier);
    return status;
}

/* ---- backward -------------------------------------------------------------------------------- */

static pst_status check_backward(pst_zero *engine, int reduce) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK) return status;
    if (engine->pass.kind != PST__NO_PASS)
        return pst__zero_fail(engine, PST_ESTATE, "%s",
                              engine->pass.kind == PST__FORWARD
                                  ? "begin_backward before end_forward"
                                  : "begin_backward in a backward that has not ended: end it, or "
                                    "begin a forward, which puts it aside");
    if (reduce && engine->options.gradient_target == NULL)
        return pst__zero_fail(engine, PST_EINVAL, "%s",
                              "a backward that reduces needs options.gradient_target");
    return PST_OK;
}

static pst__program_kind backward_program(const pst_zero *engine) {
    return engine->pass.reduce ? PST__PROGRAM_BACKWARD : PST__PROGRAM_ACCUMULATION;
}

pst_status pst_zero_begin_backward(pst_zero *engine, int reduce) {
    pst_status status = check_backward(engine, reduce);
    if (status != PST_OK) return status;
    engine->history[1].current.count = engine->history[1].forward_count;
    pst__notes_cut(&engine->history[1].notes, engine->history[1].forward_count);
    engine->pass.reduce = reduce != 0;
    status = pst__backward_begin(engine);
    if (status == PST_OK && reduce && engine->careful && engine->carrier.outside != NULL)
        return pst__zero_fail(engine, PST_ESTATE, "%s",
                              "a backward without a plan cannot be captured: train some steps like "
                              "it before");
    if (status != PST_OK) return status;
    pst__replay_begin(engine, engine->pass.backward_path, backward_program(engine));
    engine->pass.kind = PST__BACKWARD;
    return PST_OK;
}

pst_status pst_zero_gradients(pst_zero *engine, uint32_t group, const void *const *sources,
                              pst_dtype sources_dtype) {
    pst_status status = pst__zero_check(engine, group);
    if (status != PST_OK) return status;
    if (sources == NULL || pst_dtype_size(sources_dtype) == 0)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s': gradients need sources and a dtype",
                              engine->groups[group].name);
    if (engine->pass.kind != PST__BACKWARD || !engine->pass.reduce)
        return pst__zero_fail(engine, PST_ESTATE,
                              "group '%s': gradients outside of a backward that reduces",
                              engine->groups[group].name);
    status = pst__reduce_report(engine, group, sources, sources_dtype);
    if (status == PST_OK) status = pst__backward_reported(engine);
    pst__operation_keep_order(&engine->carrier);
    return status;
}

static pst_status finish_backward(pst_zero *engine) {
    pst_status status = pst__backward_finish(engine);
    if (status == PST_OK && engine->pass.reduce) status = pst__reduce_end(engine);
    if (status == PST_OK) status = pst__gather_settle(engine);
    if (status == PST_OK) status = pst__gather_guard_shards(engine);
    if (status == PST_OK) status = pst__operation_check_comms(&engine->carrier);
    return status;
}

pst_status pst_zero_end_backward(pst_zero *engine) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK) return status;
    pst__pass *pass = &engine->pass;
    if (pass->kind != PST__BACKWARD)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "end_backward without begin_backward");
    const int is_regular = !engine->careful && engine->extra_count == 0;
    status = finish_backward(engine);
    end_replay(engine, status, pass->backward_path, backward_program(engine));
    if (status != PST_OK) pst__reduce_abandon(engine);
    if (engine->carrier.outside == NULL) pst__clock_end(&engine->passes, engine->carrier.compute);
    pass->kind = PST__NO_PASS;
    pass->after_backward = 1;
    pass->after_reduce |= pass->reduce;
    if (pass->reduce) engine->is_steady = pass->backward_path != NULL && is_regular;
    engine->stats.backwards++;
    pst__zero_post(engine);
    if (status == PST_OK) status = pst__record_complete(engine, 1);
    pst__operation_keep_order(&engine->carrier);
    return status;
}
