/* A runtime of one lane, up to a number of preemptions: the structures where they meet. */
#include "programs.h"
#include "world.h"

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
    model_check(world.bodies[0].place < world.bodies[1].place, "the edge does not hold");
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
    add_gate();
}

static void add_two_late(void) {
    add(0, &world.gate, &world.source);
    add(1, &world.source, NULL);
}

const model_program late_edge_of_three = {.setup = set_up_gate,
                                          .threads = {open_gate, add_two_late, pump_twice},
                                          .finish = check_late,
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
    add_gate();
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
