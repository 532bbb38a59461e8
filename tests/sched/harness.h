/* What the scheduler's tests share: a runtime, its lanes, tasks that write down what they did. */
#ifndef PST_TESTS_SCHED_HARNESS_H
#define PST_TESTS_SCHED_HARNESS_H

#include "tests/cmocka_all.h"
#include "tests/threads.h"

#include <penstock/graph.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define assert_ok(call)             assert_int_equal((call), PST_OK)
#define assert_status(call, status) assert_int_equal((call), (status))

static inline void yield_briefly(void) {
    (void)sched_yield();
}

/* ---- runtimes and lanes ----------------------------------------------------------------- */

static inline pst_runtime *open_runtime(uint64_t deadline_ms) {
    const pst_runtime_options options = {.size = sizeof options,
                                         .rank = 3,
                                         .world_size = 4,
                                         .spin = 50,
                                         .deadline_ns = deadline_ms * 1000000u,
                                         .task_capacity = 16};
    pst_runtime *runtime = NULL;
    assert_ok(pst_runtime_create(&options, &runtime));
    return runtime;
}

static inline pst_lane *open_lane(pst_runtime *runtime, const char *name, pst_lane_mode mode) {
    const pst_lane_options options = {.size = sizeof options, .name = name, .mode = mode};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    return lane;
}

static inline pst_lane *open_lane_in_order(pst_runtime *runtime, const char *name,
                                           pst_lane_mode mode) {
    const pst_lane_options options = {
        .size = sizeof options, .name = name, .mode = mode, .order = PST_LANE_BY_SUBMISSION};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    return lane;
}

static inline pst_graph *open_graph(pst_runtime *runtime, pst_graph_kind kind, const char *name) {
    pst_graph *graph = NULL;
    assert_ok(pst_graph_create(runtime, kind, name, &graph));
    return graph;
}

static inline void pump(pst_runtime *runtime) {
    int idle = 0;
    while (!idle)
        assert_int_not_equal(pst_run_once(runtime, &idle), PST_EINVAL);
}

/* The texts that the last error of the runtime must have in it. */
static inline void assert_error_names(const pst_runtime *runtime, const char *const *names,
                                      size_t count) {
    char text[1024];
    (void)pst_runtime_error(runtime, text, sizeof text);
    for (size_t i = 0; i < count; i++)
        if (strstr(text, names[i]) == NULL)
            fail_msg("\"%s\" is not in the error text \"%s\"", names[i], text);
}
#define assert_error(runtime, ...)                                                                 \
    assert_error_names((runtime), (const char *const[]){__VA_ARGS__},                              \
                       sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

/* ---- tasks that leave a trail ----------------------------------------------------------- */

#define TRAIL_MAX 4096

/* Names of tasks in the order in which they ran. */
typedef struct trail {
    size_t length;
    const char *names[TRAIL_MAX];
} trail;

typedef struct step {
    trail *where;
    const char *name;
    pst_status result; /* what start answers */
    int asks;          /* how often `test` answers PST_PENDING; start answers PST_PENDING if > 0 */
    int runs, callbacks;
    pst_status reported;
} step;

static inline pst_status step_start(void *argument, pst_stream *stream) {
    step *self = argument;
    const int pending = __atomic_load_n(&self->asks, __ATOMIC_ACQUIRE) != 0;
    (void)stream;
    if (self->where != NULL) {
        const size_t at = __atomic_fetch_add(&self->where->length, 1, __ATOMIC_ACQ_REL);
        self->where->names[at % TRAIL_MAX] = self->name;
    }
    __atomic_fetch_add(&self->runs, 1, __ATOMIC_ACQ_REL);
    return pending ? PST_PENDING : self->result;
}

static inline pst_status step_test(void *argument) {
    step *self = argument;
    const int left = __atomic_load_n(&self->asks, __ATOMIC_ACQUIRE);
    if (left < 0) return PST_PENDING; /* for ever */
    if (left > 0) {
        __atomic_store_n(&self->asks, left - 1, __ATOMIC_RELEASE);
        return PST_PENDING;
    }
    return self->result;
}

static inline void step_done(void *argument, pst_status status) {
    step *self = argument;
    self->reported = status;
    __atomic_fetch_add(&self->callbacks, 1, __ATOMIC_ACQ_REL);
}

static inline int runs_of(const step *self) {
    return __atomic_load_n(&self->runs, __ATOMIC_ACQUIRE);
}

static inline int callbacks_of(const step *self) {
    return __atomic_load_n(&self->callbacks, __ATOMIC_ACQUIRE);
}

static inline pst_task_options step_options(step *self, pst_lane *lane) {
    return (pst_task_options){.size = sizeof(pst_task_options),
                              .name = self->name,
                              .lane = lane,
                              .work = {step_start, step_test, self},
                              .done = step_done,
                              .done_argument = self};
}

/* Behind `after`, if that is one. */
static inline pst_task add_with_ticket(pst_graph *graph, pst_lane *lane, step *self,
                                       uint64_t ticket, pst_task after) {
    pst_task_options options = step_options(self, lane);
    pst_task task;
    options.ticket = ticket;
    options.after = &after;
    options.after_count = after.graph != NULL;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

/* Adds the step behind up to three tasks (those whose graph is NULL do not count). */
static inline pst_task add_step(pst_graph *graph, pst_lane *lane, step *self, pst_task a,
                                pst_task b, pst_task c) {
    const pst_task given[] = {a, b, c};
    pst_task after[3];
    pst_task_options options = step_options(self, lane);
    for (size_t i = 0; i < 3; i++)
        if (given[i].graph != NULL) after[options.after_count++] = given[i];
    options.after = after;
    pst_task task;
    assert_ok(pst_graph_add(graph, &options, &task));
    return task;
}

#define NO_TASK ((pst_task){NULL, 0})

static inline void assert_trail(const trail *got, const char *const *names, size_t count) {
    assert_int_equal(got->length, count);
    for (size_t i = 0; i < count; i++)
        assert_string_equal(got->names[i], names[i]);
}
#define assert_ran(got, ...)                                                                       \
    assert_trail((got), (const char *const[]){__VA_ARGS__},                                        \
                 sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

#endif
