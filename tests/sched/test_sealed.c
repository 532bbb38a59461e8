/* Sealed graphs: building, what sealing refuses, launching again and again, canceling. */
#include "tests/sched/harness.h"

typedef struct fixture {
    pst_runtime *runtime;
    pst_lane *lane, *other;
    pst_graph *graph;
    trail ran;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    f->runtime = open_runtime(20000);
    f->lane = open_lane(f->runtime, "reduce", PST_LANE_PUMPED);
    f->other = open_lane(f->runtime, "gather", PST_LANE_PUMPED);
    f->graph = open_graph(f->runtime, PST_GRAPH_SEALED, "backward");
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    pst_runtime_destroy(f->runtime);
    free(f);
    return 0;
}

static pst_launch launch_and_pump(fixture *f) {
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    pump(f->runtime);
    return launch;
}

static void tasks_run_after_their_predecessors(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"},
         c = {.where = &f->ran, .name = "c"}, d = {.where = &f->ran, .name = "d"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(f->graph, f->other, &b, ta, NO_TASK, NO_TASK);
    pst_task tc = add_step(f->graph, f->lane, &c, tb, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->other, &d, ta, tb, tc);
    assert_ok(pst_graph_seal(f->graph));
    assert_int_equal(pst_graph_size(f->graph), 4);
    assert_ok(pst_launch_wait(launch_and_pump(f)));
    assert_ran(&f->ran, "a", "b", "c", "d");
    assert_int_equal(d.callbacks, 1);
    assert_int_equal(d.reported, PST_OK);
}

static void edges_added_later_count_as_well(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(f->graph, f->lane, &b, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_add_edge(f->graph, tb, ta));
    assert_ok(pst_graph_seal(f->graph));
    launch_and_pump(f);
    assert_ran(&f->ran, "b", "a");
}

static void a_task_may_have_no_work(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"},
         c = {.where = &f->ran, .name = "c"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(f->graph, f->other, &b, NO_TASK, NO_TASK, NO_TASK);
    const pst_task after[] = {ta, tb};
    const pst_task_options join = {
        .size = sizeof join, .name = "join", .lane = f->lane, .after = after, .after_count = 2};
    pst_task tj;
    assert_ok(pst_graph_add(f->graph, &join, &tj));
    (void)add_step(f->graph, f->other, &c, tj, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    launch_and_pump(f);
    assert_int_equal(f->ran.length, 3);
    assert_string_equal(f->ran.names[2], "c");
}

static void an_empty_graph_is_done_at_once(void **state) {
    fixture *f = *state;
    pst_launch launch;
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_launch_wait(launch));
}

static void a_cycle_is_named_in_order(void **state) {
    fixture *f = *state;
    step s[4] = {{.where = &f->ran, .name = "load"},
                 {.where = &f->ran, .name = "gather"},
                 {.where = &f->ran, .name = "use"},
                 {.where = &f->ran, .name = "aside"}};
    pst_task t[4];
    for (size_t i = 0; i < 4; i++)
        t[i] = add_step(f->graph, f->lane, &s[i], NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_add_edge(f->graph, t[0], t[1]));
    assert_ok(pst_graph_add_edge(f->graph, t[1], t[2]));
    assert_ok(pst_graph_add_edge(f->graph, t[2], t[0]));
    assert_ok(pst_graph_add_edge(f->graph, t[2], t[3]));
    assert_status(pst_graph_seal(f->graph), PST_ECYCLE);
    char text[1024];
    (void)pst_runtime_error(f->runtime, text, sizeof text);
    const int named = strstr(text, "load -> gather -> use -> load") != NULL ||
                      strstr(text, "gather -> use -> load -> gather") != NULL ||
                      strstr(text, "use -> load -> gather -> use") != NULL;
    assert_true(named);
    assert_null(strstr(text, "aside"));
    assert_non_null(strstr(text, "graph backward"));
}

static void a_task_behind_itself_is_a_cycle(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_add_edge(f->graph, ta, ta));
    assert_status(pst_graph_seal(f->graph), PST_ECYCLE);
    assert_error(f->runtime, "a -> a");
}

static void a_cycle_through_the_outer_thread_is_named(void **state) {
    fixture *f = *state;
    step gather = {.where = &f->ran, .name = "gather"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "forward done", &gate));
    pst_task task = add_step(f->graph, f->lane, &gather, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_outer_wait(f->graph, task));
    assert_ok(pst_graph_outer_open(f->graph, gate));
    assert_status(pst_graph_seal(f->graph), PST_ECYCLE);
    assert_error(f->runtime, "the outer thread's wait for gather",
                 "the outer thread's opening of forward done");
}

static void an_outer_program_in_the_right_order_is_sealed(void **state) {
    fixture *f = *state;
    step gather = {.where = &f->ran, .name = "gather"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "forward done", &gate));
    pst_task task = add_step(f->graph, f->lane, &gather, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_outer_open(f->graph, gate));
    assert_ok(pst_graph_outer_wait(f->graph, task));
    assert_ok(pst_graph_seal(f->graph));
}

static void a_lane_that_keeps_the_order_of_adding_can_close_a_cycle(void **state) {
    fixture *f = *state;
    pst_lane *ordered = open_lane_in_order(f->runtime, "tickets", PST_LANE_PUMPED);
    step a = {.where = &f->ran, .name = "first"}, b = {.where = &f->ran, .name = "second"};
    pst_task ta = add_step(f->graph, ordered, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(f->graph, ordered, &b, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_add_edge(f->graph, tb, ta));
    assert_status(pst_graph_seal(f->graph), PST_ECYCLE);
    assert_error(f->runtime, "first", "second");
}

static void after_a_cycle_the_graph_can_still_be_changed(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_add_edge(f->graph, ta, ta));
    assert_status(pst_graph_seal(f->graph), PST_ECYCLE);
    (void)add_step(f->graph, f->lane, &b, ta, NO_TASK, NO_TASK);
    assert_int_equal(pst_graph_size(f->graph), 2);
    assert_status(pst_graph_seal(f->graph), PST_ECYCLE);
}

static void an_edge_between_graphs_is_refused(void **state) {
    fixture *f = *state;
    pst_graph *forward = open_graph(f->runtime, PST_GRAPH_SEALED, "forward");
    step a = {.where = &f->ran, .name = "mine"}, b = {.where = &f->ran, .name = "theirs"};
    pst_task mine = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task theirs = add_step(forward, f->lane, &b, NO_TASK, NO_TASK, NO_TASK);
    assert_status(pst_graph_add_edge(f->graph, theirs, mine), PST_EINVAL);
    assert_error(f->runtime, "rank 3", "graph backward", "mine");
    pst_task_options options = step_options(&a, f->lane);
    options.after = &theirs;
    options.after_count = 1;
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    assert_error(f->runtime, "graph backward", "task mine", "another graph");
}

static void a_lane_of_another_runtime_is_refused(void **state) {
    fixture *f = *state;
    pst_runtime *second = open_runtime(0);
    pst_lane *foreign = open_lane(second, "foreign", PST_LANE_PUMPED);
    step a = {.where = &f->ran, .name = "a"};
    const pst_task_options options = step_options(&a, foreign);
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    assert_error(f->runtime, "task a", "another runtime");
    pst_runtime_destroy(second);
}

static void a_borrowed_lane_takes_no_tasks(void **state) {
    fixture *f = *state;
    pst_lane *compute = open_lane(f->runtime, "compute", PST_LANE_BORROWED);
    step a = {.where = &f->ran, .name = "a"};
    const pst_task_options options = step_options(&a, compute);
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    assert_error(f->runtime, "task a", "borrowed");
}

static void a_sealed_graph_takes_no_more_tasks(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "late"};
    pst_task gate;
    assert_ok(pst_graph_seal(f->graph));
    const pst_task_options options = step_options(&a, f->lane);
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_ESTATE);
    assert_error(f->runtime, "graph backward", "late", "sealed");
    assert_status(pst_graph_add_gate(f->graph, "gate", &gate), PST_ESTATE);
    assert_status(pst_graph_seal(f->graph), PST_ESTATE);
}

static void a_graph_that_is_not_sealed_is_not_launched(void **state) {
    fixture *f = *state;
    assert_status(pst_graph_launch(f->graph, NULL), PST_ESTATE);
    assert_error(f->runtime, "graph backward", "pst_graph_seal");
}

static void the_next_launch_waits_until_all_tasks_are_launched(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->other, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    assert_status(pst_graph_launch(f->graph, NULL), PST_EBUSY);
    pump(f->runtime);
    assert_ok(pst_graph_launch(f->graph, NULL));
    pump(f->runtime);
    assert_ran(&f->ran, "a", "b", "a", "b");
}

static void the_next_launch_may_begin_while_a_last_task_is_pending(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a", .asks = 1000000};
    (void)add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch first, second;
    assert_ok(pst_graph_launch(f->graph, &first));
    assert_ok(pst_run_once(f->runtime, NULL));
    assert_ok(pst_graph_launch(f->graph, &second));
    assert_int_equal(second.number, 2);
    assert_status(pst_task_test(first, (pst_task){f->graph, 0}), PST_PENDING);
    __atomic_store_n(&a.asks, 0, __ATOMIC_RELEASE);
    assert_ok(pst_launch_wait(first));
    assert_ok(pst_launch_wait(second));
    assert_int_equal(a.callbacks, 2);
}

/* A task that keeps its lane's turn from ending. */
typedef struct brake {
    int entered, let_go;
} brake;

static pst_status hold_turn(void *argument, pst_stream *stream) {
    brake *self = argument;
    (void)stream;
    __atomic_store_n(&self->entered, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&self->let_go, __ATOMIC_ACQUIRE))
        yield_briefly();
    for (int i = 0; i < 200; i++)
        yield_briefly();
    return PST_OK;
}

static pst_graph *seal_brake(fixture *f, pst_lane *lane, brake *self) {
    pst_graph *graph = open_graph(f->runtime, PST_GRAPH_SEALED, "brake");
    const pst_task_options options = {
        .size = sizeof options, .lane = lane, .work = {hold_turn, NULL, self}};
    assert_ok(pst_graph_add(graph, &options, NULL));
    assert_ok(pst_graph_seal(graph));
    return graph;
}

/* The worker launches `a` and then cannot end its turn, at the end of which it counts it, before
 * the next launch has begun. */
static void after_a_wait_for_the_last_task_the_next_launch_begins(void **state) {
    fixture *f = *state;
    pst_lane *busy = open_lane(f->runtime, "busy", PST_LANE_WORKER);
    step b = {.name = "b"};
    const pst_task_options a = {.size = sizeof a, .name = "a", .lane = busy}; /* no callback */
    pst_task ta;
    assert_ok(pst_graph_add(f->graph, &a, &ta));
    pst_task tb = add_step(f->graph, f->lane, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    brake first = {0}, second = {0};
    assert_ok(pst_graph_launch(seal_brake(f, busy, &first), NULL));
    while (!__atomic_load_n(&first.entered, __ATOMIC_ACQUIRE))
        yield_briefly();
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_graph_launch(seal_brake(f, busy, &second), NULL));
    __atomic_store_n(&first.let_go, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&second.entered, __ATOMIC_ACQUIRE))
        yield_briefly();
    assert_ok(pst_task_wait(launch, tb, NULL));
    __atomic_store_n(&second.let_go, 1, __ATOMIC_RELEASE);
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_launch_wait(launch));
}

static void every_launch_has_its_own_callbacks(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"}, b = {.where = &f->ran, .name = "b"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->lane, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    for (uint64_t k = 1; k <= 100; k++) {
        const pst_launch launch = launch_and_pump(f);
        assert_int_equal(launch.number, k);
        assert_int_equal(a.callbacks, k);
        assert_int_equal(b.callbacks, k);
        assert_ok(pst_task_test(launch, ta));
    }
}

static void relaunch(void *argument, pst_status status) {
    fixture *f = argument;
    assert_int_equal(status, PST_OK);
    if (f->ran.length < 50) assert_ok(pst_graph_launch(f->graph, NULL));
}

static void the_last_callback_may_launch_again(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task_options options = step_options(&a, f->lane);
    options.done = relaunch;
    options.done_argument = f;
    assert_ok(pst_graph_add(f->graph, &options, NULL));
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    pump(f->runtime);
    assert_int_equal(f->ran.length, 50);
}

static void a_launch_that_is_long_past_cannot_be_asked_about(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    const pst_launch first = launch_and_pump(f);
    const pst_launch second = launch_and_pump(f);
    assert_ok(pst_task_test(first, ta));
    launch_and_pump(f);
    assert_ok(pst_task_test(second, ta));
    assert_status(pst_task_test(first, ta), PST_ESTATE);
    assert_status(pst_task_test((pst_launch){f->graph, 9}, ta), PST_ESTATE);
    assert_error(f->runtime, "graph backward", "9");
}

static void cancel_ends_what_is_not_launched(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a", .asks = 5}, b = {.where = &f->ran, .name = "b"},
         c = {.where = &f->ran, .name = "c"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    pst_task ta = add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(f->graph, f->other, &b, ta, NO_TASK, NO_TASK);
    pst_task tc = add_step(f->graph, f->other, &c, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_run_once(f->runtime, NULL));
    assert_ok(pst_launch_cancel(launch));
    assert_status(pst_launch_wait(launch), PST_ECANCELED);
    assert_ran(&f->ran, "a");
    assert_int_equal(a.reported, PST_OK);
    assert_int_equal(b.reported, PST_ECANCELED);
    assert_int_equal(c.reported, PST_ECANCELED);
    assert_status(pst_task_test(launch, tc), PST_ECANCELED);
    assert_status(pst_gate_open(launch, gate, NULL), PST_ECANCELED);
    assert_int_equal(a.callbacks + b.callbacks + c.callbacks, 3);
}

static void after_a_cancel_the_graph_runs_again(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(f->graph, "gate", &gate));
    (void)add_step(f->graph, f->lane, &a, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_launch_cancel(launch));
    assert_status(pst_launch_wait(launch), PST_ECANCELED);
    assert_ok(pst_graph_launch(f->graph, &launch));
    assert_ok(pst_gate_open(launch, gate, NULL));
    assert_ok(pst_launch_wait(launch));
    assert_ran(&f->ran, "a");
}

static void a_graph_in_use_is_not_destroyed(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    (void)add_step(f->graph, f->lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, NULL));
    assert_status(pst_graph_destroy(f->graph), PST_EBUSY);
    assert_error(f->runtime, "graph backward", "1 unfinished");
    pump(f->runtime);
    assert_ok(pst_graph_destroy(f->graph));
    assert_ok(pst_graph_destroy(NULL));
}

static void wrong_options_are_refused(void **state) {
    fixture *f = *state;
    step a = {.where = &f->ran, .name = "a"};
    pst_task_options options = step_options(&a, f->lane);
    options.size = 1;
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    options = step_options(&a, NULL);
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    assert_error(f->runtime, "task a", "no lane");
    options = step_options(&a, f->lane);
    options.after_count = 1;
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    options = step_options(&a, f->lane);
    options.after_event_count = 5;
    assert_status(pst_graph_add(f->graph, &options, NULL), PST_EINVAL);
    assert_error(f->runtime, "after_events");
    assert_status(pst_graph_add(NULL, &options, NULL), PST_EINVAL);
    assert_int_equal(pst_graph_size(f->graph), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(tasks_run_after_their_predecessors),
        TEST(edges_added_later_count_as_well),
        TEST(a_task_may_have_no_work),
        TEST(an_empty_graph_is_done_at_once),
        TEST(a_cycle_is_named_in_order),
        TEST(a_task_behind_itself_is_a_cycle),
        TEST(a_cycle_through_the_outer_thread_is_named),
        TEST(an_outer_program_in_the_right_order_is_sealed),
        TEST(a_lane_that_keeps_the_order_of_adding_can_close_a_cycle),
        TEST(after_a_cycle_the_graph_can_still_be_changed),
        TEST(an_edge_between_graphs_is_refused),
        TEST(a_lane_of_another_runtime_is_refused),
        TEST(a_borrowed_lane_takes_no_tasks),
        TEST(a_sealed_graph_takes_no_more_tasks),
        TEST(a_graph_that_is_not_sealed_is_not_launched),
        TEST(the_next_launch_waits_until_all_tasks_are_launched),
        TEST(the_next_launch_may_begin_while_a_last_task_is_pending),
        TEST(after_a_wait_for_the_last_task_the_next_launch_begins),
        TEST(every_launch_has_its_own_callbacks),
        TEST(the_last_callback_may_launch_again),
        TEST(a_launch_that_is_long_past_cannot_be_asked_about),
        TEST(cancel_ends_what_is_not_launched),
        TEST(after_a_cancel_the_graph_runs_again),
        TEST(a_graph_in_use_is_not_destroyed),
        TEST(wrong_options_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
