/* Operations on their way out: how they are submitted, and what their tasks do on the lanes'
 * threads. Three ways lead there: a task of the growing graph, a step of a program, and a launch by
 * the calling thread within a capture. */
#include "ops/transfer/operation.h"

#include "base/atomic.h"
#include "sched/runtime.h"

#include <stdio.h>

/* ---- on the worker --------------------------------------------------------------------------- */

static int has_second_part(const pst__operation *operation) {
    return operation->work.combine_apart || operation->then != NULL;
}

static pst_lane *second_lane(const pst__operation *operation) {
    return operation->then != NULL ? operation->queue->then_lane : operation->queue->sum_lane;
}

/* The last part is on its stream: from here on the executor's thread needs no answer any more. */
static pst_status note_launch(pst__operation *operation, pst_stream *stream) {
    pst__carrier *carrier = operation->carrier;
    pst_status status =
        carrier->device->ops->event_record(carrier->device, operation->finished, stream);
    if (status != PST_OK) {
        /* It runs, and nobody could know when it ends. */
        pst_runtime_poison(carrier->runtime, status, "a collective's event could not be recorded");
        return status;
    }
    /* Pairs with the acquire in is_launched: who sees it may wait for `finished`. */
    pst__store_release(&operation->launched, 1);
    return PST_OK;
}

/* The acquire pairs with the release in abandon_all: the communicator may be gone. */
static int is_abandoned(const pst__operation *operation) {
    return pst__load_acquire(&operation->carrier->is_abandoned);
}

static pst_status wait_for_all(const pst__operation *operation, pst_stream *stream) {
    pst_device *device = operation->carrier->device;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < operation->after_count; i++)
        status = device->ops->stream_wait(device, stream, operation->after[i]);
    return status;
}

static void note_end(const pst__operation *operation, pst_stream *stream) {
    if (!operation->goes_on) pst__timing_note(operation->timing, PST__ENDED, stream);
}

static pst_status note_source_ended(const pst__operation *operation, pst_stream *stream) {
    pst_device *device = operation->carrier->device;
    if (operation->source_ended == NULL) return PST_OK;
    return device->ops->event_record(device, operation->source_ended, stream);
}

static pst_status start(void *argument, pst_stream *stream) {
    pst__operation *operation = argument;
    if (is_abandoned(operation)) return PST_ECANCELED;
    pst_work work = pst_collective_as_work(&operation->work);
    pst_status status = wait_for_all(operation, stream);
    if (operation->after_count > 0) pst_task_begins();
    if (status == PST_OK && operation->make_source != NULL)
        status = operation->make_source(operation, stream);
    pst__timing_note(operation->timing, PST__BEGAN, stream);
    if (status == PST_OK) status = work.start(work.argument, stream);
    if (status == PST_OK) status = note_source_ended(operation, stream);
    if (status != PST_OK || has_second_part(operation)) return status;
    note_end(operation, stream);
    return operation->carrier->asynchronous ? note_launch(operation, stream) : PST_OK;
}

static pst_status test(void *argument) {
    pst__operation *operation = argument;
    if (is_abandoned(operation)) return PST_ECANCELED;
    pst_work work = pst_collective_as_work(&operation->work);
    const pst_status status = work.test(work.argument);
    if (status == PST_OK && !has_second_part(operation)) note_end(operation, NULL);
    return status;
}

static pst_status combine(pst__operation *operation, pst_stream *stream) {
    pst_work work = pst_combine_as_work(&operation->work);
    return work.start(work.argument, stream);
}

static pst_status start_second(void *argument, pst_stream *stream) {
    pst__operation *operation = argument;
    if (is_abandoned(operation)) return PST_ECANCELED;
    pst_status status = operation->work.combine_apart ? combine(operation, stream) : PST_OK;
    if (status == PST_OK && operation->then != NULL) status = operation->then(operation, stream);
    if (status != PST_OK) return status;
    note_end(operation, stream);
    return operation->carrier->asynchronous ? note_launch(operation, stream) : PST_OK;
}

static void poison(const pst__operation *operation, pst_status status) {
    const pst_collective *collective = &operation->work.collective;
    pst_comm *comm = operation->work.comm;
    char text[PST__ERROR_BYTES];
    (void)snprintf(text, sizeof text, "rank %zu, engine '%s': %s of '%s' (ticket %llu) failed: %s",
                   pst__carrier_number(operation->carrier), operation->carrier->name,
                   pst_collective_name(collective->kind), collective->name,
                   (unsigned long long)collective->ticket, comm->ops->error_text(comm));
    pst_runtime_poison(operation->carrier->runtime, status, text);
}

/* A collective that an abort or a failure has let go ends, too, but with no result. */
static void check_result(pst__operation *operation) {
    pst_comm *comm = operation->work.comm;
    if (!operation->carrier->asynchronous || comm->ops->status == NULL) return;
    pst_status status = comm->ops->status(comm);
    if (status == PST_OK) return;
    pst__store_relaxed(&operation->failed, 1);
    poison(operation, status);
}

static void finish_part(pst__operation *operation) {
    /* The last one sees what the others did. */
    if (pst__sub_acq_rel(&operation->unfinished, 1) != 1) return;
    const pst_status failure = (pst_status)pst__load_relaxed(&operation->failure);
    if (failure != PST_OK) poison(operation, failure);
    if (!pst__load_relaxed(&operation->failed)) check_result(operation);
    if (operation->done != NULL && !pst__load_relaxed(&operation->failed))
        operation->done(operation);
    /* Pairs with the acquire in reap: all that the callback did has ended when the memory is
     * reused. */
    pst__store_release(&operation->ended, 1);
}

/* A task of it has ended. It never ran, or was abandoned, when the runtime was poisoned before:
 * then that error has been reported. The relaxed stores are published by the decrement. */
static void ended(void *argument, pst_status status) {
    pst__operation *operation = argument;
    if (status < 0) {
        pst__store_relaxed(&operation->failed, 1);
        if (operation->work.status == status) pst__store_relaxed(&operation->failure, (int)status);
    }
    finish_part(operation);
}

/* ---- submitting ------------------------------------------------------------------------------ */

#define EVENTS_A_TASK 4u

/* A task takes four events; tasks without work, in front of it on the same lane, take the rest. */
static pst_status wait_for_events(pst__operation *operation, pst_event *const **after,
                                  size_t *after_count) {
    while (*after_count > EVENTS_A_TASK) {
        pst_task_options options = {.size = sizeof options,
                                    .name = operation->work.collective.name,
                                    .lane = operation->queue->lane,
                                    .after_events = *after,
                                    .after_event_count = EVENTS_A_TASK};
        pst_status status = pst_graph_add(operation->carrier->graph, &options, NULL);
        if (status != PST_OK) return status;
        *after += EVENTS_A_TASK;
        *after_count -= EVENTS_A_TASK;
    }
    return PST_OK;
}

static pst_status take_staging(pst__operation *operation) {
    pst_collective *collective = &operation->work.collective;
    pst_comm *comm = operation->work.comm;
    size_t bytes = comm->ops->staging_bytes(comm, collective);
    if (collective->staging != NULL || bytes == 0) return PST_OK;
    pst_status status = pst_arena_acquire(operation->carrier->staging, bytes, &operation->staging);
    collective->staging = operation->staging.memory;
    return status;
}

static pst_work work_of(pst__operation *operation) {
    const int ends_later = !operation->carrier->asynchronous;
    return (pst_work){.start = start, .test = ends_later ? test : NULL, .argument = operation};
}

static const char *path_of(pst__operation *operation) {
    return pst_comm_path(operation->work.comm, &operation->work.collective);
}

/* The sums of a reduction, on a lane of their own behind the chunks' arrival; or what else comes
 * behind the collective. */
static pst_status add_second_part(pst__operation *operation, size_t bytes) {
    pst_task arrival = operation->task;
    const pst_collective *collective = &operation->work.collective;
    pst_task_options options = {.size = sizeof options,
                                .name = collective->name,
                                .lane = second_lane(operation),
                                .work = {.start = start_second, .argument = operation},
                                .after = &arrival,
                                .after_count = 1,
                                .done = ended,
                                .done_argument = operation,
                                .ticket = collective->ticket,
                                .bytes = bytes,
                                .path = path_of(operation)};
    pst_status status = pst_graph_add(operation->carrier->graph, &options, &operation->task);
    if (status == PST_OK) {
        pst_task_release(arrival);
        return PST_OK;
    }
    /* The first part goes on alone, and is what is waited for: the second never comes. */
    operation->task = arrival;
    pst_runtime_poison(operation->carrier->runtime, status,
                       "the second part of a collective got no task");
    pst__store_relaxed(&operation->failed, 1);
    finish_part(operation);
    return PST_OK;
}

/* Whoever submits it publishes this. */
static void prepare(pst__operation *operation) {
    pst_collective *collective = &operation->work.collective;
    collective->ticket = operation->queue->tickets + 1;
    operation->work.combine_apart =
        operation->queue->sum_lane != NULL && collective->kind == PST_REDUCE_SCATTER;
    operation->unfinished = 1 + has_second_part(operation);
}

static pst_status add_task(pst__operation *operation, size_t bytes, pst_event *const *after,
                           size_t after_count) {
    const pst_collective *collective = &operation->work.collective;
    pst_status status = wait_for_events(operation, &after, &after_count);
    if (status != PST_OK) return status;
    pst_task_options options = {.size = sizeof options,
                                .name = collective->name,
                                .lane = operation->queue->lane,
                                .work = work_of(operation),
                                .after = operation->behind ? &operation->behind->task : NULL,
                                .after_count = operation->behind != NULL,
                                .after_events = after,
                                .after_event_count = after_count,
                                .done = ended,
                                .done_argument = operation,
                                .ticket = collective->ticket,
                                .bytes = bytes,
                                .path = path_of(operation)};
    status = pst_graph_add(operation->carrier->graph, &options, &operation->task);
    if (status != PST_OK) return status;
    operation->queue->tickets++;
    return has_second_part(operation) ? add_second_part(operation, bytes) : PST_OK;
}

/* Within a capture the calling thread launches: `after`, then the call. */
static pst_status launch_on(pst__operation *operation, const pst_lane *lane,
                            pst_status (*call)(void *argument, pst_stream *stream),
                            pst_event *const *after, size_t after_count) {
    pst_device *device = operation->carrier->device;
    pst_stream *stream = pst_lane_stream(lane);
    const pst_work work = {.start = call, .argument = operation};
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < after_count; i++)
        status = device->ops->stream_wait(device, stream, after[i]);
    return status == PST_OK ? device->ops->launch(device, stream, &work) : status;
}

static pst_status launch_captured(pst__operation *operation, pst_event *const *after,
                                  size_t after_count) {
    pst__queue *queue = operation->queue;
    pst_collective *collective = &operation->work.collective;
    pst_device *device = operation->carrier->device;
    if (queue->captured_tickets == PST_MOST_CAPTURED)
        return pst__carrier_fail(operation->carrier, PST_EUNSUPPORTED,
                                 "more than %u collectives in a graph", PST_MOST_CAPTURED);
    collective->ticket =
        PST_TICKET_CAPTURED(operation->carrier->captures, queue->captured_tickets + 1);
    operation->work.combine_apart =
        queue->sum_lane != NULL && collective->kind == PST_REDUCE_SCATTER;
    pst_status status = launch_on(operation, queue->lane, start, after, after_count);
    if (status == PST_OK) queue->captured_tickets++;
    if (status == PST_OK && has_second_part(operation)) {
        status = device->ops->event_record(device, operation->ready, pst_lane_stream(queue->lane));
        if (status == PST_OK)
            status =
                launch_on(operation, second_lane(operation), start_second, &operation->ready, 1);
    }
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail(operation->carrier, status, "%s of '%s' could not be captured: %s",
                             pst_collective_name(collective->kind), collective->name,
                             queue->comm->ops->error_text(queue->comm));
}

/* ---- steps of a program ---------------------------------------------------------------------- */

const pst__operation_calls *pst__operation_calls_of(const pst__carrier *carrier) {
    static const pst__operation_calls on_streams = {start, start_second, NULL, ended};
    static const pst__operation_calls on_host = {start, start_second, test, ended};
    return carrier->asynchronous ? &on_streams : &on_host;
}

void pst__operation_leave_program(pst__carrier *carrier) {
    if (carrier->program != NULL) pst__program_leave(carrier->program);
    carrier->program = NULL;
    carrier->script.is_open = 0;
}

static pst_status give_to_program(pst__operation *operation, pst_event *const *after,
                                  size_t after_count) {
    for (size_t i = 0; i < after_count; i++)
        operation->after[operation->after_count++] = after[i];
    const pst_status status =
        pst__program_give(operation->carrier->program, operation, operation->work.collective.ticket,
                          &operation->launch, &operation->task);
    if (status == PST_OK) operation->queue->tickets++;
    return status;
}

/* The pass goes on without its program where it submits something else; and where the host would
 * have to wait for an event, which no stream of a host lane does. */
static pst_status add(pst__operation *operation, size_t bytes, pst_event *const *after,
                      size_t after_count) {
    pst__carrier *carrier = operation->carrier;
    prepare(operation);
    const pst__submission line = {.name = operation->work.collective.name,
                                  .path = path_of(operation),
                                  .lane = operation->queue->lane,
                                  .second_lane =
                                      has_second_part(operation) ? second_lane(operation) : NULL,
                                  .is_behind = operation->behind != NULL,
                                  .bytes = bytes,
                                  .kind = (int)operation->work.collective.kind};
    pst__script_note(carrier->heap, &carrier->script, &line);
    if (carrier->program != NULL && pst__program_expects(carrier->program, &line) &&
        (carrier->asynchronous || after_count == 0))
        return give_to_program(operation, after, after_count);
    if (carrier->program != NULL) pst__operation_leave_program(carrier);
    return add_task(operation, bytes, after, after_count);
}

static void enqueue(pst__queue *queue, pst__operation *operation) {
    if (queue->oldest == NULL)
        queue->oldest = operation;
    else
        queue->newest->next = operation;
    queue->newest = operation;
    if (queue->holding == NULL) queue->holding = operation;
}

/* On the host device an event may be recorded again only while no task is to wait for it: what is
 * done there, as the calling thread's events are at once, is not waited for. */
static size_t add_events(const pst__carrier *carrier, pst_event *const *events, size_t event_count,
                         pst_event **all, size_t count) {
    for (size_t i = 0; i < event_count; i++)
        if (carrier->asynchronous ||
            carrier->device->ops->event_query(carrier->device, events[i]) != PST_OK)
            all[count++] = events[i];
    return count;
}

pst_status pst__operation_submit(pst__operation *operation, size_t bytes, pst_event *const *after,
                                 size_t after_count) {
    pst_event *all[PST__MOST_AFTER];
    const pst_lease *staging = &operation->staging, *sums = &operation->sums;
    pst_status status = take_staging(operation);
    size_t count = add_events(operation->carrier, after, after_count, all, 0);
    count = add_events(operation->carrier, staging->after, staging->after_count, all, count);
    count = add_events(operation->carrier, sums->after, sums->after_count, all, count);
    if (operation->carrier->outside != NULL && operation->behind != NULL)
        all[count++] = operation->behind->finished;
    operation->carrier->is_beside_graph |= operation->carrier->outside == NULL;
    if (status == PST_OK)
        status = operation->carrier->outside != NULL ? launch_captured(operation, all, count)
                                                     : add(operation, bytes, all, count);
    if (status != PST_OK) {
        pst__operation_give(operation->carrier, operation);
        return status;
    }
    enqueue(operation->queue, operation);
    return PST_OK;
}

pst_status pst__operation_submit_behind(pst__operation *operation, const pst__operation *before,
                                        size_t bytes) {
    operation->behind = before;
    const pst_status status = pst__operation_submit(operation, bytes, NULL, 0);
    if (status == PST_OK) operation->behind = NULL; /* it may be given back first */
    return status;
}

/* From the latest graph's begin to its end; of the one behind it, where that is launched already.
 */
static pst_status span_graph(void *argument, pst_stream *stream) {
    const pst__operation *operation = argument;
    const pst__carrier *carrier = operation->carrier;
    const pst_device_ops *ops = carrier->device->ops;
    const pst_status status = ops->stream_wait(carrier->device, stream, carrier->graph_begins);
    pst_task_begins();
    return status == PST_OK ? ops->stream_wait(carrier->device, stream, operation->ready) : status;
}

/* A task beside a launched graph: until that has ended, ranks are watched and deadlines count. */
pst_status pst__operation_follow_graph(pst__carrier *carrier) {
    pst__operation *operation;
    pst_device *device = carrier->device;
    pst_status status = pst__operation_take(carrier, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    operation->unfinished = 1; /* the add publishes it */
    operation->is_waited = 1;
    pst__store_relaxed(&operation->launched, 1); /* it has no memory */
    const pst_task_options options = {.size = sizeof options,
                                      .name = "graph of a step",
                                      .lane = operation->queue->lane,
                                      .work = {span_graph, NULL, operation},
                                      .done = ended,
                                      .done_argument = operation};
    status = device->ops->event_record(device, operation->ready, carrier->compute);
    if (status == PST_OK) status = pst_graph_add(carrier->graph, &options, &operation->task);
    if (status == PST_OK)
        enqueue(operation->queue, operation);
    else
        pst__operation_give(carrier, operation);
    return status;
}
