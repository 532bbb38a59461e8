/* Who waits for an asynchronous device's tasks, and what its streams wait for. */
#include "tests/sched/queue_fixture.h"

static void a_wait_gives_the_stream_the_wait_and_returns(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, after = {.name = "after"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    assert_ok(pst_graph_outer_wait(f->graph, ta));
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_task_wait(launch, ta, f->compute));
    assert_int_equal(f->ran.length, 0); /* launched by the waiting thread itself, and not done */
    const pst_work work = {step_start, NULL, &after};
    assert_ok(queue_launch(&f->queue.device, pst_lane_stream(f->compute), &work));
    while (queue_step(&f->queue, pst_lane_stream(f->compute)))
        fail_msg("the stream did not wait");
    finish(f);
    assert_ran(&f->ran, "a", "after");
}

static void a_wait_for_the_launch_ends_with_that(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, work = {.name = "work"};
    pst_launch launch;
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    pst_task on_host = add_quiet(f, f->graph, f->host, &work, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_task_wait_launch(launch, ta));
    assert_status(pst_task_test(launch, ta), PST_PENDING);
    assert_int_equal(f->ran.length, 0);
    assert_ok(pst_task_wait_launch(launch, on_host));
    assert_int_equal(work.runs, 1);
    assert_ok(pst_task_test(launch, on_host));
    assert_status(pst_task_wait_launch((pst_launch){NULL, 0}, ta), PST_EINVAL);
    finish(f);
}

static void a_wait_that_comes_before_the_launch_is_counted_as_late(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_runtime_stats stats = {.size = sizeof stats};
    pst_launch launch;
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    for (uint64_t late = 0; late < 2; late++) {
        assert_ok(pst_graph_launch(f->graph, &launch));
        if (late == 0) turns(f, 1);
        assert_ok(pst_task_wait(launch, ta, f->compute));
        pst_runtime_get_stats(f->runtime, &stats);
        assert_int_equal(stats.late_launches, late);
        assert_int_equal(stats.late_launch_ns > 0, late);
        finish(f);
    }
}

static void a_wait_that_nobody_foresaw_gets_its_event_late(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_null(pst_task_event(launch, ta));
    turns(f, 1);
    pst_event *event = pst_task_event(launch, ta);
    assert_non_null(event);
    assert_status(queue_event_query(&f->queue.device, event), PST_PENDING);
    finish(f);
    assert_ok(queue_event_query(&f->queue.device, event));
}

static void a_gates_event_is_that_of_this_launchs_opening(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_launch launch;
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    (void)add_quiet(f, f->graph, f->gather, &a, gate, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_null(pst_task_event(launch, gate));
    assert_ok(pst_gate_open(launch, gate, f->compute));
    pst_event *event = pst_task_event(launch, gate);
    assert_non_null(event);
    assert_status(queue_event_query(&f->queue.device, event), PST_PENDING);
    finish(f);
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_null(pst_task_event(launch, gate)); /* not open yet */
    assert_ok(pst_gate_open(launch, gate, NULL));
    assert_null(pst_task_event(launch, gate)); /* nothing was recorded */
    finish(f);
}

static void a_streams_first_waits_are_its_after_events(void **state) {
    fixture *f = *state;
    step a = {.name = "a", .where = &f->launched};
    pst_event *lease;
    assert_ok(queue_event_create(&f->queue.device, 0, &lease));
    assert_ok(queue_event_record(&f->queue.device, lease, pst_lane_stream(f->compute)));
    pst_task_options options = step_options(&a, f->gather);
    options.after_events = &lease;
    options.after_event_count = 1;
    assert_ok(pst_graph_add(f->graph, &options, NULL));
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    turns(f, 1);
    assert_int_equal(a.runs, 1);
    while (queue_step(&f->queue, pst_lane_stream(f->gather)))
        fail_msg("the stream did not wait for the lease's last use");
    finish(f);
    queue_event_destroy(&f->queue.device, lease);
}

/* The worker that launches b asks which device a's event is on, while this thread takes that event.
 * A race is ThreadSanitizer's to see. */
static void a_wait_comes_beside_the_launch_of_what_is_behind(void **state) {
    fixture *f = *state;
    pst_lane *first = open_queue_lane(f->runtime, &f->queue, "first", PST_LANE_WORKER);
    pst_lane *second = open_queue_lane(f->runtime, &f->queue, "second", PST_LANE_WORKER);
    pst_graph *growing = open_graph(f->runtime, PST_GRAPH_GROWING, "eager");
    for (int round = 0; round < 300; round++) {
        step a = {.name = "a"}, b = {.name = "b"};
        const pst_task ta = add_quiet(f, growing, first, &a, NO_TASK, NO_TASK);
        const pst_task tb = add_quiet(f, growing, second, &b, ta, NO_TASK);
        assert_ok(pst_task_wait((pst_launch){growing, 0}, ta, f->compute));
        while (pst_task_test((pst_launch){growing, 0}, tb) == PST_PENDING)
            queue_drain(&f->queue);
        assert_int_equal(a.runs, 1);
        assert_int_equal(b.runs, 1);
        f->launched.length = f->ran.length = 0;
        pst_task_release(ta);
        pst_task_release(tb);
    }
    assert_ok(pst_launch_wait((pst_launch){growing, 0}));
    assert_ok(pst_graph_destroy(growing));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_wait_gives_the_stream_the_wait_and_returns),
        TEST(a_wait_for_the_launch_ends_with_that),
        TEST(a_wait_that_comes_before_the_launch_is_counted_as_late),
        TEST(a_wait_that_nobody_foresaw_gets_its_event_late),
        TEST(a_gates_event_is_that_of_this_launchs_opening),
        TEST(a_streams_first_waits_are_its_after_events),
        TEST(a_wait_comes_beside_the_launch_of_what_is_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
