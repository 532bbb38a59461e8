/* The end of lanes, and new ones in their places. */
#include "tests/sched/held.h"
#include "tests/sched/queue_device.h"

static pst_lane *open_with(pst_runtime *runtime, const char *name, pst_lane *share_with,
                           pst_lane *order_with) {
    const pst_lane_options options = {
        .size = sizeof options,
        .name = name,
        .mode = share_with == NULL ? PST_LANE_WORKER : PST_LANE_SHARED,
        .share_with = share_with,
        .order_with = order_with,
        .order = order_with == NULL ? PST_LANE_BY_READINESS : PST_LANE_BY_SUBMISSION};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    return lane;
}

static void run_one(pst_graph *graph, pst_lane *lane) {
    step a = {.name = "a"};
    const pst_task task = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_int_equal(a.runs, 1);
    pst_task_release(task);
}

/* 1 when the lane lies where none has been before. */
static int is_new_place(pst_lane **places, size_t room, const pst_lane *lane) {
    size_t i = 0;
    while (i < room && places[i] != NULL && places[i] != lane)
        i++;
    assert_true(i < room);
    const int is_new = places[i] == NULL;
    places[i] = (pst_lane *)(uintptr_t)lane;
    return is_new;
}

static void lanes_that_come_and_go_leave_no_thread_and_no_memory(void **state) {
    (void)state;
    start_first_thread();
    const int before = count_threads();
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *places[20] = {NULL};
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    for (int i = 0; i < 50; i++) {
        pst_lane *worker = open_lane(runtime, "worker", PST_LANE_WORKER);
        pst_lane *shared = open_with(runtime, "shared", worker, NULL);
        pst_lane *leader = open_lane_in_order(runtime, "leader", PST_LANE_WORKER);
        pst_lane *follower = open_with(runtime, "follower", NULL, leader);
        pst_lane *pumped = open_lane(runtime, "pumped", PST_LANE_PUMPED);
        pst_lane *lanes[] = {worker, shared, leader, follower, pumped};
        for (int lane = 0; lane < 5; lane++) {
            run_one(graph, lanes[lane]);
            assert_false(is_new_place(places, 20, lanes[lane]) && i > 4);
        }
        assert_ok(pst_lane_destroy(pumped));
        assert_ok(pst_lane_destroy(follower));
        assert_ok(pst_lane_destroy(leader));
        assert_ok(pst_lane_destroy(shared));
        assert_ok(pst_lane_destroy(worker));
    }
    assert_int_equal(count_threads(), before);
    assert_ok(pst_lane_destroy(NULL));
    assert_ok(pst_runtime_destroy(runtime));
}

static void lanes_that_come_after_a_leader_have_an_order_of_their_own(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(2000);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    pst_lane *leader = open_lane_in_order(runtime, "leader", PST_LANE_PUMPED);
    assert_ok(pst_lane_destroy(open_with(runtime, "follower", NULL, leader)));
    assert_ok(pst_lane_destroy(leader));
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "urgent",
                                      .mode = PST_LANE_PUMPED,
                                      .order = PST_LANE_BY_PRIORITY};
    pst_lane *urgent;
    assert_ok(pst_lane_create(runtime, &options, &urgent));
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task_release(add_step(graph, urgent, &a, NO_TASK, NO_TASK, NO_TASK));
    pst_task_release(add_step(graph, urgent, &b, NO_TASK, NO_TASK, NO_TASK));
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_int_equal(a.runs + b.runs, 2);
    assert_ok(pst_runtime_destroy(runtime));
}

/* Runs a task on a host lane, in whose place comes one of the device: *lane. */
static pst_task run_and_replace(pst_graph *graph, pst_runtime *runtime, queue_device *queue,
                                step *self, pst_lane **lane) {
    *lane = open_lane(runtime, "host", PST_LANE_PUMPED);
    const pst_task task = add_step(graph, *lane, self, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_ok(pst_lane_destroy(*lane));
    assert_ptr_equal(open_queue_lane(runtime, queue, "gather", PST_LANE_PUMPED), *lane);
    return task;
}

/* The task's lane was on the host; in its place is one of the device that its successor runs on. */
static void what_follows_a_task_of_a_destroyed_lane_runs(void **state) {
    (void)state;
    queue_device queue;
    queue_open(&queue);
    pst_runtime *runtime = open_runtime(2000);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    pst_lane *lane;
    pst_lane *reduce = open_queue_lane(runtime, &queue, "reduce", PST_LANE_PUMPED);
    step a = {.name = "a"}, b = {.name = "b"};
    const pst_task task = run_and_replace(graph, runtime, &queue, &a, &lane);
    pst_task_release(add_step(graph, reduce, &b, task, NO_TASK, NO_TASK));
    pst_task_release(task);
    for (int i = 0; i < 4; i++)
        (void)pst_run_once(runtime, NULL);
    assert_int_equal(b.runs, 1);
    queue_end(&queue, runtime);
}

/* The task's lane was on the host; one of another device has come into its place, and gone. */
static void a_task_of_a_destroyed_lane_is_not_waited_for(void **state) {
    (void)state;
    queue_device queue;
    queue_open(&queue);
    pst_runtime *runtime = open_runtime(20000);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    pst_lane *compute = open_queue_lane(runtime, &queue, "compute", PST_LANE_BORROWED);
    pst_lane *lane;
    step a = {.name = "a"};
    const pst_task task = run_and_replace(graph, runtime, &queue, &a, &lane);
    assert_ok(pst_lane_destroy(lane));
    assert_ok(pst_task_wait((pst_launch){graph, 0}, task, compute));
    assert_null(pst_task_event((pst_launch){graph, 0}, task));
    pst_task_release(task);
    queue_end(&queue, runtime);
}

static void a_lane_in_use_is_not_destroyed_and_says_by_what(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *worker = open_lane(runtime, "worker", PST_LANE_WORKER);
    pst_lane *shared = open_with(runtime, "shared", worker, NULL);
    pst_lane *leader = open_lane_in_order(runtime, "leader", PST_LANE_PUMPED);
    pst_lane *follower = open_with(runtime, "follower", NULL, leader);
    assert_status(pst_lane_destroy(worker), PST_EBUSY);
    assert_error(runtime, "lane worker", "lane shared");
    assert_status(pst_lane_destroy(leader), PST_EBUSY);
    assert_error(runtime, "lane leader", "lane follower");
    pst_graph *sealed = open_graph(runtime, PST_GRAPH_SEALED, "forward");
    pst_graph *growing = open_graph(runtime, PST_GRAPH_GROWING, "reads");
    step a = {.name = "a"}, b = {.name = "b", .asks = -1};
    (void)add_step(sealed, shared, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task_release(add_step(growing, follower, &b, NO_TASK, NO_TASK, NO_TASK));
    assert_status(pst_lane_destroy(shared), PST_EBUSY);
    assert_error(runtime, "lane shared", "graph forward");
    assert_status(pst_lane_destroy(follower), PST_EBUSY);
    assert_error(runtime, "lane follower", "graph reads");
    __atomic_store_n(&b.asks, 0, __ATOMIC_RELEASE);
    assert_ok(pst_launch_wait((pst_launch){growing, 0}));
    assert_ok(pst_graph_destroy(sealed));
    assert_ok(pst_lane_destroy(shared));
    assert_ok(pst_lane_destroy(follower));
    assert_ok(pst_lane_destroy(leader));
    assert_ok(pst_lane_destroy(worker));
    assert_ok(pst_runtime_destroy(runtime));
}

/* The order is served as one: its thread is in a task of the leader. */
static void a_lane_whose_thread_is_in_a_task_stays(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(50);
    pst_lane *leader = open_lane_in_order(runtime, "leader", PST_LANE_WORKER);
    pst_lane *follower = open_with(runtime, "follower", NULL, leader);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    held busy = {0};
    pst_task_release(add_work(graph, leader, "busy", hold, &busy));
    await_inside(&busy);
    assert_status(pst_lane_destroy(follower), PST_ETIMEDOUT);
    assert_error(runtime, "lane follower", "in a task");
    let_go(&busy);
    while (pst_launch_wait((pst_launch){graph, 0}) == PST_ETIMEDOUT)
        ;
    run_one(graph, follower);
    assert_ok(pst_lane_destroy(follower));
    assert_ok(pst_runtime_destroy(runtime));
}

/* Its worker polls the borrowed lanes, too, and another one goes on with them. */
static void borrowed_lanes_outlive_the_worker_that_polls_them(void **state) {
    (void)state;
    queue_device queue;
    queue_open(&queue);
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *first = open_lane(runtime, "first", PST_LANE_WORKER);
    pst_lane *compute = open_queue_lane(runtime, &queue, "compute", PST_LANE_BORROWED);
    pst_lane *second = open_lane(runtime, "second", PST_LANE_WORKER);
    assert_ok(pst_lane_destroy(first));
    for (int round = 0; round < 2; round++) {
        pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
        step a = {.name = "a"};
        pst_task gate;
        pst_launch launch;
        pst_lane *pumped = open_lane(runtime, "pumped", PST_LANE_PUMPED);
        assert_ok(pst_graph_add_gate(graph, "gate", &gate));
        (void)add_step(graph, pumped, &a, gate, NO_TASK, NO_TASK);
        assert_ok(pst_graph_seal(graph));
        assert_ok(pst_graph_launch(graph, &launch));
        assert_ok(pst_gate_open(launch, gate, compute));
        assert_status(pst_lane_destroy(compute), PST_EBUSY);
        (void)queue_drain(&queue); /* the gate's event comes */
        assert_ok(pst_launch_wait(launch));
        assert_int_equal(a.runs, 1);
        assert_ok(pst_graph_destroy(graph));
        assert_ok(pst_lane_destroy(pumped));
        if (round == 0) assert_ok(pst_lane_destroy(second)); /* from here on who waits polls */
    }
    assert_ok(pst_lane_destroy(compute));
    queue_end(&queue, runtime);
}

/* Helpers, the watchdog and cancels walk along the lanes while lanes come and go. */
typedef struct walker {
    pst_runtime *runtime;
    int stop;
} walker;

static void *walk(void *argument) {
    walker *self = argument;
    pst_lane *lane = open_lane(self->runtime, "walker", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(self->runtime, PST_GRAPH_GROWING, "walks");
    while (!__atomic_load_n(&self->stop, __ATOMIC_ACQUIRE)) {
        (void)pst_run_once(self->runtime, NULL);
        (void)pst_launch_cancel((pst_launch){graph, 0});
    }
    assert_ok(pst_graph_destroy(graph));
    assert_ok(pst_lane_destroy(lane));
    return NULL;
}

static void lanes_come_and_go_beside_those_who_walk_along_them(void **state) {
    (void)state;
    const pst_runtime_options options = {
        .size = sizeof options, .spin = 20, .deadline_ns = 20000000000u, .watchdog_ns = 800000};
    walker self = {NULL, 0};
    pthread_t thread;
    assert_ok(pst_runtime_create(&options, &self.runtime));
    pst_graph *graph = open_graph(self.runtime, PST_GRAPH_GROWING, "g");
    assert_int_equal(pthread_create(&thread, NULL, walk, &self), 0);
    for (int i = 0; i < 200; i++) {
        pst_lane *lane = open_lane(self.runtime, "fleeting", (pst_lane_mode)(i % 2 * 2));
        run_one(graph, lane);
        assert_ok(pst_lane_destroy(lane));
    }
    __atomic_store_n(&self.stop, 1, __ATOMIC_RELEASE);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(pst_runtime_destroy(self.runtime));
}

/* ---- devices ------------------------------------------------------------------------------ */

static void a_device_without_a_slot_that_lanes_need_is_refused_by_name(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_device_ops ops = *pst_runtime_host(runtime)->ops;
    pst_device device = {&ops, pst_runtime_host(runtime)->context};
    const pst_lane_options options = {.size = sizeof options, .name = "x", .device = &device};
    pst_lane *lane;
    ops.name = "half";
    ops.event_create = NULL;
    assert_status(pst_lane_create(runtime, &options, &lane), PST_EINVAL);
    assert_error(runtime, "lane x", "device half", "'event_create'");
    ops = *pst_runtime_host(runtime)->ops;
    ops.progress = NULL;
    assert_status(pst_lane_create(runtime, &options, &lane), PST_EINVAL);
    assert_error(runtime, "'progress'");
    ops = *pst_runtime_host(runtime)->ops;
    ops.copy_2d = NULL; /* lanes have nothing to do with it */
    ops.sum = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    assert_ok(pst_runtime_destroy(runtime));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lanes_that_come_and_go_leave_no_thread_and_no_memory),
        cmocka_unit_test(lanes_that_come_after_a_leader_have_an_order_of_their_own),
        cmocka_unit_test(a_task_of_a_destroyed_lane_is_not_waited_for),
        cmocka_unit_test(what_follows_a_task_of_a_destroyed_lane_runs),
        cmocka_unit_test(a_lane_in_use_is_not_destroyed_and_says_by_what),
        cmocka_unit_test(a_lane_whose_thread_is_in_a_task_stays),
        cmocka_unit_test(borrowed_lanes_outlive_the_worker_that_polls_them),
        cmocka_unit_test(lanes_come_and_go_beside_those_who_walk_along_them),
        cmocka_unit_test(a_device_without_a_slot_that_lanes_need_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
