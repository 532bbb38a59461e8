/* A device with streams of its own: what is launched is not done, order is the streams' business.
 */
#include "tests/sched/queue_fixture.h"

#include <penstock/trace.h>

static void tasks_are_launched_before_their_predecessors_are_done(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    pst_task tb = add_quiet(f, f->graph, f->reduce, &b, ta, NO_TASK);
    pst_task tc = add_quiet(f, f->graph, f->gather, &c, tb, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    settle(f);
    assert_ran(&f->launched, "a", "b", "c");
    assert_int_equal(f->ran.length, 0);
    assert_status(pst_task_test(launch, ta), PST_PENDING);
    queue_drain(&f->queue);
    settle(f);
    assert_ran(&f->ran, "a", "b", "c");
    assert_ok(pst_task_test(launch, tc));
    assert_ok(pst_launch_wait(launch));
}

static void an_edge_within_a_lane_costs_no_event_and_no_wait(void **state) {
    fixture *f = *state;
    step steps[8];
    pst_task before = NO_TASK;
    for (size_t i = 0; i < 8; i++) {
        steps[i] = (step){.name = "chain"};
        before = add_quiet(f, f->graph, f->gather, &steps[i], before, NO_TASK);
    }
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    settle(f);
    assert_int_equal(f->queue.works, 8);
    assert_int_equal(f->queue.waits, 0);
    assert_int_equal(f->queue.recorded, 1); /* one behind the last, to see the end of them all */
    finish(f);
}

static void an_edge_between_lanes_costs_one_record_a_task_and_one_wait_an_edge(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c"}, d = {.name = "d"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    pst_task tb = add_quiet(f, f->graph, f->gather, &b, NO_TASK, NO_TASK);
    (void)add_quiet(f, f->graph, f->reduce, &c, ta, tb);
    (void)add_quiet(f, f->graph, f->reduce, &d, ta, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    settle(f);
    assert_int_equal(f->queue.works, 4);
    assert_int_equal(f->queue.waits, 3);
    assert_int_equal(f->queue.recorded, 2 + 1); /* a, b, and the end of the reduce lane */
    finish(f);
}

static void the_streams_keep_the_order_between_lanes(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    (void)add_quiet(f, f->graph, f->reduce, &b, ta, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    settle(f);
    while (queue_step(&f->queue, pst_lane_stream(f->reduce)))
        assert_int_equal(f->ran.length, 0);
    queue_drain(&f->queue);
    assert_ran(&f->ran, "a", "b");
    finish(f);
}

static void replaying_creates_no_events(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    (void)add_quiet(f, f->graph, f->reduce, &b, ta, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    const size_t created = f->queue.created_events;
    for (int k = 0; k < 20; k++) {
        assert_ok(pst_graph_launch(f->graph, NULL));
        finish(f);
    }
    assert_int_equal(f->queue.created_events, created);
    assert_int_equal(f->ran.length, 40);
}

static void the_next_launch_may_begin_while_tasks_are_in_flight(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    (void)add_quiet(f, f->graph, f->reduce, &b, ta, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch first, second;
    assert_ok(pst_graph_launch(f->graph, &first));
    settle(f);
    assert_ok(pst_graph_launch(f->graph, &second));
    assert_status(pst_task_test(first, ta), PST_PENDING);
    finish(f);
    assert_ok(pst_task_test(first, ta));
    assert_ok(pst_launch_wait(second));
    assert_ran(&f->ran, "a", "b", "a", "b");
}

static void a_task_in_flight_ends_before_the_next_launch_of_it_is_canceled(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    const pst_task_options options = step_options(&a, f->gather);
    pst_task task;
    pst_launch first, second;
    assert_ok(pst_graph_add(f->graph, &options, &task));
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &first));
    turns(f, 2);
    assert_ok(pst_graph_launch(f->graph, &second));
    assert_ok(pst_launch_cancel(second));
    turns(f, 2);
    assert_int_equal(a.callbacks, 0);
    queue_drain(&f->queue);
    assert_ok(pst_launch_wait(first));
    assert_status(pst_launch_wait(second), PST_ECANCELED);
    assert_int_equal(a.callbacks, 2);
    assert_int_equal(a.runs, 1);
}

static void only_the_oldest_event_of_a_lane_is_polled(void **state) {
    fixture *f = *state;
    step steps[6];
    for (size_t i = 0; i < 6; i++) {
        steps[i] = (step){.name = "s"};
        (void)add_step(f->graph, f->gather, &steps[i], NO_TASK, NO_TASK, NO_TASK);
    }
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    settle(f); /* the last turn finds nothing more to launch */
    const size_t before = f->queue.queries;
    turns(f, 1);
    assert_int_equal(f->queue.queries, before + 1);
    finish(f);
    for (size_t i = 0; i < 6; i++)
        assert_int_equal(steps[i].callbacks, 1);
}

static void a_callback_comes_when_the_device_is_done(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    (void)add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    settle(f);
    assert_int_equal(a.callbacks, 0);
    queue_drain(&f->queue);
    turns(f, 1);
    assert_int_equal(a.callbacks, 1);
    assert_int_equal(a.reported, PST_OK);
}

static void a_host_task_behind_a_device_task_starts_when_that_is_done(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    pst_task tb = add_quiet(f, f->graph, f->host, &b, ta, NO_TASK);
    (void)add_quiet(f, f->graph, f->reduce, &c, tb, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    settle(f);
    assert_ran(&f->launched, "a");
    queue_drain(&f->queue);
    settle(f);
    assert_ran(&f->launched, "a", "b", "c");
    finish(f);
}

static void a_gate_makes_streams_wait_for_the_callers_stream(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, outside = {.name = "outside"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    (void)add_quiet(f, f->graph, f->gather, &a, gate, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    const pst_work work = {step_start, NULL, &outside};
    assert_ok(queue_launch(&f->queue.device, pst_lane_stream(f->compute), &work));
    assert_ok(pst_gate_open(launch, gate, f->compute));
    turns(f, 2);
    assert_int_equal(a.runs, 1); /* launched at once, behind the caller's work */
    while (queue_step(&f->queue, pst_lane_stream(f->gather)))
        assert_int_equal(f->ran.length, 0);
    finish(f);
    assert_ran(&f->ran, "outside", "a");
}

static void a_host_task_behind_a_gate_starts_when_the_callers_stream_is_there(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, outside = {.name = "outside"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    (void)add_quiet(f, f->graph, f->host, &a, gate, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    const pst_work work = {step_start, NULL, &outside};
    for (int k = 1; k <= 3; k++) {
        pst_launch launch;
        assert_ok(pst_graph_launch(f->graph, &launch));
        assert_ok(queue_launch(&f->queue.device, pst_lane_stream(f->compute), &work));
        assert_ok(pst_gate_open(launch, gate, f->compute));
        settle(f);
        assert_int_equal(a.runs, k - 1);
        finish(f);
        assert_int_equal(a.runs, k);
    }
}

/* `second` is recorded before `third` and passes after it: that it is done says nothing of that. */
static void gates_that_pass_out_of_order_end_by_their_own_events(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, outside = {.name = "outside"};
    pst_task first, second, third, key;
    pst_launch launch;
    assert_ok(pst_graph_add_gate(f->graph, "key", &key));
    assert_ok(pst_graph_add_gate(f->graph, "first", &first));
    assert_ok(pst_graph_add_gate(f->graph, "second", &second));
    assert_ok(pst_graph_add_gate(f->graph, "third", &third));
    assert_ok(pst_graph_add_edge(f->graph, key, second));
    step quiet[2] = {{.name = "quiet"}, {.name = "quiet"}};
    (void)add_quiet(f, f->graph, f->host, &quiet[0], first, NO_TASK);
    (void)add_quiet(f, f->graph, f->host, &quiet[1], second, NO_TASK);
    (void)add_quiet(f, f->graph, f->host, &a, third, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_gate_open(launch, first, f->compute));
    assert_ok(pst_gate_open(launch, second, f->compute));
    const pst_work work = {step_start, NULL, &outside};
    assert_ok(queue_launch(&f->queue.device, pst_lane_stream(f->compute), &work));
    assert_ok(pst_gate_open(launch, third, f->compute));
    assert_ok(pst_gate_open(launch, key, NULL));
    assert_true(queue_step(&f->queue, pst_lane_stream(f->compute)));
    assert_true(queue_step(&f->queue, pst_lane_stream(f->compute)));
    settle(f);
    assert_int_equal(quiet[0].runs, 1);
    assert_int_equal(a.runs, 0);
    finish(f);
    assert_int_equal(a.runs, 1);
}

static void a_growing_graphs_gate_does_the_same(void **state) {
    fixture *f = *state;
    pst_graph *growing = open_graph(f->runtime, PST_GRAPH_GROWING, "eager");
    const pst_launch launch = {growing, 0};
    step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c"}, outside = {.name = "outside"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(growing, "gate", &gate));
    pst_task ta = add_quiet(f, growing, f->gather, &a, gate, NO_TASK);
    pst_task tb = add_quiet(f, growing, f->host, &b, gate, NO_TASK);
    const pst_work work = {step_start, NULL, &outside};
    assert_ok(queue_launch(&f->queue.device, pst_lane_stream(f->compute), &work));
    assert_ok(pst_gate_open(launch, gate, f->compute));
    pst_task tc = add_quiet(f, growing, f->reduce, &c, gate, NO_TASK); /* late, behind its event */
    settle(f);
    assert_int_equal(a.runs, 1);
    assert_int_equal(b.runs, 0);
    assert_int_equal(c.runs, 1);
    assert_int_equal(f->ran.length, 0);
    finish(f);
    assert_string_equal(f->ran.names[0], "outside");
    assert_int_equal(b.runs, 1);
    pst_task_release(gate);
    pst_task_release(ta);
    pst_task_release(tb);
    pst_task_release(tc);
    assert_ok(pst_graph_destroy(growing));
}

static void a_late_edge_of_a_growing_graph_waits_for_the_event(void **state) {
    fixture *f = *state;
    pst_graph *growing = open_graph(f->runtime, PST_GRAPH_GROWING, "eager");
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_quiet(f, growing, f->gather, &a, NO_TASK, NO_TASK);
    turns(f, 1);
    assert_int_equal(a.runs, 1);
    pst_task tb = add_quiet(f, growing, f->reduce, &b, ta, NO_TASK);
    pst_task_release(ta);
    turns(f, 1);
    assert_int_equal(b.runs, 1);
    while (queue_step(&f->queue, pst_lane_stream(f->reduce)))
        assert_int_equal(f->ran.length, 0);
    finish(f);
    assert_ran(&f->ran, "a", "b");
    pst_task_release(tb);
    assert_ok(pst_graph_destroy(growing));
}

static void streams_events_and_launch_are_all_that_the_scheduler_needs(void **state) {
    fixture *f = *state;
    const pst_device_ops *ops = &f->queue.ops;
    assert_true(ops->copy == NULL && ops->copy_2d == NULL && ops->alloc == NULL &&
                ops->free == NULL && ops->cast_scale_copy == NULL && ops->sum == NULL &&
                ops->fill == NULL && ops->event_time == NULL && ops->stream_ready == NULL &&
                ops->error_text == NULL && ops->destroy == NULL);
    assert_ok(pst_trace_start(f->runtime)); /* which asks devices for times */
    pst_graph *growing = open_graph(f->runtime, PST_GRAPH_GROWING, "eager");
    step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, gate, NO_TASK);
    pst_task tb = add_quiet(f, f->graph, f->reduce, &b, ta, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_gate_open(launch, gate, f->compute));
    assert_ok(pst_task_wait(launch, tb, f->compute)); /* its stream waits */
    pst_task tc = add_quiet(f, growing, f->gather, &c, NO_TASK, NO_TASK);
    assert_non_null(pst_task_event(launch, tb));
    finish(f);
    assert_int_equal(f->ran.length, 3);
    assert_ok(pst_task_test(launch, tb));
    pst_task_release(tc);
    assert_ok(pst_trace_stop(f->runtime));
    f->queue.fail_query = PST_EIO; /* without an error_text the status alone is named */
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_gate_open(launch, gate, f->compute));
    assert_status(pst_launch_wait(launch), PST_EIO);
}

static void workers_see_the_end_of_what_they_launched(void **state) {
    fixture *f = *state;
    pst_lane *own = open_queue_lane(f->runtime, &f->queue, "own", PST_LANE_WORKER);
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_step(f->graph, own, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, own, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    while (callbacks_of(&b) == 0) {
        queue_drain(&f->queue);
        yield_briefly();
    }
    assert_int_equal(callbacks_of(&a), 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(tasks_are_launched_before_their_predecessors_are_done),
        TEST(an_edge_within_a_lane_costs_no_event_and_no_wait),
        TEST(an_edge_between_lanes_costs_one_record_a_task_and_one_wait_an_edge),
        TEST(the_streams_keep_the_order_between_lanes),
        TEST(replaying_creates_no_events),
        TEST(the_next_launch_may_begin_while_tasks_are_in_flight),
        TEST(a_task_in_flight_ends_before_the_next_launch_of_it_is_canceled),
        TEST(only_the_oldest_event_of_a_lane_is_polled),
        TEST(a_callback_comes_when_the_device_is_done),
        TEST(a_host_task_behind_a_device_task_starts_when_that_is_done),
        TEST(a_gate_makes_streams_wait_for_the_callers_stream),
        TEST(a_host_task_behind_a_gate_starts_when_the_callers_stream_is_there),
        TEST(gates_that_pass_out_of_order_end_by_their_own_events),
        TEST(a_growing_graphs_gate_does_the_same),
        TEST(a_late_edge_of_a_growing_graph_waits_for_the_event),
        TEST(streams_events_and_launch_are_all_that_the_scheduler_needs),
        TEST(workers_see_the_end_of_what_they_launched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
