/* The watchdog: a launched task that does not end is named in the log, once, and can end all. */
#include "tests/sched/queue_device.h"

#include "sched/pump.h"
#include "sched/watchdog.h"

/* One turn of each lane, of at most so many launches; 1 when something was done. */
static inline int one_turn(pst_runtime *runtime, uint32_t launches) {
    const pst__budget budget = {.launches = launches};
    return pst__runtime_help(runtime, PST__HELP_ALL, &budget).did;
}

#define WATCHDOG_NS 8000000u /* short: these tests wait for it */

/* The log of a runtime, as its watchdog's thread writes it. */
typedef struct journal {
    int lines;
    char last[1024];
} journal;

static void write_down(void *context, pst_log_level level, const char *text) {
    journal *self = context;
    if (level != PST_LOG_ERROR) return;
    if (__atomic_load_n(&self->lines, __ATOMIC_RELAXED) == 0)
        (void)snprintf(self->last, sizeof self->last, "%s", text);
    __atomic_fetch_add(&self->lines, 1, __ATOMIC_ACQ_REL);
}

static int lines_of(const journal *self) {
    return __atomic_load_n(&self->lines, __ATOMIC_ACQUIRE);
}

static pst_runtime *open_watched(journal *lines, int poisons) {
    const pst_runtime_options options = {.size = sizeof options,
                                         .log = write_down,
                                         .log_context = lines,
                                         .rank = 3,
                                         .world_size = 4,
                                         .spin = 50,
                                         .watchdog_ns = WATCHDOG_NS,
                                         .watchdog_poisons = poisons};
    pst_runtime *runtime = NULL;
    assert_ok(pst_runtime_create(&options, &runtime));
    return runtime;
}

static void assert_line(const journal *lines, const char *const *names, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (strstr(lines->last, names[i]) == NULL)
            fail_msg("\"%s\" is not in \"%s\"", names[i], lines->last);
}
#define assert_named(lines, ...)                                                                   \
    assert_line((lines), (const char *const[]){__VA_ARGS__},                                       \
                sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static void let_end(step *self) {
    __atomic_store_n(&self->asks, 0, __ATOMIC_RELEASE);
}

/* ---- reports ---------------------------------------------------------------------------- */

static void a_task_that_never_ends_is_named_by_a_thread_of_the_watchdogs_own(void **state) {
    (void)state;
    for (int kind = PST_GRAPH_SEALED; kind <= PST_GRAPH_GROWING; kind++) {
        journal lines = {0};
        pst_runtime *runtime = open_watched(&lines, 0);
        pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
        pst_graph *graph = open_graph(runtime, (pst_graph_kind)kind, "forward");
        step a = {.name = "layer 7", .asks = -1};
        pst_task task = add_with_ticket(graph, lane, &a, 41, NO_TASK);
        pst_launch launch = {graph, 0};
        if (kind == PST_GRAPH_SEALED) {
            assert_ok(pst_graph_seal(graph));
            assert_ok(pst_graph_launch(graph, &launch));
        }
        while (lines_of(&lines) == 0)
            yield_briefly();
        assert_named(&lines, "rank 3", "watchdog", "lane gather", "layer 7", "ticket 41",
                     "graph forward", "its own work");
        let_end(&a); /* late and not lost: without the option it goes on */
        assert_ok(pst_task_wait(launch, task, NULL));
        assert_ok(pst_runtime_status(runtime));
        pst_task_release(task);
        pst_runtime_destroy(runtime);
    }
}

static void the_callers_pump_looks_where_there_is_no_thread(void **state) {
    (void)state;
    journal lines = {0};
    const int threads = count_threads();
    pst_runtime *runtime = open_watched(&lines, 0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "forward");
    step a = {.name = "layer 7", .asks = -1};
    pst_task_release(add_with_ticket(graph, lane, &a, 41, NO_TASK));
    while (lines_of(&lines) == 0)
        (void)pst_run_once(runtime, NULL);
    assert_int_equal(count_threads(), threads);
    assert_named(&lines, "lane gather", "layer 7", "ticket 41");
    let_end(&a);
    pump(runtime);
    pst_runtime_destroy(runtime);
}

/* A task is overdue at the ninth look that finds it, and is reported at no other. */
static void a_report_comes_once_a_task(void **state) {
    (void)state;
    journal lines = {0};
    pst_runtime *runtime = open_watched(&lines, 0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step steps[] = {{.name = "a", .asks = -1}, {.name = "b", .asks = -1}};
    for (int i = 0; i < 2; i++)
        pst_task_release(add_with_ticket(graph, lane, &steps[i], 0, NO_TASK));
    for (int task = 0; task < 2; task++) {
        assert_int_equal(one_turn(runtime, 8), 1);
        for (int look = 1; look <= 30; look++) {
            pst__watchdog_look(runtime);
            assert_int_equal(lines.lines, task + (look > 8));
        }
        let_end(&steps[task]);
    }
    pst_runtime_stats stats = {.size = sizeof stats};
    pst_runtime_get_stats(runtime, &stats);
    assert_int_equal(stats.watchdog_reports, 2);
    pump(runtime);
    pst_runtime_destroy(runtime);
}

static void tasks_that_end_in_time_are_not_reported(void **state) {
    (void)state;
    journal lines = {0};
    pst_runtime *runtime = open_watched(&lines, 1);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    for (int i = 0; i < 20; i++) { /* always one in flight, in the same block of memory */
        step a = {.name = "a", .asks = -1};
        const pst_task_options options = step_options(&a, lane);
        assert_ok(pst_graph_add(graph, &options, NULL));
        (void)one_turn(runtime, 8);
        for (int look = 0; look < 8; look++)
            pst__watchdog_look(runtime);
        let_end(&a);
        (void)one_turn(runtime, 8);
    }
    assert_int_equal(lines.lines, 0);
    assert_ok(pst_runtime_status(runtime));
    pst_runtime_destroy(runtime);
}

static void a_report_has_the_lanes_last_launches(void **state) {
    (void)state;
    journal lines = {0};
    pst_runtime *runtime = open_watched(&lines, 0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_PUMPED);
    pst_graph *gone = open_graph(runtime, PST_GRAPH_SEALED, "gone");
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step lost = {.name = "of a graph that is gone"},
         steps[] = {{.name = "layer 6"}, {.name = "layer 7", .asks = -1}};
    (void)add_with_ticket(gone, lane, &lost, 0, NO_TASK);
    assert_ok(pst_graph_seal(gone));
    assert_ok(pst_graph_launch(gone, NULL));
    pump(runtime);
    assert_ok(pst_graph_destroy(gone));
    for (int i = 0; i < 2; i++)
        pst_task_release(add_with_ticket(graph, lane, &steps[i], 40u + (unsigned)i, NO_TASK));
    (void)one_turn(runtime, 8);
    for (int look = 0; look < 10; look++)
        pst__watchdog_look(runtime);
    assert_named(&lines, "last launches, latest first: layer 7 (ticket 41), layer 6 (ticket 40)");
    assert_null(strstr(lines.last, "gone"));
    let_end(&steps[1]);
    pump(runtime);
    pst_runtime_destroy(runtime);
}

static void idle_lanes_and_closed_gates_are_not_reported(void **state) {
    (void)state;
    journal lines = {0};
    pst_runtime *runtime = open_watched(&lines, 1);
    pst_lane *lane = open_lane_in_order(runtime, "gather", PST_LANE_PUMPED);
    (void)open_lane(runtime, "reduce", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    step a = {.name = "a"};
    pst_task gate;
    assert_ok(pst_graph_add_gate(graph, "the caller's business", &gate));
    pst_task_release(add_step(graph, lane, &a, gate, NO_TASK, NO_TASK));
    for (int look = 0; look < 30; look++) {
        (void)pst_run_once(runtime, NULL);
        pst__watchdog_look(runtime);
    }
    assert_int_equal(lines.lines, 0);
    pst_task_release(gate);
    pst_runtime_destroy(runtime);
}

static void a_launched_task_behind_another_lane_names_that_lanes_task(void **state) {
    (void)state;
    journal lines = {0};
    queue_device device;
    queue_open(&device);
    pst_runtime *runtime = open_watched(&lines, 0);
    /* The lanes are looked at newest first. */
    pst_lane *gather = open_queue_lane(runtime, &device, "gather", PST_LANE_PUMPED);
    pst_lane *reduce = open_queue_lane(runtime, &device, "reduce", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    step a = {.name = "first"}, b = {.name = "second"};
    pst_task ta = add_with_ticket(graph, gather, &a, 5, NO_TASK);
    (void)add_with_ticket(graph, reduce, &b, 6, ta);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, NULL));
    for (int i = 0; i < 4; i++)
        (void)one_turn(runtime, 8);
    for (int look = 0; look < 10; look++)
        pst__watchdog_look(runtime);
    assert_int_equal(lines.lines, 2);
    assert_named(&lines, "task second (ticket 6)", "first (lane gather, ticket 5)",
                 "launched and not done");
    while (a.callbacks + b.callbacks < 2) {
        (void)queue_drain(&device);
        (void)pst_run_once(runtime, NULL);
    }
    pst_runtime_destroy(runtime);
    queue_close(&device);
}

/* ---- a thread that does not come back --------------------------------------------------- */

static uint32_t let_go;

static pst_status block(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    while (!__atomic_load_n(&let_go, __ATOMIC_ACQUIRE))
        yield_briefly();
    return PST_OK;
}

static void a_task_that_blocks_its_worker_is_noticed(void **state) {
    (void)state;
    journal lines = {0};
    pst_runtime *runtime = open_watched(&lines, 0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const pst_task_options options = {
        .size = sizeof options, .name = "blocks it", .lane = lane, .work = {block, NULL, NULL}};
    let_go = 0;
    assert_ok(pst_graph_add(graph, &options, NULL));
    while (lines_of(&lines) == 0)
        yield_briefly();
    assert_named(&lines, "rank 3", "lane gather", "has not come back", "latest first: blocks it");
    __atomic_store_n(&let_go, 1, __ATOMIC_RELEASE);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    pst_runtime_destroy(runtime);
}

/* ---- poison ----------------------------------------------------------------------------- */

static void it_ends_every_wait_if_it_poisons(void **state) {
    (void)state;
    for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED) {
        journal lines = {0};
        pst_runtime *runtime = open_watched(&lines, 1); /* waits have no deadline of their own */
        pst_lane *lane = open_lane(runtime, "gather", (pst_lane_mode)mode);
        pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "forward");
        step a = {.name = "layer 7", .asks = -1}, b = {.name = "b"};
        pst_launch launch;
        pst_task ta = add_with_ticket(graph, lane, &a, 41, NO_TASK);
        pst_task tb = add_with_ticket(graph, lane, &b, 42, ta);
        assert_ok(pst_graph_seal(graph));
        assert_ok(pst_graph_launch(graph, &launch));
        assert_status(pst_task_wait(launch, tb, NULL), PST_ETIMEDOUT);
        assert_status(pst_launch_wait(launch), PST_ETIMEDOUT);
        assert_status(pst_runtime_status(runtime), PST_ETIMEDOUT);
        assert_error(runtime, "watchdog", "lane gather", "layer 7", "ticket 41");
        while (callbacks_of(&a) == 0) /* its failure, too, leaves the text as it is */
            (void)pst_run_once(runtime, NULL);
        assert_error(runtime, "watchdog", "lane gather", "layer 7", "ticket 41");
        assert_status(pst_graph_launch(graph, NULL), PST_ETIMEDOUT);
        pst_runtime_destroy(runtime); /* and leaves the task behind */
        assert_int_equal(a.callbacks, 1);
        assert_int_equal(a.reported, PST_ETIMEDOUT);
        assert_int_equal(b.callbacks, 1);
        assert_int_equal(b.runs, 0);
    }
}

typedef struct witness {
    int calls;
    pst_status status;
    pthread_t thread;
} witness;

static void note_thread(void *context, pst_status status) {
    witness *self = context;
    self->status = status;
    self->thread = pthread_self();
    __atomic_fetch_add(&self->calls, 1, __ATOMIC_RELEASE);
}

/* The lane's worker is blocked, and this thread only looks on. */
static void its_own_thread_calls_the_hooks(void **state) {
    (void)state;
    journal lines = {0};
    witness seen = {0};
    pst_runtime *runtime = open_watched(&lines, 1);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const pst_task_options options = {
        .size = sizeof options, .name = "a", .lane = lane, .work = {block, NULL, NULL}};
    assert_ok(pst_runtime_add_poison_hook(runtime, note_thread, &seen));
    let_go = 0;
    assert_ok(pst_graph_add(graph, &options, NULL));
    while (__atomic_load_n(&seen.calls, __ATOMIC_ACQUIRE) == 0)
        yield_briefly();
    assert_int_equal(seen.status, PST_ETIMEDOUT);
    assert_false(pthread_equal(seen.thread, pthread_self()));
    __atomic_store_n(&let_go, 1, __ATOMIC_RELEASE);
    pst_runtime_destroy(runtime);
    assert_int_equal(seen.calls, 1);
}

static void it_has_one_thread_in_a_threaded_runtime_and_takes_it_along(void **state) {
    (void)state;
    journal lines = {0};
    const int threads = count_threads();
    pst_runtime *runtime = open_watched(&lines, 0);
    assert_int_equal(count_threads(), threads);
    (void)open_lane(runtime, "gather", PST_LANE_WORKER);
    (void)open_lane(runtime, "reduce", PST_LANE_WORKER);
    assert_int_equal(count_threads(), threads + 3);
    pst_runtime_destroy(runtime);
    assert_int_equal(count_threads(), threads);
}

static void *nothing(void *argument) {
    return argument;
}

/* Sanitizers start a thread of their own with the first one. */
static int start_a_first_thread(void **state) {
    (void)state;
    pthread_t thread;
    return pthread_create(&thread, NULL, nothing, NULL) != 0 || pthread_join(thread, NULL) != 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_task_that_never_ends_is_named_by_a_thread_of_the_watchdogs_own),
        cmocka_unit_test(the_callers_pump_looks_where_there_is_no_thread),
        cmocka_unit_test(a_report_comes_once_a_task),
        cmocka_unit_test(tasks_that_end_in_time_are_not_reported),
        cmocka_unit_test(a_report_has_the_lanes_last_launches),
        cmocka_unit_test(idle_lanes_and_closed_gates_are_not_reported),
        cmocka_unit_test(a_launched_task_behind_another_lane_names_that_lanes_task),
        cmocka_unit_test(a_task_that_blocks_its_worker_is_noticed),
        cmocka_unit_test(it_ends_every_wait_if_it_poisons),
        cmocka_unit_test(its_own_thread_calls_the_hooks),
        cmocka_unit_test(it_has_one_thread_in_a_threaded_runtime_and_takes_it_along),
    };
    return cmocka_run_group_tests(tests, start_a_first_thread, NULL);
}
