/* Random graphs on random lanes against a serial oracle. A task's value is made of its
 * predecessors' values, which are plain variables: what runs out of order, twice or not at all
 * gives another value, and the thread sanitizer sees what is not ordered. On the queue device a
 * value is made when the stream gets there, not at the launch. */
#include "tests/random.h"
#include "tests/sched/queue_device.h"

#define GRAPHS_A_KIND  1500
#define GRAPHS_A_WORLD 50 /* graphs on one runtime */
#define TASKS_MAX      40
#define LANES_MAX      5
#define PREDECESSORS   6
#define LAUNCHES       3

typedef enum plan_kind { PLAN_GOOD, PLAN_FAILS, PLAN_CANCELED } plan_kind;

typedef struct world {
    pst_runtime *runtime;
    queue_device queue;
    pst_lane *lanes[LANES_MAX];
    int on_queue[LANES_MAX];
    pst_lane_order orders[LANES_MAX];
    uint32_t lane_count;
} world;

typedef struct fuzz_task {
    struct plan *plan;
    int is_gate, fails, asks_first, asks;
    uint32_t lane;
    uint32_t before[PREDECESSORS], before_count;
    uint64_t value, expected;
    int ran, callbacks, is_canceled;
    pst_status reported;
    pst_task handle;
} fuzz_task;

typedef struct plan {
    world *where;
    uint64_t random, launch;
    uint32_t count;
    plan_kind kind;
    fuzz_task tasks[TASKS_MAX];
} plan;

/* ---- what tasks do ---------------------------------------------------------------------- */

static uint64_t value_of(const plan *self, uint32_t index, int expected) {
    const fuzz_task *task = &self->tasks[index];
    uint64_t value = mix(index + 1000 * self->launch);
    for (uint32_t i = 0; i < task->before_count; i++) {
        const fuzz_task *before = &self->tasks[task->before[i]];
        if (!before->is_gate) value = mix(value ^ (expected ? before->expected : before->value));
    }
    return value;
}

static void compute(void *context, void *argument) {
    fuzz_task *task = argument;
    (void)context;
    task->value = value_of(task->plan, (uint32_t)(task - task->plan->tasks), 0);
}

static pst_status fuzz_start(void *argument, pst_stream *stream) {
    fuzz_task *task = argument;
    (void)stream;
    task->ran++;
    if (task->plan->where->on_queue[task->lane]) return task->fails ? PST_EIO : PST_OK;
    task->asks = task->asks_first;
    if (task->asks > 0) return PST_PENDING;
    compute(NULL, task);
    return task->fails ? PST_EIO : PST_OK;
}

static pst_status fuzz_test(void *argument) {
    fuzz_task *task = argument;
    if (--task->asks > 0) return PST_PENDING;
    compute(NULL, task);
    return task->fails ? PST_EIO : PST_OK;
}

static void fuzz_done(void *argument, pst_status status) {
    fuzz_task *task = argument;
    task->reported = status;
    __atomic_fetch_add(&task->callbacks, 1, __ATOMIC_ACQ_REL);
}

/* ---- making a plan ---------------------------------------------------------------------- */

static void make_task(plan *self, uint32_t index) {
    fuzz_task *task = &self->tasks[index];
    *task = (fuzz_task){.plan = self};
    task->lane = random_below(&self->random, self->where->lane_count);
    task->asks_first = random_below(&self->random, 4) == 0 ? 2 : 0;
    task->is_gate = random_below(&self->random, 12) == 0;
    task->fails = !task->is_gate && self->kind == PLAN_FAILS && random_below(&self->random, 8) == 0;
    if (index == 0 || task->is_gate) return;
    const uint32_t wanted = random_below(&self->random, PREDECESSORS);
    for (uint32_t i = 0; i < wanted; i++)
        task->before[task->before_count++] = random_below(&self->random, index);
}

static void make_plan(plan *self, world *where, uint64_t seed) {
    *self = (plan){.where = where, .random = seed};
    self->count = 1 + random_below(&self->random, TASKS_MAX);
    const uint32_t kind = random_below(&self->random, 4);
    self->kind = kind == 2 ? PLAN_FAILS : kind == 3 ? PLAN_CANCELED : PLAN_GOOD;
    for (uint32_t i = 0; i < self->count; i++)
        make_task(self, i);
}

/* The serial oracle: the order of the indices is one in which the tasks may run. */
static void expect(plan *self) {
    for (uint32_t i = 0; i < self->count; i++) {
        fuzz_task *task = &self->tasks[i];
        task->ran = task->callbacks = task->is_canceled = 0;
        task->reported = PST_OK;
        for (uint32_t p = 0; p < task->before_count; p++) {
            const fuzz_task *before = &self->tasks[task->before[p]];
            task->is_canceled |= before->is_canceled || before->fails;
        }
        if (!task->is_canceled) task->expected = value_of(self, i, 1);
    }
}

/* ---- building and running --------------------------------------------------------------- */

static pst_task add_task(plan *self, pst_graph *graph, uint32_t index, int with_edges) {
    fuzz_task *task = &self->tasks[index];
    pst_task after[PREDECESSORS], handle;
    if (task->is_gate) {
        assert_ok(pst_graph_add_gate(graph, "gate", &handle));
        return handle;
    }
    pst_task_options options = {.size = sizeof options,
                                .name = "fuzz",
                                .lane = self->where->lanes[task->lane],
                                .work = {fuzz_start, fuzz_test, task},
                                .done = fuzz_done,
                                .done_argument = task,
                                .after = after};
    if (self->where->orders[task->lane] == PST_LANE_BY_PRIORITY)
        options.priority = PST_PRIORITY_MOST_URGENT + (int)(mix(index) % 8);
    for (uint32_t p = 0; with_edges && p < task->before_count; p++)
        after[options.after_count++] = self->tasks[task->before[p]].handle;
    assert_ok(pst_graph_add(graph, &options, &handle));
    return handle;
}

static int keeps_an_order(const plan *self) {
    for (uint32_t i = 0; i < self->count; i++)
        if (self->where->orders[self->tasks[i].lane] == PST_LANE_BY_SUBMISSION) return 1;
    return 0;
}

/* Sealed graphs are sometimes added from the last task to the first, their edges afterwards. */
static void build_sealed(plan *self, pst_graph *graph) {
    const int backwards = random_below(&self->random, 3) == 0 && !keeps_an_order(self);
    for (uint32_t i = 0; i < self->count; i++) {
        const uint32_t index = backwards ? self->count - 1 - i : i;
        self->tasks[index].handle = add_task(self, graph, index, !backwards);
    }
    for (uint32_t i = 0; backwards && i < self->count; i++)
        for (uint32_t p = 0; p < self->tasks[i].before_count; p++)
            assert_ok(pst_graph_add_edge(graph, self->tasks[self->tasks[i].before[p]].handle,
                                         self->tasks[i].handle));
    assert_ok(pst_graph_seal(graph));
}

static void open_gates(plan *self, pst_launch launch) {
    for (uint32_t i = 0; i < self->count; i++)
        if (self->tasks[i].is_gate) {
            const pst_status status = pst_gate_open(launch, self->tasks[i].handle, NULL);
            assert_true(status == PST_OK || self->kind == PLAN_CANCELED);
        }
}

static int all_ended(const plan *self, pst_launch launch) {
    for (uint32_t i = 0; i < self->count; i++)
        if (pst_task_test(launch, self->tasks[i].handle) == PST_PENDING) return 0;
    return 1;
}

static void finish(plan *self, pst_launch launch) {
    while (!all_ended(self, launch)) {
        queue_drain(&self->where->queue);
        (void)pst_run_once(self->where->runtime, NULL);
    }
    const pst_status status = pst_launch_wait(launch);
    assert_true(status == PST_OK || self->kind != PLAN_GOOD);
}

/* After a cancel it is open which tasks ran: but those that did had all their predecessors. */
static void check_canceled(const plan *self, const fuzz_task *task) {
    const int whole = task->reported == PST_OK;
    assert_int_equal(task->ran, whole);
    for (uint32_t p = 0; p < task->before_count; p++) {
        const fuzz_task *before = &self->tasks[task->before[p]];
        if (whole && !before->is_gate) assert_int_equal(before->reported, PST_OK);
    }
    if (whole) assert_true(task->value == task->expected);
}

static void check(const plan *self) {
    for (uint32_t i = 0; i < self->count; i++) {
        const fuzz_task *task = &self->tasks[i];
        if (task->is_gate) continue;
        assert_int_equal(__atomic_load_n(&task->callbacks, __ATOMIC_ACQUIRE), 1);
        if (self->kind == PLAN_CANCELED) {
            check_canceled(self, task);
            continue;
        }
        assert_int_equal(task->ran, !task->is_canceled);
        assert_int_equal(task->reported, task->is_canceled ? PST_ESKIPPED
                                         : task->fails     ? PST_EIO
                                                           : PST_OK);
        if (!task->is_canceled && !task->fails) assert_true(task->value == task->expected);
    }
}

static void run_sealed(plan *self) {
    pst_graph *graph = open_graph(self->where->runtime, PST_GRAPH_SEALED, "fuzz");
    build_sealed(self, graph);
    for (int k = 0; k < LAUNCHES; k++) {
        pst_launch launch;
        self->launch++;
        expect(self);
        assert_ok(pst_graph_launch(graph, &launch));
        if (self->kind == PLAN_CANCELED && random_below(&self->random, 2))
            assert_ok(pst_launch_cancel(launch));
        open_gates(self, launch);
        if (self->kind == PLAN_CANCELED) assert_ok(pst_launch_cancel(launch));
        finish(self, launch);
        check(self);
    }
    assert_ok(pst_graph_destroy(graph));
}

static void run_growing(plan *self) {
    pst_graph *graph = open_graph(self->where->runtime, PST_GRAPH_GROWING, "fuzz");
    const pst_launch launch = {graph, 0};
    expect(self);
    for (uint32_t i = 0; i < self->count; i++) {
        self->tasks[i].handle = add_task(self, graph, i, 1);
        if (random_below(&self->random, 3) == 0) {
            queue_drain(&self->where->queue);
            (void)pst_run_once(self->where->runtime, NULL);
        }
        if (self->tasks[i].is_gate && random_below(&self->random, 2))
            assert_ok(pst_gate_open(launch, self->tasks[i].handle, NULL));
    }
    if (self->kind == PLAN_CANCELED) assert_ok(pst_launch_cancel(launch));
    for (uint32_t i = 0; i < self->count; i++)
        if (self->tasks[i].is_gate) (void)pst_gate_open(launch, self->tasks[i].handle, NULL);
    finish(self, launch);
    check(self);
    for (uint32_t i = 0; i < self->count; i++)
        pst_task_release(self->tasks[i].handle);
    assert_ok(pst_graph_destroy(graph));
}

/* ---- worlds ----------------------------------------------------------------------------- */

static void open_world(world *where, uint64_t *random) {
    *where = (world){.runtime = open_runtime(60000)};
    queue_open(&where->queue);
    where->queue.ran = compute;
    where->lane_count = 1 + random_below(random, LANES_MAX);
    pst_lane *worker = NULL;
    for (uint32_t i = 0; i < where->lane_count; i++) {
        pst_lane_options options = {.size = sizeof options, .name = "fuzz"};
        const uint32_t mode = random_below(random, worker == NULL ? 2 : 3);
        where->on_queue[i] = random_below(random, 4) == 0;
        where->orders[i] = (pst_lane_order)random_below(random, 3);
        options.mode = mode == 0 ? PST_LANE_PUMPED : mode == 1 ? PST_LANE_WORKER : PST_LANE_SHARED;
        options.share_with = options.mode == PST_LANE_SHARED ? worker : NULL;
        options.order = where->orders[i];
        options.device = where->on_queue[i] ? &where->queue.device : NULL;
        assert_ok(pst_lane_create(where->runtime, &options, &where->lanes[i]));
        if (options.mode == PST_LANE_WORKER) worker = where->lanes[i];
    }
}

static void close_world(world *where) {
    pst_runtime_destroy(where->runtime);
    assert_int_equal(where->queue.live_events, 0);
    queue_close(&where->queue);
}

static void fuzz(void (*run)(plan *), const char *name) {
    uint64_t random = random_seed(name);
    static plan self;
    world where;
    for (int i = 0; i < GRAPHS_A_KIND; i++) {
        if (i % GRAPHS_A_WORLD == 0) open_world(&where, &random);
        random = mix(random);
        make_plan(&self, &where, random);
        run(&self);
        if (i % GRAPHS_A_WORLD == GRAPHS_A_WORLD - 1) close_world(&where);
    }
}

static void sealed_graphs_agree_with_the_oracle(void **state) {
    (void)state;
    fuzz(run_sealed, "sealed_graphs_agree_with_the_oracle");
}

static void growing_graphs_agree_with_the_oracle(void **state) {
    (void)state;
    fuzz(run_growing, "growing_graphs_agree_with_the_oracle");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sealed_graphs_agree_with_the_oracle),
        cmocka_unit_test(growing_graphs_agree_with_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
