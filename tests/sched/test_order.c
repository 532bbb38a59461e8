/* Lanes with one order: what was added to any of them earlier is launched before. */
#include "tests/sched/queue_device.h"

static pst_lane *join(pst_lane *with, const char *name, pst_device *device, pst_runtime *runtime) {
    const pst_lane_options options = {.size = sizeof options,
                                      .name = name,
                                      .device = device,
                                      .order = PST_LANE_BY_SUBMISSION,
                                      .order_with = with};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    return lane;
}

typedef struct fixture {
    pst_runtime *runtime;
    pst_lane *gather, *reduce, *free_lane;
    trail ran;
} fixture;

static fixture open_fixture(pst_lane_mode mode) {
    fixture f = {.runtime = open_runtime(20000)};
    f.gather = open_lane_in_order(f.runtime, "gather", mode);
    f.reduce = join(f.gather, "reduce", NULL, f.runtime);
    f.free_lane = open_lane(f.runtime, "free", PST_LANE_PUMPED);
    return f;
}

static pst_launch begin(pst_graph *graph, pst_graph_kind kind) {
    pst_launch launch = {graph, 0};
    if (kind == PST_GRAPH_SEALED) {
        assert_ok(pst_graph_seal(graph));
        assert_ok(pst_graph_launch(graph, &launch));
    }
    return launch;
}

static void release_all(const pst_task *tasks, size_t count) {
    for (size_t i = 0; i < count; i++)
        pst_task_release(tasks[i]);
}

/* The second task is ready long before the first one. */
static void tasks_of_two_lanes_launch_in_the_order_of_adding(void **state) {
    (void)state;
    for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED)
        for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
            fixture f = open_fixture((pst_lane_mode)mode);
            pst_graph *graph = open_graph(f.runtime, (pst_graph_kind)kind, "g");
            step slow = {.name = "slow", .asks = 3}, a = {.where = &f.ran, .name = "gather 1"},
                 b = {.where = &f.ran, .name = "reduce 1"},
                 c = {.where = &f.ran, .name = "gather 2"};
            pst_task tasks[4] = {add_step(graph, f.free_lane, &slow, NO_TASK, NO_TASK, NO_TASK)};
            tasks[1] = add_step(graph, f.gather, &a, tasks[0], NO_TASK, NO_TASK);
            tasks[2] = add_step(graph, f.reduce, &b, NO_TASK, NO_TASK, NO_TASK);
            tasks[3] = add_step(graph, f.gather, &c, NO_TASK, NO_TASK, NO_TASK);
            assert_ok(pst_launch_wait(begin(graph, (pst_graph_kind)kind)));
            assert_ran(&f.ran, "gather 1", "reduce 1", "gather 2");
            release_all(tasks, 4);
            pst_runtime_destroy(f.runtime);
        }
}

/* Launched is enough: the order says nothing about ends. */
static void a_task_of_the_other_lane_may_go_on_meanwhile(void **state) {
    (void)state;
    fixture f = open_fixture(PST_LANE_PUMPED);
    pst_graph *graph = open_graph(f.runtime, PST_GRAPH_GROWING, "g");
    step a = {.where = &f.ran, .name = "gather 1", .asks = -1},
         b = {.where = &f.ran, .name = "reduce 1"}, c = {.where = &f.ran, .name = "gather 2"},
         d = {.where = &f.ran, .name = "reduce 2"};
    pst_task tasks[] = {add_step(graph, f.gather, &a, NO_TASK, NO_TASK, NO_TASK),
                        add_step(graph, f.reduce, &b, NO_TASK, NO_TASK, NO_TASK),
                        add_step(graph, f.gather, &c, NO_TASK, NO_TASK, NO_TASK),
                        add_step(graph, f.reduce, &d, NO_TASK, NO_TASK, NO_TASK)};
    for (int i = 0; i < 4; i++)
        (void)pst_run_once(f.runtime, NULL);
    assert_ran(&f.ran, "gather 1", "reduce 1"); /* gather 2 has to wait, so reduce 2 has to, too */
    a.asks = 0;
    pump(f.runtime);
    assert_ran(&f.ran, "gather 1", "reduce 1", "gather 2", "reduce 2");
    release_all(tasks, 4);
    pst_runtime_destroy(f.runtime);
}

static void launches_of_a_graph_and_several_graphs_keep_one_order(void **state) {
    (void)state;
    fixture f = open_fixture(PST_LANE_WORKER);
    step a = {.where = &f.ran, .name = "gather"}, b = {.where = &f.ran, .name = "reduce"};
    pst_graph *graphs[2];
    for (int i = 0; i < 2; i++) {
        graphs[i] = open_graph(f.runtime, PST_GRAPH_SEALED, "g");
        (void)add_step(graphs[i], f.gather, &a, NO_TASK, NO_TASK, NO_TASK);
        (void)add_step(graphs[i], f.reduce, &b, NO_TASK, NO_TASK, NO_TASK);
        assert_ok(pst_graph_seal(graphs[i]));
    }
    for (int round = 0; round < 100; round++) {
        pst_launch launches[2];
        for (int i = 0; i < 2; i++)
            assert_ok(pst_graph_launch(graphs[i], &launches[i]));
        for (int i = 0; i < 2; i++)
            assert_ok(pst_launch_wait(launches[i]));
    }
    assert_int_equal(f.ran.length, 400);
    for (size_t i = 0; i < f.ran.length; i++)
        assert_string_equal(f.ran.names[i], i % 2 == 0 ? "gather" : "reduce");
    pst_runtime_destroy(f.runtime);
}

static void streams_get_their_work_in_the_order_of_adding(void **state) {
    (void)state;
    queue_device device;
    queue_open(&device);
    pst_runtime *runtime = open_runtime(0);
    const pst_lane_options first = {.size = sizeof first,
                                    .name = "gather",
                                    .device = &device.device,
                                    .mode = PST_LANE_PUMPED,
                                    .order = PST_LANE_BY_SUBMISSION};
    pst_lane *gather = NULL;
    assert_ok(pst_lane_create(runtime, &first, &gather));
    pst_lane *reduce = join(gather, "reduce", &device.device, runtime);
    pst_lane *host = open_lane(runtime, "host", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    trail ran = {0};
    step slow = {.name = "slow", .asks = 2}, a = {.where = &ran, .name = "reduce 1"},
         b = {.where = &ran, .name = "gather 1"}, c = {.where = &ran, .name = "reduce 2"};
    pst_task ts = add_step(graph, host, &slow, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(graph, reduce, &a, ts, NO_TASK, NO_TASK);
    (void)add_step(graph, gather, &b, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(graph, reduce, &c, NO_TASK, NO_TASK, NO_TASK);
    const pst_launch launch = begin(graph, PST_GRAPH_SEALED);
    while (ran.length < 3)
        (void)pst_run_once(runtime, NULL);
    assert_ran(&ran, "reduce 1", "gather 1", "reduce 2");
    assert_int_equal(a.callbacks + b.callbacks + c.callbacks, 0); /* launched and in flight */
    (void)queue_drain(&device);
    assert_ok(pst_launch_wait(launch));
    assert_int_equal(a.callbacks + b.callbacks + c.callbacks, 3);
    pst_runtime_destroy(runtime);
    queue_close(&device);
}

static void a_cycle_through_the_order_is_named(void **state) {
    (void)state;
    fixture f = open_fixture(PST_LANE_PUMPED);
    pst_graph *graph = open_graph(f.runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "gather 1"}, b = {.name = "middle"}, c = {.name = "reduce 1"};
    pst_task ta = add_step(graph, f.gather, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(graph, f.free_lane, &b, NO_TASK, NO_TASK, NO_TASK);
    pst_task tc = add_step(graph, f.reduce, &c, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_add_edge(graph, tc, tb));
    assert_ok(pst_graph_add_edge(graph, tb, ta)); /* gather 1 behind reduce 1, added before it */
    assert_status(pst_graph_seal(graph), PST_ECYCLE);
    assert_error(f.runtime, "gather 1 -> reduce 1", "middle");
    pst_runtime_destroy(f.runtime);
}

static void a_wait_that_times_out_names_what_holds_the_order_up(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(30);
    pst_lane *gather = open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
    pst_lane *reduce = join(gather, "reduce", NULL, runtime);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "reduce 1"}, b = {.name = "gather 1"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "gradients", &gate));
    (void)add_step(graph, reduce, &a, gate, NO_TASK, NO_TASK);
    pst_task tb = add_step(graph, gather, &b, NO_TASK, NO_TASK, NO_TASK);
    const pst_launch launch = begin(graph, PST_GRAPH_SEALED);
    assert_status(pst_task_wait(launch, tb, NULL), PST_ETIMEDOUT);
    assert_error(runtime, "task gather 1", "waits for gradients", "a gate that is not open");
    assert_ok(pst_gate_open(launch, gate, NULL));
    pump(runtime);
    pst_runtime_destroy(runtime);
}

/* A failure and a cancel pass through the order like a launch. */
static void what_is_canceled_does_not_hold_the_order_up(void **state) {
    (void)state;
    fixture f = open_fixture(PST_LANE_PUMPED);
    pst_graph *graph = open_graph(f.runtime, PST_GRAPH_SEALED, "g");
    step bad = {.name = "bad", .result = PST_EIO}, a = {.where = &f.ran, .name = "gather 1"},
         b = {.where = &f.ran, .name = "reduce 1"};
    pst_task tbad = add_step(graph, f.free_lane, &bad, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(graph, f.gather, &a, tbad, NO_TASK, NO_TASK);
    (void)add_step(graph, f.reduce, &b, NO_TASK, NO_TASK, NO_TASK);
    assert_status(pst_launch_wait(begin(graph, PST_GRAPH_SEALED)), PST_EIO);
    assert_int_equal(a.reported, PST_ESKIPPED);
    assert_ran(&f.ran, "reduce 1");
    pst_runtime_destroy(f.runtime);
}

static void assert_refused(pst_runtime *runtime, pst_lane_options options) {
    pst_lane *made = options.order_with;
    options.size = sizeof options;
    options.name = "reduce";
    assert_status(pst_lane_create(runtime, &options, &made), PST_EINVAL);
    assert_null(made);
    assert_error(runtime, "lane reduce", "lane", "order");
}

static void wrong_orders_are_refused(void **state) {
    (void)state;
    fixture f = open_fixture(PST_LANE_WORKER);
    pst_runtime *other = open_runtime(0);
    pst_lane *foreign = open_lane_in_order(other, "gather", PST_LANE_PUMPED);
    assert_refused(f.runtime, (pst_lane_options){.order_with = f.gather});
    assert_refused(f.runtime,
                   (pst_lane_options){.order = PST_LANE_BY_SUBMISSION, .order_with = f.free_lane});
    assert_refused(f.runtime,
                   (pst_lane_options){.order = PST_LANE_BY_SUBMISSION, .order_with = foreign});
    assert_refused(f.runtime, (pst_lane_options){.mode = PST_LANE_PUMPED,
                                                 .order = PST_LANE_BY_SUBMISSION,
                                                 .order_with = f.gather});
    assert_refused(f.runtime, (pst_lane_options){.order = PST_LANE_BY_SUBMISSION,
                                                 .order_with = open_lane_in_order(
                                                     f.runtime, "compute", PST_LANE_BORROWED)});
    pst_runtime_destroy(other);
    pst_runtime_destroy(f.runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tasks_of_two_lanes_launch_in_the_order_of_adding),
        cmocka_unit_test(a_task_of_the_other_lane_may_go_on_meanwhile),
        cmocka_unit_test(launches_of_a_graph_and_several_graphs_keep_one_order),
        cmocka_unit_test(streams_get_their_work_in_the_order_of_adding),
        cmocka_unit_test(a_cycle_through_the_order_is_named),
        cmocka_unit_test(a_wait_that_times_out_names_what_holds_the_order_up),
        cmocka_unit_test(what_is_canceled_does_not_hold_the_order_up),
        cmocka_unit_test(wrong_orders_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
