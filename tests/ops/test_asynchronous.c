/* What only asynchronous devices show: that the host does not wait for them, what it may then
 * assume of the other ranks, the one order of gathers and reductions, failures of what is launched.
 */
#include "ops/zero/engine.h"
#include "world.h"

static void on_all_worlds(const model *model, rank_body body) {
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_ranks_async(worlds[i], model, body, NULL);
}

static float mean_of_step_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_gradient(state->world, ~0u, 2, parameter, element);
}

static void train(rank_state *state, int steps) {
    for (int i = 0; i < steps && state->failure[0] == '\0'; i++)
        train_step(state, 1);
}

/* ---- the host goes on ------------------------------------------------------------------------ */

static void train_while_nothing_moves(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 2));
    forward(state, 0); /* recorded, too */
    CHECK_FINE();
    DO(finish_compute(state));
    pause_device(state, 1);
    for (uint64_t step = 1; step <= 2; step++) {
        DO(train_step(state, step));
        DO(check_gradients(state, step == 1 ? mean_of_step_1 : mean_of_step_2));
    }
    DO(forward(state, 0));
    CHECK(stats_of(state).backwards == 4);
    pause_device(state, 0);
    finish_compute(state);
}

static void count_buckets(rank_state *state) {
    const size_t wanted = *(const size_t *)state->argument;
    DO(build_engine(state));
    DO(train(state, 2));
    CHECK(stats_of(state).bucket_peak == wanted * 512); /* 128 bytes a rank */
    finish_compute(state);
}

static void groups_in_parts_have_more_buckets(void **unused) {
    (void)unused;
    size_t whole = 2, in_parts = 4;
    model model = empty_model(3);
    model.bucket_bytes = 128;
    add_shape(&model, 8, 16, 1); /* two rows a rank: 128 bytes */
    close_group(&model);
    run_ranks_async(4, &model, count_buckets, &whole);
    model = empty_model(3);
    model.bucket_bytes = model.part_bytes = 128;
    add_shape(&model, 32, 16, 1); /* four of them */
    close_group(&model);
    run_ranks_async(4, &model, count_buckets, &in_parts);
}

static void planned_steps_do_not_wait_for_the_device(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++)
        for (int one = 0; one <= 1; one++) {
            model model = chain_model(stage, 5, 16);
            model.bucket_bytes = 256; /* more reductions than buckets */
            model.one_comm = one;
            for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
                run_ranks_async(worlds[i], &model, train_while_nothing_moves, NULL);
        }
}

static void train_with_casts(rank_state *state) {
    DO(build_engine(state));
    train_and_check(state, 6, mean_of_step_1);
}

static void slow_devices_get_the_same_values(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= 4; seed++)
        for (int stage = 1; stage <= 3; stage++) {
            model model = odd_model(stage);
            model.gather_dtype = seed % 2 ? PST_BFLOAT16 : PST_FLOAT32;
            model.bucket_bytes = 256;
            model.delay_us = 40;
            model.seed = seed;
            model.one_comm = seed > 2;
            run_ranks_async(2, &model, train_with_casts, NULL);
        }
}

static void accumulate(rank_state *state) {
    DO(build_engine(state));
    for (int i = 0; i < 5; i++) {
        fresh_targets(state);
        DO(forward(state, 1));
        CHECK_OK(pst_zero_begin_backward(state->engine, 0)); /* kept by the caller */
        for (size_t g = state->model->group_count; g-- > 0;) {
            DO(use(state, g));
        }
        CHECK_OK(pst_zero_end_backward(state->engine));
        DO(forward(state, 1));
        DO(end_step(state, mean_of_step_1));
    }
}

static void accumulates_without_communication(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        model.delay_us = 20;
        on_all_worlds(&model, accumulate);
    }
}

/* ---- what the host may assume ---------------------------------------------------------------- */

/* A backward in which this rank reaches only the groups of `reached`, by bit. */
static void backward_of(rank_state *state, uint64_t step, unsigned reached) {
    make_gradients(state, step);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = state->model->group_count; g-- > 0;) {
        if (!((reached >> g) & 1u)) continue;
        DO(backward_use(state, g));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static void step_of(rank_state *state, unsigned reached) {
    fresh_targets(state);
    DO(forward(state, 1));
    DO(backward_of(state, 1, reached));
    update(state);
}

static float without_group_1(const rank_state *state, size_t parameter, size_t element) {
    return parameter == 1 ? 0.0f : mean_of_step_1(state, parameter, element);
}

static void miss_from_the_start(rank_state *state) {
    DO(build_engine(state));
    for (int i = 0; i < 5; i++) {
        DO(step_of(state, 5));
        CHECK(pst_zero_has_gradient(state->engine, 0) && !pst_zero_has_gradient(state->engine, 1));
        DO(check_gradients(state, without_group_1));
    }
    step_of(state, state->rank == 0 ? 7 : 5); /* the others hear of it at once */
    CHECK_FINE();
    CHECK(pst_zero_has_gradient(state->engine, 1));
}

static void a_parameter_without_a_gradient_is_known_exactly(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    on_all_worlds(&model, miss_from_the_start);
}

/* Zeros for as long as the answers lag, then exactly, and on all ranks in the same backward. */
static void miss_later(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 3));
    int seen[8];
    for (int i = 0; i < 8; i++) {
        DO(step_of(state, 5));
        DO(check_gradients(state, without_group_1));
        seen[i] = pst_zero_has_gradient(state->engine, 1);
    }
    const int expected[8] = {1, 1, 1, 1, 0, 0, 0, 0};
    CHECK(memcmp(seen, expected, sizeof seen) == 0);
    DO(train(state, 1));
    CHECK(pst_zero_has_gradient(state->engine, 1));
}

static void a_gradient_that_is_missing_counts_as_zeros_until_all_know(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    model.delay_us = 20;
    on_all_worlds(&model, miss_later);
}

static void report_twice(rank_state *state, size_t g) {
    DO(begin_use(state, g));
    DO(report(state, g));
    DO(end_use(state, g));
    report(state, g);
}

static float group_1_twice(const rank_state *state, size_t parameter, size_t element) {
    float mean = mean_of_step_1(state, parameter, element);
    return parameter == 1 ? mean + mean : mean;
}

static void step_that_reports_group_1_twice(rank_state *state) {
    fresh_targets(state);
    DO(forward(state, 1));
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    DO(backward_use(state, 2));
    DO(report_twice(state, 1));
    DO(backward_use(state, 0));
    CHECK_OK(pst_zero_end_backward(state->engine));
    DO(check_gradients(state, group_1_twice));
    update(state);
}

static void report_twice_in_each_step(rank_state *state) {
    build_engine(state);
    for (int i = 0; i < 5 && state->failure[0] == '\0'; i++)
        step_that_reports_group_1_twice(state);
}

static void second_reports_add_in_each_step(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    on_all_worlds(&model, report_twice_in_each_step);
}

/* Now and then: while nobody expects it, while its answer is on its way, once it is expected. */
static void report_twice_at_times(rank_state *state) {
    build_engine(state);
    for (int step = 0; step < 20 && state->failure[0] == '\0'; step++) {
        const int is_twice = step == 4 || step == 5 || step == 9 || step >= 18;
        if (is_twice)
            step_that_reports_group_1_twice(state);
        else
            train(state, 1);
        if (!is_twice && state->failure[0] == '\0') check_gradients(state, mean_of_step_1);
        if (is_twice) CHECK(!pst_zero_is_steady(state->engine));
    }
}

static void second_reports_that_nobody_expects_add(void **unused) {
    (void)unused;
    for (int one = 0; one <= 1; one++) {
        model model = chain_model(3, 3, 16);
        model.one_comm = one;
        on_all_worlds(&model, report_twice_at_times);
    }
}

/* Rank 0 one group, the others another one. */
static void report_other_groups_twice(rank_state *state) {
    build_engine(state);
    DO(train(state, 4));
    fresh_targets(state);
    forward(state, 1);
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t g = 3; g-- > 0;)
        if (g == (state->rank == 0 ? 2 : 1))
            report_twice(state, g);
        else
            backward_use(state, g);
    pst_status status = pst_zero_end_backward(state->engine);
    while (status == PST_OK) { /* the answer comes some backwards later */
        status = pst_zero_begin_forward(state->engine, 1);
        if (status == PST_OK) status = pst_zero_end_forward(state->engine);
        if (status == PST_OK) status = pst_zero_begin_backward(state->engine, 1);
        if (status == PST_OK) status = pst_zero_end_backward(state->engine);
    }
    CHECK(status == PST_EMISMATCH || status == PST_EPEER);
}

static void ranks_that_report_other_groups_twice_are_told(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    run_ranks_async(2, &model, report_other_groups_twice, NULL);
}

/* A group that has no place in the backward's order: its graph is of a forward before. Others have
 * no doubt of that order by then. */
static void report_an_older_use(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 3));
    for (int step = 0; step < 12; step++) {
        const int is_older = step == 5 || step == 11;
        fresh_targets(state);
        CHECK_OK(pst_zero_begin_forward(state->engine, 1));
        use(state, 0);
        use(state, 1);
        CHECK_OK(pst_zero_end_forward(state->engine));
        make_gradients(state, 1);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        if (is_older) report(state, 2);
        backward_use(state, 1);
        DO(backward_use(state, 0));
        CHECK_OK(pst_zero_end_backward(state->engine));
        CHECK(pst_zero_has_gradient(state->engine, 2) == is_older);
        if (is_older) check_gradients(state, mean_of_step_1);
        CHECK_FINE();
        update(state);
    }
}

static void reports_of_older_graphs_add(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    on_all_worlds(&model, report_an_older_use);
}

/* ---- one order ------------------------------------------------------------------------------- */

/* The gathers and reductions of groups since `from` on the first board, a letter each. What ranks
 * agree on (who had which gradient), and compare (plans), comes when it comes: compute does not
 * wait for it. */
static void write_order(const rank_state *state, size_t from, char *order) {
    board *board = &state->boards[0];
    (void)pthread_mutex_lock(&board->lock);
    for (size_t i = from; i < board->count; i++) {
        const pst_collective *posted = &board->tickets[i]->posted[state->rank];
        if (posted->name == NULL) continue; /* of another rank alone, so far: such a comparison */
        const int is_plan = strncmp(posted->name, "plan of ", strlen("plan of ")) == 0;
        if (posted->kind == PST_ALL_GATHER && !is_plan) *order++ = 'g';
        if (posted->kind == PST_REDUCE_SCATTER) *order++ = 'r';
    }
    *order = '\0';
    (void)pthread_mutex_unlock(&board->lock);
}

static void watch_order(rank_state *state) {
    char order[64];
    DO(build_engine(state));
    DO(train(state, 3));
    DO(forward(state, 1));
    DO(finish_compute(state));
    meet(&state->course->arrived, state->world);
    const size_t before = state->boards[0].count;
    meet(&state->course->left, state->world);
    DO(backward(state, 1));
    DO(finish_compute(state));
    write_order(state, before, order);
    /* Two of five are kept from the forward, and one is gathered ahead. */
    CHECK(strcmp(order, "rgrgrgrr") == 0);
}

static void reductions_go_out_between_the_gathers(void **unused) {
    (void)unused;
    model model = chain_model(3, 5, 16);
    model.one_comm = 1;
    model.prefetch_ahead = 1;
    model.bucket_bytes = 128; /* one group each */
    run_ranks_on_boards(2, &model, watch_order, NULL);
}

/* Each rank leaves out another group in each step, so that one's turn comes when it is needed. */
static void skip_here_and_there(rank_state *state) {
    const unsigned all = (1u << state->model->group_count) - 1u;
    DO(build_engine(state));
    DO(train(state, 2));
    for (unsigned i = 0; i < 10; i++) {
        unsigned left_out = (i + (unsigned)state->rank) % (unsigned)state->model->group_count;
        DO(step_of(state, all & ~(1u << left_out)));
    }
    DO(train(state, 1));
    check_gradients(state, mean_of_step_1);
}

static void ranks_that_leave_out_different_groups_keep_one_order(void **unused) {
    (void)unused;
    for (int one = 0; one <= 1; one++)
        for (uint32_t ahead = 0; ahead <= 2; ahead++) {
            model model = chain_model(3, 6, 16);
            model.one_comm = one;
            model.prefetch_ahead = ahead;
            model.bucket_bytes = 256;
            model.delay_us = 30;
            model.seed = ahead;
            for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
                run_ranks_async(worlds[i], &model, skip_here_and_there, NULL);
        }
}

/* ---- failures -------------------------------------------------------------------------------- */

static int is_trouble(pst_status status) {
    return status == PST_EPEER || status == PST_ETIMEDOUT || status == PST_ECANCELED;
}

/* One step without the tests' own checks, which hang behind what fails. It reports group `twice`,
 * if there is one of that number, again. */
static pst_status bare_step(rank_state *state, uint32_t twice) {
    void *memory;
    const void *sources[1];
    pst_zero *engine = state->engine;
    pst_status status = pst_zero_begin_forward(engine, 1);
    for (uint32_t g = 0; status == PST_OK && g < state->model->group_count; g++) {
        status = pst_zero_gather(engine, g);
        if (status == PST_OK) status = pst_zero_wait(engine, g, &memory);
        if (status == PST_OK) status = pst_zero_release(engine, g);
    }
    if (status == PST_OK) status = pst_zero_end_forward(engine);
    if (status == PST_OK) status = pst_zero_begin_backward(engine, 1);
    for (uint32_t g = (uint32_t)state->model->group_count; status == PST_OK && g-- > 0;) {
        sources[0] = state->gradients[g];
        status = pst_zero_gather(engine, g);
        if (status == PST_OK) status = pst_zero_wait(engine, g, &memory);
        if (status == PST_OK) status = pst_zero_gradients(engine, g, sources, PST_FLOAT32);
        if (status == PST_OK) status = pst_zero_release(engine, g);
        if (status == PST_OK && g == twice)
            status = pst_zero_gradients(engine, g, sources, PST_FLOAT32);
    }
    return status == PST_OK ? pst_zero_end_backward(engine) : status;
}

static void fail_after_launch(rank_state *state) {
    DO(build_engine(state));
    make_gradients(state, 1);
    pst_status status = PST_OK;
    for (int i = 0; i < 40 && status == PST_OK; i++)
        status = bare_step(state, UINT32_MAX);
    CHECK(is_trouble(status));
    /* Which communicator a rank hears of first is a matter of time, and on a slow machine its own
     * deadline comes before both. */
    CHECK(text_has(state, "a peer is gone") || text_has(state, "aborted") ||
          text_has(state, "has not come in"));
    CHECK(pst_zero_begin_forward(state->engine, 1) == pst_runtime_status(state->runtime));
    pst_zero_destroy(state->engine);
    state->engine = NULL;
    for (size_t g = 0; g < state->model->group_count; g++) /* nobody writes there any more */
        memset(state->targets[g], 0x5a, state->layouts[g].gradient_bytes);
    async_sleep(3000);
    for (size_t g = 0; g < state->model->group_count; g++)
        for (size_t i = 0; i < state->layouts[g].gradient_bytes; i++)
            CHECK(((const char *)state->targets[g])[i] == 0x5a);
}

static void a_collective_that_fails_after_its_launch_ends_the_training(void **unused) {
    (void)unused;
    for (uint64_t ticket = 1; ticket <= 12; ticket++) {
        model model = chain_model(3, 4, 16);
        model.bucket_bytes = 256;
        model.deadline_ns = 5000000000u;
        model.fail_at = ticket;
        run_ranks_on_boards(2, &model, fail_after_launch, NULL);
    }
}

static void meet_before_the_fault(rank_state *state) {
    DO(build_engine(state));
    make_gradients(state, 1);
    meet(&state->course->arrived, state->world);
}

/* Of rank 0, whose path is asked for before each task of a reduction: one of them is refused then.
 */
static struct {
    pst_runtime *runtime;
    int calls, last;
} stopped;

static const char *stop_at_the_last_call(pst_comm *comm, const pst_collective *collective) {
    (void)comm;
    if (collective->kind == PST_REDUCE_SCATTER && ++stopped.calls == stopped.last)
        pst_runtime_poison(stopped.runtime, PST_ECANCELED, "stopped between two parts");
    return "";
}

/* Once each time at another one: that of a second report goes out behind all that could tell the
 * host of an error. */
static void stop_between_two_parts(rank_state *state) {
    DO(meet_before_the_fault(state));
    if (state->rank == 0) {
        stopped.runtime = state->runtime;
        stopped.calls = 0;
        async_comm_of(state->reduce)->ops.path = stop_at_the_last_call;
    }
    pst_status status = PST_OK;
    for (int i = 0; i < 40 && status == PST_OK; i++)
        status = bare_step(state, 1);
    CHECK(state->rank == 0 ? status == PST_ECANCELED : is_trouble(status));
    CHECK(state->rank != 0 || text_has(state, "stopped between two parts"));
}

static void a_reduction_without_its_second_part_ends_with_the_runtimes_error(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    model.deadline_ns = 5000000000u;
    model.device = ON_ONE_SIDED;
    for (stopped.last = 1; stopped.last <= 12; stopped.last++)
        run_ranks_on_device(2, &model, stop_between_two_parts, NULL);
}

/* A call of the device fails somewhere, once. Whoever made it, the training ends on all ranks, or
 * nothing hangs on this call and it goes on on all of them; and nobody writes any more when a rank
 * has destroyed its engine. */
static void train_into_the_fault(rank_state *state, int steps) {
    pst_status status = PST_OK;
    for (int i = 0; i < steps && status == PST_OK; i++)
        status = bare_step(state, UINT32_MAX);
    pst_zero_destroy(state->engine);
    state->engine = NULL;
    for (size_t g = 0; g < state->model->group_count; g++)
        memset(state->targets[g], 0x5a, state->layouts[g].gradient_bytes);
    (void)__atomic_add_fetch(&state->course->ended, status != PST_OK, __ATOMIC_ACQ_REL);
    meet(&state->course->left, state->world);
    const int ended = __atomic_load_n(&state->course->ended, __ATOMIC_ACQUIRE);
    CHECK(ended == (status == PST_OK ? 0 : state->world));
    (void)drain_compute(state);
    for (size_t g = 0; g < state->model->group_count; g++)
        for (size_t i = 0; i < state->layouts[g].gradient_bytes; i++)
            CHECK(((const char *)state->targets[g])[i] == 0x5a);
}

static void fail_in_a_call(rank_state *state) {
    DO(meet_before_the_fault(state));
    if (state->rank == 0)
        __atomic_store_n(&state->course->fault_in, *(const uint64_t *)state->argument,
                         __ATOMIC_RELEASE);
    train_into_the_fault(state, 60);
}

static void fail_behind_a_call(rank_state *state) {
    DO(meet_before_the_fault(state));
    if (state->rank == 0)
        __atomic_store_n(&state->course->fault_after, state->argument, __ATOMIC_RELEASE);
    DO(train_into_the_fault(state, 10));
    CHECK(__atomic_load_n(&state->course->fault_after, __ATOMIC_ACQUIRE) == NULL);
}

static void a_call_of_the_device_that_fails_ends_all_ranks_or_none(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.bucket_bytes = 256;
    run_ranks_with_faults(&model, fail_in_a_call);
}

/* What runs is waited for even if the event of its end could not be recorded. */
static void what_runs_without_an_event_of_its_end_is_waited_for(void **unused) {
    (void)unused;
    static char sum[] = "sum", copy[] = "cast_scale_copy";
    model chain = chain_model(3, 4, 16);
    model model = model_with_faults(&chain);
    model.bucket_bytes = 256;
    model.delay_us = 4000;
    for (model.seed = 0; model.seed < 6; model.seed++)
        run_ranks_on_device(2, &model, fail_behind_a_call, model.seed < 4 ? sum : copy);
}

static void gather_alone(rank_state *state) {
    DO(build_engine(state));
    if (state->rank != 0) return;
    void *memory;
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    CHECK_OK(pst_zero_gather(state->engine, 0));
    CHECK_OK(pst_zero_wait(state->engine, 0, &memory)); /* launched, but rank 1 never comes */
    pst_zero_destroy(state->engine);
    state->engine = NULL;
}

static void destroying_in_mid_flight_does_not_hang(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.deadline_ns = 2000000000u;
    run_ranks_on_boards(2, &model, gather_alone, NULL);
}

static void destroy_at_once(rank_state *state) {
    DO(build_engine(state));
    DO(train(state, 3));
    pst_zero_destroy(state->engine); /* while compute and peers still work on its memory */
    state->engine = NULL;
}

static void destroying_waits_for_compute_and_for_readers(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.delay_us = 30;
    on_all_worlds(&model, destroy_at_once);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_in_parts_have_more_buckets),
        cmocka_unit_test(planned_steps_do_not_wait_for_the_device),
        cmocka_unit_test(slow_devices_get_the_same_values),
        cmocka_unit_test(accumulates_without_communication),
        cmocka_unit_test(a_parameter_without_a_gradient_is_known_exactly),
        cmocka_unit_test(a_gradient_that_is_missing_counts_as_zeros_until_all_know),
        cmocka_unit_test(second_reports_add_in_each_step),
        cmocka_unit_test(second_reports_that_nobody_expects_add),
        cmocka_unit_test(ranks_that_report_other_groups_twice_are_told),
        cmocka_unit_test(reports_of_older_graphs_add),
        cmocka_unit_test(reductions_go_out_between_the_gathers),
        cmocka_unit_test(ranks_that_leave_out_different_groups_keep_one_order),
        cmocka_unit_test(a_collective_that_fails_after_its_launch_ends_the_training),
        cmocka_unit_test(a_reduction_without_its_second_part_ends_with_the_runtimes_error),
        cmocka_unit_test(a_call_of_the_device_that_fails_ends_all_ranks_or_none),
        cmocka_unit_test(what_runs_without_an_event_of_its_end_is_waited_for),
        cmocka_unit_test(destroying_in_mid_flight_does_not_hang),
        cmocka_unit_test(destroying_waits_for_compute_and_for_readers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
