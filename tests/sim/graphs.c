#include "graphs.h"

#include "device.h"
#include "memory.h"
#include "plan.h"
#include "random.h"
#include "system.h"
#include "threads.h"

#include <string.h>

#define HELPERS     3u
#define DEADLINE_NS 30000000000u

typedef struct program {
    uint64_t random;
    plan plan;
    pst_runtime *runtime;
    pst_graph *graph;
    pst_launch launch;
    uint32_t launch_index;
    uint32_t helpers;
} program;

/* Several threads in one launch of the program, each with its own share of the gates. */
typedef struct helper {
    program *program;
    uint64_t random;
    uint32_t number;
    pthread_t thread;
} helper;

static int may_fail(const program *self) {
    return self->plan.kind > PLAN_FAILS;
}

static void must(program *self, pst_status status, const char *call) {
    char text[512] = "";
    if (status == PST_OK || (status != PST_ETIMEDOUT && may_fail(self))) return;
    (void)pst_runtime_error(self->runtime, text, sizeof text);
    sim_fail("%s returned %d: %s", call, (int)status, text);
}

/* ---- lanes ------------------------------------------------------------------------------ */

static void draw_lane(program *self, plan_lane *lane, pst_lane *worker) {
    lane->options = (pst_lane_options){.size = sizeof lane->options, .name = "lane"};
    lane->options.mode = (pst_lane_mode)random_below(&self->random, worker == NULL ? 2 : 3);
    if (worker == NULL && lane->options.mode == PST_LANE_SHARED)
        lane->options.mode = PST_LANE_PUMPED;
    if (lane->options.mode == PST_LANE_SHARED) lane->options.share_with = worker;
    lane->options.order = (pst_lane_order)random_below(&self->random, 3);
    if (random_once_in(&self->random, 3)) lane->options.device = self->plan.device;
}

/* A lane in order of submission may have one order with an earlier one. */
static void join_order(program *self, plan_lane *lane) {
    plan_lane *const first = self->plan.lanes;
    lane->leader = lane;
    if (lane->options.order != PST_LANE_BY_SUBMISSION || random_below(&self->random, 2)) return;
    for (plan_lane *other = first; other != lane; other++)
        if (other->options.order == PST_LANE_BY_SUBMISSION) lane->leader = other->leader;
    if (lane->leader == lane) return;
    lane->options.order_with = lane->leader->lane;
    lane->options.mode = PST_LANE_WORKER;
    lane->options.share_with = NULL;
}

static int open_borrowed(program *self) {
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "borrowed",
                                      .mode = PST_LANE_BORROWED,
                                      .device = self->plan.device};
    const pst_status status = pst_lane_create(self->runtime, &options, &self->plan.borrowed);
    must(self, status, "pst_lane_create");
    return status == PST_OK;
}

static int open_lanes(program *self) {
    pst_lane *worker = NULL;
    if (random_below(&self->random, 2) && !open_borrowed(self)) return 0;
    self->plan.lane_count = 1 + random_below(&self->random, PLAN_LANES);
    for (uint32_t i = 0; i < self->plan.lane_count; i++) {
        plan_lane *lane = &self->plan.lanes[i];
        draw_lane(self, lane, worker);
        join_order(self, lane);
        const pst_status status = pst_lane_create(self->runtime, &lane->options, &lane->lane);
        must(self, status, "pst_lane_create");
        if (status != PST_OK) return 0;
        if (lane->options.mode == PST_LANE_WORKER && lane->leader == lane) worker = lane->lane;
    }
    return 1;
}

/* ---- building --------------------------------------------------------------------------- */

/* 0 when it failed. A growing graph's task may run from here on. */
static int add(program *self, uint32_t index) {
    plan_task *task = &self->plan.tasks[index];
    pst_task after[PLAN_PREDECESSORS];
    pst_status status;
    if (task->is_gate) {
        status = pst_graph_add_gate(self->graph, "gate", &task->handle);
    } else {
        const pst_task_options options = plan_options(&self->plan, index, after);
        if (self->plan.is_growing) plan_added(task);
        status = pst_graph_add(self->graph, &options, &task->handle);
        if (status != PST_OK && self->plan.is_growing) task->added--;
    }
    must(self, status, "pst_graph_add");
    return status == PST_OK;
}

static int build_sealed(program *self) {
    plan *plan = &self->plan;
    for (uint32_t i = 0; i < plan->count; i++)
        if (!add(self, plan->has_backward_edges ? plan->count - 1 - i : i)) return 0;
    for (uint32_t i = 0; plan->has_backward_edges && i < plan->count; i++)
        for (uint32_t p = 0; p < plan->tasks[i].before_count; p++) {
            const pst_task from = plan->tasks[plan->tasks[i].before[p]].handle;
            const pst_status status = pst_graph_add_edge(self->graph, from, plan->tasks[i].handle);
            must(self, status, "pst_graph_add_edge");
            if (status != PST_OK) return 0;
        }
    const pst_status status = pst_graph_seal(self->graph);
    must(self, status, "pst_graph_seal");
    return status == PST_OK;
}

/* ---- the threads of a launch ------------------------------------------------------------ */

static void open_gate(program *self, plan_task *gate) {
    pst_lane *borrowed = gate->lane % 2 == 0 ? self->plan.borrowed : NULL;
    if (gate->handle.graph == NULL) return;
    plan_open(gate, self->launch_index, borrowed != NULL);
    must(self, pst_gate_open(self->launch, gate->handle, borrowed), "pst_gate_open");
}

static void open_share(program *self, uint32_t number) {
    for (uint32_t i = 0; i < self->plan.count; i++) {
        plan_task *task = &self->plan.tasks[i];
        if (task->is_gate && i % (self->helpers + 1) == number) open_gate(self, task);
    }
}

static void stop(program *self) {
    if (self->plan.kind == PLAN_CANCELED)
        must(self, pst_launch_cancel(self->launch), "pst_launch_cancel");
    if (self->plan.kind == PLAN_POISONED) pst_runtime_poison(self->runtime, PST_EIO, "by plan");
}

/* Looks at some task that nobody releases meanwhile. */
static void look(program *self, uint64_t *random) {
    const plan_task *task = &self->plan.tasks[random_below(random, self->plan.count)];
    if (task->handle.graph == NULL || self->plan.is_growing) return;
    switch (random_below(random, 3)) {
    case 0:
        (void)pst_task_test(self->launch, task->handle);
        break;
    case 1:
        (void)pst_task_event(self->launch, task->handle);
        break;
    default:
        (void)pst_run_once(self->runtime, NULL);
    }
}

static void *help(void *argument) {
    helper *self = argument;
    for (uint32_t i = random_below(&self->random, 6); i > 0; i--)
        look(self->program, &self->random);
    open_share(self->program, self->number);
    if (self->number == 1) stop(self->program);
    for (uint32_t i = random_below(&self->random, 6); i > 0; i--)
        (void)pst_run_once(self->program->runtime, NULL);
    return NULL;
}

/* What a helper would have done is done by this thread when there is no thread for it. */
static void begin_helpers(program *self, helper *helpers) {
    for (uint32_t i = 0; i < self->helpers; i++) {
        helpers[i] = (helper){self, random_next(&self->random), i + 1, 0};
        if (pthread_create(&helpers[i].thread, NULL, help, &helpers[i]) == 0) continue;
        helpers[i].thread = 0;
        (void)help(&helpers[i]);
    }
}

static void end_helpers(program *self, helper *helpers) {
    for (uint32_t i = 0; i < self->helpers; i++)
        if (helpers[i].thread != 0) (void)pthread_join(helpers[i].thread, NULL);
}

/* ---- launches --------------------------------------------------------------------------- */

static void wait_for_one(program *self) {
    plan_task *task = &self->plan.tasks[random_below(&self->random, self->plan.count)];
    pst_lane *borrowed = random_below(&self->random, 2) ? self->plan.borrowed : NULL;
    if (task->handle.graph == NULL) return;
    const pst_status status = pst_task_wait(self->launch, task->handle, borrowed);
    if (status == PST_ETIMEDOUT) must(self, status, "pst_task_wait");
    if (status == PST_OK && borrowed != NULL && !task->is_gate && self->plan.kind <= PLAN_FAILS)
        plan_expect_before(task, self->launch_index);
}

static void wait_for_all(program *self) {
    const pst_status status = pst_launch_wait(self->launch);
    if (self->plan.kind == PLAN_GOOD || status == PST_ETIMEDOUT)
        must(self, status, "pst_launch_wait");
}

static int launch(program *self) {
    pst_status status;
    while ((status = pst_graph_launch(self->graph, &self->launch)) == PST_EBUSY) {
        (void)pst_run_once(self->runtime, NULL);
        (void)sched_yield();
    }
    must(self, status, "pst_graph_launch");
    return status == PST_OK;
}

/* Callbacks may come before pst_graph_launch returns. */
static void count_launch(program *self, int by) {
    for (uint32_t i = 0; i < self->plan.count; i++)
        self->plan.tasks[i].added += (uint32_t)by;
}

static void run_sealed(program *self) {
    helper helpers[HELPERS];
    if (!build_sealed(self)) return;
    for (self->launch_index = 0; self->launch_index < self->plan.launches; self->launch_index++) {
        count_launch(self, 1);
        if (!launch(self)) {
            count_launch(self, -1);
            return;
        }
        begin_helpers(self, helpers);
        open_share(self, 0);
        if (random_once_in(&self->random, 3)) wait_for_one(self);
        end_helpers(self, helpers);
        if (self->helpers == 0) stop(self);
        if (random_once_in(&self->random, 2)) wait_for_all(self);
    }
    self->launch_index--;
    wait_for_all(self);
}

/* A handle that no later task needs may go at once, so that its block is used again. */
static void release_some(program *self, uint32_t added) {
    for (uint32_t i = 0; i < added; i++) {
        plan_task *task = &self->plan.tasks[i];
        if (task->is_gate || task->last_use >= added || random_below(&self->random, 2)) continue;
        pst_task_release(task->handle);
        task->handle = (pst_task){NULL, 0};
    }
}

static void run_growing(program *self) {
    helper helpers[HELPERS];
    self->launch = (pst_launch){self->graph, 0};
    for (uint32_t i = 0; i < self->plan.count; i++) {
        if (!add(self, i)) break;
        if (random_once_in(&self->random, 4)) (void)pst_run_once(self->runtime, NULL);
        if (random_once_in(&self->random, 8)) release_some(self, i + 1);
        if (random_once_in(&self->random, 16)) stop(self);
    }
    begin_helpers(self, helpers);
    open_share(self, 0);
    if (random_once_in(&self->random, 3)) wait_for_one(self);
    end_helpers(self, helpers);
    wait_for_all(self);
    for (uint32_t i = 0; i < self->plan.count; i++)
        pst_task_release(self->plan.tasks[i].handle);
}

/* ---- the program ------------------------------------------------------------------------ */

static void run_graph(program *self) {
    const pst_graph_kind kind = self->plan.is_growing ? PST_GRAPH_GROWING : PST_GRAPH_SEALED;
    const pst_status status = pst_graph_create(self->runtime, kind, "graph", &self->graph);
    must(self, status, "pst_graph_create");
    if (status != PST_OK) return;
    if (self->plan.is_growing)
        run_growing(self);
    else
        run_sealed(self);
    if (!may_fail(self)) {
        plan_check(&self->plan);
        must(self, pst_graph_destroy(self->graph), "pst_graph_destroy");
    }
}

typedef enum fault_kind { FAULT_NONE, FAULT_MEMORY, FAULT_DEVICE, FAULT_THREAD } fault_kind;

static int begin_machine(program *self) {
    const fault_kind fault = self->plan.kind == PLAN_FAULTY
                                 ? (fault_kind)(1 + random_below(&self->random, FAULT_THREAD))
                                 : FAULT_NONE;
    const uint32_t nth = 1 + random_below(&self->random, 60);
    memory_begin(fault == FAULT_MEMORY ? nth : 0);
    system_begin(random_once_in(&self->random, 2) ? 8 : 0, fault == FAULT_THREAD ? 1 + nth % 4 : 0);
    self->plan.device = device_open(random_next(&self->random), fault == FAULT_DEVICE ? nth : 0);
    return self->plan.device != NULL;
}

static void end_machine(const program *self) {
    if (self->plan.device != NULL) self->plan.device->ops->destroy(self->plan.device);
    memory_end();
}

void graphs_run(void *argument) {
    static program self;
    memset(&self, 0, sizeof self);
    self.random = *(const uint64_t *)argument;
    self.plan.kind = (plan_kind)random_below(&self.random, PLAN_KINDS);
    self.helpers = random_below(&self.random, HELPERS + 1);
    if (!begin_machine(&self)) {
        end_machine(&self);
        return;
    }
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = memory_allocator(),
                                         .spin = 1 + random_below(&self.random, 8),
                                         .deadline_ns = DEADLINE_NS,
                                         .trace_records = 64,
                                         .task_capacity = 1 + random_below(&self.random, 8)};
    const pst_status status = pst_runtime_create(&options, &self.runtime);
    must(&self, status, "pst_runtime_create");
    if (status == PST_OK && open_lanes(&self)) {
        plan_draw(&self.plan, random_next(&self.random), self.plan.kind);
        run_graph(&self);
    }
    pst_runtime_destroy(self.runtime);
    plan_check(&self.plan);
    end_machine(&self);
}
