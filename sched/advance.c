#include "sched/advance.h"

#include "sched/trace.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- counting --------------------------------------------------------------------------- */

/* Acquire-release, here and below: what the owner did with the tasks is seen by whoever finds that
 * nothing is open, and all shares are seen together. */
static void count_open(pst__run *run, uint64_t what) {
    (void)pst__sub_acq_rel(&run->open, what);
}

void pst__count_launched(pst_lane *lane, const pst__node *node, uint64_t number) {
    lane->has_news = 1;
    if (node->flags & PST__NODE_GROWING) return;
    pst__share *share = node->graph->share_of[lane->index];
    if (pst__share_is_last(&share->unlaunched, share))
        count_open(pst__graph_run(node->graph, number), PST__RUN_UNLAUNCHED);
}

/* ---- edges ------------------------------------------------------------------------------ */

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
    } else if (pst__order_is_by_adding(lane->order)) {
        /* It stands in the lane's queue already, and the owner sees its count. */
        if (lane != advance->lane) pst__lane_notify(lane);
    } else if (lane == advance->lane) {
        pst__fifo_append(&lane->ready, node);
    } else {
        pst__arrivals_push(&lane->arrivals, node);
        pst__lane_notify(lane);
    }
}

/* For a sealed graph; most successors are on the node's own lane, which the thread serves. */
static void release_all(pst__advance *advance, const pst__node *node, pst_status status) {
    const pst_graph *graph = node->graph;
    const uint32_t end = node[1].first_edge;
    for (uint32_t e = node->first_edge; e < end; e++) {
        pst__node *successor = &graph->nodes[graph->edges[e]];
        if (status < 0 || !(successor->flags & PST__NODE_LOCAL))
            pst__advance_arrive(advance, successor, 1, status);
        else if (pst__node_arrive(successor, 1) && !pst__order_is_by_adding(successor->lane->order))
            pst__fifo_append(&successor->lane->ready, successor);
    }
}

static pst__link *close_list(pst__link **list) {
    /* Pairs with both orders of pst__grown_push. */
    pst__link *link = pst__swap_acq_rel(list, &pst__grown_closed);
    pst__link *oldest = NULL;
    while (link != NULL && link != &pst__grown_closed) {
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
            /* A gate's event, of another device: wait for it. */
            (void)pst__grown_push(&task->late, link);
            link = next;
            continue;
        }
        if (task->detail.launched_at != 0 && advance->lane != NULL && target->lane != advance->lane)
            link->flow = pst__hook_edge(advance->lane, &task->node, target);
        pst__advance_arrive(advance, target, 1, status);
        link = next;
    }
}

/* Not inlined, so that sealed graphs' tasks do not pay for it. */
__attribute__((noinline)) static void release_grown(pst__advance *advance, pst__node *node,
                                                    pst__phase phase, pst_status status) {
    pst__grown *task = pst__grown_of(node);
    /* Relaxed: this thread alone closes it. */
    const int has_early = pst__load_relaxed(&task->early) != &pst__grown_closed;
    if (has_early && phase != PST__WHEN_DONE)
        release_list(advance, task, &task->early, phase, status);
    if (phase != PST__WHEN_LAUNCHED) release_list(advance, task, &task->late, phase, status);
}

void pst__advance_release(pst__advance *advance, pst__node *node, pst__phase phase,
                          pst_status status) {
    if (node->flags & PST__NODE_GROWING) {
        release_grown(advance, node, phase, status);
        return;
    }
    if (phase == PST__WHEN_DONE && !(node->flags & PST__NODE_LATE)) return;
    if (phase == PST__ALL) {
        release_all(advance, node, status);
        return;
    }
    const pst_graph *graph = node->graph;
    const uint32_t end = node[1].first_edge;
    /* Looked at before the first arrival: with the last one the next launch may begin, and open
     * this gate again. */
    const pst_device *device = early_device(node);
    for (uint32_t e = node->first_edge; e < end; e++) {
        pst__node *successor = &graph->nodes[graph->edges[e]];
        if (pst__lane_waits_on(successor->lane, device) == (phase == PST__WHEN_LAUNCHED))
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

/* ---- the end ---------------------------------------------------------------------------- */

/* Acquire-release only because it is one operation for all: the run's counters publish it. */
static void keep_first_error(pst__run *run, pst_status status) {
    int none = PST_OK;
    (void)pst__cas_acq_rel(&run->status, &none, (int)status);
}

/* A callback learns whether its task ran, a wait why not. */
static pst_status callback_status(const pst__end *end) {
    const int is_skipped = end->state == PST__TASK_CANCELED && end->status != PST_ECANCELED;
    return is_skipped ? PST_ESKIPPED : end->status;
}

/* Only the thread that serves its lane ends a task. Returns whether it was the last of its share to
 * end. */
static int count_ended(const pst_lane *lane, const pst__node *node, uint64_t number) {
    pst__run *run = pst__graph_run(node->graph, number);
    pst__share *share = node->graph->share_of[lane->index];
    /* Relaxed: whoever ends a task owns the lane, as who launched it did. */
    if (pst__word_state(pst__load_relaxed(&node->word)) != PST__TASK_LAUNCHED &&
        pst__share_is_last(&share->unlaunched, share))
        count_open(run, PST__RUN_UNLAUNCHED);
    if (!pst__share_is_last(&share->unended[number & 1], share)) return 0;
    count_open(run, PST__RUN_UNENDED);
    return 1;
}

/* Inline: each task comes by. */
static inline void finish_task(pst__advance *advance, pst__node *node) {
    const pst__end *end = &advance->end;
    pst__node_become(node, end->number, end->state, end->status);
    pst__advance_release(advance, node, end->phase, end->status);
    /* When the node is dropped it is another task's, and when it is counted the graph may go. */
    if (node->flags & PST__NODE_GROWING) {
        pst__share *share = pst__grown_of(node)->share;
        pst__grown_drop(pst__grown_of(node));
        pst__share_count_grown(&share->left);
    } else if (end->is_last) {
        (void)pst__sub_acq_rel(&pst__graph_run(node->graph, end->number)->unleft, 1);
    }
    pst__runtime_wake_seen_waiters(advance->lane->runtime);
}

/* A task's end, as advance->end says. */
static void end_task(pst__advance *advance, pst__node *node) {
    pst__end *end = &advance->end;
    advance->lane->has_news = 1;
    if (node->flags & PST__NODE_GROWING)
        pst__share_count_grown(&pst__grown_of(node)->share->ended);
    else
        end->is_last = count_ended(advance->lane, node, end->number);
    if (node->detail != NULL && node->detail->done != NULL) {
        advance->call.kind = PST__CALL_DONE;
        advance->call.node = node;
        node->detail->done(node->detail->done_argument, callback_status(end));
        advance->call.node = NULL;
    }
    finish_task(advance, node);
}

/* Any thread may end a gate, and as soon as that is counted others may begin the next launch and
 * open the gate in it: then its state is theirs. */
static void end_gate(pst__advance *advance, pst__node *gate) {
    const pst__end *end = &advance->end;
    pst_graph *graph = gate->graph;
    pst_runtime *runtime = graph->runtime;
    uint32_t open = pst__word(end->number, PST__TASK_OPEN, PST_OK);
    /* Before the end is counted: the graph stays until this thread has gone. Release: pairs with
     * the acquire in pst_graph_destroy. */
    (void)pst__add_acq_rel(&graph->passing, 1);
    count_open(pst__graph_run(graph, end->number), PST__RUN_UNENDED + PST__RUN_UNLAUNCHED);
    /* Release: pairs with the acquire in pst__look. */
    (void)pst__cas_acq_rel(&gate->word, &open, pst__word(end->number, end->state, end->status));
    pst__advance_release(advance, gate, end->phase, end->status);
    if (gate->flags & PST__NODE_GROWING) pst__grown_drop(pst__grown_of(gate));
    (void)pst__sub_acq_rel(&graph->passing, 1);
    pst__runtime_wake_waiters(runtime);
}

void pst__node_end(pst__advance *advance, pst__node *node, uint64_t number, pst__task_state state,
                   pst_status status, pst__phase phase) {
    advance->end = (pst__end){number, state, status, phase, 0};
    if (status < 0) keep_first_error(pst__graph_run(node->graph, number), status);
    if (node->lane == NULL)
        end_gate(advance, node);
    else
        end_task(advance, node);
}

/* ---- gates ------------------------------------------------------------------------------ */

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

/* ---- failures ------------------------------------------------------------------------- */

void pst__report_failure(const pst__node *node, const pst_lane *lane, pst_status status) {
    pst_runtime *runtime = lane->runtime;
    char reason[512], text[PST__ERROR_BYTES];
    /* What the work itself, or else its device, has said about it. */
    pst__error_own(&runtime->error, lane->texts, reason, sizeof reason);
    if (reason[0] == '\0')
        (void)snprintf(reason, sizeof reason, "%s", pst__device_text(lane->device));
    (void)snprintf(text, sizeof text,
                   "lane %s: task %s (ticket %" PRIu64 ") of graph %s failed: %s%s%s", lane->name,
                   pst__node_name(node), pst__node_ticket(node), node->graph->name,
                   pst_status_text(status), reason[0] == '\0' ? "" : ": ", reason);
    if (pst_runtime_status(runtime) == PST_OK)
        (void)pst__runtime_fail(runtime, status, "%s", text);
    else
        pst__log(&runtime->error, PST_LOG_ERROR, "rank %d: %s", runtime->rank, text);
}

void pst__fail_node(pst__advance *advance, pst__node *node, uint64_t number, pst_status status,
                    pst__phase phase) {
    pst__report_failure(node, advance->lane, status);
    pst__node_end(advance, node, number, PST__TASK_FAILED, pst__kept_status(status), phase);
}

/* ---- code that does not return ---------------------------------------------------------- */

/* The code has left its task to the stack's unwinding: the task ends, and the lane goes on with
 * whoever takes it next. */
static void complete(pst__advance *turn) {
    pst_lane *lane = turn->lane;
    pst__node *node = turn->call.node;
    turn->call.node = NULL;
    if (turn->call.kind == PST__CALL_DONE) {
        finish_task(turn, node);
    } else {
        (void)pst__runtime_fail(lane->runtime, PST_EINVAL,
                                "an exception, or the end of its thread, has left task %s: work "
                                "must return",
                                pst__node_name(node));
        const uint64_t number =
            turn->call.kind == PST__CALL_TEST ? pst__word_number(node->word) : node->graph->number;
        if (turn->call.kind == PST__CALL_TEST) lane->current = NULL;
        pst__fail_node(turn, node, number, PST_EINVAL, PST__ALL);
    }
    pst__advance_finish(turn);
}

void pst__advance_leave(pst__advance *turn) {
    *pst__calls_of_thread() = turn->call.outer;
    if (turn->call.node != NULL) complete(turn);
}
