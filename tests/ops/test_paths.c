/* Passes that take different paths through the model, one after the other, and what is replayed of
 * them. */
#include "world.h"

#define GROUPS 6

/* One step over those groups, by bit; the sums are compared. */
static void take(rank_state *state, unsigned path) {
    fresh_targets(state);
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t g = 0; g < GROUPS; g++)
        if (path >> g & 1u) use(state, g);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_forward(state->engine));
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = GROUPS; g-- > 0;)
        if (path >> g & 1u) backward_use(state, g);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_backward(state->engine));
    for (size_t g = 0; g < GROUPS; g++)
        if (path >> g & 1u) check_gradient(state, g, g, mean_of_step_1);
    CHECK_FINE();
    update(state);
}

static uint64_t replayed_by(rank_state *state, unsigned path) {
    const uint64_t before = stats_of(state).replayed_passes;
    take(state, path);
    finish_compute(state);
    return stats_of(state).replayed_passes - before;
}

/* Within some steps, the same number on all ranks: a program is launched only once all callbacks of
 * its last launch have returned, and the next path is guessed from those before. */
static void check_replayed_soon(rank_state *state, unsigned path) {
    int count = 0;
    for (int i = 0; i < 6; i++) {
        count += replayed_by(state, path) == 2; /* the forward and the backward */
        CHECK_FINE();
        CHECK_OK(pst_zero_drain(state->engine));
    }
    CHECK(count > 0);
}

/* ---- in turn --------------------------------------------------------------------------------- */

static void take_turns(rank_state *state) {
    const unsigned *paths = state->argument;
    DO(build_engine(state));
    for (int step = 0; step < 10; step++) {
        DO(take(state, paths[step % 2]));
    }
    const pst_zero_stats stats = stats_of(state);
    CHECK(stats.planned_passes == 8);
    CHECK(!is_on_host(state) ||
          stats.replayed_passes > 0); /* on others it may be in flight still */
    CHECK(stats.deviations == 2); /* the first pass of the second path, and one that expects it */
    pst_zero_reset_stats(state->engine);
    take(state, paths[0]);
    DO(take(state, paths[1]));
    CHECK(stats_of(state).prefetches > 0 && stats_of(state).deviations == 0);
}

/* One leaves a group out, or ends early. */
static void two_paths_in_turn_are_planned_from_their_second_round_on(void **unused) {
    static const unsigned pairs[][2] = {{0x3f, 0x37}, {0x3f, 0x0f}};
    (void)unused;
    for (int i = 0; i < 2; i++)
        for (int stage = 2; stage <= 3; stage++) {
            model model = chain_model(stage, GROUPS, 16);
            run_ranks(2, &model, take_turns, (void *)(uintptr_t)pairs[i]);
        }
}

/* On an asynchronous device the host waits for no step that is planned, whichever of two paths it
 * takes. */
static void take_turns_ahead(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 6; step++)
        take(state, step % 2 == 0 ? 0x3f : 0x37);
    CHECK_FINE();
    finish_compute(state);
    pause_device(state, 1);
    take(state, 0x3f);
    take(state, 0x37);
    pause_device(state, 0);
}

static void steps_on_two_planned_paths_do_not_wait_for_the_device(void **unused) {
    (void)unused;
    model model = chain_model(3, GROUPS, 16);
    run_ranks_async(2, &model, take_turns_ahead, NULL);
}

/* ---- replay ---------------------------------------------------------------------------------- */

static void on_all(const model *given, rank_body body) {
    model model = *given;
    for (int one = 0; one <= 1; one++) {
        model.one_comm = one;
        run_ranks(2, &model, body, NULL);
    }
}

/* Eagerly, by plan and noted, replayed. */
static void take_one_path(rank_state *state) {
    DO(build_engine(state));
    CHECK(replayed_by(state, 0x3f) == 0);
    CHECK(replayed_by(state, 0x3f) == 0);
    DO(check_replayed_soon(state, 0x3f));
    pst_zero_set_replay(state->engine, 0);
    CHECK(replayed_by(state, 0x3f) == 0);
    pst_zero_set_replay(state->engine, 1);
    DO(check_replayed_soon(state, 0x3f));
}

static void planned_passes_are_replayed(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = chain_model(stage, GROUPS, 16);
        model.bucket_bytes = 256;
        on_all(&model, take_one_path);
    }
}

/* Each of them leaves the path behind another of its steps; then that is replayed again. */
static void leave_the_path(rank_state *state) {
    DO(build_engine(state));
    DO(check_replayed_soon(state, 0x3f));
    for (size_t g = 0; g < GROUPS; g += 2) {
        (void)replayed_by(state, 0x3fu & ~(1u << g));
        CHECK_FINE();
        CHECK(stats_of(state).deviations > g / 2);
        DO(check_replayed_soon(state, 0x3f));
    }
}

static void a_pass_that_leaves_its_path_leaves_its_program(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = chain_model(stage, GROUPS, 16);
        on_all(&model, leave_the_path);
    }
}

static void break_off(rank_state *state) {
    DO(build_engine(state));
    DO(check_replayed_soon(state, 0x3f));
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    use(state, 0);
    (void)replayed_by(state, 0x3f);
    CHECK_FINE();
    forward(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    make_gradients(state, 2);
    DO(backward_use(state, GROUPS - 1));
    (void)replayed_by(state, 0x3f);
    CHECK_FINE();
    forward(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1)); /* in it the engine is destroyed */
}

static void a_pass_that_is_broken_off_leaves_its_program(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = chain_model(stage, GROUPS, 16);
        on_all(&model, break_off);
    }
}

/* Without an update there is nothing to gather, in stages 1 and 2: another program on one path. */
static void change_what_is_submitted(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 12; step++) {
        DO(forward(state, 0));
        if (step % 3 == 0) forward(state, 0);
        CHECK_FINE();
        (void)replayed_by(state, 0x3f);
        CHECK_FINE();
    }
    CHECK(stats_of(state).replayed_passes > 0);
}

static void what_a_path_submits_may_change(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = chain_model(stage, GROUPS, 16);
        on_all(&model, change_what_is_submitted);
    }
}

/* A rank whose program is in flight still goes on without: the others replay. */
static void be_late(rank_state *state) {
    DO(build_engine(state));
    DO(check_replayed_soon(state, 0x3f));
    const uint64_t before = stats_of(state).replayed_passes;
    if (state->rank == 0) pause_device(state, 1);
    for (int step = 0; step < 2; step++) {
        fresh_targets(state);
        DO(forward(state, 1));
        DO(backward(state, 1));
        update(state);
    }
    CHECK(state->rank != 0 || stats_of(state).replayed_passes < before + 4);
    if (state->rank == 0) pause_device(state, 0);
    finish_compute(state);
    check_gradients(state, mean_of_step_1);
}

static void ranks_need_not_replay_alike(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = chain_model(stage, GROUPS, 16);
        run_ranks_on_boards(2, &model, be_late, NULL);
    }
}

/* ---- in any order ---------------------------------------------------------------------------- */

/* More than are kept. */
static void take_any(rank_state *state) {
    uint64_t dice = *(const uint64_t *)state->argument;
    DO(build_engine(state));
    for (int step = 0; step < 40; step++) {
        dice = mix(dice + 1);
        const unsigned path = (unsigned)(dice % 12) * 5 + 3;
        if (dice >> 40 & 1u) forward(state, 0);
        DO(take(state, path));
    }
    CHECK(stats_of(state).planned_passes > 0 && stats_of(state).replayed_passes > 0);
}

static void paths_in_any_order_are_right(void **unused) {
    (void)unused;
    uint64_t seed = random_seed(__func__);
    model model = chain_model(3, GROUPS, 16);
    model.seed = seed;
    model.delay_us = 20;
    run_ranks(2, &model, take_any, &seed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_paths_in_turn_are_planned_from_their_second_round_on),
        cmocka_unit_test(steps_on_two_planned_paths_do_not_wait_for_the_device),
        cmocka_unit_test(planned_passes_are_replayed),
        cmocka_unit_test(a_pass_that_leaves_its_path_leaves_its_program),
        cmocka_unit_test(a_pass_that_is_broken_off_leaves_its_program),
        cmocka_unit_test(what_a_path_submits_may_change),
        cmocka_unit_test(ranks_need_not_replay_alike),
        cmocka_unit_test(paths_in_any_order_are_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
