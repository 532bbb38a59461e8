/* Reductions: means over ranks, orders, missing and late gradients, buckets. */
#include "world.h"

static void on_all_worlds(const model *model, rank_body body) {
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_ranks(worlds[i], model, body, NULL);
}

static float mean_of_steps_1_and_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_of_step_1(state, parameter, element) +
           mean_gradient(state->world, ~0u, 2, parameter, element);
}

static float twice_step_1(const rank_state *state, size_t parameter, size_t element) {
    float mean = mean_of_step_1(state, parameter, element);
    return mean + mean;
}

static float nothing(const rank_state *state, size_t parameter, size_t element) {
    (void)state, (void)parameter, (void)element;
    return 0.0f;
}

/* ---- parts of a step; their callers go on with CHECK_FINE ------------------------------------ */

static void forward_and_backward(rank_state *state, uint64_t step) {
    DO(forward(state, 1));
    backward(state, step);
}

/* A forward, then the begin of a backward whose gradients are there and not reported yet. */
static void begin_backward(rank_state *state) {
    DO(forward(state, 1));
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
}

static void build_and_begin_backward(rank_state *state) {
    DO(build_engine(state));
    begin_backward(state);
}

static void check_who_has_gradients(rank_state *state) {
    for (size_t p = 0; p < state->model->parameter_count; p++)
        CHECK(pst_zero_has_gradient(state->engine, state->parameters[p]) ==
              state->model->shapes[p].trainable);
}

/* ---- values ---------------------------------------------------------------------------------- */

static void train_twice(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 3; pass++) {
        DO(forward_and_backward(state, 1));
        DO(check_gradients(state, mean_of_step_1));
        fresh_targets(state);
        DO(update(state));
    }
    check_who_has_gradients(state);
}

static void reduces_to_the_mean_in_rank_order(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        on_all_worlds(&model, train_twice);
    }
}

static void reduces_over_one_communicator(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.one_comm = 1;
    on_all_worlds(&model, train_twice);
}

static void splits_into_buckets_and_takes_larger_groups(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.bucket_bytes = 256;
    on_all_worlds(&model, train_twice);
}

static void a_large_group_travels_in_parts(void **unused) {
    (void)unused;
    for (size_t parts = 1; parts <= 3; parts++) {
        model model = odd_model(3);
        model.bucket_bytes = 256;
        model.part_bytes = parts * 128;
        on_all_worlds(&model, train_twice);
    }
}

static void count_parts(rank_state *state) {
    DO(build_engine(state));
    DO(forward_and_backward(state, 1));
    DO(check_gradients(state, mean_of_step_1));
    CHECK(stats_of(state).reduces == 12 + 10);
}

static void a_group_that_is_larger_than_most_travels_in_parts_of_their_size(void **unused) {
    (void)unused;
    model model = chain_model(3, 12, 16); /* 256 bytes a rank's chunk over 2 ranks */
    model.bucket_bytes = 128;
    add_shape(&model, 8, 160, 1); /* 2,560, and 3,072 are in the others */
    close_group(&model);
    run_ranks(2, &model, count_parts, NULL);
}

static void accumulate(rank_state *state) {
    DO(build_engine(state));
    for (uint64_t step = 1; step <= 2; step++) {
        DO(forward_and_backward(state, step));
    }
    check_gradients(state, mean_of_steps_1_and_2);
}

static void accumulates_over_two_backwards(void **unused) {
    (void)unused;
    model model = odd_model(2);
    on_all_worlds(&model, accumulate);
}

static void reduce_in_bf16(rank_state *state) {
    DO(build_engine(state));
    DO(forward_and_backward(state, 1));
    DO(check_who_has_gradients(state));
    for (size_t g = 0; g < state->model->group_count; g++)
        for (size_t p = state->model->first[g]; p < state->model->first[g + 1]; p++) {
            pst_parameter_layout layout;
            CHECK_OK(pst_zero_parameter_layout(state->engine, state->groups[g],
                                               state->parameters[p], &layout));
            if (!state->model->shapes[p].trainable) continue;
            size_t width = state->model->shapes[p].row_elements;
            DO(finish_compute(state));
            for (size_t i = 0; i < layout.shard_rows * width; i++) {
                float exact = mean_of_step_1(state, p, layout.first_row * width + i);
                float found = state->targets[g][layout.gradient_offset / sizeof(float) + i];
                CHECK(found - exact < 0.01f && exact - found < 0.01f);
            }
        }
}

static void reduces_in_another_dtype(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.reduce_dtype = PST_BFLOAT16;
    model.gather_dtype = PST_BFLOAT16;
    on_all_worlds(&model, reduce_in_bf16);
}

static pst_status make_equal_gradients_now(void *argument) {
    const rank_state *state = *(rank_state *const *)argument;
    for (size_t p = 0; p < state->model->parameter_count; p++)
        for (size_t i = 0; i < elements_of(&state->model->shapes[p]); i++)
            state->gradients[p][i] = *(const float *)state->argument;
    return PST_OK;
}

static float what_each_rank_has(const rank_state *state, size_t parameter, size_t element) {
    (void)parameter, (void)element;
    return *(const float *)state->argument;
}

static void reduce_equal_gradients(rank_state *state) {
    DO(build_and_begin_backward(state));
    on_compute(state, make_equal_gradients_now, &state, sizeof state);
    for (size_t g = state->model->group_count; g-- > 0;) {
        DO(backward_use(state, g));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
    check_gradients(state, what_each_rank_has);
}

/* The least number of float16, and one of which two are too many for it. */
static void means_of_float16_neither_vanish_nor_overflow(void **unused) {
    (void)unused;
    float values[] = {0x1p-24f, 60000.0f};
    model model = odd_model(3);
    model.reduce_dtype = PST_FLOAT16;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        for (int world = 2; world <= 4; world += 2)
            run_ranks(world, &model, reduce_equal_gradients, &values[i]);
}

/* ---- who has a gradient ---------------------------------------------------------------------- */

static float without_the_last_rank(const rank_state *state, size_t parameter, size_t element) {
    unsigned have = (1u << (state->world - 1)) - 1u;
    return mean_gradient(state->world, parameter < 2 ? have : ~0u, 1, parameter, element);
}

static void skip_on_the_last_rank(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 3; pass++) {
        fresh_targets(state);
        DO(begin_backward(state));
        for (size_t g = state->model->group_count; g-- > 0;) {
            if (g == 0 && state->rank == state->world - 1) continue; /* never reached here */
            DO(backward_use(state, g));
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
        DO(check_gradients(state, without_the_last_rank));
        CHECK(pst_zero_has_gradient(state->engine, state->parameters[0]) == (state->world > 1));
    }
}

static void a_rank_that_never_reaches_a_group_sends_zeros(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, skip_on_the_last_rank);
}

static void skip_everywhere(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 3; pass++) {
        fresh_targets(state);
        DO(begin_backward(state));
        DO(backward_use(state, 2));
        CHECK_OK(pst_zero_end_backward(state->engine));
        CHECK(!pst_zero_has_gradient(state->engine, state->parameters[0]));
        CHECK(pst_zero_has_gradient(state->engine, state->parameters[5]));
        DO(check_gradient(state, 0, 0, nothing));
        DO(check_gradient(state, 2, 5, mean_of_step_1));
    }
}

static void no_rank_has_a_gradient(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, skip_everywhere);
}

/* After the first backward the ranks agree that nobody needs the frozen groups 0 and 1 there. */
static void skip_the_frozen(rank_state *state) {
    DO(build_engine(state));
    const uint64_t expected[] = {6, 3, 3}; /* eager; then group 2 is kept for the backward */
    for (int pass = 0; pass < 3; pass++) {
        uint64_t before = stats_of(state).gathers;
        DO(begin_backward(state));
        DO(backward_use(state, 2));
        CHECK_OK(pst_zero_end_backward(state->engine));
        CHECK(stats_of(state).gathers - before == expected[pass]);
    }
}

static void need_a_frozen_group_after_all(rank_state *state) {
    DO(skip_the_frozen(state));
    for (int pass = 0; pass < 2; pass++) {
        DO(forward(state, 1));
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (size_t g = 3; g-- > 0;) {
            DO(backward_use(state, g));
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
    }
}

static model frozen_model(void) {
    model model = empty_model(3);
    for (size_t g = 0; g < 3; g++) {
        add_shape(&model, 6, 5, g == 2);
        close_group(&model);
    }
    return model;
}

static void frozen_groups_that_nobody_needs_leave_the_backward(void **unused) {
    (void)unused;
    model model = frozen_model();
    on_all_worlds(&model, skip_the_frozen);
}

static void frozen_groups_may_come_back_into_the_backward(void **unused) {
    (void)unused;
    model model = frozen_model();
    on_all_worlds(&model, need_a_frozen_group_after_all);
}

/* ---- orders ---------------------------------------------------------------------------------- */

/* ---- one rank alone -------------------------------------------------------------------------- */

static void keep_what_is_reported(rank_state *state) {
    const int is_alone = state->world == 1;
    state->keeps = 1;
    DO(build_engine(state));
    DO(forward_and_backward(state, 1));
    for (size_t g = 0; g < state->model->group_count; g++) {
        CHECK(state->kept[g] == is_alone && state->has_target[g] == !is_alone);
        CHECK(state->consumed[g] == !is_alone);
        CHECK(pst_zero_has_written(state->engine, state->groups[g]));
    }
    check_who_has_gradients(state);
    CHECK(stats_of(state).reduces > 0);
}

static void one_rank_keeps_what_it_reports(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    on_all_worlds(&model, keep_what_is_reported);
    run_ranks_async(1, &model, keep_what_is_reported, NULL);
}

/* A parameter without a gradient counts as zeros, which the target gets. */
static void keep_nothing_that_is_missing(rank_state *state) {
    const void *none[MOST_PARAMETERS] = {NULL};
    state->keeps = 1;
    DO(build_and_begin_backward(state));
    CHECK_OK(pst_zero_gradients(state->engine, state->groups[0], none, PST_FLOAT32));
    CHECK_OK(pst_zero_end_backward(state->engine));
    for (size_t g = 0; g < state->model->group_count; g++)
        CHECK(state->kept[g] == 0 && state->has_target[g]);
}

static void what_lacks_a_gradient_is_not_kept(void **unused) {
    (void)unused;
    model model = chain_model(3, 2, 16);
    run_ranks(1, &model, keep_nothing_that_is_missing, NULL);
}

static void report_in_another_order(rank_state *state) {
    DO(build_and_begin_backward(state));
    size_t groups = state->model->group_count;
    size_t shift = (size_t)state->rank; /* every rank another one */
    for (size_t i = 0; i < groups; i++) {
        DO(backward_use(state, (i + shift) % groups));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
    DO(check_gradients(state, mean_of_step_1));
    for (size_t g = 0; g < groups; g++)
        CHECK(state->consumed[g] == 1);
}

static void overwrite_what_is_consumed(rank_state *state) {
    DO(build_and_begin_backward(state));
    state->spoils_consumed = 1;
    for (size_t g = state->model->group_count; g-- > 0;) {
        DO(backward_use(state, g));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
    state->spoils_consumed = 0;
    check_gradients(state, mean_of_step_1);
}

static void consumed_gradients_may_be_overwritten(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, overwrite_what_is_consumed);
}

static void take_planned_steps(rank_state *state) {
    const int steps = 4;
    DO(build_engine(state));
    for (int step = 0; step < steps; step++) {
        fresh_targets(state);
        DO(forward_and_backward(state, 1));
    }
    DO(check_gradients(state, mean_of_step_1));
    for (size_t g = 0; g < state->model->group_count; g++)
        CHECK(state->consumed[g] == steps);
}

static void each_report_is_consumed_once_beside_frozen_groups(void **unused) {
    (void)unused;
    model model = empty_model(3);
    for (int g = 0; g < 6; g++) {
        add_shape(&model, 8, 16, g % 2 == 0);
        close_group(&model);
    }
    run_ranks_async(2, &model, take_planned_steps, NULL);
}

static void ranks_may_report_in_different_orders(void **unused) {
    (void)unused;
    for (int one = 0; one <= 1; one++) {
        model model = odd_model(3);
        model.one_comm = one;
        on_all_worlds(&model, report_in_another_order);
    }
}

static void hold_back(rank_state *state) {
    DO(build_and_begin_backward(state));
    report(state, 0); /* its turn is last */
    CHECK_FINE();
    CHECK(state->consumed[0] == 0);
    DO(report(state, 2));
    const int at_once = is_on_host(state); /* elsewhere the last ones are being copied */
    CHECK(state->consumed[2] == at_once && state->consumed[0] == 0);
    DO(report(state, 1));
    CHECK(state->consumed[2] == 1 && state->consumed[1] == 1 && state->consumed[0] == at_once);
    CHECK_OK(pst_zero_end_backward(state->engine));
    CHECK(state->consumed[0] == 1);
    check_gradients(state, mean_of_step_1);
}

static void early_gradients_wait_for_their_turn(void **unused) {
    (void)unused;
    model model = odd_model(2);
    on_all_worlds(&model, hold_back);
}

static float twice_on_even_ranks(const rank_state *state, size_t parameter, size_t element) {
    float sum = mean_of_step_1(state, parameter, element);
    if (parameter < 5) return sum; /* group 2 only */
    return sum + mean_gradient(state->world, 0x5u, 1, parameter, element);
}

static void report_late(rank_state *state) {
    DO(build_and_begin_backward(state));
    for (size_t g = 3; g-- > 0;) {
        DO(report(state, g));
    }
    if (state->rank % 2 == 0) report(state, 2);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_backward(state->engine));
    DO(check_gradients(state, twice_on_even_ranks));
    CHECK(state->consumed[2] == (state->rank % 2 == 0 ? 2 : 1));
}

static void a_second_report_adds_even_if_one_rank_has_none(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, report_late);
}

static void backward_twice(rank_state *state) {
    DO(build_engine(state));
    DO(forward_and_backward(state, 1));
    DO(backward(state, 1));
    check_gradients(state, twice_step_1);
}

static void a_second_backward_after_one_forward_adds(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, backward_twice);
}

static void accumulate_locally(rank_state *state) {
    DO(build_engine(state));
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    DO(use(state, 0));
    DO(use(state, 1));
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK_OK(pst_zero_begin_backward(state->engine, 0));
    DO(use(state, 1));
    make_gradients(state, 1);
    const void *sources[2] = {NULL, NULL};
    CHECK(pst_zero_gradients(state->engine, state->groups[0], sources, PST_FLOAT32) == PST_ESTATE);
    DO(use(state, 0));
    CHECK_OK(pst_zero_end_backward(state->engine));
    CHECK(stats_of(state).reduces == 0);
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    DO(use(state, 2));
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = 3; g-- > 0;) { /* 0 and 1 were used in the forward before only */
        DO(report(state, g));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
    check_gradients(state, mean_of_step_1);
}

static void accumulates_without_communication(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, accumulate_locally);
}

static void break_off(rank_state *state) {
    DO(build_and_begin_backward(state));
    report(state, 2); /* in a bucket, not flushed */
    CHECK_FINE();
    report(state, 0); /* waits for its turn */
    CHECK_FINE();
    fresh_targets(state);
    DO(forward(state, 1));
    CHECK(state->consumed[2] == 1 && state->consumed[0] == 1);
    DO(backward(state, 1));
    check_gradients(state, mean_of_step_1);
}

static void a_backward_that_was_broken_off_is_forgotten(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, break_off);
}

/* Groups 0 and 1 by a graph that is kept over another pass: by each rank, or the first one alone.
 */
static int has_kept_graph(const rank_state *state) {
    return state->rank == 0 || !*(const int *)state->argument;
}

static float mean_over_who_has_it(const rank_state *state, size_t parameter, size_t element) {
    const int is_kept_by_one = parameter < 5 && *(const int *)state->argument;
    return mean_gradient(state->world, is_kept_by_one ? 1u : ~0u, 1, parameter, element);
}

static void report_a_kept_graph(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 2; pass++) {
        DO(begin_backward(state));
        DO(backward_use(state, 2));
        CHECK_OK(pst_zero_end_backward(state->engine));
        fresh_targets(state);
        CHECK_OK(pst_zero_begin_forward(state->engine, 1));
        DO(use(state, 2));
        CHECK_OK(pst_zero_end_forward(state->engine));
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (size_t g = 3; g-- > 0;) {
            if (g < 2 && !has_kept_graph(state)) continue;
            DO(report(state, g));
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
        DO(check_gradients(state, mean_over_who_has_it));
        DO(check_who_has_gradients(state));
    }
}

static void a_graph_that_was_kept_over_another_pass_is_reduced(void **unused) {
    (void)unused;
    for (int on_one_rank = 0; on_one_rank <= 1; on_one_rank++)
        for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
            model model = odd_model(3);
            run_ranks(worlds[i], &model, report_a_kept_graph, &on_one_rank);
        }
}

static void see_what_is_written(rank_state *state) {
    const int goes_out_at_once = state->model->bucket_bytes != 0 || state->world == 1;
    DO(build_and_begin_backward(state));
    CHECK(!pst_zero_has_written(state->engine, state->groups[2]));
    DO(report(state, 2));
    report(state, 0); /* waits for its turn */
    CHECK_FINE();
    CHECK(pst_zero_has_written(state->engine, state->groups[2]) == goes_out_at_once);
    CHECK(!pst_zero_has_written(state->engine, state->groups[0]));
    DO(report(state, 1));
    CHECK_OK(pst_zero_end_backward(state->engine));
    for (size_t g = 0; g < 3; g++)
        CHECK(pst_zero_has_written(state->engine, state->groups[g]));
    DO(begin_backward(state));
    for (size_t g = 0; g < 3; g++)
        CHECK(!pst_zero_has_written(state->engine, state->groups[g]));
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static void a_target_is_written_from_when_its_bucket_goes_out(void **unused) {
    (void)unused;
    model model = odd_model(2);
    on_all_worlds(&model, see_what_is_written);
    model.bucket_bytes = 256;
    on_all_worlds(&model, see_what_is_written);
}

/* ---- buckets --------------------------------------------------------------------------------- */

static void count_reduces(rank_state *state) {
    DO(build_engine(state));
    DO(forward_and_backward(state, 1));
    DO(check_gradients(state, mean_of_step_1));
    CHECK(stats_of(state).reduces == *(const uint64_t *)state->argument);
    CHECK(stats_of(state).reduce_bytes == 4 * 8 * 16 * sizeof(float));
}

static void small_groups_share_a_bucket(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16); /* 256 bytes a rank's chunk over 2 ranks */
    uint64_t expected = 1;
    run_ranks(2, &model, count_reduces, &expected);
    model.bucket_bytes = 512;
    expected = 2;
    run_ranks(2, &model, count_reduces, &expected);
    model.bucket_bytes = 128;
    expected = 4;
    run_ranks(2, &model, count_reduces, &expected);
    model.part_bytes = 128; /* each group in two */
    expected = 8;
    run_ranks(2, &model, count_reduces, &expected);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reduces_to_the_mean_in_rank_order),
        cmocka_unit_test(reduces_over_one_communicator),
        cmocka_unit_test(splits_into_buckets_and_takes_larger_groups),
        cmocka_unit_test(a_large_group_travels_in_parts),
        cmocka_unit_test(a_group_that_is_larger_than_most_travels_in_parts_of_their_size),
        cmocka_unit_test(accumulates_over_two_backwards),
        cmocka_unit_test(reduces_in_another_dtype),
        cmocka_unit_test(means_of_float16_neither_vanish_nor_overflow),
        cmocka_unit_test(a_rank_that_never_reaches_a_group_sends_zeros),
        cmocka_unit_test(no_rank_has_a_gradient),
        cmocka_unit_test(frozen_groups_that_nobody_needs_leave_the_backward),
        cmocka_unit_test(frozen_groups_may_come_back_into_the_backward),
        cmocka_unit_test(one_rank_keeps_what_it_reports),
        cmocka_unit_test(what_lacks_a_gradient_is_not_kept),
        cmocka_unit_test(ranks_may_report_in_different_orders),
        cmocka_unit_test(consumed_gradients_may_be_overwritten),
        cmocka_unit_test(each_report_is_consumed_once_beside_frozen_groups),
        cmocka_unit_test(early_gradients_wait_for_their_turn),
        cmocka_unit_test(a_second_report_adds_even_if_one_rank_has_none),
        cmocka_unit_test(a_second_backward_after_one_forward_adds),
        cmocka_unit_test(accumulates_without_communication),
        cmocka_unit_test(a_backward_that_was_broken_off_is_forgotten),
        cmocka_unit_test(a_graph_that_was_kept_over_another_pass_is_reduced),
        cmocka_unit_test(a_target_is_written_from_when_its_bucket_goes_out),
        cmocka_unit_test(small_groups_share_a_bucket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
