/* What the system or the caller's own values make impossible. The linker leads the creation of
 * threads here. */
#include "tests/sched/harness.h"

#include <errno.h>
#include <pthread.h>
#include <sys/resource.h>

static int threads_left = -1; /* until one is refused; -1: none is */

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *argument), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *argument), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*run)(void *argument), void *argument) {
    if (threads_left == 0) return EAGAIN;
    if (threads_left > 0) threads_left--;
    return __real_pthread_create(thread, attributes, run, argument);
}

static pst_status create_lane(pst_runtime *runtime, pst_lane_mode mode, pst_lane **lane) {
    const pst_lane_options options = {.size = sizeof options, .name = "gather", .mode = mode};
    return pst_lane_create(runtime, &options, lane);
}

static void a_lane_whose_worker_cannot_start_is_none(void **state) {
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = NULL;
    (void)state;
    threads_left = 0;
    assert_status(create_lane(runtime, PST_LANE_WORKER, &lane), PST_ESYSTEM);
    threads_left = -1;
    assert_null(lane);
    assert_error(runtime, "lane gather", "thread");
    assert_ok(create_lane(runtime, PST_LANE_WORKER, &lane));
    pst_runtime_destroy(runtime);
}

static void a_lane_needs_the_watchdogs_thread_too(void **state) {
    const pst_runtime_options options = {.size = sizeof options, .watchdog_ns = 1000000000};
    pst_runtime *runtime = NULL;
    pst_lane *lane = NULL;
    (void)state;
    assert_ok(pst_runtime_create(&options, &runtime));
    threads_left = 0;
    assert_status(create_lane(runtime, PST_LANE_WORKER, &lane), PST_ESYSTEM);
    assert_error(runtime, "watchdog", "thread");
    threads_left = 1; /* the watchdog's, and no worker */
    assert_status(create_lane(runtime, PST_LANE_WORKER, &lane), PST_ESYSTEM);
    threads_left = -1;
    assert_ok(create_lane(runtime, PST_LANE_WORKER, &lane));
    pst_runtime_destroy(runtime);
}

static void without_a_descriptor_there_is_none_and_the_next_try_gets_one(void **state) {
    pst_runtime *runtime = open_runtime(0);
    struct rlimit before, none;
    int descriptor;
    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){0, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    const pst_status status = pst_fd(runtime, &descriptor);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_status(status, PST_ESYSTEM);
    assert_error(runtime, "pst_fd", "eventfd");
    assert_ok(pst_fd(runtime, &descriptor));
    assert_true(descriptor >= 0);
    pst_runtime_destroy(runtime);
}

static void a_mode_that_is_none_is_refused(void **state) {
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = NULL;
    (void)state;
    assert_status(create_lane(runtime, (pst_lane_mode)17, &lane), PST_EINVAL);
    assert_error(runtime, "lane gather", "17");
    pst_runtime_destroy(runtime);
}

static void a_task_has_fewer_than_2_to_the_26th_predecessors(void **state) {
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "step");
    step a = {.name = "a"};
    pst_task_options options = step_options(&a, lane);
    const pst_task nothing = {NULL, 0};
    (void)state;
    options.after = &nothing; /* the count is looked at first */
    options.after_count = (size_t)1 << 26;
    assert_status(pst_graph_add(graph, &options, NULL), PST_EINVAL);
    assert_error(runtime, "task a", "predecessors");
    pst_runtime_destroy(runtime);
}

static void a_launch_to_come_cannot_be_canceled(void **state) {
    pst_runtime *runtime = open_runtime(0);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "step");
    (void)state;
    assert_ok(pst_graph_seal(graph));
    assert_status(pst_launch_cancel((pst_launch){graph, 1}), PST_ESTATE);
    assert_error(runtime, "graph step", "launch 1");
    pst_runtime_destroy(runtime);
}

static void graphs_may_go_in_any_order(void **state) {
    pst_runtime *runtime = open_runtime(0);
    pst_graph *graphs[3];
    (void)state;
    for (int i = 0; i < 3; i++)
        graphs[i] = open_graph(runtime, PST_GRAPH_GROWING, "step");
    assert_ok(pst_graph_destroy(graphs[1]));
    assert_ok(pst_graph_destroy(graphs[0]));
    pump(runtime); /* walks over those that are left */
    assert_ok(pst_graph_destroy(graphs[2]));
    pump(runtime);
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lane_whose_worker_cannot_start_is_none),
        cmocka_unit_test(a_lane_needs_the_watchdogs_thread_too),
        cmocka_unit_test(without_a_descriptor_there_is_none_and_the_next_try_gets_one),
        cmocka_unit_test(a_mode_that_is_none_is_refused),
        cmocka_unit_test(a_task_has_fewer_than_2_to_the_26th_predecessors),
        cmocka_unit_test(a_launch_to_come_cannot_be_canceled),
        cmocka_unit_test(graphs_may_go_in_any_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
