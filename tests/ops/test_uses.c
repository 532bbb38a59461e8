/* Backwards that reach a group several times, and not alike on all ranks. */
#include "world.h"

static float half_of_step_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_gradient(state->world, 1, 1, parameter, element); /* of rank 0 alone */
}

static void forward_over(rank_state *state, const size_t *groups, size_t count) {
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t i = 0; i < count; i++)
        use(state, groups[i]);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_forward(state->engine));
}

static void begin(rank_state *state) {
    fresh_targets(state);
    make_gradients(state, 1);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
}

static void begin_after(rank_state *state, int forwards) {
    for (int i = 0; i < forwards; i++)
        forward(state, 1);
    CHECK_FINE();
    begin(state);
}

static void end(rank_state *state, expected_gradient expected) {
    CHECK_OK(pst_zero_end_backward(state->engine));
    DO(check_gradients(state, expected));
    update(state);
}

/* ---- several forwards ------------------------------------------------------------------------ */

/* Through both forwards: on rank 0 the groups are held until the first one is through, too. */
static void reach_both(rank_state *state) {
    const size_t groups = state->model->group_count;
    DO(begin_after(state, 2));
    for (size_t i = 2 * groups; i-- > 0;) {
        const size_t g = i % groups;
        const int is_second = i < groups;
        if (state->rank != 0 || !is_second) begin_use(state, g);
        CHECK_FINE();
        if (is_second) report(state, g);
        CHECK_FINE();
        if (state->rank != 0 || is_second) end_use(state, g);
        CHECK_FINE();
    }
    end(state, mean_of_step_1);
}

/* Rank 0 goes through both, the other one through none of them. */
static void reach_on_one_rank(rank_state *state) {
    const size_t groups = state->model->group_count;
    DO(begin_after(state, 2));
    for (size_t i = 2 * groups; i-- > 0 && state->rank == 0;) {
        DO(begin_use(state, i % groups));
        if (i < groups) report(state, i);
        CHECK_FINE();
        DO(end_use(state, i % groups));
    }
    end(state, half_of_step_1);
}

static void reach_several_forwards(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 3; step++) {
        DO(reach_both(state));
        DO(reach_on_one_rank(state));
    }
}

static void ranks_get_through_several_forwards_each_in_its_way(void **unused) {
    (void)unused;
    for (int ahead = 0; ahead <= 2; ahead += 2) {
        model model = chain_model(3, 4, 16);
        model.prefetch_ahead = (uint32_t)ahead;
        run_ranks(2, &model, reach_several_forwards, NULL);
        model.one_comm = 1;
        run_ranks(2, &model, reach_several_forwards, NULL);
    }
}

/* Nothing is gathered for them in the backward, and they are forgotten. */
static void forward_in_vain(rank_state *state) {
    uint64_t gathers[2];
    DO(build_engine(state));
    pst_zero_set_replay(state->engine, 0);
    for (int i = 0; i < 2; i++) {
        for (int vain = 0; vain < 100 * i; vain++)
            forward(state, 1);
        CHECK_FINE();
        DO(begin_after(state, 1));
        pst_zero_reset_stats(state->engine);
        for (size_t g = state->model->group_count; g-- > 0;)
            backward_use(state, g);
        CHECK_FINE();
        DO(end(state, mean_of_step_1));
        gathers[i] = stats_of(state).gathers;
    }
    CHECK(gathers[0] == gathers[1] && gathers[0] == state->model->group_count);
}

static void forwards_without_a_backward_cost_the_next_one_no_gathers(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    run_ranks(2, &model, forward_in_vain, NULL);
}

/* ---- a group that is used twice -------------------------------------------------------------- */

/* Its second use has a gradient on one rank only, in turn. */
static void use_twice(rank_state *state) {
    static const size_t path[] = {0, 1, 2, 0, 3};
    DO(build_engine(state));
    for (int step = 0; step < 6; step++) {
        DO(forward_over(state, path, 5));
        begin(state);
        for (size_t i = 5; i-- > 0;) {
            if (i != 3)
                backward_use(state, path[i]);
            else if (state->rank == step % 2)
                use(state, path[i]);
            CHECK_FINE();
        }
        DO(end(state, mean_of_step_1));
    }
}

static void a_use_of_a_group_may_have_a_gradient_on_one_rank_only(void **unused) {
    (void)unused;
    for (int one = 0; one <= 1; one++) {
        model model = chain_model(3, 4, 16);
        model.one_comm = one;
        run_ranks(2, &model, use_twice, NULL);
    }
}

/* ---- broken off ------------------------------------------------------------------------------ */

static void break_off_behind(rank_state *state, size_t count) {
    DO(begin_after(state, 1));
    const size_t groups = state->model->group_count;
    for (size_t i = 0; i < count; i++)
        backward_use(state, groups - 1 - i);
}

/* Each rank behind another group: in buckets of its size they have gone out. */
static void break_off(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 4; step++) {
        DO(break_off_behind(state, (size_t)(state->rank + step) % 4));
        DO(begin_after(state, 1));
        for (size_t g = state->model->group_count; g-- > 0;)
            backward_use(state, g);
        CHECK_FINE();
        DO(end(state, mean_of_step_1));
    }
}

static void ranks_may_break_a_backward_off_at_different_places(void **unused) {
    (void)unused;
    for (int one = 0; one <= 1; one++) {
        model model = chain_model(3, 4, 16);
        model.bucket_bytes = 128;
        model.one_comm = one;
        run_ranks(2, &model, break_off, NULL);
    }
}

static void break_off_alone(rank_state *state) {
    char text[512];
    DO(build_engine(state));
    DO(break_off_behind(state, state->rank == 0 ? 1 : 4));
    if (state->rank == 0) {
        (void)pst_zero_begin_forward(state->engine, 1);
        return;
    }
    CHECK(pst_zero_end_backward(state->engine) == PST_EMISMATCH);
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    CHECK(strstr(text, "rank 0 has broken a backward off") != NULL);
}

static void a_rank_that_breaks_off_alone_is_named(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    run_ranks(2, &model, break_off_alone, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_get_through_several_forwards_each_in_its_way),
        cmocka_unit_test(forwards_without_a_backward_cost_the_next_one_no_gathers),
        cmocka_unit_test(a_use_of_a_group_may_have_a_gradient_on_one_rank_only),
        cmocka_unit_test(ranks_may_break_a_backward_off_at_different_places),
        cmocka_unit_test(a_rank_that_breaks_off_alone_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
