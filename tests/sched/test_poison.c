/* Poison hooks: called once each, by whatever cause, on the thread that poisons. */
#include "tests/sched/queue_device.h"

#include <pthread.h>

typedef struct witness {
    int calls;
    pst_status status;
    pthread_t thread;
    step *ends; /* (optional) a pending task that may end from then on */
} witness;

static void note(void *context, pst_status status) {
    witness *self = context;
    self->status = status;
    self->thread = pthread_self();
    if (self->ends != NULL) __atomic_store_n(&self->ends->asks, 0, __ATOMIC_RELEASE);
    __atomic_fetch_add(&self->calls, 1, __ATOMIC_ACQ_REL);
}

static int calls_of(const witness *self) {
    return __atomic_load_n(&self->calls, __ATOMIC_ACQUIRE);
}

static void a_poison_calls_each_hook_once(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    witness first = {0}, second = {0}, removed = {0};
    assert_ok(pst_runtime_add_poison_hook(runtime, note, &first));
    assert_ok(pst_runtime_add_poison_hook(runtime, note, &removed));
    assert_ok(pst_runtime_add_poison_hook(runtime, note, &second));
    pst_runtime_remove_poison_hook(runtime, note, &removed);
    pst_runtime_remove_poison_hook(runtime, note, runtime); /* there is none */
    pst_runtime_poison(runtime, PST_EIO, "by the test");
    pst_runtime_poison(runtime, PST_EDEVICE, "again");
    assert_int_equal(first.calls, 1);
    assert_int_equal(second.calls, 1);
    assert_int_equal(removed.calls, 0);
    assert_int_equal(first.status, PST_EIO);
    assert_true(pthread_equal(first.thread, pthread_self()));
    pst_runtime_remove_poison_hook(runtime, note, &first);
    pst_runtime_destroy(runtime);
    assert_int_equal(first.calls + second.calls, 2);
}

static void a_hook_that_comes_late_is_called_at_once(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    witness late = {0};
    pst_runtime_poison(runtime, PST_EIO, "by the test");
    assert_ok(pst_runtime_add_poison_hook(runtime, note, &late));
    assert_int_equal(late.calls, 1);
    assert_int_equal(late.status, PST_EIO);
    assert_status(pst_runtime_add_poison_hook(runtime, NULL, &late), PST_EINVAL);
    assert_status(pst_runtime_add_poison_hook(NULL, note, &late), PST_EINVAL);
    pst_runtime_destroy(runtime);
}

/* A device's failure poisons from within a lane's turn. */
static void a_failure_after_the_launch_calls_the_hooks(void **state) {
    (void)state;
    queue_device device;
    queue_open(&device);
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_queue_lane(runtime, &device, "gather", PST_LANE_PUMPED);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
    witness seen = {0};
    step a = {.name = "a"};
    assert_ok(pst_runtime_add_poison_hook(runtime, note, &seen));
    pst_task task = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    (void)pst_run_once(runtime, NULL);
    device.fail_query = PST_EDEVICE;
    pump(runtime);
    assert_int_equal(seen.calls, 1);
    assert_int_equal(seen.status, PST_EDEVICE);
    pst_task_release(task);
    pst_runtime_destroy(runtime);
    queue_close(&device);
}

/* What a communicator's abort does: the pending task can end, and so the destroy, which has no
 * deadline. */
static void a_destroy_with_work_in_flight_calls_the_hooks(void **state) {
    (void)state;
    for (int mode = PST_LANE_WORKER; mode <= PST_LANE_PUMPED; mode += PST_LANE_PUMPED) {
        pst_runtime *runtime = open_runtime(0);
        pst_lane *lane = open_lane(runtime, "gather", (pst_lane_mode)mode);
        pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "g");
        step a = {.name = "a", .asks = -1};
        witness seen = {.ends = &a};
        assert_ok(pst_runtime_add_poison_hook(runtime, note, &seen));
        pst_task_release(add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK));
        while (runs_of(&a) == 0)
            (void)pst_run_once(runtime, NULL);
        pst_runtime_destroy(runtime);
        assert_int_equal(seen.calls, 1);
        assert_int_equal(seen.status, PST_ECANCELED);
        assert_int_equal(a.callbacks, 1);
        assert_int_equal(a.reported, PST_OK);
    }
}

static void a_destroy_without_work_calls_no_hook(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    witness seen = {0};
    assert_ok(pst_runtime_add_poison_hook(runtime, note, &seen));
    pst_runtime_destroy(runtime);
    assert_int_equal(seen.calls, 0);
}

/* ---- removal while it runs -------------------------------------------------------------- */

typedef struct slow_hook {
    pst_runtime *runtime;
    int entered, let_go, left;
} slow_hook;

static void be_slow(void *context, pst_status status) {
    slow_hook *self = context;
    (void)status;
    __atomic_store_n(&self->entered, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&self->let_go, __ATOMIC_ACQUIRE))
        yield_briefly();
    for (int i = 0; i < 100; i++)
        yield_briefly();
    __atomic_store_n(&self->left, 1, __ATOMIC_RELAXED);
}

static void *poison(void *argument) {
    slow_hook *self = argument;
    pst_runtime_poison(self->runtime, PST_EIO, "by another thread");
    return NULL;
}

static void removing_a_hook_waits_until_it_has_left(void **state) {
    (void)state;
    slow_hook slow = {.runtime = open_runtime(0)};
    pthread_t thread;
    assert_ok(pst_runtime_add_poison_hook(slow.runtime, be_slow, &slow));
    assert_int_equal(pthread_create(&thread, NULL, poison, &slow), 0);
    while (!__atomic_load_n(&slow.entered, __ATOMIC_ACQUIRE))
        yield_briefly();
    /* The poison is there for all to see while the hook runs. */
    assert_status(pst_runtime_status(slow.runtime), PST_EIO);
    __atomic_store_n(&slow.let_go, 1, __ATOMIC_RELEASE);
    pst_runtime_remove_poison_hook(slow.runtime, be_slow, &slow);
    assert_int_equal(__atomic_load_n(&slow.left, __ATOMIC_RELAXED), 1);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pst_runtime_destroy(slow.runtime);
}

#define RACES 300

static void *poison_one(void *argument) {
    pst_runtime_poison(argument, PST_EIO, "race");
    return NULL;
}

/* Registering against the poison: called once, by one of the two. */
static void a_hook_is_not_lost_between_two_threads(void **state) {
    (void)state;
    for (int i = 0; i < RACES; i++) {
        pst_runtime *runtime = open_runtime(0);
        witness seen = {0};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, poison_one, runtime), 0);
        assert_ok(pst_runtime_add_poison_hook(runtime, note, &seen));
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(calls_of(&seen), 1);
        pst_runtime_destroy(runtime);
    }
}

/* ---- several runtimes ------------------------------------------------------------------- */

static void a_poison_stays_in_its_runtime(void **state) {
    (void)state;
    pst_runtime *sick = open_runtime(0), *well = open_runtime(20000);
    witness other = {0};
    step a = {.name = "a"};
    assert_ok(pst_runtime_add_poison_hook(well, note, &other));
    pst_lane *lane = open_lane(well, "gather", PST_LANE_WORKER);
    (void)open_lane(sick, "gather", PST_LANE_WORKER);
    pst_graph *graph = open_graph(well, PST_GRAPH_GROWING, "g");
    pst_runtime_poison(sick, PST_EIO, "only this one");
    pst_task task = add_step(graph, lane, &a, NO_TASK, NO_TASK, NO_TASK);
    assert_ok(pst_task_wait((pst_launch){graph, 0}, task, NULL));
    pst_runtime_destroy(sick);
    pst_task_release(add_step(graph, lane, &a, task, NO_TASK, NO_TASK));
    assert_ok(pst_launch_wait((pst_launch){graph, 0}));
    assert_ok(pst_runtime_status(well));
    assert_int_equal(other.calls, 0);
    assert_int_equal(a.runs, 2);
    pst_task_release(task);
    pst_runtime_destroy(well);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_poison_calls_each_hook_once),
        cmocka_unit_test(a_hook_that_comes_late_is_called_at_once),
        cmocka_unit_test(a_failure_after_the_launch_calls_the_hooks),
        cmocka_unit_test(a_destroy_with_work_in_flight_calls_the_hooks),
        cmocka_unit_test(a_destroy_without_work_calls_no_hook),
        cmocka_unit_test(removing_a_hook_waits_until_it_has_left),
        cmocka_unit_test(a_hook_is_not_lost_between_two_threads),
        cmocka_unit_test(a_poison_stays_in_its_runtime),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
