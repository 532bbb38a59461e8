/* Reductions into flat partitions: what each rank gets, what adds up, how long memory is held. */
#include "partition_part.h"

/* ---- running --------------------------------------------------------------------------------- */

static void on_worlds(const variant *variant, rank_body body) {
    model model = {.deadline_ns = 10000000000u};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int device = ON_HOST; device <= ON_CE; device++) {
            model.device = device;
            run_ranks_on_device(worlds[i], &model, body, (void *)variant);
        }
}

/* Each way, in one bucket and in buckets that gradients are cut into, on three ranks. */
static void in_all_ways(rank_body body) {
    static const size_t bytes[] = {256, 1u << 20};
    model model = {.deadline_ns = 10000000000u};
    for (int route = PST_PARTITION_ALL_REDUCE; route <= PST_PARTITION_REDUCE_SCATTER; route++)
        for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
            const variant variant = {.route = (pst_partition_route)route, .bucket_bytes = bytes[i]};
            for (int device = ON_HOST; device <= ON_CE; device++) {
                model.device = device;
                run_ranks_on_device(3, &model, body, (void *)&variant);
            }
        }
}

#define TEST_ON_ALL_WAYS(name, body)                                                               \
    static void name(void **unused) {                                                              \
        (void)unused;                                                                              \
        in_all_ways(body);                                                                         \
    }

/* ---- values ---------------------------------------------------------------------------------- */

static void reduce_once(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    DO(backward_of(&part, 1, 1));
    DO(check_all(&part, mean_1));
    for (size_t i = 1; i < part.gradient_count; i++)
        CHECK(part.consumed[i] == 1);
    close_part(&part);
}
TEST_ON_ALL_WAYS(each_rank_gets_the_mean_of_what_it_owns, reduce_once)

static void any_number_of_ranks_chooses_a_way_by_itself(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 512};
    on_worlds(&variant, reduce_once);
}

static void accumulate(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    for (int update = 0; update < 2; update++) {
        DO(backward_of(&part, 0, 1));
        DO(backward_of(&part, 1, 2));
        DO(check_all(&part, mean_1_and_2));
    }
    close_part(&part);
}
TEST_ON_ALL_WAYS(backwards_add_up_until_the_last_one, accumulate)

/* A parameter that several graphs use, or that a recompiled graph reports again. */
static void report_twice(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    DO(begin(&part, 1));
    DO(give_all(&part, 0, SIZES, 1));
    DO(give_all(&part, 0, SIZES, 2));
    DO(end(&part, 1));
    DO(check_all(&part, mean_1_and_2));
    close_part(&part);
}
TEST_ON_ALL_WAYS(two_gradients_of_a_parameter_in_one_backward_add, report_twice)

static void report_twice_in_a_row(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    begin(&part, 1);
    for (size_t i = SIZES; i-- > 0;) {
        DO(give(&part, i, 1));
        end(&part, 0); /* of a graph */
        CHECK_FINE();
        DO(give(&part, i, 2));
    }
    DO(end(&part, 1));
    DO(check_all(&part, mean_1_and_2));
    close_part(&part);
}
TEST_ON_ALL_WAYS(gradients_of_several_graphs_add, report_twice_in_a_row)

static void leave_some_out(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 0.0f));
    DO(backward_of(&part, 1, 1));
    begin(&part, 1);
    give_all(&part, 4, SIZES, 2); /* the others have none */
    CHECK_FINE();
    DO(end(&part, 1));
    finish_compute(state);
    for (size_t i = 0; i < SIZES; i++)
        check_parameter(&part, i, i < 4 ? zero : mean_2);
    DO(finish_compute(state));
    close_part(&part);
}
TEST_ON_ALL_WAYS(what_has_no_gradient_since_the_update_is_zero, leave_some_out)

/* As for stage 1: bound for a backward, and gone before the next one. */
static void bind_anew(rank_state *state) {
    part part = {0};
    DO(create_part(&part, state));
    for (int step = 0; step < 3; step++) {
        fresh_flat(&part, 0.0f);
        DO(bind_flat(&part));
        DO(backward_of(&part, 1, 1));
        DO(check_all(&part, mean_1));
        for (size_t i = 0; i < SIZES; i++)
            CHECK_OK(pst_partition_bind(part.partition, part.ids[i], NULL, PST_FLOAT32, 0, 0));
        memset(part.flat, 0xff, (part.flat_count + 2 * GUARD) * sizeof(float));
    }
    close_part(&part);
}
TEST_ON_ALL_WAYS(targets_may_be_others_in_each_step, bind_anew)

static void break_off(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    begin(&part, 1);
    DO(give_all(&part, 5, SIZES, 2));
    DO(backward_of(&part, 1, 1));
    DO(check_all(&part, mean_1));
    for (size_t i = 1; i < part.gradient_count; i++)
        CHECK(part.consumed[i] == 1);
    close_part(&part);
}

static void a_backward_that_was_broken_off_is_forgotten(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    on_worlds(&variant, break_off);
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static void reduce_bf16(rank_state *state) {
    const variant *variant = state->argument;
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    begin(&part, 1);
    for (size_t i = SIZES; i-- > 0;)
        give_as(&part, i, 1, i % 3 == 0 ? PST_FLOAT32 : PST_BFLOAT16);
    CHECK_FINE();
    DO(end(&part, 1));
    finish_compute(state);
    const float *at = part.flat + GUARD;
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < part.count[i]; j++, at++) {
            const float wanted = mean_1(state, i, part.first[i] + j), apart = *at - wanted;
            const float limit = i % 3 == 0 ? 0.0f : variant->reduce_in_fp32 ? 0.005f : 0.02f;
            CHECK(apart <= limit && -apart <= limit);
        }
    DO(check_guards(&part));
    close_part(&part);
}

static void gradients_travel_in_their_dtype_or_in_fp32(void **unused) {
    (void)unused;
    for (int fp32 = 0; fp32 <= 1; fp32++)
        for (int route = PST_PARTITION_ALL_REDUCE; route <= PST_PARTITION_REDUCE_SCATTER; route++) {
            const variant variant = {
                .route = (pst_partition_route)route, .bucket_bytes = 512, .reduce_in_fp32 = fp32};
            on_worlds(&variant, reduce_bf16);
        }
}

/* In buckets of their own, of which neither waits for the other. */
static void reduce_in_two_dtypes(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    begin(&part, 1);
    for (size_t i = SIZES; i-- > 0;) {
        give_as(&part, i, 1, PST_BFLOAT16);
        give_as(&part, i, 2, PST_FLOAT32);
    }
    CHECK_FINE();
    DO(end(&part, 1));
    finish_compute(state);
    const float *at = part.flat + GUARD;
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < part.count[i]; j++, at++) {
            const float apart = *at - mean_1_and_2(state, i, part.first[i] + j);
            CHECK(apart <= 0.02f && -apart <= 0.02f);
        }
    close_part(&part);
}

static void two_gradients_of_different_dtypes_add(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    on_worlds(&variant, reduce_in_two_dtypes);
}

/* ---- which way ------------------------------------------------------------------------------- */

/* All gradients in one bucket are about evenly owned, a few belong to the last rank. */
static void choose(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    DO(backward_of(&part, 1, 1));
    CHECK(stats_now(&part).reductions == 1 && stats_now(&part).by_reduce_scatter == 1);
    begin(&part, 1);
    give(&part, SIZES - 1, 1);
    DO(end(&part, 1));
    CHECK(stats_now(&part).reductions == 2);
    CHECK(stats_now(&part).by_reduce_scatter == (state->world == 1 ? 2 : 1));
    close_part(&part);
}

static void even_buckets_are_scattered_and_others_all_reduced(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    on_worlds(&variant, choose);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Graphs that report nothing end with no buckets kept, and the last one that does releases them. */
static void hold_and_release(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    for (int step = 0; step < 3; step++) {
        begin(&part, 1);
        give_all(&part, 4, SIZES, 1);
        DO(end(&part, 0));
        CHECK(stats_now(&part).bucket_bytes > 0);
        give_all(&part, 0, 4, 1);
        DO(end(&part, 1));
        CHECK(stats_now(&part).bucket_bytes == 0);
        end(&part, 1); /* a graph without gradients */
        CHECK_FINE();
        CHECK(stats_now(&part).bucket_bytes == 0);
        DO(check_all(&part, mean_1));
    }
    CHECK(stats_now(&part).bucket_peak <= 2 * 1024 + 512 * (size_t)state->world);
    close_part(&part);
}

static void buckets_are_gone_behind_the_last_gradient(void **unused) {
    (void)unused;
    model model = {.deadline_ns = 10000000000u};
    const variant variant = {
        .bucket_bytes = 1024, .frees_in_compute_order = 1, .route = PST_PARTITION_ALL_REDUCE};
    for (int device = ON_HOST; device <= ON_ASYNC; device++) {
        model.device = device;
        run_ranks_on_device(3, &model, hold_and_release, (void *)&variant);
    }
}

/* ---- the host goes on ------------------------------------------------------------------------ */

static void train_while_nothing_moves(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    backward_of(&part, 1, 1); /* the ranks compare */
    CHECK_FINE();
    DO(finish_compute(state));
    async_pause(state->async, 1);
    for (int step = 0; step < 2; step++) {
        backward_of(&part, 1, 2);
        if (state->failure[0] != '\0') break;
    }
    DO(async_pause(state->async, 0));
    DO(check_all(&part, mean_2));
    close_part(&part);
}

static void backwards_do_not_wait_for_the_device(void **unused) {
    (void)unused;
    const model model = {.deadline_ns = 10000000000u, .device = ON_ASYNC};
    for (int route = PST_PARTITION_ALL_REDUCE; route <= PST_PARTITION_REDUCE_SCATTER; route++) {
        const variant variant = {.route = (pst_partition_route)route, .bucket_bytes = 256};
        for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
            run_ranks_on_device(worlds[i], &model, train_while_nothing_moves, (void *)&variant);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_rank_gets_the_mean_of_what_it_owns),
        cmocka_unit_test(any_number_of_ranks_chooses_a_way_by_itself),
        cmocka_unit_test(backwards_add_up_until_the_last_one),
        cmocka_unit_test(two_gradients_of_a_parameter_in_one_backward_add),
        cmocka_unit_test(gradients_of_several_graphs_add),
        cmocka_unit_test(what_has_no_gradient_since_the_update_is_zero),
        cmocka_unit_test(targets_may_be_others_in_each_step),
        cmocka_unit_test(a_backward_that_was_broken_off_is_forgotten),
        cmocka_unit_test(gradients_travel_in_their_dtype_or_in_fp32),
        cmocka_unit_test(two_gradients_of_different_dtypes_add),
        cmocka_unit_test(even_buckets_are_scattered_and_others_all_reduced),
        cmocka_unit_test(buckets_are_gone_behind_the_last_gradient),
        cmocka_unit_test(backwards_do_not_wait_for_the_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
