/* Communication copies that each gather makes: what is gathered is the same as of copies that stay,
 * and who writes one meets nobody who still reads it. */
#include "world.h"

static void on_all_worlds(const model *given, rank_body body) {
    model model = *given;
    model.transient = 1;
    if (model.delay_us == 0) model.delay_us = 20;
    for (int world = 1; world <= (UNDER_SANITIZER ? 2 : 4); world *= 2)
        run_ranks(world, &model, body, NULL);
}

static void train(rank_state *state) {
    DO(build_engine(state));
    DO(train_and_check(state, 5, mean_of_step_1));
    CHECK(stats_of(state).deviations == 0);
}

/* Many groups take turns in memory of three. Their values have few bits: bf16 holds them. */
static model long_model(int stage) {
    model model = chain_model(stage, 12, 24);
    model.gather_dtype = PST_BFLOAT16;
    model.prefetch_ahead = 10;
    return model;
}

static void gathers_of_many_groups_take_turns(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        model model = long_model(stage);
        model.one_comm = stage == 2;
        model.start_us = 30;
        on_all_worlds(&model, train);
    }
}

static void gathers_of_all_sizes_take_turns(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.gather_dtype = PST_BFLOAT16;
    model.prefetch_ahead = 3;
    on_all_worlds(&model, train);
}

static void shards_come_up_for_each_gather(void **unused) {
    (void)unused;
    model model = long_model(3);
    model.hosted = 1;
    on_all_worlds(&model, train);
    model.gather_dtype = PST_FLOAT32;
    on_all_worlds(&model, train);
}

/* ---- what it takes --------------------------------------------------------------------------- */

static void look_at_memory(rank_state *state) {
    DO(build_engine(state));
    *(size_t *)state->argument = stats_of(state).sources_reserved;
}

/* Buckets are there too, the same both times. */
static void copies_take_the_memory_of_three(void **unused) {
    (void)unused;
    model model = chain_model(3, 20, 4096);
    size_t kept = 0, transient = 0;
    model.gather_dtype = PST_BFLOAT16;
    model.bucket_bytes = 128;
    model.part_bytes = 128;
    model.device_segments = 1; /* as large as they are asked for */
    model.device = ON_CE;
    run_ranks_on_device(1, &model, look_at_memory, &kept);
    model.transient = 1;
    run_ranks_on_device(1, &model, look_at_memory, &transient);
    const size_t copy = (size_t)8 * 4096 * 2;
    assert_int_equal(kept - transient, (20 - 3) * copy);
}

/* ---- when ------------------------------------------------------------------------------------ */

/* Written while compute still runs: by then nothing reads them. */
static void write_behind_each_pass(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 0; pass < 12; pass++) {
        DO(forward(state, pass % 3 == 0));
        update(state);
    }
}

static void shards_may_change_after_any_pass(void **unused) {
    (void)unused;
    model model = long_model(3);
    on_all_worlds(&model, write_behind_each_pass);
    model.hosted = 1;
    on_all_worlds(&model, write_behind_each_pass);
}

static void use_outside_of_a_pass(rank_state *state) {
    void *memory = NULL;
    DO(build_engine(state));
    for (int step = 0; step < 4; step++) {
        for (size_t g = 0; g < state->model->group_count; g++) {
            CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
            CHECK_OK(pst_zero_wait(state->engine, state->groups[g], &memory));
            CHECK_OK(pst_zero_release(state->engine, state->groups[g]));
        }
        update(state);
        DO(forward(state, 0));
    }
}

static void the_host_writes_behind_a_gather_on_demand(void **unused) {
    (void)unused;
    model model = long_model(3);
    model.hosted = 1;
    on_all_worlds(&model, use_outside_of_a_pass);
}

static void break_off_and_train(rank_state *state) {
    DO(build_engine(state));
    for (size_t count = 0; count <= state->model->group_count; count += 4) {
        DO(forward(state, 1));
        make_gradients(state, 2);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (size_t i = 0; i < count && state->failure[0] == '\0'; i++)
            backward_use(state, state->model->group_count - 1 - i);
        CHECK_FINE();
        DO(train_and_check(state, 2, mean_of_step_1));
    }
}

static void a_backward_may_be_broken_off(void **unused) {
    (void)unused;
    model model = long_model(3);
    on_all_worlds(&model, break_off_and_train);
}

/* ---- at random ------------------------------------------------------------------------------- */

static void models_at_random_are_trained_alike(void **unused) {
    (void)unused;
    uint64_t dice = random_seed(__func__);
    for (int i = 0; i < random_programs(8); i++) {
        model model = drawn_model(&dice);
        model.transient = 1;
        model.hosted = (int)drawn(&dice, 2);
        run_ranks(1 << i % 3, &model, train, NULL);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathers_of_many_groups_take_turns),
        cmocka_unit_test(gathers_of_all_sizes_take_turns),
        cmocka_unit_test(shards_come_up_for_each_gather),
        cmocka_unit_test(copies_take_the_memory_of_three),
        cmocka_unit_test(shards_may_change_after_any_pass),
        cmocka_unit_test(the_host_writes_behind_a_gather_on_demand),
        cmocka_unit_test(a_backward_may_be_broken_off),
        cmocka_unit_test(models_at_random_are_trained_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
