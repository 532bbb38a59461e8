/* Launches of a sealed graph: one after the other, and against a poison. */
#include "programs.h"
#include "world.h"

/* ---- launch k+1 over launch k ----------------------------------------------------------- */

static void set_up_chain(pst_lane_mode mode) {
    open_runtime();
    open_lane(mode, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_SEALED);
    add_gate();
    add(0, &world.gate, &world.source);
    add(1, &world.source, NULL);
    seal_and_launch();
}

static void set_up_pumped_chain(void) {
    set_up_chain(PST_LANE_PUMPED);
}

static void set_up_served_chain(void) {
    set_up_chain(PST_LANE_WORKER);
}

/* Tries once, as soon as all of the launch before may be launched. */
static void launch_again(void) {
    const pst_status status = pst_graph_launch(world.graph, &world.launch);
    if (status == PST_EBUSY) return;
    check_ok(status, "it cannot be launched again");
    world.launches++;
    open_gate();
}

static void open_and_launch_again(void) {
    open_gate();
    launch_again();
}

static void open_wait_and_launch_again(void) {
    open_gate();
    check_ok(pst_launch_wait(world.launch), "the wait fails");
    launch_again();
    model_check(world.launches == 2, "a launch is busy when all of the one before has ended");
}

static void check_launches(void) {
    pump_turns(3);
    for (unsigned i = 0; i < 2; i++)
        check_ran(i, world.launches);
    model_check(world.bodies[0].place < world.bodies[1].place, "an edge does not hold");
    check_idle_and_destroy();
}

const model_program launch_over_launch = {.setup = set_up_pumped_chain,
                                          .threads = {open_and_launch_again, pump_twice},
                                          .finish = check_launches,
                                          .preemptions = 3};

const model_program launch_after_launch = {.setup = set_up_served_chain,
                                           .threads = {open_wait_and_launch_again},
                                           .finish = check_launches,
                                           .preemptions = 2};

/* ---- poison against a launch ------------------------------------------------------------ */

static void set_up_sealed(void) {
    open_runtime();
    open_lane(PST_LANE_PUMPED, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_SEALED);
    add_gate();
    add(0, &world.gate, &world.source);
    check_ok(pst_graph_seal(world.graph), "the graph cannot be sealed");
}

static void launch_if_not_poisoned(void) {
    const pst_status status = pst_graph_launch(world.graph, &world.launch);
    model_check(status == PST_OK || status == PST_EIO, "a launch is neither begun nor refused");
    world.launches += status == PST_OK;
}

static void poison(void) {
    world.poison = PST_EIO;
    pst_runtime_poison(world.runtime, PST_EIO, NULL);
}

/* Nobody opens the gate: the poison has to end it. */
static void check_poisoned(void) {
    const body *self = &world.bodies[0];
    pump_turns(2);
    model_check(self->ended == world.launches, "not one callback a launch");
    model_check(self->started == 0, "a task ran behind a closed gate");
    model_check(self->ended == 0 || self->status == PST_ESKIPPED,
                "a task that never ran does not say so");
    check_idle_and_destroy();
}

const model_program poison_and_launch = {.setup = set_up_sealed,
                                         .threads = {launch_if_not_poisoned, poison, pump_once},
                                         .finish = check_poisoned,
                                         .preemptions = 2};

/* ---- poison against what is added to a growing graph ------------------------------------ */

static void set_up_growing(void) {
    open_runtime();
    open_lane(PST_LANE_PUMPED, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_GROWING);
    add(0, NULL, &world.source);
}

static void add_if_not_poisoned(void) {
    const pst_task_options options = options_of(1, NULL);
    const pst_status status = pst_graph_add(world.graph, &options, NULL);
    model_check(status == PST_OK || status == PST_EIO, "a task is neither added nor refused");
    world.launches += status == PST_OK;
}

/* What a poison has stopped stays so: the lane meets both tasks in this order. */
static void check_stopped(void) {
    pump_turns(2);
    model_check(world.bodies[0].ended == 1 && world.bodies[1].ended == world.launches,
                "not one callback a task");
    model_check(world.bodies[0].status == PST_OK || !world.bodies[1].started,
                "a task ran in a graph that the poison had stopped");
    check_idle_and_destroy();
}

const model_program poison_and_add = {.setup = set_up_growing,
                                      .threads = {add_if_not_poisoned, poison, pump_once},
                                      .finish = check_stopped,
                                      .preemptions = 2};

static void set_up_empty(void) {
    open_runtime();
    open_graph(PST_GRAPH_GROWING);
}

static void add_gate_if_not_poisoned(void) {
    const pst_status status = pst_graph_add_gate(world.graph, "gate", &world.gate);
    model_check(status == PST_OK || status == PST_EIO, "a gate is neither added nor refused");
}

/* Nobody opens the gate: it ends with the poison, whichever came first. */
const model_program poison_and_add_gate = {.setup = set_up_empty,
                                           .threads = {add_gate_if_not_poisoned, poison},
                                           .finish = check_idle_and_destroy,
                                           .preemptions = 4};
