#include "sched/graph.h"

#include "sched/calls.h"

#define DETAILS_PER_CHUNK 256u

/* ---- tasks ------------------------------------------------------------------------------ */

size_t pst_graph_size(const pst_graph *graph) {
    return graph == NULL ? 0 : graph->node_count;
}

pst_status pst__graph_check_borrowed(const pst_lane *borrowed, const pst__node *node) {
    pst_runtime *runtime = node->graph->runtime;
    if (borrowed == NULL || (borrowed->mode == PST_LANE_BORROWED && borrowed->runtime == runtime))
        return PST_OK;
    return pst__runtime_fail(
        runtime, PST_EINVAL, "%s %s: lane %s is not a borrowed lane of this runtime",
        node->flags & PST__NODE_GATE ? "gate" : "task", pst__node_name(node), borrowed->name);
}

static void detail_drop_event(pst__detail *detail) {
    if (detail->event != NULL)
        detail->event_device->ops->event_destroy(detail->event_device, detail->event);
    detail->event = NULL;
}

pst_status pst__detail_make_event(pst__detail *detail, pst_device *device) {
    if (detail->event_device != device) detail_drop_event(detail);
    if (detail->event != NULL) return PST_OK;
    const pst_status status = device->ops->event_create(device, 0, &detail->event);
    if (status == PST_OK) detail->event_device = device;
    return status;
}

/* ---- shares ----------------------------------------------------------------------------- */

static pst__share *add_share(pst_graph *graph, pst_lane *lane) {
    if (pst__heap_grow(&graph->runtime->heap, (void **)&graph->share_of, &graph->share_room,
                       lane->index + 1u, sizeof(pst__share *)) != PST_OK)
        return NULL;
    pst__share *share = graph->share_of[lane->index];
    if (share != NULL) return share;
    share = pst__heap_alloc(&graph->runtime->heap, sizeof *share);
    if (share == NULL) return NULL;
    share->lane = lane;
    share->item = (pst__node){.graph = graph, .lane = lane, .flags = PST__NODE_BATCH};
    share->next = graph->shares;
    /* Release: whoever adds up the shares finds it complete. */
    pst__store_release(&graph->shares, share);
    return graph->share_of[lane->index] = share;
}

pst__share *pst__graph_make_share(pst_graph *graph, pst_lane *lane) {
    return add_share(graph, lane->leader) == NULL ? NULL : add_share(graph, lane);
}

/* ---- tasks of growing graphs ------------------------------------------------------------ */

pst__link pst__grown_closed;

void pst__grown_free_links(const pst_graph *graph, pst__grown *task) {
    if (task->links != task->own_links)
        pst__heap_free(&graph->runtime->heap, task->links, task->link_count * sizeof *task->links);
    task->links = NULL;
    task->link_count = 0;
}

void pst__grown_drop(pst__grown *task) {
    /* Release: what this thread did with the block comes before its next use; acquire: the last one
     * sees what the others did. */
    if (pst__sub_acq_rel(&task->references, 1) != 1) return;
    pst_graph *graph = task->node.graph;
    pst__grown_free_links(graph, task);
    ck_stack_push_upmc(&graph->released, &task->released);
}

void pst_task_release(pst_task task) {
    if (task.graph == NULL || task.graph->kind != PST_GRAPH_GROWING || task.id == 0) return;
    pst__grown_drop((pst__grown *)(uintptr_t)task.id);
}

void pst__grown_forget_predecessors(pst__node *node) {
    pst__grown *task = pst__grown_of(node);
    for (uint32_t i = 0; i < task->link_count; i++) {
        pst__grown *source = task->links[i].source;
        task->links[i].source = NULL;
        if (source != NULL) pst__grown_drop(source);
    }
}

pst_status pst__grown_wait_events(const pst__node *node, const pst_lane *lane) {
    const pst__grown *task = pst__grown_of(node);
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

void pst__grown_delist_gate(pst__node *node) {
    pst__grown *gate = pst__grown_of(node);
    if (gate->previous != NULL)
        gate->previous->next = gate->next;
    else
        node->graph->closed_gates = gate->next;
    if (gate->next != NULL) gate->next->previous = gate->previous;
}

/* ---- its launches ----------------------------------------------------------------------- */

/* Acquires: pair with the releases in add_share and graph.h. */
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

uint32_t pst__graph_count_unfinished(pst_graph *graph) {
    uint32_t count = 0;
    if (graph->kind == PST_GRAPH_GROWING) return pst__run_unended(graph, &graph->runs[0]);
    for (size_t i = 0; i < graph->node_count; i++) {
        const pst__question asked = {graph, &graph->nodes[i], pst__graph_number(graph), 0};
        pst_status status;
        count += !pst__task_has_ended(pst__look(&asked, &status));
    }
    return count;
}

int pst__runtime_is_idle(pst_runtime *runtime) {
    int idle = 1;
    ck_spinlock_lock(&runtime->lock);
    for (pst_graph *graph = runtime->graphs; graph != NULL && idle; graph = graph->next)
        idle = pst__graph_is_done(graph);
    ck_spinlock_unlock(&runtime->lock);
    return idle;
}

/* ---- life ------------------------------------------------------------------------------- */

static void enlist(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    ck_spinlock_lock(&runtime->lock);
    graph->id = ++runtime->graph_ids;
    graph->next = runtime->graphs;
    if (graph->next != NULL) graph->next->previous = graph;
    runtime->graphs = graph;
    ck_spinlock_unlock(&runtime->lock);
}

static void delist(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    ck_spinlock_lock(&runtime->lock);
    if (graph->previous != NULL)
        graph->previous->next = graph->next;
    else
        runtime->graphs = graph->next;
    if (graph->next != NULL) graph->next->previous = graph->previous;
    ck_spinlock_unlock(&runtime->lock);
}

pst_status pst_graph_create(pst_runtime *runtime, pst_graph_kind kind, const char *name,
                            pst_graph **created) {
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    if (kind != PST_GRAPH_SEALED && kind != PST_GRAPH_GROWING)
        return pst__runtime_fail(runtime, PST_EINVAL, "graph %s: unknown kind %d",
                                 name == NULL ? "" : name, (int)kind);
    pst_graph *graph = pst__heap_alloc(&runtime->heap, sizeof *graph);
    char *copy = pst__heap_text(&runtime->heap, name);
    if (graph == NULL || copy == NULL) {
        pst__heap_free(&runtime->heap, graph, sizeof *graph);
        pst__heap_free_text(&runtime->heap, copy);
        return pst__runtime_fail(runtime, PST_ENOMEM, "graph %s: no memory",
                                 name == NULL ? "" : name);
    }
    graph->runtime = runtime;
    graph->name = copy;
    graph->kind = kind;
    ck_spinlock_init(&graph->lock);
    ck_stack_init(&graph->released);
    pst__slab_init(&graph->details, &runtime->heap, sizeof(pst__detail), DETAILS_PER_CHUNK);
    pst__slab_init(&graph->tasks, &runtime->heap, sizeof(pst__grown), runtime->task_capacity);
    enlist(graph);
    *created = graph;
    return PST_OK;
}

static void free_block(void *context, void *memory) {
    pst__grown *task = memory;
    pst__grown_free_links(context, task);
    detail_drop_event(&task->detail);
}

static void drop_event(void *context, void *detail) {
    (void)context;
    detail_drop_event(detail);
}

void pst__graph_free_sealed_arrays(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    const size_t count = graph->node_count;
    pst__heap_free(heap, graph->edges, graph->pair_count * sizeof *graph->edges);
    pst__heap_free(heap, graph->cross_first, (count + 1) * sizeof *graph->cross_first);
    pst__heap_free(heap, graph->cross, graph->cross_count * sizeof *graph->cross);
    pst__heap_free(heap, graph->batch_indices,
                   graph->batch_index_count * sizeof *graph->batch_indices);
    graph->edges = graph->cross_first = graph->cross = graph->batch_indices = NULL;
}

static void free_shares(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    while (graph->shares != NULL) {
        pst__share *next = graph->shares->next;
        pst__heap_free(heap, graph->shares, sizeof *next);
        graph->shares = next;
    }
    pst__heap_free(heap, graph->share_of, graph->share_room * sizeof *graph->share_of);
}

void pst__graph_free(pst_graph *graph) {
    const pst__heap *heap = &graph->runtime->heap;
    pst__graph_free_sealed_arrays(graph);
    pst__slab_each(&graph->details, drop_event, NULL);
    pst__slab_free(&graph->details);
    pst__slab_each(&graph->tasks, free_block, graph);
    pst__slab_free(&graph->tasks);
    free_shares(graph);
    pst__heap_free(heap, graph->nodes, graph->node_capacity * sizeof *graph->nodes);
    pst__heap_free(heap, graph->pairs, graph->pair_capacity * sizeof *graph->pairs);
    pst__heap_free(heap, graph->outer, graph->outer_capacity * sizeof *graph->outer);
    pst__heap_free(heap, graph->gates, graph->gate_capacity * sizeof *graph->gates);
    pst__heap_free_text(heap, graph->name);
    pst__heap_free(heap, graph, sizeof *graph);
}

static int nobody_is_in(const void *argument) {
    const pst_graph *graph = argument;
    /* Acquire: pairs with the last subtraction in end_gate (advance.c). */
    return pst__graph_is_done(graph) && pst__load_acquire(&graph->passing) == 0;
}

pst_status pst_graph_destroy(pst_graph *graph) {
    if (graph == NULL) return PST_OK;
    pst_runtime *runtime = graph->runtime;
    if (pst__calls_are_in(graph))
        return pst__runtime_fail(runtime, PST_ESTATE,
                                 "graph %s cannot be destroyed in a start, test or callback of "
                                 "one of its tasks",
                                 graph->name);
    if (!pst__graph_has_ended(graph))
        return pst__runtime_fail(runtime, PST_EBUSY,
                                 "graph %s has %u unfinished tasks or gates: wait for them or "
                                 "cancel the launch before it is destroyed",
                                 graph->name, pst__graph_count_unfinished(graph));
    /* A callback may be running, or a lane be on its way out of the last task. */
    if (pst__wait_aside(runtime, nobody_is_in, graph) != PST_OK)
        return pst__runtime_fail(runtime, PST_ETIMEDOUT,
                                 "graph %s is not destroyed: a callback of its tasks has not "
                                 "returned in %.3f s",
                                 graph->name, (double)runtime->deadline_ns / 1e9);
    delist(graph);
    pst__graph_free(graph);
    return PST_OK;
}
