/* A task that failed: what is told of it. */
#include "sched/failed.h"

#include <inttypes.h>
#include <stdio.h>

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
