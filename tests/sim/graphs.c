#include "graphs.h"

#include "device.h"
#include "memory.h"
#include "program.h"
#include "system.h"
#include "tests/random.h"
#include "threads.h"

#include <penstock/trace.h>
#include <string.h>

#define DEADLINE_NS       30000000000u
#define STUCK_DEADLINE_NS 20000000u
#define WATCHDOG_SLACK_NS 12000000u /* nine looks of one who sleeps between them */
#define MEMORY_SITES      120u

static int may_fail(const program *self) {
    return self->plan.kind > PLAN_FAILS;
}

void program_must(program *self, pst_status status, const char *call) {
    char text[512] = "";
    const int is_in_vain = status == PST_ETIMEDOUT && self->plan.kind != PLAN_STUCK;
    if (status == PST_OK || (may_fail(self) && !is_in_vain)) return;
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
    program_must(self, status, "pst_lane_create");
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
        program_must(self, status, "pst_lane_create");
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
    pst_event *events[OUTSIDE_EVENTS];
    pst_status status;
    if (task->is_gate) {
        status = pst_graph_add_gate(self->graph, "gate", &task->handle);
    } else {
        const pst_task_options options = plan_options(&self->plan, index, after, events);
        if (self->plan.is_growing) plan_added(task);
        status = pst_graph_add(self->graph, &options, &task->handle);
        if (status != PST_OK && self->plan.is_growing) task->added--;
    }
    program_must(self, status, "pst_graph_add");
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
            program_must(self, status, "pst_graph_add_edge");
            if (status != PST_OK) return 0;
        }
    const pst_status status = pst_graph_seal(self->graph);
    program_must(self, status, "pst_graph_seal");
    return status == PST_OK;
}

/* ---- launches --------------------------------------------------------------------------- */

static void wait_for_one(program *self) {
    plan_task *task = &self->plan.tasks[random_below(&self->random, self->plan.count)];
    pst_lane *borrowed = random_below(&self->random, 2) ? self->plan.borrowed : NULL;
    if (task->handle.graph == NULL) return;
    const pst_status status = pst_task_wait(self->launch, task->handle, borrowed);
    if (status == PST_ETIMEDOUT) program_must(self, status, "pst_task_wait");
    if (status == PST_OK && borrowed != NULL && !task->is_gate && self->plan.kind <= PLAN_FAILS)
        plan_expect_before(task, self->launch_index);
}

static void wait_for_all(program *self) {
    if (self->loops) loop_run(self);
    const pst_status status = pst_launch_wait(self->launch);
    if (self->plan.kind == PLAN_GOOD || status == PST_ETIMEDOUT)
        program_must(self, status, "pst_launch_wait");
}

static int launch(program *self) {
    pst_status status;
    while ((status = pst_graph_launch(self->graph, &self->launch)) == PST_EBUSY) {
        (void)pst_run_once(self->runtime, NULL);
        (void)sched_yield();
    }
    program_must(self, status, "pst_graph_launch");
    return status == PST_OK;
}

/* Callbacks may come before pst_graph_launch returns. */
static void count_launch(program *self, int by) {
    for (uint32_t i = 0; i < self->plan.count; i++)
        self->plan.tasks[i].added += (uint32_t)by;
}

static void run_sealed(program *self) {
    if (!build_sealed(self)) return;
    for (self->launch_index = 0; self->launch_index < self->plan.launches; self->launch_index++) {
        count_launch(self, 1);
        if (!launch(self)) {
            count_launch(self, -1);
            return;
        }
        helpers_begin(self);
        helpers_open_share(self, 0);
        outside_end(&self->plan.outside);
        if (random_once_in(&self->random, 3)) wait_for_one(self);
        helpers_end(self);
        if (self->helpers == 0) helpers_stop(self);
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
    self->launch = (pst_launch){self->graph, 0};
    for (uint32_t i = 0; i < self->plan.count; i++) {
        if (!add(self, i)) break;
        if (random_once_in(&self->random, 4)) (void)pst_run_once(self->runtime, NULL);
        if (random_once_in(&self->random, 8)) release_some(self, i + 1);
        if (random_once_in(&self->random, 16)) helpers_stop(self);
    }
    helpers_begin(self);
    helpers_open_share(self, 0);
    outside_end(&self->plan.outside);
    if (random_once_in(&self->random, 3)) wait_for_one(self);
    helpers_end(self);
    wait_for_all(self);
    for (uint32_t i = 0; i < self->plan.count; i++)
        pst_task_release(self->plan.tasks[i].handle);
}

/* ---- the program ------------------------------------------------------------------------ */

static void run_graph(program *self) {
    const pst_graph_kind kind = self->plan.is_growing ? PST_GRAPH_GROWING : PST_GRAPH_SEALED;
    const pst_status status = pst_graph_create(self->runtime, kind, "graph", &self->graph);
    program_must(self, status, "pst_graph_create");
    if (status != PST_OK) return;
    if (self->plan.is_growing)
        run_growing(self);
    else
        run_sealed(self);
    if (!may_fail(self)) {
        plan_check(&self->plan);
        program_must(self, pst_graph_destroy(self->graph), "pst_graph_destroy");
    }
}

/* A program of one task that never ends is stopped by the watchdog, and no other is. */
static void check_watchdog(program *self) {
    pst_runtime_stats stats = {.size = sizeof stats};
    pst_runtime_get_stats(self->runtime, &stats);
    if (!may_fail(self) && stats.watchdog_reports != 0)
        sim_fail("the watchdog has reported a task that ends");
    if (self->plan.stuck_since == 0 ||
        sim_clock() < self->plan.stuck_since + 2 * self->watchdog_ns + WATCHDOG_SLACK_NS)
        return;
    if (stats.watchdog_reports == 0 || pst_runtime_status(self->runtime) != PST_ETIMEDOUT)
        sim_fail("a task does not end, and the watchdog has not stopped the runtime");
}

/* ---- outside of the graph --------------------------------------------------------------- */

static void begin_outside(program *self) {
    pst_device *host = random_once_in(&self->random, 4) ? pst_runtime_host(self->runtime) : NULL;
    if (random_once_in(&self->random, 2))
        outside_begin(&self->plan.outside, self->plan.device, host, random_next(&self->random));
}

/* Tasks may still wait for the host's events, which go with the runtime. */
static void end_outside_host(program *self) {
    const struct timespec pause = {0, 1000000};
    outside_end(&self->plan.outside);
    if (self->plan.outside.streams[OUTSIDE_HOST].device == NULL) return;
    for (int idle = 0; pst_run_once(self->runtime, &idle) == PST_OK ? !idle : 1;)
        if (!idle) (void)nanosleep(&pause, NULL);
    outside_free(&self->plan.outside, OUTSIDE_HOST);
}

/* ---- tracing ---------------------------------------------------------------------------- */

static int begin_trace(program *self) {
    if (!random_once_in(&self->random, 3)) return 0;
    const pst_status status = pst_trace_start(self->runtime);
    program_must(self, status, "pst_trace_start");
    return status == PST_OK;
}

/* Destroying ends a recording that nobody has stopped. */
static void end_trace(program *self) {
    if (random_once_in(&self->random, 2)) return;
    program_must(self, pst_trace_stop(self->runtime), "pst_trace_stop");
    if (random_once_in(&self->random, 2))
        program_must(self, pst_trace_write(self->runtime, "/dev/null"), "pst_trace_write");
}

/* ---- the machine ------------------------------------------------------------------------ */

typedef enum fault_kind { FAULT_NONE, FAULT_MEMORY, FAULT_DEVICE, FAULT_THREAD } fault_kind;

static int begin_machine(program *self) {
    const fault_kind fault = self->plan.kind == PLAN_FAULTY
                                 ? (fault_kind)(1 + random_below(&self->random, FAULT_THREAD))
                                 : FAULT_NONE;
    const uint32_t nth = 1 + random_below(&self->random, MEMORY_SITES);
    memory_begin(fault == FAULT_MEMORY ? nth : 0);
    system_begin(random_once_in(&self->random, 2) ? 8 : 0, fault == FAULT_THREAD ? 1 + nth % 4 : 0);
    self->plan.device = device_open(random_next(&self->random), fault == FAULT_DEVICE);
    return self->plan.device != NULL;
}

static void end_machine(program *self) {
    if (self->plan.device != NULL) {
        outside_free(&self->plan.outside, OUTSIDE_DEVICE);
        self->plan.device->ops->destroy(self->plan.device);
    }
    memory_end();
}

static pst_status open_runtime(program *self) {
    const int is_stuck = self->plan.kind == PLAN_STUCK;
    pst_runtime_options options = {.size = sizeof options,
                                   .allocator = memory_allocator(),
                                   .spin = 1 + random_below(&self->random, 8),
                                   .deadline_ns = is_stuck ? STUCK_DEADLINE_NS : DEADLINE_NS,
                                   .trace_records = 64,
                                   .flight_records = 64,
                                   .task_capacity = 1 + random_below(&self->random, 8)};
    if (is_stuck || random_once_in(&self->random, 3))
        self->watchdog_ns = (is_stuck ? 100000u : 50000000u) << random_below(&self->random, 3);
    options.watchdog_ns = self->watchdog_ns;
    options.watchdog_poisons = is_stuck;
    const pst_status status = pst_runtime_create(&options, &self->runtime);
    program_must(self, status, "pst_runtime_create");
    return status;
}

static void run_program(program *self) {
    const int is_traced = begin_trace(self);
    if (open_lanes(self)) {
        self->loops =
            random_once_in(&self->random, 3) && pst_fd(self->runtime, &self->descriptor) == PST_OK;
        begin_outside(self);
        plan_draw(&self->plan, random_next(&self->random), self->plan.kind);
        run_graph(self);
        end_outside_host(self);
    }
    if (is_traced) end_trace(self);
    check_watchdog(self);
}

/* What never ends takes long: it is drawn less often. */
static plan_kind draw_kind(uint64_t *random) {
    const plan_kind kind = (plan_kind)random_below(random, PLAN_KINDS);
    return kind == PLAN_STUCK && !random_once_in(random, 4) ? PLAN_GOOD : kind;
}

void graphs_run(void *argument) {
    static program self;
    memset(&self, 0, sizeof self);
    self.random = *(const uint64_t *)argument;
    self.plan.kind = draw_kind(&self.random);
    self.helpers = random_below(&self.random, PROGRAM_HELPERS + 1);
    if (begin_machine(&self) && open_runtime(&self) == PST_OK) run_program(&self);
    pst_runtime_destroy(self.runtime);
    plan_check(&self.plan);
    end_machine(&self);
}
