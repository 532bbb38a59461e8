/* pst_fd and pst_timeout: a foreign loop sleeps until there is work, and misses none. */
#include "tests/sched/queue_device.h"

#include <fcntl.h>
#include <poll.h>

static int is_readable(int descriptor) {
    struct pollfd asked = {.fd = descriptor, .events = POLLIN};
    return poll(&asked, 1, 0) == 1;
}

static int fd_of(pst_runtime *runtime) {
    int descriptor = -1;
    assert_ok(pst_fd(runtime, &descriptor));
    return descriptor;
}

/* Pumps until there is nothing to do, so that whatever comes next is news. */
static int quiet_fd_of(pst_runtime *runtime) {
    const int descriptor = fd_of(runtime);
    while (is_readable(descriptor))
        (void)pst_run_once(runtime, NULL);
    return descriptor;
}

/* A loop as others have it: sleeps as long as it may, then one turn. */
static void turn_of_loop(pst_runtime *runtime, int descriptor) {
    struct pollfd asked = {.fd = descriptor, .events = POLLIN};
    const int64_t bound = pst_timeout(runtime);
    const int milliseconds = bound < 0 ? -1 : (int)((bound + 999999) / 1000000);
    assert_true(poll(&asked, 1, milliseconds) >= 0);
    (void)pst_run_once(runtime, NULL);
}

/* ---- the descriptor --------------------------------------------------------------------- */

static void it_is_readable_when_a_task_is_added(void **state) {
    (void)state;
    for (int order = PST_LANE_BY_READINESS; order <= PST_LANE_BY_SUBMISSION; order++) {
        pst_runtime *runtime = open_runtime(0);
        const pst_lane_options options = {.size = sizeof options,
                                          .name = "gather",
                                          .mode = PST_LANE_PUMPED,
                                          .order = (pst_lane_order)order};
        pst_lane *lane;
        assert_ok(pst_lane_create(runtime, &options, &lane));
        pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
        const int descriptor = quiet_fd_of(runtime);
        step a = {.name = "a"};
        pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
        assert_true(is_readable(descriptor));
        assert_ok(pst_run_once(runtime, NULL));
        assert_int_equal(a.callbacks, 1);
        pst_runtime_destroy(runtime);
    }
}

static void it_is_readable_when_a_graph_is_launched_and_when_a_gate_opens(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task gate;
    pst_launch launch;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    (void)add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(graph, lane, &b, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    const int descriptor = quiet_fd_of(runtime);
    assert_ok(pst_graph_launch(graph, &launch));
    assert_true(is_readable(descriptor));
    assert_int_equal(quiet_fd_of(runtime), descriptor);
    assert_int_equal(a.callbacks, 1);
    assert_int_equal(b.callbacks, 0);
    assert_ok(pst_gate_open(launch, gate, NULL));
    assert_true(is_readable(descriptor));
    (void)quiet_fd_of(runtime);
    assert_int_equal(b.callbacks, 1);
    pst_runtime_destroy(runtime);
}

static void it_is_readable_when_a_lane_is_woken_and_when_all_is_stopped(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    const int descriptor = quiet_fd_of(runtime);
    pst_lane_wake(lane);
    assert_true(is_readable(descriptor));
    (void)quiet_fd_of(runtime);
    pst_runtime_poison(runtime, PST_EPEER, "rank 1 has gone");
    assert_true(is_readable(descriptor));
    pst_runtime_destroy(runtime);
}

static void it_stays_readable_until_a_turn_finds_nothing(void **state) {
    (void)state;
    enum { TASKS = 1000 };
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const int descriptor = quiet_fd_of(runtime);
    step a = {.name = "a"};
    for (int i = 0; i < TASKS; i++)
        pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
    int turns = 0;
    for (; is_readable(descriptor); turns++)
        (void)pst_run_once(runtime, NULL);
    assert_int_equal(a.callbacks, TASKS);
    assert_true(turns > 2); /* a turn has a budget */
    pst_runtime_destroy(runtime);
}

/* For a loop that is told of a change and not of a state, such as epoll with EPOLLET. */
static void turning_while_the_timeout_is_0_does_all_there_is_and_ends(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const int descriptor = fd_of(runtime);
    step a = {.name = "a"};
    for (int tasks = 0; tasks <= 1000; tasks += 500) {
        for (int i = 0; i < tasks; i++)
            pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
        do
            (void)pst_run_once(runtime, NULL);
        while (pst_timeout(runtime) == 0);
        assert_false(is_readable(descriptor));
    }
    assert_int_equal(a.callbacks, 1500);
    pst_runtime_destroy(runtime);
}

static void what_came_before_the_first_call_is_seen(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a"};
    pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
    assert_true(is_readable(fd_of(runtime)));
    (void)quiet_fd_of(runtime);
    assert_int_equal(a.callbacks, 1);
    pst_runtime_destroy(runtime);
}

static void it_is_closed_with_its_runtime_and_on_exec(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    const int descriptor = fd_of(runtime);
    assert_int_equal(fcntl(descriptor, F_GETFD), FD_CLOEXEC);
    pst_runtime_destroy(runtime);
    assert_int_equal(fcntl(descriptor, F_GETFD), -1);
    assert_status(pst_fd(NULL, NULL), PST_EINVAL);
}

static void a_workers_task_that_releases_a_pumped_one_calls_the_loop(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *worker = open_lane(runtime, "gather", PST_LANE_WORKER);
    pst_lane *pumped = open_lane(runtime, "reduce", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const int descriptor = quiet_fd_of(runtime);
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_step(graph, worker, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task_release(add_step(graph, pumped, &b, ta, NO_TASK, NO_TASK));
    pst_task_release(ta);
    while (callbacks_of(&b) == 0)
        turn_of_loop(runtime, descriptor);
    pst_runtime_destroy(runtime);
}

static void two_runtimes_in_one_loop_are_told_apart(void **state) {
    (void)state;
    pst_runtime *runtimes[] = {open_runtime(0), open_runtime(0)};
    pst_lane *lane = open_lane(runtimes[0], "gather", PST_LANE_PUMPED);
    const int first = quiet_fd_of(runtimes[0]), second = quiet_fd_of(runtimes[1]);
    pst_lane_wake(lane);
    assert_true(is_readable(first));
    assert_false(is_readable(second));
    pst_runtime_destroy(runtimes[0]);
    pst_runtime_destroy(runtimes[1]);
}

/* ---- the timeout ------------------------------------------------------------------------ */

static void the_timeout_bounds_the_polling_of_what_is_launched(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a", .asks = -1};
    assert_int_equal(pst_timeout(NULL), 0);
    (void)pst_run_once(runtime, NULL);
    assert_int_equal(pst_timeout(runtime), -1); /* nothing to wait for */
    pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
    assert_int_equal(pst_timeout(runtime), 0); /* something to do */
    assert_ok(pst_run_once(runtime, NULL));
    assert_status(pst_run_once(runtime, NULL), PST_PENDING);
    int64_t before = pst_timeout(runtime), longest = before;
    assert_true(before > 0);
    for (int i = 0; i < 400; i++) {
        assert_status(pst_run_once(runtime, NULL), PST_PENDING);
        longest = pst_timeout(runtime);
        assert_true(longest >= before); /* longer and longer, */
        before = longest;
    }
    assert_int_equal(longest, 20000000); /* to a limit */
    __atomic_store_n(&a.asks, 0, __ATOMIC_RELEASE);
    pump(runtime);
    (void)pst_run_once(runtime, NULL);
    assert_int_equal(pst_timeout(runtime), -1);
    pst_runtime_destroy(runtime);
}

static void a_task_behind_a_closed_gate_needs_no_polling(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    pst_task_release(add_step(graph, lane, &a, gate, NO_TASK, NO_TASK));
    (void)quiet_fd_of(runtime);
    assert_status(pst_run_once(runtime, NULL), PST_PENDING);
    assert_int_equal(pst_timeout(runtime), -1);
    pst_task_release(gate);
    pst_runtime_destroy(runtime);
}

static void an_asynchronous_lane_in_flight_is_polled(void **state) {
    (void)state;
    queue_device device;
    queue_open(&device);
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_queue_lane(runtime, &device, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const int descriptor = quiet_fd_of(runtime);
    step a = {.name = "a"};
    pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
    (void)quiet_fd_of(runtime);
    assert_int_equal(a.callbacks, 0);
    assert_true(pst_timeout(runtime) > 0);
    (void)queue_drain(&device);
    while (a.callbacks == 0)
        turn_of_loop(runtime, descriptor);
    pst_runtime_destroy(runtime);
    queue_close(&device);
}

/* ---- nothing is lost -------------------------------------------------------------------- */

enum { ROUNDS = 4000, GATES = 3 };

typedef struct opener {
    pst_launch launch;
    pst_task gates[GATES];
    uint32_t round; /* the loop has launched so many times */
    int failures;
} opener;

static void *open_gates(void *argument) {
    opener *self = argument;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        while (__atomic_load_n(&self->round, __ATOMIC_ACQUIRE) < round)
            yield_briefly();
        for (int g = 0; g < GATES; g++) {
            if (round % 7 == 0) yield_briefly(); /* the loop may have gone to sleep by then */
            const pst_launch launch = {self->launch.graph, round};
            self->failures += pst_gate_open(launch, self->gates[g], NULL) != PST_OK;
        }
    }
    return NULL;
}

/* Were an opening lost, the loop would sleep for ever, and the test with it. */
static void no_opening_is_lost_while_the_loop_sleeps(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    const int threads = count_threads();
    pst_lane *lanes[] = {open_lane(runtime, "gather", PST_LANE_PUMPED),
                         open_lane_in_order(runtime, "reduce", PST_LANE_PUMPED)};
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step steps[GATES * 2] = {{.name = NULL}};
    opener other = {.launch = {graph, 0}};
    for (int g = 0; g < GATES; g++) {
        steps[2 * g].name = steps[2 * g + 1].name = "step";
        assert_ok(pst_graph_add_gate(graph, "gate", &other.gates[g]));
        pst_task first =
            add_step(graph, lanes[g % 2], &steps[2 * g], other.gates[g], NO_TASK, NO_TASK);
        (void)add_step(graph, lanes[(g + 1) % 2], &steps[2 * g + 1], first, NO_TASK, NO_TASK);
    }
    assert_ok(pst_graph_seal(graph));
    const int descriptor = fd_of(runtime);
    assert_int_equal(count_threads(), threads);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, open_gates, &other), 0);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        pst_launch launch;
        pst_status status;
        while ((status = pst_graph_launch(graph, &launch)) == PST_EBUSY)
            yield_briefly(); /* the other thread has yet to return from its last opening */
        assert_ok(status);
        __atomic_store_n(&other.round, round, __ATOMIC_RELEASE);
        for (int g = 0; g < GATES * 2; g++)
            while (callbacks_of(&steps[g]) < (int)round)
                turn_of_loop(runtime, descriptor);
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(other.failures, 0);
    pst_runtime_destroy(runtime);
}

typedef struct submitter {
    pst_graph *graph;
    pst_lane *lane;
    step *counted;
} submitter;

static void *submit_all(void *argument) {
    const submitter *self = argument;
    for (int i = 0; i < ROUNDS; i++) {
        const pst_task_options options = step_options(self->counted, self->lane);
        if (pst_graph_add(self->graph, &options, NULL) != PST_OK) return argument;
        if (i % 16 == 0) yield_briefly();
    }
    return NULL;
}

static void no_task_of_another_thread_is_lost_while_the_loop_sleeps(void **state) {
    (void)state;
    for (int order = PST_LANE_BY_READINESS; order <= PST_LANE_BY_SUBMISSION; order++) {
        pst_runtime *runtime = open_runtime(0);
        pst_lane *lane = order == PST_LANE_BY_READINESS
                             ? open_lane(runtime, "gather", PST_LANE_PUMPED)
                             : open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
        step counted = {.name = "counted"};
        submitter other = {open_graph(runtime, PST_GRAPH_GROWING, "g"), lane, &counted};
        const int descriptor = fd_of(runtime);
        pthread_t thread;
        void *failed;
        assert_int_equal(pthread_create(&thread, NULL, submit_all, &other), 0);
        while (callbacks_of(&counted) < ROUNDS)
            turn_of_loop(runtime, descriptor);
        assert_int_equal(pthread_join(thread, &failed), 0);
        assert_null(failed);
        pst_runtime_destroy(runtime);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_readable_when_a_task_is_added),
        cmocka_unit_test(it_is_readable_when_a_graph_is_launched_and_when_a_gate_opens),
        cmocka_unit_test(it_is_readable_when_a_lane_is_woken_and_when_all_is_stopped),
        cmocka_unit_test(it_stays_readable_until_a_turn_finds_nothing),
        cmocka_unit_test(turning_while_the_timeout_is_0_does_all_there_is_and_ends),
        cmocka_unit_test(what_came_before_the_first_call_is_seen),
        cmocka_unit_test(it_is_closed_with_its_runtime_and_on_exec),
        cmocka_unit_test(a_workers_task_that_releases_a_pumped_one_calls_the_loop),
        cmocka_unit_test(two_runtimes_in_one_loop_are_told_apart),
        cmocka_unit_test(the_timeout_bounds_the_polling_of_what_is_launched),
        cmocka_unit_test(a_task_behind_a_closed_gate_needs_no_polling),
        cmocka_unit_test(an_asynchronous_lane_in_flight_is_polled),
        cmocka_unit_test(no_opening_is_lost_while_the_loop_sleeps),
        cmocka_unit_test(no_task_of_another_thread_is_lost_while_the_loop_sleeps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
