/* What a plan is made of beside the order of uses: times and costs, groups that stay gathered from
 * forward to backward; and what it says of the passes that follow it. What ranks agree on is in
 * test_planned_ranks.c. */
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
    pst__curve_fit(&curve, 0);
    assert_int_equal(pst__curve_at(&curve, 10), 200);
    assert_int_equal(pst__curve_at(&curve, 1000), 200);
    assert_int_equal(pst__curve_at(&curve, 2000), 300);
    assert_int_equal(pst__curve_at(&curve, 3000), 400);
    assert_int_equal(pst__curve_at(&curve, 6000), 800);
    assert_int_equal(pst__curve_at(&curve, (uint64_t)3000 << 40), (uint64_t)400 << 40);
    pst__curve_free(heap, &curve);
}

static void a_curve_takes_medians_and_their_mean_where_it_would_fall(void **unused) {
    (void)unused;
    pst__curve curve = {0};
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 900), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 2000, 90), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 100), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 1000, 200), PST_OK);
    pst__curve_fit(&curve, 0);
    assert_int_equal(pst__curve_at(&curve, 1000), (3 * 200 + 90) / 4);
    assert_int_equal(pst__curve_at(&curve, 2000), (3 * 200 + 90) / 4);
    pst__curve_free(heap, &curve);
}

static void one_that_has_waited_says_little_of_many(void **unused) {
    (void)unused;
    pst__curve curve = {0};
    assert_int_equal(pst__curve_add(heap, &curve, 8, 14000), PST_OK);
    for (int i = 0; i < 36; i++)
        assert_int_equal(pst__curve_add(heap, &curve, 1000, 2000), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 3000, 2100), PST_OK);
    assert_int_equal(pst__curve_add(heap, &curve, 6000, 5000), PST_OK);
    pst__curve_fit(&curve, 0);
    const uint64_t mean = (14000 + 36 * 2000 + 2100) / 38; /* that of the first two is 2324 */
    assert_int_equal(pst__curve_at(&curve, 8), mean);
    assert_int_equal(pst__curve_at(&curve, 1000), mean);
    assert_int_equal(pst__curve_at(&curve, 3000), mean);
    assert_int_equal(pst__curve_at(&curve, 6000), 5000);
    pst__curve_free(heap, &curve);
}

static void a_curve_never_falls(void **unused) {
    (void)unused;
    uint64_t dice = random_seed("a_curve_never_falls");
    for (int round = 0; round < 200; round++) {
        pst__curve curve = {0};
        for (int i = 0; i < 20; i++)
            assert_int_equal(
                pst__curve_add(heap, &curve, 1 + drawn(&dice, 12), 1 + drawn(&dice, 1000)), PST_OK);
        pst__curve_fit(&curve, 0);
        for (size_t i = 1; i < curve.count; i++)
            assert_true(curve.points[i].ns >= curve.points[i - 1].ns);
        pst__curve_free(heap, &curve);
    }
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
                                      {131, 20, 35}, {201, 0, 0},  {211, 4, 7}, {221, 0, 7}};
    pst__measured measured[2];
    pst__measure(operations, times, 8, 2, measured);
    assert_int_equal(measured[0].gather, 40);
    assert_int_equal(measured[1].gather, 30);
    assert_int_equal(measured[1].reduce, 7);
    assert_int_equal(measured[0].forward, 10); /* behind its release */
    assert_int_equal(measured[1].forward, 30 + 20);
    assert_int_equal(measured[1].backward, 50 + 10 + 6);
    assert_int_equal(measured[0].hidden_forward + measured[1].hidden_forward, 0); /* it waited */
    assert_int_equal(measured[1].hidden_backward, 0);
    const pst_zero_op_time hidden[] = {{1, 50, 40},   {11, 60, 30}, {101, 0, 0}, {121, 0, 0},
                                       {131, 10, 35}, {201, 0, 0},  {211, 0, 7}, {221, 0, 7}};
    pst__measure(operations, hidden, 8, 2, measured);
    assert_int_equal(measured[1].hidden_backward, 1);
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
    assert_non_null(pst__notes_reach(notes, NULL, NULL));
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
    int copies_locally;
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
    assert_int_equal(pst__costs_create(heap, of->measured, GROUPS, of->bytes, of->bytes, NULL,
                                       of->copies_locally, &of->costs),
                     PST_OK);
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

/* Each but the first gather has run beside compute, which was as much longer, and groups 4 and 5
 * have stayed. Gathers of 10 take 100 where compute leaves them little. */
static void compute_loses_what_a_copy_within_the_device_takes(void **unused) {
    (void)unused;
    for (int keeps_all = 0; keeps_all < 2; keeps_all++) {
        plan_of of;
        setup(&of, 1, keeps_all ? SIZE_MAX : 0);
        of.copies_locally = 1;
        measure_chain(&of);
        for (size_t g = 0; g < GROUPS; g++) {
            of.measured[g].gather = g == 0 ? 10 : 100;
            of.measured[g].hidden_forward = g > 0;
            of.measured[g].hidden_backward = g < 4;
        }
        make(&of);
        assert_int_equal(of.plan->group_forecasts[5].gather_ns, 10);
        assert_int_equal(of.plan->forecast.exposed_ns, 10 + 5);
        assert_int_equal(of.plan->forecast.step_ns, 6 * (20 + 40) + 15 - (keeps_all ? 4 * 10 : 0));
        teardown(&of);
    }
}

/* Uses of 20 ns forward and 40 ns backward, gathers of 10 and reductions of `reduce`, before each
 * of which compute waits. */
static size_t record_chain(pst_zero_op *operations, pst_zero_op_time *times, uint64_t reduce,
                           uint64_t waits) {
    size_t count = 0;
    uint64_t at = 1;
    for (uint32_t i = 0; i < 2 * GROUPS; i++) {
        const int backward = i >= GROUPS;
        const uint32_t group = backward ? 2 * GROUPS - 1 - i : i;
        times[count] = (pst_zero_op_time){at, 0, 10};
        operations[count++] =
            (pst_zero_op){.kind = PST_ZERO_GATHER, .group = group, .backward = backward};
        at += backward ? 40 : 20;
        times[count] = (pst_zero_op_time){at, backward ? waits : 0, backward ? reduce : 0};
        if (backward) at += waits;
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
                                        .count = record_chain(operations, times, 5, 0),
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
    /* Reductions and gathers had the link all the time, and compute waited. */
    (void)record_chain(operations, times, 44, 44 + 10 - 40);
    assert_int_equal(pst_zero_predict(runtime, &options, &forecast), PST_OK);
    assert_int_equal(forecast.step_ns, 6 * 20 + 10 + 40 + 6 * 44 + 4 * 10);
    options.keep_bytes = SIZE_MAX;
    assert_int_equal(pst_zero_predict(runtime, &options, &forecast), PST_OK);
    assert_int_equal(forecast.step_ns, 6 * 20 + 10 + 40 + 6 * 44);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_curve_is_linear_between_sizes),
        cmocka_unit_test(a_curve_takes_medians_and_their_mean_where_it_would_fall),
        cmocka_unit_test(one_that_has_waited_says_little_of_many),
        cmocka_unit_test(a_curve_never_falls),
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
        cmocka_unit_test(compute_loses_what_a_copy_within_the_device_takes),
        cmocka_unit_test(a_recording_is_predicted_without_an_engine),
        cmocka_unit_test(without_times_there_is_no_forecast),
    };
    return cmocka_run_group_tests(tests, open_runtime, close_runtime);
}
