/* Partitions whose ranks differ, or that are used wrongly. */
#include "partition_part.h"
#include "slow_copies.h"

/* ---- failing --------------------------------------------------------------------------------- */

static int told; /* ranks that found it; the others hear of an abort */

static void report_in_another_order(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    begin(&part, 1);
    give(&part, 7, 1);
    give(&part, state->rank == 1 ? 2 : 0, 1); /* both take one slot */
    DO(give(&part, state->rank == 1 ? 0 : 2, 1));
    pst_status status = pst_partition_end_backward(part.partition, 1);
    for (int i = 0; i < 5000 && status == PST_OK; i++) {
        async_sleep(1000);
        status = pst_partition_begin_backward(part.partition, 1);
    }
    CHECK(status < 0);
    if (text_has(state, "reported other gradients"))
        (void)__atomic_add_fetch(&told, 1, __ATOMIC_RELAXED); /* the join publishes it */
    pst_partition_destroy(part.partition);
    if (!is_on_host(state)) (void)drain_compute(state); /* it frees what the partition gave back */
    for (size_t i = 0; i < part.gradient_count; i++)
        free(part.gradients[i]);
}

static void ranks_that_report_different_gradients_are_told(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20, .route = PST_PARTITION_ALL_REDUCE};
    model model = {.deadline_ns = 10000000000u};
    for (int device = ON_HOST; device <= ON_ASYNC; device++) {
        model.device = device;
        told = 0;
        run_ranks_on_device(2, &model, report_in_another_order, (void *)&variant);
        assert_true(told > 0);
    }
}

static void fail_behind_a_copy(rank_state *state) {
    part part = {0};
    watch_copies(state);
    DO(open_part(&part, state, 7.0f));
    DO(backward_of(&part, 0, 1));
    finish_compute(state);
    begin(&part, 1);
    DO(give_all(&part, 0, SIZES, 1));
    refuse_behind_copies();
    CHECK(pst_partition_end_backward(part.partition, 1) == PST_EDEVICE);
    CHECK(part.consumed[part.gradient_count - 1] == 1);
    check_copied(state);
    pst_partition_destroy(part.partition);
    finish_compute(state);
    for (size_t i = 0; i < part.gradient_count; i++)
        free(part.gradients[i]);
    CHECK_FINE();
}

static void a_failure_lets_go_what_is_being_copied_only_behind_the_copy(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    const model model = {.deadline_ns = 10000000000u, .device = ON_ASYNC};
    run_ranks_on_device(1, &model, fail_behind_a_copy, (void *)&variant);
}

/* Rank 0 binds nothing of what it has of parameter 1. */
static void bind_too_little(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    part.count[1] -= state->rank == 0;
    DO(bind_flat(&part));
    begin(&part, 1);
    DO(give_all(&part, 0, SIZES, 1));
    CHECK(pst_partition_end_backward(part.partition, 1) == PST_EMISMATCH);
    CHECK(text_has(state, "parameter 'p1' of 300 elements: the ranks have bound 299"));
    close_part(&part);
}

static void elements_that_nobody_owns_are_named(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    const model model = {.deadline_ns = 10000000000u};
    run_ranks_on_device(2, &model, bind_too_little, (void *)&variant);
}

static void bind_wrongly(rank_state *state) {
    part part = {0};
    DO(open_part(&part, state, 7.0f));
    float *target = part.flat + GUARD;
    CHECK(pst_partition_bind(part.partition, part.ids[1], target, PST_FLOAT32, 299, 2) ==
          PST_EINVAL);
    CHECK(pst_partition_bind(part.partition, part.ids[1], NULL, PST_FLOAT32, 0, 1) == PST_EINVAL);
    CHECK(pst_partition_bind(part.partition, SIZES, target, PST_FLOAT32, 0, 1) == PST_EINVAL);
    CHECK(pst_partition_reduce(part.partition, SIZES, target, PST_FLOAT32, NULL) == PST_EINVAL);
    CHECK(pst_partition_reduce(part.partition, part.ids[1], NULL, PST_FLOAT32, NULL) == PST_EINVAL);
    DO(backward_of(&part, 1, 1));
    CHECK(pst_partition_bind(part.partition, part.ids[7], target, PST_FLOAT32, 1, 3) == PST_EINVAL);
    CHECK(text_has(state, "the ranks have agreed"));
    uint32_t lonely;
    CHECK_OK(pst_partition_add(part.partition, "lonely", 4, &lonely));
    CHECK_OK(pst_partition_begin_backward(part.partition, 1));
    CHECK_OK(pst_partition_reduce(part.partition, lonely, target, PST_FLOAT32, NULL));
    CHECK(pst_partition_end_backward(part.partition, 1) == PST_EINVAL);
    CHECK(text_has(state, "'lonely' has a gradient, but no rank has bound it"));
    close_part(&part);
}

static void wrong_bindings_are_named(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    const model model = {.deadline_ns = 10000000000u};
    run_ranks_on_device(2, &model, bind_wrongly, (void *)&variant);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_that_report_different_gradients_are_told),
        cmocka_unit_test(a_failure_lets_go_what_is_being_copied_only_behind_the_copy),
        cmocka_unit_test(elements_that_nobody_owns_are_named),
        cmocka_unit_test(wrong_bindings_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
