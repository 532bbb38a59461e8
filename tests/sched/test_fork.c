/* fork: the child has none of its parent's runtimes, and may have its own. */
#include "tests/sanitizer.h"
#include "tests/sched/harness.h"

#include <sys/wait.h>
#include <unistd.h>

/* The sum of 1..n, by n tasks of a chain; -1 on any error. Asserts nothing: the child runs it. */
static pst_status count_up(void *argument, pst_stream *stream) {
    (void)stream;
    long *sum = argument;
    sum[1] += ++sum[0];
    return PST_OK;
}

static long sum_of(pst_runtime *runtime, pst_lane_mode mode, int tasks) {
    const pst_lane_options lane_options = {
        .size = sizeof lane_options, .name = "lane", .mode = mode};
    long sum[2] = {0, 0};
    pst_lane *lane;
    pst_graph *graph;
    if (pst_lane_create(runtime, &lane_options, &lane) != PST_OK ||
        pst_graph_create(runtime, PST_GRAPH_GROWING, "g", &graph) != PST_OK)
        return -1;
    for (int i = 0; i < tasks; i++) {
        const pst_task_options options = {
            .size = sizeof options, .name = "a", .lane = lane, .work = {count_up, NULL, sum}};
        if (pst_graph_add(graph, &options, NULL) != PST_OK) return -1;
    }
    return pst_launch_wait((pst_launch){graph, 0}) == PST_OK ? sum[1] : -1;
}

static int child_works(void) {
    pst_runtime *runtime;
    if (pst_runtime_create(NULL, &runtime) != PST_OK) return 0;
    const long sum = sum_of(runtime, PST_LANE_WORKER, 100);
    pst_runtime_destroy(runtime);
    return sum == 5050;
}

static void a_child_has_its_own_runtime_and_the_parents_goes_on(void **state) {
    (void)state;
    /* The sanitizers' allocators do not let go of their locks in a forked child: there any
     * allocation may wait for ever. */
    if (UNDER_SANITIZER) {
        print_message("skipped: the sanitizer's allocator may be locked in a forked child\n");
        skip();
    }
    pst_runtime *runtime = open_runtime(20000);
    assert_int_equal(sum_of(runtime, PST_LANE_WORKER, 10), 55);
    for (int i = 0; i < 20; i++) {
        const pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) _exit(child_works() ? 0 : 1);
        assert_int_equal(sum_of(runtime, PST_LANE_WORKER, 10), 55);
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_child_has_its_own_runtime_and_the_parents_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
