/* What the scheduler tells the trace: lane and worker slices, arrows between lanes, marks. */
#include "base/clock.h"
#include "tests/base/counting_heap.h"
#include "tests/device/sim.h"
#include "tests/sched/harness.h"

#include <penstock/trace.h>
#include <pthread.h>
#include <unistd.h>

static char *read_all(const char *path) {
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    char *text = calloc(1, 1 << 20);
    (void)fread(text, 1, (1 << 20) - 1, file);
    fclose(file);
    return text;
}

static size_t count_of(const char *text, const char *word) {
    size_t count = 0;
    for (const char *at = text; (at = strstr(at, word)) != NULL; at += strlen(word))
        count++;
    return count;
}

static char *trace_of(pst_runtime *runtime) {
    char path[] = "/tmp/penstock_traced_work_XXXXXX";
    const int descriptor = mkstemp(path);
    assert_true(descriptor >= 0);
    (void)close(descriptor);
    assert_ok(pst_trace_stop(runtime));
    assert_ok(pst_trace_write(runtime, path));
    char *text = read_all(path);
    (void)unlink(path);
    return text;
}

static void run(pst_runtime *runtime, pst_graph_kind kind, pst_lane **lanes) {
    static step a, b, c;
    a = (step){.name = "all gather"};
    b = (step){.name = "forward"};
    c = (step){.name = "reduce scatter", .asks = 2};
    char graph_name[] = "gone before the trace is written";
    pst_graph *graph = open_graph(runtime, kind, graph_name);
    pst_task ta = add_step(graph, lanes[0], &a, NO_TASK, NO_TASK, NO_TASK);
    pst_task tb = add_step(graph, lanes[1], &b, ta, NO_TASK, NO_TASK);
    pst_task tc = add_step(graph, lanes[1], &c, tb, ta, NO_TASK);
    pst_launch launch = {graph, 0};
    if (kind == PST_GRAPH_SEALED) {
        assert_ok(pst_graph_seal(graph));
        assert_ok(pst_graph_launch(graph, &launch));
    }
    assert_ok(pst_launch_wait(launch));
    pst_task_release(ta);
    pst_task_release(tb);
    pst_task_release(tc);
    assert_ok(pst_graph_destroy(graph));
}

static void lanes_workers_and_arrows_are_recorded(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        pst_runtime *runtime = open_runtime(20000);
        pst_lane *lanes[] = {open_lane(runtime, "gather", PST_LANE_PUMPED),
                             open_lane(runtime, "reduce", PST_LANE_PUMPED)};
        assert_ok(pst_trace_start(runtime));
        assert_status(pst_trace_start(runtime), PST_ESTATE);
        pst_trace_begin(runtime, "step 1");
        run(runtime, (pst_graph_kind)kind, lanes);
        pst_trace_counter(runtime, "arena bytes", 42);
        pst_trace_end(runtime);
        char name[] = "phase";
        const uint64_t begin = pst__now();
        pst_trace_slice(runtime, name, begin, pst__now());
        memset(name, 'x', sizeof name - 1); /* the trace has a copy */
        char *text = trace_of(runtime);
        /* A slice on the lane and one on the thread that launched it. */
        assert_int_equal(count_of(text, "\"all gather\""), 2);
        assert_int_equal(count_of(text, "\"reduce scatter\""), 2);
        assert_int_equal(count_of(text, "\"step 1\""), 1);
        assert_int_equal(count_of(text, "\"phase\""), 1);
        assert_int_equal(count_of(text, "\"arena bytes\""), 1);
        assert_int_equal(count_of(text, "\"ph\":\"s\""), 2);
        assert_int_equal(count_of(text, "\"ph\":\"f\""), 2);
        assert_int_equal(count_of(text, "\"gather\""), 1);
        pst_trace_stats stats = {.size = sizeof stats};
        pst_trace_get_stats(runtime, &stats);
        assert_true(stats.records >= 8);
        assert_int_equal(stats.overwritten, 0);
        free(text);
        pst_runtime_destroy(runtime);
    }
}

/* One pair of tasks whose edge crosses lanes; the pairs behind it, in the same memory, stay on one.
 */
static void a_task_has_no_arrow_of_the_one_that_had_its_memory(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lanes[] = {open_lane(runtime, "gather", PST_LANE_PUMPED),
                         open_lane(runtime, "reduce", PST_LANE_PUMPED)};
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "eager");
    assert_ok(pst_trace_start(runtime));
    for (int pair = 0; pair < 6; pair++) {
        step a = {.name = "first"}, b = {.name = "second"};
        pst_task ta = add_step(graph, lanes[0], &a, NO_TASK, NO_TASK, NO_TASK);
        pst_task tb = add_step(graph, lanes[pair == 0], &b, ta, NO_TASK, NO_TASK);
        assert_ok(pst_launch_wait((pst_launch){graph, 0}));
        pst_task_release(ta);
        pst_task_release(tb);
    }
    char *text = trace_of(runtime);
    assert_int_equal(count_of(text, "\"ph\":\"s\""), 1);
    assert_int_equal(count_of(text, "\"ph\":\"f\""), 1);
    free(text);
    pst_runtime_destroy(runtime);
}

static void a_workers_track_says_whose_worker_it_is(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lanes[] = {open_lane(runtime, "gather", PST_LANE_WORKER),
                         open_lane(runtime, "reduce", PST_LANE_WORKER)};
    assert_ok(pst_trace_start(runtime));
    for (int i = 0; i < 20; i++)
        run(runtime, PST_GRAPH_SEALED, lanes);
    char *text = trace_of(runtime);
    assert_int_equal(count_of(text, "\"forward\""), 40);
    assert_int_equal(count_of(text, "\"name\":\"worker gather\""), 1);
    assert_int_equal(count_of(text, "\"name\":\"gather\""), 1);
    free(text);
    pst_runtime_destroy(runtime);
}

static void nothing_is_recorded_unless_started(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lanes[] = {open_lane(runtime, "gather", PST_LANE_PUMPED),
                         open_lane(runtime, "reduce", PST_LANE_PUMPED)};
    pst_trace_begin(runtime, "step");
    run(runtime, PST_GRAPH_GROWING, lanes);
    pst_trace_end(runtime);
    pst_trace_stats stats = {.size = sizeof stats};
    pst_trace_get_stats(runtime, &stats);
    assert_int_equal(stats.records, 0);
    pst_runtime_destroy(runtime);
}

/* The second lane is served in the first one's place. */
static void a_destroyed_lane_leaves_its_slices_and_its_names_to_no_other(void **state) {
    (void)state;
    counting_heap heap = {0};
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = {counting_alloc, counting_free, &heap}};
    pst_runtime *runtime;
    assert_ok(pst_runtime_create(&options, &runtime));
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    assert_ok(pst_trace_start(runtime));
    const char *names[] = {"gather", "reduce", "reduce again"};
    long bytes[3];
    for (int i = 0; i < 3; i++) {
        step a = {.name = names[i]};
        pst_lane *lane = open_lane(runtime, names[i], PST_LANE_WORKER);
        pst_task task = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
        assert_ok(pst_launch_wait((pst_launch){graph, 0}));
        pst_task_release(task);
        assert_ok(pst_lane_destroy(lane));
        bytes[i] = heap.live_bytes;
    }
    assert_true(bytes[2] - bytes[0] < 16384); /* a ring has megabytes */
    char *text = trace_of(runtime);
    assert_int_equal(count_of(text, "\"name\":\"worker gather\""), 1);
    assert_int_equal(count_of(text, "\"name\":\"worker reduce\""), 1);
    /* The lane's name, its slice, and that of the thread that launched it. */
    assert_int_equal(count_of(text, "\"name\":\"gather\""), 3);
    assert_int_equal(count_of(text, "\"name\":\"reduce\""), 3);
    free(text);
    assert_ok(pst_runtime_destroy(runtime));
    assert_int_equal(heap.live_bytes, 0);
}

enum { MARKING_THREADS = 65 };

typedef struct marking {
    pst_runtime *runtime;
    pthread_barrier_t all_have_marked;
} marking;

static void *mark(void *argument) {
    marking *marking = argument;
    pst_trace_begin(marking->runtime, "mark");
    pst_trace_end(marking->runtime);
    (void)pthread_barrier_wait(&marking->all_have_marked);
    return NULL;
}

static void a_mark_of_a_thread_too_many_is_lost_once(void **state) {
    (void)state;
    marking marking = {.runtime = open_runtime(20000)};
    pthread_t threads[MARKING_THREADS];
    assert_int_equal(pthread_barrier_init(&marking.all_have_marked, NULL, MARKING_THREADS), 0);
    assert_ok(pst_trace_start(marking.runtime));
    for (int i = 0; i < MARKING_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, mark, &marking), 0);
    for (int i = 0; i < MARKING_THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    pst_trace_stats stats = {.size = sizeof stats};
    pst_trace_get_stats(marking.runtime, &stats);
    assert_int_equal(stats.records, MARKING_THREADS);
    assert_int_equal(stats.overwritten, 1);
    (void)pthread_barrier_destroy(&marking.all_have_marked);
    pst_runtime_destroy(marking.runtime);
}

/* ---- on a device that tells times -------------------------------------------------------- */

enum { WAITED_NS = 5000000, WORKED_NS = 1000000, LOOK_NS = 1000 };

typedef struct late_work {
    pst_device *device;
    pst_stream *other;
    pst_event *awaited;
    uint64_t clock; /* goes on by each look at it alone, however busy the machine is */
    int says_so;
} late_work;

static uint64_t now(void *context) {
    late_work *work = context;
    /* Relaxed: whoever looks, the watchdog too, only moves it on. */
    return __atomic_add_fetch(&work->clock, LOOK_NS, __ATOMIC_RELAXED);
}

static void nothing(void *argument) {
    (void)argument;
}

/* Has its stream wait for another one's work, which begins now, and work behind that. */
static pst_status start_late(void *argument, pst_stream *stream) {
    const late_work *work = argument;
    const pst_device_ops *ops = work->device->ops;
    pst_status status = pst__sim_call(work->device, work->other, WAITED_NS, nothing, NULL);
    if (status == PST_OK) status = ops->event_record(work->device, work->awaited, work->other);
    if (status == PST_OK) status = ops->stream_wait(work->device, stream, work->awaited);
    if (work->says_so) pst_task_begins();
    return status == PST_OK ? pst__sim_call(work->device, stream, WORKED_NS, nothing, NULL)
                            : status;
}

/* Microseconds of the only slice of this name that a lane has. */
static double duration_of(const char *text, const char *name) {
    for (const char *line = strstr(text, name); line != NULL; line = strstr(line + 1, name)) {
        double begin, duration;
        const char *times = strstr(line, "\"ts\":");
        if (strncmp(strstr(line, "\"cat\":"), "\"cat\":\"task\"", 12) == 0 &&
            sscanf(times, "\"ts\":%lf,\"dur\":%lf", &begin, &duration) == 2)
            return duration;
    }
    fail_msg("no task %s in %s", name, text);
    return 0.0;
}

static void run_late(pst_graph *graph, pst_lane *lane, const char *name, late_work *work) {
    const pst_device_ops *ops = work->device->ops;
    assert_ok(ops->stream_create(work->device, 0, &work->other));
    assert_ok(ops->event_create(work->device, 0, &work->awaited));
    const pst_task_options options = {
        .size = sizeof options, .name = name, .lane = lane, .work = {start_late, NULL, work}};
    pst_task task;
    assert_ok(pst_graph_add(graph, &options, &task));
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    pst_task_release(task);
    ops->event_destroy(work->device, work->awaited);
    ops->stream_destroy(work->device, work->other);
}

static void a_slice_begins_where_the_task_says_that_its_work_does(void **state) {
    (void)state;
    late_work work = {.clock = 0};
    const pst__sim_options options = {.now = now, .context = &work};
    pst__heap heap;
    assert_ok(pst__heap_init(&heap, NULL));
    assert_ok(pst__sim_create(&heap, &options, &work.device));
    pst_runtime *runtime = open_runtime(20000);
    const pst_lane_options given = {
        .size = sizeof given, .name = "gather", .device = work.device, .mode = PST_LANE_PUMPED};
    pst_lane *lane;
    assert_ok(pst_lane_create(runtime, &given, &lane));
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "eager");
    pst_task_begins(); /* in no task */
    assert_ok(pst_trace_start(runtime));
    /* The recording cuts what begins before it. Relaxed: see now(). */
    __atomic_store_n(&work.clock, pst__now(), __ATOMIC_RELAXED);
    run_late(graph, lane, "silent", &work);
    work.says_so = 1;
    run_late(graph, lane, "telling", &work);
    char *text = trace_of(runtime);
    assert_true(duration_of(text, "\"telling\"") == WORKED_NS / 1e3);
    assert_true(duration_of(text, "\"silent\"") > (WORKED_NS + WAITED_NS / 2) / 1e3);
    free(text);
    run_late(graph, lane, "untraced", &work);
    pst_runtime_destroy(runtime);
    work.device->ops->destroy(work.device);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lanes_workers_and_arrows_are_recorded),
        cmocka_unit_test(a_task_has_no_arrow_of_the_one_that_had_its_memory),
        cmocka_unit_test(a_workers_track_says_whose_worker_it_is),
        cmocka_unit_test(nothing_is_recorded_unless_started),
        cmocka_unit_test(a_destroyed_lane_leaves_its_slices_and_its_names_to_no_other),
        cmocka_unit_test(a_mark_of_a_thread_too_many_is_lost_once),
        cmocka_unit_test(a_slice_begins_where_the_task_says_that_its_work_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
