/* Starting a launch, canceling it. */
#include "sched/growing.h"

#include <inttypes.h>

/* ---- starting --------------------------------------------------------------------------- */

/* All of the latest run is launched, and the run whose place the next one takes is over. A lane
 * launches a task when it has left the same task of the run before, and so the second holds when
 * the first does, but for gates. Acquires: pair with the counting in share.h and advance.c. */
static int may_begin(pst_graph *graph) {
    const pst__run *latest = pst__graph_run(graph, graph->number);
    return pst__load_acquire(&latest->open) >> 32 == 0 &&
           pst__run_is_over(graph, pst__graph_run(graph, graph->number + 1));
}

/* The caller holds the graph's lock: a poison or cancel comes wholly before or wholly after. */
static pst_status begin_run(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    pst__run *run = pst__graph_run(graph, graph->number + 1);
    pst_status poison = pst_runtime_status(runtime);
    if (poison != PST_OK) return poison;
    if (!may_begin(graph)) return PST_EBUSY;
    /* Relaxed: the number's release publishes them. */
    pst__store_relaxed(&run->number, graph->number + 1);
    pst__store_relaxed(&run->status, PST_OK);
    pst__store_relaxed(&run->open, (PST__RUN_UNENDED + PST__RUN_UNLAUNCHED) * graph->parts);
    pst__store_relaxed(&run->unleft, graph->parts - (uint32_t)graph->gate_count);
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

static void push_batches(pst_graph *graph) {
    for (pst__share *share = graph->shares; share != NULL; share = share->next)
        if (share->count > 0) pst__arrivals_push(&share->lane->arrivals, &share->item);
}

/* With the last push the run may end, but not the graph: it is its caller's. */
static void hand_over(pst_graph *graph) {
    pst_runtime *runtime = graph->runtime;
    for (pst__share *share = graph->shares; share != NULL; share = share->next)
        share->cursor = 0;
    if (graph->is_ordered) {
        ck_spinlock_lock(&runtime->launching);
        push_batches(graph);
        ck_spinlock_unlock(&runtime->launching);
    } else {
        push_batches(graph);
    }
    /* A cancel meanwhile: lanes may have looked for what is stopped before the push. The fence
     * orders the push with the look, and pairs with the addition in pst__runtime_note_stop. */
    pst__fence_store_load();
    if (pst__load_relaxed(&graph->stop) != PST_OK) pst__runtime_note_stop(runtime);
    for (pst__share *share = graph->shares; share != NULL; share = share->next)
        if (share->count > 0) pst__lane_notify(share->lane);
}

pst_status pst_graph_launch(pst_graph *graph, pst_launch *launch) {
    if (launch != NULL) *launch = (pst_launch){NULL, 0};
    if (graph == NULL) return PST_EINVAL;
    if (graph->kind != PST_GRAPH_SEALED || !graph->sealed) return refuse(graph, PST_ESTATE);
    ck_spinlock_lock(&graph->lock);
    pst_status status = begin_run(graph);
    const uint64_t number = graph->number;
    ck_spinlock_unlock(&graph->lock);
    if (status == PST_EBUSY) return status; /* to be asked again and again: no text */
    if (status != PST_OK) return refuse(graph, status);
    if (launch != NULL) *launch = (pst_launch){graph, number};
    hand_over(graph);
    return PST_OK;
}

/* ---- canceling -------------------------------------------------------------------------- */

/* The caller holds the graph's lock. */
static void cancel_latest(pst_graph *graph, pst_status status) {
    /* A callback that poisons is of a task that has ended: what is added meanwhile is to meet it.
     */
    if (pst__run_is_over(graph, pst__graph_run(graph, graph->number))) return;
    /* Relaxed: tasks that are being launched at this moment may see it or not. */
    if (pst__load_relaxed(&graph->stop) == PST_OK) pst__store_relaxed(&graph->stop, status);
    pst__runtime_note_stop(graph->runtime);
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
