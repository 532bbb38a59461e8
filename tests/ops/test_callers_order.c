/* The caller's order: a call that submits collectives waits until they are launched, so that what
 * the caller launches next, for other groups of ranks, comes behind them on every rank.
 */
#include "ops/zero/engine.h"
#include "world.h"

/* Every launch takes far longer than a call: whoever waits for one that is under way is counted. */
static void count_late_launches(rank_state *state) {
    DO(build_engine(state));
    CHECK(stats_of(state).exposed_ns == 0); /* sealing is no gather of a group */
    DO(train_step(state, 1));               /* nothing replays yet */
    CHECK(stats_of(state).replayed_passes == 0 && stats_of(state).late_launches == 0);
    for (int step = 0; step < 4; step++) {
        DO(train_step(state, 1));
        finish_compute(state);
        CHECK_OK(pst_zero_drain(state->engine));
    }
    CHECK(stats_of(state).replayed_passes > 0);
    CHECK((stats_of(state).late_launches > 0) == !state->model->in_callers_order);
}

static void what_a_call_submits_is_launched_when_it_returns(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++)
        for (int always = 0; always <= 1; always++) {
            model model = chain_model(stage, 3, 16);
            model.bucket_bytes = 256;
            /* The worker that a call wakes may take its core, and others have that next. */
            model.start_us = always ? 2000 : 30000;
            model.in_callers_order = always;
            run_ranks_async(2, &model, count_late_launches, NULL);
        }
}

static int all_is_launched(const rank_state *state) {
    const pst__queue *queues = state->engine->carrier.queues;
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        for (const pst__operation *operation = queues[lane].oldest; operation != NULL;
             operation = operation->next)
            if (!pst__operation_is_launched(operation)) return 0;
    return 1;
}

static void gather_and_look(rank_state *state, size_t g) {
    CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
    CHECK(all_is_launched(state));
    DO(use(state, g));
    DO(end_use(state, g));
}

static void forward_and_look(rank_state *state, int grad) {
    DO(begin_forward(state, grad));
    CHECK(all_is_launched(state));
    for (size_t g = 0; g < state->model->group_count; g++)
        DO(gather_and_look(state, g));
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK(all_is_launched(state));
}

static void step_and_look(rank_state *state) {
    DO(fresh_targets(state));
    DO(forward_and_look(state, 1));
    DO(make_gradients(state, 1));
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    CHECK(all_is_launched(state));
    for (size_t g = state->model->group_count; g-- > 0;) {
        DO(gather_and_look(state, g));
        DO(report(state, g));
        CHECK(all_is_launched(state));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
    CHECK(all_is_launched(state));
    DO(update(state));
}

/* Starting a collective takes far longer than a call that does not wait for it. */
static void look_behind_each_call(rank_state *state) {
    DO(build_engine(state));
    DO(step_and_look(state));
    DO(forward_and_look(state, 0));
    CHECK(stats_of(state).replayed_passes == 0);
    for (int step = 0; step < 4 && state->model->in_callers_order; step++) {
        DO(step_and_look(state));
        DO(forward_and_look(state, 0));
        DO(finish_compute(state));
        CHECK_OK(pst_zero_drain(state->engine));
    }
    CHECK((stats_of(state).replayed_passes > 0) == state->model->in_callers_order);
    DO(finish_compute(state));
}

static void nothing_is_left_to_launch_behind_a_call(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++)
        for (int always = 0; always <= 1; always++) {
            model model = chain_model(stage, 3, 16);
            model.bucket_bytes = 256;
            model.start_us = 2000;
            model.in_callers_order = always;
            run_ranks_async(2, &model, look_behind_each_call, NULL);
            model.replicas = 2;
            run_ranks_on_boards(4, &model, look_behind_each_call, NULL);
        }
}

/* The waiting thread may launch a collective itself, which is no wait: that takes no time here. */
static _Thread_local int is_caller;

static pst_status start_late_elsewhere(pst_comm *comm, const pst_collective *collective,
                                       pst_stream *stream, void **request) {
    if (!is_caller) async_sleep(2500000);
    return async_start(comm, collective, stream, request);
}

static void gather_past_the_deadline(rank_state *state) {
    DO(build_engine(state));
    if (state->rank != 0) return; /* it would hear of rank 0's end */
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    is_caller = 1;
    async_comm_of(state->gather)->ops.start = start_late_elsewhere;
    int is_late = 0;
    for (size_t g = 0; g < state->model->group_count && !is_late; g++) {
        CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
        is_late = text_has(state, "has not come in 2.000 s");
        CHECK(pst_runtime_status(state->runtime) == (is_late ? PST_ETIMEDOUT : PST_OK));
    }
    if (is_late) *(int *)state->argument = 1;
}

static void a_launch_that_the_order_waits_for_has_a_deadline(void **unused) {
    (void)unused;
    int has_been_late = 0;
    model model = chain_model(3, 3, 16);
    model.deadline_ns = 2000000000u; /* sealing has to be through by then */
    for (int run = 0; run < 20 && !has_been_late; run++)
        run_ranks_on_boards(2, &model, gather_past_the_deadline, &has_been_late);
    assert_true(has_been_late);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_call_submits_is_launched_when_it_returns),
        cmocka_unit_test(nothing_is_left_to_launch_behind_a_call),
        cmocka_unit_test(a_launch_that_the_order_waits_for_has_a_deadline),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
