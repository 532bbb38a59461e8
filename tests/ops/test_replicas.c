/* Several replicas: what the ranks of each have reduced is reduced between them, bucket by bucket,
 * and they decide alike what is gathered and reduced when. */
#include "update_rank.h"

/* Over `replicas` times `parts` ranks; ce has no communicator beside it here. */
static void run_replicas(int replicas, int parts, const model *given, rank_body body) {
    model model = *given;
    model.replicas = replicas;
    run_ranks_on_device(replicas * parts, &model, body, NULL);
    run_ranks_on_boards(replicas * parts, &model, body, NULL);
}

static float part_of_mean(const rank_state *state, int replica, size_t parameter, size_t element) {
    const int parts = state->world / replicas_of(state->model);
    float sum = 0;
    for (int rank = replica * parts; rank < (replica + 1) * parts; rank++)
        sum += gradient_of(rank, 1, parameter, element);
    return (float)((double)sum / state->world);
}

/* As it is summed: within replicas first. */
static float mean_of_replicas(const rank_state *state, size_t parameter, size_t element) {
    float sum = 0;
    for (int replica = 0; replica < replicas_of(state->model); replica++)
        sum += part_of_mean(state, replica, parameter, element);
    return sum;
}

static float twice_the_mean(const rank_state *state, size_t parameter, size_t element) {
    return 2 * mean_of_replicas(state, parameter, element);
}

static void train(rank_state *state, int steps) {
    train_and_check(state, steps, mean_of_replicas);
}

/* ---- sums ------------------------------------------------------------------------------------ */

static void train_and_replay(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 5));
    const pst_zero_stats stats = stats_of(state);
    CHECK(stats.deviations == 0 && stats.replayed_passes > 0);
    CHECK(stats.all_reduces == stats.reduces && stats.all_reduces >= 5);
    CHECK(stats.all_reduce_bytes > 0);
}

static void gradients_are_means_over_all_replicas(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        model.bucket_bytes = 512;
        model.delay_us = 10;
        run_replicas(2, 2, &model, train_and_replay);
        model.one_comm = 1;
        run_replicas(2, 2, &model, train_and_replay);
    }
}

static void lanes_that_are_pumped_reduce_too(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.replicas = 2;
    model.pumped = 1;
    run_ranks_on_device(4, &model, train_and_replay, NULL);
}

static void replicas_of_one_rank_reduce_between_them_alone(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        model model = odd_model(stage);
        run_replicas(2, 1, &model, train_and_replay);
        run_replicas(4, 1, &model, train_and_replay);
    }
}

/* The second backward adds to what the first one has left. */
static void add_up_two_backwards(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 3; step++) {
        fresh_targets(state);
        for (int i = 0; i < 2; i++) {
            DO(forward(state, 1));
            DO(backward(state, 1));
        }
        DO(check_gradients(state, twice_the_mean));
    }
}

static void backwards_add_to_what_is_there(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_replicas(2, 2, &model, add_up_two_backwards);
}

static void update_behind_both(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    DO(trainer_steps(it, 4, 1));
    CHECK(it->updated == all_groups(it));
}

static void updates_come_behind_both_reductions(void **unused) {
    (void)unused;
    for (precision precision = PLAIN; precision <= NARROW; precision++) {
        model model = with_precision(odd_model(3), precision);
        model.bucket_bytes = 1024;
        model.delay_us = 10;
        model.replicas = 2;
        run_ranks_on_boards(4, &model, update_behind_both, NULL);
    }
}

/* ---- what they decide alike ------------------------------------------------------------------ */

static void have_one_gradient(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 4; step++) {
        const void *sources[MOST_PARAMETERS] = {NULL};
        make_gradients(state, 1);
        fresh_targets(state);
        DO(forward(state, 1));
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        DO(begin_use(state, 0));
        if (state->rank == state->world - 1) sources[0] = state->gradients[0];
        CHECK_OK(pst_zero_gradients(state->engine, state->groups[0], sources, PST_FLOAT32));
        DO(end_use(state, 0));
        CHECK_OK(pst_zero_end_backward(state->engine));
        CHECK(pst_zero_has_gradient(state->engine, state->parameters[0]));
        CHECK(!pst_zero_has_gradient(state->engine, state->parameters[1]));
    }
}

static void a_gradient_of_any_replica_is_known_to_all(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_replicas(2, 2, &model, have_one_gradient);
}

/* The last rank of the last replica has the least, and all go by it. */
static void keep_what_the_smallest_has(rank_state *state) {
    DO(build_engine(state));
    const size_t each = state->layouts[0].gathered_bytes;
    pst_zero_plan_with(state->engine, 2, (size_t)(5 - state->rank) * each);
    DO(train(state, 2));
    pst_zero_forecast forecast = {.size = sizeof forecast};
    CHECK_OK(pst_zero_get_forecast(state->engine, 1, &forecast));
    CHECK(forecast.keep_bytes == (size_t)(5 - (state->world - 1)) * each);
}

static void memory_and_times_are_agreed_on_over_all_replicas(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_replicas(2, 2, &model, keep_what_the_smallest_has);
}

static void register_differently(rank_state *state) {
    model other = *state->model;
    other.prefetch_bytes = 12345;
    if (state->replica == 1) state->model = &other;
    register_all(state);
    const int is_found = strstr(state->failure, "rank 0 has stage 3") != NULL &&
                         strstr(state->failure, "rank 2 has stage 3") != NULL;
    if (is_found) state->failure[0] = '\0';
    CHECK(is_found);
}

static void replicas_that_differ_are_told_so(void **unused) {
    (void)unused;
    model model = chain_model(3, 2, 16);
    model.replicas = 2;
    run_ranks_on_device(4, &model, register_differently, NULL);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void train_until_it_fails(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 20 && state->failure[0] == '\0'; step++)
        train(state, 1);
    CHECK(pst_runtime_status(state->runtime) < 0);
    state->failure[0] = '\0';
}

static void a_failure_of_one_replica_ends_all(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.fail_at = 7;
    model.replicas = 2;
    run_ranks_on_boards(4, &model, train_until_it_fails, NULL);
}

static void open_with_one_queue(rank_state *state) {
    pst_comm *own = state->replicas;
    state->replicas = state->gather;
    CHECK(create_engine(state) == PST_EINVAL);
    char text[256] = "";
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    CHECK(strstr(text, "replica_comm is one of the other two") != NULL);
    state->replicas = own;
}

static void a_communicator_that_serves_otherwise_is_refused(void **unused) {
    (void)unused;
    model model = chain_model(3, 2, 16);
    model.replicas = 2;
    run_ranks_on_device(2, &model, open_with_one_queue, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_means_over_all_replicas),
        cmocka_unit_test(lanes_that_are_pumped_reduce_too),
        cmocka_unit_test(replicas_of_one_rank_reduce_between_them_alone),
        cmocka_unit_test(backwards_add_to_what_is_there),
        cmocka_unit_test(updates_come_behind_both_reductions),
        cmocka_unit_test(a_gradient_of_any_replica_is_known_to_all),
        cmocka_unit_test(memory_and_times_are_agreed_on_over_all_replicas),
        cmocka_unit_test(replicas_that_differ_are_told_so),
        cmocka_unit_test(a_failure_of_one_replica_ends_all),
        cmocka_unit_test(a_communicator_that_serves_otherwise_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
