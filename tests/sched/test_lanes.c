/* Lanes: launch modes, orders, who serves them, gates and waits of the outer thread. */
#include "tests/sched/harness.h"

static void a_pumped_runtime_owns_no_thread(void **state) {
    (void)state;
    const int before = count_threads();
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "pumped", PST_LANE_PUMPED);
    (void)open_lane(runtime, "compute", PST_LANE_BORROWED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "a", .asks = 2};
    (void)add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, NULL));
    pump(runtime);
    assert_int_equal(count_threads(), before);
    assert_int_equal(a.callbacks, 1);
    pst_runtime_destroy(runtime);
}

static void a_lane_with_a_worker_owns_one_thread(void **state) {
    (void)state;
    start_first_thread();
    const int before = count_threads();
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    const pst_lane_options shared = {
        .size = sizeof shared, .name = "reduce", .mode = PST_LANE_SHARED, .share_with = lane};
    pst_lane *second;
    assert_ok(pst_lane_create(runtime, &shared, &second));
    assert_int_equal(count_threads(), before + 1);
    assert_string_equal(pst_lane_name(second), "reduce");
    pst_runtime_destroy(runtime);
    assert_int_equal(count_threads(), before);
}

/* Each of two tasks ends only when the other has begun. */
static pst_status other_has_begun(void *argument) {
    step **both = argument;
    return runs_of(both[1]) > 0 ? PST_OK : PST_PENDING;
}

static pst_status begin_first(void *argument, pst_stream *stream) {
    step **both = argument;
    (void)stream;
    __atomic_fetch_add(&both[0]->runs, 1, __ATOMIC_ACQ_REL);
    return PST_PENDING;
}

static void add_dependent_pair(pst_graph *graph, pst_lane *first, pst_lane *second, step **ab,
                               step **ba) {
    const pst_task_options a = {
        .size = sizeof a, .name = "a", .lane = first, .work = {begin_first, other_has_begun, ab}};
    const pst_task_options b = {
        .size = sizeof b, .name = "b", .lane = second, .work = {begin_first, other_has_begun, ba}};
    assert_ok(pst_graph_add(graph, &a, NULL));
    assert_ok(pst_graph_add(graph, &b, NULL));
}

static void two_lanes_of_one_worker_do_not_lock_each_other_up(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    const pst_lane_options shared = {
        .size = sizeof shared, .name = "reduce", .mode = PST_LANE_SHARED, .share_with = lane};
    pst_lane *second;
    assert_ok(pst_lane_create(runtime, &shared, &second));
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a"}, b = {.name = "b"};
    step *ab[] = {&a, &b}, *ba[] = {&b, &a};
    add_dependent_pair(graph, lane, second, ab, ba);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    pst_runtime_destroy(runtime);
}

static void two_pumped_lanes_do_not_lock_each_other_up(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_lane *second = open_lane(runtime, "reduce", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a"}, b = {.name = "b"};
    step *ab[] = {&a, &b}, *ba[] = {&b, &a};
    add_dependent_pair(graph, lane, second, ab, ba);
    pump(runtime);
    pst_runtime_destroy(runtime);
}

static void by_submission_keeps_the_order_of_adding(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_runtime *runtime = open_runtime(0);
        pst_lane *ordered = open_lane_in_order(runtime, "tickets", PST_LANE_PUMPED);
        pst_lane *free_lane = open_lane(runtime, "free", PST_LANE_PUMPED);
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        trail ran = {0};
        step slow = {.name = "slow", .asks = 3}, a = {.where = &ran, .name = "a"},
             b = {.where = &ran, .name = "b"}, c = {.where = &ran, .name = "c"};
        pst_task ts = add_step(graph, free_lane, &slow, NO_TASK, NO_TASK, NO_TASK);
        pst_task ta = add_step(graph, ordered, &a, ts, NO_TASK, NO_TASK);
        pst_task tb = add_step(graph, ordered, &b, NO_TASK, NO_TASK, NO_TASK);
        pst_task tc = add_step(graph, ordered, &c, NO_TASK, NO_TASK, NO_TASK);
        if (kind == PST_GRAPH_SEALED) {
            assert_ok(pst_graph_seal(graph));
            assert_ok(pst_graph_launch(graph, NULL));
        }
        pump(runtime);
        assert_ran(&ran, "a", "b", "c");
        const pst_task tasks[] = {ts, ta, tb, tc};
        for (size_t i = 0; i < 4; i++)
            pst_task_release(tasks[i]);
        pst_runtime_destroy(runtime);
    }
}

static void by_readiness_takes_what_is_ready(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_PUMPED);
    pst_lane *other = open_lane(runtime, "other", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    trail ran = {0};
    step slow = {.name = "slow", .asks = 3}, a = {.where = &ran, .name = "a"},
         b = {.where = &ran, .name = "b"};
    pst_task ts = add_step(graph, other, &slow, NO_TASK, NO_TASK, NO_TASK);
    (void)add_step(graph, lane, &a, ts, NO_TASK, NO_TASK);
    (void)add_step(graph, lane, &b, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, NULL));
    pump(runtime);
    assert_ran(&ran, "b", "a");
    pst_runtime_destroy(runtime);
}

static void tasks_of_one_lane_do_not_overlap(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a", .asks = 3}, b = {.name = "b"};
    pst_task ta = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(graph, lane, &b, NO_TASK, NO_TASK, NO_TASK);
    (void)pst_run_once(runtime, NULL);
    (void)pst_run_once(runtime, NULL);
    assert_int_equal(a.runs, 1);
    assert_int_equal(b.runs, 0);
    pump(runtime);
    assert_int_equal(b.runs, 1);
    pst_task_release(ta);
    pst_task_release(tb);
    pst_runtime_destroy(runtime);
}

static void lane_options_are_checked(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0), *second = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "pumped", PST_LANE_PUMPED), *made = lane;
    pst_lane *foreign = open_lane(second, "foreign", PST_LANE_WORKER);
    pst_lane_options options = {.size = sizeof options, .mode = PST_LANE_PUMPED};
    assert_status(pst_lane_create(runtime, &options, &made), PST_EINVAL);
    assert_null(made);
    options.name = "x";
    options.mode = PST_LANE_SHARED;
    assert_status(pst_lane_create(runtime, &options, &made), PST_EINVAL);
    assert_error(runtime, "rank 3", "lane x", "share_with");
    options.share_with = lane;
    assert_status(pst_lane_create(runtime, &options, &made), PST_EINVAL);
    assert_error(runtime, "lane x", "lane pumped");
    options.share_with = foreign;
    assert_status(pst_lane_create(runtime, &options, &made), PST_EINVAL);
    options = (pst_lane_options){.size = 3, .name = "x"};
    assert_status(pst_lane_create(runtime, &options, &made), PST_EINVAL);
    assert_status(pst_lane_create(runtime, NULL, &made), PST_EINVAL);
    assert_status(pst_lane_create(NULL, &options, &made), PST_EINVAL);
    pst_runtime_destroy(second);
    pst_runtime_destroy(runtime);
}

static void a_device_of_another_interface_version_is_refused(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_device_ops ops = *pst_runtime_host(runtime)->ops;
    ops.api_version = PST_DEVICE_API_VERSION + 1;
    ops.name = "newer";
    pst_device device = {&ops, pst_runtime_host(runtime)->context};
    const pst_lane_options options = {.size = sizeof options, .name = "x", .device = &device};
    pst_lane *lane;
    assert_status(pst_lane_create(runtime, &options, &lane), PST_EUNSUPPORTED);
    assert_error(runtime, "lane x", "device newer");
    pst_runtime_destroy(runtime);
}

static void waking_a_lane_makes_its_worker_ask_again(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a", .asks = -1};
    pst_task ta = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    while (runs_of(&a) == 0)
        yield_briefly();
    __atomic_store_n(&a.asks, 0, __ATOMIC_RELEASE);
    pst_lane_wake(lane);
    while (callbacks_of(&a) == 0)
        yield_briefly();
    assert_ok(pst_task_test((pst_launch){graph, 0}, ta));
    pst_task_release(ta);
    pst_runtime_destroy(runtime);
}

static void a_waiting_thread_serves_pumped_lanes(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "pumped", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    pst_task ta = add_step(graph, lane, &a, gate, NO_TASK, NO_TASK);
    pst_task tb = add_step(graph, lane, &b, ta, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(graph, &launch));
    assert_ok(pst_gate_open(launch, gate, NULL));
    assert_ok(pst_task_wait(launch, tb, NULL));
    assert_ok(pst_task_wait(launch, gate, NULL));
    assert_int_equal(a.runs + b.runs, 2);
    pst_runtime_destroy(runtime);
}

static void *wait_for_launch(void *argument) {
    return (void *)(intptr_t)pst_launch_wait(*(pst_launch *)argument);
}

static void opening_a_gate_wakes_those_who_wait(void **state) {
    (void)state;
    for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED) {
        pst_runtime *runtime = open_runtime(0);
        pst_lane *lane = open_lane(runtime, "lane", (pst_lane_mode)mode);
        pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
        step a = {.name = "a"};
        pst_task gate;
        assert_ok(pst_graph_add_gate(graph, "gate", &gate));
        (void)add_step(graph, lane, &a, gate, NO_TASK, NO_TASK);
        assert_ok(pst_graph_seal(graph));
        for (int k = 0; k < 50; k++) {
            pst_launch launch;
            assert_ok(pst_graph_launch(graph, &launch));
            pthread_t waiter;
            void *result;
            assert_int_equal(pthread_create(&waiter, NULL, wait_for_launch, &launch), 0);
            assert_ok(pst_gate_open(launch, gate, NULL));
            assert_int_equal(pthread_join(waiter, &result), 0);
            assert_ok((pst_status)(intptr_t)result);
        }
        pst_runtime_destroy(runtime);
    }
}

static void gates_may_have_predecessors_and_follow_each_other(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "a"}, b = {.name = "b"};
    pst_task gates[50];
    pst_task ta = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    for (size_t i = 0; i < 50; i++) {
        assert_ok(pst_graph_add_gate(graph, "gate", &gates[i]));
        assert_ok(pst_graph_add_edge(graph, i == 0 ? ta : gates[i - 1], gates[i]));
    }
    (void)add_step(graph, lane, &b, gates[49], NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    for (int k = 1; k <= 3; k++) {
        pst_launch launch;
        assert_ok(pst_graph_launch(graph, &launch));
        for (size_t i = 50; i-- > 0;)
            assert_ok(pst_gate_open(launch, gates[i], NULL));
        assert_int_equal(b.runs, k - 1);
        assert_ok(pst_launch_wait(launch));
        assert_int_equal(b.runs, k);
    }
    pst_runtime_destroy(runtime);
}

static void wrong_gates_are_refused(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "a"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "go", &gate));
    pst_task ta = add_step(graph, lane, &a, gate, NO_TASK, NO_TASK);
    assert_status(pst_graph_outer_open(graph, ta), PST_EINVAL);
    assert_ok(pst_graph_seal(graph));
    pst_launch launch;
    assert_status(pst_gate_open((pst_launch){graph, 0}, gate, NULL), PST_ESTATE);
    assert_ok(pst_graph_launch(graph, &launch));
    assert_status(pst_gate_open(launch, ta, NULL), PST_EINVAL);
    assert_error(runtime, "graph g", "no gate");
    assert_status(pst_gate_open(launch, gate, lane), PST_EINVAL);
    assert_error(runtime, "gate go", "lane lane");
    launch.number = 2;
    assert_status(pst_gate_open(launch, gate, NULL), PST_ESTATE);
    assert_error(runtime, "gate go", "current launch 1");
    pst_runtime_destroy(runtime);
}

#define DEADLINE_MS 500

static void a_wait_that_times_out_names_what_it_waits_for(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(DEADLINE_MS);
    pst_lane *gather = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_lane *reduce = open_lane(runtime, "reduce", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "stuck", .asks = -1}, b = {.name = "middle"}, c = {.name = "last"};
    pst_task ta = add_step(graph, gather, &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(graph, reduce, &b, ta, NO_TASK, NO_TASK);
    const pst_task after[] = {tb};
    pst_task_options options = step_options(&c, gather);
    options.after = after;
    options.after_count = 1;
    options.ticket = 17;
    pst_task tc;
    assert_ok(pst_graph_add(graph, &options, &tc));
    assert_ok(pst_graph_seal(graph));
    pst_launch launch;
    assert_ok(pst_graph_launch(graph, &launch));
    assert_status(pst_task_wait(launch, tc, NULL), PST_ETIMEDOUT);
    assert_error(runtime, "rank 3", "lane gather", "task last", "ticket 17", "waits for stuck",
                 "launched and not done");
    __atomic_store_n(&a.asks, 0, __ATOMIC_RELEASE);
    assert_ok(pst_launch_wait(launch));
    pst_runtime_destroy(runtime);
}

static void a_wait_for_a_task_in_a_queue_says_so(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(DEADLINE_MS);
    pst_lane *gather = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "stuck", .asks = -1}, b = {.name = "behind"};
    pst_launch launch;
    (void)add_step(graph, gather, &a, NO_TASK, NO_TASK, NO_TASK);
    const pst_task tb = add_step(graph, gather, &b, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, &launch));
    assert_status(pst_task_wait(launch, tb, NULL), PST_ETIMEDOUT);
    assert_error(runtime, "task behind", "itself", "stands in its lane's queue");
    __atomic_store_n(&a.asks, 0, __ATOMIC_RELEASE);
    assert_ok(pst_launch_wait(launch));
    pst_runtime_destroy(runtime);
}

static void a_wait_behind_a_closed_gate_names_the_gate(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_runtime *runtime = open_runtime(DEADLINE_MS);
        pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        step a = {.name = "a"};
        pst_task gate;
        assert_ok(pst_graph_add_gate(graph, "forward done", &gate));
        pst_task ta = add_step(graph, lane, &a, gate, NO_TASK, NO_TASK);
        pst_launch launch = {graph, 0};
        if (kind == PST_GRAPH_SEALED) {
            assert_ok(pst_graph_seal(graph));
            assert_ok(pst_graph_launch(graph, &launch));
        }
        assert_status(pst_task_wait(launch, ta, NULL), PST_ETIMEDOUT);
        assert_error(runtime, "task a", "forward done", "a gate that is not open");
        assert_status(pst_launch_wait(launch), PST_ETIMEDOUT);
        assert_error(runtime, "forward done");
        pst_task_release(ta);
        pst_task_release(gate);
        pst_runtime_destroy(runtime);
        assert_int_equal(a.reported, PST_ECANCELED);
    }
}

/* Each task adds the next one, so that a thread which helps always finds something to do. */
typedef struct endless {
    pst_graph *graph;
    pst_lane *lane;
    int added, over;
} endless;

static void add_next(void *argument, pst_status status) {
    endless *self = argument;
    assert_ok(status);
    if (self->over) return;
    self->added++;
    const pst_task_options options = {.size = sizeof options,
                                      .name = "next",
                                      .lane = self->lane,
                                      .done = add_next,
                                      .done_argument = self};
    assert_ok(pst_graph_add(self->graph, &options, NULL));
}

static void a_wait_in_vain_ends_though_there_is_always_something_to_do(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(DEADLINE_MS);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "closed");
    endless busy = {.graph = open_graph(runtime, PST_GRAPH_GROWING, "busy"),
                    .lane = open_lane(runtime, "lane", PST_LANE_PUMPED)};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "gate", &gate));
    add_next(&busy, PST_OK);
    assert_status(pst_task_wait((pst_launch){graph, 0}, gate, NULL), PST_ETIMEDOUT);
    assert_true(busy.added > 1);
    busy.over = 1;
    assert_ok(pst_launch_wait((pst_launch){busy.graph, 0}));
    pst_task_release(gate);
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_pumped_runtime_owns_no_thread),
        cmocka_unit_test(a_lane_with_a_worker_owns_one_thread),
        cmocka_unit_test(two_lanes_of_one_worker_do_not_lock_each_other_up),
        cmocka_unit_test(two_pumped_lanes_do_not_lock_each_other_up),
        cmocka_unit_test(by_submission_keeps_the_order_of_adding),
        cmocka_unit_test(by_readiness_takes_what_is_ready),
        cmocka_unit_test(tasks_of_one_lane_do_not_overlap),
        cmocka_unit_test(lane_options_are_checked),
        cmocka_unit_test(a_device_of_another_interface_version_is_refused),
        cmocka_unit_test(waking_a_lane_makes_its_worker_ask_again),
        cmocka_unit_test(a_waiting_thread_serves_pumped_lanes),
        cmocka_unit_test(opening_a_gate_wakes_those_who_wait),
        cmocka_unit_test(gates_may_have_predecessors_and_follow_each_other),
        cmocka_unit_test(wrong_gates_are_refused),
        cmocka_unit_test(a_wait_that_times_out_names_what_it_waits_for),
        cmocka_unit_test(a_wait_for_a_task_in_a_queue_says_so),
        cmocka_unit_test(a_wait_behind_a_closed_gate_names_the_gate),
        cmocka_unit_test(a_wait_in_vain_ends_though_there_is_always_something_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
