/* Gradients that go out from where they lie, over communicators that push. */
#include "ops/zero/engine.h"
#include "world.h"

#include <time.h>

/* Each group of four a parameter of 256 bytes a rank, which is pushed, and one that is not. */
static model model_of_both(int stage) {
    model model = empty_model(stage);
    for (int g = 0; g < 4; g++) {
        add_shape(&model, 8, 16, 1);
        add_shape(&model, 2, 8, 1);
        close_group(&model);
    }
    model.bucket_bytes = 4096;
    model.push_bytes = 256;
    return model;
}

static void begin(rank_state *state) {
    fresh_targets(state);
    forward(state, 1);
    DO(make_gradients(state, 1));
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
}

static void reduce_from(rank_state *state, size_t group, size_t last) {
    for (size_t g = group; g-- > last && state->failure[0] == '\0';)
        backward_use(state, g);
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static void reduce_groups(rank_state *state, size_t last) {
    reduce_from(state, state->model->group_count, last);
}

static void count_reductions(rank_state *state) {
    const int pushes = state->model->device == ON_ONE_SIDED || state->model->device == ON_CE;
    DO(build_engine(state));
    begin(state);
    reduce_groups(state, 0);
    DO(check_gradients(state, mean_of_step_1));
    CHECK(stats_of(state).reduces == (pushes ? 5 : 1)); /* all that is small in one bucket */
    CHECK(stats_of(state).reduce_bytes == 4 * (8 * 16 + 2 * 8) * sizeof(float));
}

static void large_gradients_need_no_bucket(void **unused) {
    (void)unused;
    const model model = model_of_both(3);
    run_ranks(2, &model, count_reductions, NULL);
}

/* Whoever reuses a gradient's memory does so behind the sums. */
static void spoil_what_is_consumed(rank_state *state) {
    build_engine(state);
    for (int pass = 0; pass < 4 && state->failure[0] == '\0'; pass++) {
        begin(state);
        state->spoils_consumed = 1;
        reduce_groups(state, 0);
        state->spoils_consumed = 0;
        CHECK_FINE();
        check_gradients(state, mean_of_step_1);
    }
}

static void pushed_gradients_stay_until_they_are_added_up(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = model_of_both(stage);
        model.delay_us = 20;
        run_ranks_async(2, &model, spoil_what_is_consumed, NULL);
        model.part_bytes = 128; /* in parts */
        model.bucket_bytes = 512;
        run_ranks_async(2, &model, spoil_what_is_consumed, NULL);
    }
}

/* Compute is a group ahead before it waits for sums: two groups are lent, where they are pushed. In
 * the first backward, which is careful, all are reduced near its end. */
static void count_what_is_lent(rank_state *state) {
    DO(build_engine(state));
    for (int pass = 1; pass <= 3 && state->failure[0] == '\0'; pass++) {
        begin(state);
        const uint64_t reduces = stats_of(state).reduces;
        for (size_t g = 4; g-- > 0 && state->failure[0] == '\0';) {
            backward_use(state, g);
            if (pass == 1) continue;
            const size_t lent = stats_of(state).reduces > reduces ? 2 : 1;
            for (size_t other = g; other < 4; other++)
                CHECK(state->consumed[other] == pass - (other < g + lent));
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
        for (size_t g = 0; g < 4; g++)
            CHECK(state->consumed[g] == pass);
    }
}

static void gradients_of_two_groups_are_lent(void **unused) {
    (void)unused;
    const model model = model_of_both(3);
    run_ranks_async(2, &model, count_what_is_lent, NULL);
}

/* Compute's stream waits once for the parts of a group: those that end on one stream end in order.
 */
static void count_waits(rank_state *state) {
    const pst_stream *compute = pst_lane_stream(state->compute);
    DO(build_engine(state));
    for (int pass = 1; pass <= 3 && state->failure[0] == '\0'; pass++) {
        begin(state);
        const size_t before = compute->waits;
        const uint64_t reduces = stats_of(state).reduces;
        reduce_groups(state, 0);
        CHECK_FINE();
        CHECK(stats_of(state).reduces - reduces == 4 * 4);
        CHECK(compute->waits - before <= 4 * 2); /* and for copies */
        check_gradients(state, mean_of_step_1);
    }
}

static void compute_waits_once_for_the_parts_of_a_group(void **unused) {
    (void)unused;
    model model = empty_model(1);
    for (int g = 0; g < 4; g++) {
        add_shape(&model, 16, 16, 1); /* four parts */
        close_group(&model);
    }
    model.bucket_bytes = 4096;
    model.push_bytes = model.part_bytes = 128;
    model.device = ON_ONE_SIDED;
    run_ranks_on_device(2, &model, count_waits, NULL);
}

static uint32_t sums_may_go[2]; /* by rank; a device's flag */

static void hold_sums(rank_state *state) {
    const pst__queue *queue = pst__queue_of(&state->engine->carrier, PST__REDUCE_LANE);
    pst_device *device = device_of(state);
    CHECK_OK(device->ops->stream_wait32(device, pst_lane_stream(queue->sum_lane),
                                        &sums_may_go[state->rank], 1));
}

/* Before which reduction of the recording, counted from 1; 0: before none. */
static size_t compute_waits(const rank_state *state) {
    const pst__history *history = &state->engine->history[1];
    for (size_t i = 0; i < history->current.count; i++) {
        pst__timing *reached = history->notes.reached[i];
        if (history->current.operations[i].kind == PST_ZERO_REDUCE &&
            reached->is_noted[PST__ENDED] && pst__timing_read(reached, PST__BEGAN) != 0 &&
            pst__timing_read(reached, PST__ENDED) == 0)
            return i + 1;
    }
    return 0;
}

static void check_has_waited(rank_state *state, uint64_t ns) {
    pst_zero_op operations[64];
    pst_zero_op_time times[64];
    size_t count = 0, timed = 0;
    uint64_t longest = 0;
    CHECK_OK(pst_zero_recorded(state->engine, 1, operations, 64, &count));
    CHECK_OK(pst_zero_recorded_times(state->engine, 1, times, 64, &timed));
    CHECK(timed == count && count <= 64);
    for (size_t i = 0; i < timed; i++)
        if (operations[i].kind == PST_ZERO_REDUCE && times[i].waited_ns > longest)
            longest = times[i].waited_ns;
    CHECK(longest >= ns);
}

static void wait_for_sums(rank_state *state) {
    DO(build_engine(state));
    pst_zero_set_replay(state->engine, 0);
    for (int pass = 0; pass < 2 && state->failure[0] == '\0'; pass++) {
        begin(state);
        reduce_groups(state, 0);
    }
    DO(begin(state));
    DO(hold_sums(state));
    for (size_t g = 4; g-- > 0 && state->failure[0] == '\0';)
        backward_use(state, g);
    size_t waits = 0;
    for (int i = 0; i < 1000 && (waits == 0 || compute_waits(state) != waits); i++) {
        waits = compute_waits(state);
        async_sleep(20000);
    }
    CHECK(waits != 0 && compute_waits(state) == waits);
    __atomic_store_n(&sums_may_go[state->rank], 1, __ATOMIC_RELEASE); /* the device reads it */
    CHECK_OK(pst_zero_end_backward(state->engine));
    CHECK(drain_compute(state));
    check_has_waited(state, 10000000);
}

/* What a recording says of compute has no part of it. */
static void a_recording_says_that_compute_has_waited_for_sums(void **unused) {
    (void)unused;
    model model = empty_model(2);
    for (int g = 0; g < 4; g++) {
        add_shape(&model, 8, 16, 1); /* pushed: none is copied, which compute would wait for, too */
        close_group(&model);
    }
    model.bucket_bytes = 4096;
    model.push_bytes = 256;
    model.device = ON_CE;
    sums_may_go[0] = sums_may_go[1] = 0;
    run_ranks_on_device(2, &model, wait_for_sums, NULL);
}

/* ---- compute does not wait for peers ---- */

static int has_passed, may_go; /* atomic */

static pst_status note_passed(void *argument) {
    (void)argument;
    __atomic_store_n(&has_passed, 1, __ATOMIC_RELEASE); /* pairs with the load in becomes */
    return PST_OK;
}

static int becomes(const int *flag) {
    const struct timespec pause = {0, 1000000};
    for (int i = 0; i < 20000; i++) {
        if (__atomic_load_n(flag, __ATOMIC_ACQUIRE)) return 1;
        (void)nanosleep(&pause, NULL);
    }
    return 0;
}

/* More parts of a gradient go out than there are buckets to land in, all of which are full as the
 * other rank does not take any. Compute waits for copies of the group, but not for these. */
static void reduce_alone(rank_state *state) {
    const int nothing = 0;
    for (size_t g = 3; g > 0; g--)
        backward_use(state, g);
    on_compute(state, note_passed, &nothing, sizeof nothing);
    CHECK(becomes(&has_passed));
    __atomic_store_n(&may_go, 1, __ATOMIC_RELEASE); /* pairs with the load in becomes */
    reduce_from(state, 1, 0);
}

static void let_a_rank_be_late(rank_state *state) {
    build_engine(state);
    if (state->rank == 0) /* before the ranks meet in passes */
        has_passed = may_go = 0;
    for (int pass = 0; pass < 3 && state->failure[0] == '\0'; pass++) {
        begin(state);
        reduce_groups(state, 0);
    }
    DO(begin(state));
    if (state->rank == 0) {
        reduce_alone(state);
    } else {
        CHECK(becomes(&may_go));
        reduce_groups(state, 0);
    }
    check_gradients(state, mean_of_step_1);
}

static void compute_does_not_wait_until_peers_take_gradients(void **unused) {
    (void)unused;
    model model = empty_model(1);
    for (int g = 0; g < 4; g++) {
        if (g < 3) add_shape(&model, 64, 16, 1);
        add_shape(&model, 2, 8, 1); /* that of the last group opens the bucket for all of them */
        close_group(&model);
    }
    model.bucket_bytes = 512;
    model.part_bytes = 128;
    model.push_bytes = 256;
    const int pushing[] = {ON_ONE_SIDED, ON_CE};
    for (size_t i = 0; i < 2; i++) {
        model.device = pushing[i];
        run_ranks_on_device(2, &model, let_a_rank_be_late, NULL);
    }
}

/* The first group's parameters are the first two. */
static float without_rank_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_gradient(state->world, parameter < 2 ? 1u : ~0u, 1, parameter, element);
}

static void leave_a_group_out_on_rank_1(rank_state *state) {
    build_engine(state);
    for (int pass = 0; pass < 3 && state->failure[0] == '\0'; pass++) {
        begin(state);
        DO(reduce_groups(state, state->rank == 1 ? 1 : 0));
        check_gradients(state, without_rank_1);
    }
}

static void a_rank_without_a_gradient_pushes_zeros(void **unused) {
    (void)unused;
    const model model = model_of_both(3);
    run_ranks_async(2, &model, leave_a_group_out_on_rank_1, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(large_gradients_need_no_bucket),
        cmocka_unit_test(pushed_gradients_stay_until_they_are_added_up),
        cmocka_unit_test(gradients_of_two_groups_are_lent),
        cmocka_unit_test(compute_waits_once_for_the_parts_of_a_group),
        cmocka_unit_test(a_recording_says_that_compute_has_waited_for_sums),
        cmocka_unit_test(compute_does_not_wait_until_peers_take_gradients),
        cmocka_unit_test(a_rank_without_a_gradient_pushes_zeros),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
