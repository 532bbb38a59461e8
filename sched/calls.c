#include "sched/calls.h"

#include "sched/lane.h"

static _Thread_local pst__call *innermost;

pst__call **pst__calls_of_thread(void) {
    return &innermost;
}

pst_status pst__calls_refuse(pst_runtime *runtime, const char *what, const char *name) {
    for (const pst__call *call = innermost; call != NULL; call = call->outer) {
        if (call->node == NULL || call->node->lane->runtime != runtime) continue;
        return pst__runtime_fail(runtime, PST_ESTATE,
                                 "lane %s: task %s calls %s (%s) in its start, test or callback, "
                                 "which must not wait: put what follows into a task behind it",
                                 call->node->lane->name, pst__node_name(call->node), what, name);
    }
    return PST_OK;
}

int pst__calls_are_in(const pst_graph *graph) {
    for (const pst__call *call = innermost; call != NULL; call = call->outer)
        if (call->node != NULL && call->node->graph == graph) return 1;
    return 0;
}
