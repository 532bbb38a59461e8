/* Starting a launch, canceling it. */
#include "sched/growing.h"

#include <inttypes.h>
#include <sched.h>

/* ---- starting --------------------------------------------------------------------------- */

/* Every task leads to one without successors, and that is launched after it. Acquire: pairs with
 * the release in pst__node_become; all that the lanes did with the tasks before is seen. */
static int last_are_launched(const pst_graph *graph) {
    for (uint32_t i = 0; i < graph->last_count; i++) {
        const uint32_t word = pst__load_acquire(&graph->nodes[graph->last[i]].word);
        if (pst__word_number(word) != (graph->number & PST__NUMBER_MASK) ||
            pst__word_state(word) < PST__TASK_LAUNCHED)
            return 0;
    }
    return graph->last_count > 0;
}

/* By the lanes' counts, which come late, or by the last tasks themselves, if they are few. Acquire:
 * pairs with pst__run_count. */
static int is_launched(pst_graph *graph) {
    return pst__load_acquire(&pst__graph_run(graph, graph->number)->unlaunched) == 0 ||
           last_are_launched(graph);
}

/* The run whose place the next one takes. Acquire: as above. */
static int place_is_free(pst_graph *graph) {
    return pst__load_acquire(&pst__graph_run(graph, graph->number + 1)->unfinished) == 0;
}

#define PLACE_PATIENCE 20000 /* looks: some milliseconds */

/* A lane counts the ends in a run before its first launch in the next one, but shows that launch
 * first: who has seen it may be some instructions too early. */
static void await_place(pst_graph *graph) {
    if (place_is_free(graph) || !is_launched(graph)) return;
    for (int i = 0; i < PLACE_PATIENCE && !place_is_free(graph); i++)
        (void)sched_yield();
}

/* The caller holds the graph's lock: a poison or cancel comes wholly before or wholly after. */
static pst_status begin_run(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    pst__run *run = pst__graph_run(graph, graph->number + 1);
    const int may_begin = is_launched(graph) && place_is_free(graph);
    pst_status poison = pst_runtime_status(runtime);
    if (poison != PST_OK) return poison;
    if (!may_begin) return PST_EBUSY;
    /* Relaxed: the number's release publishes them. */
    const uint32_t count = (uint32_t)graph->node_count;
    pst__store_relaxed(&run->number, graph->number + 1);
    pst__store_relaxed(&run->status, PST_OK);
    pst__store_relaxed(&run->unlaunched, count);
    pst__store_relaxed(&run->unfinished, count);
    pst__store_relaxed(&graph->stop, PST_OK);
    /* Release: a thread that learns the number finds the run set up. */
    pst__store_release(&graph->number, graph->number + 1);
    return PST_OK;
}

static pst_status refuse(const pst_graph *graph, pst_status status) {
    const char *text = status == PST_ESTATE  ? "it is not sealed: pst_graph_seal comes first"
                       : status == PST_EBUSY ? "tasks of its latest launch are not launched yet: "
                                               "wait for them and try again"
                                             : "the runtime was stopped";
    return pst__runtime_fail(graph->runtime, status, "graph %s cannot be launched: %s", graph->name,
                             text);
}

pst_status pst_graph_launch(pst_graph *graph, pst_launch *launch) {
    if (launch != NULL) *launch = (pst_launch){NULL, 0};
    if (graph == NULL) return PST_EINVAL;
    if (graph->kind != PST_GRAPH_SEALED || !graph->sealed) return refuse(graph, PST_ESTATE);
    await_place(graph);
    ck_spinlock_lock(&graph->lock);
    pst_status status = begin_run(graph);
    ck_spinlock_unlock(&graph->lock);
    if (status == PST_EBUSY) return status; /* to be asked again and again: no text */
    if (status != PST_OK) return refuse(graph, status);
    if (launch != NULL) *launch = (pst_launch){graph, graph->number};
    for (size_t b = 0; b < graph->batch_count; b++) {
        pst__batch *batch = &graph->batches[b];
        if (batch->count == 0) continue;
        batch->cursor = 0;
        pst_lane *lane = batch->item.lane;
        pst__arrivals_push(&lane->arrivals, &batch->item);
        pst__lane_notify(lane);
    }
    return PST_OK;
}

/* ---- canceling -------------------------------------------------------------------------- */

/* The caller holds the graph's lock. */
static void cancel_latest(pst_graph *graph, pst_status status) {
    /* Acquire: pairs with pst__run_count. */
    pst__run *run = pst__graph_run(graph, graph->number);
    if (pst__run_unfinished(graph, run) == 0) return;
    /* Relaxed: tasks that are being launched at this moment may see it or not. */
    if (pst__load_relaxed(&graph->stop) == PST_OK) pst__store_relaxed(&graph->stop, status);
    pst__gates_cancel(graph, status);
}

void pst__graph_cancel(pst_graph *graph, pst_status status) {
    ck_spinlock_lock(&graph->lock);
    cancel_latest(graph, status);
    ck_spinlock_unlock(&graph->lock);
}

/* A launch begins under the lock, too: the next one is not canceled in this one's place. Returns
 * the latest launch's number. */
static uint64_t cancel_if_latest(const pst_launch *launch) {
    pst_graph *graph = launch->graph;
    ck_spinlock_lock(&graph->lock);
    const uint64_t latest = graph->number;
    if (launch->number == latest) cancel_latest(graph, PST_ECANCELED);
    ck_spinlock_unlock(&graph->lock);
    return latest;
}

pst_status pst_launch_cancel(pst_launch launch) {
    if (launch.graph == NULL) return PST_EINVAL;
    pst_graph *graph = launch.graph;
    const uint64_t latest = cancel_if_latest(&launch);
    if (launch.number > latest || (launch.number == 0 && latest != 0))
        return pst__runtime_fail(graph->runtime, PST_ESTATE,
                                 "graph %s: there is no launch %" PRIu64 " to cancel", graph->name,
                                 launch.number);
    if (launch.number < latest) return PST_OK; /* all of it is launched */
    for (pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != NULL; lane = lane->next)
        pst__lane_notify(lane);
    return PST_OK;
}
