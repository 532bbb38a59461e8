/* Failures: what fails, what is canceled because of it, poison, destroying with work in flight. */
#include "tests/sched/harness.h"

/* A diamond with a tail and a task aside, on two lanes:
 *      0 -> 1,2,3 -> 4 -> 5        6 */
#define TASKS 7
static const int edges[][2] = {{0, 1}, {0, 2}, {0, 3}, {1, 4}, {2, 4}, {3, 4}, {4, 5}};
#define EDGES (sizeof edges / sizeof edges[0])

static int is_behind(int task, int cause) {
    for (size_t e = 0; e < EDGES; e++)
        if (edges[e][1] == task && (edges[e][0] == cause || is_behind(edges[e][0], cause)))
            return 1;
    return 0;
}

typedef struct fixture {
    pst_runtime *runtime;
    pst_lane *lanes[2];
    pst_graph *graph;
    pst_launch launch;
    step steps[TASKS];
    pst_task tasks[TASKS];
    char names[TASKS][16];
} fixture;

static void build(fixture *f, pst_graph_kind kind, pst_lane_mode mode, int failing, int by_test) {
    *f = (fixture){.runtime = open_runtime(20000)};
    f->lanes[0] = open_lane(f->runtime, "gather", mode);
    f->lanes[1] = open_lane(f->runtime, "reduce", mode);
    f->graph = open_graph(f->runtime, kind, "diamond");
    for (int i = 0; i < TASKS; i++) {
        (void)snprintf(f->names[i], sizeof f->names[i], "task%d", i);
        f->steps[i] = (step){.name = f->names[i], .asks = by_test ? 2 : 0};
        if (i == failing) f->steps[i].result = PST_EPEER;
        pst_task after[TASKS];
        pst_task_options options = step_options(&f->steps[i], f->lanes[i % 2]);
        for (size_t e = 0; e < EDGES; e++)
            if (edges[e][1] == i) after[options.after_count++] = f->tasks[edges[e][0]];
        options.after = after;
        options.ticket = 100 + (uint64_t)i;
        assert_ok(pst_graph_add(f->graph, &options, &f->tasks[i]));
    }
    f->launch = (pst_launch){f->graph, 0};
    if (kind == PST_GRAPH_GROWING) return;
    assert_ok(pst_graph_seal(f->graph));
    assert_ok(pst_graph_launch(f->graph, &f->launch));
}

static void close_fixture(fixture *f) {
    for (int i = 0; i < TASKS; i++)
        pst_task_release(f->tasks[i]);
    pst_runtime_destroy(f->runtime);
}

static void check_outcome(const fixture *f, int failing) {
    for (int i = 0; i < TASKS; i++) {
        const int ran = !is_behind(i, failing);
        const pst_status status = i == failing || !ran ? PST_EPEER : PST_OK;
        assert_int_equal(f->steps[i].callbacks, 1);
        assert_int_equal(f->steps[i].reported, ran ? status : PST_ESKIPPED);
        assert_int_equal(f->steps[i].runs, ran);
        assert_int_equal(pst_task_test(f->launch, f->tasks[i]), status);
    }
}

static void each_task_failed_in_turn(void **state) {
    (void)state;
    for (int kind = 0; kind < 2; kind++)
        for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED)
            for (int by_test = 0; by_test < 2; by_test++)
                for (int failing = 0; failing < TASKS; failing++) {
                    fixture f;
                    build(&f, (pst_graph_kind)kind, (pst_lane_mode)mode, failing, by_test);
                    assert_status(pst_launch_wait(f.launch), PST_EPEER);
                    check_outcome(&f, failing);
                    assert_error(f.runtime, "rank 3", f.names[failing], "graph diamond",
                                 failing % 2 ? "lane reduce" : "lane gather");
                    assert_ok(pst_runtime_status(f.runtime));
                    close_fixture(&f);
                }
}

static void the_text_of_a_failure_names_the_ticket(void **state) {
    (void)state;
    fixture f;
    build(&f, PST_GRAPH_SEALED, PST_LANE_PUMPED, 2, 0);
    pump(f.runtime);
    assert_error(f.runtime, "ticket 102", "task2", "lane gather");
    close_fixture(&f);
}

static pst_status fail_with_a_text(void *argument, pst_stream *stream) {
    pst_graph *second;
    (void)stream;
    /* Any call that leaves an error text in the runtime. */
    return pst_graph_create(argument, (pst_graph_kind)77, "what the work says", &second);
}

static void the_text_of_the_work_itself_is_carried_on(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step silent = {.name = "silent", .result = PST_EIO};
    const pst_task_options talks = {.size = sizeof talks,
                                    .name = "talks",
                                    .lane = lane,
                                    .work = {fail_with_a_text, NULL, runtime}};
    assert_ok(pst_graph_add(graph, &talks, NULL));
    pump(runtime);
    assert_error(runtime, "task talks", "what the work says", "77");
    const pst_task_options says_nothing = step_options(&silent, lane);
    assert_ok(pst_graph_add(graph, &says_nothing, NULL));
    pump(runtime);
    char text[1024];
    (void)pst_runtime_error(runtime, text, sizeof text);
    assert_non_null(strstr(text, "task silent"));
    assert_null(strstr(text, "what the work says"));
    pst_runtime_destroy(runtime);
}

static void after_a_failure_the_graph_runs_again(void **state) {
    (void)state;
    fixture f;
    build(&f, PST_GRAPH_SEALED, PST_LANE_PUMPED, 1, 0);
    assert_status(pst_launch_wait(f.launch), PST_EPEER);
    f.steps[1].result = PST_OK;
    assert_ok(pst_graph_launch(f.graph, &f.launch));
    assert_ok(pst_launch_wait(f.launch));
    for (int i = 0; i < TASKS; i++)
        assert_ok(pst_task_test(f.launch, f.tasks[i]));
    close_fixture(&f);
}

static void a_pending_start_without_a_test_fails(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a", .asks = 1};
    pst_task_options options = step_options(&a, lane);
    options.work.test = NULL;
    assert_ok(pst_graph_add(graph, &options, NULL));
    pump(runtime);
    assert_int_equal(a.reported, PST_EINVAL);
    pst_runtime_destroy(runtime);
}

static void an_answer_that_is_no_status_counts_as_an_invalid_argument(void **state) {
    (void)state;
    const int answers[] = {PST_ESKIPPED - 1, -32, -100, -1000};
    for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++) {
        const pst_status answer = (pst_status)answers[i];
        pst_runtime *runtime = open_runtime(20000);
        pst_lane *lane = open_lane(runtime, "lane", PST_LANE_PUMPED);
        pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
        step a = {.name = "a", .result = answer, .asks = (int)i % 2}, b = {.name = "b"};
        const pst_task ta = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
        const pst_task tb = add_step(graph, lane, &b, ta, NO_TASK, NO_TASK);
        pst_launch launch;
        assert_ok(pst_graph_seal(graph));
        assert_ok(pst_graph_launch(graph, &launch));
        assert_status(pst_task_wait(launch, ta, NULL), PST_EINVAL);
        assert_status(pst_task_wait(launch, tb, NULL), PST_EINVAL);
        assert_status(pst_launch_wait(launch), PST_EINVAL);
        assert_int_equal(a.reported, PST_EINVAL);
        assert_int_equal(b.reported, PST_ESKIPPED);
        pst_runtime_poison(runtime, answer, "no status");
        assert_status(pst_runtime_status(runtime), PST_EINVAL);
        pst_runtime_destroy(runtime);
    }
}

static void a_long_chain_is_canceled_without_recursion(void **state) {
    (void)state;
    enum { LENGTH = 200000 };
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lanes[] = {open_lane(runtime, "a", PST_LANE_PUMPED),
                         open_lane(runtime, "b", PST_LANE_PUMPED)};
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "chain");
    step first = {.name = "first", .result = PST_EIO}, last = {.name = "last"};
    pst_task before = add_step(graph, lanes[0], &first, NO_TASK, NO_TASK, NO_TASK);
    for (size_t i = 0; i < LENGTH; i++) {
        const pst_task_options options = {
            .size = sizeof options, .lane = lanes[i % 2], .after = &before, .after_count = 1};
        pst_task task;
        assert_ok(pst_graph_add(graph, &options, &task));
        before = task;
    }
    (void)add_step(graph, lanes[0], &last, before, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, NULL));
    pump(runtime);
    assert_int_equal(last.reported, PST_ESKIPPED);
    assert_int_equal(last.runs, 0);
    pst_runtime_destroy(runtime);
}

static void poison_ends_everything_that_is_pending(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_runtime *runtime = open_runtime(20000);
        pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        step a = {.name = "a"}, b = {.name = "b"}, c = {.name = "c", .asks = 3};
        pst_task gate;
        assert_ok(pst_graph_add_gate(graph, "gate", &gate));
        pst_task ta = add_step(graph, lane, &a, gate, NO_TASK, NO_TASK);
        pst_task tb = add_step(graph, lane, &b, ta, NO_TASK, NO_TASK);
        pst_task tc = add_step(graph, lane, &c, NO_TASK, NO_TASK, NO_TASK);
        pst_launch launch = {graph, 0};
        if (kind == PST_GRAPH_SEALED) {
            assert_ok(pst_graph_seal(graph));
            assert_ok(pst_graph_launch(graph, &launch));
        }
        (void)pst_run_once(runtime, NULL);
        pst_runtime_poison(runtime, PST_EPEER, "rank 1 has gone");
        pst_runtime_poison(runtime, PST_EIO, "too late");
        assert_status(pst_runtime_status(runtime), PST_EPEER);
        assert_error(runtime, "rank 1 has gone");
        pump(runtime);
        assert_int_equal(a.reported, PST_ESKIPPED);
        assert_int_equal(b.reported, PST_ESKIPPED);
        assert_int_equal(c.reported, PST_OK); /* was launched: it may end */
        assert_int_equal(a.callbacks + b.callbacks + c.callbacks, 3);
        assert_status(pst_task_wait(launch, tc, NULL), PST_EPEER);
        assert_status(pst_launch_wait(launch), PST_EPEER);
        const pst_task_options options = step_options(&a, lane);
        if (kind == PST_GRAPH_SEALED)
            assert_status(pst_graph_launch(graph, NULL), PST_EPEER);
        else
            assert_status(pst_graph_add(graph, &options, NULL), PST_EPEER);
        const pst_task tasks[] = {gate, ta, tb, tc};
        for (size_t i = 0; i < 4; i++)
            pst_task_release(tasks[i]);
        pst_runtime_destroy(runtime);
    }
}

static pst_status poison_from_within(void *argument, pst_stream *stream) {
    (void)stream;
    pst_runtime_poison(argument, PST_EDEVICE, "from a task");
    return PST_OK;
}

static void a_task_may_poison_its_runtime(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step b = {.name = "b"}, c = {.name = "c"};
    pst_task gate, ta;
    const pst_task_options options = {.size = sizeof options,
                                      .name = "a",
                                      .lane = lane,
                                      .work = {poison_from_within, NULL, runtime}};
    assert_ok(pst_graph_add(graph, &options, &ta));
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    (void)add_step(graph, lane, &b, ta, NO_TASK, NO_TASK);
    (void)add_step(graph, lane, &c, gate, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    pst_launch launch;
    if (pst_graph_launch(graph, &launch) == PST_OK)
        assert_status(pst_launch_wait(launch), PST_EDEVICE);
    while (callbacks_of(&b) == 0 || callbacks_of(&c) == 0)
        yield_briefly();
    assert_int_equal(b.reported, PST_ESKIPPED);
    assert_int_equal(c.reported, PST_ESKIPPED);
    pst_runtime_destroy(runtime);
}

static void destroying_ends_what_is_in_flight(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++)
        for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED) {
            pst_runtime *runtime = open_runtime(20000);
            pst_lane *lane = open_lane(runtime, "gather", (pst_lane_mode)mode);
            pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
            step steps[4] = {
                {.name = "a", .asks = 50}, {.name = "b"}, {.name = "c"}, {.name = "d"}};
            pst_task gate, before = NO_TASK;
            assert_ok(pst_graph_add_gate(graph, "gate", &gate));
            for (size_t i = 0; i < 3; i++)
                before = add_step(graph, lane, &steps[i], before, NO_TASK, NO_TASK);
            (void)add_step(graph, lane, &steps[3], gate, NO_TASK, NO_TASK);
            if (kind == PST_GRAPH_SEALED) {
                assert_ok(pst_graph_seal(graph));
                assert_ok(pst_graph_launch(graph, NULL));
            }
            (void)pst_run_once(runtime, NULL);
            pst_runtime_destroy(runtime);
            for (size_t i = 0; i < 4; i++)
                assert_int_equal(steps[i].callbacks, 1);
            assert_int_equal(steps[3].reported, PST_ECANCELED);
            assert_int_equal(steps[3].runs, 0);
        }
}

static void destroying_abandons_what_never_ends(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a", .asks = -1}, b = {.name = "b"};
    pst_task ta = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(graph, lane, &b, ta, NO_TASK, NO_TASK);
    while (runs_of(&a) == 0)
        yield_briefly();
    pst_runtime_destroy(runtime);
    assert_int_equal(a.callbacks, 1);
    assert_int_equal(a.reported, PST_ECANCELED);
    assert_int_equal(b.callbacks, 1);
}

static void runtime_options_are_checked(void **state) {
    (void)state;
    pst_runtime *runtime = (pst_runtime *)&runtime;
    pst_runtime_options options = {.size = 1};
    assert_status(pst_runtime_create(&options, &runtime), PST_EINVAL);
    assert_null(runtime);
    options = (pst_runtime_options){.size = sizeof options, .rank = -1};
    assert_status(pst_runtime_create(&options, &runtime), PST_EINVAL);
    assert_status(pst_runtime_create(NULL, NULL), PST_EINVAL);
    assert_ok(pst_runtime_create(NULL, &runtime));
    int idle = 0;
    assert_ok(pst_run_once(runtime, &idle));
    assert_int_equal(idle, 1);
    assert_string_equal(pst_runtime_host(runtime)->ops->name, "host");
    pst_runtime_destroy(runtime);
    pst_runtime_destroy(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_task_failed_in_turn),
        cmocka_unit_test(the_text_of_a_failure_names_the_ticket),
        cmocka_unit_test(the_text_of_the_work_itself_is_carried_on),
        cmocka_unit_test(after_a_failure_the_graph_runs_again),
        cmocka_unit_test(a_pending_start_without_a_test_fails),
        cmocka_unit_test(an_answer_that_is_no_status_counts_as_an_invalid_argument),
        cmocka_unit_test(a_long_chain_is_canceled_without_recursion),
        cmocka_unit_test(poison_ends_everything_that_is_pending),
        cmocka_unit_test(a_task_may_poison_its_runtime),
        cmocka_unit_test(destroying_ends_what_is_in_flight),
        cmocka_unit_test(destroying_abandons_what_never_ends),
        cmocka_unit_test(runtime_options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
