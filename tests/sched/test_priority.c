/* Lanes BY_PRIORITY: of what is ready the most urgent is launched, first come first among equals.
 */
#include "tests/sched/queue_device.h"

#include "sched/pump.h"

/* One turn of each lane, of at most so many launches; 1 when something was done. */
static inline int one_turn(pst_runtime *runtime, uint32_t launches) {
    const pst__budget budget = {.launches = launches};
    return pst__runtime_help(runtime, PST__HELP_ALL, &budget).did;
}

static pst_lane *open_priority_lane(pst_runtime *runtime, pst_device *device, pst_lane_mode mode) {
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "urgent first",
                                      .device = device,
                                      .mode = mode,
                                      .order = PST_LANE_BY_PRIORITY};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    return lane;
}

static pst_task add_urgent(pst_graph *graph, pst_lane *lane, step *self, int priority,
                           pst_task after) {
    pst_task_options options = step_options(self, lane);
    options.priority = priority;
    options.after = &after;
    options.after_count = after.graph != NULL;
    pst_task task;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

static pst_launch begin(pst_graph *graph, pst_graph_kind kind) {
    pst_launch launch = {graph, 0};
    if (kind == PST_GRAPH_SEALED) assert_ok(pst_graph_launch(graph, &launch));
    return launch;
}

/* Two tasks of each of three priorities, added in no order, behind a gate. */
static void add_six(pst_graph *graph, pst_lane *lane, step *steps, trail *ran, pst_task gate) {
    static const char *const names[] = {"late 1", "a", "soon 1", "b", "soon 2", "late 2"};
    static const int priorities[] = {3, 0, -4, 0, -4, 3};
    for (int i = 0; i < 6; i++) {
        steps[i] = (step){.where = ran, .name = names[i]};
        pst_task_release(add_urgent(graph, lane, &steps[i], priorities[i], gate));
    }
}

static void the_most_urgent_of_the_ready_tasks_is_launched(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_runtime *runtime = open_runtime(0);
        pst_lane *lane = open_priority_lane(runtime, NULL, PST_LANE_PUMPED);
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        trail ran = {0};
        step steps[6];
        pst_task gate;
        assert_ok(pst_graph_add_gate(graph, "gate", &gate));
        add_six(graph, lane, steps, &ran, gate);
        if (kind == PST_GRAPH_SEALED) assert_ok(pst_graph_seal(graph));
        for (int launch = 0; launch < (kind == PST_GRAPH_SEALED ? 3 : 1); launch++) {
            ran.length = 0;
            assert_ok(pst_gate_open(begin(graph, (pst_graph_kind)kind), gate, NULL));
            pump(runtime);
            assert_ran(&ran, "soon 1", "soon 2", "a", "b", "late 1", "late 2");
        }
        pst_task_release(gate);
        pst_runtime_destroy(runtime);
    }
}

static void tasks_that_a_launch_starts_with_compete_as_well(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_priority_lane(runtime, NULL, PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    trail ran = {0};
    step steps[6];
    add_six(graph, lane, steps, &ran, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    (void)begin(graph, PST_GRAPH_SEALED);
    pump(runtime);
    assert_ran(&ran, "soon 1", "soon 2", "a", "b", "late 1", "late 2");
    pst_runtime_destroy(runtime);
}

/* A task that becomes ready while the lane's turn goes on. */
typedef struct opener {
    step self;
    pst_launch *launch;
    pst_task gate;
} opener;

static pst_status open_gate(void *argument, pst_stream *stream) {
    opener *self = argument;
    assert_ok(pst_gate_open(*self->launch, self->gate, NULL));
    return step_start(&self->self, stream);
}

static void what_gets_ready_during_a_turn_goes_before_what_is_less_urgent(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_runtime *runtime = open_runtime(0);
        pst_lane *lane = open_priority_lane(runtime, NULL, PST_LANE_PUMPED);
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        trail ran = {0};
        pst_launch launch = {graph, 0};
        opener first = {.self = {.where = &ran, .name = "opens"}, .launch = &launch};
        step normal = {.where = &ran, .name = "normal"}, soon = {.where = &ran, .name = "soon"};
        assert_ok(pst_graph_add_gate(graph, "gate", &first.gate));
        const pst_task_options opening = {.size = sizeof opening,
                                          .lane = lane,
                                          .work = {open_gate, NULL, &first},
                                          .priority = -1};
        assert_ok(pst_graph_add(graph, &opening, NULL));
        pst_task_release(add_urgent(graph, lane, &normal, 0, NO_TASK));
        pst_task_release(add_urgent(graph, lane, &soon, -2, first.gate));
        if (kind == PST_GRAPH_SEALED) assert_ok(pst_graph_seal(graph));
        launch = begin(graph, (pst_graph_kind)kind);
        (void)one_turn(runtime, 8);
        assert_ran(&ran, "opens", "soon", "normal");
        pst_task_release(first.gate);
        pst_runtime_destroy(runtime);
    }
}

/* The stream's order is the order of launching. */
static void streams_of_a_device_get_the_most_urgent_first(void **state) {
    (void)state;
    queue_device device;
    queue_open(&device);
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_priority_lane(runtime, &device.device, PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    trail ran = {0};
    step steps[6];
    add_six(graph, lane, steps, &ran, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    (void)begin(graph, PST_GRAPH_SEALED);
    for (int i = 0; i < 6; i++) /* a turn's time is bounded, and this machine may be slow */
        (void)pst_run_once(runtime, NULL);
    assert_ran(&ran, "soon 1", "soon 2", "a", "b", "late 1", "late 2");
    (void)queue_drain(&device);
    pump(runtime);
    pst_runtime_destroy(runtime);
    queue_close(&device);
}

static void a_cancel_ends_what_stands_on_any_level(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_priority_lane(runtime, NULL, PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    trail ran = {0};
    step steps[6], stuck = {.where = &ran, .name = "first", .asks = 1};
    add_six(graph, lane, steps, &ran, NO_TASK);
    (void)add_urgent(graph, lane, &stuck, -4, NO_TASK);
    stuck.asks = 1;
    assert_ok(pst_graph_seal(graph));
    const pst_launch launch = begin(graph, PST_GRAPH_SEALED);
    while (stuck.runs == 0)
        (void)one_turn(runtime, 1);
    assert_ok(pst_launch_cancel(launch));
    pump(runtime);
    assert_int_equal(stuck.reported, PST_OK);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(steps[i].callbacks, 1);
        assert_int_equal(steps[i].reported, steps[i].runs ? PST_OK : PST_ECANCELED);
    }
    assert_int_equal(steps[0].runs + steps[1].runs + steps[3].runs + steps[5].runs, 0);
    pst_runtime_destroy(runtime);
}

static void a_priority_that_means_nothing_is_refused(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lanes[] = {open_lane(runtime, "free", PST_LANE_PUMPED),
                         open_lane_in_order(runtime, "tickets", PST_LANE_PUMPED),
                         open_priority_lane(runtime, NULL, PST_LANE_PUMPED)};
    static const int wrong[] = {-1, 1, PST_PRIORITY_LEAST_URGENT + 1};
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        for (int i = 0; i < 3; i++) {
            step a = {.name = "hasty"};
            pst_task_options options = step_options(&a, lanes[i]);
            options.priority = wrong[i];
            assert_status(pst_graph_add(graph, &options, NULL), PST_EINVAL);
            assert_error(runtime, "hasty", "priority");
        }
    }
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_most_urgent_of_the_ready_tasks_is_launched),
        cmocka_unit_test(tasks_that_a_launch_starts_with_compete_as_well),
        cmocka_unit_test(what_gets_ready_during_a_turn_goes_before_what_is_less_urgent),
        cmocka_unit_test(streams_of_a_device_get_the_most_urgent_first),
        cmocka_unit_test(a_cancel_ends_what_stands_on_any_level),
        cmocka_unit_test(a_priority_that_means_nothing_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
