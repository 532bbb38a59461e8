/* The paths that passes take through the model, each with the plan that was made when a pass first
 * took it. Which one a pass takes is seen by what it does; it begins with the one that came last
 * time behind the latest one, so that paths that take turns are foreseen. */
#include "ops/zero/engine.h"

static uint32_t index_of(const pst__history *history, const pst__path *path) {
    return (uint32_t)(path - history->paths);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static int is_same_step(const pst__plan_step *a, const pst__plan_step *b) {
    return a->group == b->group && a->is_use == b->is_use;
}

static int begin_alike(const pst__plan *a, const pst__plan *b, size_t count) {
    if (a->step_count < count || b->step_count < count) return 0;
    for (size_t i = 0; i < count; i++)
        if (!is_same_step(&a->steps[i], &b->steps[i])) return 0;
    return 1;
}

static int are_equal(const pst__plan *a, const pst__plan *b) {
    return a->step_count == b->step_count && begin_alike(a, b, a->step_count);
}

static int is_of(const pst__plan *plan, const pst__recording *recording) {
    size_t count = 0;
    for (size_t i = 0; i < recording->count; i++) {
        const pst_zero_op *operation = &recording->operations[i];
        if (!pst__plan_is_step(operation)) continue;
        const pst__plan_step step = {.group = operation->group,
                                     .is_use = operation->kind == PST_ZERO_GATHER};
        if (count == plan->step_count || !is_same_step(&plan->steps[count], &step)) return 0;
        count++;
    }
    return count == plan->step_count;
}

int pst__path_is_known(const pst_zero *engine, int grad, const pst__recording *recording) {
    const pst__history *history = &engine->history[grad];
    if (history->next_plan != NULL && is_of(history->next_plan, recording)) return 1;
    for (size_t i = 0; i < PST__MOST_PATHS; i++)
        if (history->paths[i].plan != NULL && is_of(history->paths[i].plan, recording)) return 1;
    return 0;
}

/* ---- following ------------------------------------------------------------------------------- */

pst__path *pst__path_expected(pst_zero *engine, int grad) {
    pst__history *history = &engine->history[grad];
    if (history->latest == PST__NO_PATH) return NULL;
    pst__path *latest = &history->paths[history->latest];
    return latest->successor == PST__NO_PATH ? latest : &history->paths[latest->successor];
}

int pst__path_goes_on(const pst__path *path, size_t position, uint32_t group, int is_use) {
    const pst__plan *plan = path->plan;
    if (group == PST__NO_GROUP) return position == plan->step_count;
    const pst__plan_step step = {.group = group, .is_use = is_use};
    return position < plan->step_count && is_same_step(&plan->steps[position], &step);
}

pst__path *pst__path_other(pst_zero *engine, int grad, const pst__path *left, size_t position,
                           uint32_t group, int is_use) {
    pst__path *latest = NULL;
    for (size_t i = 0; i < PST__MOST_PATHS; i++) {
        pst__path *path = &engine->history[grad].paths[i];
        if (path->plan != NULL && (latest == NULL || path->used > latest->used) &&
            pst__path_goes_on(path, position, group, is_use) &&
            begin_alike(path->plan, left->plan, position))
            latest = path;
    }
    return latest;
}

void pst__path_taken(pst_zero *engine, int grad, const pst__path *path) {
    pst__history *history = &engine->history[grad];
    const uint32_t index = index_of(history, path);
    if (history->latest != PST__NO_PATH) history->paths[history->latest].successor = index;
    history->latest = index;
    history->paths[index].used = ++history->passes;
}

/* ---- the table ------------------------------------------------------------------------------- */

static pst__path *place_for(pst__history *history, const pst__plan *plan) {
    pst__path *oldest = &history->paths[0];
    for (size_t i = 0; i < PST__MOST_PATHS; i++) {
        pst__path *path = &history->paths[i];
        if (path->plan != NULL && are_equal(path->plan, plan)) return path;
        if (path->used < oldest->used) oldest = path;
    }
    return oldest;
}

size_t pst__path_largest_peak(const pst_zero *engine) {
    size_t peak = 0;
    for (int grad = 0; grad < 2; grad++) {
        const pst__history *history = &engine->history[grad];
        const pst__plan *next = history->next_plan;
        if (next != NULL && next->summary.peak_bytes > peak) peak = next->summary.peak_bytes;
        for (size_t i = 0; i < PST__MOST_PATHS; i++) {
            const pst__plan *plan = history->paths[i].plan;
            if (plan == NULL || (next != NULL && are_equal(plan, next))) continue;
            if (plan->summary.peak_bytes > peak) peak = plan->summary.peak_bytes;
        }
    }
    return peak;
}

/* Other paths may name the replaced one as their successor: their next prediction is wrong once. */
void pst__path_add(pst_zero *engine, int grad, pst__plan *plan) {
    pst__history *history = &engine->history[grad];
    pst__path *path = place_for(history, plan);
    if (engine->pass.backward_path == path) engine->pass.backward_path = NULL;
    pst__plan_destroy(engine->carrier.heap, path->plan);
    pst__replay_forget(engine, path);
    path->plan = plan;
    path->successor = PST__NO_PATH;
    if (grad) pst__agreement_copy(engine, &path->agreed, &engine->agreed_eagerly);
    pst__path_taken(engine, grad, path);
}

void pst__path_free_all(pst_zero *engine) {
    for (int grad = 0; grad < 2; grad++)
        for (size_t i = 0; i < PST__MOST_PATHS; i++) {
            pst__plan_destroy(engine->carrier.heap, engine->history[grad].paths[i].plan);
            pst__replay_forget(engine, &engine->history[grad].paths[i]);
        }
    pst__replay_free(engine);
}
