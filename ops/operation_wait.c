/* Waiting for collectives: compute for their results, the host for their launch or their end. */
#include "ops/operation.h"

#include "base/clock.h"
#include "sched/runtime.h"
#include "sched/wait.h"

#include <stdio.h>
#include <time.h>

/* A waiter may be ahead of the callback that makes the error's text. */
static void let_callback_run(const pst__operation *operation) {
    const struct timespec pause = {0, 50000};
    for (int i = 0; i < 2000 && !pst__load_acquire(&operation->ended); i++)
        (void)nanosleep(&pause, NULL); /* the acquire pairs with the release in ended */
}

pst_status pst__operation_check_comms(pst_zero *engine) {
    char text[2 * PST__ERROR_BYTES];
    for (int lane = 0; engine->asynchronous && lane < PST__LANE_COUNT; lane++) {
        pst_comm *comm = pst__queue_of(engine, (pst__lane_index)lane)->comm;
        if (comm->ops->status == NULL) continue;
        pst_status status = comm->ops->status(comm);
        if (status == PST_OK) continue;
        (void)snprintf(text, sizeof text, "rank %zu, engine '%s': communicator %s: %s",
                       engine->rank, engine->name, comm->ops->name, comm->ops->error_text(comm));
        pst_runtime_poison(engine->runtime, status, text);
    }
    return pst_runtime_status(engine->runtime);
}

pst_status pst__operation_lost(pst_zero *engine, pst_status status) {
    if (status != PST_ETIMEDOUT) return status;
    char text[PST__ERROR_BYTES];
    (void)pst_runtime_error(engine->runtime, text, sizeof text);
    (void)pst__operation_check_comms(engine);
    pst_runtime_poison(engine->runtime, status, text);
    return engine->asynchronous ? pst_runtime_status(engine->runtime) : status;
}

static void trace_wait(pst_zero *engine, const pst__operation *operation, const char *name,
                       uint64_t begin, uint64_t end) {
    pst__trace *trace = pst__runtime_trace(engine->runtime);
    if (!pst__trace_on(trace)) return;
    pst__track *track = pst__track_of_thread(trace);
    if (track != NULL)
        pst__trace_slice(track, name, begin, end, operation->work.collective.ticket, 0);
}

/* The compute stream is given the wait. */
static pst_status wait_on_stream(pst__operation *operation) {
    pst_zero *engine = operation->engine;
    pst_device *device = engine->device;
    pst_status status = device->ops->stream_wait(device, engine->compute, operation->finished);
    if (status == PST_OK) return PST_OK;
    return pst__zero_fail(engine, status, "compute could not wait for '%s'",
                          operation->work.collective.name);
}

/* name NULL: untraced. */
static pst_status wait_on_host(pst__operation *operation, const char *name,
                               pst__lane_index direction) {
    pst_zero *engine = operation->engine;
    pst_launch launch = {engine->graph, 0};
    int was_over = pst_task_test(launch, operation->task) != PST_PENDING;
    uint64_t begin = was_over ? 0 : pst__now();
    pst_status status = pst_task_wait(launch, operation->task, engine->options.compute);
    if (!was_over) {
        uint64_t end = pst__now();
        *(direction == PST__GATHER_LANE ? &engine->stats.exposed_gather_ns
                                        : &engine->stats.exposed_reduce_ns) += end - begin;
        if (name != NULL) trace_wait(engine, operation, name, begin, end);
    }
    if (status < 0 && status != PST_ETIMEDOUT) let_callback_run(operation);
    return pst__operation_lost(engine, status);
}

pst_status pst__operation_wait(pst__operation *operation, const char *name,
                               pst__lane_index direction) {
    pst_zero *engine = operation->engine;
    if (operation->is_waited) return PST_OK;
    int on_stream = engine->asynchronous && pst__operation_is_launched(operation);
    if (engine->asynchronous && !on_stream) engine->stats.late_launches++;
    const pst__stall *stall =
        pst__stall_begin(&engine->stalls, name, operation->work.collective.ticket,
                         direction == PST__GATHER_LANE ? &engine->stats.device_gather_ns
                                                       : &engine->stats.device_reduce_ns);
    /* What the stream waits, if that is timed, and else what the host waits for it. */
    const char *traced = stall == NULL ? name : NULL;
    pst_status status =
        on_stream ? wait_on_stream(operation) : wait_on_host(operation, traced, direction);
    pst__stall_end(&engine->stalls, stall);
    operation->is_waited = status == PST_OK;
    return status;
}

pst_status pst__operation_wait_end(const pst__operation *operation) {
    pst_zero *engine = operation->engine;
    pst_status status = pst_task_wait((pst_launch){engine->graph, 0}, operation->task, NULL);
    if (status == PST_OK) return pst_runtime_status(engine->runtime);
    return pst__operation_lost(engine, status);
}

pst_status pst__operation_wait_launch(pst__operation *operation) {
    pst_zero *engine = operation->engine;
    if (engine->asynchronous && pst__operation_is_launched(operation)) return PST_OK;
    engine->stats.late_launches += (uint64_t)engine->asynchronous;
    return pst__operation_lost(
        engine, pst__task_wait_launch((pst_launch){engine->graph, 0}, operation->task));
}
