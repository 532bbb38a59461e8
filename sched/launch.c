#include "sched/launch.h"

#include "sched/advance.h"

#include <inttypes.h>

/* ---- starting --------------------------------------------------------------------------- */

/* All of the latest run is launched, and the run whose place the next one takes is done. A lane
 * launches a task when it has left the same task of the run before, and so the second holds when
 * the first does, but for gates. Acquires: pair with the counting in graph.h and advance.c. */
static int may_begin(pst_graph *graph) {
    const pst__run *latest = pst__graph_run(graph, graph->number);
    return pst__load_acquire(&latest->open) >> 32 == 0 &&
           pst__run_is_done(graph, pst__graph_run(graph, graph->number + 1));
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

static pst_status refuse_unsealed(const pst_graph *graph) {
    return pst__runtime_fail(graph->runtime, PST_ESTATE,
                             "graph %s cannot be launched: it is not sealed: pst_graph_seal comes "
                             "first",
                             graph->name);
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
    if (graph->kind != PST_GRAPH_SEALED || !graph->is_launchable) return refuse_unsealed(graph);
    ck_spinlock_lock(&graph->lock);
    pst_status status = begin_run(graph);
    const uint64_t number = graph->number;
    ck_spinlock_unlock(&graph->lock);
    /* No text: PST_EBUSY is asked again and again, and a runtime that was stopped has said why. */
    if (status != PST_OK) return status;
    if (launch != NULL) *launch = (pst_launch){graph, number};
    hand_over(graph);
    return PST_OK;
}

/* ---- opening gates -------------------------------------------------------------------- */

/* Not opened in launch `number` yet. Neither is a gate of a later launch, and yet it is not closed
 * here: who opens the last launch's gate may come that late. */
static int is_closed(const pst__node *gate, uint32_t word, uint64_t number) {
    if (gate->flags & PST__NODE_GROWING) return pst__word_state(word) == PST__TASK_PENDING;
    return pst__word_number(word) == ((number - 1) & PST__NUMBER_MASK);
}

/* Whoever gets the gate from closed to open in this launch is the one who opens it. */
static int claim(pst__node *gate, uint64_t number) {
    uint32_t seen = pst__load_relaxed(&gate->word); /* a guess: the exchange below is what counts */
    const uint32_t open = pst__word(number, PST__TASK_OPEN, PST_OK);
    do {
        if (!is_closed(gate, seen, number)) return 0;
        /* Acquire-release against the other claimants: the loser finds the winner's opening. */
    } while (!pst__cas_acq_rel(&gate->word, &seen, open));
    return 1;
}

/* The opening is a predecessor that has come. */
static void opened(pst__node *gate, pst_status status) {
    pst__advance advance = {.lane = NULL};
    pst__advance_arrive(&advance, gate, 1, pst__kept_status(status));
    pst__advance_finish(&advance);
}

/* Records where the caller's stream stands. */
static pst_status record_on(pst_lane *borrowed, pst__detail *detail) {
    pst_device *device = borrowed->device;
    pst_status status = pst__detail_make_event(detail, device);
    if (status != PST_OK) return status;
    detail->event_lane = borrowed;
    status = device->ops->event_record(device, detail->event, borrowed->stream);
    detail->event_recorded = status == PST_OK;
    return status;
}

/* The claimant's. Others may be asking about the launch before. */
static pst_status note_opening(pst__detail *detail, uint64_t number, pst_lane *borrowed) {
    pst_status status = PST_OK;
    ck_spinlock_lock(&detail->opening);
    detail->event_recorded = 0;
    detail->event_number = (uint32_t)number;
    if (borrowed != NULL && borrowed->asynchronous) status = record_on(borrowed, detail);
    ck_spinlock_unlock(&detail->opening);
    return status;
}

static pst_status check_gate(const pst_launch *launch, const pst__node *gate,
                             const pst_lane *borrowed) {
    pst_graph *graph = launch->graph;
    const uint64_t latest = pst__graph_number(graph);
    if (gate == NULL || !(gate->flags & PST__NODE_GATE))
        return pst__runtime_fail(graph->runtime, PST_EINVAL,
                                 "graph %s: what is to be opened is no gate of this graph",
                                 graph->name);
    if (launch->number != latest || (graph->kind == PST_GRAPH_SEALED && launch->number == 0))
        return pst__runtime_fail(
            graph->runtime, PST_ESTATE,
            "graph %s: gate %s can only be opened in the current launch %" PRIu64
            ", not in %" PRIu64,
            graph->name, pst__node_name(gate), latest, launch->number);
    return pst__graph_check_borrowed(borrowed, gate);
}

pst_status pst_gate_open(pst_launch launch, pst_task task, pst_lane *borrowed) {
    if (launch.graph == NULL) return PST_EINVAL;
    pst_graph *graph = launch.graph;
    pst__node *gate = pst__graph_node(graph, task);
    pst_status status = check_gate(&launch, gate, borrowed);
    if (status != PST_OK) return status;
    if (!claim(gate, launch.number)) {
        /* Relaxed: it only chooses between two refusals. */
        const pst_status stop = (pst_status)pst__load_relaxed(&graph->stop);
        return stop < 0 ? stop
                        : pst__runtime_fail(graph->runtime, PST_ESTATE,
                                            "graph %s: gate %s is open already", graph->name,
                                            pst__node_name(gate));
    }
    if (gate->flags & PST__NODE_GROWING) {
        ck_spinlock_lock(&graph->lock);
        pst__grown_delist_gate(gate);
        ck_spinlock_unlock(&graph->lock);
    }
    status = note_opening(gate->detail, launch.number, borrowed);
    if (status != PST_OK)
        (void)pst__runtime_fail(graph->runtime, status,
                                "graph %s: gate %s could not be recorded on lane %s: %s: %s",
                                graph->name, pst__node_name(gate), borrowed->name,
                                pst_status_text(status), pst__device_text(borrowed->device));
    opened(gate, status);
    return status;
}

/* ---- canceling -------------------------------------------------------------------------- */

static void cancel_gate(pst__node *gate, pst_status status) {
    const uint64_t number = gate->graph->number; /* 0 of a growing graph */
    if (!claim(gate, number)) return;
    if (gate->flags & PST__NODE_GROWING) pst__grown_delist_gate(gate);
    (void)note_opening(gate->detail, number, NULL);
    opened(gate, status);
}

/* Those that are closed end with `status`. The caller holds the graph's lock. */
static void cancel_gates(pst_graph *graph, pst_status status) {
    for (size_t i = 0; i < graph->gate_count; i++)
        cancel_gate(&graph->nodes[graph->gates[i]], status);
    for (pst__grown *gate = graph->closed_gates, *next; gate != NULL; gate = next) {
        next = gate->next;
        cancel_gate(&gate->node, status);
    }
}

/* The caller holds the graph's lock. */
static void cancel_latest(pst_graph *graph, pst_status status) {
    /* A callback that poisons is of a task that has ended: what is added meanwhile is to meet it.
     */
    if (pst__run_is_done(graph, pst__graph_run(graph, graph->number))) return;
    /* Relaxed: tasks that are being launched at this moment may see it or not. */
    if (pst__load_relaxed(&graph->stop) == PST_OK) pst__store_relaxed(&graph->stop, status);
    pst__runtime_note_stop(graph->runtime);
    cancel_gates(graph, status);
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
