/* The opening of a gate against what else may end it, or make it void. */
#include "programs.h"
#include "world.h"

static void open_gate_if_not_canceled(void) {
    const pst_status status = pst_gate_open(world.launch, world.gate, NULL);
    model_check(status == PST_OK || status == PST_ECANCELED, "the gate does not open");
}

static void cancel(void) {
    check_ok(pst_launch_cancel(world.launch), "cannot be canceled");
}

static void check_ended(void) {
    const body *self = &world.bodies[0];
    pump_turns(2);
    model_check(self->ended == 1, "not one callback");
    model_check(self->status == (self->started ? PST_OK : PST_ECANCELED),
                "the callback's status is not what happened");
    check_idle_and_destroy();
}

/* ---- against a cancel ------------------------------------------------------------------- */

static void set_up_gated(pst_graph_kind kind) {
    open_runtime();
    open_lane(PST_LANE_PUMPED, PST_LANE_BY_READINESS);
    open_graph(kind);
    add_gate();
    add(0, &world.gate, &world.source);
}

static void set_up_growing(void) {
    set_up_gated(PST_GRAPH_GROWING);
}

static void set_up_sealed(void) {
    set_up_gated(PST_GRAPH_SEALED);
    seal_and_launch();
}

const model_program gate_and_cancel = {.setup = set_up_growing,
                                       .threads = {open_gate_if_not_canceled, cancel, pump_once},
                                       .finish = check_ended,
                                       .preemptions = 2};

const model_program sealed_gate_and_cancel = {
    .setup = set_up_sealed,
    .threads = {open_gate_if_not_canceled, cancel, pump_once},
    .finish = check_ended,
    .preemptions = 2};

/* ---- against the next launch ------------------------------------------------------------ */

static pst_launch first_launch;

static void set_up_first_launch(void) {
    set_up_sealed();
    first_launch = world.launch;
}

static void open_if_nobody_has(void) {
    const pst_status status = pst_gate_open(first_launch, world.gate, NULL);
    model_check(status == PST_OK || status == PST_ESTATE, "the gate neither opens nor is open");
}

static void open_in_both_launches(void) {
    open_if_nobody_has();
    check_ok(pst_launch_wait(first_launch), "the wait fails");
    begin_launch();
    open_gate();
}

static void check_both_launches(void) {
    pump_turns(2);
    check_ran(0, 2);
    check_idle_and_destroy();
}

static void cancel_first_launch(void) {
    check_ok(pst_launch_cancel(first_launch), "cannot be canceled");
}

static void end_and_launch_again(void) {
    open_gate_if_not_canceled();
    const pst_status status = pst_launch_wait(first_launch);
    model_check(status == PST_OK || status == PST_ECANCELED, "the wait fails");
    begin_launch();
    open_gate();
}

static void check_second_launch(void) {
    pump_turns(2);
    model_check(world.bodies[0].ended == 2, "not one callback a launch");
    check_ok(world.bodies[0].status, "the second launch was canceled");
    check_idle_and_destroy();
}

const model_program cancel_of_last_launch = {.setup = set_up_first_launch,
                                             .threads = {cancel_first_launch, end_and_launch_again},
                                             .finish = check_second_launch,
                                             .preemptions = 2};

const model_program gate_of_last_launch = {.setup = set_up_first_launch,
                                           .threads = {open_if_nobody_has, open_in_both_launches},
                                           .finish = check_both_launches,
                                           .preemptions = 2};

/* ---- against the graph's end ------------------------------------------------------------ */

/* Whoever waits may destroy the graph while the opening thread is on its way out of the call. */
static void wait_and_destroy(void) {
    check_ok(pst_launch_wait(world.launch), "the wait fails");
    check_ran_once(0);
    pst_task_release(world.source);
    check_ok(pst_graph_destroy(world.graph), "the graph cannot be destroyed");
    world.graph = NULL;
    world.gate = world.source = (pst_task){NULL, 0};
}

const model_program growing_gate_and_destroy = {.setup = set_up_growing,
                                                .threads = {open_gate, wait_and_destroy},
                                                .finish = check_idle_and_destroy,
                                                .preemptions = 3};

const model_program sealed_gate_and_destroy = {.setup = set_up_sealed,
                                               .threads = {open_gate, wait_and_destroy, pump_once},
                                               .finish = check_idle_and_destroy,
                                               .preemptions = 2};
