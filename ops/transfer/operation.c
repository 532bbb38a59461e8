#include "ops/transfer/operation.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <time.h>

static pst_status create_events(pst__carrier *carrier, pst__operation *operation) {
    pst_device *device = carrier->device;
    pst_status status = device->ops->event_create(device, 0, &operation->ready);
    if (status != PST_OK || !carrier->asynchronous) return status;
    status = device->ops->event_create(device, 0, &operation->finished);
    if (status != PST_OK) device->ops->event_destroy(device, operation->ready);
    return status;
}

static pst__operation *operation_create(pst__carrier *carrier) {
    pst__operation *operation = pst__heap_alloc(carrier->heap, sizeof *operation);
    if (operation == NULL) return NULL;
    if (create_events(carrier, operation) != PST_OK) {
        pst__heap_free(carrier->heap, operation, sizeof *operation);
        return NULL;
    }
    operation->carrier = carrier;
    return operation;
}

static void operation_free(pst__carrier *carrier, pst__operation *operation) {
    pst_device *device = carrier->device;
    device->ops->event_destroy(device, operation->ready);
    if (operation->finished != NULL) device->ops->event_destroy(device, operation->finished);
    pst__heap_free(carrier->heap, operation->pieces,
                   operation->piece_capacity * sizeof *operation->pieces);
    pst__casts_free(carrier->heap, &operation->casts);
    pst__updates_free(carrier->heap, &operation->updates);
    pst__copies_free(carrier->heap, &operation->copies);
    pst__heap_free(carrier->heap, operation->segments,
                   operation->segment_capacity * sizeof *operation->segments);
    pst__heap_free(carrier->heap, operation, sizeof *operation);
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
    operation->launch = (pst_launch){operation->carrier->graph, 0};
    operation->after_count = 0;
    operation->make_source = NULL;
    operation->source_free = operation->source_ended = NULL;
    operation->source_read = 0;
    operation->then = NULL;
    operation->done = NULL;
    operation->casts.count = 0;
    operation->updates.count = 0;
    operation->copies.count = 0;
    operation->is_waited = 0;
    operation->owner = NULL;
    operation->wait_name = NULL;
    operation->timing = NULL;
    operation->behind = NULL;
    operation->goes_on = 0;
    operation->delivery_count = 0;
    operation->is_for_others = 0;
    operation->staging = operation->sums = operation->summed = operation->unread = (pst_lease){0};
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
static void put_spare(pst__carrier *carrier, pst__operation *operation) {
    operation->next = NULL;
    if (carrier->spare == NULL)
        carrier->spare = operation;
    else
        carrier->last_spare->next = operation;
    carrier->last_spare = operation;
}

pst_status pst__operation_take(pst__carrier *carrier, pst__lane_index lane,
                               pst__operation **operation) {
    pst__operation_reap(carrier);
    pst__operation *taken = carrier->spare;
    if (taken != NULL)
        carrier->spare = taken->next;
    else
        taken = operation_create(carrier);
    *operation = taken;
    if (taken == NULL)
        return pst__carrier_fail(carrier, PST_ENOMEM, "%s", "no memory for a collective");
    operation_reset(taken, pst__queue_of(carrier, lane));
    return PST_OK;
}

/* Behind `event`; NULL: now. */
static void give_memory(pst__operation *operation, pst_event *event) {
    pst__carrier *carrier = operation->carrier;
    if (operation->staging.memory != NULL)
        pst_arena_release(carrier->staging, &operation->staging, event);
    if (operation->sums.memory != NULL)
        pst_arena_release(carrier->staging, &operation->sums, event);
    if (operation->summed.memory != NULL)
        pst_arena_release(carrier->staging, &operation->summed, event);
    if (operation->unread.memory != NULL)
        pst_arena_release(carrier->gathered, &operation->unread, event);
    if (operation->has_bucket) pst_buckets_retire(carrier->buckets, operation->bucket, event);
    operation->staging = operation->sums = operation->summed = operation->unread = (pst_lease){0};
    operation->has_bucket = 0;
}

void pst__operation_give(pst__carrier *carrier, pst__operation *operation) {
    give_memory(operation, NULL);
    /* A sealed graph's handles need no release, and may be void: see pst__operation_wait_task. */
    if (operation->launch.number == 0) pst_task_release(operation->task);
    operation->task = (pst_task){NULL, 0};
    put_spare(carrier, operation);
}

pst_status pst__operation_add_piece(pst__operation *operation, const pst_reduce_piece *piece) {
    size_t *count = &operation->work.collective.piece_count;
    pst_status status =
        pst__heap_grow(operation->carrier->heap, (void **)&operation->pieces,
                       &operation->piece_capacity, *count + 1, sizeof *operation->pieces);
    if (status != PST_OK)
        return pst__carrier_fail(operation->carrier, status, "%s", "no memory to reduce gradients");
    operation->pieces[(*count)++] = *piece;
    return PST_OK;
}

pst_status pst__operation_deliver(const pst__operation *operation, size_t count,
                                  pst_stream *stream) {
    pst_device *device = operation->carrier->device;
    const pst_collective *collective = &operation->work.collective;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        const pst_reduce_piece *piece = &operation->pieces[i];
        const void *source = (const char *)collective->destination + piece->offset;
        const pst_sum sum = {.destination = piece->destination,
                             .sources = &source,
                             .source_count = 1,
                             .count = piece->count,
                             .scale = 1.0,
                             .accumulate = piece->accumulate,
                             .destination_dtype = piece->destination_dtype,
                             .source_dtype = collective->dtype};
        status = device->ops->sum(device, stream, &sum);
    }
    return status;
}

/* ---- taking back ----------------------------------------------------------------------------- */

/* A collective without a result may still write to its memory: until an abort says no. */
static int has_ended(const pst__operation *operation) {
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

static void reap_queue(pst__carrier *carrier, pst__queue *queue) {
    release_launched(queue);
    while (queue->oldest != NULL && has_ended(queue->oldest)) {
        pst__operation *operation = queue->oldest;
        queue->oldest = operation->next;
        if (queue->holding == operation) queue->holding = operation->next;
        pst__operation_give(carrier, operation);
    }
}

void pst__operation_reap(pst__carrier *carrier) {
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        reap_queue(carrier, &carrier->queues[lane]);
}

void pst__operation_end_captured(pst__carrier *carrier) {
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        for (pst__operation *operation = carrier->queues[lane].oldest; operation != NULL;
             operation = operation->next)
            pst__store_release(&operation->ended, 1); /* by this thread, which alone asks for it */
    pst__operation_reap(carrier);
}

void pst__operation_reap_buckets(pst__carrier *carrier) {
    const struct timespec pause = {0, 50000};
    const pst__queue *queue = pst__queue_of(carrier, PST__REDUCE_LANE);
    pst__operation_reap(carrier);
    for (int i = 0; i < 2000 && queue->holding != NULL && queue->holding->has_bucket; i++) {
        (void)nanosleep(&pause, NULL);
        pst__operation_reap(carrier);
    }
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* A waiter may be ahead of the callback that makes the error's text. */
static void let_callback_run(const pst__operation *operation) {
    const struct timespec pause = {0, 50000};
    for (int i = 0; i < 2000 && !pst__load_acquire(&operation->ended); i++)
        (void)nanosleep(&pause, NULL); /* the acquire pairs with the release in ended */
}

pst_status pst__operation_check_comms(pst__carrier *carrier) {
    char text[2 * PST__ERROR_BYTES];
    for (int lane = 0; carrier->asynchronous && lane < PST__LANE_COUNT; lane++) {
        pst_comm *comm = carrier->queues[lane].comm;
        if (comm == NULL || comm->ops->status == NULL) continue;
        pst_status status = comm->ops->status(comm);
        if (status == PST_OK) continue;
        (void)snprintf(text, sizeof text, "rank %zu, engine '%s': communicator %s: %s",
                       pst__carrier_number(carrier), carrier->name, comm->ops->name,
                       comm->ops->error_text(comm));
        pst_runtime_poison(carrier->runtime, status, text);
    }
    return pst_runtime_status(carrier->runtime);
}

/* Makes the runtime's error out of a failed wait, so that everything later fails at once; in the
 * words of the communicator, if that knows more. */
static pst_status lost(pst__carrier *carrier, pst_status status) {
    if (status != PST_ETIMEDOUT) return status;
    char text[PST__ERROR_BYTES];
    (void)pst_runtime_error(carrier->runtime, text, sizeof text);
    (void)pst__operation_check_comms(carrier);
    pst_runtime_poison(carrier->runtime, status, text);
    return carrier->asynchronous ? pst_runtime_status(carrier->runtime) : status;
}

static void trace_wait(const pst__operation *operation, const char *name, uint64_t begin,
                       uint64_t end) {
    pst__trace *trace = pst__runtime_trace(operation->carrier->runtime);
    if (name == NULL || !pst__trace_keeps(trace)) return;
    pst__track *track = pst__track_of_thread(trace);
    if (track != NULL)
        pst__trace_slice(track, name, begin, end, operation->work.collective.ticket, 0);
}

/* Its tasks may be asked about. Once those of a program have ended, the program may be gone.
 * Acquire: pairs with the release in finish_part. */
static int has_tasks(const pst__operation *operation) {
    return operation->launch.number == 0 || !pst__load_acquire(&operation->ended);
}

static int has_ended_tasks(const pst__operation *operation) {
    return !has_tasks(operation) ||
           pst_task_test(operation->launch, operation->task) != PST_PENDING;
}

pst_status pst__operation_wait_task(const pst__operation *operation, pst_lane *compute) {
    if (has_tasks(operation)) return pst_task_wait(operation->launch, operation->task, compute);
    if (!pst__load_relaxed(&operation->failed)) return PST_OK; /* published by `ended` */
    const pst_status status = pst_runtime_status(operation->carrier->runtime);
    return status == PST_OK ? PST_ECANCELED : status;
}

/* The compute stream is given the wait. */
static pst_status wait_on_stream(pst__operation *operation) {
    pst__carrier *carrier = operation->carrier;
    pst_device *device = carrier->device;
    pst_status status = device->ops->stream_wait(device, carrier->compute, operation->finished);
    if (status == PST_OK) return PST_OK;
    return pst__carrier_fail_device(carrier, status, "compute could not wait for '%s'",
                                    operation->work.collective.name);
}

static int is_gather(const pst__operation *operation) {
    return operation->work.collective.kind == PST_ALL_GATHER;
}

static void add_exposed(const pst__operation *operation, uint64_t begin, uint64_t end) {
    pst__waits *waits = &operation->carrier->waits;
    *(is_gather(operation) ? &waits->exposed_gather_ns : &waits->exposed_reduce_ns) += end - begin;
}

static pst_status wait_on_host(pst__operation *operation, int is_traced) {
    pst__carrier *carrier = operation->carrier;
    int had_ended = has_ended_tasks(operation);
    uint64_t begin = had_ended ? 0 : pst__now();
    pst_status status = pst__operation_wait_task(operation, carrier->options.compute);
    if (!had_ended) {
        uint64_t end = pst__now();
        add_exposed(operation, begin, end);
        if (is_traced) trace_wait(operation, operation->wait_name, begin, end);
    }
    if (status < 0 && status != PST_ETIMEDOUT) let_callback_run(operation);
    return lost(carrier, status);
}

pst_status pst__operation_wait(pst__operation *operation) {
    pst__carrier *carrier = operation->carrier;
    pst__waits *waits = &carrier->waits;
    if (operation->is_waited) return PST_OK;
    int on_stream = carrier->asynchronous && pst__operation_is_launched(operation);
    if (carrier->asynchronous && !on_stream) waits->late_launches++;
    const pst__stall *stall =
        carrier->outside != NULL
            ? NULL
            : pst__stall_begin(
                  &carrier->stalls, operation->wait_name, operation->work.collective.ticket,
                  is_gather(operation) ? &waits->device_gather_ns : &waits->device_reduce_ns);
    /* What the stream waits, if that is timed, and else what the host waits for it. */
    pst_status status =
        on_stream ? wait_on_stream(operation) : wait_on_host(operation, stall == NULL);
    pst__stall_end(&carrier->stalls, stall);
    operation->is_waited = status == PST_OK;
    return status;
}

static int is_reduction(const pst__operation *operation) {
    return operation->wait_name != NULL && !is_gather(operation);
}

static int end_alike(const pst__operation *a, const pst__operation *b) {
    return a->work.combine_apart == b->work.combine_apart && (a->then == NULL) == (b->then == NULL);
}

/* The last of those that end on one stream stands for all. Within a capture each wait is an edge,
 * and the fewer edges, the fewer streams the graph is spread over. */
static int is_waited_by_next(const pst__operation *operation, uint64_t last) {
    const pst__operation *next = operation->next;
    return next != NULL && is_reduction(next) && next->work.collective.ticket <= last &&
           end_alike(operation, next);
}

static pst_status wait_reductions(const pst__queue *queue) {
    pst_status status = PST_OK;
    for (pst__operation *operation = queue->oldest; status == PST_OK && operation != NULL;
         operation = operation->next)
        if (is_reduction(operation) && !is_waited_by_next(operation, UINT64_MAX))
            status = pst__operation_wait(operation);
    return status;
}

pst_status pst__operation_wait_reductions(pst__carrier *carrier) {
    pst_status status = wait_reductions(pst__queue_of(carrier, PST__REDUCE_LANE));
    if (status == PST_OK) status = wait_reductions(&carrier->queues[PST__REPLICA_LANE]);
    return status == PST_OK ? pst_runtime_status(carrier->runtime) : status;
}

pst_status pst__operation_wait_end(const pst__operation *operation, const char *name) {
    pst__carrier *carrier = operation->carrier;
    if (carrier->outside != NULL)
        return pst__carrier_fail(carrier, PST_ESTATE,
                                 "the host waits for '%s', which no graph can hold: train some "
                                 "steps before the capture",
                                 operation->work.collective.name);
    const uint64_t begin = has_ended_tasks(operation) ? 0 : pst__now();
    pst_status status = pst__operation_wait_task(operation, NULL);
    if (begin != 0) trace_wait(operation, name, begin, pst__now());
    if (status == PST_OK) return pst_runtime_status(carrier->runtime);
    return lost(carrier, status);
}

static pst_status wait_reduced(const pst__queue *queue) {
    pst_status status = PST_OK;
    for (const pst__operation *operation = queue->oldest; status == PST_OK && operation != NULL;
         operation = operation->next)
        if (is_reduction(operation))
            status = pst__operation_wait_end(operation, operation->wait_name);
    return status;
}

pst_status pst__operation_wait_reduced(pst__carrier *carrier) {
    const pst_status status = wait_reduced(pst__queue_of(carrier, PST__REDUCE_LANE));
    return status == PST_OK ? wait_reduced(&carrier->queues[PST__REPLICA_LANE]) : status;
}

pst_status pst__operation_wait_launch(pst__operation *operation) {
    pst__carrier *carrier = operation->carrier;
    if (carrier->asynchronous && pst__operation_is_launched(operation)) return PST_OK;
    carrier->waits.late_launches += (uint64_t)carrier->asynchronous;
    return lost(carrier, has_tasks(operation)
                             ? pst_task_wait_launch(operation->launch, operation->task)
                             : pst__operation_wait_task(operation, NULL));
}

static int is_in_callers_order(const pst__operation *operation) {
    const int is_of_program = operation->launch.number != 0;
    return operation->carrier->options.callers_order >
           (is_of_program ? PST__WITHOUT_PROGRAM : PST__IN_NO_PASS);
}

/* NULL: all that has to be in the order is launched. Those before it are launched before it. */
static const pst__operation *last_to_launch(const pst__queue *queue) {
    const pst__operation *last = NULL;
    for (const pst__operation *operation = queue->holding; operation != NULL;
         operation = operation->next)
        if (is_in_callers_order(operation)) last = operation;
    return last == NULL || pst__operation_is_launched(last) ? NULL : last;
}

static void wait_in_order(pst__carrier *carrier, const pst__operation *operation) {
    const uint64_t begin = pst__now();
    (void)lost(carrier, pst_task_wait_launch(operation->launch, operation->task));
    const uint64_t end = pst__now();
    if (operation->wait_name == NULL) return;
    add_exposed(operation, begin, end);
    if (!pst__stalls_measure(&carrier->stalls))
        trace_wait(operation, operation->wait_name, begin, end);
}

void pst__operation_keep_order(pst__carrier *carrier) {
    if (!carrier->asynchronous || carrier->outside != NULL) return;
    for (int lane = 0; lane < PST__LANE_COUNT; lane++) {
        const pst__operation *last = last_to_launch(&carrier->queues[lane]);
        if (last != NULL) wait_in_order(carrier, last);
    }
}

pst_status pst__operation_follow_reductions(pst__carrier *carrier, uint64_t last) {
    pst_status status = PST_OK;
    for (pst__operation *operation = pst__queue_of(carrier, PST__REDUCE_LANE)->oldest;
         operation != NULL && operation->work.collective.ticket <= last && status == PST_OK;
         operation = operation->next) {
        if (!is_reduction(operation) || operation->is_waited || is_waited_by_next(operation, last))
            continue;
        status = pst__operation_wait_launch(operation);
        if (status == PST_OK) status = pst__operation_wait(operation);
    }
    return status == PST_OK ? pst_runtime_status(carrier->runtime) : status;
}

pst_status pst__operation_wait_launches(pst__carrier *carrier) {
    pst_status status = PST_OK;
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        for (pst__operation *operation = carrier->queues[lane].oldest;
             operation != NULL && status == PST_OK; operation = operation->next)
            status = pst__operation_wait_launch(operation);
    return status;
}

/* ---- leaving it all -------------------------------------------------------------------------- */

/* On an asynchronous device a launched task asks its communicator only when it ends. */
static int asks_no_more(const pst__operation *operation) {
    const pst__carrier *carrier = operation->carrier;
    if (carrier->asynchronous && pst__operation_is_launched(operation)) return 1;
    return has_ended_tasks(operation);
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

void pst__operation_abandon_all(pst__carrier *carrier) {
    const struct timespec pause = {0, 50000};
    const uint64_t until = pst__now() + PST__PATIENCE_NS;
    /* Release: pairs with the acquire in is_abandoned. */
    pst__store_release(&carrier->is_abandoned, 1);
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        for (pst__operation *operation = carrier->queues[lane].oldest; operation != NULL;
             operation = operation->next) {
            keep_from_ending(operation, until);
            while (!asks_no_more(operation) && pst__now() < until) {
                (void)pst_run_once(carrier->runtime, NULL);
                (void)nanosleep(&pause, NULL);
            }
        }
}

void pst__operation_free_all(pst__carrier *carrier) {
    while (carrier->spare != NULL) {
        pst__operation *next = carrier->spare->next;
        operation_free(carrier, carrier->spare);
        carrier->spare = next;
    }
}
