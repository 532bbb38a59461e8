/* Parameter structs of callers that were compiled with an older or a newer header. */
#include "tests/sched/harness.h"

#include <stddef.h>

/* The first `size` bytes of the options in a block of their own, so that a sanitizer sees what is
 * read beyond; what is new in them is not zero. */
static void *as_of(const void *options, size_t known, size_t size) {
    unsigned char *block = malloc(size);
    memset(block, 0x55, size);
    memcpy(block, options, known < size ? known : size);
    memcpy(block, &size, sizeof size);
    return block;
}

/* Runs one task with options that end before, or go beyond, what this library knows. */
static void run_with(size_t runtime_size, size_t lane_size, size_t task_size) {
    step a = {.name = "a"};
    pst_runtime *runtime = NULL;
    pst_lane *lane = NULL;
    const pst_runtime_options plain = {.size = sizeof plain};
    void *options = as_of(&plain, sizeof plain, runtime_size);
    assert_ok(pst_runtime_create(options, &runtime));
    free(options);
    const pst_lane_options pumped = {.size = sizeof pumped, .name = "l", .mode = PST_LANE_PUMPED};
    options = as_of(&pumped, sizeof pumped, lane_size);
    assert_ok(pst_lane_create(runtime, options, &lane));
    free(options);
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "g");
        const pst_task_options task = step_options(&a, lane);
        options = as_of(&task, sizeof task, task_size);
        assert_ok(pst_graph_add(graph, options, NULL));
        free(options);
        if (kind == PST_GRAPH_SEALED) {
            assert_ok(pst_graph_seal(graph));
            assert_ok(pst_graph_launch(graph, NULL));
        }
        pump(runtime);
    }
    assert_int_equal(a.callbacks, 2);
    pst_runtime_destroy(runtime);
}

static void what_an_older_header_lacks_reads_as_zero(void **state) {
    (void)state;
    run_with(offsetof(pst_runtime_options, watchdog_ns), offsetof(pst_lane_options, order_with),
             offsetof(pst_task_options, ticket));
}

static void what_a_newer_header_adds_is_not_read(void **state) {
    (void)state;
    run_with(sizeof(pst_runtime_options) + 16, sizeof(pst_lane_options) + 16,
             sizeof(pst_task_options) + 16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_an_older_header_lacks_reads_as_zero),
        cmocka_unit_test(what_a_newer_header_adds_is_not_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
