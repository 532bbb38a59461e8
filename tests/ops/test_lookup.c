/* Groups that are looked up: the same values and gradients wherever uses name rows, and less on the
 * way where communicators know them. */
#include "world.h"

#define TABLE_ROWS 16

/* A table before two blocks and another one between them; of the tables' gradients the first one's
 * is pushed. */
static model model_with_tables(int stage) {
    model model = empty_model(stage);
    add_shape(&model, TABLE_ROWS, 16, 1);
    close_group(&model);
    add_shape(&model, 8, 16, 1);
    close_group(&model);
    add_shape(&model, 9, 5, 1);
    close_group(&model);
    add_shape(&model, 8, 16, 1);
    add_shape(&model, 2, 8, 1);
    close_group(&model);
    model.looked_up = model.forward_only = 1u | 1u << 2;
    model.bucket_bytes = 4096;
    model.push_bytes = 256;
    model.prefetch_ahead = 2;
    return model;
}

static int knows_rows(const rank_state *state) {
    return state->model->device == ON_CE;
}

static void run_in_stages(rank_body body) {
    for (int stage = 1; stage <= 3; stage++) {
        model model = model_with_tables(stage);
        model.delay_us = 20;
        run_ranks(2, &model, body, NULL);
    }
}

static void train_with_evaluation(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 6 && state->failure[0] == '\0'; step++) {
        if (step % 2 == 1) forward(state, 0);
        CHECK_FINE();
        train_and_check(state, 1, mean_of_step_1);
    }
    DO(finish_compute(state));
}

static void training_is_the_same_by_rows(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++)
        for (int world = 1; world <= 4; world *= 2) {
            model model = model_with_tables(stage);
            model.delay_us = 20;
            run_ranks(world, &model, train_with_evaluation, NULL);
            model.part_bytes = 128; /* of the table's gradient: no whole rows */
            model.bucket_bytes = 512;
            model.gather_dtype = PST_BFLOAT16;
            run_ranks(world, &model, train_with_evaluation, NULL);
            model.transient = 1;
            run_ranks(world, &model, train_with_evaluation, NULL);
        }
}

/* ---- what travels ---- */

static void count_what_travels(rank_state *state) {
    const size_t table = TABLE_ROWS * 16 * sizeof(float);
    int64_t *named = state->named[0][1];
    void *memory = NULL;
    DO(build_engine(state));
    named[0] = named[1] = 5;
    DO(begin_forward(state, 1));
    const pst_zero_stats before = stats_of(state);
    for (int use = 0; use < 2; use++) {
        CHECK_OK(pst_zero_name_rows(state->engine, state->groups[0], named, 2));
        CHECK_OK(pst_zero_gather(state->engine, state->groups[0]));
        CHECK_OK(pst_zero_wait(state->engine, state->groups[0], &memory));
        CHECK_OK(pst_zero_release(state->engine, state->groups[0]));
    }
    const pst_zero_stats after = stats_of(state);
    const size_t behind = state->model->stage < 3 ? 8 * 16 * sizeof(float) : 0; /* up to g2 */
    if (knows_rows(state))
        CHECK(after.gather_bytes - before.gather_bytes == 2 * 2 * table / TABLE_ROWS + behind);
    else if (state->model->stage == 3)
        CHECK(after.gather_bytes - before.gather_bytes == 2 * table);
    else
        CHECK(after.gathers == before.gathers); /* when the forward began */
    CHECK_OK(pst_zero_end_forward(state->engine));
    DO(finish_compute(state));
}

static void each_use_gathers_the_rows_that_it_has_named(void **unused) {
    (void)unused;
    run_in_stages(count_what_travels);
}

/* ---- rows and all of it in one forward ---- */

/* Behind the use by rows: by the root, say, which multiplies by the table. */
static void use_all_of_it(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 4 && state->failure[0] == '\0'; step++) {
        fresh_targets(state);
        DO(begin_forward(state, 1));
        for (size_t g = 0; g < state->model->group_count; g++) {
            DO(use_in_forward(state, g, 1));
        }
        DO(use(state, 0));
        CHECK_OK(pst_zero_end_forward(state->engine));
        state->named_in[0] = 0; /* all of its gradient counts */
        DO(end_step(state, mean_of_step_1));
    }
    DO(finish_compute(state));
}

static void a_use_that_names_nothing_has_all_rows(void **unused) {
    (void)unused;
    run_in_stages(use_all_of_it);
}

/* A backward may use it, too: all of it, and from then on in each. */
static void use_it_in_backwards(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 4 && state->failure[0] == '\0'; step++) {
        fresh_targets(state);
        forward(state, 1);
        DO(make_gradients(state, 1));
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (size_t g = state->model->group_count; g-- > 0;) {
            DO(begin_use(state, g));
            DO(report(state, g));
            DO(end_use(state, g));
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
        DO(check_gradients(state, mean_of_step_1));
        update(state);
    }
    DO(finish_compute(state));
}

static void a_backward_that_uses_it_has_all_rows(void **unused) {
    (void)unused;
    run_in_stages(use_it_in_backwards);
}

/* ---- what is refused ---- */

static void name_of_another(rank_state *state) {
    DO(build_engine(state));
    CHECK(pst_zero_name_rows(state->engine, state->groups[1], state->named[1][0], 1) == PST_EINVAL);
    CHECK(pst_zero_name_rows(state->engine, 99, state->named[1][0], 1) == PST_EINVAL);
}

static void add_what_is_no_table(rank_state *state) {
    const model *model = state->model;
    CHECK_OK(create_engine(state));
    for (size_t p = 0; p < model->parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &model->shapes[p]));
    CHECK(add_group(state, 3) == PST_EINVAL); /* two parameters */
}

static void other_groups_are_not_looked_up(void **unused) {
    (void)unused;
    model model = model_with_tables(3);
    run_ranks(2, &model, name_of_another, NULL);
    model.looked_up = model.forward_only = 1u << 3;
    run_ranks(1, &model, add_what_is_no_table, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_is_the_same_by_rows),
        cmocka_unit_test(each_use_gathers_the_rows_that_it_has_named),
        cmocka_unit_test(a_use_that_names_nothing_has_all_rows),
        cmocka_unit_test(a_backward_that_uses_it_has_all_rows),
        cmocka_unit_test(other_groups_are_not_looked_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
