#include "ops/operation.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <time.h>

static pst__operation *operation_create(pst_zero *engine) {
    pst__operation *operation = pst__heap_alloc(engine->heap, sizeof *operation);
    if (operation == NULL) return NULL;
    pst_device *device = engine->device;
    if (device->ops->event_create(device, 0, &operation->ready) != PST_OK) {
        pst__heap_free(engine->heap, operation, sizeof *operation);
        return NULL;
    }
    operation->engine = engine;
    return operation;
}

static void operation_free(pst_zero *engine, pst__operation *operation) {
    engine->device->ops->event_destroy(engine->device, operation->ready);
    pst__heap_free(engine->heap, operation->pieces,
                   operation->piece_capacity * sizeof *operation->pieces);
    pst__heap_free(engine->heap, operation, sizeof *operation);
}

static void wake_lane(void *lane) {
    pst_lane_wake(lane);
}

static void operation_reset(pst__operation *operation, pst__queue *queue) {
    operation->queue = queue;
    operation->work = (pst_collective_work){.comm = queue->comm};
    operation->work.status = PST_ECANCELED; /* until it is started */
    operation->work.collective.wake = wake_lane;
    operation->work.collective.wake_argument = queue->lane;
    operation->task = (pst_task){NULL, 0};
    operation->done = NULL;
    operation->abandoned = 0;
    operation->group = PST__NO_GROUP;
    operation->staging = (pst_lease){0};
    operation->has_bucket = 0;
    operation->next = NULL;
    pst__store_relaxed(&operation->ended, 0); /* nobody else knows it yet; add publishes it */
}

pst_status pst__operation_take(pst_zero *engine, pst__lane_index lane, pst__operation **operation) {
    pst__operation_reap(engine);
    pst__operation *taken = engine->spare;
    if (taken != NULL)
        engine->spare = taken->next;
    else
        taken = operation_create(engine);
    *operation = taken;
    if (taken == NULL)
        return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory for a collective");
    operation_reset(taken, pst__queue_of(engine, lane));
    return PST_OK;
}

void pst__operation_give(pst_zero *engine, pst__operation *operation) {
    if (operation->staging.memory != NULL)
        pst_arena_release(engine->storage, &operation->staging, NULL);
    if (operation->has_bucket) pst_buckets_retire(engine->buckets, operation->bucket, NULL);
    pst_task_release(operation->task);
    operation->next = engine->spare;
    engine->spare = operation;
}

/* ---- on the worker --------------------------------------------------------------------------- */

static void poison(pst__operation *operation, pst_status status) {
    const pst_collective *collective = &operation->work.collective;
    pst_comm *comm = operation->work.comm;
    char text[PST__ERROR_BYTES];
    (void)snprintf(text, sizeof text, "rank %zu, engine '%s': %s of '%s' (ticket %llu) failed: %s",
                   operation->engine->rank, operation->engine->name,
                   pst_collective_name(collective->kind), collective->name,
                   (unsigned long long)collective->ticket, comm->ops->error_text(comm));
    pst_runtime_poison(operation->engine->runtime, status, text);
}

/* The task never ran, or was abandoned, when the runtime was poisoned before: then that error has
 * been told. */
static void ended(void *argument, pst_status status) {
    pst__operation *operation = argument;
    if (status == PST_OK && operation->done != NULL) operation->done(operation);
    if (status < 0 && operation->work.status == status) poison(operation, status);
    operation->abandoned = status < 0 && operation->work.status >= 0;
    /* Pairs with the acquire in reap: all the callback did is over when the memory is reused. */
    pst__store_release(&operation->ended, 1);
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
        pst_status status = pst_graph_add(operation->engine->graph, &options, NULL);
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
    pst_status status = pst_arena_acquire(operation->engine->storage, bytes, &operation->staging);
    collective->staging = operation->staging.memory;
    return status;
}

static pst_status add_task(pst__operation *operation, size_t bytes, pst_event *const *after,
                           size_t after_count) {
    pst_collective *collective = &operation->work.collective;
    pst_status status = wait_for_events(operation, &after, &after_count);
    if (status != PST_OK) return status;
    collective->ticket = operation->queue->tickets + 1;
    pst_task_options options = {.size = sizeof options,
                                .name = collective->name,
                                .lane = operation->queue->lane,
                                .work = pst_collective_as_work(&operation->work),
                                .after_events = after,
                                .after_event_count = after_count,
                                .done = ended,
                                .done_argument = operation,
                                .ticket = collective->ticket,
                                .bytes = bytes};
    status = pst_graph_add(operation->engine->graph, &options, &operation->task);
    if (status == PST_OK) operation->queue->tickets++;
    return status;
}

static void enqueue(pst__queue *queue, pst__operation *operation) {
    if (queue->oldest == NULL)
        queue->oldest = operation;
    else
        queue->newest->next = operation;
    queue->newest = operation;
}

/* Events that are done need no wait. This matters on the host device, where an event may be
 * recorded again only while no task is to wait for it: there the calling thread's events are done
 * at once. */
static size_t add_pending(const pst_zero *engine, pst_event *const *events, size_t event_count,
                          pst_event **all, size_t count) {
    for (size_t i = 0; i < event_count; i++)
        if (engine->device->ops->event_query(engine->device, events[i]) != PST_OK)
            all[count++] = events[i];
    return count;
}

pst_status pst__operation_submit(pst__operation *operation, size_t bytes, pst_event *const *after,
                                 size_t after_count) {
    pst_event *all[2 * PST_LEASE_EVENTS + 2];
    const pst_lease *staging = &operation->staging;
    pst_status status = take_staging(operation);
    size_t count = add_pending(operation->engine, after, after_count, all, 0);
    count = add_pending(operation->engine, staging->after, staging->after_count, all, count);
    if (status == PST_OK) status = add_task(operation, bytes, all, count);
    if (status != PST_OK) {
        pst__operation_give(operation->engine, operation);
        return status;
    }
    enqueue(operation->queue, operation);
    return PST_OK;
}

/* ---- waiting, and taking back ---------------------------------------------------------------- */

/* A waiter may be ahead of the callback that makes the error's text. */
static void let_callback_run(const pst__operation *operation) {
    const struct timespec pause = {0, 50000};
    for (int i = 0; i < 2000 && !pst__load_acquire(&operation->ended); i++)
        (void)nanosleep(&pause, NULL); /* the acquire pairs with the release in ended */
}

pst_status pst__operation_lost(pst_zero *engine, pst_status status) {
    if (status != PST_ETIMEDOUT) return status;
    char text[PST__ERROR_BYTES];
    (void)pst_runtime_error(engine->runtime, text, sizeof text);
    pst_runtime_poison(engine->runtime, status, text);
    return status;
}

static void trace_wait(pst_zero *engine, const pst__operation *operation, const char *name,
                       uint64_t begin, uint64_t end) {
    pst__trace *trace = pst__runtime_trace(engine->runtime);
    if (!pst__trace_on(trace)) return;
    pst__track *track = pst__track_of_thread(trace);
    if (track != NULL)
        pst__trace_slice(track, name, begin, end, operation->work.collective.ticket, 0);
}

pst_status pst__operation_wait(pst__operation *operation, const char *name, uint64_t *exposed) {
    pst_zero *engine = operation->engine;
    pst_launch launch = {engine->graph, 0};
    int was_over = pst_task_test(launch, operation->task) != PST_PENDING;
    uint64_t begin = was_over ? 0 : pst__now();
    pst_status status = pst_task_wait(launch, operation->task, engine->options.compute);
    if (!was_over) {
        uint64_t end = pst__now();
        *exposed += end - begin;
        trace_wait(engine, operation, name, begin, end);
    }
    if (status < 0 && status != PST_ETIMEDOUT) let_callback_run(operation);
    return pst__operation_lost(engine, status);
}

static void forget_gather(pst_zero *engine, const pst__operation *operation) {
    if (operation->group == PST__NO_GROUP) return;
    pst__group *group = &engine->groups[operation->group];
    if (group->gather == operation) group->gather = NULL;
}

/* Only an abort can take an abandoned collective's memory back from its communicator. */
static int is_lost(const pst__operation *operation) {
    pst_comm *comm = operation->work.comm;
    return operation->abandoned && comm->ops->abort(comm, PST_ECANCELED) != PST_OK;
}

static void reap_queue(pst_zero *engine, pst__queue *queue) {
    /* The acquire pairs with the release in ended. */
    while (queue->oldest != NULL && pst__load_acquire(&queue->oldest->ended)) {
        pst__operation *operation = queue->oldest;
        queue->oldest = operation->next;
        forget_gather(engine, operation);
        if (is_lost(operation))
            engine->lost++;
        else
            pst__operation_give(engine, operation);
    }
}

void pst__operation_reap(pst_zero *engine) {
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        reap_queue(engine, &engine->queues[lane]);
}

void pst__operation_free_all(pst_zero *engine) {
    while (engine->spare != NULL) {
        pst__operation *next = engine->spare->next;
        operation_free(engine, engine->spare);
        engine->spare = next;
    }
}
