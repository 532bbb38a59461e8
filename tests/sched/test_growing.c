/* Growing graphs: tasks start when they are added; late edges; handles; gates. */
#include "sched/graph.h"
#include "tests/sched/harness.h"

typedef struct fixture {
    pst_runtime *runtime;
    pst_lane *lane, *other;
    pst_graph *graph;
    pst_launch launch;
    trail ran;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    f->runtime = open_runtime(20000);
    f->lane = open_lane(f->runtime, "reduce", PST_LANE_PUMPED);
    f->other = open_lane(f->runtime, "gather", PST_LANE_PUMPED);
    f->graph = open_graph(f->runtime, PST_GRAPH_GROWING, "eager");
    f->launch = (pst_launch){f->graph, 0};
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    pst_runtime_destroy(f->runtime);
    free(f);
    return 0;
}

static void a_task_starts_without_a_launch(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_status(pst_task_test(f->launch, ta), PST_PENDING);
    pump(f->runtime);
    assert_ok(pst_task_test(f->launch, ta));
    assert_int_equal(a.callbacks, 1);
    pst_task_release(ta);
}

static void an_edge_to_a_task_that_has_ended_is_no_wait(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pump(f->runtime);
    pst_task tb = add_step(f->graph, f->other, &b, ta, NO_TASK, NO_TASK);
    pst_task_release(ta);
    assert_ok(pst_task_wait(f->launch, tb, NULL));
    pst_task_release(tb);
    assert_ran(&f->ran, "a", "b");
}

static void an_edge_to_a_pending_task_is_a_wait(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a", .asks = 3}, b = {.where = &f->ran, .name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_run_once(f->runtime, NULL));
    pst_task tb = add_step(f->graph, f->other, &b, ta, NO_TASK, NO_TASK);
    (void)pst_run_once(f->runtime, NULL);
    assert_int_equal(b.runs, 0);
    pump(f->runtime);
    assert_int_equal(b.runs, 1);
    pst_task_release(ta);
    pst_task_release(tb);
}

static void an_edge_to_a_task_that_failed_cancels(void **state) {
    fixture *f = *state;
    step a = {.name = "a", .result = PST_EIO}, b = {.name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pump(f->runtime);
    pst_task tb = add_step(f->graph, f->lane, &b, ta, NO_TASK, NO_TASK);
    pump(f->runtime);
    assert_status(pst_task_test(f->launch, tb), PST_EIO);
    assert_int_equal(b.runs, 0);
    assert_int_equal(b.reported, PST_ESKIPPED);
    assert_status(pst_launch_wait(f->launch), PST_EIO);
    pst_task_release(ta);
    pst_task_release(tb);
}

static void a_task_may_have_many_predecessors(void **state) {
    fixture *f = *state;
    step many[40], last = {.where = &f->ran, .name = "last"};
    pst_task tasks[40];
    for (size_t i = 0; i < 40; i++) {
        many[i] = (step){.where = &f->ran, .name = "one"};
        tasks[i] =
            add_step(f->graph, i % 2 ? f->lane : f->other, &many[i], NO_TASK, NO_TASK, NO_TASK);
    }
    pst_task_options options = step_options(&last, f->lane);
    options.after = tasks;
    options.after_count = 40;
    assert_ok(pst_graph_add(f->graph, &options, NULL));
    for (size_t i = 0; i < 40; i++)
        pst_task_release(tasks[i]);
    pump(f->runtime);
    assert_int_equal(f->ran.length, 41);
    assert_string_equal(f->ran.names[40], "last");
}

static void tasks_without_a_handle_are_recycled(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    const pst_task_options options = step_options(&a, f->lane);
    for (int i = 0; i < 1000; i++) {
        assert_ok(pst_graph_add(f->graph, &options, NULL));
        pump(f->runtime);
    }
    assert_int_equal(a.callbacks, 1000);
}

typedef struct chain {
    fixture *f;
    int left;
} chain;

static void add_next(void *argument, pst_status status) {
    chain *rest = argument;
    assert_int_equal(status, PST_OK);
    if (rest->left-- == 0) return;
    const pst_task_options options = {.size = sizeof options,
                                      .name = "next",
                                      .lane = rest->f->lane,
                                      .done = add_next,
                                      .done_argument = rest};
    assert_ok(pst_graph_add(rest->f->graph, &options, NULL));
}

static void a_callback_may_add_the_next_task(void **state) {
    fixture *f = *state;
    chain rest = {f, 200};
    add_next(&rest, PST_OK);
    pump(f->runtime);
    assert_int_equal(rest.left, -1);
    assert_ok(pst_launch_wait(f->launch));
}

static void an_edge_between_graphs_is_refused(void **state) {
    fixture *f = *state;
    pst_graph *second = open_graph(f->runtime, PST_GRAPH_GROWING, "second");
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_step(second, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task_options options = step_options(&b, f->lane);
    options.after = &ta;
    options.after_count = 1;
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    assert_error(f->runtime, "graph eager", "task b", "another graph");
    pump(f->runtime);
    assert_int_equal(b.callbacks, 0);
    pst_task_release(ta);
}

static void it_is_neither_sealed_nor_launched(void **state) {
    fixture *f = *state;
    assert_status(pst_graph_seal(f->graph), PST_ESTATE);
    assert_status(pst_graph_launch(f->graph, NULL), PST_ESTATE);
    assert_status(pst_graph_add_edge(f->graph, NO_TASK, NO_TASK), PST_ESTATE);
    assert_error(f->runtime, "graph eager");
}

static void a_gate_holds_its_successors_back(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    pst_task ta = add_step(f->graph, f->lane, &a, gate, NO_TASK, NO_TASK);
    int idle = 1;
    assert_status(pst_run_once(f->runtime, &idle), PST_PENDING);
    assert_int_equal(idle, 0);
    assert_ok(pst_gate_open(f->launch, gate, NULL));
    assert_status(pst_gate_open(f->launch, gate, NULL), PST_ESTATE);
    assert_error(f->runtime, "gate gate", "open already");
    pump(f->runtime);
    assert_int_equal(a.runs, 1);
    pst_task_release(gate);
    pst_task_release(ta);
    assert_ok(pst_graph_destroy(f->graph));
}

static void cancel_ends_all_that_is_not_launched(void **state) {
    fixture *f = *state;
    step a = {.name = "a", .asks = 4}, b = {.name = "b"}, c = {.name = "c"}, d = {.name = "d"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_run_once(f->runtime, NULL));
    pst_task tb = add_step(f->graph, f->other, &b, ta, NO_TASK, NO_TASK);
    pst_task tc = add_step(f->graph, f->other, &c, gate, NO_TASK, NO_TASK);
    assert_ok(pst_launch_cancel(f->launch));
    assert_status(pst_launch_wait(f->launch), PST_ECANCELED);
    assert_int_equal(a.reported, PST_OK);
    assert_int_equal(b.reported, PST_ECANCELED);
    assert_int_equal(c.reported, PST_ECANCELED);
    pst_task td = add_step(f->graph, f->other, &d, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_launch_wait(f->launch)); /* what was added after the cancel had its effect */
    assert_int_equal(d.reported, PST_OK);
    pst_task_release(ta);
    pst_task_release(tb);
    pst_task_release(tc);
    pst_task_release(td);
    pst_task_release(gate);
}

static void an_event_of_a_task_tells_of_its_end(void **state) {
    fixture *f = *state;
    pst_device *host = pst_runtime_host(f->runtime);
    step a = {.name = "a", .asks = 2};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_null(pst_task_event(f->launch, ta));
    assert_ok(pst_run_once(f->runtime, NULL));
    pst_event *event = pst_task_event(f->launch, ta);
    assert_non_null(event);
    assert_status(host->ops->event_query(host, event), PST_PENDING);
    pump(f->runtime);
    assert_ok(host->ops->event_query(host, event));
    assert_ok(host->ops->event_query(host, pst_task_event(f->launch, ta)));
    pst_task_release(ta);
}

static void a_task_waits_for_its_after_events(void **state) {
    fixture *f = *state;
    step lease = {.name = "lease", .asks = 3}, a = {.name = "a"};
    pst_task user = add_step(f->graph, f->lane, &lease, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_run_once(f->runtime, NULL));
    pst_event *event = pst_task_event(f->launch, user);
    pst_task_options options = step_options(&a, f->other);
    options.after_events = &event;
    options.after_event_count = 1;
    assert_ok(pst_graph_add(f->graph, &options, NULL));
    for (int i = 0; i < 2; i++) {
        (void)pst_run_once(f->runtime, NULL);
        assert_int_equal(a.runs, 0);
    }
    pump(f->runtime);
    assert_int_equal(a.runs, 1);
    pst_task_release(user);
}

static void more_room_than_can_be_counted_is_refused(void **state) {
    fixture *f = *state;
    const size_t block = (sizeof(pst__grown) + 63) / 64 * 64;
    const size_t rooms[] = {SIZE_MAX, SIZE_MAX / block + 2}; /* wraps to little */
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) {
        const pst_runtime_options options = {.size = sizeof options, .task_capacity = rooms[i]};
        pst_runtime *runtime;
        assert_ok(pst_runtime_create(&options, &runtime));
        step a = {.where = &f->ran, .name = "a"};
        const pst_task_options task = step_options(&a, open_lane(runtime, "l", PST_LANE_PUMPED));
        pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
        assert_status(pst_graph_add(graph, &task, NULL), PST_ENOMEM);
        assert_error(runtime, "graph g", "task a");
        pst_runtime_destroy(runtime);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_task_starts_without_a_launch),
        TEST(an_edge_to_a_task_that_has_ended_is_no_wait),
        TEST(an_edge_to_a_pending_task_is_a_wait),
        TEST(an_edge_to_a_task_that_failed_cancels),
        TEST(a_task_may_have_many_predecessors),
        TEST(tasks_without_a_handle_are_recycled),
        TEST(a_callback_may_add_the_next_task),
        TEST(an_edge_between_graphs_is_refused),
        TEST(it_is_neither_sealed_nor_launched),
        TEST(a_gate_holds_its_successors_back),
        TEST(cancel_ends_all_that_is_not_launched),
        TEST(an_event_of_a_task_tells_of_its_end),
        TEST(a_task_waits_for_its_after_events),
        TEST(more_room_than_can_be_counted_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
