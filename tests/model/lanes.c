/* Whole runtimes, up to a number of preemptions: the structures where they meet. */
#include "programs.h"

#include <penstock/graph.h>

enum { TASKS = 4 };

static struct {
    pst_runtime *runtime;
    pst_lane *lane;
    pst_graph *graph;
    pst_launch launch;
    pst_task gate, source;
    struct body {
        int started, ended;
        pst_status status;
    } bodies[TASKS];
    int inside; /* bodies that run at this moment */
    int order;  /* bodies that have run */
} world;

/* ---- what tasks do ---------------------------------------------------------------------- */

static pst_status run_body(void *argument, pst_stream *stream) {
    struct body *body = argument;
    (void)stream;
    model_check(world.inside++ == 0, "two threads serve one lane");
    model_point();
    world.inside--;
    body->started = ++world.order;
    return PST_OK;
}

static void end_body(void *argument, pst_status status) {
    struct body *body = argument;
    body->ended++;
    body->status = status;
}

/* Without a name: what a lane notes of launches that have one would double the interleavings. */
static pst_task_options options_of(int index, const pst_task *after) {
    return (pst_task_options){.size = sizeof(pst_task_options),
                              .lane = world.lane,
                              .work = {run_body, NULL, &world.bodies[index]},
                              .after = after,
                              .after_count = after != NULL,
                              .done = end_body,
                              .done_argument = &world.bodies[index]};
}

static void check_ok(pst_status status, const char *what) {
    model_check(status == PST_OK, what);
}

static void add(int index, const pst_task *after, pst_task *task) {
    const pst_task_options options = options_of(index, after);
    check_ok(pst_graph_add(world.graph, &options, task), "a task could not be added");
}

static void check_ran_once(int index) {
    model_check(world.bodies[index].ended != 0, "a task is lost");
    model_check(world.bodies[index].ended == 1, "a task called back twice");
    check_ok(world.bodies[index].status, "a task failed");
    model_check(world.bodies[index].started != 0, "a task called back and did not run");
}

/* ---- worlds ----------------------------------------------------------------------------- */

static void open_runtime(void) {
    world = (__typeof__(world)){0};
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = model_allocator(),
                                         .spin = 1,
                                         .trace_records = 64,
                                         .task_capacity = 4};
    check_ok(pst_runtime_create(&options, &world.runtime), "no runtime");
}

static void open_lane(pst_lane_mode mode, pst_lane_order order) {
    const pst_lane_options options = {
        .size = sizeof options, .name = "lane", .mode = mode, .order = order};
    check_ok(pst_lane_create(world.runtime, &options, &world.lane), "no lane");
}

static void open_graph(pst_graph_kind kind) {
    check_ok(pst_graph_create(world.runtime, kind, "graph", &world.graph), "no graph");
    world.launch = (pst_launch){world.graph, 0};
}

static void pump_turns(int turns) {
    for (int i = 0; i < turns; i++)
        (void)pst_run_once(world.runtime, NULL);
}

static void pump_once(void) {
    pump_turns(1);
}
static void pump_twice(void) {
    pump_turns(2);
}

static void check_idle_and_destroy(void) {
    int idle = 0;
    (void)pst_run_once(world.runtime, &idle);
    model_check(idle, "unfinished tasks are left");
    check_ok(pst_runtime_status(world.runtime), "the runtime is poisoned");
    pst_task_release(world.gate);
    pst_task_release(world.source);
    check_ok(pst_graph_destroy(world.graph), "the graph cannot be destroyed");
    pst_runtime_destroy(world.runtime);
}

/* ---- the closing of a list of successors against a late edge ---------------------------- */

static void set_up_source(void) {
    open_runtime();
    open_lane(PST_LANE_PUMPED, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_GROWING);
    add(0, NULL, &world.source);
}

static void add_late(void) {
    add(1, &world.source, NULL);
}

static void check_late(void) {
    pump_turns(3);
    check_ran_once(0);
    check_ran_once(1);
    model_check(world.bodies[0].started < world.bodies[1].started, "the edge does not hold");
    check_idle_and_destroy();
}

const model_program late_edge = {.setup = set_up_source,
                                 .threads = {pump_once, add_late},
                                 .finish = check_late,
                                 .preemptions = 4};

static void set_up_gate(void) {
    open_runtime();
    open_lane(PST_LANE_PUMPED, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_GROWING);
    check_ok(pst_graph_add_gate(world.graph, "gate", &world.gate), "no gate");
}

static void open_gate(void) {
    check_ok(pst_gate_open(world.launch, world.gate, NULL), "the gate does not open");
}

static void add_two_late(void) {
    add(0, &world.gate, &world.source);
    add(1, &world.source, NULL);
}

const model_program late_edge_of_three = {.setup = set_up_gate,
                                          .threads = {open_gate, add_two_late, pump_twice},
                                          .finish = check_late,
                                          .preemptions = 2};

/* ---- a gate's opening against a cancel -------------------------------------------------- */

static void set_up_gated(void) {
    set_up_gate();
    add(0, &world.gate, NULL);
}

static void open_gate_if_not_canceled(void) {
    const pst_status status = pst_gate_open(world.launch, world.gate, NULL);
    model_check(status == PST_OK || status == PST_ECANCELED, "the gate does not open");
}

static void cancel(void) {
    check_ok(pst_launch_cancel(world.launch), "cannot be canceled");
}

static void check_ended(void) {
    const struct body *body = &world.bodies[0];
    pump_turns(2);
    model_check(body->ended == 1, "not one callback");
    model_check(body->status == (body->started ? PST_OK : PST_ECANCELED),
                "the callback's status is not what happened");
    check_idle_and_destroy();
}

const model_program gate_and_cancel = {.setup = set_up_gated,
                                       .threads = {open_gate_if_not_canceled, cancel, pump_once},
                                       .finish = check_ended,
                                       .preemptions = 2};

/* ---- hand-over of a lane ---------------------------------------------------------------- */

static void set_up_two_tasks(void) {
    set_up_source();
    add(1, NULL, NULL);
}

static void check_both(void) {
    pump_turns(2);
    check_ran_once(0);
    check_ran_once(1);
    check_idle_and_destroy();
}

const model_program two_helpers = {.setup = set_up_two_tasks,
                                   .threads = {pump_once, pump_once},
                                   .finish = check_both,
                                   .preemptions = 4};

/* A helper has the lane while the worker is woken, finds it owned and goes to sleep again: the
 * helper tells it when it hands the lane back. */
static void set_up_worker(void) {
    open_runtime();
    open_lane(PST_LANE_WORKER, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_GROWING);
}

static void submit_one(void) {
    add(0, NULL, NULL);
}

static void check_one(void) {
    check_ran_once(0);
    check_idle_and_destroy();
}

const model_program helper_and_worker = {.setup = set_up_worker,
                                         .threads = {submit_one, pump_once},
                                         .finish = check_one,
                                         .preemptions = 2,
                                         .delays = 1};

/* The same where a task stands in the lane's queue and becomes ready there. */
static void set_up_worker_in_order(void) {
    open_runtime();
    open_lane(PST_LANE_WORKER, PST_LANE_BY_SUBMISSION);
    open_graph(PST_GRAPH_GROWING);
    check_ok(pst_graph_add_gate(world.graph, "gate", &world.gate), "no gate");
    add(0, &world.gate, NULL);
}

const model_program helper_in_order = {.setup = set_up_worker_in_order,
                                       .threads = {open_gate, pump_once},
                                       .finish = check_one,
                                       .preemptions = 2,
                                       .delays = 1};

/* ---- park against wake ------------------------------------------------------------------ */

const model_program park_and_submit = {
    .setup = set_up_worker, .threads = {submit_one}, .finish = check_one, .preemptions = 3};

static void submit_and_wait(void) {
    submit_one();
    check_ok(pst_launch_wait(world.launch), "the wait fails");
    model_check(world.bodies[0].ended == 1, "the wait ends before the task");
}

const model_program wait_and_end = {.setup = set_up_worker,
                                    .threads = {submit_and_wait},
                                    .finish = check_one,
                                    .preemptions = 2,
                                    .delays = 1};
