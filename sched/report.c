/* Why a wait was in vain: the text names the task, and the one that all others wait for. */
#include "sched/report.h"

#include "sched/cause.h"
#include "sched/growing.h"
#include "sched/order.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TEXT_BYTES 512

static int is_unfinished(const pst__question *asked, pst__node *node) {
    pst_status status;
    const pst__question other = {asked->graph, node, asked->number, 0};
    return !pst__task_has_ended(pst__look(&other, &status));
}

static double seconds_of(const pst_runtime *runtime) {
    return (double)runtime->deadline_ns / 1e9;
}

static const char *lane_of(const pst__node *node) {
    return node->lane == NULL ? "(gate)" : node->lane->name;
}

/* ---- sealed graphs: against the edges --------------------------------------------------- */

static const char *what_is_missing(const pst__question *asked, pst__node *node) {
    pst_status status;
    const pst__question other = {asked->graph, node, asked->number, 0};
    if (pst__look(&other, &status) == PST__TASK_LAUNCHED) return "which is launched and not done";
    if (node->flags & PST__NODE_GATE) return "a gate that is not open";
    return pst__node_is_ready(node) ? "which is ready and stands in its lane's queue"
                                    : "which waits for its predecessors";
}

/* What stands before a task that is ready in its lane's queue, and is of another graph. */
static void append_head(const pst__node *cause, char *text) {
    const size_t used = strlen(text);
    pst_lane *leader = cause->lane->leader;
    if (!pst__lane_try_own(leader)) {
        (void)snprintf(text + used, TEXT_BYTES - used, ", whose thread is busy");
        return;
    }
    const pst__node *head = leader->current != NULL ? leader->current : pst__lane_first(leader);
    if (head != NULL && head->graph != cause->graph)
        (void)snprintf(text + used, TEXT_BYTES - used, " behind %s of graph %s",
                       pst__node_name(head), head->graph->name);
    pst__lane_disown(leader, 0, NULL);
}

static void describe_cause(const pst__question *asked, char *text) {
    pst__node *cause = pst__cause_of(asked);
    (void)snprintf(text, TEXT_BYTES, "%s (lane %s, ticket %" PRIu64 "), %s",
                   cause == asked->node ? "itself" : pst__node_name(cause), lane_of(cause),
                   pst__node_ticket(cause), what_is_missing(asked, cause));
    if (cause->lane != NULL && !pst__cause_is_launched(asked, cause)) append_head(cause, text);
}

/* ---- growing graphs: the lanes, and gates that are not open ----------------------------- */

static const pst__node *oldest_of(pst_lane *lane, const char **what) {
    *what = "launched and not done";
    if (lane->current != NULL) return lane->current;
    if (lane->flight_first != NULL) return lane->flight_first;
    *what = "in its lane's queue";
    if (lane->levels.occupied != 0) return pst__levels_head(&lane->levels);
    const pst__node *first = lane->ready.first;
    return first == NULL || (first->flags & PST__NODE_BATCH) ? NULL : first;
}

static int describe_lane(pst_lane *lane, char *text) {
    const char *what;
    if (!pst__lane_try_own(lane->leader)) return 0;
    const pst__node *node = oldest_of(lane, &what);
    if (node != NULL)
        (void)snprintf(text, TEXT_BYTES, "%s (lane %s, ticket %" PRIu64 "), %s",
                       pst__node_name(node), lane->name, pst__node_ticket(node), what);
    pst__lane_disown(lane->leader, 0, NULL);
    return node != NULL;
}

static int describe_gate(pst_graph *graph, char *text) {
    ck_spinlock_lock(&graph->lock);
    const pst__grown *gate = graph->open_gates;
    if (gate != NULL)
        (void)snprintf(text, TEXT_BYTES, "%s, a gate that is not open",
                       pst__node_name(&gate->node));
    ck_spinlock_unlock(&graph->lock);
    return gate != NULL;
}

static void describe_oldest(pst_graph *graph, char *text) {
    for (pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != NULL; lane = lane->next)
        if (describe_lane(lane, text)) return;
    if (!describe_gate(graph, text))
        (void)snprintf(text, TEXT_BYTES, "a lane that another thread serves");
}

/* ---- the reports ------------------------------------------------------------------------ */

pst_status pst__report_timeout(const pst__question *asked) {
    const pst__node *node = asked->node;
    char cause[TEXT_BYTES];
    if (asked->graph->kind == PST_GRAPH_SEALED)
        describe_cause(asked, cause);
    else
        describe_oldest(asked->graph, cause);
    return pst__runtime_fail(asked->graph->runtime, PST_ETIMEDOUT,
                             "lane %s: task %s (ticket %" PRIu64
                             ") of graph %s has not come in %.3f s: it waits for %s",
                             lane_of(node), pst__node_name(node), pst__node_ticket(node),
                             asked->graph->name, seconds_of(asked->graph->runtime), cause);
}

pst_status pst__report_launch_timeout(const pst_launch *launch) {
    pst_graph *graph = launch->graph;
    pst__question asked = {graph, NULL, launch->number, 0};
    for (size_t i = 0; i < graph->node_count && asked.node == NULL; i++)
        if (is_unfinished(&asked, &graph->nodes[i])) asked.node = &graph->nodes[i];
    if (asked.node != NULL) return pst__report_timeout(&asked);
    char cause[TEXT_BYTES];
    describe_oldest(graph, cause);
    return pst__runtime_fail(graph->runtime, PST_ETIMEDOUT,
                             "graph %s: %u tasks have not ended in %.3f s: they wait for %s",
                             graph->name, pst__graph_count_unfinished(graph),
                             seconds_of(graph->runtime), cause);
}

/* ---- the watchdog ----------------------------------------------------------------------- */

static double watchdog_seconds(const pst_lane *lane) {
    return (double)lane->runtime->watchdog_ns / 1e9;
}

/* What a launched task waits for: its own work, or a task before it whose event has not come. A
 * growing task has forgotten its predecessors by then. */
static void describe_launched(const pst__node *node, char *text) {
    pst_graph *graph = node->graph;
    (void)snprintf(text, TEXT_BYTES, "its own work%s",
                   graph->kind == PST_GRAPH_GROWING ? " or for launched work of other lanes" : "");
    if (graph->kind == PST_GRAPH_GROWING) return;
    const uint64_t number = node->lane == NULL ? graph->number : pst__word_number(node->word);
    const pst__question asked = {graph, &graph->nodes[pst__node_index(node)], number, 0};
    if (pst__cause_of(&asked) != node) describe_cause(&asked, text);
}

/* The caller holds the runtime's lock, so that the graph and with it the name stay. */
static int is_alive(const pst_runtime *runtime, uint64_t graph_id) {
    const pst_graph *graph = runtime->graphs;
    while (graph != NULL && graph->id != graph_id)
        graph = graph->next;
    return graph != NULL;
}

static int read_recent(const pst_lane *lane, uint64_t back, pst__recent_launch *launch) {
    return pst__recent_read(&lane->recent, back, launch) &&
           is_alive(lane->runtime, launch->graph_id);
}

static void append_recent(const pst_lane *lane, char *text, size_t size) {
    pst_runtime *runtime = lane->runtime;
    pst__recent_launch launch;
    size_t used = strlen(text);
    int count = 0;
    ck_spinlock_lock(&runtime->lock);
    for (uint64_t back = 0; back < PST__RECENT && used < size; back++) {
        if (!read_recent(lane, back, &launch)) continue;
        const int wrote = snprintf(text + used, size - used, "%s %s (ticket %" PRIu64 ")",
                                   count++ == 0 ? "; the lane's last launches, latest first:" : ",",
                                   launch.name, launch.ticket);
        used += wrote < 0 ? 0 : (size_t)wrote;
    }
    ck_spinlock_unlock(&runtime->lock);
}

size_t pst_runtime_recent(pst_runtime *runtime, pst_recent *launches, size_t capacity) {
    if (runtime == NULL || launches == NULL) return 0;
    pst__recent_launch launch;
    size_t count = 0;
    ck_spinlock_lock(&runtime->lock);
    for (const pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next)
        for (uint64_t back = 0; back < PST__RECENT && count < capacity; back++) {
            if (pst__lane_is_gone(lane) || !read_recent(lane, back, &launch)) continue;
            pst_recent *found = &launches[count++];
            found->ticket = launch.ticket;
            (void)snprintf(found->lane, sizeof found->lane, "%s", lane->name);
            (void)snprintf(found->task, sizeof found->task, "%s", launch.name);
        }
    ck_spinlock_unlock(&runtime->lock);
    return count;
}

void pst__report_overdue(const pst_lane *lane, const pst__node *oldest, char *text, size_t size) {
    char cause[TEXT_BYTES];
    describe_launched(oldest, cause);
    (void)snprintf(text, size,
                   "lane %s: task %s (ticket %" PRIu64
                   ") of graph %s is launched and has not come to its end in %.3f s: "
                   "it waits for %s",
                   lane->name, pst__node_name(oldest), pst__node_ticket(oldest),
                   oldest->graph->name, watchdog_seconds(lane), cause);
    append_recent(lane, text, size);
}

void pst__report_stuck_thread(const pst_lane *lane, char *text, size_t size) {
    (void)snprintf(text, size,
                   "lane %s: the thread that serves it has not come back in %.3f s from a task's "
                   "start, test or callback, none of which may block",
                   lane->name, watchdog_seconds(lane));
    append_recent(lane, text, size);
}

/* ---- what a destroy leaves behind ------------------------------------------------------------ */

pst_status pst__report_left_behind(pst_runtime *runtime) {
    char text[PST__REPORT_BYTES] = "";
    for (const pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next) {
        const size_t used = strlen(text);
        /* Relaxed: for a text. */
        if (pst__load_relaxed(&lane->owned) != 1 || sizeof text - used < 64) continue;
        (void)snprintf(text + used, sizeof text - used, "%slane %s", used == 0 ? "" : "; ",
                       lane->name);
        append_recent(lane, text, sizeof text);
    }
    return pst__runtime_fail(runtime, PST_ETIMEDOUT,
                             "the runtime is not destroyed: %s has not come back from a task, a "
                             "callback or a hook: %s. Its threads and memory are left; destroy it "
                             "again when that has ended",
                             text[0] == '\0' ? "a thread" : "the thread of a lane", text);
}
