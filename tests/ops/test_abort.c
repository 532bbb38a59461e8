/* A rank that is stopped aborts its communicators: nobody waits for it in vain. No wait here has a
 * deadline of its own. */
#include "world.h"

static int text_has(const rank_state *state, const char *part) {
    char text[1024];
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    return strstr(text, part) != NULL;
}

/* A communicator over another one, which fails at its n-th start, or at a test of that collective.
 */
typedef struct failing_comm {
    pst_comm comm;
    pst_comm_ops ops;
    pst_comm *inner;
    int starts_left;   /* until the one that fails; atomic */
    int fails_in_test; /* that one begins, and fails when it is asked */
    void *doomed;      /* its request; the lane's owner alone uses it */
} failing_comm;

static pst_status failing_start(pst_comm *comm, const pst_collective *collective,
                                pst_stream *stream, void **request) {
    failing_comm *self = comm->context;
    const int left = __atomic_fetch_sub(&self->starts_left, 1, __ATOMIC_ACQ_REL);
    if (left == 1 && !self->fails_in_test) return PST_EIO;
    pst_status status = self->inner->ops->start(self->inner, collective, stream, request);
    if (left == 1 && status == PST_PENDING) self->doomed = *request;
    return status;
}

/* The collective below is left alone: the communicator's end takes it along. */
static pst_status failing_test(pst_comm *comm, void *request) {
    failing_comm *self = comm->context;
    if (request == self->doomed) return PST_EIO;
    return self->inner->ops->test(self->inner, request);
}

static size_t failing_staging(pst_comm *comm, const pst_collective *collective) {
    failing_comm *self = comm->context;
    return self->inner->ops->staging_bytes(self->inner, collective);
}

static pst_status failing_abort(pst_comm *comm, pst_status status) {
    failing_comm *self = comm->context;
    return self->inner->ops->abort(self->inner, status);
}

static const char *failing_text(pst_comm *comm) {
    (void)comm;
    return "the wire was cut";
}

static void wrap(failing_comm *self, pst_comm *inner, int fails_in_test) {
    *self = (failing_comm){.inner = inner, .fails_in_test = fails_in_test};
    self->ops = *inner->ops;
    self->ops.start = failing_start;
    self->ops.test = failing_test;
    self->ops.staging_bytes = failing_staging;
    self->ops.abort = failing_abort;
    self->ops.error_text = failing_text;
    self->comm = (pst_comm){&self->ops, self, inner->rank, inner->size};
}

/* Gathers one group after the other until something ends it; how it ended. */
static pst_status gather_all(rank_state *state) {
    pst_status status = pst_zero_begin_forward(state->engine, 0);
    for (size_t g = 0; status == PST_OK && g < state->model->group_count; g++) {
        void *memory;
        status = pst_zero_gather(state->engine, state->groups[g]);
        if (status == PST_OK) status = pst_zero_wait(state->engine, state->groups[g], &memory);
        if (status == PST_OK) status = pst_zero_release(state->engine, state->groups[g]);
    }
    return status;
}

/* The second gather of rank 1 fails there. */
static void fail_on_rank_1(rank_state *state) {
    const int in_test = *(const int *)state->argument;
    pst_comm *inner = state->gather;
    failing_comm failing;
    wrap(&failing, inner, in_test);
    if (state->rank == 1) state->gather = &failing.comm;
    build_engine(state);
    state->gather = inner;
    CHECK_FINE();
    __atomic_store_n(&failing.starts_left, 2, __ATOMIC_RELEASE);
    CHECK(gather_all(state) == PST_EIO);
    CHECK(pst_runtime_status(state->runtime) == PST_EIO);
    if (state->rank == 1)
        CHECK(text_has(state, "rank 1, engine 'test': all_gather of 'g1'") &&
              text_has(state, "the wire was cut"));
    else
        CHECK(text_has(state, "rank 1 aborted"));
    CHECK(gather_all(state) == PST_EIO); /* for good */
    pst_zero_destroy(state->engine);     /* `failing` ends with this function */
    state->engine = NULL;
}

static void a_communicator_that_fails_on_one_rank_ends_all(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.deadline_ns = 0;
    for (int in_test = 0; in_test < 2; in_test++) {
        run_ranks(2, &model, fail_on_rank_1, &in_test);
        run_ranks(4, &model, fail_on_rank_1, &in_test);
    }
}

/* Rank 0 is stopped from outside while the others wait for its part of a gather. */
static void stop_rank_0(rank_state *state) {
    build_engine(state);
    CHECK_FINE();
    if (state->rank == 0) {
        pst_runtime_poison(state->runtime, PST_ECANCELED, "the user has pressed a key");
        CHECK(gather_all(state) == PST_ECANCELED);
        return;
    }
    CHECK(gather_all(state) == PST_ECANCELED);
    CHECK(text_has(state, "rank 0 aborted"));
}

static void stopping_one_rank_ends_all(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.deadline_ns = 0;
    run_ranks(4, &model, stop_rank_0, NULL);
    model.one_comm = 1;
    run_ranks(2, &model, stop_rank_0, NULL);
}

/* ---- the watchdog ---------------------------------------------------------------------------- */

#define WATCHDOG_NS 50000000u

/* Rank 1 stays away until the watchdogs of the others have ended their waits. */
static void stay_away(rank_state *state) {
    int *given_up = state->argument;
    build_engine(state);
    CHECK_FINE();
    if (state->rank == 1) {
        while (__atomic_load_n(given_up, __ATOMIC_ACQUIRE) < state->world - 1)
            (void)sched_yield();
        CHECK(gather_all(state) == PST_ETIMEDOUT);
        CHECK(text_has(state, "aborted"));
        return;
    }
    CHECK(gather_all(state) == PST_ETIMEDOUT);
    (void)__atomic_fetch_add(given_up, 1, __ATOMIC_RELEASE);
    CHECK(pst_runtime_status(state->runtime) == PST_ETIMEDOUT);
    pst_zero_destroy(state->engine); /* nothing is in flight any more: the abort has ended it */
    state->engine = NULL;
}

static void a_watchdog_ends_the_waits_for_a_rank_that_stays_away(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.deadline_ns = 0;
    model.watchdog_ns = WATCHDOG_NS;
    for (int world = 2; world <= 4; world += 2) {
        int given_up = 0;
        run_ranks(world, &model, stay_away, &given_up);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_communicator_that_fails_on_one_rank_ends_all),
        cmocka_unit_test(stopping_one_rank_ends_all),
        cmocka_unit_test(a_watchdog_ends_the_waits_for_a_rank_that_stays_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
