/* One way to run a pattern: each task on the lane (stream) `column % lanes`, with an empty body or
 * an empty kernel. */
#ifndef BENCH_GPU_TASKS_H
#define BENCH_GPU_TASKS_H

#include "gpu.h"
#include "pattern.h"

#include <penstock/graph.h>

enum { TASKS_MOST_LANES = PATTERN_WIDTH };

typedef struct tasks_setting {
    bench_gpu gpu;
    pst_lane *lanes[TASKS_MOST_LANES]; /* served by the calling thread */
    size_t lane_count;
    void *kernel; /* CUfunction; NULL: bodies are empty */
    const pattern *pattern;
    pst_graph *graph; /* for the replay */
} tasks_setting;

/* Hand-written: the launches, and for each edge between streams an event and a wait. */
void bare_prepare(const tasks_setting *setting);
void bare_release(const tasks_setting *setting);
void bare_run(const tasks_setting *setting);

/* The same launch, for a task of whoever runs it. */
pst_status bare_launch(void *kernel, pst_stream *stream);

/* Penstock: `setting->graph` launched once more; a graph made, sealed, run and destroyed; one that
 * grows. */
void penstock_prepare(tasks_setting *setting);
void penstock_release(tasks_setting *setting);
void penstock_replay(const tasks_setting *setting);
void penstock_build(const tasks_setting *setting);
void penstock_grow(const tasks_setting *setting);

/* `setting->graph` made a CUDA graph, which is launched by one call. */
void captured_prepare(const tasks_setting *setting);
void captured_release(void);
void captured_run(const tasks_setting *setting);

#endif
