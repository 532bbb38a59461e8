/* Record, compile, replay: what is gathered ahead, what is kept, what a deviation does. */
#include "ops/zero/plan.h"
#include "sched/runtime.h"
#include "world.h"

/* ---- the simulation alone -------------------------------------------------------------------- */

#define USE(g)                                                                                     \
    { .kind = PST_ZERO_GATHER, .group = (g) }
#define RELEASE(g)                                                                                 \
    { .kind = PST_ZERO_RELEASE, .group = (g) }

static pst_runtime *runtime;

static int open_runtime(void **unused) {
    (void)unused;
    return pst_runtime_create(NULL, &runtime) == PST_OK ? 0 : -1;
}

static int close_runtime(void **unused) {
    (void)unused;
    pst_runtime_destroy(runtime);
    return 0;
}

static const size_t equal_bytes[4] = {1024, 1024, 1024, 1024};
static const pst__need unknown_need[4];
static const pst__measured unmeasured[6];
static const pst__costs no_costs = {.measured = unmeasured};

static pst__plan_input input_of(const pst_zero_op *operations, size_t count, uint32_t ahead,
                                size_t budget) {
    return (pst__plan_input){.runtime = runtime,
                             .heap = pst__runtime_heap(runtime),
                             .operations = operations,
                             .count = count,
                             .group_count = 4,
                             .bytes = equal_bytes,
                             .reduce_bytes = equal_bytes,
                             .costs = &no_costs,
                             .need = unknown_need,
                             .grad = 1,
                             .window = 1,
                             .ahead = ahead,
                             .budget = budget};
}

static const pst_zero_op chain[] = {USE(0), RELEASE(0), USE(1), RELEASE(1),
                                    USE(2), RELEASE(2), USE(3), RELEASE(3)};

static void assert_issues(const pst__plan *plan, size_t step, const uint32_t *groups,
                          size_t count) {
    assert_int_equal(plan->steps[step].issues, count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(plan->issues[plan->steps[step].first_issue + i].group, groups[i]);
}

static void issues_the_next_groups_in_order_of_use(void **unused) {
    (void)unused;
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 2, 0);
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_issues(plan, 0, (uint32_t[]){0, 1, 2}, 3);
    assert_issues(plan, 2, (uint32_t[]){3}, 1);
    assert_issues(plan, 4, NULL, 0); /* then come 3, and 1 in the backward: both are there */
    assert_int_equal(plan->summary.groups, 4);
    assert_int_equal(plan->summary.uses, 4);
    pst__plan_destroy(input.heap, plan);
}

static void keeps_what_the_backward_begins_with(void **unused) {
    (void)unused;
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 2, 0);
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_false(plan->steps[1].keep);
    assert_true(plan->steps[3].keep); /* in the window of the next use, which is group 2's */
    assert_true(plan->steps[5].keep);
    assert_true(plan->steps[7].keep);
    for (size_t group = 1; group < 4; group++)
        assert_true(plan->backward_offsets[group] == PST__ANYWHERE);
    assert_true(plan->backward_offsets[0] != PST__ANYWHERE);
    pst__plan_destroy(input.heap, plan);
    input.grad = 0; /* an evaluation keeps nothing */
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_false(plan->steps[7].keep);
    pst__plan_destroy(input.heap, plan);
}

/* Group 1 is a table: nobody knows its rows before its use, and what comes behind waits for it. */
static void nothing_is_gathered_ahead_of_a_use_that_names_its_rows(void **unused) {
    (void)unused;
    static const unsigned char is_table[4] = {0, 1, 0, 0};
    static const pst__need need[4] = {[1] = PST__NEED_NONE};
    static const pst__measured measured[4] = {
        {.gather = 700, .forward = 1}, {.gather = 5}, {.gather = 700}, {.gather = 700}};
    pst__costs costs;
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 2, 0);
    input.is_looked_up = is_table;
    input.need = need;
    input.costs = &costs;
    assert_int_equal(
        pst__costs_create(input.heap, measured, 4, equal_bytes, equal_bytes, is_table, 0, &costs),
        PST_OK);
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_issues(plan, 0, (uint32_t[]){0}, 1);
    assert_issues(plan, 2, (uint32_t[]){1, 2, 3}, 3);
    assert_false(plan->steps[3].keep);
    assert_int_equal(plan->group_forecasts[1].keep, PST_ZERO_KEEP_ROWS);
    assert_int_equal(plan->group_forecasts[1].gather_ns, 5); /* and says nothing of the others */
    assert_int_equal(plan->group_forecasts[2].gather_ns, 700);
    pst__plan_destroy(input.heap, plan);
    pst__costs_free(input.heap, &costs);
}

static void stays_within_the_budget(void **unused) {
    (void)unused;
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 3, 2 * 1024);
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_issues(plan, 0, (uint32_t[]){0, 1}, 2);
    assert_issues(plan, 2, (uint32_t[]){2}, 1);
    assert_int_equal(plan->summary.lower_bound_bytes, 2 * 1024);
    assert_true(plan->summary.peak_bytes >= plan->summary.lower_bound_bytes);
    pst__plan_destroy(input.heap, plan);
}

static void what_the_budget_has_no_room_for_is_noted(void **unused) {
    (void)unused;
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 2, 2 * 1024);
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_int_equal(plan->steps[0].refused, 2);
    assert_int_equal(plan->steps[2].refused, 3);
    assert_int_equal(plan->steps[4].refused, 1); /* 3 fits; 1 comes in the backward */
    pst__plan_destroy(input.heap, plan);
    input.budget = 3 * 1024; /* as much as is wanted ahead */
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    for (size_t step = 0; step < plan->step_count; step++)
        assert_int_equal(plan->steps[step].refused, PST__NO_GROUP);
    pst__plan_destroy(input.heap, plan);
}

/* A head: the gather behind its backward gets its memory. */
static void a_backward_needs_no_more_than_its_forward(void **unused) {
    (void)unused;
    static const size_t bytes[4] = {1024, 1024, 1024, 8192};
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 2, 0);
    input.bytes = input.reduce_bytes = bytes;
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_int_equal(plan->summary.lower_bound_bytes, 8192 + 2 * 1024);
    assert_int_equal(plan->summary.peak_bytes, 8192 + 2 * 1024);
    pst__plan_destroy(input.heap, plan);
}

/* Those behind it find room that was not used right before. */
static void gathers_of_a_backward_wait_for_no_release_where_there_is_room(void **unused) {
    (void)unused;
    static const pst_zero_op layers[] = {USE(0), RELEASE(0), USE(1), RELEASE(1),
                                         USE(2), RELEASE(2), USE(3), RELEASE(3),
                                         USE(4), RELEASE(4), USE(5), RELEASE(5)};
    static const size_t bytes[6] = {1024, 1024, 1024, 1024, 1024, 8192};
    static const pst__need need[6];
    pst__plan *plan;
    pst__plan_input input = input_of(layers, 12, 1, 0);
    input.bytes = input.reduce_bytes = bytes;
    input.need = need;
    input.group_count = 6;
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    assert_int_equal(plan->summary.peak_bytes, 8192 + 1024);
    for (size_t group = 0; group < 2; group++) {
        assert_int_not_equal(plan->backward_offsets[group], PST__ANYWHERE);
        assert_int_not_equal(plan->backward_offsets[group], plan->backward_offsets[group + 2]);
    }
    pst__plan_destroy(input.heap, plan);
}

static void a_group_larger_than_the_budget_is_still_gathered(void **unused) {
    (void)unused;
    pst__plan *plan;
    pst__plan_input input = input_of(chain, 8, 3, 100);
    assert_int_equal(pst__plan_create(&input, &plan), PST_OK);
    for (size_t i = 0; i < 4; i++)
        assert_issues(plan, 2 * i, (uint32_t[]){(uint32_t)i}, 1);
    pst__plan_destroy(input.heap, plan);
}

static void refuses_what_is_no_pass(void **unused) {
    (void)unused;
    pst__plan *plan;
    const pst_zero_op unknown[] = {USE(9)};
    const pst_zero_op unmatched[] = {USE(0), RELEASE(0), RELEASE(0)};
    pst__plan_input input = input_of(unknown, 1, 1, 0);
    assert_int_equal(pst__plan_create(&input, &plan), PST_EINVAL);
    assert_null(plan);
    input = input_of(unmatched, 3, 1, 0);
    assert_int_equal(pst__plan_create(&input, &plan), PST_EINVAL);
}

static void an_outer_group_comes_first_in_the_backward_and_lives_longest(void **unused) {
    (void)unused;
    const pst_zero_op nested[] = {USE(0), USE(1), RELEASE(1), USE(2), RELEASE(2), RELEASE(0)};
    pst__period spans[4];
    pst__backward backward = {0};
    const pst__heap *heap = pst__runtime_heap(runtime);
    assert_int_equal(pst__plan_spans(nested, 6, 4, spans), PST_OK);
    assert_int_equal(pst__backward_alloc(heap, &backward, 4), PST_OK);
    assert_int_equal(pst__backward_build(heap, &backward, spans, 4, 4, unknown_need, 0), PST_OK);
    const uint32_t order[] = {0, 2, 1};
    assert_int_equal(backward.count, 3);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(backward.turns[i].group, order[i]);
    assert_int_equal(backward.turns[0].finished, 2);
    assert_int_equal(backward.turns[1].finished, 1);
    assert_int_equal(backward.position[3], PST__NO_POSITION);
    pst__backward_free(heap, &backward, 4);
}

/* ---- in an engine ---------------------------------------------------------------------------- */

static void train(rank_state *state, int passes) {
    for (int pass = 0; pass < passes; pass++) {
        DO(forward(state, 1));
        DO(backward(state, 1));
        DO(update(state));
    }
}

static void look_ahead(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 1));
    CHECK(stats_of(state).prefetches == 0 && stats_of(state).planned_passes == 0);
    CHECK(stats_of(state).gathers == 12);
    pst_zero_reset_stats(state->engine);
    uint64_t expected[] = {3, 4, 5, 6, 6, 6}; /* the window of two slides to the end */
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t g = 0; g < 6; g++) {
        DO(use(state, g));
        CHECK(stats_of(state).gathers == expected[g]);
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK(stats_of(state).planned_passes == 1);
    DO(backward(state, 1));
    CHECK(stats_of(state).gathers == 9); /* 5, 4 and 3 were kept for the backward */
    pst_zero_stats stats = stats_of(state);
    CHECK(stats.prefetches > 0 && stats.deviations == 0);
    CHECK(stats.plan_peak >= stats.plan_lower_bound);
    CHECK((stats.plan_lower_bound > 0) == (state->world > 1)); /* one rank needs no copies */
    CHECK(stats.arena_peak <= stats.plan_peak);
}

static void gathers_ahead_from_the_second_pass_on(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks(1, &model, look_ahead, NULL);
    run_ranks(2, &model, look_ahead, NULL);
    run_ranks(4, &model, look_ahead, NULL);
}

/* The first group is the last one of the backward. */
static void go_without_values(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 3; pass++) {
        pst_zero_reset_stats(state->engine);
        fresh_targets(state);
        DO(train(state, 1));
        DO(check_gradients(state, mean_of_step_1));
        const pst_zero_stats stats = stats_of(state);
        CHECK(stats.gathers == (pass == 0 ? 11 : 8)); /* with a plan 5, 4 and 3 are kept */
        CHECK(stats.deviations == 0);
    }
    CHECK_OK(pst_zero_begin_forward(state->engine, 1)); /* it may be used there after all */
    for (size_t g = 0; g < 6; g++)
        use(state, g);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    DO(use(state, 0));
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static void a_backward_does_not_gather_what_is_needed_in_forwards_only(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    model.forward_only = 1;
    run_ranks(1, &model, go_without_values, NULL);
    run_ranks(4, &model, go_without_values, NULL);
}

/* The first group is around the others, so its backward comes first. Mostly rank 0 has that one
 * alone, and rank 1 the others. */
static void share_the_groups(rank_state *state) {
    DO(build_engine(state));
    for (uint64_t step = 1; step <= 8; step++) {
        fresh_targets(state);
        CHECK_OK(pst_zero_begin_forward(state->engine, 1));
        begin_use(state, 0);
        for (size_t g = 1; g < 4; g++)
            use(state, g);
        CHECK_FINE();
        end_use(state, 0);
        CHECK_OK(pst_zero_end_forward(state->engine));
        make_gradients(state, step);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        if (step % 4 == 0 || state->rank == 0) backward_use(state, 0);
        for (size_t g = 4; g-- > 1;)
            if (step % 4 == 0 || state->rank == 1) backward_use(state, g);
        CHECK_FINE();
        CHECK_OK(pst_zero_end_backward(state->engine));
        DO(update(state));
    }
}

static void gradients_of_what_is_not_gathered_wait_for_what_others_need(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 64);
    model.forward_only = 0xe;
    run_ranks(2, &model, share_the_groups, NULL);
}

static void watch_bytes(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 4));
    pst_zero_stats stats = stats_of(state);
    CHECK(stats.prefetches > 0);
    pst_zero_reset_stats(state->engine);
    forward(state, 1); /* here nothing lags: never more than the budget */
    CHECK_FINE();
    CHECK(stats_of(state).arena_peak <= state->model->prefetch_bytes);
    DO(backward(state, 1));
    CHECK(stats_of(state).arena_peak <= stats_of(state).plan_peak);
}

static void gathered_bytes_stay_within_the_budget(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    model.prefetch_ahead = 4;
    model.prefetch_bytes = 3 * 8 * 64 * sizeof(float);
    run_ranks(2, &model, watch_bytes, NULL);
}

static void go_backwards_once(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 2));
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t g = 6; g-- > 0;) {
        DO(use(state, g));
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK(stats_of(state).deviations == 1);
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = 0; g < 6; g++) {
        DO(backward_use(state, g));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
    pst_zero_reset_stats(state->engine);
    CHECK_OK(pst_zero_begin_forward(state->engine, 1)); /* the new path is planned now */
    for (size_t g = 6; g-- > 0;) {
        DO(use(state, g));
    }
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK(stats_of(state).deviations == 0 && stats_of(state).planned_passes == 1);
    CHECK(stats_of(state).prefetches > 0);
}

static void another_path_is_noticed_and_recorded_anew(void **unused) {
    (void)unused;
    for (int stage = 3; stage <= 3; stage++) {
        model model = chain_model(stage, 6, 16);
        run_ranks(1, &model, go_backwards_once, NULL);
        run_ranks(2, &model, go_backwards_once, NULL);
    }
}

static void stop_early(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 2));
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    DO(use(state, 0));
    CHECK_OK(pst_zero_end_forward(state->engine)); /* two groups are in flight for nothing */
    CHECK(stats_of(state).deviations == 1);
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    DO(backward_use(state, 0));
    CHECK_OK(pst_zero_end_backward(state->engine));
    CHECK_OK(pst_zero_begin_forward(state->engine, 1)); /* broken off at once */
    train(state, 2);
}

static void prefetched_groups_that_nobody_uses_come_back(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 16);
    run_ranks(2, &model, stop_early, NULL);
}

static void mix_passes(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 3; pass++) {
        fresh_targets(state);
        DO(forward(state, 1));
        DO(forward(state, 1));
        DO(forward(state, 0));
        DO(backward(state, 1));
        DO(check_gradients(state, mean_of_step_1));
        DO(forward(state, 0));
        DO(update(state));
    }
    CHECK(stats_of(state).deviations == 0);
    CHECK(stats_of(state).forwards == 12 && stats_of(state).backwards == 3);
}

static void several_forwards_and_evaluations_around_one_backward(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        run_ranks(1, &model, mix_passes, NULL);
        run_ranks(2, &model, mix_passes, NULL);
        run_ranks(4, &model, mix_passes, NULL);
    }
}

static void turn_replay_off(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 1));
    pst_zero_set_replay(state->engine, 0);
    DO(train(state, 2));
    CHECK(stats_of(state).prefetches == 0 && stats_of(state).planned_passes == 0);
    pst_zero_set_replay(state->engine, 1);
    DO(train(state, 1));
    CHECK(stats_of(state).prefetches > 0 && stats_of(state).planned_passes == 1);
}

static void replay_can_be_turned_off(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    run_ranks(2, &model, turn_replay_off, NULL);
}

static pst_status compile(rank_state *state, const pst_zero_op *operations, size_t count,
                          uint32_t ahead, pst_zero_plan *plan) {
    return pst_zero_compile(state->engine,
                            &(pst_zero_compile_options){.size = sizeof(pst_zero_compile_options),
                                                        .grad = 1,
                                                        .operations = operations,
                                                        .count = count,
                                                        .prefetch_ahead = ahead},
                            plan);
}

static void compile_it_oneself(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 1));
    pst_zero_op operations[64];
    size_t count;
    pst_zero_plan plan;
    CHECK_OK(pst_zero_recorded(state->engine, 1, operations, 64, &count));
    CHECK(count == 4 * 5); /* use and release, twice, and a reduction, of each group */
    CHECK(operations[0].kind == PST_ZERO_GATHER && operations[0].group == 0);
    CHECK(operations[0].bytes == 8 * 16 * sizeof(float) && !operations[0].backward);
    CHECK(operations[8].backward && operations[8].group == 3);
    if (state->model->device == ON_HOST) CHECK(operations[9].kind == PST_ZERO_REDUCE);
    CHECK(operations[count - 2].kind == PST_ZERO_REDUCE ||
          operations[count - 1].kind == PST_ZERO_REDUCE);
    CHECK_OK(compile(state, operations, count, 0, &plan));
    CHECK(plan.groups == 4 && plan.uses == 4 && plan.peak_bytes >= plan.lower_bound_bytes);
    pst_zero_reset_stats(state->engine);
    DO(forward(state, 1));
    DO(backward(state, 1));
    CHECK(stats_of(state).prefetches == 0 && stats_of(state).planned_passes == 1);
    CHECK(compile(state, &operations[1], 1, 0, &plan) == PST_EINVAL);
}

static void a_recording_is_compiled_on_request(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    run_ranks(1, &model, compile_it_oneself, NULL);
    run_ranks(2, &model, compile_it_oneself, NULL);
}

static void compile_differently(rank_state *state) {
    DO(build_engine(state));
    const pst_zero_op one[] = {USE(0), RELEASE(0)}, other[] = {USE(1), RELEASE(1)};
    pst_zero_plan plan;
    CHECK(compile(state, state->rank == 0 ? one : other, 2, 1, &plan) == PST_EMISMATCH);
    CHECK_OK(compile(state, one, 2, 1, &plan)); /* nothing is lost */
}

static void ranks_that_compile_different_plans_are_told(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    run_ranks(2, &model, compile_differently, NULL);
}

static void stage_2_reports_its_plan(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 2));
    pst_zero_stats stats = stats_of(state);
    const int is_within = state->gather->ops->gathers_within;
    CHECK(stats.arena_peak == (is_within ? 0 : stats.plan_peak));
    CHECK(stats.plan_lower_bound == stats.plan_peak);
    CHECK(stats.planned_passes == 1);
}

static void stages_1_and_2_plan_all_groups_at_once(void **unused) {
    (void)unused;
    model model = chain_model(2, 4, 64);
    run_ranks(2, &model, stage_2_reports_its_plan, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(issues_the_next_groups_in_order_of_use),
        cmocka_unit_test(keeps_what_the_backward_begins_with),
        cmocka_unit_test(nothing_is_gathered_ahead_of_a_use_that_names_its_rows),
        cmocka_unit_test(stays_within_the_budget),
        cmocka_unit_test(what_the_budget_has_no_room_for_is_noted),
        cmocka_unit_test(a_backward_needs_no_more_than_its_forward),
        cmocka_unit_test(gathers_of_a_backward_wait_for_no_release_where_there_is_room),
        cmocka_unit_test(a_group_larger_than_the_budget_is_still_gathered),
        cmocka_unit_test(refuses_what_is_no_pass),
        cmocka_unit_test(an_outer_group_comes_first_in_the_backward_and_lives_longest),
        cmocka_unit_test(gathers_ahead_from_the_second_pass_on),
        cmocka_unit_test(a_backward_does_not_gather_what_is_needed_in_forwards_only),
        cmocka_unit_test(gradients_of_what_is_not_gathered_wait_for_what_others_need),
        cmocka_unit_test(gathered_bytes_stay_within_the_budget),
        cmocka_unit_test(another_path_is_noticed_and_recorded_anew),
        cmocka_unit_test(prefetched_groups_that_nobody_uses_come_back),
        cmocka_unit_test(several_forwards_and_evaluations_around_one_backward),
        cmocka_unit_test(replay_can_be_turned_off),
        cmocka_unit_test(a_recording_is_compiled_on_request),
        cmocka_unit_test(ranks_that_compile_different_plans_are_told),
        cmocka_unit_test(stages_1_and_2_plan_all_groups_at_once),
    };
    return cmocka_run_group_tests(tests, open_runtime, close_runtime);
}
