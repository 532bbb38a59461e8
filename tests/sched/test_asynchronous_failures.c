/* What fails on an asynchronous device: a launch, what is launched, an event. */
#include "tests/sched/queue_fixture.h"

static void a_launch_that_fails_cancels_what_is_behind_it(void **state) {
    fixture *f = *state;
    step a = {.name = "a", .result = PST_EDEVICE}, b = {.name = "b"}, c = {.name = "c"};
    pst_task ta = add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->reduce, &b, ta, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->reduce, &c, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    finish(f);
    assert_status(pst_launch_wait(launch), PST_EDEVICE);
    assert_int_equal(a.reported, PST_EDEVICE);
    assert_int_equal(b.reported, PST_ESKIPPED);
    assert_int_equal(c.reported, PST_OK);
    assert_int_equal(b.runs, 0);
    assert_ok(pst_runtime_status(f->runtime));
}

static void a_failure_after_the_launch_poisons_the_runtime(void **state) {
    fixture *f = *state;
    step a = {.name = "broken"}, b = {.name = "b"};
    pst_task ta = add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->host, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    f->queue.fail_query = PST_EDEVICE;
    settle(f);
    assert_status(pst_runtime_status(f->runtime), PST_EDEVICE);
    assert_error(f->runtime, "rank 3", "lane gather", "task broken");
    assert_int_equal(a.reported, PST_EDEVICE);
    assert_int_equal(b.reported, PST_ESKIPPED);
    assert_int_equal(a.callbacks + b.callbacks, 2);
    assert_status(pst_launch_wait(launch), PST_EDEVICE);
    assert_status(pst_graph_launch(f->graph, NULL), PST_EDEVICE);
}

static void what_a_device_answers_need_not_be_a_status(void **state) {
    fixture *f = *state;
    step a = {.name = "broken"}, b = {.name = "b"};
    const pst_task ta = add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->host, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    f->queue.fail_query = (pst_status)-1000;
    settle(f);
    assert_status(pst_runtime_status(f->runtime), PST_EINVAL);
    assert_int_equal(a.reported, PST_EINVAL);
    assert_int_equal(b.reported, PST_ESKIPPED);
}

static void an_event_that_cannot_be_recorded_poisons_the_runtime(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->reduce, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    f->queue.fail_record = PST_EDEVICE;
    settle(f);
    assert_status(pst_runtime_status(f->runtime), PST_EDEVICE);
    assert_int_equal(a.callbacks, 1);
    assert_int_equal(b.callbacks, 1);
    assert_int_equal(b.runs, 0);
}

static void no_event_at_seal_leaves_the_graph_unsealed(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    (void)add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    f->queue.fail_create = PST_ENOMEM;
    assert_status(pst_graph_seal(f->graph), PST_ENOMEM);
    f->queue.fail_create = PST_OK;
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    finish(f);
    assert_int_equal(a.callbacks, 1);
}

static void no_event_for_an_added_task_adds_nothing(void **state) {
    fixture *f = *state;
    pst_graph *graph = NULL;
    step a = {.name = "a"};
    assert_ok(pst_graph_create(f->runtime, PST_GRAPH_GROWING, "growing", &graph));
    const pst_task_options options = step_options(&a, f->gather);
    f->queue.fail_create = PST_EDEVICE;
    assert_status(pst_graph_add(graph, &options, NULL), PST_EDEVICE);
    assert_error(f->runtime, "growing", "task a", "device error");
    f->queue.fail_create = PST_OK;
    assert_ok(pst_graph_add(graph, &options, NULL));
    finish(f);
    assert_int_equal(a.callbacks, 1);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_launch_that_fails_cancels_what_is_behind_it),
        TEST(a_failure_after_the_launch_poisons_the_runtime),
        TEST(what_a_device_answers_need_not_be_a_status),
        TEST(an_event_that_cannot_be_recorded_poisons_the_runtime),
        TEST(no_event_at_seal_leaves_the_graph_unsealed),
        TEST(no_event_for_an_added_task_adds_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
