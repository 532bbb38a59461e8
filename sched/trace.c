/* The public face of tracing. */
#include "base/clock.h"
#include "base/options.h"
#include "sched/runtime.h"

#include <penstock/trace.h>

pst_status pst_trace_start(pst_runtime *runtime) {
    return runtime == NULL ? PST_EINVAL : pst__trace_start(runtime->trace);
}

pst_status pst_trace_stop(pst_runtime *runtime) {
    return runtime == NULL ? PST_EINVAL : pst__trace_stop(runtime->trace);
}

pst_status pst_trace_write(pst_runtime *runtime, const char *path) {
    if (runtime == NULL || path == NULL) return PST_EINVAL;
    return pst__trace_write(runtime->trace, path);
}

void pst_trace_get_stats(const pst_runtime *runtime, pst_trace_stats *stats) {
    if (stats == NULL) return;
    pst_trace_stats now = {0};
    if (runtime != NULL) pst__trace_get_stats(runtime->trace, &now.records, &now.overwritten);
    pst__write_sized(stats, &now, sizeof now);
}

/* The calling thread's track; NULL when nothing is recorded. */
static pst__track *track_of(pst_runtime *runtime) {
    if (runtime == NULL || !pst__trace_on(runtime->trace)) return NULL;
    return pst__track_of_thread(runtime->trace);
}

void pst_trace_begin(pst_runtime *runtime, const char *name) {
    pst__track *track = track_of(runtime);
    if (track != NULL) pst__trace_mark_begin(track, name);
}

/* Without a track the thread's begin was not recorded: nothing is lost with the end. */
void pst_trace_end(pst_runtime *runtime) {
    if (runtime == NULL || !pst__trace_on(runtime->trace)) return;
    pst__track *track = pst__track_of_thread_if_any(runtime->trace);
    if (track != NULL) pst__trace_mark_end(track);
}

void pst_trace_counter(pst_runtime *runtime, const char *name, int64_t value) {
    pst__track *track = track_of(runtime);
    if (track != NULL) pst__trace_count(track, name, pst__now(), value);
}
