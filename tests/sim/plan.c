#include "plan.h"

#include "system.h"
#include "tests/device/sim.h"
#include "tests/random.h"
#include "threads.h"

#define NEVER_NS 10000000000000u /* beyond the end of all runs */

/* ---- what tasks do ---------------------------------------------------------------------- */

static uint32_t index_of(const plan_task *task) {
    return (uint32_t)(task - task->plan->tasks);
}

static void check_predecessors(const plan_task *task, uint32_t launch) {
    for (uint32_t i = 0; i < task->before_count; i++) {
        const plan_task *before = &task->plan->tasks[task->before[i]];
        const int has_come =
            before->is_gate ? (int)before->opened[launch] : (int)before->finished[launch];
        if (!has_come)
            sim_fail("task %u ran in launch %u before its predecessor %u", index_of(task), launch,
                     index_of(before));
    }
}

static int is_on_device(const plan_task *task) {
    return task->plan->lanes[task->lane].options.device != NULL;
}

static outside_place place_of(const plan_task *task) {
    return is_on_device(task) ? OUTSIDE_DEVICE : OUTSIDE_HOST;
}

static void check_outside(const plan_task *task) {
    if (!outside_has_happened(&task->plan->outside, place_of(task), task->events_first,
                              task->events_wanted))
        sim_fail("task %u ran before what it waits for outside of its graph", index_of(task));
}

static void check_order(const plan_task *task, uint32_t launch) {
    plan_lane *lane = task->plan->lanes[task->lane].leader;
    const uint32_t place = index_of(task) + 1;
    if (lane->options.order == PST_LANE_BY_SUBMISSION && lane->last_started[launch] > place)
        sim_fail("task %u was launched after a task that was submitted later", index_of(task));
    lane->last_started[launch] = place;
}

static void linger(uint32_t points) {
    while (points-- > 0)
        sim_point();
}

static pst_status finish(plan_task *task, uint32_t launch) {
    check_predecessors(task, launch);
    task->plan->lanes[task->lane].is_busy = 0;
    if (task->fails) return PST_EIO;
    task->finished[launch] = 1;
    return PST_OK;
}

/* Once a failure has been told nobody knows what streams do. */
static int is_known(const plan *self) {
    return self->kind < PLAN_FAULTY;
}

static void run_on_stream(void *argument) {
    const plan_turn *turn = argument;
    if (is_known(turn->task->plan)) {
        check_predecessors(turn->task, turn->launch);
        check_outside(turn->task);
    }
    turn->task->finished[turn->launch] = 1;
}

static pst_status enqueue(plan_task *task, uint32_t launch, pst_stream *stream) {
    const uint64_t duration = task->is_stuck ? NEVER_NS : 100u * task->duration;
    if (task->fails) return PST_EIO;
    task->turns[launch] = (plan_turn){task, launch};
    return pst__sim_call(task->plan->device, stream, duration, run_on_stream, &task->turns[launch]);
}

static pst_status start(void *argument, pst_stream *stream) {
    plan_task *task = argument;
    plan_lane *lane = &task->plan->lanes[task->lane];
    const uint32_t launch = task->ends;
    if (launch >= task->added || task->started[launch]++ > 0)
        sim_fail("task %u was launched twice", index_of(task));
    if (lane->is_busy) sim_fail("task %u was launched while its lane was busy", index_of(task));
    check_order(task, launch);
    if (task->is_stuck) task->plan->stuck_since = sim_clock();
    if (is_on_device(task)) return enqueue(task, launch, stream);
    lane->is_busy = 1;
    check_predecessors(task, launch);
    check_outside(task);
    linger(task->duration);
    task->asks = task->asks_first;
    if (task->is_stuck) return PST_PENDING;
    return task->asks > 0 ? PST_PENDING : finish(task, launch);
}

static pst_status test(void *argument) {
    plan_task *task = argument;
    linger(1);
    if (task->is_stuck) return PST_PENDING;
    return task->asks-- > 0 ? PST_PENDING : finish(task, task->ends);
}

static void done(void *argument, pst_status status) {
    plan_task *task = argument;
    if (task->ends >= task->added)
        sim_fail("task %u has ended more often than it was launched", index_of(task));
    if (status == PST_OK && !task->finished[task->ends])
        sim_fail("task %u ended before its work was done", index_of(task));
    task->plan->lanes[task->lane].is_busy &= task->started[task->ends] == 0;
    task->status[task->ends] = status;
    linger(1);
    task->ends++;
    system_poke();
}

/* ---- the borrowed stream ---------------------------------------------------------------- */

static void open_on_stream(void *argument) {
    const plan_turn *turn = argument;
    turn->task->opened[turn->launch] = 1;
}

static void arrive_on_stream(void *argument) {
    const plan_turn *turn = argument;
    if (!turn->task->finished[turn->launch])
        sim_fail("a stream that waited for task %u went on before it", index_of(turn->task));
}

void plan_open(plan_task *gate, uint32_t launch, int on_stream) {
    gate->turns[launch] = (plan_turn){gate, launch};
    if (!on_stream || pst__sim_call(gate->plan->device, pst_lane_stream(gate->plan->borrowed), 1000,
                                    open_on_stream, &gate->turns[launch]) != PST_OK)
        gate->opened[launch] = 1;
}

void plan_expect_before(plan_task *task, uint32_t launch) {
    task->turns[launch] = (plan_turn){task, launch};
    (void)pst__sim_call(task->plan->device, pst_lane_stream(task->plan->borrowed), 0,
                        arrive_on_stream, &task->turns[launch]);
}

/* ---- drawing ---------------------------------------------------------------------------- */

static void draw_edges(plan *self, uint32_t index) {
    plan_task *task = &self->tasks[index];
    task->before_count = random_below(&self->random, PLAN_PREDECESSORS + 1);
    for (uint32_t i = 0; i < task->before_count; i++) {
        task->before[i] = random_below(&self->random, index);
        self->tasks[task->before[i]].last_use = index;
    }
}

static void draw_task(plan *self, uint32_t index) {
    plan_task *task = &self->tasks[index];
    *task = (plan_task){.plan = self};
    task->lane = random_below(&self->random, self->lane_count);
    task->asks_first = random_once_in(&self->random, 4) ? 1 + random_below(&self->random, 3) : 0;
    task->duration = random_below(&self->random, 4);
    if (self->lanes[task->lane].options.order == PST_LANE_BY_PRIORITY)
        task->priority = PST_PRIORITY_MOST_URGENT + (int)random_below(&self->random, 8);
    task->is_gate = random_once_in(&self->random, 8);
    task->fails = !task->is_gate && self->kind == PLAN_FAILS && random_once_in(&self->random, 8);
    if (index > 0 && !task->is_gate) draw_edges(self, index);
    if (!random_once_in(&self->random, 3)) return;
    task->events_first = random_below(&self->random, OUTSIDE_EVENTS);
    task->events_wanted = random_below(&self->random, OUTSIDE_EVENTS + 1);
}

static void draw_stuck(plan *self) {
    plan_task *task = &self->tasks[random_below(&self->random, self->count)];
    task->is_gate = 0;
    task->is_stuck = 1;
}

static int keeps_an_order(const plan *self) {
    for (uint32_t i = 0; i < self->lane_count; i++)
        if (self->lanes[i].options.order == PST_LANE_BY_SUBMISSION) return 1;
    return 0;
}

/* The order of the indices is one in which tasks may run. */
static void expect(plan *self) {
    for (uint32_t i = 0; i < self->count; i++)
        for (uint32_t p = 0; p < self->tasks[i].before_count; p++) {
            const plan_task *before = &self->tasks[self->tasks[i].before[p]];
            self->tasks[i].is_canceled |= before->is_canceled || before->fails;
        }
}

void plan_draw(plan *self, uint64_t seed, plan_kind kind) {
    self->random = seed;
    self->kind = kind;
    self->is_growing = (int)random_below(&self->random, 2);
    self->count = 1 + random_below(&self->random, PLAN_TASKS);
    self->launches = self->is_growing ? 1 : 1 + random_below(&self->random, PLAN_LAUNCHES);
    self->has_backward_edges =
        !self->is_growing && random_once_in(&self->random, 3) && !keeps_an_order(self);
    for (uint32_t i = 0; i < self->count; i++)
        draw_task(self, i);
    if (kind == PLAN_STUCK) draw_stuck(self);
    expect(self);
}

pst_task_options plan_options(plan *self, uint32_t index, pst_task *after, pst_event **events) {
    plan_task *task = &self->tasks[index];
    pst_task_options options = {.size = sizeof options,
                                .name = "task",
                                .lane = self->lanes[task->lane].lane,
                                .work = {start, test, task},
                                .done = done,
                                .done_argument = task,
                                .after = after,
                                .after_events = events,
                                .ticket = index + 1,
                                .priority = task->priority,
                                .bytes = index};
    options.after_event_count = outside_events(&self->outside, place_of(task), task->events_first,
                                               task->events_wanted, events);
    for (uint32_t p = 0; !self->has_backward_edges && p < task->before_count; p++)
        after[options.after_count++] = self->tasks[task->before[p]].handle;
    return options;
}

void plan_added(plan_task *task) {
    task->added++;
}

int plan_has_ended(const plan *self) {
    for (uint32_t i = 0; i < self->count; i++)
        if (!self->tasks[i].is_gate && self->tasks[i].ends != self->tasks[i].added) return 0;
    return 1;
}

/* ---- checking --------------------------------------------------------------------------- */

static void check_launch(const plan_task *task, uint32_t launch) {
    const pst_status got = task->status[launch];
    const int whole = got == PST_OK, is_lost = is_on_device(task) && task->plan->kind > PLAN_FAILS;
    if (whole != (int)task->finished[launch] && !is_lost)
        sim_fail("task %u ended with status %d in launch %u, and its work %s", index_of(task),
                 (int)got, launch, task->finished[launch] ? "was done" : "was not done");
    if (task->plan->kind > PLAN_FAILS) return;
    const pst_status expected = task->is_canceled ? PST_ESKIPPED : task->fails ? PST_EIO : PST_OK;
    if (got != expected || (int)task->started[launch] == task->is_canceled)
        sim_fail("task %u ended with status %d in launch %u, not with %d", index_of(task), (int)got,
                 launch, (int)expected);
}

void plan_check(const plan *self) {
    for (uint32_t i = 0; i < self->count; i++) {
        const plan_task *task = &self->tasks[i];
        if (task->is_gate) continue;
        if (task->ends != task->added)
            sim_fail("task %u was given %u times and has ended %u times", i, task->added,
                     task->ends);
        for (uint32_t launch = 0; launch < task->ends; launch++)
            check_launch(task, launch);
    }
}
