/* What a plan is made of beside the order of uses: times, which the ranks agree on; costs; groups
 * that stay gathered from forward to backward; and what it says of the passes that follow it. */
#include "ops/zero/notes.h"
#include "ops/zero/plan.h"
#include "sched/runtime.h"
#include "world.h"

#define USE(g)                                                                                     \
    { .kind = PST_ZERO_GATHER, .group = (g) }
#define RELEASE(g)                                                                                 \
    { .kind = PST_ZERO_RELEASE, .group = (g) }

#define GROUPS 6u

static pst_runtime *runtime;
static const pst__heap *heap;

static int open_runtime(void **unused) {
    (void)unused;
    if (pst_runtime_create(NULL, &runtime) != PST_OK) return -1;
    heap = pst__runtime_heap(runtime);
    return 0;
}

static int close_runtime(void **unused) {
    (void)unused;
    pst_runtime_destroy(runtime);
    return 0;
}

/* ---- curves ---------------------------------------------------------------------------------- */

static void a_curve_is_linear_between_sizes(void **unused) {
    (void)unused;
    pst__curve curve = {0};
    assert_int_equal(pst__curve_at(&curve, 1000), 0);
    assert_int_equal(pst__curve_add(heap, &curve, 3000, 400), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 200), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 2000, 0), PST_OK); /* not known */
    pst__curve_fit(&curve);
    assert_int_equal(pst__curve_at(&curve, 10), 200);
    assert_int_equal(pst__curve_at(&curve, 1000), 200);
    assert_int_equal(pst__curve_at(&curve, 2000), 300);
    assert_int_equal(pst__curve_at(&curve, 3000), 400);
    assert_int_equal(pst__curve_at(&curve, 6000), 800);
    assert_int_equal(pst__curve_at(&curve, (uint64_t)3000 << 40), (uint64_t)400 << 40);
    pst__curve_free(heap, &curve);
}

static void a_curve_takes_medians_and_never_falls(void **unused) {
    (void)unused;
    pst__curve curve = {0};
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 900), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 2000, 90), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 100), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 200), PST_OK);
    pst__curve_fit(&curve);
    assert_int_equal(pst__curve_at(&curve, 1000), 200);
    assert_int_equal(pst__curve_at(&curve, 2000), 200);
    pst__curve_free(heap, &curve);
}

static void compute_is_measured_from_what_it_waits_for_to_the_next_operation(void **unused) {
    (void)unused;
    const pst_zero_op operations[] = {
        USE(0),
        USE(1),
        RELEASE(1),
        RELEASE(0),
        {.kind = PST_ZERO_GATHER, .group = 1, .backward = 1},
        {.kind = PST_ZERO_RELEASE, .group = 1, .backward = 1},
        {.kind = PST_ZERO_REDUCE, .group = 1, .backward = 1},
        {.kind = PST_ZERO_REDUCE, .group = 9, .backward = 1},
    };
    const pst_zero_op_time times[] = {{1, 50, 40},   {11, 60, 30}, {101, 0, 0}, {121, 0, 0},
                                      {131, 20, 35}, {201, 0, 0},  {211, 0, 7}, {221, 0, 7}};
    pst__measured measured[2];
    pst__measure(operations, times, 8, 2, measured);
    assert_int_equal(measured[0].gather, 40);
    assert_int_equal(measured[1].gather, 30);
    assert_int_equal(measured[1].reduce, 7);
    assert_int_equal(measured[0].forward, 10); /* behind its release */
    assert_int_equal(measured[1].forward, 30 + 20);
    assert_int_equal(measured[1].backward, 50 + 10 + 10);
    pst__measure(operations, NULL, 8, 2, measured);
    assert_int_equal(measured[1].forward, 0);
}

/* Operation `index` of a recording with a collective between these times. */
static void note_collective(pst__notes *notes, size_t bytes, uint64_t began, uint64_t ended) {
    pst__timing *timing = pst__timings_take(&notes->timings);
    assert_non_null(timing);
    timing->is_noted[PST__BEGAN] = timing->is_noted[PST__ENDED] = 1;
    timing->at[PST__BEGAN] = began;
    timing->at[PST__ENDED] = ended;
    pst__notes_share(notes, timing, bytes);
    assert_non_null(pst__notes_reach(notes, NULL));
}

static void time_of_several_collectives_is_charged_in_equal_parts(void **unused) {
    (void)unused;
    pst__notes notes = {.timings = {.heap = heap, .device = pst_runtime_host(runtime)}};
    pst__notes_begin(&notes, 1);
    note_collective(&notes, 8, 1000, 1100);
    note_collective(&notes, 8, 1060, 1160); /* 40 beside the first */
    note_collective(&notes, 8, 1160, 1190);
    note_collective(&notes, 8, 1170, 1180); /* within the third */
    pst__notes_complete(&notes, 4);
    pst__notes_read(&notes);
    assert_int_equal(notes.time_count, 4);
    assert_int_equal(notes.times[0].collective_ns, 60 + 20);
    assert_int_equal(notes.times[1].collective_ns, 20 + 60);
    assert_int_equal(notes.times[2].collective_ns, 20 + 5);
    assert_int_equal(notes.times[3].collective_ns, 5);
    pst__notes_free(&notes);
}

/* ---- what is kept ---------------------------------------------------------------------------- */

static const pst_zero_op chain[] = {USE(0), RELEASE(0), USE(1), RELEASE(1), USE(2), RELEASE(2),
                                    USE(3), RELEASE(3), USE(4), RELEASE(4), USE(5), RELEASE(5)};

typedef struct plan_of {
    size_t bytes[GROUPS];
    pst__need need[GROUPS];
    pst__measured measured[GROUPS];
    pst__costs costs;
    pst__plan_input input;
    pst__plan *plan;
} plan_of;

static void setup(plan_of *of, uint32_t ahead, size_t keep_bytes) {
    *of = (plan_of){0};
    for (size_t g = 0; g < GROUPS; g++)
        of->bytes[g] = 1024;
    of->input = (pst__plan_input){.runtime = runtime,
                                  .heap = heap,
                                  .operations = chain,
                                  .count = 2 * GROUPS,
                                  .group_count = GROUPS,
                                  .bytes = of->bytes,
                                  .reduce_bytes = of->bytes,
                                  .need = of->need,
                                  .grad = 1,
                                  .window = 1,
                                  .ahead = ahead,
                                  .keep_bytes = keep_bytes,
                                  .costs = &of->costs};
}

static void make(plan_of *of) {
    assert_int_equal(
        pst__costs_create(heap, of->measured, GROUPS, of->bytes, of->bytes, &of->costs), PST_OK);
    assert_int_equal(pst__plan_create(&of->input, &of->plan), PST_OK);
    pst__costs_free(heap, &of->costs);
}

static void teardown(plan_of *of) {
    pst__plan_destroy(heap, of->plan);
}

static void assert_keeps(const plan_of *of, const pst_zero_keep *expected) {
    for (size_t g = 0; g < GROUPS; g++) {
        assert_int_equal(of->plan->group_forecasts[g].keep, expected[g]);
        const int is_gathered_again = expected[g] == PST_ZERO_KEEP_TOO_DEAR;
        const int stays = expected[g] == PST_ZERO_KEEP_NEAR || expected[g] == PST_ZERO_KEEP_PAID;
        assert_int_equal(of->plan->steps[2 * g + 1].keep, stays);
        assert_int_equal(of->plan->backward_offsets[g] != PST__ANYWHERE, is_gathered_again);
    }
}

#define DEAR    PST_ZERO_KEEP_TOO_DEAR
#define NEAR    PST_ZERO_KEEP_NEAR
#define PAID    PST_ZERO_KEEP_PAID
#define NO_NEED PST_ZERO_KEEP_NO_NEED

static void without_bytes_to_keep_all_is_as_before(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 1, 0);
    make(&of);
    assert_keeps(&of, (pst_zero_keep[]){DEAR, DEAR, DEAR, DEAR, NEAR, NEAR});
    assert_int_equal(of.plan->forecast.kept_groups, 0);
    assert_int_equal(of.plan->summary.peak_bytes, 2 * 1024);
    teardown(&of);
}

static void of_equal_groups_those_that_were_used_last_are_kept(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 1, 2 * 1024 + 1023);
    make(&of);
    assert_keeps(&of, (pst_zero_keep[]){DEAR, DEAR, PAID, PAID, NEAR, NEAR});
    assert_int_equal(of.plan->forecast.kept_groups, 2);
    assert_int_equal(of.plan->forecast.kept_bytes, 2 * 1024);
    assert_int_equal(of.plan->summary.peak_bytes, 4 * 1024);
    teardown(&of);
}

static void what_takes_longest_a_byte_is_kept_first(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 0, 1024 + 512);
    of.bytes[1] = of.bytes[0] = 512; /* half the bytes, more than half the time */
    for (size_t g = 0; g < GROUPS; g++)
        of.measured[g].gather = of.bytes[g] == 512 ? 80 : 100;
    make(&of);
    assert_keeps(&of, (pst_zero_keep[]){PAID, PAID, DEAR, DEAR, DEAR, NEAR});
    assert_int_equal(of.plan->forecast.kept_bytes, 1024);
    teardown(&of);
}

static void smaller_ones_take_what_a_large_one_leaves(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 0, 1024);
    of.bytes[4] = 4096;
    make(&of);
    assert_keeps(&of, (pst_zero_keep[]){DEAR, DEAR, DEAR, PAID, DEAR, NEAR});
    teardown(&of);
}

static void what_no_backward_needs_is_not_kept(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 0, SIZE_MAX);
    of.need[5] = PST__NEED_NONE;
    make(&of);
    assert_keeps(&of, (pst_zero_keep[]){PAID, PAID, PAID, PAID, PAID, NO_NEED});
    teardown(&of);
    setup(&of, 0, SIZE_MAX);
    of.input.grad = 0;
    make(&of);
    assert_keeps(&of, (pst_zero_keep[]){NO_NEED, NO_NEED, NO_NEED, NO_NEED, NO_NEED, NO_NEED});
    teardown(&of);
}

/* It saves two gathers. */
static void a_group_that_is_used_twice_stays_between(void **unused) {
    (void)unused;
    static const pst_zero_op twice[] = {USE(0),     RELEASE(0), USE(1),     RELEASE(1), USE(2),
                                        RELEASE(2), USE(0),     RELEASE(0), USE(3),     RELEASE(3)};
    plan_of of;
    setup(&of, 0, 1024);
    of.input.operations = twice;
    of.input.count = 10;
    make(&of);
    assert_int_equal(of.plan->group_forecasts[0].keep, PST_ZERO_KEEP_PAID);
    assert_true(of.plan->steps[1].keep && of.plan->steps[7].keep);
    assert_int_equal(of.plan->steps[6].issues, 0);
    teardown(&of);
}

/* ---- what a plan says ------------------------------------------------------------------------ */

static void measure_chain(plan_of *of) {
    for (size_t g = 0; g < GROUPS; g++)
        of->measured[g] = (pst__measured){.gather = 10, .reduce = 5, .forward = 20, .backward = 40};
}

static void a_forecast_counts_what_compute_waits_for(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 1, 0);
    measure_chain(&of);
    make(&of);
    /* The first gather, and behind the last gradients their reduction. */
    assert_int_equal(of.plan->forecast.exposed_ns, 10 + 5);
    assert_int_equal(of.plan->forecast.step_ns, 6 * (20 + 40) + 15);
    const pst_zero_group_forecast *second = &of.plan->group_forecasts[1];
    assert_int_equal(second->forward.start_ns, 10);
    assert_int_equal(second->forward.lands_ns, 20);
    assert_int_equal(second->forward.used_ns, 30);
    assert_int_equal(second->gather_ns, 10);
    assert_int_equal(of.plan->group_forecasts[5].backward.lands_ns, 0); /* it has stayed */
    assert_int_equal(of.plan->group_forecasts[3].backward.start_ns, 130 + 40 + 5);
    teardown(&of);
}

static void a_forecast_without_gathers_ahead_waits_for_each(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 0, 0);
    measure_chain(&of);
    make(&of);
    /* The backward begins with what the forward has ended with. Gathers come behind reductions. */
    assert_int_equal(of.plan->forecast.exposed_ns, 6 * 10 + 5 * 15 + 5);
    teardown(&of);
    setup(&of, 0, SIZE_MAX);
    measure_chain(&of);
    make(&of);
    assert_int_equal(of.plan->forecast.exposed_ns, 6 * 10 + 5);
    teardown(&of);
}

/* Uses of 20 ns forward and 40 ns backward, gathers of 10 and reductions of 5. */
static size_t record_chain(pst_zero_op *operations, pst_zero_op_time *times) {
    size_t count = 0;
    uint64_t at = 1;
    for (uint32_t i = 0; i < 2 * GROUPS; i++) {
        const int backward = i >= GROUPS;
        const uint32_t group = backward ? 2 * GROUPS - 1 - i : i;
        times[count] = (pst_zero_op_time){at, 0, 10};
        operations[count++] =
            (pst_zero_op){.kind = PST_ZERO_GATHER, .group = group, .backward = backward};
        at += backward ? 40 : 20;
        times[count] = (pst_zero_op_time){at, 0, backward ? 5 : 0};
        operations[count++] = (pst_zero_op){.kind = backward ? PST_ZERO_REDUCE : PST_ZERO_RELEASE,
                                            .group = group,
                                            .backward = backward};
    }
    return count;
}

static void a_recording_is_predicted_without_an_engine(void **unused) {
    (void)unused;
    pst_zero_op operations[4 * GROUPS];
    pst_zero_op_time times[4 * GROUPS];
    size_t bytes[GROUPS];
    unsigned char needed[GROUPS];
    for (size_t g = 0; g < GROUPS; g++) {
        bytes[g] = 1024;
        needed[g] = 1;
    }
    pst_zero_predict_options options = {.size = sizeof options,
                                        .grad = 1,
                                        .stage = 3,
                                        .operations = operations,
                                        .times = times,
                                        .count = record_chain(operations, times),
                                        .group_count = GROUPS,
                                        .gather_bytes = bytes,
                                        .reduce_bytes = bytes,
                                        .needed = needed,
                                        .prefetch_ahead = 1};
    pst_zero_forecast forecast = {.size = sizeof forecast};
    assert_int_equal(pst_zero_predict(runtime, &options, &forecast), PST_OK);
    assert_int_equal(forecast.exposed_ns, 10 + 5); /* as above */
    assert_int_equal(forecast.step_ns, 6 * (20 + 40) + 15);
    assert_int_equal(forecast.peak_bytes, 2 * 1024);
    for (size_t i = 0; i < options.count; i++)
        times[i].collective_ns *= 10;
    assert_int_equal(pst_zero_predict(runtime, &options, &forecast), PST_OK);
    assert_true(forecast.exposed_ns > 6 * 100 - 5 * 20);
    operations[0].group = GROUPS;
    assert_int_equal(pst_zero_predict(runtime, &options, &forecast), PST_EINVAL);
    options.needed = NULL;
    assert_int_equal(pst_zero_predict(runtime, &options, &forecast), PST_EINVAL);
}

static void without_times_there_is_no_forecast(void **unused) {
    (void)unused;
    plan_of of;
    setup(&of, 1, 0);
    make(&of);
    assert_int_equal(of.plan->forecast.step_ns, 0);
    assert_int_equal(of.plan->group_forecasts[1].forward.lands_ns, 0);
    assert_int_equal(of.plan->group_forecasts[1].bytes, 1024);
    teardown(&of);
}

/* ---- in an engine ---------------------------------------------------------------------------- */

static float mean_of_step_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_gradient(state->world, ~0u, 1, parameter, element);
}

static void train(rank_state *state, int passes) {
    for (int pass = 0; pass < passes; pass++) {
        fresh_targets(state);
        forward(state, 1);
        CHECK_FINE();
        backward(state, 1);
        CHECK_FINE();
        check_gradients(state, mean_of_step_1);
        CHECK_FINE();
        update(state);
        CHECK_FINE();
    }
}

#define CHAIN_BYTES (8 * 64 * sizeof(float)) /* of a group */

static pst_zero_forecast forecast_of(const rank_state *state) {
    pst_zero_forecast forecast = {.size = sizeof forecast};
    (void)pst_zero_get_forecast(state->engine, 1, &forecast);
    return forecast;
}

/* The window of two keeps 5, 4 and 3; of the others two fit. */
static void keep_two(rank_state *state) {
    build_engine(state);
    CHECK_FINE();
    pst_zero_plan_with(state->engine, 2, 2 * CHAIN_BYTES);
    train(state, 1);
    CHECK_FINE();
    for (int pass = 0; pass < 4; pass++) {
        pst_zero_reset_stats(state->engine);
        train(state, 1);
        CHECK_FINE();
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
    model model = chain_model(3, 6, 64);
    run_ranks(2, &model, keep_two, NULL);
    run_ranks(4, &model, keep_two, NULL);
}

/* All ranks go by the one that has the least. The window of two leaves three groups to choose. */
static void keep_what_the_smallest_has(rank_state *state) {
    const size_t least = (size_t)(5 - (state->world - 1));
    build_engine(state);
    CHECK_FINE();
    pst_zero_plan_with(state->engine, 2, (size_t)(5 - state->rank) * CHAIN_BYTES);
    train(state, 2);
    CHECK_FINE();
    CHECK(forecast_of(state).keep_bytes == least * CHAIN_BYTES);
    CHECK(forecast_of(state).kept_groups == (least < 3 ? least : 3));
    CHECK(stats_of(state).deviations == 0);
}

static void the_smallest_of_all_ranks_is_kept(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks(2, &model, keep_what_the_smallest_has, NULL);
    run_ranks(4, &model, keep_what_the_smallest_has, NULL);
}

/* Everything stays gathered: several forwards, evaluations between, backwards that do not reduce,
 * paths that are left. */
static void keep_all_in_odd_loops(rank_state *state) {
    build_engine(state);
    CHECK_FINE();
    pst_zero_plan_with(state->engine, 2, SIZE_MAX);
    for (int pass = 0; pass < 4; pass++) {
        fresh_targets(state);
        forward(state, 1);
        CHECK_FINE();
        forward(state, 1);
        CHECK_FINE();
        forward(state, 0);
        CHECK_FINE();
        backward(state, 1);
        CHECK_FINE();
        check_gradients(state, mean_of_step_1);
        CHECK_FINE();
        update(state);
        CHECK_FINE();
        CHECK_OK(pst_zero_begin_forward(state->engine, 1)); /* is broken off */
        use(state, pass % 2 == 0 ? 0 : 1);
        CHECK_FINE();
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
    CHECK_OK(
        pst_zero_compile_with(state->engine,
                              &(pst_zero_compile_options){.size = sizeof(pst_zero_compile_options),
                                                          .grad = 1,
                                                          .operations = taken->operations,
                                                          .count = taken->count,
                                                          .keep_bytes = keep_bytes},
                              NULL));
    train(state, 1);
    CHECK_FINE();
    CHECK(stats_of(state).arena_reserved == stats_of(state).plan_peak);
}

static void keep_less_again(rank_state *state) {
    recording *taken = state->own = calloc(1, sizeof *taken);
    build_engine(state);
    CHECK_FINE();
    train(state, 1);
    CHECK_FINE();
    take_recording(state, taken);
    CHECK_FINE();
    compile_keeping(state, taken, SIZE_MAX);
    CHECK_FINE();
    CHECK(stats_of(state).plan_peak == 6 * CHAIN_BYTES);
    compile_keeping(state, taken, 0);
    CHECK_FINE();
    CHECK(stats_of(state).plan_peak < 6 * CHAIN_BYTES);
}

static void a_plan_that_keeps_less_gives_memory_back(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks(2, &model, keep_less_again, NULL);
}

/* Each rank has measured something else: on odd ones small gathers are the faster ones a byte, on
 * even ones large gathers are. */
static void jitter(rank_state *state, recording *taken, uint64_t seed) {
    uint64_t at = 1;
    for (size_t i = 0; i < taken->count; i++) {
        const uint64_t dice = mix(seed * 977u + (uint64_t)state->rank * 31u + i + 1);
        const uint64_t bytes = taken->operations[i].bytes;
        const uint64_t took = state->rank % 2 == 1 ? bytes * bytes / 1024 : 1024;
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
    build_engine(state);
    CHECK_FINE();
    train(state, 1);
    CHECK_FINE();
    take_recording(state, taken);
    CHECK_FINE();
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
    CHECK_OK(pst_zero_compile_with(state->engine, &options, &plan));
    all->hashes[state->rank] = plan.hash;
    all->steps[state->rank] = forecast_of(state).step_ns;
    CHECK(forecast_of(state).step_ns > 0 && forecast_of(state).kept_groups > 0);
    check_drafts(state, drafts, count);
    pst_zero_group_forecast largest = {.size = sizeof largest};
    CHECK_OK(pst_zero_get_group_forecast(state->engine, 1, 2, &largest));
    CHECK(largest.gather_ns < 1200); /* as on a rank whose collectives take least together */
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
        CHECK(taken->operations[i].kind == PST_ZERO_GATHER || times->waited_ns == 0);
    }
}

static void record_times(rank_state *state) {
    recording *taken = state->own = calloc(1, sizeof *taken);
    size_t timed;
    build_engine(state);
    CHECK_FINE();
    pst_zero_set_replay(state->engine, 0);
    CHECK_OK(pst_zero_recorded_times(state->engine, 1, NULL, 0, &timed));
    CHECK(timed == 0);
    for (int pass = 0; pass < 3; pass++) {
        train(state, 1);
        CHECK_FINE();
        take_recording(state, taken);
        CHECK_FINE();
        if (!is_on_host(state)) CHECK(drain_compute(state));
        CHECK_OK(pst_zero_recorded_times(state->engine, 1, taken->times, MOST_OPERATIONS, &timed));
        CHECK(timed == (has_clock(state) ? taken->count : 0));
        if (has_clock(state)) check_times(state, taken, 0);
        CHECK_FINE();
        forward(state, 0); /* an evaluation has its own */
        CHECK_FINE();
    }
    pst_zero_set_replay(state->engine, 1);
    train(state, 2);
    CHECK_FINE();
    CHECK_OK(pst_zero_recorded_times(state->engine, 1, taken->times, MOST_OPERATIONS, &timed));
    CHECK(timed == 0 || stats_of(state).planned_passes == 0); /* a planned pass has none */
    pst_zero_set_timing(state->engine, 1);                    /* unless it is to */
    pst_zero_reset_stats(state->engine);
    train(state, 2);
    CHECK_FINE();
    CHECK(stats_of(state).planned_passes == 2 && stats_of(state).replayed_passes == 0);
    take_recording(state, taken);
    CHECK_FINE();
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
    build_engine(state);
    CHECK_FINE();
    CHECK(pst_zero_get_forecast(state->engine, 1, &forecast) == PST_ESTATE);
    train(state, 2);
    CHECK_FINE();
    CHECK_OK(pst_zero_get_forecast(state->engine, 1, &forecast));
    CHECK(forecast.step_ns > forecast.exposed_ns);
    CHECK_OK(pst_zero_get_group_forecast(state->engine, 1, 0, &group));
    CHECK(group.bytes == CHAIN_BYTES && group.keep == PST_ZERO_KEEP_TOO_DEAR);
    CHECK(group.forward.lands_ns > group.forward.start_ns && group.backward.lands_ns > 0);
    CHECK(pst_zero_get_group_forecast(state->engine, 1, 99, &group) == PST_EINVAL);
    const pst_zero_compile_options none = {0};
    CHECK(pst_zero_compile_with(state->engine, &none, NULL) == PST_EINVAL);
    CHECK(pst_zero_make_drafts(state->engine, &none, NULL, NULL) == PST_EINVAL);
}

static void a_plan_of_a_first_pass_has_a_forecast(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 64);
    run_ranks_on_device(2, &model, forecast_too_early, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_curve_is_linear_between_sizes),
        cmocka_unit_test(a_curve_takes_medians_and_never_falls),
        cmocka_unit_test(compute_is_measured_from_what_it_waits_for_to_the_next_operation),
        cmocka_unit_test(time_of_several_collectives_is_charged_in_equal_parts),
        cmocka_unit_test(without_bytes_to_keep_all_is_as_before),
        cmocka_unit_test(of_equal_groups_those_that_were_used_last_are_kept),
        cmocka_unit_test(what_takes_longest_a_byte_is_kept_first),
        cmocka_unit_test(smaller_ones_take_what_a_large_one_leaves),
        cmocka_unit_test(what_no_backward_needs_is_not_kept),
        cmocka_unit_test(a_group_that_is_used_twice_stays_between),
        cmocka_unit_test(a_forecast_counts_what_compute_waits_for),
        cmocka_unit_test(a_forecast_without_gathers_ahead_waits_for_each),
        cmocka_unit_test(a_recording_is_predicted_without_an_engine),
        cmocka_unit_test(without_times_there_is_no_forecast),
        cmocka_unit_test(a_kept_group_is_not_gathered_by_the_backward),
        cmocka_unit_test(a_plan_that_keeps_less_gives_memory_back),
        cmocka_unit_test(the_smallest_of_all_ranks_is_kept),
        cmocka_unit_test(kept_groups_go_when_a_pass_is_another_one),
        cmocka_unit_test(ranks_with_other_clocks_make_one_plan),
        cmocka_unit_test(an_eager_pass_is_recorded_with_times),
        cmocka_unit_test(a_plan_of_a_first_pass_has_a_forecast),
    };
    return cmocka_run_group_tests(tests, open_runtime, close_runtime);
}
