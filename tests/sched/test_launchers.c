/* Several threads and callbacks that launch; what may be done as soon as an end is seen. */
#include "tests/sched/harness.h"

#include <pthread.h>

#ifdef __SANITIZE_THREAD__
#define ROUNDS 400 /* each takes tens of times as long */
#else
#define ROUNDS 2000
#endif

static pst_status do_nothing(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    return PST_OK;
}

static pst_task add(pst_graph *graph, pst_lane *lane, const char *name, const pst_task *after) {
    const pst_task_options options = {.size = sizeof options,
                                      .name = name,
                                      .lane = lane,
                                      .work = {.start = do_nothing},
                                      .after = after,
                                      .after_count = after != NULL};
    pst_task task;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

/* ---- two threads over the same lanes ------------------------------------------------------ */

typedef struct launcher {
    pst_graph *graph;
    int rounds;
    pst_status status;
} launcher;

static pst_graph *build_crossing(pst_runtime *runtime, const char *name, pst_lane *first,
                                 pst_lane *second) {
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, name);
    const pst_task a = add(graph, first, "first", NULL);
    (void)add(graph, second, "second", &a);
    assert_ok(pst_graph_seal(graph));
    return graph;
}

static void *launch_and_wait(void *argument) {
    launcher *self = argument;
    for (int i = 0; i < self->rounds && self->status == PST_OK; i++) {
        pst_launch launch;
        self->status = pst_graph_launch(self->graph, &launch);
        if (self->status == PST_OK) self->status = pst_launch_wait(launch);
    }
    return NULL;
}

/* Each graph's tasks stand on both lanes, the other way round: pushed one by one, the launches of
 * two threads could each stand first on one lane, and wait for each other for ever. */
static void launches_of_two_threads_keep_one_order_on_all_lanes(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(2000);
    pst_lane *left = open_lane_in_order(runtime, "left", PST_LANE_WORKER);
    pst_lane *right = open_lane_in_order(runtime, "right", PST_LANE_WORKER);
    launcher one = {build_crossing(runtime, "one", left, right), 20000, PST_OK};
    launcher other = {build_crossing(runtime, "other", right, left), 20000, PST_OK};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, launch_and_wait, &other), 0);
    (void)launch_and_wait(&one);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(one.status);
    assert_ok(other.status);
    assert_ok(pst_runtime_destroy(runtime));
}

/* ---- what is stopped holds nobody up ------------------------------------------------------ */

static pst_graph *build_gated(pst_runtime *runtime, pst_lane *lane, pst_task *gate) {
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "gated");
    assert_ok(pst_graph_add_gate(graph, "gate", gate));
    (void)add(graph, lane, "behind the gate", gate);
    assert_ok(pst_graph_seal(graph));
    return graph;
}

static void note_status(void *argument, pst_status status) {
    __atomic_store_n((pst_status *)argument, status, __ATOMIC_RELEASE);
}

/* A task of the growing graph, on another lane, that keeps it canceled. */
typedef struct lasting {
    int started, released;
} lasting;

static pst_status begin(void *argument, pst_stream *stream) {
    (void)stream;
    __atomic_store_n(&((lasting *)argument)->started, 1, __ATOMIC_RELEASE);
    return PST_PENDING;
}

static pst_status is_released(void *argument) {
    const lasting *self = argument;
    return __atomic_load_n(&self->released, __ATOMIC_ACQUIRE) ? PST_OK : PST_PENDING;
}

/* It has started when this returns: not launched yet, it would be canceled with the rest. */
static void add_lasting(pst_runtime *runtime, pst_graph *graph, pst_lane *lane, lasting *self) {
    const pst_task_options options = {
        .size = sizeof options, .lane = lane, .work = {begin, is_released, self}};
    assert_ok(pst_graph_add(graph, &options, NULL));
    while (!__atomic_load_n(&self->started, __ATOMIC_ACQUIRE)) {
        (void)pst_run_once(runtime, NULL);
        yield_briefly();
    }
}

static void add_noting(pst_graph *graph, pst_lane *lane, pst_status *status) {
    const pst_task_options options = {
        .size = sizeof options, .lane = lane, .done = note_status, .done_argument = status};
    assert_ok(pst_graph_add(graph, &options, NULL));
}

static void await_cancel(pst_runtime *runtime, const pst_status *status) {
    while (__atomic_load_n(status, __ATOMIC_ACQUIRE) == PST_PENDING)
        (void)pst_run_once(runtime, NULL);
    assert_int_equal(*status, PST_ECANCELED);
}

/* Behind a closed gate's task, on one lane, stand those of a sealed and of a growing graph. */
static void what_is_canceled_ends_behind_a_head_that_waits(void **state) {
    (void)state;
    for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += 2) {
        pst_runtime *runtime = open_runtime(20000);
        pst_lane *lane = open_lane_in_order(runtime, "tickets", (pst_lane_mode)mode);
        pst_lane *other = open_lane(runtime, "other", (pst_lane_mode)mode);
        pst_task gate;
        pst_graph *gated = build_gated(runtime, lane, &gate);
        pst_graph *sealed = open_graph(runtime, PST_GRAPH_SEALED, "sealed");
        pst_graph *growing = open_graph(runtime, PST_GRAPH_GROWING, "growing");
        pst_launch first, second, third = {growing, 0};
        pst_status before = PST_PENDING, behind = PST_PENDING;
        lasting last = {0, 0};
        const pst_task a = add(sealed, lane, "a", NULL);
        (void)add(sealed, lane, "b", &a);
        assert_ok(pst_graph_seal(sealed));
        assert_ok(pst_graph_launch(gated, &first));
        assert_ok(pst_graph_launch(sealed, &second));
        assert_ok(pst_launch_cancel(second));
        assert_status(pst_launch_wait(second), PST_ECANCELED);
        add_lasting(runtime, growing, other, &last);
        add_noting(growing, lane, &before);
        assert_ok(pst_launch_cancel(third));
        await_cancel(runtime, &before);
        add_noting(growing, lane, &behind); /* canceled with the rest */
        await_cancel(runtime, &behind);
        __atomic_store_n(&last.released, 1, __ATOMIC_RELEASE);
        assert_ok(pst_graph_launch(sealed, &second)); /* and it stands behind the head again */
        assert_ok(pst_gate_open(first, gate, NULL));
        assert_ok(pst_launch_wait(first));
        assert_ok(pst_launch_wait(second));
        assert_status(pst_launch_wait(third), PST_ECANCELED);
        assert_ok(pst_runtime_destroy(runtime));
    }
}

/* The running task keeps the lane and, in an order, the lane behind which the other one stands. */
static void what_is_canceled_ends_behind_a_task_that_runs(void **state) {
    (void)state;
    for (int in_one_order = 0; in_one_order <= 1; in_one_order++) {
        pst_runtime *runtime = open_runtime(20000);
        pst_lane *lane = open_lane_in_order(runtime, "tickets", PST_LANE_WORKER);
        pst_lane *other = lane;
        const pst_lane_options behind = {.size = sizeof behind,
                                         .name = "behind",
                                         .mode = PST_LANE_WORKER,
                                         .order = PST_LANE_BY_SUBMISSION,
                                         .order_with = lane};
        if (in_one_order) assert_ok(pst_lane_create(runtime, &behind, &other));
        pst_graph *running = open_graph(runtime, PST_GRAPH_GROWING, "running");
        pst_graph *sealed = open_graph(runtime, PST_GRAPH_SEALED, "sealed");
        const pst_task a = add(sealed, lane, "a", NULL);
        (void)add(sealed, other, "b", &a);
        assert_ok(pst_graph_seal(sealed));
        lasting last = {0, 0};
        pst_launch launch;
        add_lasting(runtime, running, lane, &last);
        assert_ok(pst_graph_launch(sealed, &launch));
        assert_ok(pst_launch_cancel(launch));
        assert_status(pst_launch_wait(launch), PST_ECANCELED);
        __atomic_store_n(&last.released, 1, __ATOMIC_RELEASE);
        assert_ok(pst_launch_wait((pst_launch){running, 0}));
        assert_ok(pst_runtime_destroy(runtime));
    }
}

/* ---- what may be done as soon as an end is seen ------------------------------------------- */

typedef struct loop {
    pst_graph *graph;
    int runs, refused;
} loop;

static void launch_again(void *argument, pst_status status) {
    loop *self = argument;
    (void)status;
    const int runs = __atomic_add_fetch(&self->runs, 1, __ATOMIC_ACQ_REL);
    if (runs < ROUNDS && pst_graph_launch(self->graph, NULL) != PST_OK)
        __atomic_store_n(&self->refused, runs, __ATOMIC_RELEASE);
}

static void the_last_callback_of_two_lanes_launches_again(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *first = open_lane(runtime, "first", PST_LANE_WORKER);
    pst_lane *second = open_lane(runtime, "second", PST_LANE_WORKER);
    loop self = {open_graph(runtime, PST_GRAPH_SEALED, "loop"), 0, 0};
    const pst_task a = add(self.graph, first, "a", NULL);
    const pst_task_options last = {.size = sizeof last,
                                   .name = "last",
                                   .lane = second,
                                   .work = {.start = do_nothing},
                                   .after = &a,
                                   .after_count = 1,
                                   .done = launch_again,
                                   .done_argument = &self};
    assert_ok(pst_graph_add(self.graph, &last, NULL));
    assert_ok(pst_graph_seal(self.graph));
    assert_ok(pst_graph_launch(self.graph, NULL));
    while (__atomic_load_n(&self.runs, __ATOMIC_ACQUIRE) < ROUNDS &&
           __atomic_load_n(&self.refused, __ATOMIC_ACQUIRE) == 0)
        yield_briefly();
    assert_int_equal(self.refused, 0);
    assert_ok(pst_runtime_destroy(runtime));
}

static void after_the_wait_for_its_task_a_graph_is_destroyed(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_WORKER);
    for (int i = 0; i < ROUNDS; i++) {
        pst_launch launch;
        pst_graph *sealed = open_graph(runtime, PST_GRAPH_SEALED, "sealed");
        const pst_task a = add(sealed, lane, "a", NULL);
        assert_ok(pst_graph_seal(sealed));
        assert_ok(pst_graph_launch(sealed, &launch));
        assert_ok(pst_task_wait(launch, a, NULL));
        assert_ok(pst_graph_destroy(sealed));
        pst_graph *growing = open_graph(runtime, PST_GRAPH_GROWING, "growing");
        const pst_task b = add(growing, lane, "b", NULL);
        assert_ok(pst_task_wait((pst_launch){growing, 0}, b, NULL));
        assert_ok(pst_graph_destroy(growing));
    }
    assert_ok(pst_runtime_destroy(runtime));
}

static void note_ended(void *argument, pst_status status) {
    (void)status;
    __atomic_store_n((int *)argument, 1, __ATOMIC_RELEASE);
}

/* The callback tells another thread, which destroys the graph while the callback may still run. */
static void a_graph_is_destroyed_by_whom_its_callback_tells(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_WORKER);
    for (int i = 0; i < ROUNDS; i++) {
        int ended = 0;
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)(i % 2), "told");
        const pst_task_options options = {.size = sizeof options,
                                          .lane = lane,
                                          .work = {.start = do_nothing},
                                          .done = note_ended,
                                          .done_argument = &ended};
        assert_ok(pst_graph_add(graph, &options, NULL));
        if (i % 2 == PST_GRAPH_SEALED) {
            assert_ok(pst_graph_seal(graph));
            assert_ok(pst_graph_launch(graph, NULL));
        }
        while (!__atomic_load_n(&ended, __ATOMIC_ACQUIRE))
            yield_briefly();
        assert_ok(pst_graph_destroy(graph));
    }
    assert_ok(pst_runtime_destroy(runtime));
}

enum { WIDE = 40 };

static void after_the_waits_for_many_last_tasks_the_next_launch_begins(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lanes[] = {open_lane(runtime, "a", PST_LANE_WORKER),
                         open_lane(runtime, "b", PST_LANE_WORKER)};
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "wide");
    pst_task tasks[WIDE];
    for (int i = 0; i < WIDE; i++)
        tasks[i] = add(graph, lanes[i % 2], "wide", NULL);
    assert_ok(pst_graph_seal(graph));
    for (int round = 0; round < ROUNDS / 4; round++) {
        pst_launch launch;
        assert_ok(pst_graph_launch(graph, &launch));
        for (int i = 0; i < WIDE; i++)
            assert_ok(pst_task_wait(launch, tasks[i], NULL));
    }
    assert_ok(pst_graph_destroy(graph));
    assert_ok(pst_runtime_destroy(runtime));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(launches_of_two_threads_keep_one_order_on_all_lanes),
        cmocka_unit_test(what_is_canceled_ends_behind_a_head_that_waits),
        cmocka_unit_test(what_is_canceled_ends_behind_a_task_that_runs),
        cmocka_unit_test(the_last_callback_of_two_lanes_launches_again),
        cmocka_unit_test(after_the_wait_for_its_task_a_graph_is_destroyed),
        cmocka_unit_test(a_graph_is_destroyed_by_whom_its_callback_tells),
        cmocka_unit_test(after_the_waits_for_many_last_tasks_the_next_launch_begins),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
