/* Groups of which the caller makes what is gathered. */
#include "world.h"

static model filled_model(int stage) {
    model model = odd_model(stage);
    model.gather_dtype = PST_INT8;
    return model;
}

static void train(rank_state *state) {
    const int groups = (int)state->model->group_count;
    DO(build_engine(state));
    DO(train_and_check(state, 4, mean_of_step_1));
    CHECK(state->fills == 4 * groups); /* once behind each update, when a forward begins */
    DO(forward(state, 0));
    DO(forward(state, 0));
    CHECK(state->fills == 5 * groups);
}

static void what_is_gathered_is_the_callers(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        const model model = filled_model(stage);
        run_ranks(1, &model, train, NULL);
        run_ranks(4, &model, train, NULL);
    }
}

static void refuse_once(rank_state *state) {
    DO(build_engine(state));
    DO(train_and_check(state, 1, mean_of_step_1));
    state->fill_status = PST_ECANCELED;
    CHECK(pst_zero_begin_forward(state->engine, 1) == PST_ECANCELED);
    state->fill_status = PST_OK;
    DO(train_and_check(state, 1, mean_of_step_1));
}

static void what_the_caller_cannot_make_is_asked_for_again(void **unused) {
    (void)unused;
    const model model = filled_model(3);
    run_ranks(2, &model, refuse_once, NULL);
}

static void add_filled_on_host(rank_state *state) {
    char text[256];
    CHECK_OK(create_engine(state));
    for (size_t p = 0; p < state->model->parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &state->model->shapes[p]));
    CHECK(add_group(state, 0) == PST_EUNSUPPORTED);
    CHECK(pst_runtime_error(state->runtime, text, sizeof text) > 0);
    CHECK(strstr(text, "'g0'") != NULL && strstr(text, "on the host") != NULL);
}

static void shards_on_the_host_are_refused(void **unused) {
    (void)unused;
    model model = filled_model(3);
    model.hosted = 1;
    run_ranks(2, &model, add_filled_on_host, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_gathered_is_the_callers),
        cmocka_unit_test(what_the_caller_cannot_make_is_asked_for_again),
        cmocka_unit_test(shards_on_the_host_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
