#include "world.h"

#include <stdio.h>

static void answers(const fuzz_world *world, pst_status status, unsigned allowed) {
    if (status == PST_ENOMEM && world->may_fail) return;
    if (status == PST_EDEVICE && world->device.has_failed) return;
    fuzz_check(status <= 1 && status > -20 && ((1u << -(status - 1)) & allowed) != 0,
               "a status that the call does not answer with");
}
#define MAY(status) (1u << -(PST_##status - 1))

static fuzz_graph *graph_of(fuzz_world *world) {
    return &world->graphs[fuzz_below(world, GRAPHS)];
}

static fuzz_task *task_of(fuzz_world *world, fuzz_graph *graph) {
    return graph->count == 0 ? NULL : &graph->tasks[fuzz_below(world, (unsigned)graph->count)];
}

/* ---- what tasks do ---------------------------------------------------------------------- */

static fuzz_world *world_now; /* one sequence at a time; the device's work knows its task alone */

/* After a failure of the device nobody knows what its streams do. */
static void check_order(const fuzz_task *task) {
    for (size_t i = 0; i < task->after_count && !world_now->device.has_failed; i++) {
        const fuzz_task *before = &task->owner->tasks[task->after[i]];
        fuzz_check(before->is_gate || before->finished > task->finished,
                   "a task overtakes another");
    }
}

static void happen(void *argument) {
    fuzz_task *task = argument;
    check_order(task);
    task->finished++;
}

static pst_status finish(fuzz_task *task) {
    if (task->result == PST_OK) task->finished++;
    return task->result;
}

static pst_status start(void *argument, pst_stream *stream) {
    fuzz_task *task = argument;
    task->started++;
    fuzz_check(task->started <= task->ended + 1, "a task starts twice");
    if (task->on_device && task->result != PST_OK) return task->result;
    if (task->on_device) return fuzz_device_call(stream, happen, task);
    check_order(task);
    task->asked = task->asks;
    return task->asks > 0 ? PST_PENDING : finish(task);
}

static pst_status test(void *argument) {
    fuzz_task *task = argument;
    return task->asked-- > 1 ? PST_PENDING : finish(task);
}

static void launch(fuzz_graph *graph) {
    pst_launch made;
    if (pst_graph_launch(graph->graph, &made) != PST_OK) return;
    graph->launch = made;
    graph->launches++;
}

static void done(void *argument, pst_status status) {
    fuzz_task *task = argument;
    fuzz_graph *graph = task->owner;
    task->ended++;
    fuzz_check(task->ended <= (graph->is_growing ? 1 : graph->launches), "a second callback");
    fuzz_check(status <= PST_OK, "a callback before the end");
    if (task->started < task->ended) {
        fuzz_check(status < 0, "a task that never ran succeeds");
        task->started = task->ended;
    }
    if (!world_now->device.has_failed) {
        fuzz_check(status < 0 || task->finished == task->ended, "a task ends before its work");
        task->finished = task->ended;
    }
    if (graph->relaunches > 0 && !graph->is_growing) {
        graph->relaunches--;
        launch(graph);
    }
}

/* ---- calls ------------------------------------------------------------------------------ */

static void create_graph(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    if (graph->graph != NULL) return;
    *graph = (fuzz_graph){.is_growing = fuzz_below(world, 2) != 0};
    const pst_graph_kind kind = graph->is_growing ? PST_GRAPH_GROWING : PST_GRAPH_SEALED;
    answers(world, pst_graph_create(world->runtime, kind, "fuzzed", &graph->graph), MAY(OK));
    graph->launch = (pst_launch){graph->graph, 0};
    graph->relaunches = (int)fuzz_below(world, 3);
}

/* Some predecessors are of other graphs, or none at all: that is refused. */
static int choose_after(fuzz_world *world, fuzz_graph *graph, fuzz_task *task, pst_task *after) {
    int foreign = 0;
    const unsigned wanted = fuzz_below(world, AFTER + 1);
    for (unsigned i = 0; i < wanted; i++) {
        fuzz_graph *from = fuzz_below(world, 16) == 15 ? graph_of(world) : graph;
        fuzz_task *before = task_of(world, from);
        if (before == NULL || before->released) continue;
        foreign |= from != graph;
        after[task->after_count] = before->handle;
        task->after[task->after_count++] = (size_t)(before - from->tasks);
    }
    return foreign;
}

static int is_on_device(const fuzz_world *world, const pst_lane *lane) {
    for (size_t i = world->host_lanes; i < world->lane_count; i++)
        if (world->lanes[i] == lane) return 1;
    return 0;
}

/* Seldom one that the lane refuses. */
static int draw_priority(fuzz_world *world, const pst_lane *lane) {
    for (size_t i = 0; i < world->lane_count; i++)
        if (world->lanes[i] == lane && world->orders[i] == PST_LANE_BY_PRIORITY)
            return PST_PRIORITY_MOST_URGENT + (int)fuzz_below(world, 8);
    return fuzz_below(world, 16) == 15;
}

static void add(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    if (graph->graph == NULL || graph->count == TASKS) return;
    fuzz_task *task = &graph->tasks[graph->count];
    pst_task after[AFTER];
    *task = (fuzz_task){.owner = graph, .asks = fuzz_below(world, 3)};
    if (fuzz_below(world, 8) == 7) task->result = PST_EIO;
    const int foreign = choose_after(world, graph, task, after);
    pst_event *events[EVENTS];
    pst_lane *lane = fuzz_lane(world);
    task->on_device = is_on_device(world, lane);
    const pst_task_options options = {.size = sizeof options,
                                      .name = "task",
                                      .lane = lane,
                                      .work = {start, test, task},
                                      .after = after,
                                      .after_count = task->after_count,
                                      .after_events = events,
                                      .after_event_count =
                                          task->on_device ? fuzz_events(world, events) : 0,
                                      .done = done,
                                      .done_argument = task,
                                      .priority = draw_priority(world, lane)};
    const pst_status status = pst_graph_add(graph->graph, &options, &task->handle);
    answers(world, status, MAY(OK) | MAY(EINVAL) | MAY(ESTATE) | MAY(EDEVICE) | MAY(ECANCELED));
    fuzz_check(status != PST_OK || !foreign, "an edge between graphs");
    graph->count += status == PST_OK;
}

static void add_gate(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    if (graph->graph == NULL || graph->count == TASKS) return;
    fuzz_task *task = &graph->tasks[graph->count];
    *task = (fuzz_task){.owner = graph, .is_gate = 1};
    const pst_status status = pst_graph_add_gate(graph->graph, "gate", &task->handle);
    answers(world, status, MAY(OK) | MAY(ESTATE) | MAY(EDEVICE));
    graph->count += status == PST_OK;
}

/* Edges may lead back: sealing tells. Only those that were added before the other are checked when
 * tasks start. */
static void add_edge(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    fuzz_task *from = task_of(world, graph), *to = task_of(world, graph);
    if (from == NULL || (graph->is_growing && (from->released || to->released))) return;
    const pst_status status = pst_graph_add_edge(graph->graph, from->handle, to->handle);
    answers(world, status, MAY(OK) | MAY(EINVAL) | MAY(ESTATE));
    if (status == PST_OK && to->after_count < AFTER)
        to->after[to->after_count++] = (size_t)(from - graph->tasks);
}

static void add_outer(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    fuzz_task *task = task_of(world, graph);
    if (task == NULL || graph->is_growing) return;
    const pst_status status = fuzz_below(world, 2)
                                  ? pst_graph_outer_open(graph->graph, task->handle)
                                  : pst_graph_outer_wait(graph->graph, task->handle);
    answers(world, status, MAY(OK) | MAY(EINVAL) | MAY(ESTATE));
}

static void seal(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    if (graph->graph == NULL) return;
    const pst_status status = pst_graph_seal(graph->graph);
    answers(world, status, MAY(OK) | MAY(ECYCLE) | MAY(ESTATE) | MAY(EINVAL));
    if (status == PST_OK) graph->sealed = 1;
    fuzz_check(pst_graph_size(graph->graph) == graph->count || graph->is_growing, "a wrong size");
}

static void launch_any(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    if (graph->graph != NULL) launch(graph);
}

static void open_gate(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    const fuzz_task *gate = task_of(world, graph);
    if (gate == NULL || gate->released) return;
    pst_lane *borrowed = fuzz_below(world, 2) ? world->borrowed : NULL;
    const pst_status status = pst_gate_open(graph->launch, gate->handle, borrowed);
    answers(world, status, MAY(OK) | MAY(EINVAL) | MAY(ESTATE) | MAY(ECANCELED) | MAY(EDEVICE));
}

static void cancel(fuzz_world *world) {
    const fuzz_graph *graph = graph_of(world);
    if (graph->graph == NULL) return;
    answers(world, pst_launch_cancel(graph->launch), MAY(OK) | MAY(ESTATE));
}

static void pump(fuzz_world *world) {
    for (unsigned turns = 1 + fuzz_below(world, 4); turns > 0; turns--)
        answers(world, pst_run_once(world->runtime, NULL), MAY(OK) | MAY(PENDING));
}

static void ask(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    const fuzz_task *task = task_of(world, graph);
    if (task == NULL || task->released) return;
    (void)pst_task_test(graph->launch, task->handle);
    (void)pst_task_event(graph->launch, task->handle);
    (void)pst_task_test((pst_launch){graph->graph, fuzz_below(world, 8)}, task->handle);
}

static void ask_for_nothing(fuzz_world *world) {
    const fuzz_graph *graph = graph_of(world);
    if (graph->graph == NULL || graph->is_growing) return;
    const pst_task nothing = {graph->graph, fuzz_below(world, 256)};
    (void)pst_task_test(graph->launch, nothing);
    (void)pst_gate_open(graph->launch, nothing, NULL);
}

static void release(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    fuzz_task *task = task_of(world, graph);
    if (task == NULL || task->released) return;
    if (graph->is_growing) task->released = 1;
    pst_task_release(task->handle);
}

static pst_status destroy(fuzz_world *world, fuzz_graph *graph) {
    const pst_status status = pst_graph_destroy(graph->graph);
    answers(world, status, MAY(OK) | MAY(EBUSY));
    if (status != PST_OK) return status;
    const fuzz_graph gone = *graph;
    for (size_t i = 0; i < gone.count; i++)
        fuzz_check(gone.tasks[i].is_gate ||
                       gone.tasks[i].ended == (gone.is_growing ? 1 : gone.launches),
                   "a graph was destroyed before its callbacks were made");
    *graph = (fuzz_graph){0};
    return PST_OK;
}

static void destroy_graph(fuzz_world *world) {
    fuzz_graph *graph = graph_of(world);
    if (graph->graph != NULL) (void)destroy(world, graph);
}

/* Only what has ended is waited for: no other thread is there to end the rest. */
static void wait_for(fuzz_world *world) {
    int idle = 0;
    fuzz_graph *graph = graph_of(world);
    const fuzz_task *task = task_of(world, graph);
    (void)pst_run_once(world->runtime, &idle);
    if (!idle || graph->graph == NULL) return;
    const unsigned ends =
        MAY(OK) | MAY(EIO) | MAY(ECANCELED) | MAY(EDEVICE) | MAY(ESTATE) | MAY(EINVAL);
    answers(world, pst_launch_wait(graph->launch), ends);
    pst_lane *borrowed = fuzz_below(world, 2) ? world->borrowed : NULL;
    if (task != NULL && !task->released)
        answers(world, pst_task_wait(graph->launch, task->handle, borrowed), ends);
    if (borrowed == NULL)
        fuzz_check(destroy(world, graph) == PST_OK, "a graph whose tasks have ended is busy");
}

static void trace(fuzz_world *world) {
    switch (fuzz_below(world, 6)) {
    case 0:
        (void)pst_trace_start(world->runtime);
        break;
    case 1:
        (void)pst_trace_stop(world->runtime);
        break;
    case 2:
        pst_trace_begin(world->runtime, "fuzzed");
        break;
    case 3:
        pst_trace_end(world->runtime);
        break;
    case 4:
        pst_trace_slice(world->runtime, "fuzzed", 500, fuzz_below(world, 1000));
        break;
    default:
        pst_trace_counter(world->runtime, "fuzzed", 1);
        break;
    }
}

static pst_lane *open_lane(fuzz_world *world, pst_lane_mode mode, int on_device,
                           pst_lane_order order, pst_lane *order_with) {
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "fuzzed",
                                      .device = on_device ? &world->device.device : NULL,
                                      .mode = mode,
                                      .order = order,
                                      .order_with = order_with};
    pst_lane *lane = NULL;
    answers(world, pst_lane_create(world->runtime, &options, &lane),
            MAY(OK) | (on_device ? MAY(EDEVICE) : 0)); /* which has so many streams */
    return lane;
}

/* Any but the borrowed one; another lane of its kind comes in its place. */
static void replace_lane(fuzz_world *world) {
    if (world->lane_count == 0) return;
    const size_t index = fuzz_below(world, (unsigned)world->lane_count);
    const pst_status status = pst_lane_destroy(world->lanes[index]);
    answers(world, status, MAY(OK) | MAY(EBUSY));
    if (status != PST_OK) return;
    pst_lane *lane =
        open_lane(world, PST_LANE_PUMPED, index >= world->host_lanes, world->orders[index], NULL);
    if (lane != NULL) {
        world->lanes[index] = lane;
        return;
    }
    world->lane_count--;
    if (index < world->host_lanes) world->host_lanes--;
    for (size_t i = index; i < world->lane_count; i++) {
        world->lanes[i] = world->lanes[i + 1];
        world->orders[i] = world->orders[i + 1];
    }
}

static void disturb(fuzz_world *world) {
    const unsigned how = fuzz_below(world, 8);
    if (how == 7) pst_runtime_poison(world->runtime, PST_EDEVICE, "fuzzed");
    if (how < 3) replace_lane(world);
}

fuzz_call *const fuzz_graph_calls[] = {
    add,        add,       add_gate, create_graph, add_edge,        add_outer, seal,
    launch_any, pump,      pump,     ask,          ask_for_nothing, release,   destroy_graph,
    launch_any, open_gate, cancel,   disturb,      wait_for,        trace,
};
const unsigned fuzz_graph_call_count = sizeof fuzz_graph_calls / sizeof *fuzz_graph_calls;

/* ---- begin and end ---------------------------------------------------------------------- */

/* The first half of the lanes is on the host, the others on the device, the last one is borrowed.
 */
void fuzz_begin_graphs(fuzz_world *world) {
    pst_lane *first_in_order = NULL;
    world_now = world;
    for (unsigned i = 0; i + 1 < LANES; i++) {
        const pst_lane_order order = (pst_lane_order)fuzz_below(world, 3);
        pst_lane *with = NULL;
        if (order == PST_LANE_BY_SUBMISSION && fuzz_below(world, 2)) with = first_in_order;
        /* One that joins has no mode of its own: 0. */
        const pst_lane_mode mode = with == NULL ? PST_LANE_PUMPED : (pst_lane_mode)0;
        pst_lane *lane = open_lane(world, mode, i >= LANES / 2, order, with);
        if (lane == NULL) continue;
        if (order == PST_LANE_BY_SUBMISSION && with == NULL) first_in_order = lane;
        world->orders[world->lane_count] = order;
        world->lanes[world->lane_count++] = lane;
        if (i < LANES / 2) world->host_lanes++;
    }
    world->borrowed = open_lane(world, PST_LANE_BORROWED, 1, PST_LANE_BY_READINESS, NULL);
}

static void end_launch(fuzz_graph *graph) {
    if (graph->graph == NULL) return;
    graph->relaunches = 0;
    for (size_t i = 0; i < graph->count; i++)
        if (graph->tasks[i].is_gate && !graph->tasks[i].released)
            (void)pst_gate_open(graph->launch, graph->tasks[i].handle, NULL);
    (void)pst_launch_cancel(graph->launch); /* gates whose handle is gone */
}

void fuzz_drain_graphs(fuzz_world *world) {
    int idle = 0;
    world->fail_in = world->device.fail_in = 0;
    world->device.is_eager = 1;
    for (int i = 0; i < GRAPHS; i++)
        end_launch(&world->graphs[i]);
    for (int turns = 0; !idle && turns < 10000; turns++)
        answers(world, pst_run_once(world->runtime, &idle), MAY(OK) | MAY(PENDING));
    fuzz_check(idle, "a run does not drain");
    for (int i = 0; i < GRAPHS; i++)
        if (world->graphs[i].graph != NULL && fuzz_below(world, 2))
            fuzz_check(pst_graph_destroy(world->graphs[i].graph) == PST_OK, "a graph stays busy");
}

void fuzz_check_callbacks(const fuzz_world *world) {
    for (int g = 0; g < GRAPHS; g++) {
        const fuzz_graph *graph = &world->graphs[g];
        for (size_t i = 0; i < graph->count; i++)
            fuzz_check(graph->tasks[i].is_gate ||
                           graph->tasks[i].ended == (graph->is_growing ? 1 : graph->launches),
                       "a callback is missing");
    }
}
