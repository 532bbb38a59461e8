/* Health checks: called now and then while something launched is pending, whoever asks for it. */
#include "tests/sched/harness.h"

#include "sched/poison.h"
#include "sched/runtime.h"

#include <time.h>

typedef struct health_check {
    pst_runtime *runtime;
    int calls;
    int finds; /* at which call all is not well */
} health_check;

static void look(void *context) {
    health_check *self = context;
    if (__atomic_add_fetch(&self->calls, 1, __ATOMIC_ACQ_REL) == self->finds)
        pst_runtime_poison(self->runtime, PST_EPEER, "a peer has died");
}

static int calls_of(const health_check *self) {
    return __atomic_load_n(&self->calls, __ATOMIC_ACQUIRE);
}

/* A runtime with a lane on which a task is pending for ever. */
static pst_runtime *open_pending(pst_lane_mode mode, step *endless, pst_graph **graph) {
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", mode);
    *graph = open_graph(runtime, PST_GRAPH_GROWING, "work");
    *endless = (step){.name = "endless", .asks = -1};
    pst_task task = add_step(*graph, lane, endless, NO_TASK, NO_TASK, NO_TASK);
    pst_task_release(task);
    return runtime;
}

static void a_worker_calls_it_and_it_poisons(void **state) {
    step endless;
    pst_graph *graph;
    (void)state;
    pst_runtime *runtime = open_pending(PST_LANE_WORKER, &endless, &graph);
    health_check mine = {.runtime = runtime, .finds = 2};
    assert_ok(pst_runtime_add_health_check(runtime, look, &mine));
    while (pst_runtime_status(runtime) == PST_OK)
        yield_briefly();
    assert_int_equal(calls_of(&mine), 2);
    assert_error(runtime, "a peer has died");
    __atomic_store_n(&endless.asks, 0, __ATOMIC_RELEASE);
    assert_status(pst_launch_wait((pst_launch){graph, 0}), PST_EPEER);
    pst_runtime_destroy(runtime);
    assert_int_equal(calls_of(&mine), 2); /* none after a poison */
}

static void who_pumps_calls_it(void **state) {
    step endless;
    pst_graph *graph;
    (void)state;
    pst_runtime *runtime = open_pending(PST_LANE_PUMPED, &endless, &graph);
    health_check first = {.runtime = runtime}, second = {.runtime = runtime};
    assert_ok(pst_runtime_add_health_check(runtime, look, &first));
    assert_ok(pst_runtime_add_health_check(runtime, look, &second));
    while (calls_of(&first) < 2 || calls_of(&second) < 2)
        (void)pst_run_once(runtime, NULL);
    pst_runtime_remove_health_check(runtime, look, &first);
    const int calls = calls_of(&first), others = calls_of(&second);
    while (calls_of(&second) < others + 2)
        (void)pst_run_once(runtime, NULL);
    assert_int_equal(calls_of(&first), calls);
    __atomic_store_n(&endless.asks, 0, __ATOMIC_RELEASE);
    pump(runtime);
    pst_runtime_destroy(runtime);
}

static void what_is_not_there_is_not_removed(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    health_check mine = {.runtime = runtime}, other = {.runtime = runtime};
    assert_ok(pst_runtime_add_health_check(runtime, look, &mine));
    pst_runtime_remove_health_check(runtime, look, &other);
    pst__health_check(runtime);
    assert_int_equal(mine.calls, 1);
    assert_status(pst_runtime_add_health_check(runtime, NULL, &mine), PST_EINVAL);
    assert_status(pst_runtime_add_health_check(NULL, look, &mine), PST_EINVAL);
    pst_runtime_remove_health_check(NULL, look, &mine);
    pst_runtime_destroy(runtime);
}

typedef struct late_check {
    pst_runtime *runtime;
    int entered; /* atomic */
} late_check;

static void find_out_late(void *context) {
    late_check *self = context;
    const struct timespec while_it_was_away = {0, 200000000};
    __atomic_store_n(&self->entered, 1, __ATOMIC_RELEASE);
    (void)nanosleep(&while_it_was_away, NULL);
    pst_runtime_poison(self->runtime, PST_EPEER, "a peer has died");
}

static void a_health_check_poisons_while_the_runtime_is_destroyed(void **state) {
    (void)state;
    pst_runtime *runtime = open_runtime(0);
    pst_lane *lane = open_lane(runtime, "gather", PST_LANE_WORKER);
    (void)open_lane(runtime, "newer", PST_LANE_WORKER);
    pst_graph *graph = open_graph(runtime, PST_GRAPH_GROWING, "work");
    step endless = {.name = "endless", .asks = -1};
    late_check mine = {.runtime = runtime};
    assert_ok(pst_runtime_add_health_check(runtime, find_out_late, &mine));
    pst_task_release(add_step(graph, lane, &endless, NO_TASK, NO_TASK, NO_TASK));
    while (!__atomic_load_n(&mine.entered, __ATOMIC_ACQUIRE))
        yield_briefly();
    __atomic_store_n(&endless.asks, 0, __ATOMIC_RELEASE);
    pst_runtime_destroy(runtime);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_calls_it_and_it_poisons),
        cmocka_unit_test(who_pumps_calls_it),
        cmocka_unit_test(what_is_not_there_is_not_removed),
        cmocka_unit_test(a_health_check_poisons_while_the_runtime_is_destroyed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
