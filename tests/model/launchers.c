/* Launches of several threads and of callbacks, and what follows a wait at once. */
#include "programs.h"
#include "world.h"

/* ---- two threads over the same lanes ---------------------------------------------------- */

static struct {
    pst_lane *lanes[2];
    pst_graph *graphs[2];
    pst_launch launches[2];
} both;

/* Each graph has a task on either lane, the second after the first, and they begin on different
 * lanes: with the launches in one order on both lanes all can run, in two orders neither can. */
static void build(unsigned index) {
    pst_task first = {NULL, 0};
    check_ok(pst_graph_create(world.runtime, PST_GRAPH_SEALED, "graph", &both.graphs[index]),
             "no graph");
    for (unsigned i = 0; i < 2; i++) {
        pst_task_options options = options_of(2 * index + i, i == 0 ? NULL : &first);
        options.lane = both.lanes[(index + i) % 2];
        check_ok(pst_graph_add(both.graphs[index], &options, i == 0 ? &first : NULL), "no task");
    }
    check_ok(pst_graph_seal(both.graphs[index]), "the graph cannot be sealed");
}

static void set_up_two_orders(void) {
    open_runtime();
    for (unsigned i = 0; i < 2; i++) {
        open_lane(PST_LANE_PUMPED, PST_LANE_BY_SUBMISSION);
        both.lanes[i] = world.lane;
    }
    build(0);
    build(1);
}

static void launch_first(void) {
    check_ok(pst_graph_launch(both.graphs[0], &both.launches[0]), "no launch");
}

static void launch_second(void) {
    check_ok(pst_graph_launch(both.graphs[1], &both.launches[1]), "no launch");
}

static void check_both(void) {
    pump_turns(4);
    for (unsigned i = 0; i < WORLD_TASKS; i++)
        check_ran_once(i);
    check_ok(pst_graph_destroy(both.graphs[1]), "a graph whose tasks have ended is busy");
    world.graph = both.graphs[0];
    check_idle_and_destroy();
}

const model_program two_launchers = {.setup = set_up_two_orders,
                                     .threads = {launch_first, launch_second},
                                     .finish = check_both,
                                     .preemptions = 3};

/* ---- a launch from the last callback ---------------------------------------------------- */

static void end_and_launch(void *argument, pst_status status) {
    body *self = argument;
    self->ended++;
    self->status = status;
    if (world.launches < 2) begin_launch();
}

static void set_up_relaunch(void) {
    open_runtime();
    open_lane(PST_LANE_PUMPED, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_SEALED);
    pst_task_options options = options_of(0, NULL);
    options.done = end_and_launch;
    check_ok(pst_graph_add(world.graph, &options, NULL), "a task could not be added");
    seal_and_launch();
}

static void wait_for_first(void) {
    check_ok(pst_launch_wait((pst_launch){world.graph, 1}), "the wait fails");
    model_check(world.bodies[0].ended >= 1, "a wait ends before the callback");
}

static void check_relaunched(void) {
    pump_turns(2);
    check_ran(0, 2);
    check_idle_and_destroy();
}

const model_program launch_in_callback = {.setup = set_up_relaunch,
                                          .threads = {wait_for_first, pump_twice},
                                          .finish = check_relaunched,
                                          .preemptions = 2};

/* ---- destroyed behind a wait ------------------------------------------------------------ */

static void set_up_served(void) {
    open_runtime();
    open_lane(PST_LANE_WORKER, PST_LANE_BY_READINESS);
    open_graph(PST_GRAPH_SEALED);
    add(0, NULL, NULL);
    check_ok(pst_graph_seal(world.graph), "the graph cannot be sealed");
}

static void launch_wait_and_destroy(void) {
    begin_launch();
    check_ok(pst_launch_wait(world.launch), "the wait fails");
    check_ok(pst_graph_destroy(world.graph), "a graph is busy behind the wait for it");
    world.graph = NULL;
}

static void check_gone(void) {
    check_ran_once(0);
    check_idle_and_destroy();
}

const model_program destroy_after_wait = {.setup = set_up_served,
                                          .threads = {launch_wait_and_destroy},
                                          .finish = check_gone,
                                          .preemptions = 2};
