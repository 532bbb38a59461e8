/* Lanes of an asynchronous device: what is launched there is in flight until its event says that
 * it has happened. */
#include "device.h"
#include "programs.h"
#include "world.h"

static struct {
    pst_device *device;
    pst_lane *lanes[2], *borrowed;
} on;

/* ---- what tasks do ---------------------------------------------------------------------- */

static void happen(void *argument) {
    body *self = argument;
    model_check(self->happened < self->started, "the device does what nobody launched");
    model_check(self->happened == self->ended, "a task ended before its work happened");
    self->happened++;
    self->place = ++world.order;
}

static pst_status enqueue_body(void *argument, pst_stream *stream) {
    body *self = argument;
    model_check(self->started == self->ended, "a task was launched while it was in flight");
    self->started++;
    model_device_call(stream, happen, self);
    return PST_OK;
}

static void end_flight(void *argument, pst_status status) {
    body *self = argument;
    self->ended++;
    self->status = status;
    model_check(status != PST_OK || self->happened == self->ended,
                "a task called back before its work happened");
}

static void add_on(pst_lane *lane, unsigned index, const pst_task *after, int calls_back,
                   pst_task *task) {
    pst_task_options options = options_of(index, after);
    options.lane = lane;
    options.work.start = enqueue_body;
    options.done = calls_back ? end_flight : NULL;
    check_ok(pst_graph_add(world.graph, &options, task), "a task could not be added");
}

/* ---- worlds ----------------------------------------------------------------------------- */

static pst_lane *open_on_device(pst_lane_mode mode) {
    const pst_lane_options options = {
        .size = sizeof options, .name = "lane", .mode = mode, .device = on.device};
    pst_lane *lane;
    check_ok(pst_lane_create(world.runtime, &options, &lane), "no lane");
    return lane;
}

static void open_device(int lanes, pst_graph_kind kind) {
    open_runtime();
    on.device = model_device_open();
    for (int i = 0; i < lanes; i++)
        on.lanes[i] = open_on_device(PST_LANE_PUMPED);
    open_graph(kind);
}

static void run_device(void) {
    for (int i = 0; i < 3; i++)
        (void)model_device_step();
}

/* Everything happens that is on its way. */
static void land(void) {
    for (int i = 0; i < 4; i++) {
        pump_once();
        while (model_device_step()) {
        }
    }
    pump_once();
}

/* ---- successors on another lane start when their predecessor is launched ---------------- */

static void add_chain(void) {
    add_on(on.lanes[0], 0, NULL, 1, &world.source);
    add_on(on.lanes[1], 1, &world.source, 1, NULL);
}

static void set_up_sealed_chain(void) {
    open_device(2, PST_GRAPH_SEALED);
    add_chain();
    seal_and_launch();
}

static void set_up_growing_source(void) {
    open_device(2, PST_GRAPH_GROWING);
    add_on(on.lanes[0], 0, NULL, 1, &world.source);
}

static void add_behind_flight(void) {
    add_on(on.lanes[1], 1, &world.source, 1, NULL);
}

static void check_chain(void) {
    land();
    check_ran_once(0);
    check_ran_once(1);
    model_check(world.bodies[0].place < world.bodies[1].place, "the streams do not keep the order");
    check_idle_and_destroy();
}

const model_program flight_behind_flight = {.setup = set_up_sealed_chain,
                                            .threads = {pump_twice, pump_once, run_device},
                                            .finish = check_chain,
                                            .preemptions = 2};

const model_program late_edge_behind_flight = {
    .setup = set_up_growing_source,
    .threads = {pump_twice, add_behind_flight, run_device},
    .finish = check_chain,
    .preemptions = 2};

/* ---- a wait that nobody foresaw records its event when it comes ------------------------- */

static void expect_before(void *argument) {
    const body *self = argument;
    model_check(self->happened == 1, "a stream that waits for a task goes on before it");
}

static void set_up_unforeseen(void) {
    open_device(1, PST_GRAPH_SEALED);
    on.borrowed = open_on_device(PST_LANE_BORROWED);
    add_on(on.lanes[0], 0, NULL, 0, &world.source);
    seal_and_launch();
}

static void wait_late(void) {
    check_ok(pst_task_wait(world.launch, world.source, on.borrowed), "the wait fails");
    model_device_call(pst_lane_stream(on.borrowed), expect_before, &world.bodies[0]);
}

static void check_one_flight(void) {
    land();
    model_check(world.bodies[0].happened == 1, "a task is lost");
    check_ok(pst_task_test(world.launch, world.source), "a task does not end");
    check_idle_and_destroy();
}

const model_program late_wait = {.setup = set_up_unforeseen,
                                 .threads = {wait_late, pump_twice, run_device},
                                 .finish = check_one_flight,
                                 .preemptions = 2};

/* ---- launch k+1 while launch k is in flight --------------------------------------------- */

static void set_up_in_flight(void) {
    open_device(1, PST_GRAPH_SEALED);
    add_on(on.lanes[0], 0, NULL, 1, &world.source);
    seal_and_launch();
}

static void launch_over_flight(void) {
    pump_once();
    const pst_status status = pst_graph_launch(world.graph, &world.launch);
    if (status == PST_EBUSY) return;
    check_ok(status, "it cannot be launched again");
    world.launches++;
}

static void check_flights(void) {
    land();
    check_ran(0, world.launches);
    check_idle_and_destroy();
}

const model_program flight_over_flight = {.setup = set_up_in_flight,
                                          .threads = {launch_over_flight, pump_once, run_device},
                                          .finish = check_flights,
                                          .preemptions = 2};

/* ---- a foreign loop beside a thread that serves the lane once --------------------------- */

static int64_t loop_timeout; /* with which the loop goes to sleep */

static void open_and_loop(void) {
    open_gate();
    do
        pump_once();
    while ((loop_timeout = pst_timeout(world.runtime)) == 0);
}

/* The device has not moved: the loop has to come back by itself, or by the descriptor. */
static void check_loop(void) {
    const int is_called = pst_timeout(world.runtime) == 0;
    model_check(world.bodies[0].started == 1, "a task is lost");
    model_check(loop_timeout > 0 || is_called, "a loop sleeps for ever while a task is in flight");
    check_flights();
}

static void set_up_gated(void) {
    open_device(1, PST_GRAPH_SEALED);
    add_gate();
    add_on(on.lanes[0], 0, &world.gate, 1, &world.source);
    seal_and_launch();
}

const model_program loop_and_helper = {.setup = set_up_gated,
                                       .threads = {open_and_loop, pump_once},
                                       .finish = check_loop,
                                       .preemptions = 2};
