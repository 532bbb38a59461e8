/* Lanes of two asynchronous devices: their streams cannot wait for each other's events, and an
 * event belongs to one of them. */
#include "tests/sched/queue_device.h"

typedef struct fixture {
    queue_device one, other;
    pst_runtime *runtime;
    pst_lane *lane, *other_lane, *caller, *other_caller;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    queue_open(&f->one);
    queue_open(&f->other);
    f->runtime = open_runtime(20000);
    f->lane = open_queue_lane(f->runtime, &f->one, "one", PST_LANE_PUMPED);
    f->other_lane = open_queue_lane(f->runtime, &f->other, "other", PST_LANE_PUMPED);
    f->caller = open_queue_lane(f->runtime, &f->one, "caller", PST_LANE_BORROWED);
    f->other_caller = open_queue_lane(f->runtime, &f->other, "other caller", PST_LANE_BORROWED);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    queue_drain(&f->one);
    queue_drain(&f->other);
    pst_runtime_destroy(f->runtime);
    assert_int_equal(f->one.live_events + f->other.live_events, 0);
    queue_close(&f->one);
    queue_close(&f->other);
    free(f);
    return 0;
}

static void turns(fixture *f) {
    for (int i = 0; i < 4; i++)
        (void)pst_run_once(f->runtime, NULL);
}

static void land(fixture *f) {
    for (int i = 0; i < 4; i++) {
        turns(f);
        queue_drain(&f->one);
        queue_drain(&f->other);
    }
    pump(f->runtime);
}

static void a_task_behind_the_other_device_starts_when_that_is_done(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_GROWING, "growing");
    const pst_task ta = add_step(graph, f->other_lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task_release(add_step(graph, f->lane, &b, ta, NO_TASK, NO_TASK));
    turns(f);
    assert_int_equal(a.runs, 1);
    assert_int_equal(b.runs, 0);
    land(f);
    assert_int_equal(b.callbacks, 1);
    pst_task_release(ta);
}

static void a_gate_of_the_other_device_opens_when_that_is_there(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task gate;
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_GROWING, "growing");
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    pst_task_release(add_step(graph, f->lane, &a, gate, NO_TASK, NO_TASK));
    pst_task_release(add_step(graph, f->other_lane, &b, gate, NO_TASK, NO_TASK));
    assert_ok(pst_gate_open((pst_launch){graph, 0}, gate, f->caller));
    turns(f);
    assert_int_equal(a.runs, 1); /* its stream waits */
    assert_int_equal(b.runs, 0); /* it waits itself */
    land(f);
    assert_int_equal(b.callbacks, 1);
    pst_task_release(gate);
}

static void a_gate_may_be_opened_by_another_device_each_launch(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_task gate;
    pst_launch launch;
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_SEALED, "sealed");
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    (void)add_step(graph, f->lane, &a, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    for (int i = 0; i < 4; i++) {
        assert_ok(pst_graph_launch(graph, &launch));
        assert_ok(pst_gate_open(launch, gate, i % 2 == 0 ? f->caller : f->other_caller));
        land(f);
    }
    assert_int_equal(a.callbacks, 4);
}

static void a_tasks_block_may_serve_another_device_next(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_GROWING, "growing");
    for (int i = 0; i < 40; i++) {
        pst_lane *lane = i % 2 == 0 ? f->lane : f->other_lane;
        pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
        land(f);
    }
    assert_int_equal(a.callbacks, 40);
}

static void a_stream_waits_for_a_gate_of_its_own_device(void **state) {
    fixture *f = *state;
    pst_task gate;
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_GROWING, "growing");
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    const pst_launch launch = {graph, 0};
    assert_ok(pst_gate_open(launch, gate, f->caller));
    land(f);
    const size_t waits = f->one.waits + f->other.waits;
    assert_ok(pst_task_wait(launch, gate, f->other_caller));
    assert_int_equal(f->one.waits + f->other.waits, waits); /* it has come, as the host knows */
    assert_ok(pst_task_wait(launch, gate, f->caller));
    assert_int_equal(f->one.waits, waits + 1);
    pst_task_release(gate);
}

static void only_borrowed_lanes_wait(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_GROWING, "growing");
    const pst_task task = add_step(graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_status(pst_task_wait((pst_launch){graph, 0}, task, f->other_lane), PST_EINVAL);
    assert_error(f->runtime, "task a", "lane other", "borrowed");
    land(f);
    pst_task_release(task);
}

static void a_worker_asks_for_a_borrowed_lane_that_comes_later(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_task gate;
    pst_lane *served = open_queue_lane(f->runtime, &f->one, "served", PST_LANE_WORKER);
    pst_lane *late = open_queue_lane(f->runtime, &f->one, "late", PST_LANE_BORROWED);
    pst_lane *host = open_lane(f->runtime, "host", PST_LANE_WORKER);
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_GROWING, "growing");
    (void)served;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    pst_task_release(add_step(graph, host, &a, gate, NO_TASK, NO_TASK));
    assert_ok(pst_gate_open((pst_launch){graph, 0}, gate, late));
    queue_drain(&f->one);
    while (callbacks_of(&a) == 0)
        yield_briefly();
    pst_task_release(gate);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_task_behind_the_other_device_starts_when_that_is_done),
        TEST(a_gate_of_the_other_device_opens_when_that_is_there),
        TEST(a_gate_may_be_opened_by_another_device_each_launch),
        TEST(a_tasks_block_may_serve_another_device_next),
        TEST(a_stream_waits_for_a_gate_of_its_own_device),
        TEST(only_borrowed_lanes_wait),
        TEST(a_worker_asks_for_a_borrowed_lane_that_comes_later),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
