/* Passes that take different paths through the model, one after the other. */
#include "world.h"

#define GROUPS 6

static float mean_of_step_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_gradient(state->world, ~0u, 1, parameter, element);
}

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

/* ---- in turn --------------------------------------------------------------------------------- */

static void take_turns(rank_state *state) {
    const unsigned *paths = state->argument;
    build_engine(state);
    CHECK_FINE();
    for (int step = 0; step < 10; step++) {
        take(state, paths[step % 2]);
        CHECK_FINE();
    }
    const pst_zero_stats stats = stats_of(state);
    CHECK(stats.planned_passes == 8);
    CHECK(stats.deviations == 2); /* the first pass of the second path, and one that expects it */
    pst_zero_reset_stats(state->engine);
    take(state, paths[0]);
    take(state, paths[1]);
    CHECK_FINE();
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
    build_engine(state);
    CHECK_FINE();
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

/* ---- in any order ---------------------------------------------------------------------------- */

/* More than are kept. */
static void take_any(rank_state *state) {
    uint64_t dice = *(const uint64_t *)state->argument;
    build_engine(state);
    CHECK_FINE();
    for (int step = 0; step < 40; step++) {
        dice = mix(dice + 1);
        const unsigned path = (unsigned)(dice % 12) * 5 + 3;
        if (dice >> 40 & 1u) forward(state, 0);
        take(state, path);
        CHECK_FINE();
    }
    CHECK(stats_of(state).planned_passes > 0);
}

static void paths_in_any_order_are_right(void **unused) {
    (void)unused;
    const char *replay = getenv("PST_SEED");
    uint64_t seed = replay != NULL ? strtoull(replay, NULL, 10) : monotonic_ns() % 1000000000u;
    print_message("PST_SEED=%llu\n", (unsigned long long)seed);
    model model = chain_model(3, GROUPS, 16);
    model.seed = seed;
    model.delay_us = 20;
    run_ranks(2, &model, take_any, &seed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_paths_in_turn_are_planned_from_their_second_round_on),
        cmocka_unit_test(steps_on_two_planned_paths_do_not_wait_for_the_device),
        cmocka_unit_test(paths_in_any_order_are_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
