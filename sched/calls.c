#include "sched/calls.h"

#include <inttypes.h>
#include <stdio.h>

static _Thread_local pst__advance *innermost;

pst__advance **pst__calls_of_thread(void) {
    return &innermost;
}

/* ---- failures ------------------------------------------------------------------------- */

/* What the work itself or its device has said about it. */
static void get_reason(const pst_lane *lane, char *reason, size_t size) {
    pst__error_own(&lane->runtime->error, lane->texts, reason, size);
    if (reason[0] == '\0') (void)snprintf(reason, size, "%s", pst__device_text(lane->device));
}

void pst__report_failure(const pst__node *node, const pst_lane *lane, pst_status status) {
    pst_runtime *runtime = lane->runtime;
    char reason[512], text[PST__ERROR_BYTES];
    get_reason(lane, reason, sizeof reason);
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
    pst__node *node = turn->node;
    turn->node = NULL;
    if (turn->call == PST__CALL_DONE) {
        pst__task_finish(turn, node);
    } else {
        (void)pst__runtime_fail(lane->runtime, PST_EINVAL,
                                "an exception, or the end of its thread, has left task %s: work "
                                "must return",
                                pst__node_name(node));
        const uint64_t number =
            turn->call == PST__CALL_TEST ? pst__word_number(node->word) : node->graph->number;
        if (turn->call == PST__CALL_TEST) lane->current = NULL;
        pst__fail_node(turn, node, number, PST_EINVAL, PST__ALL);
    }
    pst__advance_finish(turn);
}

void pst__calls_leave(pst__advance *turn) {
    innermost = turn->outer;
    if (turn->node != NULL) complete(turn);
}

/* ---- what must not be done in a task ---------------------------------------------------- */

pst_status pst__calls_refuse(pst_runtime *runtime, const char *what, const char *name) {
    for (const pst__advance *turn = innermost; turn != NULL; turn = turn->outer) {
        if (turn->node == NULL || turn->lane->runtime != runtime) continue;
        return pst__runtime_fail(runtime, PST_ESTATE,
                                 "lane %s: task %s calls %s (%s) in its start, test or callback, "
                                 "which must not wait: put what follows into a task behind it",
                                 turn->lane->name, pst__node_name(turn->node), what, name);
    }
    return PST_OK;
}

int pst__calls_are_in(const pst_graph *graph) {
    for (const pst__advance *turn = innermost; turn != NULL; turn = turn->outer)
        if (turn->node != NULL && turn->node->graph == graph) return 1;
    return 0;
}
