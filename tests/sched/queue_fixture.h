/* A pumped runtime with lanes of a queue device, a graph to fill, and what was launched and ran. */
#ifndef PST_TESTS_SCHED_QUEUE_FIXTURE_H
#define PST_TESTS_SCHED_QUEUE_FIXTURE_H

#include "tests/sched/queue_device.h"

typedef struct fixture {
    queue_device queue;
    pst_runtime *runtime;
    pst_lane *gather, *reduce, *compute, *host;
    pst_graph *graph;
    trail launched, ran;
} fixture;

static inline void note(void *context, void *argument) {
    fixture *f = context;
    f->ran.names[f->ran.length++] = ((step *)argument)->name;
}

static inline int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    queue_open(&f->queue);
    f->queue.ran = note;
    f->queue.ran_context = f;
    f->runtime = open_runtime(20000);
    f->gather = open_queue_lane(f->runtime, &f->queue, "gather", PST_LANE_PUMPED);
    f->reduce = open_queue_lane(f->runtime, &f->queue, "reduce", PST_LANE_PUMPED);
    f->compute = open_queue_lane(f->runtime, &f->queue, "compute", PST_LANE_BORROWED);
    f->host = open_lane(f->runtime, "host", PST_LANE_PUMPED);
    f->graph = open_graph(f->runtime, PST_GRAPH_SEALED, "step");
    *state = f;
    return 0;
}

static inline int teardown(void **state) {
    fixture *f = *state;
    f->queue.fail_query = f->queue.fail_record = PST_OK;
    queue_end(&f->queue, f->runtime);
    free(f);
    return 0;
}

static inline pst_task add_quiet(fixture *f, pst_graph *graph, pst_lane *lane, step *self,
                                 pst_task a, pst_task b) {
    const pst_task given[] = {a, b};
    pst_task after[2], task;
    pst_task_options options = step_options(self, lane);
    self->where = &f->launched;
    options.done = NULL;
    for (size_t i = 0; i < 2; i++)
        if (given[i].graph != NULL) after[options.after_count++] = given[i];
    options.after = after;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

static inline void turns(fixture *f, int count) {
    for (int i = 0; i < count; i++)
        (void)pst_run_once(f->runtime, NULL);
}

/* Until all is launched that can be: a turn launches something if anything can be, but its time is
 * bounded, so that on a slow machine it may be no more than one task. */
static inline void settle(fixture *f) {
    turns(f, 16);
}

static inline void finish(fixture *f) {
    int idle = 0;
    while (!idle) {
        queue_drain(&f->queue);
        (void)pst_run_once(f->runtime, &idle);
    }
}

#endif
