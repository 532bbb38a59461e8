/* Opening gates. */
#include "sched/growing.h"

#include <inttypes.h>

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
    if (detail->event != NULL && detail->event_device != device) {
        detail->event_device->ops->event_destroy(detail->event_device, detail->event);
        detail->event = NULL;
    }
    pst_status status = PST_OK;
    if (detail->event == NULL) status = device->ops->event_create(device, 0, &detail->event);
    if (status != PST_OK) return status;
    detail->event_device = device;
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
    if (borrowed != NULL &&
        (borrowed->mode != PST_LANE_BORROWED || borrowed->runtime != graph->runtime))
        return pst__runtime_fail(graph->runtime, PST_EINVAL,
                                 "gate %s: lane %s is not a borrowed lane of this runtime",
                                 pst__node_name(gate), borrowed->name);
    return PST_OK;
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

static void cancel_sealed_gates(pst_graph *graph, pst_status status) {
    for (size_t i = 0; i < graph->gate_count; i++) {
        pst__node *gate = &graph->nodes[graph->gates[i]];
        if (!claim(gate, graph->number)) continue;
        (void)note_opening(gate->detail, graph->number, NULL);
        opened(gate, status);
    }
}

static void cancel_grown_gates(pst_graph *graph, pst_status status) {
    for (pst__grown *gate = graph->open_gates, *next; gate != NULL; gate = next) {
        next = gate->next;
        if (!claim(&gate->node, 0)) continue;
        pst__grown_delist_gate(&gate->node);
        (void)note_opening(&gate->detail, 0, NULL);
        opened(&gate->node, status);
    }
}

void pst__gates_cancel(pst_graph *graph, pst_status status) {
    if (graph->kind == PST_GRAPH_SEALED)
        cancel_sealed_gates(graph, status);
    else
        cancel_grown_gates(graph, status);
}
