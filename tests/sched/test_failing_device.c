/* A device that fails in one call. */
#include "tests/sched/queue_device.h"

typedef struct fixture {
    queue_device queue;
    pst_runtime *runtime;
    pst_lane *lane, *second, *caller;
    pst_graph *graph;
} fixture;

static void open_with(fixture *f, uint64_t deadline_ms) {
    f->runtime = open_runtime(deadline_ms);
    f->lane = open_queue_lane(f->runtime, &f->queue, "gather", PST_LANE_PUMPED);
    f->second = open_queue_lane(f->runtime, &f->queue, "reduce", PST_LANE_PUMPED);
    f->caller = open_queue_lane(f->runtime, &f->queue, "compute", PST_LANE_BORROWED);
    f->graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
}

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    queue_open(&f->queue);
    open_with(f, 20000);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    f->queue.fail_record = PST_OK;
    queue_end(&f->queue, f->runtime);
    free(f);
    return 0;
}

static pst_status refuse_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    (void)device, (void)stream, (void)event;
    return PST_EDEVICE;
}

static const char *last_text(pst_device *device) {
    (void)device;
    return "the bus has stopped";
}

/* Nobody asks for its end but the launch itself. */
static pst_task add_quiet(fixture *f, step *self) {
    pst_task task;
    pst_task_options options = step_options(self, f->lane);
    options.done = NULL;
    assert_ok(pst_graph_add(f->graph, &options, &task));
    return task;
}

static pst_launch start(fixture *f) {
    pst_launch launch;
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &launch));
    return launch;
}

static void turns(fixture *f) {
    for (int i = 0; i < 4; i++)
        (void)pst_run_once(f->runtime, NULL);
}

static void a_wait_that_is_refused_fails_the_task_and_gives_the_devices_reason(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    const pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->second, &b, ta, NO_TASK, NO_TASK);
    f->queue.ops.stream_wait = refuse_wait;
    f->queue.ops.error_text = last_text;
    (void)start(f);
    turns(f);
    queue_drain(&f->queue);
    pump(f->runtime);
    assert_int_equal(b.runs, 0);
    assert_status(b.reported, PST_EDEVICE);
    assert_status(a.reported, PST_OK);
    assert_error(f->runtime, "task b", "lane reduce", "the bus has stopped");
    assert_ok(pst_runtime_status(f->runtime));
}

static void without_an_event_for_the_last_tasks_the_runtime_is_poisoned(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    (void)add_quiet(f, &a);
    const pst_launch launch = start(f);
    f->queue.fail_record = PST_EDEVICE;
    turns(f);
    assert_status(pst_runtime_status(f->runtime), PST_EDEVICE);
    assert_status(pst_launch_wait(launch), PST_EDEVICE);
    pump(f->runtime);
}

static void a_late_question_that_gets_no_event_says_so(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    const pst_task task = add_quiet(f, &a);
    const pst_launch launch = start(f);
    turns(f);
    f->queue.fail_record = PST_EDEVICE;
    assert_null(pst_task_event(launch, task));
    assert_status(pst_task_wait(launch, task, f->caller), PST_EDEVICE);
    assert_error(f->runtime, "lane compute", "task a", "no event");
    f->queue.fail_record = PST_OK;
    assert_ok(pst_task_wait(launch, task, f->caller));
    queue_drain(&f->queue);
    pump(f->runtime);
}

/* What a poisoned runtime has launched is given the deadline's time to end, and no more. */
static void what_never_ends_on_the_device_is_abandoned(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_runtime_destroy(f->runtime);
    open_with(f, 20);
    (void)add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)start(f);
    turns(f);
    pst_runtime_poison(f->runtime, PST_EPEER, "a peer is gone");
    pump(f->runtime);
    assert_int_equal(a.callbacks, 1);
    assert_status(a.reported, PST_EPEER);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(a_wait_that_is_refused_fails_the_task_and_gives_the_devices_reason),
        TEST(without_an_event_for_the_last_tasks_the_runtime_is_poisoned),
        TEST(a_late_question_that_gets_no_event_says_so),
        TEST(what_never_ends_on_the_device_is_abandoned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
