/* Flat shards on asynchronous devices: the host goes on without them, and what it asks of them. */
#include "flat_rank.h"
#include "slow_copies.h"

static void step(flat_rank *rank) {
    rank_state *state = rank->state;
    const size_t count = state->model->parameter_count;
    for (size_t p = 0; p < count; p++) {
        DO(flat_use(rank, p, PST_BFLOAT16));
    }
    CHECK_OK(pst_flat_begin_backward(rank->flat, 1));
    for (size_t p = count; p-- > 0;) {
        DO(flat_use(rank, p, PST_BFLOAT16));
        DO(flat_report(rank, p));
    }
    CHECK_OK(pst_flat_end_backward(rank->flat, 1));
    flat_step(rank);
}

/* ---- the host goes on ------------------------------------------------------------------------ */

static void train_while_nothing_moves(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    for (int i = 0; i < 3 && state->failure[0] == '\0'; i++)
        step(&rank);
    finish_compute(state);
    pause_device(state, 1);
    for (int i = 0; i < 2 && state->failure[0] == '\0'; i++)
        step(&rank);
    pause_device(state, 0);
    close_flat(&rank);
}

static void steps_do_not_wait_for_the_device(void **unused) {
    (void)unused;
    model model = chain_model(3, 8, 16);
    model.bucket_bytes = 1024; /* more reductions than buckets */
    model.prefetch_ahead = 1;
    model.part_bytes = 400;
    for (int one = 0; one <= 1; one++)
        for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
            model.one_comm = one;
            model.prefetch_bytes = 1500 * (size_t)one;
            run_ranks_async(worlds[i], &model, train_while_nothing_moves, NULL);
        }
}

/* ---- compute goes on ------------------------------------------------------------------------- */

static int compute_went_on; /* atomic */

static pst_status go_on_now(void *argument) {
    (void)argument;
    __atomic_store_n(&compute_went_on, 1, __ATOMIC_RELEASE);
    return PST_OK;
}

static int goes_on(void) {
    for (int i = 0; i < 40000 && !__atomic_load_n(&compute_went_on, __ATOMIC_ACQUIRE); i++)
        async_sleep(100);
    return __atomic_load_n(&compute_went_on, __ATOMIC_ACQUIRE);
}

/* The second rank reports nothing, so that the buckets of the first stay full, until that one's
 * compute is behind its reports. */
static void report_while_a_peer_waits(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    step(&rank); /* all memory is open to the peers then */
    CHECK_FINE();
    CHECK_OK(pst_flat_begin_backward(rank.flat, 1));
    if (state->rank == 1) CHECK(goes_on());
    for (size_t p = 0; p < state->model->parameter_count; p++) {
        DO(flat_report(&rank, p));
    }
    if (state->rank == 0) on_compute(state, go_on_now, &state->rank, sizeof state->rank);
    CHECK_OK(pst_flat_end_backward(rank.flat, 1));
    flat_step(&rank);
    close_flat(&rank);
}

static void compute_goes_on_while_a_large_gradient_goes_out(void **unused) {
    (void)unused;
    model model = empty_model(3);
    add_shape(&model, 128, 32, 1); /* 16 buckets */
    add_shape(&model, 8, 16, 1);
    add_shape(&model, 8, 16, 1);
    model.bucket_bytes = 1024;
    model.part_bytes = 400; /* of a batch */
    for (int device = ON_ONE_SIDED; device <= ON_CE; device++) {
        model.device = device;
        __atomic_store_n(&compute_went_on, 0, __ATOMIC_RELEASE);
        run_ranks_on_device(2, &model, report_while_a_peer_waits, NULL);
    }
}

/* ---- what a step costs ----------------------------------------------------------------------- */

/* Calls of the first rank's device. */
enum { COMPUTE_WAITS, COMPUTE_RECORDS, COMPUTE_CASTS, OTHERS, CALLS };
static size_t counted[CALLS]; /* atomic */
static pst_stream *compute_stream;

static void count(int call, const pst_stream *stream) {
    const int counter = stream == compute_stream ? call : OTHERS;
    (void)__atomic_add_fetch(&counted[counter], 1, __ATOMIC_RELAXED);
}

static void read_counts(size_t *counts) {
    for (int call = 0; call < CALLS; call++)
        counts[call] = __atomic_load_n(&counted[call], __ATOMIC_RELAXED);
}

static pst_status counted_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    count(COMPUTE_WAITS, stream);
    return async_stream_wait(device, stream, event);
}

static pst_status counted_record(pst_device *device, pst_event *event, pst_stream *stream) {
    count(COMPUTE_RECORDS, stream);
    return async_event_record(device, event, stream);
}

static pst_status counted_cast(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                               size_t piece_count, double scale) {
    count(COMPUTE_CASTS, stream);
    return async_cast_scale_copy(device, stream, pieces, piece_count, scale);
}

static void count_calls(rank_state *state) {
    if (state->rank != 0) return;
    compute_stream = pst_lane_stream(state->compute);
    state->async->ops.stream_wait = counted_wait;
    state->async->ops.event_record = counted_record;
    state->async->ops.cast_scale_copy = counted_cast;
}

/* Of the fifth step. */
static void count_body(rank_state *state) {
    flat_rank rank;
    pst_flat_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    size_t first[CALLS], last[CALLS];
    count_calls(state);
    open_flat(&rank, state);
    for (int i = 0; i < 4 && state->failure[0] == '\0'; i++)
        step(&rank);
    pst_flat_get_stats(rank.flat, &before);
    read_counts(first);
    if (state->failure[0] == '\0') step(&rank);
    read_counts(last);
    pst_flat_get_stats(rank.flat, &after);
    DO(close_flat(&rank));
    const size_t uses = 2 * state->model->parameter_count;
    const size_t gathers = after.gathers - before.gathers, reduces = after.reduces - before.reduces;
    const size_t batches = reduces * 4; /* of a quarter of a bucket */
    CHECK(gathers * 8 <= uses && reduces == 7);
    if (state->rank != 0) return;
    CHECK(last[COMPUTE_WAITS] - first[COMPUTE_WAITS] <= gathers + reduces + batches + 4);
    CHECK(last[COMPUTE_RECORDS] - first[COMPUTE_RECORDS] <= uses + gathers + reduces + batches);
    CHECK(last[COMPUTE_CASTS] - first[COMPUTE_CASTS] <= 1); /* the shards' */
}

static void a_step_asks_little_of_the_device(void **unused) {
    (void)unused;
    model model = empty_model(3);
    for (int layer = 0; layer < 7; layer++)
        for (int i = 0; i < 9; i++)
            add_shape(&model, i < 7 ? 8 : 1, 32, 1);
    model.bucket_bytes = 9 * 1024;
    model.part_bytes = 2048; /* of a batch */
    model.prefetch_ahead = 2;
    model.prefetch_bytes = 8192;
    run_ranks_on_boards(2, &model, count_body, NULL);
}

/* ---- failures -------------------------------------------------------------------------------- */

/* A call of the device fails somewhere, once. The training ends on all ranks or goes on on all of
 * them, nothing hangs, and nobody writes any more when a rank has destroyed its shards. */
static void fail_in_a_call(rank_state *state) {
    const model *model = state->model;
    flat_rank rank;
    DO(open_flat(&rank, state));
    meet(&state->course->arrived, state->world);
    if (state->rank == 0)
        __atomic_store_n(&state->course->fault_in, *(const uint64_t *)state->argument,
                         __ATOMIC_RELEASE);
    for (int i = 0; i < 40 && state->failure[0] == '\0'; i++)
        step(&rank);
    if (state->failure[0] == '\0') (void)drain_compute(state); /* the host is far ahead of it */
    const int has_failed =
        state->failure[0] != '\0' || pst_flat_begin_backward(rank.flat, 1) != PST_OK;
    state->failure[0] = '\0';
    pst_flat_destroy(rank.flat);
    rank.flat = NULL;
    for (size_t p = 0; p < model->parameter_count; p++)
        memset(rank.targets[p], 0x5a, rank.chunks[p] * sizeof(float));
    (void)__atomic_add_fetch(&state->course->ended, has_failed, __ATOMIC_ACQ_REL);
    meet(&state->course->left, state->world);
    const int ended = __atomic_load_n(&state->course->ended, __ATOMIC_ACQUIRE);
    (void)drain_compute(state);
    for (size_t p = 0; p < model->parameter_count; p++)
        for (size_t i = 0; i < rank.chunks[p] * sizeof(float); i++)
            CHECK(((const char *)rank.targets[p])[i] == 0x5a);
    close_flat(&rank);
    CHECK(ended == (has_failed ? state->world : 0));
}

static void a_call_of_the_device_that_fails_ends_all_ranks_or_none(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.bucket_bytes = 512;
    model.part_bytes = 300;
    model.prefetch_bytes = 1500;
    run_ranks_with_faults(&model, fail_in_a_call);
}

static void fail_between_buckets(rank_state *state) {
    flat_rank rank;
    watch_copies(state);
    open_flat(&rank, state);
    CHECK_OK(pst_flat_begin_backward(rank.flat, 1));
    refuse_behind_copies();
    flat_report(&rank, 0);
    CHECK(state->failure[0] != '\0');
    state->failure[0] = '\0';
    CHECK(pst_flat_begin_backward(rank.flat, 1) != PST_OK); /* lets the gradient go */
    check_copied(state);
    pst_flat_destroy(rank.flat);
    rank.flat = NULL;
    finish_compute(state);
    close_flat(&rank);
}

static void a_failure_lets_go_what_is_being_copied_only_behind_the_copy(void **unused) {
    (void)unused;
    model model = empty_model(3);
    add_shape(&model, 128, 32, 1); /* 16 buckets */
    model.bucket_bytes = 1024;
    run_ranks_on_boards(1, &model, fail_between_buckets, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_do_not_wait_for_the_device),
        cmocka_unit_test(compute_goes_on_while_a_large_gradient_goes_out),
        cmocka_unit_test(a_step_asks_little_of_the_device),
        cmocka_unit_test(a_call_of_the_device_that_fails_ends_all_ranks_or_none),
        cmocka_unit_test(a_failure_lets_go_what_is_being_copied_only_behind_the_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
