/* The user's code in tasks: on which thread it runs, for how long a thread stays with it, and what
 * happens when it does not return, or does what it must not. */
#include "tests/sched/held.h"
#include "tests/sched/queue_device.h"

#include <pthread.h>
#include <time.h>

static void sleep_ms(long ms) {
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    (void)nanosleep(&pause, NULL);
}

/* ---- on which thread ---------------------------------------------------------------------- */

typedef struct place {
    pthread_t waiter;
    int count, on_waiter;
} place;

static pst_status note_thread(void *argument, pst_stream *stream) {
    place *self = argument;
    (void)stream;
    __atomic_fetch_add(&self->count, 1, __ATOMIC_ACQ_REL);
    if (pthread_equal(pthread_self(), self->waiter))
        __atomic_fetch_add(&self->on_waiter, 1, __ATOMIC_ACQ_REL);
    return PST_OK;
}

static void a_workers_tasks_run_on_the_worker_alone(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "worker", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    place seen = {pthread_self(), 0, 0};
    for (int i = 0; i < 100; i++) {
        sleep_ms(1); /* the worker sleeps by now, and a waiter would be first */
        const pst_task task = add_work(graph, lane, "here", note_thread, &seen);
        (void)pst_run_once(runtime, NULL);
        assert_ok(pst_task_wait((pst_launch){graph, 0}, task, NULL));
        pst_task_release(task);
    }
    assert_int_equal(seen.count, 100);
    assert_int_equal(seen.on_waiter, 0);
    assert_ok(pst_runtime_destroy(runtime));
}

/* The worker is in a task of the other lane. */
static void a_lane_that_takes_help_is_served_by_who_waits(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "worker", PST_LANE_WORKER), *helped;
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "helped",
                                      .mode = PST_LANE_SHARED,
                                      .share_with = lane,
                                      .takes_help = 1};
    assert_ok(pst_lane_create(runtime, &options, &helped));
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    held busy = {0};
    place seen = {pthread_self(), 0, 0};
    pst_task_release(add_work(graph, lane, "busy", hold, &busy));
    await_inside(&busy);
    const pst_task task = add_work(graph, helped, "here", note_thread, &seen);
    assert_ok(pst_task_wait((pst_launch){graph, 0}, task, NULL));
    assert_int_equal(seen.on_waiter, 1);
    let_go(&busy);
    assert_ok(pst_runtime_destroy(runtime));
}

/* ---- for how long ------------------------------------------------------------------------- */

static void a_wait_runs_no_more_than_what_it_waits_for(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "pumped", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    place seen = {pthread_self(), 0, 0};
    const pst_task first = add_work(graph, lane, "first", note_thread, &seen);
    for (int i = 0; i < 20; i++)
        pst_task_release(add_work(graph, lane, "other", note_thread, &seen));
    assert_ok(pst_task_wait((pst_launch){graph, 0}, first, NULL));
    assert_int_equal(seen.count, 1);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_int_equal(seen.count, 21);
    assert_ok(pst_runtime_destroy(runtime));
}

static pst_status take_a_while(void *argument, pst_stream *stream) {
    sleep_ms(2);
    return note_thread(argument, stream);
}

typedef struct overtaker {
    const place *slow;
    int seen; /* how many of the slow ones had run */
} overtaker;

static pst_status look_at_slow(void *argument, pst_stream *stream) {
    overtaker *self = argument;
    (void)stream;
    __atomic_store_n(&self->seen, __atomic_load_n(&self->slow->count, __ATOMIC_ACQUIRE),
                     __ATOMIC_RELEASE);
    return PST_OK;
}

enum { SLOW = 60 };

static void lanes_of_one_worker_take_turns_in_time(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *slow = open_lane(runtime, "slow", PST_LANE_WORKER), *quick;
    const pst_lane_options options = {
        .size = sizeof options, .name = "quick", .mode = PST_LANE_SHARED, .share_with = slow};
    assert_ok(pst_lane_create(runtime, &options, &quick));
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    place seen = {pthread_self(), 0, 0};
    overtaker quickly = {&seen, -1};
    held busy = {0};
    pst_task_release(add_work(graph, slow, "busy", hold, &busy));
    await_inside(&busy);
    for (int i = 0; i < SLOW; i++)
        pst_task_release(add_work(graph, slow, "slow", take_a_while, &seen));
    pst_task_release(add_work(graph, quick, "quick", look_at_slow, &quickly));
    let_go(&busy);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    /* A turn is over after 0.1 ms, and the clock is looked at after 16 launches at most. */
    assert_in_range(quickly.seen, 0, 18);
    assert_ok(pst_runtime_destroy(runtime));
}

/* ---- nobody spins or waits without an end behind it --------------------------------------- */

static void a_lane_joins_an_order_whose_leader_is_in_a_task(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *leader = open_lane_in_order(runtime, "leader", PST_LANE_WORKER), *follower;
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "follower",
                                      .order = PST_LANE_BY_SUBMISSION,
                                      .order_with = leader};
    held busy = {0};
    place seen = {pthread_self(), 0, 0};
    pst_task_release(add_work(graph, leader, "busy", hold, &busy));
    await_inside(&busy);
    assert_ok(pst_lane_create(runtime, &options, &follower));
    pst_task_release(add_work(graph, follower, "behind", note_thread, &seen));
    assert_int_equal(seen.count, 0);
    let_go(&busy);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_int_equal(seen.count, 1);
    assert_ok(pst_runtime_destroy(runtime));
}

/* The first task has no event of its own, and so only its lane's thread can record one. */
static void an_event_that_cannot_be_recorded_in_time_is_none(void **state) {
    (void)state;
    queue_device queue;
    queue_open(&queue);
    pst_runtime *runtime = open_runtime(100);
    pst_lane *lane = open_queue_lane(runtime, &queue, "gather", PST_LANE_WORKER);
    pst_lane *compute = open_queue_lane(runtime, &queue, "compute", PST_LANE_BORROWED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_SEALED, "g");
    held first = {.released = 1}, second = {0};
    pst_launch launch;
    const pst_task a = add_work(graph, lane, "first", hold, &first);
    (void)add_work(graph, lane, "second", hold, &second);
    assert_ok(pst_graph_seal(graph));
    assert_ok(pst_graph_launch(graph, &launch));
    await_inside(&second);
    assert_null(pst_task_event(launch, a));
    assert_status(pst_task_wait(launch, a, compute), PST_ETIMEDOUT);
    assert_error(runtime, "first", "in a task");
    let_go(&second);
    while (pst_launch_wait(launch) == PST_ETIMEDOUT)
        (void)queue_drain(&queue);
    queue_end(&queue, runtime);
}

static void a_destroy_keeps_its_deadline_behind_a_task_that_does_not_come_back(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(50);
    pst_lane *lane = open_lane(runtime, "disk", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    held busy = {0};
    pst_task_release(add_work(graph, lane, "a long read", hold, &busy));
    await_inside(&busy);
    assert_status(pst_runtime_destroy(runtime), PST_ETIMEDOUT);
    assert_error(runtime, "lane disk", "a long read", "destroy it again");
    let_go(&busy);
    assert_ok(pst_runtime_destroy(runtime));
}

static void close_slowly(void *argument, pst_status status) {
    (void)status;
    (void)hold(argument, NULL);
}

static void a_graph_is_not_destroyed_before_its_callback_has_returned(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(50);
    pst_lane *lane = open_lane(runtime, "lane", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "files");
    held busy = {0};
    place seen = {pthread_self(), 0, 0};
    const pst_task_options options = {.size = sizeof options,
                                      .lane = lane,
                                      .work = {note_thread, NULL, &seen},
                                      .done = close_slowly,
                                      .done_argument = &busy};
    assert_ok(pst_graph_add(graph, &options, NULL));
    await_inside(&busy);
    assert_status(pst_graph_destroy(graph), PST_ETIMEDOUT);
    assert_error(runtime, "graph files", "callback");
    let_go(&busy);
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_ok(pst_graph_destroy(graph));
    assert_ok(pst_runtime_destroy(runtime));
}

/* ---- what a task must not do -------------------------------------------------------------- */

typedef struct waiter {
    pst_launch launch;
    pst_task target;
    pst_lane *lane;
    pst_status of_task, of_launch, of_graph, of_lane, of_runtime;
    pst_runtime *runtime;
} waiter;

static void wait_for_all(void *argument, pst_status status) {
    waiter *self = argument;
    (void)status;
    self->of_task = pst_task_wait(self->launch, self->target, NULL);
    self->of_launch = pst_launch_wait(self->launch);
    self->of_graph = pst_graph_destroy(self->launch.graph);
    self->of_lane = pst_lane_destroy(self->lane);
    self->of_runtime = pst_runtime_destroy(self->runtime);
}

static pst_status wait_inside(void *argument, pst_stream *stream) {
    (void)stream;
    wait_for_all(argument, PST_OK);
    return PST_OK;
}

static void a_wait_in_a_task_or_callback_is_refused_by_name(void **state) {
    (void)state;
    for (int in_callback = 0; in_callback < 2; in_callback++) {
        pst_runtime *runtime = open_runtime(20000);
        pst_lane *lane = open_lane(runtime, "lane", PST_LANE_WORKER);
        pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
        held first = {0};
        waiter self = {.launch = {graph, 0}, .lane = lane, .runtime = runtime};
        pst_task_release(add_work(graph, lane, "busy", hold, &first));
        pst_task_options options = {.size = sizeof options, .name = "impatient", .lane = lane};
        if (in_callback)
            options.done = wait_for_all, options.done_argument = &self;
        else
            options.work = (pst_work){wait_inside, NULL, &self};
        assert_ok(pst_graph_add(graph, &options, NULL));
        self.target = add_work(graph, lane, "behind", hold, &first);
        let_go(&first);
        assert_ok(pst_launch_wait((pst_launch){graph, 0}));
        assert_status(self.of_task, PST_ESTATE);
        assert_status(self.of_launch, PST_ESTATE);
        assert_status(self.of_graph, PST_ESTATE);
        assert_status(self.of_lane, PST_ESTATE);
        assert_status(self.of_runtime, PST_ESTATE);
        assert_error(runtime, "impatient", "must not wait");
        assert_ok(pst_runtime_destroy(runtime));
    }
}

/* ---- code that does not return ------------------------------------------------------------ */

static pst_status end_thread(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    pthread_exit(NULL);
}

static void end_thread_in_callback(void *argument, pst_status status) {
    (void)argument, (void)status;
    pthread_exit(NULL);
}

static void *pump_until_left(void *runtime) {
    for (;;)
        (void)pst_run_once(runtime, NULL);
    return NULL;
}

/* What unwinds the stack, an exception too, goes through the library's frames. */
static void a_task_that_unwinds_fails_and_leaves_its_lane(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "pumped", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    place seen = {pthread_self(), 0, 0};
    pthread_t thread;
    const pst_task thrower = add_work(graph, lane, "thrower", end_thread, NULL);
    assert_int_equal(pthread_create(&thread, NULL, pump_until_left, runtime), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_status(pst_task_wait((pst_launch){graph, 0}, thrower, NULL), PST_EINVAL);
    assert_error(runtime, "lane pumped", "thrower", "must return");
    pst_task_options options = {.size = sizeof options,
                                .lane = lane,
                                .work = {note_thread, NULL, &seen},
                                .done = end_thread_in_callback};
    pst_task caller;
    assert_ok(pst_graph_add(graph, &options, &caller));
    assert_int_equal(pthread_create(&thread, NULL, pump_until_left, runtime), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(pst_task_wait((pst_launch){graph, 0}, caller, NULL));
    const pst_task next = add_work(graph, lane, "next", note_thread, &seen);
    assert_ok(pst_task_wait((pst_launch){graph, 0}, next, NULL));
    assert_int_equal(seen.count, 2);
    assert_ok(pst_graph_destroy(graph));
    assert_ok(pst_runtime_destroy(runtime));
}

static void a_task_that_ends_its_worker_poisons(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "worker", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    place seen = {pthread_self(), 0, 0};
    held busy = {0}; /* for nothing is added to a poisoned runtime */
    pst_task_release(add_work(graph, lane, "busy", hold, &busy));
    pst_task_release(add_work(graph, lane, "ends it", end_thread, NULL));
    pst_task_release(add_work(graph, lane, "never runs", note_thread, &seen));
    let_go(&busy);
    assert_true(pst_launch_wait((pst_launch){graph, 0}) < 0);
    while (pst_runtime_status(runtime) == PST_OK)
        yield_briefly();
    assert_status(pst_runtime_status(runtime), PST_ESYSTEM);
    assert_ok(pst_runtime_destroy(runtime));
    assert_int_equal(seen.count, 0);
}

/* ---- whose words -------------------------------------------------------------------------- */

static pst_status fail_when_released(void *argument, pst_stream *stream) {
    (void)hold(argument, stream);
    return PST_EIO;
}

static void a_failures_reason_is_not_what_another_thread_said(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(20000);
    pst_lane *lane = open_lane(runtime, "disk", PST_LANE_WORKER), *none;
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    const pst_lane_options nameless = {.size = sizeof nameless};
    char text[1024];
    held busy = {0};
    const pst_task read = add_work(graph, lane, "read", fail_when_released, &busy);
    await_inside(&busy);
    assert_status(pst_lane_create(runtime, &nameless, &none), PST_EINVAL);
    let_go(&busy);
    assert_status(pst_task_wait((pst_launch){graph, 0}, read, NULL), PST_EIO);
    (void)pst_runtime_error(runtime, text, sizeof text);
    assert_non_null(strstr(text, "read"));
    assert_null(strstr(text, "name"));
    assert_ok(pst_runtime_destroy(runtime));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_workers_tasks_run_on_the_worker_alone),
        cmocka_unit_test(a_lane_that_takes_help_is_served_by_who_waits),
        cmocka_unit_test(a_wait_runs_no_more_than_what_it_waits_for),
        cmocka_unit_test(lanes_of_one_worker_take_turns_in_time),
        cmocka_unit_test(a_lane_joins_an_order_whose_leader_is_in_a_task),
        cmocka_unit_test(an_event_that_cannot_be_recorded_in_time_is_none),
        cmocka_unit_test(a_destroy_keeps_its_deadline_behind_a_task_that_does_not_come_back),
        cmocka_unit_test(a_graph_is_not_destroyed_before_its_callback_has_returned),
        cmocka_unit_test(a_wait_in_a_task_or_callback_is_refused_by_name),
        cmocka_unit_test(a_task_that_unwinds_fails_and_leaves_its_lane),
        cmocka_unit_test(a_task_that_ends_its_worker_poisons),
        cmocka_unit_test(a_failures_reason_is_not_what_another_thread_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
