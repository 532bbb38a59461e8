#include "sched/report.h"

#include "sched/order.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- the cause: against the edges and the order of lanes ------------------------------ */

/* The edges, against their direction: the predecessors of node i are from[first[i], first[i + 1]).
 */
typedef struct backwards {
    uint32_t *first, *from;
} backwards;

static size_t edge_count(const pst_graph *graph) {
    return graph->nodes[graph->node_count].first_edge;
}

static void forget(const pst_graph *graph, backwards *edges) {
    const pst__heap *heap = &graph->runtime->heap;
    pst__heap_free(heap, edges->first, (graph->node_count + 1) * sizeof *edges->first);
    pst__heap_free(heap, edges->from, edge_count(graph) * sizeof *edges->from);
}

static int turn_round(const pst_graph *graph, backwards *edges) {
    const pst__heap *heap = &graph->runtime->heap;
    const size_t count = edge_count(graph);
    edges->first = pst__heap_alloc(heap, (graph->node_count + 1) * sizeof *edges->first);
    edges->from = pst__heap_alloc(heap, count * sizeof *edges->from);
    if (edges->first == NULL || edges->from == NULL) return 0;
    for (size_t e = 0; e < count; e++)
        edges->first[graph->edges[e]]++;
    uint32_t end = 0;
    for (size_t i = 0; i <= graph->node_count; i++)
        edges->first[i] = end += edges->first[i];
    /* Filled from the end, so that each `first` comes down to where its node's begin. */
    for (size_t i = graph->node_count; i-- > 0;)
        for (uint32_t e = graph->nodes[i].first_edge; e < graph->nodes[i + 1].first_edge; e++)
            edges->from[--edges->first[graph->edges[e]]] = (uint32_t)i;
    return 1;
}

/* ---- what comes before ------------------------------------------------------------------ */

static pst__task_state state_of(const pst__question *asked, pst__node *node) {
    pst_status status;
    return pst__look(&(pst__question){asked->graph, node, asked->number, 0}, &status);
}

static int is_launched(const pst__question *asked, pst__node *node) {
    return state_of(asked, node) >= PST__TASK_LAUNCHED;
}

static pst__node *unfinished_predecessor(const pst__question *asked, const backwards *edges,
                                         const pst__node *node) {
    const uint32_t index = pst__node_index(node);
    for (uint32_t e = edges->first[index]; e < edges->first[index + 1]; e++) {
        pst__node *from = &asked->graph->nodes[edges->from[e]];
        if (!pst__task_has_ended(state_of(asked, from))) return from;
    }
    return NULL;
}

/* A lane that launches in the order of adding holds a task back for the first that is missing. */
static pst__node *first_in_order(const pst__question *asked, const pst__node *node) {
    pst_graph *graph = asked->graph;
    if (node->lane == NULL || !pst__order_is_by_adding(node->lane->order)) return NULL;
    const pst__share *share = graph->share_of[node->lane->leader->index];
    for (uint32_t i = 0; i < share->count; i++) {
        pst__node *first = &graph->nodes[share->indices[i]];
        if (first == node) return NULL;
        if (!is_launched(asked, first)) return first;
    }
    return NULL;
}

/* The unfinished task that the one asked about waits for and that itself waits for none of its
 * graph; the one asked about if that is so of itself, or without memory. Takes time and memory in
 * proportion to the graph. */
static pst__node *cause_of(const pst__question *asked) {
    pst__node *cause = asked->node;
    backwards edges;
    const int is_round = turn_round(asked->graph, &edges);
    for (pst__node *before = cause; is_round && before != NULL;) {
        cause = before;
        before = unfinished_predecessor(asked, &edges, cause);
        if (before == NULL && !is_launched(asked, cause)) before = first_in_order(asked, cause);
    }
    forget(asked->graph, &edges);
    return cause;
}

/* ---- what is waited for ----------------------------------------------------------------- */

static double seconds(uint64_t nanoseconds) {
    return (double)nanoseconds / 1e9;
}

static const char *lane_of(const pst__node *node) {
    return node->lane == NULL ? "(gate)" : node->lane->name;
}

static void describe(const pst__node *node, const char *name, const char *lane, const char *state,
                     char *text) {
    (void)snprintf(text, PST__CAUSE_BYTES, "%s (lane %s, ticket %" PRIu64 "), %s", name, lane,
                   pst__node_ticket(node), state);
}

static const char *what_is_missing(const pst__question *asked, pst__node *node) {
    if (state_of(asked, node) == PST__TASK_LAUNCHED) return "which is launched and not done";
    if (node->flags & PST__NODE_GATE) return "a gate that is not open";
    return pst__node_is_ready(node) ? "which is ready and stands in its lane's queue"
                                    : "which waits for its predecessors";
}

/* What stands before a task that is ready in its lane's queue, and is of another graph. */
static void append_head(const pst__node *cause, char *text) {
    const size_t used = strlen(text);
    pst_lane *leader = cause->lane->leader;
    if (!pst__lane_try_own(leader)) {
        (void)snprintf(text + used, PST__CAUSE_BYTES - used, ", whose thread is busy");
        return;
    }
    const pst__node *head = leader->current != NULL ? leader->current : pst__lane_first(leader);
    if (head != NULL && head->graph != cause->graph)
        (void)snprintf(text + used, PST__CAUSE_BYTES - used, " behind %s of graph %s",
                       pst__node_name(head), head->graph->name);
    pst__lane_disown(leader, 0, NULL);
}

/* A sealed graph knows its edges. */
static void describe_cause(const pst__question *asked, char *text) {
    pst__node *cause = cause_of(asked);
    describe(cause, cause == asked->node ? "itself" : pst__node_name(cause), lane_of(cause),
             what_is_missing(asked, cause), text);
    if (cause->lane != NULL && !is_launched(asked, cause)) append_head(cause, text);
}

static int describe_lane(pst_lane *lane, char *text) {
    if (!pst__lane_try_own(lane->leader)) return 0;
    const pst__node *launched = lane->current != NULL ? lane->current : lane->in_flight.first;
    const pst__node *oldest = launched != NULL ? launched : pst__lane_oldest(lane);
    if (oldest != NULL)
        describe(oldest, pst__node_name(oldest), lane->name,
                 launched != NULL ? "launched and not done" : "in its lane's queue", text);
    pst__lane_disown(lane->leader, 0, NULL);
    return oldest != NULL;
}

/* A growing graph's tasks forget their predecessors: the first lane that holds something, or a gate
 * that is closed. */
static void describe_oldest(pst_graph *graph, char *text) {
    for (pst_lane *lane = pst__runtime_lanes(graph->runtime); lane != NULL; lane = lane->next)
        if (describe_lane(lane, text)) return;
    ck_spinlock_lock(&graph->lock);
    const pst__grown *gate = graph->closed_gates;
    (void)snprintf(text, PST__CAUSE_BYTES, "%s%s", gate == NULL ? "" : pst__node_name(&gate->node),
                   gate == NULL ? "a lane that another thread serves"
                                : ", a gate that is not open");
    ck_spinlock_unlock(&graph->lock);
}

/* ---- waits that time out ---------------------------------------------------------------- */

/* Of the launch, the first task of a sealed graph that has not ended; NULL: there is none. */
static pst__node *first_unended(const pst__question *asked) {
    for (size_t i = 0; i < asked->graph->node_count; i++) {
        pst__node *node = &asked->graph->nodes[i];
        if (!pst__task_has_ended(state_of(asked, node))) return node;
    }
    return NULL;
}

void pst__report_cause(const pst__question *asked, char *text) {
    pst__question first = *asked;
    text[0] = '\0';
    if (asked->graph->kind == PST_GRAPH_GROWING) {
        describe_oldest(asked->graph, text);
        return;
    }
    if (first.node == NULL) first.node = first_unended(asked);
    if (first.node != NULL) describe_cause(&first, text);
}

pst_status pst__report_timeout(const pst__question *asked) {
    const pst__node *node = asked->node;
    pst_runtime *runtime = asked->graph->runtime;
    char cause[PST__CAUSE_BYTES];
    pst__report_cause(asked, cause);
    return pst__runtime_fail(runtime, PST_ETIMEDOUT,
                             "lane %s: task %s (ticket %" PRIu64
                             ") of graph %s has not come in %.3f s: it waits for %s",
                             lane_of(node), pst__node_name(node), pst__node_ticket(node),
                             asked->graph->name, seconds(runtime->deadline_ns), cause);
}

pst_status pst__report_launch_timeout(const pst_launch *launch) {
    pst_graph *graph = launch->graph;
    pst__question asked = {graph, NULL, launch->number, 0};
    asked.node = first_unended(&asked);
    if (asked.node != NULL) return pst__report_timeout(&asked);
    char cause[PST__CAUSE_BYTES];
    describe_oldest(graph, cause);
    return pst__runtime_fail(graph->runtime, PST_ETIMEDOUT,
                             "graph %s: %u tasks have not ended in %.3f s: they wait for %s",
                             graph->name, pst__graph_count_unfinished(graph),
                             seconds(graph->runtime->deadline_ns), cause);
}

/* ---- the last launches of lanes --------------------------------------------------------- */

/* 0 also where the graph has gone, and with it the name. The caller holds the runtime's lock, so
 * that the graph stays. */
static int read_launch(const pst_lane *lane, uint64_t back, pst__logged_launch *launch) {
    if (!pst__launch_log_read(&lane->watch.launches, back, launch)) return 0;
    const pst_graph *graph = lane->runtime->graphs;
    while (graph != NULL && graph->id != launch->graph_id)
        graph = graph->next;
    return graph != NULL;
}

static void append_launches(const pst_lane *lane, char *text, size_t size) {
    pst_runtime *runtime = lane->runtime;
    pst__logged_launch launch;
    size_t used = strlen(text);
    int count = 0;
    ck_spinlock_lock(&runtime->lock);
    for (uint64_t back = 0; back < PST__LOGGED_LAUNCHES && used < size; back++) {
        if (!read_launch(lane, back, &launch)) continue;
        const int wrote = snprintf(text + used, size - used, "%s %s (ticket %" PRIu64 ")",
                                   count++ == 0 ? "; the lane's last launches, latest first:" : ",",
                                   launch.name, launch.ticket);
        used += wrote < 0 ? 0 : (size_t)wrote;
    }
    ck_spinlock_unlock(&runtime->lock);
}

void pst__report_last_launch(const pst_lane *lane, pst_recent *found) {
    pst__logged_launch launch;
    *found = (pst_recent){0};
    ck_spinlock_lock(&lane->runtime->lock);
    if (!pst__lane_is_gone(lane)) (void)snprintf(found->lane, sizeof found->lane, "%s", lane->name);
    if (found->lane[0] != '\0' && read_launch(lane, 0, &launch)) {
        found->ticket = launch.ticket;
        (void)snprintf(found->task, sizeof found->task, "%s", launch.name);
    }
    ck_spinlock_unlock(&lane->runtime->lock);
}

size_t pst_runtime_recent(pst_runtime *runtime, pst_recent *launches, size_t capacity) {
    if (runtime == NULL || launches == NULL) return 0;
    pst__logged_launch launch;
    size_t count = 0;
    ck_spinlock_lock(&runtime->lock);
    for (const pst_lane *lane = pst__runtime_lanes(runtime); lane != NULL; lane = lane->next)
        for (uint64_t back = 0; back < PST__LOGGED_LAUNCHES && count < capacity; back++) {
            if (pst__lane_is_gone(lane) || !read_launch(lane, back, &launch)) continue;
            pst_recent *found = &launches[count++];
            found->ticket = launch.ticket;
            (void)snprintf(found->lane, sizeof found->lane, "%s", lane->name);
            (void)snprintf(found->task, sizeof found->task, "%s", launch.name);
        }
    ck_spinlock_unlock(&runtime->lock);
    return count;
}

/* ---- the watchdog ----------------------------------------------------------------------- */

/* What a launched task waits for: its own work, or a task before it whose event has not come. A
 * growing task has forgotten its predecessors by then. */
static void describe_launched(const pst__node *node, char *text) {
    pst_graph *graph = node->graph;
    (void)snprintf(text, PST__CAUSE_BYTES, "its own work%s",
                   graph->kind == PST_GRAPH_GROWING ? " or for launched work of other lanes" : "");
    if (graph->kind == PST_GRAPH_GROWING) return;
    const uint64_t number = node->lane == NULL ? graph->number : pst__word_number(node->word);
    const pst__question asked = {graph, &graph->nodes[pst__node_index(node)], number, 0};
    if (cause_of(&asked) != node) describe_cause(&asked, text);
}

void pst__report_overdue(const pst_lane *lane, const pst__node *oldest, char *text, size_t size) {
    char cause[PST__CAUSE_BYTES];
    describe_launched(oldest, cause);
    (void)snprintf(text, size,
                   "lane %s: task %s (ticket %" PRIu64
                   ") of graph %s is launched and has not come to its end in %.3f s: "
                   "it waits for %s",
                   lane->name, pst__node_name(oldest), pst__node_ticket(oldest),
                   oldest->graph->name, seconds(lane->runtime->watchdog_ns), cause);
    append_launches(lane, text, size);
}

void pst__report_stuck_thread(const pst_lane *lane, char *text, size_t size) {
    (void)snprintf(text, size,
                   "lane %s: the thread that serves it has not come back in %.3f s from a task's "
                   "start, test or callback, none of which may block",
                   lane->name, seconds(lane->runtime->watchdog_ns));
    append_launches(lane, text, size);
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
        append_launches(lane, text, sizeof text);
    }
    return pst__runtime_fail(runtime, PST_ETIMEDOUT,
                             "the runtime is not destroyed: %s has not come back from a task, a "
                             "callback or a hook%s%s. Its threads and memory are left; destroy it "
                             "again when that has ended",
                             text[0] == '\0' ? "a thread" : "the thread of a lane",
                             text[0] == '\0' ? "" : ": ", text);
}
