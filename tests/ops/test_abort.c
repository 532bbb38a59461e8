/* A rank that is stopped aborts its communicators: nobody waits for it in vain. No wait here has a
 * deadline of its own. */
#include "world.h"

#include "ops/comm/ce/ce.h"
#include "sched/lane.h"
#include "sched/watchdog.h"

/* A communicator over another one, which fails at its n-th start, or at a test of that collective.
 */
typedef struct failing_comm {
    pst_comm comm;
    pst_comm_ops ops;
    pst_comm *inner;
    int starts_left;   /* until the one that fails; atomic */
    int fails_in_test; /* that one seems to begin, and fails when it is asked */
} failing_comm;

static pst_status failing_start(pst_comm *comm, const pst_collective *collective,
                                pst_stream *stream, void **request) {
    failing_comm *self = comm->context;
    const int left = __atomic_fetch_sub(&self->starts_left, 1, __ATOMIC_ACQ_REL);
    if (left != 1) return self->inner->ops->start(self->inner, collective, stream, request);
    *request = self;
    return self->fails_in_test ? PST_PENDING : PST_EIO;
}

static pst_status failing_test(pst_comm *comm, void *request) {
    failing_comm *self = comm->context;
    return request == self ? PST_EIO : self->inner->ops->test(self->inner, request);
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
        run_ranks_on_device(2, &model, fail_on_rank_1, &in_test);
        run_ranks_on_device(4, &model, fail_on_rank_1, &in_test);
    }
}

/* Rank 0 is stopped from outside while the others wait for its part of a gather. */
static void stop_rank_0(rank_state *state) {
    DO(build_engine(state));
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
    run_ranks_on_device(4, &model, stop_rank_0, NULL);
    model.one_comm = 1;
    run_ranks_on_device(2, &model, stop_rank_0, NULL);
}

/* ---- the watchdog ---------------------------------------------------------------------------- */

#define NEVER_NS 3600000000000u /* the test looks itself, so that no clock decides */

/* Each lane's thread has come back since the last look: one that is off its core for nine looks in
 * a row would be reported in place of the task. */
static void let_threads_come_back(pst_runtime *runtime) {
    for (pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next) {
        while (!pst__lane_try_own(lane->leader))
            (void)sched_yield();
        pst__lane_disown(lane->leader, 0, NULL);
    }
}

/* Rank 1 stays away, rank 0's watchdog looks until it has seen enough, the others only wait. */
static void stay_away(rank_state *state) {
    DO(build_engine(state));
    if (state->rank == 1) {
        while (state->gather->ops->status(state->gather) == PST_OK)
            (void)sched_yield();
    } else if (state->rank == 0) {
        CHECK_OK(pst_zero_begin_forward(state->engine, 0));
        CHECK_OK(pst_zero_gather(state->engine, state->groups[0]));
        while (pst_runtime_status(state->runtime) == PST_OK) {
            pst__watchdog_look(state->runtime);
            let_threads_come_back(state->runtime);
        }
        CHECK(text_has(state, "watchdog: lane gather") && text_has(state, "g0 (ticket"));
    }
    CHECK(gather_all(state) == PST_ETIMEDOUT);
    CHECK(state->rank == 0 || text_has(state, "rank 0 aborted"));
    pst_zero_destroy(state->engine); /* nothing is in flight any more: the abort has ended it */
    state->engine = NULL;
}

static void a_watchdog_ends_the_waits_for_a_rank_that_stays_away(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.deadline_ns = 0;
    model.watchdog_ns = NEVER_NS;
    run_ranks_on_device(2, &model, stay_away, NULL);
    run_ranks_on_device(4, &model, stay_away, NULL);
}

/* ---- a rank that dies ------------------------------------------------------------------------ */

/* Rank 1 ends as a process does, without a word, while the others have a gather in flight and their
 * threads do something else. */
static void die_in_mid_training(rank_state *state) {
    pst_status status = PST_OK;
    build_engine(state);
    if (state->rank != 1) {
        status = pst_zero_begin_forward(state->engine, 0);
        if (status == PST_OK) status = pst_zero_gather(state->engine, state->groups[0]);
    }
    meet(&state->course->arrived, state->world);
    if (state->rank == 1) pst__link_close(&((pst__ce *)state->gather->context)->link);
    for (int i = 0; state->rank != 1 && i < 200000; i++) {
        if (pst_runtime_status(state->runtime) != PST_OK) break;
        if (state->model->pumped) (void)pst_run_once(state->runtime, NULL);
        async_sleep(50);
    }
    DO(meet(&state->course->left, state->world));
    CHECK(status == PST_OK);
    if (state->rank == 1) return;
    CHECK(pst_runtime_status(state->runtime) == PST_EPEER);
    CHECK(text_has(state, "the process of rank 1 has ended") ||
          text_has(state, "has failed: ")); /* the other one was first */
}

static void a_peer_that_dies_is_noticed_although_nobody_asks(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.device = ON_CE;
    model.device_segments = 1; /* peers may still read what a rank frees */
    model.deadline_ns = 0;
    for (model.pumped = 0; model.pumped < 2; model.pumped++)
        run_ranks_on_device(3, &model, die_in_mid_training, NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_communicator_that_fails_on_one_rank_ends_all),
        cmocka_unit_test(stopping_one_rank_ends_all),
        cmocka_unit_test(a_peer_that_dies_is_noticed_although_nobody_asks),
        cmocka_unit_test(a_watchdog_ends_the_waits_for_a_rank_that_stays_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
