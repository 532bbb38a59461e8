#include "sched/advance.h"

#include "sched/order.h"
#include "sched/trace.h"

/* What closes a list: from then on the task's launch or end is known. */
static pst__link closed;

static pst__grown *grown_of(pst__node *node) {
    return (pst__grown *)(void *)node;
}

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

static void free_links(const pst_graph *graph, pst__grown *task) {
    if (task->links != task->own_links)
        pst__heap_free(&graph->runtime->heap, task->links, task->link_count * sizeof *task->links);
    task->links = NULL;
    task->link_count = 0;
}

static void drop(pst__grown *task) {
    /* Release: what this thread did with the block comes before its next use; acquire: the last one
     * sees what the others did. */
    if (pst__sub_acq_rel(&task->references, 1) != 1) return;
    pst_graph *graph = task->node.graph;
    free_links(graph, task);
    ck_stack_push_upmc(&graph->released, &task->released);
}

void pst__grown_drop(pst__node *node) {
    drop(grown_of(node));
}

static void free_block(void *context, void *memory) {
    pst__grown *task = memory;
    free_links(context, task);
    pst__detail_drop_event(&task->detail);
}

void pst__grown_free_all(pst_graph *graph) {
    pst__slab_each(&graph->tasks, free_block, graph);
    pst__slab_free(&graph->tasks);
}

void pst_task_release(pst_task task) {
    if (task.graph == NULL || task.graph->kind != PST_GRAPH_GROWING || task.id == 0) return;
    drop((pst__grown *)(uintptr_t)task.id);
}

/* ---- edges ------------------------------------------------------------------------------ */

/* 0 when the list is closed already. Release: the source's thread sees the link's fields (its
 * swap acquires); acquire: a closed list shows what the source did before. */
static int push_link(pst__link **list, pst__link *link) {
    pst__link *head = pst__load_acquire(list);
    do {
        if (head == &closed) return 0;
        link->next = head;
    } while (!pst__cas_acq_rel(list, &head, link));
    return 1;
}

static pst__link *close_list(pst__link **list) {
    /* Pairs with both orders of push_link. */
    pst__link *link = pst__swap_acq_rel(list, &closed);
    pst__link *oldest = NULL;
    while (link != NULL && link != &closed) {
        pst__link *next = link->next;
        link->next = oldest;
        oldest = link;
        link = next;
    }
    return oldest;
}

static void release_list(pst__advance *advance, pst__grown *task, pst__link **list,
                         pst__phase phase, pst_status status) {
    pst__link *link = close_list(list);
    while (link != NULL) {
        pst__link *next = link->next; /* the link is the target's: gone once it has arrived */
        pst__node *target = &link->target->node;
        if (phase == PST__WHEN_LAUNCHED && !pst__is_early(&task->node, target->lane)) {
            (void)push_link(&task->late, link); /* a gate's event, of another device: wait for it */
            link = next;
            continue;
        }
        if (task->detail.launched_at != 0 && advance->lane != NULL && target->lane != advance->lane)
            link->flow = pst__hook_edge(advance->lane, &task->node, target);
        pst__advance_arrive(advance, target, 1, status);
        link = next;
    }
}

void pst__grown_release(pst__advance *advance, pst__node *node, pst__phase phase,
                        pst_status status) {
    pst__grown *task = grown_of(node);
    /* Relaxed: this thread alone closes it. */
    const int has_early = pst__load_relaxed(&task->early) != &closed;
    if (has_early && phase != PST__WHEN_DONE)
        release_list(advance, task, &task->early, phase, status);
    if (phase != PST__WHEN_LAUNCHED) release_list(advance, task, &task->late, phase, status);
}

/* Which device a gate's event is on is only known once the gate has been passed, that is, when its
 * early list is closed: until then targets on asynchronous lanes all stand there. */
static int push_behind_gate(pst__grown *gate, const pst_lane *lane, pst__link *link) {
    if (lane->asynchronous) {
        if (push_link(&gate->early, link)) return 1;
        if (pst__is_early(&gate->node, lane)) return 0;
    }
    return push_link(&gate->late, link);
}

/* 0 when what the target waits for has come already. */
static int push_behind(pst__grown *source, const pst_lane *lane, pst__link *link) {
    if (source->node.lane == NULL) return push_behind_gate(source, lane, link);
    const int is_early = source->node.lane->asynchronous && pst__is_early(&source->node, lane);
    return push_link(is_early ? &source->early : &source->late, link);
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

pst_status pst__grown_wait_events(const pst__node *node, const pst_lane *lane) {
    const pst__grown *task = (const pst__grown *)(const void *)node;
    for (uint32_t i = 0; i < task->link_count; i++) {
        const pst__grown *source = task->links[i].source;
        if (source == NULL || !source->detail.event_recorded ||
            source->detail.event_device != lane->device)
            continue;
        pst_status status =
            lane->device->ops->stream_wait(lane->device, lane->stream, source->detail.event);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

void pst__grown_forget_predecessors(pst__node *node) {
    pst__grown *task = grown_of(node);
    for (uint32_t i = 0; i < task->link_count; i++) {
        pst__grown *source = task->links[i].source;
        task->links[i].source = NULL;
        if (source != NULL) drop(source);
    }
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
    if (task->links != task->own_links) free_links(graph, task);
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

/* Acquires: pair with the releases in add_share (graph.c) and graph.h. */
static const pst__share *shares_of(const pst_graph *graph) {
    return pst__load_acquire(&graph->shares);
}

/* What is added is looked at last, and so includes whatever has ended by then. */
uint32_t pst__grown_unended(const pst_graph *graph) {
    uint32_t ended = 0;
    for (const pst__share *share = shares_of(graph); share != NULL; share = share->next)
        ended += pst__load_acquire(&share->ended);
    return pst__load_relaxed(&graph->added) - ended;
}

uint32_t pst__grown_unleft(const pst_graph *graph) {
    uint32_t left = 0;
    for (const pst__share *share = shares_of(graph); share != NULL; share = share->next)
        left += pst__load_acquire(&share->left);
    return pst__load_relaxed(&graph->added) - left;
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
    if (!options->lane->asynchronous) task->early = &closed;
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

void pst__grown_delist_gate(pst__node *node) {
    pst__grown *gate = grown_of(node);
    if (gate->previous != NULL)
        gate->previous->next = gate->next;
    else
        node->graph->closed_gates = gate->next;
    if (gate->next != NULL) gate->next->previous = gate->previous;
}
