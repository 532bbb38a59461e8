/* What a profiler is shown, if one is attached: tests/tracing/injection.c, which NVTX loads where
 * NVTX_INJECTION64_PATH names it, and which this program asks what it was told. */
#include "tests/sched/harness.h"

#include <dlfcn.h>
#include <penstock/trace.h>

static const char *path; /* of the profiler; NULL: none is to be attached */

typedef size_t (*count_function)(void);
typedef const char *(*line_function)(size_t line);

static void *find(const char *name) {
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD); /* it is there already */
    assert_non_null(library);
    void *found = dlsym(library, name);
    assert_non_null(found);
    (void)dlclose(library); /* NVTX holds it */
    return found;
}

static size_t count_lines(void) {
    count_function count;
    void *found = find("recorded_count");
    memcpy(&count, &found, sizeof count);
    return count();
}

/* What it was told from this line on must be this, but for the threads. */
static void assert_told(size_t first, const char *const *expected, size_t count) {
    line_function line;
    void *found = find("recorded");
    memcpy(&line, &found, sizeof line);
    assert_int_equal(count_lines() - first, count);
    for (size_t i = 0; i < count; i++)
        assert_string_equal(strchr(line(first + i), ' ') + 1, expected[i]);
}
#define assert_lines(first, ...)                                                                   \
    assert_told((first), (const char *const[]){__VA_ARGS__},                                       \
                sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static void launches_of_named_tasks_are_ranges_of_their_thread(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(60000);
    const size_t first = count_lines();
    pst_lane *lane = open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step steps[] = {{.name = "blocks.0"}, {.name = NULL}, {.name = "blocks.1", .asks = 3}};
    for (size_t i = 0; i < 3; i++)
        pst_task_release(add_with_ticket(graph, lane, &steps[i], i, NO_TASK));
    pump(runtime);
    assert_lines(first, "push penstock blocks.0", "pop penstock ", "push penstock blocks.1",
                 "pop penstock ");
    pst_runtime_destroy(runtime);
}

static void so_they_are_beside_a_trace_and_without_a_record(void **state) {
    (void)state;
    const pst_runtime_options options = {.size = sizeof options,
                                         .flight_records = PST_NO_FLIGHT_RECORD};
    pst_runtime *runtime;
    assert_ok(pst_runtime_create(&options, &runtime));
    pst_lane *lane = open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step fails = {.name = "fails", .result = PST_EPEER}, traced = {.name = "traced"};
    const size_t first = count_lines();
    pst_task_release(add_with_ticket(graph, lane, &fails, 0, NO_TASK));
    pump(runtime);
    assert_ok(pst_trace_start(runtime));
    pst_task_release(add_with_ticket(graph, lane, &traced, 0, NO_TASK));
    pump(runtime);
    assert_ok(pst_trace_stop(runtime));
    pst_trace_stats stats = {.size = sizeof stats};
    pst_trace_get_stats(runtime, &stats);
    assert_true(stats.records > 0);
    assert_lines(first, "push penstock fails", "pop penstock ", "push penstock traced",
                 "pop penstock ");
    pst_runtime_destroy(runtime);
}

static void marks_and_ranges_are_shown_without_a_trace(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(60000);
    const size_t first = count_lines();
    assert_true(pst_profiler_is_attached());
    pst_trace_begin(runtime, "outer");
    const uint64_t range = pst_profiler_begin("step");
    pst_trace_end(runtime);
    assert_int_not_equal(range, 0);
    pst_profiler_end(range);
    pst_profiler_end(0);
    char begin[64], end[64];
    (void)snprintf(begin, sizeof begin, "begin penstock %d step", (int)range);
    (void)snprintf(end, sizeof end, "end penstock %d", (int)range);
    assert_lines(first, "push penstock outer", begin, "pop penstock ", end);
    pst_runtime_destroy(runtime);
}

static void without_a_profiler_nobody_is_told(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(60000);
    assert_false(pst_profiler_is_attached());
    pst_trace_begin(runtime, "outer");
    pst_trace_end(runtime);
    assert_int_equal(pst_profiler_begin("step"), 0);
    pst_profiler_end(0);
    pst_lane *lane = open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a"};
    pst_task_release(add_with_ticket(graph, lane, &a, 0, NO_TASK));
    pump(runtime);
    assert_int_equal(runs_of(&a), 1);
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest attached[] = {
        cmocka_unit_test(launches_of_named_tasks_are_ranges_of_their_thread),
        cmocka_unit_test(so_they_are_beside_a_trace_and_without_a_record),
        cmocka_unit_test(marks_and_ranges_are_shown_without_a_trace),
    };
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(without_a_profiler_nobody_is_told),
    };
    path = getenv("NVTX_INJECTION64_PATH");
    if (path == NULL) return cmocka_run_group_tests(alone, NULL, NULL);
    return cmocka_run_group_tests(attached, NULL, NULL);
}
