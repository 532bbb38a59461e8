/* A replay on the device issues exactly the calls that its graph needs: for each task its own, one
 * record if a task on another lane follows, one wait for each edge from another lane; and to see
 * the end of what is launched, at most one record a lane at a time. */
#include "sched/cuda/cuda.h"
#include "tests/cuda/fixture.h"
#include "tests/random.h"

#define LANES 3
#define TASKS 40

typedef struct node {
    struct replay *replay;
    size_t lane, ran_at;
    int crosses; /* a task on another lane follows */
} node;

typedef struct replay {
    fixture *f;
    pst_lane *lanes[LANES], *compute;
    pst_graph *graph;
    pst_launch launch;
    node nodes[TASKS];
    unsigned char edges[TASKS][TASKS];
    size_t ran;
} replay;

static int setup_with(void **state, pst_lane_mode mode) {
    static const char *const names[LANES] = {"gather", "reduce", "copy"};
    replay *r = calloc(1, sizeof *r);
    assert_int_equal(setup((void **)&r->f), 0);
    pst_lane_options options = {.size = sizeof options, .device = r->f->device, .mode = mode};
    for (size_t i = 0; i < LANES; i++) {
        options.name = names[i];
        assert_ok(pst_lane_create(r->f->runtime, &options, &r->lanes[i]));
    }
    options.name = "compute";
    options.mode = PST_LANE_BORROWED;
    assert_ok(pst_lane_create(r->f->runtime, &options, &r->compute));
    r->graph = open_graph(r->f->runtime, PST_GRAPH_SEALED, "step");
    *state = r;
    return 0;
}

static int setup_pumped(void **state) {
    return setup_with(state, PST_LANE_PUMPED);
}

static int setup_workers(void **state) {
    return setup_with(state, PST_LANE_WORKER);
}

static int teardown_replay(void **state) {
    replay *r = *state;
    const int result = teardown((void **)&r->f);
    free(r);
    return result;
}

/* ---- the graph ---------------------------------------------------------------------- */

/* Within the stream: the fake driver runs this under its lock. */
static void CUDA_CB arrive(void *argument) {
    node *self = argument;
    self->ran_at = ++self->replay->ran;
}

static pst_status start(void *argument, pst_stream *stream) {
    const node *self = argument;
    pst__cuda *cuda = pst__cuda_of(self->replay->f->device);
    return pst__cuda_call(cuda, cuLaunchHostFunc, (pst_cuda_stream(stream), arrive, argument),
                          "a test");
}

static pst_task add(replay *r, size_t index, size_t lane, const pst_task *after, size_t count) {
    pst_task task;
    r->nodes[index] = (node){.replay = r, .lane = lane};
    const pst_task_options options = {.size = sizeof options,
                                      .name = "task",
                                      .lane = r->lanes[lane],
                                      .work = {start, NULL, &r->nodes[index]},
                                      .after = after,
                                      .after_count = count};
    assert_ok(pst_graph_add(r->graph, &options, &task));
    return task;
}

static void add_random_tasks(replay *r, uint64_t *seed) {
    pst_task tasks[TASKS], after[3];
    for (size_t i = 0; i < TASKS; i++) {
        size_t count = 0;
        const size_t lane = random_below(seed, LANES);
        while (i > 0 && count < 3 && random_below(seed, 3) > 0) {
            const size_t from = random_below(seed, (uint32_t)i);
            if (r->edges[from][i]) continue;
            r->edges[from][i] = 1;
            after[count++] = tasks[from];
            if (r->nodes[from].lane != lane) r->nodes[from].crosses = 1;
        }
        tasks[i] = add(r, i, lane, after, count);
    }
}

typedef struct needs {
    size_t records, waits[LANES], all_waits;
} needs;

static needs needs_of(const replay *r) {
    needs needed = {0};
    for (size_t i = 0; i < TASKS; i++) {
        needed.records += (size_t)r->nodes[i].crosses;
        for (size_t from = 0; from < i; from++)
            if (r->edges[from][i] && r->nodes[from].lane != r->nodes[i].lane) {
                needed.waits[r->nodes[i].lane]++;
                needed.all_waits++;
            }
    }
    return needed;
}

static void assert_order(const replay *r) {
    for (size_t to = 0; to < TASKS; to++)
        for (size_t from = 0; from < to; from++)
            if (r->edges[from][to]) assert_true(r->nodes[from].ran_at < r->nodes[to].ran_at);
}

/* ---- replays ------------------------------------------------------------------------ */

/* Returns the turns that it took: the time of a turn is bounded, and this machine may be slow. */
static size_t pump_until_launched(replay *r) {
    size_t turns = 0;
    for (int i = 0; i < 10 * TASKS; i++) {
        const size_t before = fake_cuda_calls("cuLaunchHostFunc");
        (void)pst_run_once(r->f->runtime, NULL);
        turns += fake_cuda_calls("cuLaunchHostFunc") > before;
    }
    assert_int_equal(fake_cuda_calls("cuLaunchHostFunc"), TASKS);
    return turns;
}

/* Nothing ends while the tasks are launched, so each lane has at most one record for its end. */
static void assert_calls(const replay *r) {
    const needs needed = needs_of(r);
    const size_t records = fake_cuda_calls("cuEventRecord");
    assert_in_range(records, needed.records, needed.records + LANES);
    assert_int_equal(fake_cuda_calls("cuStreamWaitEvent"), needed.all_waits);
    for (size_t i = 0; i < LANES; i++) {
        const CUstream stream = pst_cuda_stream(pst_lane_stream(r->lanes[i]));
        assert_int_equal(fake_cuda_calls_on("cuStreamWaitEvent", stream), needed.waits[i]);
    }
    /* And nothing else but questions. */
    assert_int_equal(fake_cuda_calls(NULL), TASKS + records + needed.all_waits +
                                                fake_cuda_calls("cuEventQuery") +
                                                fake_cuda_calls("cuCtxGetCurrent"));
}

static void a_replay_issues_what_its_graph_needs_and_keeps_its_order(void **state) {
    replay *r = *state;
    uint64_t seed = random_seed("replay");
    add_random_tasks(r, &seed);
    assert_ok(pst_graph_seal(r->graph));
    for (int k = 0; k < 20; k++) {
        fake_cuda_reset();
        fake_cuda_seed(mix(seed + (uint64_t)k));
        fake_cuda_hold(1);
        r->ran = 0;
        assert_ok(pst_graph_launch(r->graph, &r->launch));
        (void)pump_until_launched(r);
        assert_calls(r);
        fake_cuda_hold(0);
        fake_cuda_pace(1 + random_below(&seed, 3));
        pump(r->f->runtime);
        assert_int_equal(r->ran, TASKS);
        assert_order(r);
    }
}

/* Alternating lanes, so that each task has an event. */
static void tasks_that_are_done_together_are_not_asked_about_one_by_one(void **state) {
    replay *r = *state;
    pst_task before = add(r, 0, 0, NULL, 0);
    for (size_t i = 1; i < TASKS; i++)
        before = add(r, i, i % LANES, &before, 1);
    assert_ok(pst_graph_seal(r->graph));
    fake_cuda_reset();
    fake_cuda_hold(1);
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    (void)pump_until_launched(r);
    fake_cuda_hold(0);
    finish(r->f, r->f->a);
    const size_t before_the_end = fake_cuda_calls("cuEventQuery");
    assert_ok(pst_run_once(r->f->runtime, NULL));
    assert_in_range(fake_cuda_calls("cuEventQuery"), before_the_end + 1,
                    before_the_end + 2 * LANES);
    assert_ok(pst_launch_wait(r->launch));
}

static void a_lane_that_has_more_to_launch_seldom_asks(void **state) {
    replay *r = *state;
    pst_task before = add(r, 0, 0, NULL, 0);
    for (size_t i = 1; i < TASKS; i++)
        before = add(r, i, i % 2, &before, 1);
    assert_ok(pst_graph_seal(r->graph));
    fake_cuda_reset();
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    assert_ok(pst_launch_wait(r->launch));
    assert_in_range(fake_cuda_calls("cuEventQuery"), 2, TASKS / 4);
}

static void workers_keep_the_order_too(void **state) {
    replay *r = *state;
    uint64_t seed = random_seed("workers");
    add_random_tasks(r, &seed);
    assert_ok(pst_graph_seal(r->graph));
    for (int k = 0; k < 100; k++) {
        fake_cuda_seed(mix(seed + (uint64_t)k));
        fake_cuda_pace(random_below(&seed, 4));
        r->ran = 0;
        assert_ok(pst_graph_launch(r->graph, &r->launch));
        assert_ok(pst_launch_wait(r->launch));
        assert_int_equal(r->ran, TASKS);
        assert_order(r);
    }
}

static void a_chain_on_one_lane_needs_one_record_a_turn(void **state) {
    replay *r = *state;
    pst_task before = add(r, 0, 0, NULL, 0);
    for (size_t i = 1; i < TASKS; i++)
        before = add(r, i, 0, &before, 1);
    assert_ok(pst_graph_seal(r->graph));
    fake_cuda_reset();
    fake_cuda_hold(1);
    assert_ok(pst_graph_launch(r->graph, NULL));
    const size_t turns = pump_until_launched(r);
    assert_int_equal(fake_cuda_calls("cuEventRecord"), 1);
    assert_int_equal(fake_cuda_calls("cuStreamWaitEvent"), 0);
    fake_cuda_hold(0);
    pump(r->f->runtime);
    assert_in_range(fake_cuda_calls("cuEventRecord"), 1, turns);
    assert_int_equal(r->ran, TASKS);
}

static void a_gate_is_a_record_and_a_wait_of_the_thread_is_a_wait(void **state) {
    replay *r = *state;
    const CUstream compute = pst_cuda_stream(pst_lane_stream(r->compute));
    pst_task gate;
    assert_ok(pst_graph_add_gate(r->graph, "forward", &gate));
    const pst_task gathered = add(r, 0, 0, &gate, 1);
    assert_ok(pst_graph_outer_wait(r->graph, gathered));
    assert_ok(pst_graph_seal(r->graph));
    for (int k = 0; k < 3; k++) {
        fake_cuda_reset();
        assert_ok(pst_graph_launch(r->graph, &r->launch));
        assert_ok(pst_gate_open(r->launch, gate, r->compute));
        assert_ok(pst_task_wait(r->launch, gathered, r->compute));
        assert_int_equal(fake_cuda_calls_on("cuEventRecord", compute), 1);
        assert_int_equal(fake_cuda_calls_on("cuStreamWaitEvent", compute), 1);
        assert_int_equal(fake_cuda_calls("cuEventRecord"), 2);
        assert_int_equal(fake_cuda_calls("cuStreamWaitEvent"), 2);
        pump(r->f->runtime);
        assert_int_equal(fake_cuda_calls("cuEventRecord"), 2);
    }
}

static void hooks_under_capture_end_the_launch_with_an_error(void **state) {
    replay *r = *state;
    const CUstream compute = pst_cuda_stream(pst_lane_stream(r->compute));
    pst_task gate;
    assert_ok(pst_graph_add_gate(r->graph, "forward", &gate));
    const pst_task gathered = add(r, 0, 0, &gate, 1);
    assert_ok(pst_graph_seal(r->graph));
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    fake_cuda_capture(compute, 1);
    assert_status(pst_gate_open(r->launch, gate, r->compute), PST_ESTATE);
    assert_error(r->f->runtime, "gate forward", "lane compute", "capture");
    pump(r->f->runtime);
    assert_status(pst_launch_wait(r->launch), PST_ESTATE);
    fake_cuda_capture(compute, 0);
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    assert_ok(pst_gate_open(r->launch, gate, r->compute));
    fake_cuda_capture(compute, 1);
    assert_status(pst_task_wait(r->launch, gathered, r->compute), PST_ESTATE);
    assert_error(r->f->runtime, "task task", "lane compute", "capture");
    fake_cuda_capture(compute, 0);
    assert_ok(pst_task_wait(r->launch, gathered, r->compute));
    pump(r->f->runtime);
    assert_int_equal(r->ran, 1);
}

/* ---- failures ----------------------------------------------------------------------- */

static void a_launch_that_the_driver_refuses_is_named_with_its_task(void **state) {
    replay *r = *state;
    (void)add(r, 0, 1, NULL, 0);
    assert_ok(pst_graph_seal(r->graph));
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    fake_cuda_fail("cuLaunchHostFunc", 1, CUDA_ERROR_INVALID_VALUE);
    pump(r->f->runtime);
    assert_status(pst_launch_wait(r->launch), PST_EINVAL);
    assert_error(r->f->runtime, "lane reduce", "task task", "device cuda:0", "cuLaunchHostFunc",
                 "CUDA_ERROR_INVALID_VALUE");
    assert_ok(pst_runtime_status(r->f->runtime));
    assert_ok(pst_graph_launch(r->graph, &r->launch)); /* the device is well */
    pump(r->f->runtime);
    assert_ok(pst_launch_wait(r->launch));
}

static pst_status refuse(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    return PST_EINVAL;
}

static void a_failure_of_the_work_alone_is_not_blamed_on_the_device(void **state) {
    replay *r = *state;
    char text[1024];
    pst_stream *stream = NULL;
    pst_task task;
    fake_cuda_fail("cuStreamCreateWithPriority", 1, CUDA_ERROR_INVALID_VALUE);
    assert_status(r->f->ops->stream_create(r->f->device, 0, &stream), PST_EINVAL);
    const pst_task_options options = {.size = sizeof options,
                                      .name = "refusing",
                                      .lane = r->lanes[0],
                                      .work = {refuse, NULL, NULL}};
    assert_ok(pst_graph_add(r->graph, &options, &task));
    assert_ok(pst_graph_seal(r->graph));
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    pump(r->f->runtime);
    assert_error(r->f->runtime, "task refusing");
    (void)pst_runtime_error(r->f->runtime, text, sizeof text);
    assert_null(strstr(text, "cuStreamCreate"));
}

static void a_lost_context_ends_every_wait_with_its_name(void **state) {
    replay *r = *state;
    (void)add(r, 0, 1, NULL, 0);
    assert_ok(pst_graph_seal(r->graph));
    assert_ok(pst_graph_launch(r->graph, &r->launch));
    fake_cuda_hold(1);
    for (int i = 0; i < 5; i++)
        (void)pst_run_once(r->f->runtime, NULL);
    fake_cuda_break(CUDA_ERROR_LAUNCH_FAILED);
    assert_status(pst_launch_wait(r->launch), PST_EDEVICE);
    assert_status(pst_runtime_status(r->f->runtime), PST_EDEVICE);
    assert_error(r->f->runtime, "CUDA_ERROR_LAUNCH_FAILED", "cuEventQuery");
    fake_cuda_break(CUDA_SUCCESS);
    fake_cuda_hold(0);
}

/* ---- as a part of a CUDA graph ------------------------------------------------------ */

static void run_to_the_end(replay *r) {
    finish(r->f, r->f->a);
    for (size_t i = 0; i < LANES; i++)
        finish(r->f, pst_lane_stream(r->lanes[i]));
}

static void check_order(const replay *r, size_t before) {
    for (size_t i = 0; i < TASKS; i++) {
        assert_true(r->nodes[i].ran_at > before);
        for (size_t k = i + 1; k < TASKS; k++)
            if (r->edges[i][k]) assert_true(r->nodes[i].ran_at < r->nodes[k].ran_at);
    }
}

/* Between two tasks of the caller's stream; by turns with launches by workers. */
static void a_captured_graph_runs_as_a_launch(void **state) {
    replay *r = *state;
    uint64_t seed = random_seed("capture");
    const CUstream native = pst_cuda_stream(r->f->a);
    node first = {.replay = r}, last = {.replay = r};
    add_random_tasks(r, &seed);
    assert_ok(pst_graph_seal(r->graph));
    for (size_t round = 0; round < 20; round++) {
        const size_t before = r->ran;
        fake_graph *graph = NULL;
        fake_cuda_seed(seed + round);
        fake_cuda_begin_capture(native);
        assert_ok(start(&first, r->f->a));
        assert_ok(pst_graph_capture(r->graph, r->f->device, native));
        assert_ok(start(&last, r->f->a));
        assert_int_equal(fake_cuda_end_capture(native, &graph), CUDA_SUCCESS);
        assert_int_equal(r->ran, before);
        fake_cuda_launch(graph, native);
        run_to_the_end(r);
        assert_int_equal(r->ran, before + TASKS + 2);
        assert_int_equal(first.ran_at, before + 1);
        assert_int_equal(last.ran_at, r->ran);
        check_order(r, before);
        assert_ok(pst_graph_launch(r->graph, &r->launch));
        assert_ok(pst_launch_wait(r->launch));
        run_to_the_end(r);
        check_order(r, before + TASKS + 2);
    }
}

static void assert_not_captured(replay *r, const char *part) {
    const CUstream native = pst_cuda_stream(r->f->a);
    fake_graph *graph = NULL;
    fake_cuda_begin_capture(native);
    assert_status(pst_graph_capture(r->graph, r->f->device, native), PST_EUNSUPPORTED);
    assert_error(r->f->runtime, "graph step", "cannot be captured", part);
    assert_int_equal(fake_cuda_end_capture(native, &graph), CUDA_SUCCESS);
    fake_cuda_launch(graph, native);
}

static void called(void *argument, pst_status status) {
    (void)argument, (void)status;
}

static void what_no_graph_can_hold_is_named(void **state) {
    replay *r = *state;
    pst_task gate;
    assert_status(pst_graph_capture(r->graph, r->f->device, NULL), PST_ESTATE);
    const pst_task_options options = {
        .size = sizeof options, .name = "loud", .lane = r->lanes[0], .done = called};
    assert_ok(pst_graph_add(r->graph, &options, NULL));
    assert_ok(pst_graph_seal(r->graph));
    assert_not_captured(r, "callback");
    pst_graph *other = open_graph(r->f->runtime, PST_GRAPH_SEALED, "step");
    assert_ok(pst_graph_add_gate(other, "input", &gate));
    assert_ok(pst_graph_seal(other));
    r->graph = other;
    assert_not_captured(r, "task input");
    pst_lane_options host = {.size = sizeof host, .name = "host", .mode = PST_LANE_PUMPED};
    pst_task_options task = {.size = sizeof task, .name = "here"};
    assert_ok(pst_lane_create(r->f->runtime, &host, &task.lane));
    r->graph = open_graph(r->f->runtime, PST_GRAPH_SEALED, "step");
    assert_ok(pst_graph_add(r->graph, &task, NULL));
    assert_ok(pst_graph_seal(r->graph));
    assert_not_captured(r, "another device");
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_pumped, teardown_replay)
        TEST(a_replay_issues_what_its_graph_needs_and_keeps_its_order),
        TEST(tasks_that_are_done_together_are_not_asked_about_one_by_one),
        TEST(a_lane_that_has_more_to_launch_seldom_asks),
        cmocka_unit_test_setup_teardown(workers_keep_the_order_too, setup_workers, teardown_replay),
        TEST(a_chain_on_one_lane_needs_one_record_a_turn),
        TEST(a_gate_is_a_record_and_a_wait_of_the_thread_is_a_wait),
        TEST(hooks_under_capture_end_the_launch_with_an_error),
        TEST(a_captured_graph_runs_as_a_launch),
        cmocka_unit_test_setup_teardown(a_captured_graph_runs_as_a_launch, setup_workers,
                                        teardown_replay),
        TEST(what_no_graph_can_hold_is_named),
        TEST(a_launch_that_the_driver_refuses_is_named_with_its_task),
        TEST(a_failure_of_the_work_alone_is_not_blamed_on_the_device),
        TEST(a_lost_context_ends_every_wait_with_its_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
