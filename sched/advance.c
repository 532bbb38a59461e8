#include "sched/advance.h"

#include "sched/growing.h"

void pst__run_count(pst_graph *graph, pst__run *run, uint32_t launched, uint32_t finished) {
    pst_runtime *runtime = graph->runtime;
    /* Release: what the tasks did is seen by whoever finds the counters at zero (pst_graph_launch,
     * the waits, pst_graph_destroy). `unfinished` comes last: at zero the graph may be destroyed.
     */
    if (launched > 0 && graph->kind == PST_GRAPH_SEALED)
        (void)pst__sub_acq_rel(&run->unlaunched, launched);
    if (finished > 0) (void)pst__sub_acq_rel(&run->unfinished, finished);
    pst__runtime_wake_waiters(runtime);
}

/* The device on whose streams a successor may be early; NULL: there is none. */
static const pst_device *early_device(const pst__node *node) {
    if (node->lane != NULL) return node->lane->asynchronous ? node->lane->device : NULL;
    return node->detail->event_recorded ? node->detail->event_device : NULL;
}

int pst__is_early(const pst__node *node, const pst_lane *to) {
    return pst__lane_waits_on(to, early_device(node));
}

void pst__advance_arrive(pst__advance *advance, pst__node *node, uint32_t count,
                         pst_status status) {
    /* A growing node may have run and gone by the time its count is taken: look at it before. */
    pst_lane *lane = node->lane;
    if (status < 0) pst__node_inherit(node, status);
    if (!pst__node_arrive(node, count)) return;
    if (lane == NULL) {
        pst__fifo_append(&advance->gates, node);
    } else if (lane->order == PST_LANE_BY_SUBMISSION) {
        /* It stands in the lane's queue already, and the owner sees its count. */
        if (lane != advance->lane) pst__lane_notify(lane);
    } else if (lane == advance->lane) {
        pst__fifo_append(&lane->ready, node);
    } else {
        pst__arrivals_push(&lane->arrivals, node);
        pst__lane_notify(lane);
    }
}

void pst__advance_release(pst__advance *advance, pst__node *node, pst__phase phase,
                          pst_status status) {
    if (node->flags & PST__NODE_GROWING) {
        pst__grown_release(advance, node, phase, status);
        return;
    }
    if (phase == PST__WHEN_DONE && !(node->flags & PST__NODE_LATE)) return;
    const pst_graph *graph = node->graph;
    const uint32_t end = node[1].first_edge;
    /* Looked at before the first arrival: with the last one the next launch may begin, and open
     * this gate again. */
    const pst_device *device = phase == PST__ALL ? NULL : early_device(node);
    for (uint32_t e = node->first_edge; e < end; e++) {
        pst__node *successor = &graph->nodes[graph->edges[e]];
        if (phase == PST__ALL ||
            pst__lane_waits_on(successor->lane, device) == (phase == PST__WHEN_LAUNCHED))
            pst__advance_arrive(advance, successor, 1, status);
    }
}

#if !defined(NDEBUG) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
/* In debug builds and under the sanitizers: a state that may not follow stops the runtime. */
static void check_transition(const pst__node *node, uint64_t number, pst__task_state to) {
    const uint32_t word = pst__load_relaxed(&node->word);
    const int same_launch = pst__word_number(word) == (number & PST__NUMBER_MASK);
    const pst__task_state from = same_launch ? pst__word_state(word) : PST__TASK_PENDING;
    if (pst__task_may_become(from, to)) return;
    pst_runtime_poison(node->graph->runtime, PST_ESTATE, pst__node_name(node));
}
#else
#define check_transition(node, number, to) (void)0
#endif

void pst__node_become(pst__node *node, uint64_t number, pst__task_state state, pst_status status) {
    check_transition(node, number, state);
    /* Release: pairs with the acquire in pst__look, by which waits and tests see it. */
    pst__store_release(&node->word, pst__word(number, state, status));
}

static void count(const pst__advance *advance, pst_graph *graph, pst__run *run, uint32_t launched,
                  uint32_t finished) {
    if (advance->lane == NULL)
        pst__run_count(graph, run, launched, finished);
    else
        pst__lane_count(advance->lane, graph, run, launched, finished);
}

/* Acquire-release only because it is one operation for all: the run's counters publish it. */
static void keep_first_error(pst__run *run, pst_status status) {
    int none = PST_OK;
    (void)pst__cas_acq_rel(&run->status, &none, (int)status);
}

/* The last task's callback may launch the graph again: let that see that all are launched. */
static void call_back(const pst__advance *advance, const pst__node *node, pst__run *run,
                      uint32_t *launched, pst_status status) {
    count(advance, node->graph, run, *launched, 0);
    *launched = 0;
    if (advance->lane != NULL) pst__lane_count_flush(advance->lane);
    node->detail->done(node->detail->done_argument, status);
}

void pst__node_end(pst__advance *advance, pst__node *node, uint64_t number, pst__task_state state,
                   pst_status status, pst__phase phase) {
    pst_graph *graph = node->graph;
    pst__run *run = pst__graph_run(graph, number);
    /* Relaxed: whoever ends a task owns the lane, as who launched it did. Gates are never LAUNCHED.
     */
    uint32_t launched = pst__word_state(pst__load_relaxed(&node->word)) != PST__TASK_LAUNCHED;
    if (status < 0) keep_first_error(run, status);
    if (node->detail != NULL && node->detail->done != NULL)
        call_back(advance, node, run, &launched, status);
    pst__node_become(node, number, state, status);
    pst__runtime_wake_seen_waiters(graph->runtime);
    pst__advance_release(advance, node, phase, status);
    /* From the drop on a growing node is another task's, and from the count on a graph may go. */
    if (node->flags & PST__NODE_GROWING) pst__grown_drop(node);
    count(advance, graph, run, launched, 1);
}

/* Has the gate successors that only its end releases? */
static int has_late_successors(const pst__node *gate) {
    if (gate->flags & PST__NODE_GROWING) return 1;
    const pst_graph *graph = gate->graph;
    for (uint32_t e = gate->first_edge; e < gate[1].first_edge; e++)
        if (!pst__is_early(gate, graph->nodes[graph->edges[e]].lane)) return 1;
    return 0;
}

/* A gate whose event successors on other devices wait for stays in flight on the borrowed lane,
 * whose turns ask for the event. All others end here. */
static void pass_gate(pst__advance *advance, pst__node *gate) {
    const uint64_t number = gate->graph->number;
    /* Relaxed: the arrival that made the gate ready has acquired it, and nobody else writes it
     * until the next launch, which acquires the run's counters first. */
    const pst_status status = pst__pending_status(pst__load_relaxed(&gate->pending));
    pst__store_relaxed(&gate->pending, gate->predecessors);
    if (status == PST_OK && gate->detail->event_recorded && has_late_successors(gate)) {
        pst_lane *borrowed = gate->detail->event_lane;
        pst__advance_release(advance, gate, PST__WHEN_LAUNCHED, PST_OK);
        pst__arrivals_push(&borrowed->arrivals, gate);
        pst__lane_notify(borrowed);
        return;
    }
    pst__node_end(advance, gate, number, status < 0 ? PST__TASK_CANCELED : PST__TASK_DONE, status,
                  PST__ALL);
}

void pst__advance_finish(pst__advance *advance) {
    while (advance->gates.first != NULL) {
        pst__node *gate = advance->gates.first;
        pst__fifo_remove_first(&advance->gates);
        pass_gate(advance, gate);
    }
}
