#include "world.h"

model_world world;

void check_ok(pst_status status, const char *what) {
    model_check(status == PST_OK, what);
}

/* ---- what tasks do ---------------------------------------------------------------------- */

static pst_status run_body(void *argument, pst_stream *stream) {
    body *self = argument;
    (void)stream;
    model_check(world.inside++ == 0, "two threads serve one lane");
    model_point();
    world.inside--;
    self->started++;
    self->happened++;
    self->place = ++world.order;
    return PST_OK;
}

static void end_body(void *argument, pst_status status) {
    body *self = argument;
    self->ended++;
    self->status = status;
    model_check(self->started <= self->ended, "a task called back before it was launched");
}

/* Without a name: what a lane notes of launches that have one would double the interleavings. */
pst_task_options options_of(unsigned index, const pst_task *after) {
    return (pst_task_options){.size = sizeof(pst_task_options),
                              .lane = world.lane,
                              .work = {run_body, NULL, &world.bodies[index]},
                              .after = after,
                              .after_count = after != NULL,
                              .done = end_body,
                              .done_argument = &world.bodies[index]};
}

void add(unsigned index, const pst_task *after, pst_task *task) {
    const pst_task_options options = options_of(index, after);
    check_ok(pst_graph_add(world.graph, &options, task), "a task could not be added");
}

void add_gate(void) {
    check_ok(pst_graph_add_gate(world.graph, "gate", &world.gate), "no gate");
}

/* ---- worlds ----------------------------------------------------------------------------- */

void open_runtime(void) {
    world = (model_world){0};
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = model_allocator(),
                                         .spin = 1,
                                         .trace_records = 64,
                                         .flight_records = 64,
                                         .task_capacity = 4};
    check_ok(pst_runtime_create(&options, &world.runtime), "no runtime");
}

void open_lane(pst_lane_mode mode, pst_lane_order order) {
    const pst_lane_options options = {
        .size = sizeof options, .name = "lane", .mode = mode, .order = order, .takes_help = 1};
    check_ok(pst_lane_create(world.runtime, &options, &world.lane), "no lane");
}

void open_graph(pst_graph_kind kind) {
    check_ok(pst_graph_create(world.runtime, kind, "graph", &world.graph), "no graph");
    world.launch = (pst_launch){world.graph, 0};
}

void begin_launch(void) {
    check_ok(pst_graph_launch(world.graph, &world.launch), "no launch");
    world.launches++;
}

void seal_and_launch(void) {
    check_ok(pst_graph_seal(world.graph), "the graph cannot be sealed");
    begin_launch();
}

/* ---- what threads do -------------------------------------------------------------------- */

void open_gate(void) {
    check_ok(pst_gate_open(world.launch, world.gate, NULL), "the gate does not open");
}

void pump_turns(int turns) {
    for (int i = 0; i < turns; i++)
        (void)pst_run_once(world.runtime, NULL);
}

void pump_once(void) {
    pump_turns(1);
}

void pump_twice(void) {
    pump_turns(2);
}

/* ---- checks ----------------------------------------------------------------------------- */

void check_ran(unsigned index, unsigned times) {
    const body *self = &world.bodies[index];
    model_check(self->ended >= times, "a task is lost");
    model_check(self->ended == times, "a task called back twice");
    check_ok(self->status, "a task failed");
    model_check(self->happened == times, "a task called back and did not run");
}

void check_ran_once(unsigned index) {
    check_ran(index, 1);
}

void check_idle_and_destroy(void) {
    int idle = 0;
    (void)pst_run_once(world.runtime, &idle);
    model_check(idle, "unfinished tasks are left");
    model_check(pst_runtime_status(world.runtime) == world.poison,
                "the runtime's status is not what happened");
    pst_task_release(world.gate);
    pst_task_release(world.source);
    check_ok(pst_graph_destroy(world.graph), "the graph cannot be destroyed");
    pst_runtime_destroy(world.runtime);
}
