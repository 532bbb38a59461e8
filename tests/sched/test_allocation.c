/* Memory: none is asked for while replaying, and each refusal leaves everything whole. */
#include "tests/base/counting_heap.h"
#include "tests/sched/queue_device.h"

#include <penstock/trace.h>

static pst_runtime_options options_on(counting_heap *heap) {
    return (pst_runtime_options){.size = sizeof(pst_runtime_options),
                                 .allocator = {counting_alloc, counting_free, heap},
                                 .task_capacity = 8};
}

static void assert_nothing_left(const counting_heap *heap) {
    assert_int_equal(heap->live, 0);
    assert_int_equal(heap->live_bytes, 0);
    assert_int_equal(heap->misaligned, 0);
}

#define STEPS 100

/* A hundred steps over the lanes in turn, each behind the two before it, the middle one also behind
 * the gate. */
static pst_graph *build_replayed(pst_runtime *runtime, pst_lane *const *lanes, size_t lane_count,
                                 step *steps, pst_task *gate) {
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    pst_task before = NO_TASK, earlier = NO_TASK;
    assert_ok(pst_graph_add_gate(graph, "gate", gate));
    for (size_t i = 0; i < STEPS; i++) {
        steps[i] = (step){.name = "s", .asks = i % 3 == 0};
        pst_task task = add_step(graph, lanes[i / 2 % lane_count], &steps[i], before, earlier,
                                 i == STEPS / 2 ? *gate : NO_TASK);
        earlier = before;
        before = task;
    }
    assert_ok(pst_graph_seal(graph));
    return graph;
}

static void replay(pst_graph *graph, pst_task gate, int times) {
    for (int k = 0; k < times; k++) {
        pst_launch launch;
        assert_ok(pst_graph_launch(graph, &launch));
        assert_ok(pst_gate_open(launch, gate, NULL));
        assert_ok(pst_launch_wait(launch));
    }
}

static void replaying_asks_for_no_memory(void **state) {
    (void)state;
    counting_heap heap = {0};
    const pst_runtime_options options = options_on(&heap);
    pst_runtime *runtime;
    assert_ok(pst_runtime_create(&options, &runtime));
    pst_lane *lanes[] = {open_lane(runtime, "a", PST_LANE_PUMPED),
                         open_lane_in_order(runtime, "b", PST_LANE_PUMPED)};
    step steps[STEPS];
    pst_task gate;
    pst_graph *graph = build_replayed(runtime, lanes, 2, steps, &gate);
    replay(graph, gate, 1); /* gives the flight record its names */
    const long allocs = heap.allocs;
    replay(graph, gate, 20);
    assert_int_equal(heap.allocs, allocs);
    pst_runtime_destroy(runtime);
    assert_nothing_left(&heap);
}

static uint64_t count_records(const pst_runtime *runtime) {
    pst_trace_stats stats = {.size = sizeof stats};
    pst_trace_get_stats(runtime, &stats);
    return stats.records;
}

/* The first traced replay gives this thread its track and the trace its names. */
static void a_traced_replay_asks_for_no_memory(void **state) {
    (void)state;
    counting_heap heap = {0};
    pst_runtime_options options = options_on(&heap);
    options.trace_records = 256; /* the rings go round */
    pst_runtime *runtime;
    assert_ok(pst_runtime_create(&options, &runtime));
    pst_lane *lanes[] = {open_lane(runtime, "a", PST_LANE_PUMPED),
                         open_lane(runtime, "b", PST_LANE_WORKER),
                         open_lane_in_order(runtime, "c", PST_LANE_PUMPED)};
    step steps[STEPS];
    pst_task gate;
    pst_graph *graph = build_replayed(runtime, lanes, 3, steps, &gate);
    assert_ok(pst_trace_start(runtime));
    replay(graph, gate, 1);
    const long allocs = heap.allocs;
    const uint64_t records = count_records(runtime);
    replay(graph, gate, 20);
    assert_int_equal(heap.allocs, allocs);
    assert_true(count_records(runtime) - records >= 20 * 2 * STEPS);
    assert_ok(pst_trace_stop(runtime));
    pst_runtime_destroy(runtime);
    assert_nothing_left(&heap);
}

static void a_growing_graph_uses_its_blocks_again(void **state) {
    (void)state;
    counting_heap heap = {0};
    const pst_runtime_options options = options_on(&heap);
    pst_runtime *runtime;
    assert_ok(pst_runtime_create(&options, &runtime));
    pst_lane *lane = open_lane(runtime, "a", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step s = {.name = "s"};
    long allocs = 0;
    pst_task before = NO_TASK;
    for (int i = 0; i < 500; i++) {
        pst_task task = add_step(graph, lane, &s, before, NO_TASK, NO_TASK);
        pst_task_release(before);
        before = task;
        if (i % 4 == 3) pump(runtime);
        if (i == 50) allocs = heap.allocs;
    }
    assert_int_equal(heap.allocs, allocs);
    pst_task_release(before);
    pst_runtime_destroy(runtime);
    assert_nothing_left(&heap);
}

/* ---- every refusal ---------------------------------------------------------------------- */

typedef struct outcome {
    step steps[12];
    int added[12];
} outcome;

/* Everything that allocates, each call allowed to fail; PST_OK if none did. */
static pst_status whole_life(pst_runtime *runtime, queue_device *queue, outcome *out) {
    const pst_lane_options host = {.size = sizeof host, .name = "host", .mode = PST_LANE_PUMPED};
    const pst_lane_options worker = {.size = sizeof worker, .name = "worker"};
    const pst_lane_options device = {
        .size = sizeof device, .name = "device", .mode = PST_LANE_PUMPED, .device = &queue->device};
    pst_lane *lanes[3];
    pst_graph *sealed, *growing;
    pst_task tasks[12] = {0}, gate;
    pst_launch launch;
    pst_status status = pst_lane_create(runtime, &host, &lanes[0]);
    if (status == PST_OK) status = pst_lane_create(runtime, &worker, &lanes[1]);
    if (status == PST_OK) status = pst_lane_create(runtime, &device, &lanes[2]);
    if (status == PST_OK) status = pst_graph_create(runtime, PST_GRAPH_SEALED, "s", &sealed);
    if (status == PST_OK) status = pst_graph_create(runtime, PST_GRAPH_GROWING, "g", &growing);
    if (status != PST_OK) return status;
    status = pst_graph_add_gate(sealed, "gate", &gate);
    for (int i = 0; i < 12 && status == PST_OK; i++) {
        pst_graph *graph = i < 6 ? sealed : growing;
        pst_task after[6];
        out->steps[i] = (step){.name = "s"};
        pst_task_options options = step_options(&out->steps[i], lanes[i % 3]);
        options.after = after;
        for (int p = i < 6 ? 0 : 6; p < i; p++)
            after[options.after_count++] = tasks[p];
        status = pst_graph_add(graph, &options, &tasks[i]);
        out->added[i] = status == PST_OK && i >= 6;
    }
    if (status == PST_OK) status = pst_graph_add_edge(sealed, gate, tasks[0]);
    if (status == PST_OK) status = pst_graph_outer_open(sealed, gate);
    if (status == PST_OK) status = pst_graph_outer_wait(sealed, tasks[5]);
    if (status == PST_OK) status = pst_graph_seal(sealed);
    if (status == PST_OK) status = pst_graph_launch(sealed, &launch);
    if (status != PST_OK) return status;
    for (int i = 0; i < 6; i++)
        out->added[i] = 1;
    return pst_gate_open(launch, gate, NULL);
}

static void any_refusal_leaves_nothing_behind(void **state) {
    (void)state;
    for (long n = 1;; n++) {
        counting_heap heap = {.fail_at = n};
        outcome out = {0};
        queue_device queue;
        queue_open(&queue);
        const pst_runtime_options options = options_on(&heap);
        pst_runtime *runtime;
        pst_status status = pst_runtime_create(&options, &runtime);
        const int created = status == PST_OK;
        if (created) {
            status = whole_life(runtime, &queue, &out);
            int idle = 0;
            for (int turn = 0; turn < 100000 && !idle && status == PST_OK; turn++) {
                queue_drain(&queue);
                (void)pst_run_once(runtime, &idle);
            }
            char text[256];
            if (status != PST_OK) assert_true(pst_runtime_error(runtime, text, sizeof text) > 0);
            queue_drain(&queue);
            heap.fail_at = 0;
            /* Destroying waits for what is launched: the queues have to go on meanwhile. */
            for (int turn = 0; turn < 100; turn++) {
                (void)pst_run_once(runtime, NULL);
                queue_drain(&queue);
            }
            pst_runtime_destroy(runtime);
        } else {
            assert_null(runtime);
        }
        assert_nothing_left(&heap);
        assert_int_equal(queue.live_events, 0);
        for (int i = 0; i < 12; i++)
            assert_int_equal(out.steps[i].callbacks, out.added[i]);
        queue_close(&queue);
        if (status == PST_OK) {
            assert_true(n > 20);
            return;
        }
        assert_status(status, PST_ENOMEM);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replaying_asks_for_no_memory),
        cmocka_unit_test(a_traced_replay_asks_for_no_memory),
        cmocka_unit_test(a_growing_graph_uses_its_blocks_again),
        cmocka_unit_test(any_refusal_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
