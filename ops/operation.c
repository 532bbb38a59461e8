#include "ops/operation.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <time.h>

static pst_status create_events(pst_zero *engine, pst__operation *operation) {
    pst_device *device = engine->device;
    pst_status status = device->ops->event_create(device, 0, &operation->ready);
    if (status != PST_OK || !engine->asynchronous) return status;
    status = device->ops->event_create(device, 0, &operation->finished);
    if (status != PST_OK) device->ops->event_destroy(device, operation->ready);
    return status;
}

static pst__operation *operation_create(pst_zero *engine) {
    pst__operation *operation = pst__heap_alloc(engine->heap, sizeof *operation);
    if (operation == NULL) return NULL;
    if (create_events(engine, operation) != PST_OK) {
        pst__heap_free(engine->heap, operation, sizeof *operation);
        return NULL;
    }
    operation->engine = engine;
    return operation;
}

static void operation_free(pst_zero *engine, pst__operation *operation) {
    pst_device *device = engine->device;
    device->ops->event_destroy(device, operation->ready);
    if (operation->finished != NULL) device->ops->event_destroy(device, operation->finished);
    pst__heap_free(engine->heap, operation->pieces,
                   operation->piece_capacity * sizeof *operation->pieces);
    pst__heap_free(engine->heap, operation->casts,
                   operation->cast_capacity * sizeof *operation->casts);
    pst__heap_free(engine->heap, operation->segments,
                   operation->segment_capacity * sizeof *operation->segments);
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
    operation->then = NULL;
    operation->done = NULL;
    operation->cast_count = 0;
    operation->is_waited = 0;
    operation->group = PST__NO_GROUP;
    operation->staging = operation->unread = (pst_lease){0};
    operation->has_bucket = 0;
    operation->next = NULL;
    /* Nobody else knows it yet; add publishes these. */
    pst__store_relaxed(&operation->launched, 0);
    pst__store_relaxed(&operation->ended, 0);
    pst__store_relaxed(&operation->failed, 0);
    pst__store_relaxed(&operation->failure, PST_OK);
}

/* First in, first out: what waits for an event of one that is given back then rarely waits for its
 * next use, too. */
static void put_spare(pst_zero *engine, pst__operation *operation) {
    operation->next = NULL;
    if (engine->spare == NULL)
        engine->spare = operation;
    else
        engine->last_spare->next = operation;
    engine->last_spare = operation;
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

/* Behind `event`; NULL: now. */
static void give_memory(pst__operation *operation, pst_event *event) {
    pst_zero *engine = operation->engine;
    if (operation->staging.memory != NULL)
        pst_arena_release(engine->staging, &operation->staging, event);
    if (operation->unread.memory != NULL)
        pst_arena_release(engine->gathered, &operation->unread, event);
    if (operation->has_bucket) pst_buckets_retire(engine->buckets, operation->bucket, event);
    operation->staging = operation->unread = (pst_lease){0};
    operation->has_bucket = 0;
}

void pst__operation_give(pst_zero *engine, pst__operation *operation) {
    give_memory(operation, NULL);
    pst_task_release(operation->task);
    operation->task = (pst_task){NULL, 0};
    put_spare(engine, operation);
}

/* ---- on the worker --------------------------------------------------------------------------- */

/* The last part is on its stream: from here on the engine's thread needs no answer any more. */
static pst_status note_launch(pst__operation *operation, pst_stream *stream) {
    pst_zero *engine = operation->engine;
    pst_status status =
        engine->device->ops->event_record(engine->device, operation->finished, stream);
    if (status != PST_OK) {
        /* It runs, and nobody could tell when it ends. */
        pst_runtime_poison(engine->runtime, status, "a collective's event could not be recorded");
        return status;
    }
    /* Pairs with the acquire in pst__operation_is_launched: who sees it may wait for `finished`. */
    pst__store_release(&operation->launched, 1);
    return PST_OK;
}

static int has_second_part(const pst__operation *operation) {
    return operation->work.combine_apart || operation->then != NULL;
}

/* The acquire pairs with the release in abandon_all: the communicator may be gone. */
static int is_abandoned(const pst__operation *operation) {
    return pst__load_acquire(&operation->engine->is_abandoned);
}

static pst_status start(void *argument, pst_stream *stream) {
    pst__operation *operation = argument;
    if (is_abandoned(operation)) return PST_ECANCELED;
    pst_work work = pst_collective_as_work(&operation->work);
    pst_status status = work.start(work.argument, stream);
    if (status != PST_OK || !operation->engine->asynchronous || has_second_part(operation))
        return status;
    return note_launch(operation, stream);
}

static pst_status test(void *argument) {
    pst__operation *operation = argument;
    if (is_abandoned(operation)) return PST_ECANCELED;
    pst_work work = pst_collective_as_work(&operation->work);
    return work.test(work.argument);
}

static pst_status combine(pst__operation *operation, pst_stream *stream) {
    pst_work work = pst_combine_as_work(&operation->work);
    return work.start(work.argument, stream);
}

static pst_status start_second(void *argument, pst_stream *stream) {
    pst__operation *operation = argument;
    if (is_abandoned(operation)) return PST_ECANCELED;
    pst_status status =
        operation->then != NULL ? operation->then(operation, stream) : combine(operation, stream);
    if (status != PST_OK || !operation->engine->asynchronous) return status;
    return note_launch(operation, stream);
}

static void poison(const pst__operation *operation, pst_status status) {
    const pst_collective *collective = &operation->work.collective;
    pst_comm *comm = operation->work.comm;
    char text[PST__ERROR_BYTES];
    (void)snprintf(text, sizeof text, "rank %zu, engine '%s': %s of '%s' (ticket %llu) failed: %s",
                   operation->engine->rank, operation->engine->name,
                   pst_collective_name(collective->kind), collective->name,
                   (unsigned long long)collective->ticket, comm->ops->error_text(comm));
    pst_runtime_poison(operation->engine->runtime, status, text);
}

/* A collective that an abort or a failure has let go ends, too, but with no result. */
static void check_result(pst__operation *operation) {
    pst_comm *comm = operation->work.comm;
    if (!operation->engine->asynchronous || comm->ops->status == NULL) return;
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
    /* Pairs with the acquire in reap: all the callback did is over when the memory is reused. */
    pst__store_release(&operation->ended, 1);
}

/* A task of it has ended. It never ran, or was abandoned, when the runtime was poisoned before:
 * then that error has been told. The relaxed stores are published by the decrement. */
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
    pst_status status = pst_arena_acquire(operation->engine->staging, bytes, &operation->staging);
    collective->staging = operation->staging.memory;
    return status;
}

static pst_work work_of(pst__operation *operation) {
    const int ends_later = !operation->engine->asynchronous;
    return (pst_work){.start = start, .test = ends_later ? test : NULL, .argument = operation};
}

static const char *path_of(pst__operation *operation) {
    return pst_comm_path(operation->work.comm, &operation->work.collective);
}

/* The sums of a reduction, on a lane of their own behind the chunks' arrival; or what else comes
 * behind the collective. */
static pst_status add_second_part(pst__operation *operation, size_t bytes) {
    pst_task arrival = operation->task;
    pst__queue *queue = operation->queue;
    const pst_collective *collective = &operation->work.collective;
    pst_task_options options = {.size = sizeof options,
                                .name = collective->name,
                                .lane =
                                    operation->then != NULL ? queue->then_lane : queue->sum_lane,
                                .work = {.start = start_second, .argument = operation},
                                .after = &arrival,
                                .after_count = 1,
                                .done = ended,
                                .done_argument = operation,
                                .ticket = collective->ticket,
                                .bytes = bytes,
                                .path = path_of(operation)};
    pst_status status = pst_graph_add(operation->engine->graph, &options, &operation->task);
    if (status == PST_OK) {
        pst_task_release(arrival);
        return PST_OK;
    }
    /* The first part goes on alone, and the second never comes. */
    pst_runtime_poison(operation->engine->runtime, status,
                       "the second part of a collective got no task");
    pst__store_relaxed(&operation->failed, 1);
    finish_part(operation);
    return PST_OK;
}

static pst_status add_task(pst__operation *operation, size_t bytes, pst_event *const *after,
                           size_t after_count) {
    pst_collective *collective = &operation->work.collective;
    pst_status status = wait_for_events(operation, &after, &after_count);
    if (status != PST_OK) return status;
    collective->ticket = operation->queue->tickets + 1;
    operation->work.combine_apart =
        operation->queue->sum_lane != NULL && collective->kind == PST_REDUCE_SCATTER;
    operation->unfinished = 1 + has_second_part(operation); /* the add publishes it */
    pst_task_options options = {.size = sizeof options,
                                .name = collective->name,
                                .lane = operation->queue->lane,
                                .work = work_of(operation),
                                .after_events = after,
                                .after_event_count = after_count,
                                .done = ended,
                                .done_argument = operation,
                                .ticket = collective->ticket,
                                .bytes = bytes,
                                .path = path_of(operation)};
    status = pst_graph_add(operation->engine->graph, &options, &operation->task);
    if (status != PST_OK) return status;
    operation->queue->tickets++;
    return has_second_part(operation) ? add_second_part(operation, bytes) : PST_OK;
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
static size_t add_events(const pst_zero *engine, pst_event *const *events, size_t event_count,
                         pst_event **all, size_t count) {
    for (size_t i = 0; i < event_count; i++)
        if (engine->asynchronous ||
            engine->device->ops->event_query(engine->device, events[i]) != PST_OK)
            all[count++] = events[i];
    return count;
}

pst_status pst__operation_submit(pst__operation *operation, size_t bytes, pst_event *const *after,
                                 size_t after_count) {
    pst_event *all[PST__MOST_AFTER];
    const pst_lease *staging = &operation->staging;
    pst_status status = take_staging(operation);
    size_t count = add_events(operation->engine, after, after_count, all, 0);
    count = add_events(operation->engine, staging->after, staging->after_count, all, count);
    if (status == PST_OK) status = add_task(operation, bytes, all, count);
    if (status != PST_OK) {
        pst__operation_give(operation->engine, operation);
        return status;
    }
    enqueue(operation->queue, operation);
    return PST_OK;
}

/* ---- taking back ----------------------------------------------------------------------------- */

static void forget_gather(pst_zero *engine, const pst__operation *operation) {
    if (operation->group == PST__NO_GROUP) return;
    pst__group *group = &engine->groups[operation->group];
    if (group->gather == operation) group->gather = NULL;
}

/* A collective without a result may still write to its memory: until an abort says no. */
static int is_over(const pst__operation *operation) {
    pst_comm *comm = operation->work.comm;
    /* The acquire pairs with the release in finish_part. */
    return pst__load_acquire(&operation->ended) &&
           (!pst__load_relaxed(&operation->failed) ||
            comm->ops->abort(comm, PST_ECANCELED) == PST_OK);
}

/* The memory of what is launched, in the order of launching. */
static void release_launched(pst__queue *queue) {
    for (; queue->holding != NULL && pst__operation_is_launched(queue->holding);
         queue->holding = queue->holding->next)
        give_memory(queue->holding, queue->holding->finished);
}

static void reap_queue(pst_zero *engine, pst__queue *queue) {
    release_launched(queue);
    while (queue->oldest != NULL && is_over(queue->oldest)) {
        pst__operation *operation = queue->oldest;
        queue->oldest = operation->next;
        if (queue->holding == operation) queue->holding = operation->next;
        forget_gather(engine, operation);
        pst__operation_give(engine, operation);
    }
}

void pst__operation_reap(pst_zero *engine) {
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        reap_queue(engine, &engine->queues[lane]);
}

/* ---- leaving it all -------------------------------------------------------------------------- */

/* On an asynchronous device a launched task asks its communicator only when it ends. */
static int asks_no_more(const pst__operation *operation) {
    const pst_zero *engine = operation->engine;
    if (engine->asynchronous && pst__operation_is_launched(operation)) return 1;
    return pst_task_test((pst_launch){engine->graph, 0}, operation->task) != PST_PENDING;
}

/* One part of each operation is ended by nobody: so none of them ever is, and asks what has come of
 * it. Who is about to has been counted already, and is waited for. */
static void keep_from_ending(pst__operation *operation, uint64_t until) {
    const struct timespec pause = {0, 50000};
    /* Acquire-release: as in finish_part, of which this is the last one if it finds none left. */
    if (pst__add_acq_rel(&operation->unfinished, 1) > 0) return;
    while (!pst__load_acquire(&operation->ended) && pst__now() < until) /* see finish_part */
        (void)nanosleep(&pause, NULL);
}

void pst__operation_abandon_all(pst_zero *engine) {
    const struct timespec pause = {0, 50000};
    const uint64_t until = pst__now() + PST__PATIENCE_NS;
    /* Release: pairs with the acquire in is_abandoned. */
    pst__store_release(&engine->is_abandoned, 1);
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        for (pst__operation *operation = engine->queues[lane].oldest; operation != NULL;
             operation = operation->next) {
            keep_from_ending(operation, until);
            while (!asks_no_more(operation) && pst__now() < until) {
                (void)pst_run_once(engine->runtime, NULL);
                (void)nanosleep(&pause, NULL);
            }
        }
}

void pst__operation_free_all(pst_zero *engine) {
    while (engine->spare != NULL) {
        pst__operation *next = engine->spare->next;
        operation_free(engine, engine->spare);
        engine->spare = next;
    }
}
