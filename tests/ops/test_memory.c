/* No memory: at every allocation in turn; and none at all once a step is known. */
#include "world.h"

#include <penstock/partition.h>

typedef struct counting_heap {
    long allowed; /* allocations until one fails; negative: all succeed */
    long alive, total;
} counting_heap;

/* Workers allocate too, and so the counts are atomic. */
static void *count_alloc(void *context, size_t bytes, size_t alignment) {
    counting_heap *heap = context;
    long number = __atomic_add_fetch(&heap->total, 1, __ATOMIC_RELAXED);
    if (heap->allowed >= 0 && number > heap->allowed) return NULL;
    (void)__atomic_add_fetch(&heap->alive, 1, __ATOMIC_RELAXED);
    size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    return aligned_alloc(alignment, rounded);
}

static void count_free(void *context, void *memory, size_t bytes, size_t alignment) {
    (void)bytes, (void)alignment;
    (void)__atomic_sub_fetch(&((counting_heap *)context)->alive, 1, __ATOMIC_RELAXED);
    free(memory);
}

static pst_runtime_options options_with(counting_heap *heap) {
    return (pst_runtime_options){.size = sizeof(pst_runtime_options),
                                 .allocator = {count_alloc, count_free, heap},
                                 .task_capacity = 16,
                                 .deadline_ns = 10000000000u};
}

/* ---- failing --------------------------------------------------------------------------------- */

static pst_status build_up(rank_state *state) {
    const model *model = state->model;
    pst_status status = create_engine(state);
    for (size_t p = 0; status == PST_OK && p < model->parameter_count; p++)
        status = add_parameter(state, p, &model->shapes[p]);
    for (size_t g = 0; status == PST_OK && g < model->group_count; g++)
        status = add_group(state, g);
    if (status == PST_OK) status = pst_zero_seal(state->engine);
    return status;
}

static pst_status build_with(counting_heap *heap, const model *model, pst_local_world *meeting,
                             int channel) {
    rank_state state = {.world = 1, .model = model};
    pst_runtime_options options = options_with(heap);
    pst_status status = pst_runtime_create(&options, &state.runtime);
    if (status == PST_OK)
        status = pst_local_comm_create(meeting, state.runtime, 0, channel, &state.gather);
    if (status == PST_OK)
        status = pst_local_comm_create(meeting, state.runtime, 0, channel + 1, &state.reduce);
    if (status == PST_OK) status = build_up(&state);
    free_rank(&state);
    return status;
}

static void every_failing_allocation_is_reported_and_leaks_nothing(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.gather_dtype = PST_BFLOAT16;
    pst_runtime *runtime;
    pst_local_world *meeting;
    pst_status status = PST_ENOMEM;
    long allowed = 0;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    assert_int_equal(pst_local_world_create(runtime, 1, &meeting), PST_OK);
    for (; status != PST_OK; allowed++) {
        counting_heap heap = {.allowed = allowed};
        status = build_with(&heap, &model, meeting, 2 * (int)allowed);
        if (status != PST_OK) assert_int_equal(status, PST_ENOMEM);
        assert_int_equal(heap.alive, 0);
        assert_in_range(allowed, 0, 2000);
    }
    assert_true(allowed > 30); /* it really went through all of them */
    pst_local_world_destroy(meeting);
    pst_runtime_destroy(runtime);
}

static pst_status train_partition(pst_partition *partition, float *targets) {
    static const size_t sizes[] = {5, 100, 7};
    static const float gradient[100];
    uint32_t ids[3];
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < 3; i++) {
        status = pst_partition_add(partition, "p", sizes[i], &ids[i]);
        if (status == PST_OK)
            status = pst_partition_bind(partition, ids[i], targets, PST_FLOAT32, 0, sizes[i]);
        targets += sizes[i];
    }
    for (int step = 0; status == PST_OK && step < 4; step++) {
        status = pst_partition_begin_backward(partition, step % 2);
        for (size_t i = 0; status == PST_OK && i < 3; i++)
            status = pst_partition_reduce(partition, ids[i], gradient, PST_FLOAT32, NULL);
        if (status == PST_OK) status = pst_partition_end_backward(partition, step % 2);
    }
    return status;
}

static pst_status partition_with(counting_heap *heap, pst_local_world *meeting, int channel) {
    float targets[112];
    pst_comm *comm = NULL;
    pst_partition *partition = NULL;
    pst_runtime *runtime = NULL;
    const pst_runtime_options options = options_with(heap);
    pst_status status = pst_runtime_create(&options, &runtime);
    if (status == PST_OK) status = pst_local_comm_create(meeting, runtime, 0, channel, &comm);
    const pst_partition_options wanted = {.size = sizeof wanted,
                                          .name = "test",
                                          .comm = comm,
                                          .pumped = 1,
                                          .bucket_bytes = 256,
                                          .route = channel % 2 ? PST_PARTITION_ALL_REDUCE
                                                               : PST_PARTITION_REDUCE_SCATTER};
    if (status == PST_OK) status = pst_partition_create(runtime, &wanted, &partition);
    if (status == PST_OK) status = train_partition(partition, targets);
    pst_partition_destroy(partition);
    if (comm != NULL) comm->ops->destroy(comm);
    pst_runtime_destroy(runtime);
    return status;
}

static void partitions_report_every_failing_allocation_and_leak_nothing(void **unused) {
    (void)unused;
    pst_runtime *runtime;
    pst_local_world *meeting;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    assert_int_equal(pst_local_world_create(runtime, 1, &meeting), PST_OK);
    for (int route = 0; route < 2; route++) {
        pst_status status = PST_ENOMEM;
        long allowed = 0;
        for (; status != PST_OK; allowed++) {
            counting_heap heap = {.allowed = allowed};
            status = partition_with(&heap, meeting, 2 * (int)allowed + route);
            if (status != PST_OK) assert_int_equal(status, PST_ENOMEM);
            assert_int_equal(heap.alive, 0);
            assert_in_range(allowed, 0, 2000);
        }
        assert_true(allowed > 30);
    }
    pst_local_world_destroy(meeting);
    pst_runtime_destroy(runtime);
}

/* ---- steady state ---------------------------------------------------------------------------- */

/* Pumped, so that how much is in flight at once does not depend on time. */
static void count_in_steady_state(rank_state *state) {
    counting_heap *heap = state->argument;
    pst_runtime_options options = options_with(heap);
    state->gather->ops->destroy(state->gather);
    state->reduce->ops->destroy(state->reduce);
    state->gather = state->reduce = NULL;
    pst_runtime_destroy(state->runtime);
    CHECK_OK(pst_runtime_create(&options, &state->runtime));
    CHECK_OK(pst_local_comm_create(state->meeting, state->runtime, 0, 4, &state->gather));
    CHECK_OK(pst_local_comm_create(state->meeting, state->runtime, 0, 5, &state->reduce));
    DO(build_engine(state));
    for (int step = 0; step < 12; step++) {
        if (step == 6) heap->total = 0;
        DO(forward(state, 1));
        DO(backward(state, 1));
        DO(update(state));
    }
    CHECK(heap->total == 0);
}

static void a_known_step_allocates_nothing(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = chain_model(stage, 6, 16);
        model.bucket_bytes = 512;
        model.pumped = 1;
        counting_heap heap = {.allowed = -1};
        run_ranks_on_device(1, &model, count_in_steady_state, &heap);
        assert_int_equal(heap.alive, 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_failing_allocation_is_reported_and_leaks_nothing),
        cmocka_unit_test(partitions_report_every_failing_allocation_and_leak_nothing),
        cmocka_unit_test(a_known_step_allocates_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
