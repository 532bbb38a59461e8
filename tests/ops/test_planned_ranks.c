/* What ranks plan together: groups that stay gathered, by times that they agree on, and what plans
 * then say. */
#include "world.h"

static void train(rank_state *state, int passes) {
    train_and_check(state, passes, mean_of_step_1);
}

#define CHAIN_BYTES (8 * 64 * sizeof(float)) /* of a group */

static void run_chains(void (*play)(rank_state *)) {
    model model = chain_model(3, 6, 64);
    run_ranks(2, &model, play, NULL);
    run_ranks(4, &model, play, NULL);
}

static pst_zero_forecast forecast_of(const rank_state *state) {
    pst_zero_forecast forecast = {.size = sizeof forecast};
    (void)pst_zero_get_forecast(state->engine, 1, &forecast);
    return forecast;
}

/* The window of two keeps 5, 4 and 3; of the others two fit. */
static void keep_two(rank_state *state) {
    DO(build_engine(state));
    pst_zero_plan_with(state->engine, 2, 2 * CHAIN_BYTES);
    DO(train(state, 1));
    for (int pass = 0; pass < 4; pass++) {
        pst_zero_reset_stats(state->engine);
        DO(train(state, 1));
        pst_zero_stats stats = stats_of(state);
        CHECK(stats.gathers == 6 + 1 && stats.deviations == 0 && stats.planned_passes == 1);
        CHECK(stats.arena_peak <= stats.plan_peak);
        CHECK(pass == 0 || !is_on_host(state) || stats.replayed_passes == 2);
        CHECK(stats.plan_peak == (state->world > 1 ? 5 * CHAIN_BYTES : 0));
    }
    CHECK(state->world == 1 || forecast_of(state).kept_groups == 2);
    CHECK(state->world == 1 || forecast_of(state).kept_bytes == 2 * CHAIN_BYTES);
}

static void a_kept_group_is_not_gathered_by_the_backward(void **unused) {
    (void)unused;
    run_chains(keep_two);
}

/* All ranks go by the one that has the least. The window of two leaves three groups to choose. */
static void keep_what_the_smallest_has(rank_state *state) {
    const size_t least = (size_t)(5 - (state->world - 1));
    DO(build_engine(state));
    pst_zero_plan_with(state->engine, 2, (size_t)(5 - state->rank) * CHAIN_BYTES);
    DO(train(state, 2));
    CHECK(forecast_of(state).keep_bytes == least * CHAIN_BYTES);
    CHECK(forecast_of(state).kept_groups == (least < 3 ? least : 3));
    CHECK(stats_of(state).deviations == 0);
}

static void the_smallest_of_all_ranks_is_kept(void **unused) {
    (void)unused;
    run_chains(keep_what_the_smallest_has);
}

/* Everything stays gathered: several forwards, evaluations between, backwards that do not reduce,
 * paths that are left. */
static void keep_all_in_odd_loops(rank_state *state) {
    DO(build_engine(state));
    pst_zero_plan_with(state->engine, 2, SIZE_MAX);
    for (int pass = 0; pass < 4; pass++) {
        fresh_targets(state);
        DO(forward(state, 1));
        DO(forward(state, 1));
        DO(forward(state, 0));
        DO(end_step(state, mean_of_step_1));
        CHECK_OK(pst_zero_begin_forward(state->engine, 1)); /* is broken off */
        DO(use(state, pass % 2 == 0 ? 0 : 1));
        train(state, 1); /* peers may read shards until then: nothing has updated them */
        CHECK_FINE();
    }
}

static void kept_groups_go_when_a_pass_is_another_one(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks(2, &model, keep_all_in_odd_loops, NULL);
    run_ranks(4, &model, keep_all_in_odd_loops, NULL);
}

/* ---- times ----------------------------------------------------------------------------------- */

#define MOST_OPERATIONS 64

typedef struct recording {
    pst_zero_op operations[MOST_OPERATIONS];
    pst_zero_op_time times[MOST_OPERATIONS];
    size_t count;
} recording;

static void take_recording(rank_state *state, recording *taken) {
    CHECK_OK(
        pst_zero_recorded(state->engine, 1, taken->operations, MOST_OPERATIONS, &taken->count));
    CHECK(taken->count == 6 * 5);
}

static void compile_keeping(rank_state *state, const recording *taken, size_t keep_bytes) {
    CHECK_OK(pst_zero_compile(state->engine,
                              &(pst_zero_compile_options){.size = sizeof(pst_zero_compile_options),
                                                          .grad = 1,
                                                          .operations = taken->operations,
                                                          .count = taken->count,
                                                          .keep_bytes = keep_bytes},
                              NULL));
    DO(train(state, 1));
    CHECK(stats_of(state).arena_reserved == stats_of(state).plan_peak);
}

static void keep_less_again(rank_state *state) {
    recording *taken = state->own = calloc(1, sizeof *taken);
    DO(build_engine(state));
    DO(train(state, 1));
    DO(take_recording(state, taken));
    DO(compile_keeping(state, taken, SIZE_MAX));
    CHECK(stats_of(state).plan_peak == 6 * CHAIN_BYTES);
    DO(compile_keeping(state, taken, 0));
    CHECK(stats_of(state).plan_peak < 6 * CHAIN_BYTES);
}

static void a_plan_that_keeps_less_gives_memory_back(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks(2, &model, keep_less_again, NULL);
}

/* Each rank has measured something else: on odd ones small gathers are the faster ones a byte, on
 * even ones large gathers are; and of these rank 0 has waited for others in the largest ones, rank
 * 2 in those that come next. */
static void jitter(rank_state *state, recording *taken, uint64_t seed) {
    uint64_t at = 1;
    for (size_t i = 0; i < taken->count; i++) {
        const uint64_t dice = mix(seed * 977u + (uint64_t)state->rank * 31u + i + 1);
        const uint64_t bytes = taken->operations[i].bytes;
        const int is_early = taken->operations[i].group % 3 == (state->rank == 0 ? 2 : 1);
        const uint64_t took =
            state->rank % 2 == 1 ? bytes * bytes / 1024 : (is_early ? 1000000 : 1024);
        taken->times[i] = (pst_zero_op_time){at, dice % 50, took + dice / 64 % 64};
        at += 50 + dice / 8192 % 1000;
    }
}

typedef struct seen {
    uint64_t seed;
    uint64_t hashes[MOST_RANKS], steps[MOST_RANKS];
} seen;

/* The last one has as many stay as the smallest of all ranks allows. */
static void check_drafts(rank_state *state, const pst_zero_draft *drafts, size_t count) {
    CHECK(count == PST_ZERO_MOST_DRAFTS - 1); /* one is the options' own */
    CHECK(drafts[0].prefetch_ahead == 1 && drafts[0].keep_bytes == 0 && drafts[0].step_ns > 0);
    for (size_t i = 1; i < count; i++) {
        const pst_zero_draft *before = &drafts[i - 1], *draft = &drafts[i];
        CHECK(draft->step_ns > draft->exposed_ns && draft->keep_bytes <= 1536);
        if (draft->prefetch_ahead == before->prefetch_ahead)
            CHECK(draft->keep_bytes >= before->keep_bytes);
    }
    if (drafts[count - 1].prefetch_ahead != 1) return;
    CHECK(drafts[count - 1].step_ns == forecast_of(state).step_ns);
    CHECK(drafts[count - 1].keep_bytes == forecast_of(state).kept_bytes);
    CHECK(drafts[count - 1].peak_bytes == forecast_of(state).peak_bytes);
}

static void compile_by_own_times(rank_state *state) {
    seen *all = state->argument;
    recording *taken = state->own = calloc(1, sizeof *taken);
    pst_zero_plan plan;
    DO(build_engine(state));
    DO(train(state, 1));
    DO(take_recording(state, taken));
    jitter(state, taken, all->seed);
    const pst_zero_compile_options options = {.size = sizeof options,
                                              .grad = 1,
                                              .operations = taken->operations,
                                              .times = taken->times,
                                              .count = taken->count,
                                              .prefetch_ahead = 1,
                                              .keep_bytes = 1536 + 4 * (size_t)state->rank};
    const pst_zero_forecast before = forecast_of(state);
    pst_zero_draft drafts[PST_ZERO_MOST_DRAFTS];
    size_t count = 0;
    CHECK_OK(pst_zero_make_drafts(state->engine, &options, drafts, &count));
    CHECK(forecast_of(state).step_ns == before.step_ns && before.kept_groups == 0);
    CHECK_OK(pst_zero_compile(state->engine, &options, &plan));
    all->hashes[state->rank] = plan.hash;
    all->steps[state->rank] = forecast_of(state).step_ns;
    CHECK(forecast_of(state).step_ns > 0 && forecast_of(state).kept_groups > 0);
    check_drafts(state, drafts, count);
    for (uint32_t group = 0; group < 3; group++) {
        pst_zero_group_forecast forecast = {.size = sizeof forecast};
        CHECK_OK(pst_zero_get_group_forecast(state->engine, 1, group, &forecast));
        CHECK(forecast.gather_ns < 1200); /* as on a rank that has not waited for others */
    }
    train(state, 2);
}

/* Groups of 512, 1024 and 1536 bytes, of which 1536 may stay: times decide which. */
static model uneven_model(void) {
    model model = empty_model(3);
    for (size_t g = 0; g < 6; g++) {
        add_shape(&model, 8, 16 + 16 * (g % 3), 1);
        close_group(&model);
    }
    return model;
}

static void ranks_with_other_clocks_make_one_plan(void **unused) {
    (void)unused;
    const uint64_t first = (uint64_t)time(NULL);
    print_message("seeds from %llu\n", (unsigned long long)first);
    for (uint64_t seed = first; seed < first + 5; seed++) {
        model model = uneven_model();
        seen seen = {.seed = seed};
        run_ranks_on_device(4, &model, compile_by_own_times, &seen);
        for (size_t rank = 1; rank < 4; rank++) {
            assert_true(seen.hashes[rank] == seen.hashes[0]);
            assert_true(seen.steps[rank] == seen.steps[0]);
        }
    }
}

static int has_clock(const rank_state *state) {
    return is_on_host(state) || (device_of(state)->ops->caps & PST_DEVICE_TIMED_EVENTS) != 0;
}

/* By plan some groups stay gathered for the backward. */
static void check_times(rank_state *state, const recording *taken, int by_plan) {
    uint64_t before = 0;
    for (size_t i = 0; i < taken->count; i++) {
        const pst_zero_op_time *times = &taken->times[i];
        const int may_stay = by_plan && taken->operations[i].backward &&
                             taken->operations[i].kind == PST_ZERO_GATHER;
        CHECK(times->reached_ns >= before && times->reached_ns > 0);
        before = times->reached_ns;
        CHECK(taken->operations[i].kind != PST_ZERO_RELEASE || times->collective_ns == 0);
        CHECK(may_stay || taken->operations[i].kind == PST_ZERO_RELEASE ||
              times->collective_ns > 0);
        CHECK(taken->operations[i].kind != PST_ZERO_RELEASE || times->waited_ns == 0);
    }
}

static void record_times(rank_state *state) {
    recording *taken = state->own = calloc(1, sizeof *taken);
    size_t timed;
    DO(build_engine(state));
    pst_zero_set_replay(state->engine, 0);
    CHECK_OK(pst_zero_recorded_times(state->engine, 1, NULL, 0, &timed));
    CHECK(timed == 0);
    for (int pass = 0; pass < 3; pass++) {
        DO(train(state, 1));
        DO(take_recording(state, taken));
        if (!is_on_host(state)) CHECK(drain_compute(state));
        CHECK_OK(pst_zero_recorded_times(state->engine, 1, taken->times, MOST_OPERATIONS, &timed));
        CHECK(timed == (has_clock(state) ? taken->count : 0));
        if (has_clock(state)) check_times(state, taken, 0);
        CHECK_FINE();
        forward(state, 0); /* an evaluation has its own */
        CHECK_FINE();
    }
    pst_zero_set_replay(state->engine, 1);
    DO(train(state, 2));
    CHECK_OK(pst_zero_recorded_times(state->engine, 1, taken->times, MOST_OPERATIONS, &timed));
    CHECK(timed == 0 || stats_of(state).planned_passes == 0); /* a planned pass has none */
    pst_zero_set_timing(state->engine, 1);                    /* unless it is to */
    pst_zero_reset_stats(state->engine);
    DO(train(state, 2));
    CHECK(stats_of(state).planned_passes == 2 && stats_of(state).replayed_passes == 0);
    DO(take_recording(state, taken));
    if (!is_on_host(state)) CHECK(drain_compute(state));
    CHECK_OK(pst_zero_recorded_times(state->engine, 1, taken->times, MOST_OPERATIONS, &timed));
    CHECK(timed == (has_clock(state) ? taken->count : 0));
    if (has_clock(state)) check_times(state, taken, 1);
    pst_zero_set_timing(state->engine, 0);
    train(state, 2);
}

static void an_eager_pass_is_recorded_with_times(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks(2, &model, record_times, NULL);
    model.bucket_bytes = 1; /* a bucket a group */
    run_ranks_on_device(2, &model, record_times, NULL);
}

static void forecast_too_early(rank_state *state) {
    pst_zero_forecast forecast = {.size = sizeof forecast};
    pst_zero_group_forecast group = {.size = sizeof group};
    DO(build_engine(state));
    CHECK(pst_zero_get_forecast(state->engine, 1, &forecast) == PST_ESTATE);
    DO(train(state, 2));
    CHECK_OK(pst_zero_get_forecast(state->engine, 1, &forecast));
    CHECK(forecast.step_ns > forecast.exposed_ns);
    CHECK_OK(pst_zero_get_group_forecast(state->engine, 1, 0, &group));
    CHECK(group.bytes == CHAIN_BYTES && group.keep == PST_ZERO_KEEP_TOO_DEAR);
    CHECK(group.forward.lands_ns > group.forward.start_ns && group.backward.lands_ns > 0);
    CHECK(pst_zero_get_group_forecast(state->engine, 1, 99, &group) == PST_EINVAL);
    const pst_zero_compile_options none = {0};
    CHECK(pst_zero_compile(state->engine, &none, NULL) == PST_EINVAL);
    CHECK(pst_zero_make_drafts(state->engine, &none, NULL, NULL) == PST_EINVAL);
}

static void a_plan_of_a_first_pass_has_a_forecast(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks_on_device(2, &model, forecast_too_early, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kept_group_is_not_gathered_by_the_backward),
        cmocka_unit_test(a_plan_that_keeps_less_gives_memory_back),
        cmocka_unit_test(the_smallest_of_all_ranks_is_kept),
        cmocka_unit_test(kept_groups_go_when_a_pass_is_another_one),
        cmocka_unit_test(ranks_with_other_clocks_make_one_plan),
        cmocka_unit_test(an_eager_pass_is_recorded_with_times),
        cmocka_unit_test(a_plan_of_a_first_pass_has_a_forecast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
