/* What goes wrong between ranks ends in an error that names it, on all of them, in time. */
#include "world.h"

#define SHORT_DEADLINE_NS 2000000000u /* sealing has to be through by then */

/* ---- at seal --------------------------------------------------------------------------------- */

static void seal_with_other_shapes(rank_state *state) {
    model own = *state->model;
    own.shapes[1].rows = state->rank == 1 ? 12 : 10;
    state->model = &own;
    CHECK_OK(create_engine(state));
    for (size_t p = 0; p < own.parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &own.shapes[p]));
    for (size_t g = 0; g < own.group_count; g++)
        CHECK_OK(add_group(state, g));
    CHECK(pst_zero_seal(state->engine) == PST_EMISMATCH);
    CHECK(text_has(state, "parameter 'p1': rank 0 has 10x5 float32 trainable, rank 1 has 12x5 "
                          "float32 trainable"));
    CHECK(pst_zero_begin_forward(state->engine, 0) == PST_ESTATE);
}

static void seal_names_the_parameter_that_differs(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(2, &model, seal_with_other_shapes, NULL);
    run_ranks_on_device(4, &model, seal_with_other_shapes, NULL);
}

static void seal_with_another_group(rank_state *state) {
    model own = *state->model;
    if (state->rank == 1) own.gather_dtype = PST_BFLOAT16;
    state->model = &own;
    CHECK_OK(create_engine(state));
    CHECK_OK(add_parameter(state, 0, &own.shapes[0]));
    CHECK_OK(add_parameter(state, 1, &own.shapes[1]));
    CHECK_OK(add_group(state, 0));
    CHECK(pst_zero_seal(state->engine) == PST_EMISMATCH);
    CHECK(text_has(state, "group 'g0': rank 0 has 2 parameters"));
    CHECK(text_has(state, "gathered as bfloat16"));
}

static void seal_names_the_group_that_differs(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(2, &model, seal_with_another_group, NULL);
}

static void seal_with_one_more(rank_state *state) {
    CHECK_OK(create_engine(state));
    CHECK_OK(add_parameter(state, 0, &state->model->shapes[0]));
    if (state->rank == 1) CHECK_OK(add_parameter(state, 1, &state->model->shapes[1]));
    CHECK(pst_zero_seal(state->engine) == PST_EMISMATCH);
    CHECK(text_has(state, "nothing more"));
    CHECK(text_has(state, "parameter 'p1'"));
}

static void seal_notices_a_parameter_that_a_rank_lacks(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(2, &model, seal_with_one_more, NULL);
}

/* ---- in a pass ------------------------------------------------------------------------------- */

static int is_trouble(pst_status status) {
    return status == PST_EMISMATCH || status == PST_EPEER || status == PST_ETIMEDOUT;
}

static void gather_in_another_order(rank_state *state) {
    DO(build_engine(state));
    size_t first = (size_t)state->rank;
    void *memory;
    CHECK_OK(pst_zero_begin_forward(state->engine, 0));
    CHECK_OK(pst_zero_gather(state->engine, state->groups[first]));
    CHECK(pst_zero_wait(state->engine, state->groups[first], &memory) == PST_EMISMATCH);
    CHECK(text_has(state, "rank 0: all_gather 'g0'"));
    CHECK(text_has(state, "rank 1: all_gather 'g1'"));
    CHECK(pst_zero_gather(state->engine, state->groups[0]) == PST_EMISMATCH); /* for good */
    CHECK(pst_zero_end_forward(state->engine) == PST_EMISMATCH);
}

static void another_order_of_collectives_is_named(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(2, &model, gather_in_another_order, NULL);
    model.one_comm = 1;
    run_ranks_on_device(2, &model, gather_in_another_order, NULL);
}

static void leave_in_mid_step(rank_state *state) {
    DO(build_engine(state));
    DO(forward(state, 1));
    if (state->rank == 1) return; /* its engine and communicators are destroyed */
    make_gradients(state, 1);
    pst_status status = pst_zero_begin_backward(state->engine, 1);
    for (size_t g = state->model->group_count; g-- > 0 && status == PST_OK;) {
        void *memory;
        status = pst_zero_gather(state->engine, state->groups[g]);
        if (status == PST_OK) status = pst_zero_wait(state->engine, state->groups[g], &memory);
        if (status != PST_OK) break;
        report(state, g);
        status = pst_zero_release(state->engine, state->groups[g]);
    }
    if (status == PST_OK) status = pst_zero_end_backward(state->engine);
    CHECK(is_trouble(status));
    state->failure[0] = '\0'; /* `report` may have been the one to notice */
    CHECK(pst_zero_begin_forward(state->engine, 1) == pst_runtime_status(state->runtime));
}

static void a_rank_that_leaves_ends_the_others(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        run_ranks_on_device(2, &model, leave_in_mid_step, NULL);
        run_ranks_on_device(4, &model, leave_in_mid_step, NULL);
    }
}

typedef struct latch {
    int arrived;
} latch;

/* Rank 1 stays, but takes no part: it goes when the others have given up. */
static void stay_silent(rank_state *state) {
    latch *gone = state->argument;
    DO(build_engine(state));
    if (state->rank == 1) {
        while (__atomic_load_n(&gone->arrived, __ATOMIC_ACQUIRE) < state->world - 1)
            (void)sched_yield();
        return;
    }
    void *memory;
    pst_status status = pst_zero_begin_forward(state->engine, 0);
    if (status == PST_OK) status = pst_zero_gather(state->engine, state->groups[0]);
    if (status == PST_OK) status = pst_zero_wait(state->engine, state->groups[0], &memory);
    (void)__atomic_fetch_add(&gone->arrived, 1, __ATOMIC_RELEASE);
    CHECK(status == PST_ETIMEDOUT || status == PST_ECANCELED);
    CHECK(text_has(state, "g0"));
}

static void a_rank_that_takes_no_part_runs_into_the_deadline(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.deadline_ns = SHORT_DEADLINE_NS;
    latch gone = {0};
    run_ranks_on_device(2, &model, stay_silent, &gone);
}

/* Rank 0 is destroyed with a gather in flight that rank 1 never starts. */
static void gather_on_one_rank(rank_state *state) {
    DO(build_engine(state));
    if (state->rank != 0) return;
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    CHECK_OK(pst_zero_gather(state->engine, state->groups[0]));
}

static void destroying_in_mid_flight_does_not_hang(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.deadline_ns = SHORT_DEADLINE_NS;
    run_ranks_on_device(2, &model, gather_on_one_rank, NULL);
}

/* A communicator that stops answering, or fails, and still writes: what a network can do. */
typedef struct deaf_comm {
    pst_comm comm;
    pst_comm_ops ops;
    pst_comm *inner;
    pst_status answer; /* atomic: PST_OK: that of the inner one */
    int busy;          /* atomic: aborts that come too early; below zero: all */
    void *segments[8];
    size_t segment_count, freed;
} deaf_comm;

static pst_status answer_of(const deaf_comm *deaf) {
    return __atomic_load_n(&deaf->answer, __ATOMIC_ACQUIRE);
}

static pst_status deaf_start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                             void **request) {
    deaf_comm *deaf = comm->context;
    if (answer_of(deaf) != PST_OK) return PST_PENDING;
    return deaf->inner->ops->start(deaf->inner, collective, stream, request);
}

static pst_status deaf_test(pst_comm *comm, void *request) {
    deaf_comm *deaf = comm->context;
    if (answer_of(deaf) != PST_OK) return answer_of(deaf);
    return deaf->inner->ops->test(deaf->inner, request);
}

static size_t deaf_staging(pst_comm *comm, const pst_collective *collective) {
    deaf_comm *deaf = comm->context;
    return deaf->inner->ops->staging_bytes(deaf->inner, collective);
}

static pst_status deaf_abort(pst_comm *comm, pst_status status) {
    deaf_comm *deaf = comm->context;
    (void)status;
    const int busy = __atomic_load_n(&deaf->busy, __ATOMIC_RELAXED);
    if (busy > 0) __atomic_store_n(&deaf->busy, busy - 1, __ATOMIC_RELAXED);
    return busy == 0 ? PST_OK : PST_EBUSY;
}

static const char *deaf_text(pst_comm *comm) {
    (void)comm;
    return "deaf";
}

static pst_status take_segment(void *context, size_t bytes, void **memory) {
    deaf_comm *deaf = context;
    *memory = aligned_alloc(PST_ARENA_ALIGNMENT, bytes);
    deaf->segments[deaf->segment_count++] = *memory;
    return *memory == NULL ? PST_ENOMEM : PST_OK;
}

static void give_segment(void *context, void *memory, size_t bytes) {
    (void)bytes;
    ((deaf_comm *)context)->freed++;
    free(memory);
}

/* The engines that are not freed: kept in sight of the leak checker. */
static pst_zero *volatile left_alive[2][2];

/* What it answers from some point on, how many aborts come too early, and the wait's status. */
typedef struct deafness {
    pst_status answer;
    int busy;
    pst_status waited;
} deafness;

static void go_deaf(rank_state *state) {
    const deafness *given = state->argument;
    deaf_comm deaf = {.inner = state->gather, .busy = given->busy};
    deaf.ops = (pst_comm_ops){.api_version = PST_COMM_API_VERSION,
                              .staging_bytes = deaf_staging,
                              .start = deaf_start,
                              .test = deaf_test,
                              .abort = deaf_abort,
                              .error_text = deaf_text};
    deaf.comm = (pst_comm){&deaf.ops, &deaf, state->rank, state->world};
    pst_zero_options options = {.size = sizeof options,
                                .stage = 3,
                                .gather_comm = &deaf.comm,
                                .reduce_comm = state->reduce,
                                .segment_alloc = take_segment,
                                .segment_free = give_segment,
                                .segment_context = &deaf};
    CHECK_OK(pst_zero_create(state->runtime, &options, &state->engine));
    for (size_t p = 0; p < state->model->parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &state->model->shapes[p]));
    for (size_t g = 0; g < state->model->group_count; g++)
        CHECK_OK(add_group(state, g));
    CHECK_OK(pst_zero_seal(state->engine));
    DO(bind_all(state));
    __atomic_store_n(&deaf.answer, given->answer, __ATOMIC_RELEASE);
    void *memory;
    CHECK_OK(pst_zero_begin_forward(state->engine, 0));
    CHECK_OK(pst_zero_gather(state->engine, state->groups[0]));
    CHECK(pst_zero_wait(state->engine, state->groups[0], &memory) == given->waited);
    if (given->busy < 0) left_alive[given->answer != PST_PENDING][state->rank] = state->engine;
    pst_zero_destroy(state->engine);
    state->engine = NULL;
    size_t freed = deaf.freed;
    state->gather->ops->destroy(state->gather);
    state->reduce->ops->destroy(state->reduce);
    pst_runtime_destroy(state->runtime);
    state->runtime = NULL;
    state->gather = state->reduce = NULL;
    CHECK(deaf.segment_count > 0 && freed == (given->busy < 0 ? 0 : deaf.segment_count));
    for (size_t i = freed; i < deaf.segment_count; i++)
        free(deaf.segments[i]);
}

static void run_deaf(const deafness *given) {
    model model = odd_model(3);
    model.deadline_ns = SHORT_DEADLINE_NS;
    run_ranks_on_device(2, &model, go_deaf, (void *)(uintptr_t)given);
}

static void memory_that_a_communicator_may_still_write_is_not_freed(void **unused) {
    (void)unused;
    const deafness silent = {PST_PENDING, -1, PST_ETIMEDOUT}, failed = {PST_EPEER, -1, PST_EPEER};
    run_deaf(&silent);
    run_deaf(&failed);
}

static void memory_of_a_failed_collective_is_freed_when_an_abort_says_so(void **unused) {
    (void)unused;
    const deafness failed = {PST_EPEER, 5, PST_EPEER};
    run_deaf(&failed);
}

/* ---- misuse ---------------------------------------------------------------------------------- */

static void misuse(rank_state *state) {
    DO(build_engine(state));
    pst_zero *engine = state->engine;
    const void *sources[2] = {NULL, NULL};
    CHECK(pst_zero_end_forward(engine) == PST_ESTATE);
    CHECK(pst_zero_end_backward(engine) == PST_ESTATE);
    CHECK_OK(pst_zero_begin_forward(engine, 1));
    CHECK(pst_zero_begin_backward(engine, 1) == PST_ESTATE);
    CHECK_OK(pst_zero_end_forward(engine));
    CHECK(pst_zero_gradients(engine, 0, sources, PST_FLOAT32) == PST_ESTATE);
    CHECK_OK(pst_zero_begin_backward(engine, 1));
    CHECK(pst_zero_begin_backward(engine, 1) == PST_ESTATE);
    CHECK(text_has(state, "begin_backward in a backward"));
    CHECK(pst_zero_gradients(engine, 0, sources, PST_FLOAT32) == PST_ESTATE); /* never used */
    CHECK(text_has(state, "was not used in a forward"));
    CHECK(pst_zero_gradients(engine, 99, sources, PST_FLOAT32) == PST_EINVAL);
    CHECK(pst_zero_gradients(engine, 0, NULL, PST_FLOAT32) == PST_EINVAL);
    CHECK_OK(pst_zero_end_backward(engine));
    pst_parameter_options parameter = {.size = sizeof parameter, .name = "late", .rows = 1};
    uint32_t index;
    CHECK(pst_zero_add_parameter(engine, &parameter, &index) == PST_ESTATE);
}

static void calls_out_of_order_are_refused(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(1, &model, misuse, NULL);
}

static void bad_registry(rank_state *state) {
    CHECK_OK(create_engine(state));
    CHECK_OK(add_parameter(state, 0, &state->model->shapes[0]));
    uint32_t parameters[2] = {0, 0}, index;
    pst_group_options group = {.size = sizeof group, .name = "g", .parameters = parameters};
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EINVAL);
    group.parameter_count = 2;
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EINVAL);
    CHECK(text_has(state, "parameter 'p0' is in it twice"));
    parameters[1] = 5;
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EINVAL);
    group.parameter_count = 1;
    CHECK_OK(pst_zero_add_group(state->engine, &group, &index));
    group.name = "again";
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EINVAL);
    CHECK(text_has(state, "'p0' is gathered as float32 by group 'g'"));
    group.gather_dtype = PST_BFLOAT16; /* a state for each gather dtype */
    CHECK_OK(pst_zero_add_group(state->engine, &group, &index));
    group.gather_dtype = PST_DTYPE_COUNT;
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EINVAL);
    group.dtype = PST_FLOAT8_E4M3;
    group.gather_dtype = PST_FLOAT16;
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EUNSUPPORTED);
    CHECK(text_has(state, "'again': shards of float8_e4m3 cannot be converted to float16"));
    group.gather_dtype = PST_FLOAT8_E4M3;
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EUNSUPPORTED);
    CHECK(text_has(state, "gradients of float8_e4m3 shards cannot be summed in float32"));
    group.dtype = PST_FLOAT32;
    pst_parameter_options huge = {
        .size = sizeof huge, .name = "huge", .rows = SIZE_MAX / 2, .row_elements = 8};
    CHECK_OK(pst_zero_add_parameter(state->engine, &huge, &parameters[0]));
    group.gather_dtype = PST_FLOAT32;
    CHECK(pst_zero_add_group(state->engine, &group, &index) == PST_EINVAL);
}

static void bad_parameters_and_groups_are_named(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(1, &model, bad_registry, NULL);
}

static void add_too_much(rank_state *state) {
    const pst_flat_options flat_options = {
        .size = sizeof flat_options, .gather_comm = state->gather, .reduce_comm = state->reduce};
    const pst_partition_options partition_options = {.size = sizeof partition_options,
                                                     .comm = state->gather};
    const size_t much[] = {SIZE_MAX, SIZE_MAX - 511, SIZE_MAX / 2, SIZE_MAX / 8};
    pst_flat *flat;
    pst_partition *partition;
    uint32_t index;
    CHECK_OK(pst_flat_create(state->runtime, &flat_options, &flat));
    CHECK_OK(pst_partition_create(state->runtime, &partition_options, &partition));
    for (size_t i = 0; i < sizeof much / sizeof *much; i++) {
        CHECK(pst_flat_add(flat, "huge", much[i], &index) == PST_EINVAL);
        CHECK(text_has(state, "parameter 'huge'"));
        CHECK(pst_partition_add(partition, "huge", much[i], &index) == PST_EINVAL);
    }
    pst_partition_destroy(partition);
    pst_flat_destroy(flat);
}

static void more_elements_than_can_be_counted_in_bytes_are_refused(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(1, &model, add_too_much, NULL);
}

static pst_status no_target(void *context, uint32_t group, void **memory, int *accumulate) {
    (void)context, (void)group, (void)memory, (void)accumulate;
    return PST_ENOMEM;
}

static void refuse_target(rank_state *state) {
    pst_zero_options options = {.size = sizeof options,
                                .stage = 3,
                                .gather_comm = state->gather,
                                .reduce_comm = state->reduce,
                                .gradient_target = no_target};
    CHECK_OK(pst_zero_create(state->runtime, &options, &state->engine));
    for (size_t p = 0; p < state->model->parameter_count; p++)
        CHECK_OK(add_parameter(state, p, &state->model->shapes[p]));
    for (size_t g = 0; g < state->model->group_count; g++)
        CHECK_OK(add_group(state, g));
    CHECK_OK(pst_zero_seal(state->engine));
    DO(bind_all(state));
    DO(forward(state, 1));
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    CHECK(pst_zero_end_backward(state->engine) == PST_ENOMEM);
    CHECK(text_has(state, "group 'g2': gradient_target gave no memory"));
}

static void a_target_that_cannot_be_had_ends_the_training(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(1, &model, refuse_target, NULL);
}

static void bad_options(rank_state *state) {
    pst_zero_options options = {.size = sizeof options,
                                .stage = 4,
                                .gather_comm = state->gather,
                                .reduce_comm = state->reduce};
    CHECK(pst_zero_create(state->runtime, &options, &state->engine) == PST_EINVAL);
    CHECK(text_has(state, "stage 4"));
    CHECK(state->engine == NULL);
    options.stage = 3;
    options.reduce_comm = NULL;
    CHECK(pst_zero_create(state->runtime, &options, &state->engine) == PST_EINVAL);
    options.size = 0;
    CHECK(pst_zero_create(state->runtime, &options, &state->engine) == PST_EINVAL);
    CHECK(pst_zero_create(state->runtime, NULL, &state->engine) == PST_EINVAL);
}

static void bad_options_are_refused(void **unused) {
    (void)unused;
    model model = odd_model(3);
    run_ranks_on_device(1, &model, bad_options, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(seal_names_the_parameter_that_differs),
        cmocka_unit_test(seal_names_the_group_that_differs),
        cmocka_unit_test(seal_notices_a_parameter_that_a_rank_lacks),
        cmocka_unit_test(another_order_of_collectives_is_named),
        cmocka_unit_test(a_rank_that_leaves_ends_the_others),
        cmocka_unit_test(a_rank_that_takes_no_part_runs_into_the_deadline),
        cmocka_unit_test(destroying_in_mid_flight_does_not_hang),
        cmocka_unit_test(memory_that_a_communicator_may_still_write_is_not_freed),
        cmocka_unit_test(memory_of_a_failed_collective_is_freed_when_an_abort_says_so),
        cmocka_unit_test(calls_out_of_order_are_refused),
        cmocka_unit_test(bad_parameters_and_groups_are_named),
        cmocka_unit_test(more_elements_than_can_be_counted_in_bytes_are_refused),
        cmocka_unit_test(a_target_that_cannot_be_had_ends_the_training),
        cmocka_unit_test(bad_options_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
