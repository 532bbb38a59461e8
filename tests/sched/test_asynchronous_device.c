/* A device with streams of its own: what is launched is not done, order is the streams' business.
 */
#include "tests/sched/queue_device.h"

typedef struct fixture {
    queue_device queue;
    pst_runtime *runtime;
    pst_lane *gather, *reduce, *compute, *host;
    pst_graph *graph;
    trail launched, ran;
} fixture;

static void note(void *context, void *argument) {
    fixture *f = context;
    f->ran.names[f->ran.length++] = ((step *)argument)->name;
}

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    queue_open(&f->queue);
    f->queue.ran = note;
    f->queue.ran_context = f;
    f->runtime = open_runtime(20000);
    f->gather = open_queue_lane(f->runtime, &f->queue, "gather", PST_LANE_PUMPED);
    f->reduce = open_queue_lane(f->runtime, &f->queue, "reduce", PST_LANE_PUMPED);
    f->compute = open_queue_lane(f->runtime, &f->queue, "compute", PST_LANE_BORROWED);
    f->host = open_lane(f->runtime, "host", PST_LANE_PUMPED);
    f->graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    f->queue.fail_query = f->queue.fail_record = PST_OK;
    queue_drain(&f->queue);
    pst_runtime_destroy(f->runtime);
    assert_int_equal(f->queue.live_events, 0);
    queue_close(&f->queue);
    free(f);
    return 0;
}

static pst_task add_quiet(fixture *f, pst_graph *graph, pst_lane *lane, step *self, pst_task a,
                          pst_task b) {
    const pst_task given[] = {a, b};
    pst_task after[2], task;
    pst_task_options options = step_options(self, lane);
    self->where = &f->launched;
    options.done = NULL;
    for (size_t i = 0; i < 2; i++)
        if (given[i].graph != NULL) after[options.after_count++] = given[i];
    options.after = after;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

static void turns(fixture *f, int count) {
    for (int i = 0; i < count; i++)
        (void)pst_run_once(f->runtime, NULL);
}

static void finish(fixture *f) {
    int idle = 0;
    while (!idle) {
        queue_drain(&f->queue);
        (void)pst_run_once(f->runtime, &idle);
    }
}

static void tasks_are_launched_before_their_predecessors_are_done(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c"};
    pst_task ta = add_quiet(f, f->graph, f->gather, &a, NO_TASK, NO_TASK);
    pst_task tb = add_quiet(f, f->graph, f->reduce, &b, ta, NO_TASK);
    pst_task tc = add_quiet(f, f->graph, f->gather, &c, tb, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    turns(f, 3);
    assert_ran(&f->launched, "a", "b", "c");
    assert_int_equal(f->ran.length, 0);
    assert_status(pst_task_test(launch, ta), PST_PENDING);
    queue_drain(&f->queue);
    turns(f, 3);
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
    turns(f, 1);
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
    turns(f, 3);
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
    turns(f, 3);
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
    turns(f, 3);
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
    turns(f, 2); /* the second finds nothing more to launch */
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
    turns(f, 3);
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
    turns(f, 3);
    assert_ran(&f->launched, "a");
    queue_drain(&f->queue);
    turns(f, 3);
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
        turns(f, 3);
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
    turns(f, 3);
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
    turns(f, 3);
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

static void a_wait_that_comes_before_the_launch_is_counted_as_late(void **state) {
    fixture *f = *state;
    step a = {.name = "a"};
    pst_runtime_stats stats;
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
    assert_int_equal(b.reported, PST_EDEVICE);
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
    turns(f, 4);
    assert_status(pst_runtime_status(f->runtime), PST_EDEVICE);
    assert_error(f->runtime, "rank 3", "lane gather", "task broken");
    assert_int_equal(a.reported, PST_EDEVICE);
    assert_int_equal(b.reported, PST_EDEVICE);
    assert_int_equal(a.callbacks + b.callbacks, 2);
    assert_status(pst_launch_wait(launch), PST_EDEVICE);
    assert_status(pst_graph_launch(f->graph, NULL), PST_EDEVICE);
}

static void an_event_that_cannot_be_recorded_poisons_the_runtime(void **state) {
    fixture *f = *state;
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task ta = add_step(f->graph, f->gather, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->reduce, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    f->queue.fail_record = PST_EDEVICE;
    turns(f, 4);
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
        TEST(a_wait_gives_the_stream_the_wait_and_returns),
        TEST(a_wait_that_comes_before_the_launch_is_counted_as_late),
        TEST(a_wait_that_nobody_foresaw_gets_its_event_late),
        TEST(a_streams_first_waits_are_its_after_events),
        TEST(a_late_edge_of_a_growing_graph_waits_for_the_event),
        TEST(a_launch_that_fails_cancels_what_is_behind_it),
        TEST(a_failure_after_the_launch_poisons_the_runtime),
        TEST(an_event_that_cannot_be_recorded_poisons_the_runtime),
        TEST(no_event_at_seal_leaves_the_graph_unsealed),
        TEST(no_event_for_an_added_task_adds_nothing),
        TEST(workers_see_the_end_of_what_they_launched),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
