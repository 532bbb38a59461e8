/* Work that stays in its start until the test lets it go. */
#ifndef PST_TESTS_SCHED_HELD_H
#define PST_TESTS_SCHED_HELD_H

#include "tests/sched/harness.h"

typedef struct held {
    int inside, released;
} held;

static inline pst_status hold(void *argument, pst_stream *stream) {
    held *self = argument;
    (void)stream;
    __atomic_store_n(&self->inside, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&self->released, __ATOMIC_ACQUIRE))
        yield_briefly();
    return PST_OK;
}

static inline void let_go(held *self) {
    __atomic_store_n(&self->released, 1, __ATOMIC_RELEASE);
}

static inline void await_inside(held *self) {
    while (!__atomic_load_n(&self->inside, __ATOMIC_ACQUIRE))
        yield_briefly();
}

static inline pst_task add_work(pst_graph *graph, pst_lane *lane, const char *name,
                                pst_status (*start)(void *, pst_stream *), void *argument) {
    const pst_task_options options = {
        .size = sizeof options, .name = name, .lane = lane, .work = {start, NULL, argument}};
    pst_task task;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

#endif
