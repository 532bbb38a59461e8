/* Shards on the host: it writes them and reads gradients as soon as a call has returned; what the
 * device gathers and reduces is the same. On the device `async` kernels refuse memory of the host.
 */
#include "world.h"

/* Means over these many ranks are exact. */
static void on_all_worlds(const model *given, rank_body body) {
    model model = *given;
    model.hosted = 1;
    if (model.delay_us == 0) model.delay_us = 20;
    for (int world = 1; world <= (UNDER_SANITIZER ? 2 : 4); world *= 2)
        run_ranks(world, &model, body, NULL);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* One rank alone keeps nothing on the device either. */
static void train(rank_state *state) {
    state->keeps = 1;
    build_engine(state);
    CHECK_FINE();
    train_and_check(state, 5, mean_of_step_1);
    CHECK_FINE();
    CHECK(stats_of(state).deviations == 0);
    CHECK(state->async == NULL || state->async->host_copies > 0);
}

static void gathers_and_reduces_as_on_the_device(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        on_all_worlds(&model, train);
        model.one_comm = 1;
        on_all_worlds(&model, train);
    }
}

/* Values have few bits: bf16 holds them. */
static void casts_on_the_device(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.gather_dtype = PST_BFLOAT16;
    on_all_worlds(&model, train);
}

static void gradients_go_down_bucket_by_bucket(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.bucket_bytes = 256;
    model.part_bytes = 128;
    on_all_worlds(&model, train);
    model.push_bytes = 64;
    on_all_worlds(&model, train);
}

static float mean_of_replicas(const rank_state *state, size_t parameter, size_t element) {
    float mean = 0;
    for (int replica = 0; replica < 2; replica++) {
        float sum = 0;
        for (int rank = 2 * replica; rank < 2 * replica + 2; rank++)
            sum += gradient_of(rank, 1, parameter, element);
        mean += (float)((double)sum / state->world);
    }
    return mean;
}

static void train_replicas(rank_state *state) {
    build_engine(state);
    CHECK_FINE();
    train_and_check(state, 4, mean_of_replicas);
}

static void gradients_are_means_over_all_replicas(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.hosted = 1;
    model.replicas = 2;
    model.bucket_bytes = 512;
    model.delay_us = 20;
    run_ranks_on_device(4, &model, train_replicas, NULL);
    run_ranks_on_boards(4, &model, train_replicas, NULL);
}

/* ---- adding ---------------------------------------------------------------------------------- */

static float mean_of_steps_1_and_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_of_step_1(state, parameter, element) +
           mean_gradient(state->world, ~0u, 2, parameter, element);
}

/* So that buckets go out, and what they hold is taken again, while the device is behind. */
static void backward_slowly(rank_state *state, uint64_t step) {
    make_gradients(state, step);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = state->model->group_count; g-- > 0 && state->failure[0] == '\0';) {
        backward_use(state, g);
        async_sleep(state->model->start_us);
    }
    CHECK_FINE();
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static void accumulate(rank_state *state) {
    build_engine(state);
    for (int pass = 0; pass < 3 && state->failure[0] == '\0'; pass++) {
        fresh_targets(state);
        for (uint64_t step = 1; step <= 2 && state->failure[0] == '\0'; step++) {
            forward(state, 1);
            CHECK_FINE();
            backward_slowly(state, step);
        }
        CHECK_FINE();
        check_gradients(state, mean_of_steps_1_and_2);
        CHECK_FINE();
        update(state);
    }
}

static void a_second_backward_adds(void **unused) {
    (void)unused;
    model model = odd_model(2);
    model.bucket_bytes = 128; /* on the host parts are larger than that */
    on_all_worlds(&model, accumulate);
    model = chain_model(3, 8, 16);
    model.bucket_bytes = model.part_bytes = 128;
    model.delay_us = 200;
    model.start_us = 300;
    on_all_worlds(&model, accumulate);
}

static float three_times_step_1(const rank_state *state, size_t parameter, size_t element) {
    const float mean = mean_of_step_1(state, parameter, element);
    return mean + mean + mean;
}

static void report_three_times(rank_state *state) {
    build_engine(state);
    for (int pass = 0; pass < 4 && state->failure[0] == '\0'; pass++) {
        fresh_targets(state);
        forward(state, 1);
        CHECK_FINE();
        make_gradients(state, 1);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (size_t i = 3 * state->model->group_count; i-- > 0 && state->failure[0] == '\0';)
            backward_use(state, i % state->model->group_count);
        CHECK_FINE();
        CHECK_OK(pst_zero_end_backward(state->engine));
        check_gradients(state, three_times_step_1);
        CHECK_FINE();
        update(state);
    }
}

static void further_reports_in_a_backward_add(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    on_all_worlds(&model, report_three_times);
}

/* ---- when ------------------------------------------------------------------------------------ */

/* Written while compute still runs: by then nothing reads them. */
static void write_behind_each_pass(rank_state *state) {
    build_engine(state);
    for (int pass = 0; pass < 12 && state->failure[0] == '\0'; pass++) {
        forward(state, pass % 3 == 0);
        CHECK_FINE();
        update(state);
    }
}

static void the_host_writes_behind_a_forward(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        model model = chain_model(stage, 5, 64);
        on_all_worlds(&model, write_behind_each_pass);
        model.gather_dtype = PST_BFLOAT16;
        on_all_worlds(&model, write_behind_each_pass);
    }
}

static void count_copies(rank_state *state) {
    const size_t groups = state->model->group_count;
    build_engine(state);
    CHECK_FINE();
    CHECK(state->async->host_copies == 0);
    for (size_t step = 1; step <= 3; step++) {
        for (int pass = 0; pass < 2; pass++) {
            forward(state, 0);
            CHECK_FINE();
            CHECK(state->async->host_copies == step * groups);
        }
        update(state);
        update(state); /* of another optimizer */
        CHECK_FINE();
    }
}

static void shards_come_up_once_behind_an_update(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    model.hosted = 1;
    for (int world = 1; world <= 2; world++)
        run_ranks_on_boards(world, &model, count_copies, NULL);
}

static int targets_are_fresh(const rank_state *state) {
    for (size_t g = 0; g < state->model->group_count; g++)
        for (size_t i = 0; i < state->layouts[g].gradient_bytes; i++)
            if (((const unsigned char *)state->targets[g])[i] != 0xff) return 0;
    return 1;
}

/* What it had sent has arrived when a forward begins, and is not written any more. */
static void break_off_and_train(rank_state *state) {
    build_engine(state);
    for (size_t count = 0; count <= state->model->group_count; count++) {
        CHECK_FINE();
        forward(state, 1);
        CHECK_FINE();
        make_gradients(state, 2);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (size_t i = 0; i < count && state->failure[0] == '\0'; i++)
            backward_use(state, state->model->group_count - 1 - i);
        CHECK_FINE();
        CHECK_OK(pst_zero_begin_forward(state->engine, 0));
        fresh_targets(state);
        CHECK_OK(pst_zero_end_forward(state->engine));
        CHECK_OK(pst_zero_drain(state->engine));
        CHECK(targets_are_fresh(state));
        train_and_check(state, 2, mean_of_step_1);
    }
}

static void a_backward_may_be_broken_off(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.bucket_bytes = 128;
    model.delay_us = 100;
    on_all_worlds(&model, break_off_and_train);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void ask_for_what_cannot_be(rank_state *state) {
    void *place = state;
    char text[512];
    build_engine(state);
    CHECK_FINE();
    CHECK_OK(pst_zero_shard_place(state->engine, state->groups[0], &place));
    CHECK(place == NULL);
    CHECK(pst_zero_begin_capture(state->engine, state) == PST_EUNSUPPORTED);
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    CHECK(strstr(text, "the host trains its shards") != NULL);
    for (int step = 0; step < 3; step++) {
        forward(state, 1);
        CHECK_FINE();
        make_gradients(state, 1);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        for (uint32_t g = 0; g < state->model->group_count; g++)
            CHECK(!pst_zero_may_update(state->engine, g));
        for (size_t g = state->model->group_count; g-- > 0;) {
            backward_use(state, g);
            CHECK_FINE();
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
    }
}

static void captures_and_updates_are_refused(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    on_all_worlds(&model, ask_for_what_cannot_be);
}

/* ---- at random ------------------------------------------------------------------------------- */

static void models_at_random_are_trained_alike(void **unused) {
    (void)unused;
    uint64_t dice = random_seed(__func__);
    for (int i = 0; i < random_programs(8); i++) {
        model model = drawn_model(&dice);
        model.hosted = 1;
        run_ranks(1 << i % 3, &model, train, NULL);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathers_and_reduces_as_on_the_device),
        cmocka_unit_test(casts_on_the_device),
        cmocka_unit_test(gradients_go_down_bucket_by_bucket),
        cmocka_unit_test(gradients_are_means_over_all_replicas),
        cmocka_unit_test(a_second_backward_adds),
        cmocka_unit_test(further_reports_in_a_backward_add),
        cmocka_unit_test(the_host_writes_behind_a_forward),
        cmocka_unit_test(shards_come_up_once_behind_an_update),
        cmocka_unit_test(a_backward_may_be_broken_off),
        cmocka_unit_test(captures_and_updates_are_refused),
        cmocka_unit_test(models_at_random_are_trained_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
