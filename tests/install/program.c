/* A user's program: one graph of two tasks, built against an installed Penstock. */
#include <penstock/graph.h>
#include <stdio.h>

static pst_status append(void *argument, pst_stream *stream) {
    (void)stream;
    char **end = argument;
    *(*end)++ = 'x';
    return PST_OK;
}

static pst_status run_two_tasks(pst_runtime *runtime, char **end) {
    pst_lane_options options = {.size = sizeof(options), .name = "host", .mode = PST_LANE_PUMPED};
    pst_lane *lane;
    pst_status status = pst_lane_create(runtime, &options, &lane);
    if (status != PST_OK) return status;
    pst_graph *graph;
    status = pst_graph_create(runtime, PST_GRAPH_SEALED, "outside", &graph);
    if (status != PST_OK) return status;
    pst_task_options task = {
        .size = sizeof(task), .name = "append", .lane = lane, .work = {append, NULL, end}};
    pst_task first, second;
    pst_launch launch;
    if ((status = pst_graph_add(graph, &task, &first)) == PST_OK &&
        (task.after = &first, task.after_count = 1,
         status = pst_graph_add(graph, &task, &second)) == PST_OK &&
        (status = pst_graph_seal(graph)) == PST_OK &&
        (status = pst_graph_launch(graph, &launch)) == PST_OK)
        status = pst_launch_wait(launch);
    pst_graph_destroy(graph);
    return status;
}

int main(void) {
    char text[3] = "";
    char *end = text;
    pst_runtime *runtime;
    pst_status status = pst_runtime_create(NULL, &runtime);
    if (status == PST_OK) status = run_two_tasks(runtime, &end);
    pst_runtime_destroy(runtime);
    printf("%s %s\n", pst_status_name(status), text);
    return status == PST_OK && end - text == 2 ? 0 : 1;
}
