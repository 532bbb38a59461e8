#include "sched/growing.h"

#include "sched/advance.h"
#include "sched/launch.h"

/* ---- blocks ----------------------------------------------------------------------------- */

/* The adding thread's: moves what other threads have given back to its own list. */
static pst__grown *take_spare(pst_graph *graph) {
    if (graph->spare == NULL) {
        ck_stack_entry_t *entry = ck_stack_batch_pop_upmc(&graph->released);
        while (entry != NULL) {
            pst__grown *block =
                (pst__grown *)(void *)((char *)entry - offsetof(pst__grown, released));
            entry = entry->next;
            block->next = graph->spare;
            graph->spare = block;
        }
    }
    pst__grown *block = graph->spare;
    if (block != NULL) graph->spare = block->next;
    return block;
}

/* A block keeps its event from one task to the next when both are on the same device. */
static pst__grown *take_block(pst_graph *graph) {
    pst__grown *block = take_spare(graph);
    if (block == NULL) return pst__slab_take(&graph->tasks);
    pst_event *event = block->detail.event;
    pst_device *device = block->detail.event_device;
    block->node = (pst__node){.word = 0};
    block->detail = (pst__detail){.event = event, .event_device = device};
    block->early = block->late = NULL;
    block->links = NULL;
    block->link_count = 0;
    return block;
}

/* ---- edges ------------------------------------------------------------------------------ */

/* Which device a gate's event is on is only known once the gate has been passed, that is, when its
 * early list is closed: until then targets on asynchronous lanes all stand there. */
static int push_behind_gate(pst__grown *gate, const pst_lane *lane, pst__link *link) {
    if (lane->asynchronous) {
        if (pst__grown_push(&gate->early, link)) return 1;
        if (pst__is_early(&gate->node, lane)) return 0;
    }
    return pst__grown_push(&gate->late, link);
}

/* 0 when what the target waits for has come already. */
static int push_behind(pst__grown *source, const pst_lane *lane, pst__link *link) {
    if (source->node.lane == NULL) return push_behind_gate(source, lane, link);
    const int is_early = source->node.lane->asynchronous && pst__is_early(&source->node, lane);
    return pst__grown_push(is_early ? &source->early : &source->late, link);
}

/* Adds the edge; 1 when the source has gone by already, with its error in *status. */
static uint32_t connect(pst__link *link, pst__grown *source, pst__grown *target,
                        pst_status *status) {
    pst_lane *lane = target->node.lane;
    link->target = target;
    link->flow = 0; /* of the block's task before */
    if (lane->asynchronous && source->node.lane != lane) {
        link->source = source;
        (void)pst__add_relaxed(&source->references, 1); /* the caller's handle holds it meanwhile */
    }
    if (push_behind(source, lane, link)) return 0;
    const pst_status seen = pst__word_status(pst__load_acquire(&source->node.word));
    if (seen < 0 && *status == PST_OK) *status = seen;
    return 1;
}

/* ---- adding ----------------------------------------------------------------------------- */

static pst_status refuse(const pst_graph *graph, const char *name, pst_status status) {
    return pst__runtime_fail(graph->runtime, status, "graph %s: task %s cannot be added: %s",
                             graph->name, name == NULL ? "" : name, pst_status_text(status));
}

static pst_status reserve_links(const pst_graph *graph, pst__grown *task, size_t count) {
    task->links = task->own_links;
    if (count > PST__LINKS_INLINE) {
        task->links = pst__heap_alloc(&graph->runtime->heap, count * sizeof *task->links);
        if (task->links == NULL) return PST_ENOMEM;
    }
    task->link_count = (uint32_t)count;
    return PST_OK;
}

/* Asynchronous devices: whoever holds a handle may ask for the event, and so may a callback's poll.
 */
static pst_status reserve_event(pst__grown *task, const pst_lane *lane, int wanted) {
    if (!lane->asynchronous || !wanted) return PST_OK;
    task->node.flags |= PST__NODE_EVENT;
    return pst__detail_make_event(&task->detail, lane->device);
}

static void put_back(pst_graph *graph, pst__grown *task) {
    if (task->links != task->own_links) pst__grown_free_links(graph, task);
    task->next = graph->spare;
    graph->spare = task;
}

/* The graph's lock is held and nothing is unfinished. Relaxed: what is added from here on is
 * published to its lane by a push. */
static void forget_cancel(pst_graph *graph, pst__run *run) {
    pst__store_relaxed(&graph->stop, PST_OK);
    if (pst__load_relaxed(&run->status) == PST_ECANCELED) pst__store_relaxed(&run->status, PST_OK);
}

/* A cancel holds, also for what is added, until all of it has ended; then work goes on. */
static pst_status begin_adding(pst_graph *graph) {
    pst_status poison = pst_runtime_status(graph->runtime);
    if (poison != PST_OK) return poison; /* the text says already why */
    pst__run *run = &graph->runs[0];
    if (pst__load_relaxed(&graph->stop) == PST_OK || !pst__run_is_done(graph, run)) return PST_OK;
    /* A poison sets its status before it takes this lock to stop the graph, so that one which came
     * since the look above is seen here and its stop stays. */
    ck_spinlock_lock(&graph->lock);
    poison = pst_runtime_status(graph->runtime);
    if (poison == PST_OK) forget_cancel(graph, run);
    ck_spinlock_unlock(&graph->lock);
    return poison;
}

/* Before the task is anybody's. Relaxed: who has seen it end has seen it added. */
static void count_added(pst_graph *graph) {
    pst__store_relaxed(&graph->added, graph->added + 1);
}

static void fill(pst_graph *graph, pst__grown *task, const pst_task_options *options,
                 uint32_t references) {
    pst__node *node = &task->node;
    node->start = options->work.start;
    node->argument = options->work.argument;
    node->graph = graph;
    node->lane = options->lane;
    node->detail = &task->detail;
    node->flags = PST__NODE_GROWING | (node->flags & PST__NODE_EVENT);
    pst__detail_fill(&task->detail, options);
    /* Nothing is early behind a host task: see pst__is_early. So it stays when the lane has gone,
     * and its place is another device's. */
    if (!options->lane->asynchronous) task->early = &pst__grown_closed;
    /* One more than it has predecessors, so that it waits for the end of this call. */
    node->pending = (uint32_t)options->after_count + 1;
    task->references = references;
}

/* A launch comes to all its queues at once. Whoever adds a task behind one of the launch's, to be
 * before another, has found the launch's push, and so the lock that was taken before. */
static void await_launch(const pst_runtime *runtime) {
    while (ck_spinlock_locked((ck_spinlock_t *)(uintptr_t)&runtime->launching))
        ck_pr_stall();
}

/* Ahead of its predecessors. To a graph that is stopped: the lane is to look for it, if it has
 * looked before; the fence orders the push with the look at `stop`, and pairs with the addition in
 * pst__runtime_note_stop. */
static void push_in_order(const pst_graph *graph, pst__grown *task) {
    pst_lane *lane = task->node.lane->leader;
    await_launch(graph->runtime);
    pst__arrivals_push(&lane->arrivals, &task->node);
    pst__fence_store_load();
    if (pst__load_relaxed(&graph->stop) == PST_OK) return;
    pst__runtime_note_stop(graph->runtime);
    pst__lane_notify(lane);
}

/* From the first push on the task is everybody's, and after the arrival it may be gone. */
static void submit(pst_graph *graph, pst__grown *task, const pst_task_options *options) {
    pst__advance advance = {.lane = NULL};
    pst_status status = PST_OK;
    uint32_t arrived = 1;
    count_added(graph);
    pst__store_relaxed(&task->share->tasks, task->share->tasks + 1); /* see pst_lane_destroy */
    if (pst__order_is_by_adding(options->lane->order)) push_in_order(graph, task);
    for (size_t i = 0; i < options->after_count; i++)
        arrived +=
            connect(&task->links[i], (pst__grown *)(uintptr_t)options->after[i].id, task, &status);
    pst__advance_arrive(&advance, &task->node, arrived, status);
}

pst_status pst__grown_add(pst_graph *graph, const pst_task_options *options, pst_task *handle) {
    pst_status status = begin_adding(graph);
    if (status != PST_OK) return status;
    pst__share *share = pst__graph_share(graph, options->lane);
    pst__grown *task = share == NULL ? NULL : take_block(graph);
    if (task == NULL) return refuse(graph, options->name, PST_ENOMEM);
    task->share = share;
    const uint32_t references = handle == NULL ? 1 : 2;
    status = reserve_links(graph, task, options->after_count);
    if (status == PST_OK)
        status = reserve_event(task, options->lane, handle != NULL || options->done != NULL);
    if (status != PST_OK) {
        put_back(graph, task);
        return refuse(graph, options->name, status);
    }
    fill(graph, task, options, references);
    if (handle != NULL) *handle = (pst_task){graph, (uint64_t)(uintptr_t)task};
    submit(graph, task, options);
    return PST_OK;
}

/* ---- gates ------------------------------------------------------------------------------ */

pst_status pst__grown_add_gate(pst_graph *graph, const char *name, pst_task *handle) {
    pst_status status = begin_adding(graph);
    if (status != PST_OK) return status;
    pst__grown *gate = take_block(graph);
    if (gate == NULL) return refuse(graph, name, PST_ENOMEM);
    gate->node.graph = graph;
    gate->node.detail = &gate->detail;
    gate->node.flags = PST__NODE_GROWING | PST__NODE_GATE;
    gate->node.pending = gate->node.predecessors = 1;
    gate->detail.name = name;
    gate->references = 2;
    count_added(graph);
    ck_spinlock_lock(&graph->lock);
    gate->previous = NULL;
    gate->next = graph->closed_gates;
    if (gate->next != NULL) gate->next->previous = gate;
    graph->closed_gates = gate;
    ck_spinlock_unlock(&graph->lock);
    *handle = (pst_task){graph, (uint64_t)(uintptr_t)gate};
    /* A poison sets its status before it takes this lock to end the gates: one that came since the
     * look above has met this gate, or is seen here. */
    status = pst_runtime_status(graph->runtime);
    if (status != PST_OK) pst__graph_cancel(graph, status);
    return PST_OK;
}
