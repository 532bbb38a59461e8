/* Copies in flight: submitted, waited for, taken back. */
#include "ops/offload/offload.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "sched/device/device.h"

#include <inttypes.h>
#include <time.h>

#define PATIENCE_NS   10000000000u
#define EVENTS_A_TASK 4u

const char *pst__direction_name(pst__direction direction) {
    return direction == PST__STORE ? "offload" : "reload";
}

/* In the words of the device. */
static pst_status device_fail(const pst__transfer *transfer, pst_status status, const char *what) {
    const char *text = pst__device_text(transfer->offload->device);
    return pst__offload_fail(transfer->offload, status, "%s of key %" PRIu64 " (%zu bytes) %s: %s",
                             pst__direction_name(transfer->direction), transfer->stored->key,
                             transfer->copy.bytes, what,
                             text[0] != '\0' ? text : pst_status_text(status));
}

/* ---- taking and giving back ------------------------------------------------------------------ */

static pst__transfer *create(pst_offload *offload) {
    pst_device *device = offload->device;
    pst__transfer *transfer = pst__heap_alloc(offload->heap, sizeof *transfer);
    if (transfer == NULL) return NULL;
    if (offload->asynchronous && device->ops->event_create(device, 0, &transfer->ready) != PST_OK) {
        pst__heap_free(offload->heap, transfer, sizeof *transfer);
        return NULL;
    }
    transfer->offload = offload;
    return transfer;
}

static pst__transfer *take(pst_offload *offload) {
    pst__transfer *transfer = offload->spare;
    if (transfer == NULL) return create(offload);
    offload->spare = transfer->next;
    return transfer;
}

static void give(pst_offload *offload, pst__transfer *transfer) {
    transfer->next = offload->spare;
    offload->spare = transfer;
}

void pst__transfer_free_spare(pst_offload *offload) {
    pst_device *device = offload->device;
    while (offload->spare != NULL) {
        pst__transfer *next = offload->spare->next;
        if (offload->spare->ready != NULL)
            device->ops->event_destroy(device, offload->spare->ready);
        pst__heap_free(offload->heap, offload->spare, sizeof *offload->spare);
        offload->spare = next;
    }
}

static void release_owner(const pst__transfer *transfer) {
    const pst_offload_options *options = &transfer->offload->options;
    if (options->released != NULL) options->released(options->released_context, transfer->owner);
}

/* Up to and with `last`, which holds its memory: a lane's copies end in their order. */
static void release_owners(pst__transfer_queue *queue, const pst__transfer *last) {
    pst__transfer *transfer;
    do {
        transfer = queue->holding;
        queue->holding = transfer->next;
        transfer->is_waited = 1;
        release_owner(transfer);
    } while (transfer != last);
}

/* Where a copy did not run, what it was to wait for failed: the other direction of its key, or all.
 */
static pst_status cause_of(const pst_offload *offload, const pst__transfer *transfer) {
    if (transfer->status != PST_ESKIPPED) return transfer->status;
    const pst_status poison = pst_runtime_status(offload->runtime);
    const pst_status other = transfer->stored->status[1 - transfer->direction];
    return poison != PST_OK ? poison : other != PST_OK ? other : transfer->status;
}

static void take_back(pst_offload *offload, pst__transfer_queue *queue) {
    pst__transfer *transfer = queue->oldest;
    pst__stored *stored = transfer->stored;
    if (queue->holding == transfer) release_owners(queue, transfer);
    queue->oldest = transfer->next;
    if (stored->last[transfer->direction] == transfer) {
        stored->last[transfer->direction] = NULL;
        stored->status[transfer->direction] = cause_of(offload, transfer);
    }
    pst__stored_let_go(offload, stored);
    pst_task_release(transfer->task);
    give(offload, transfer);
    offload->stats.in_flight--;
}

void pst__transfer_reap(pst_offload *offload) {
    for (int direction = 0; direction < PST__DIRECTION_COUNT; direction++) {
        pst__transfer_queue *queue = &offload->queues[direction];
        /* The acquire pairs with the release in ended. */
        while (queue->oldest != NULL && pst__load_acquire(&queue->oldest->ended))
            take_back(offload, queue);
    }
}

/* ---- on the worker --------------------------------------------------------------------------- */

static pst_status start(void *argument, pst_stream *stream) {
    const pst__transfer *transfer = argument;
    pst_device *device = transfer->offload->device;
    pst_status status = device->ops->copy(device, stream, &transfer->copy, 1);
    return status == PST_OK ? PST_OK : device_fail(transfer, status, "failed");
}

static void ended(void *argument, pst_status status) {
    pst__transfer *transfer = argument;
    transfer->status = status;
    /* Pairs with the acquire in reap: all that the callback did has ended when the memory is
     * reused. */
    pst__store_release(&transfer->ended, 1);
}

/* ---- submitting ------------------------------------------------------------------------------ */

static void enqueue(pst__transfer_queue *queue, pst__transfer *transfer) {
    transfer->next = NULL;
    if (queue->oldest == NULL)
        queue->oldest = transfer;
    else
        queue->newest->next = transfer;
    queue->newest = transfer;
    if (queue->holding == NULL) queue->holding = transfer;
}

/* What the copy comes behind, of the caller's side. */
static pst_status collect_events(pst__transfer *transfer, pst_event *const *after, size_t *count,
                                 pst_event **events) {
    pst_offload *offload = transfer->offload;
    pst_device *device = offload->device;
    size_t given = *count;
    *count = 0;
    for (size_t i = 0; after != NULL && i < given; i++)
        events[(*count)++] = after[i];
    if (after != NULL || !offload->asynchronous) return PST_OK;
    pst_status status = device->ops->event_record(device, transfer->ready, offload->compute);
    if (status != PST_OK) return device_fail(transfer, status, "could not mark compute");
    events[(*count)++] = transfer->ready;
    return PST_OK;
}

static pst_status add_task(pst__transfer *transfer, pst_event *const *after, size_t after_count) {
    pst_offload *offload = transfer->offload;
    const pst__transfer *other = transfer->stored->last[1 - transfer->direction];
    pst_event *events[EVENTS_A_TASK];
    pst_status status = collect_events(transfer, after, &after_count, events);
    if (status != PST_OK) return status;
    pst_task_options options = {.size = sizeof options,
                                .name = pst__direction_name(transfer->direction),
                                .lane = offload->queues[transfer->direction].lane,
                                .work = {.start = start, .argument = transfer},
                                .after = other != NULL ? &other->task : NULL,
                                .after_count = other != NULL,
                                .after_events = events,
                                .after_event_count = after_count,
                                .done = ended,
                                .done_argument = transfer,
                                .bytes = transfer->copy.bytes};
    return pst_graph_add(offload->graph, &options, &transfer->task);
}

static void fill_in(pst__transfer *transfer, pst__stored *stored, pst__direction direction,
                    void *memory, void *owner) {
    int is_store = direction == PST__STORE;
    transfer->stored = stored;
    transfer->direction = direction;
    transfer->copy = (pst_copy){.destination = is_store ? stored->memory : memory,
                                .source = is_store ? memory : stored->memory,
                                .bytes = stored->bytes};
    transfer->owner = owner;
    transfer->is_waited = 0;
    transfer->task = (pst_task){NULL, 0};
    transfer->status = PST_OK;
    /* Nobody else knows it yet; adding the task publishes this. */
    pst__store_relaxed(&transfer->ended, 0);
}

pst_status pst__transfer_submit(pst_offload *offload, pst__stored *stored, pst__direction direction,
                                void *memory, pst_event *const *after, size_t after_count,
                                void *owner) {
    pst__transfer *transfer = take(offload);
    if (transfer == NULL)
        return pst__offload_fail(offload, PST_ENOMEM, "no memory for a copy of key %" PRIu64,
                                 stored->key);
    fill_in(transfer, stored, direction, memory, owner);
    pst_status status = add_task(transfer, after, after_count);
    if (status != PST_OK) {
        give(offload, transfer);
        return status;
    }
    enqueue(&offload->queues[direction], transfer);
    stored->last[direction] = transfer;
    stored->status[direction] = PST_OK;
    stored->is_begun[direction] = 1;
    stored->holders++;
    offload->stats.in_flight++;
    return PST_OK;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static pst_status wait_on(const pst__transfer *transfer, pst_lane *compute) {
    pst_offload *offload = transfer->offload;
    uint64_t begin = pst__now();
    pst_status status = pst_task_wait((pst_launch){offload->graph, 0}, transfer->task, compute);
    offload->stats.exposed_ns += pst__now() - begin;
    return status;
}

pst_status pst__transfer_wait(pst__transfer *transfer) {
    pst_offload *offload = transfer->offload;
    if (transfer->is_waited) return PST_OK;
    pst_status status = wait_on(transfer, offload->options.compute);
    if (status == PST_OK) release_owners(&offload->queues[transfer->direction], transfer);
    return status;
}

pst_status pst__transfer_wait_end(const pst__transfer *transfer) {
    return wait_on(transfer, NULL);
}

int pst__transfer_drain(pst_offload *offload) {
    const struct timespec pause = {0, 50000};
    const uint64_t until = pst__now() + PATIENCE_NS;
    int done = 1;
    (void)pst_launch_wait((pst_launch){offload->graph, 0});
    for (pst__transfer_reap(offload); offload->stats.in_flight > 0; pst__transfer_reap(offload)) {
        if (pst__now() > until) return 0;
        (void)pst_run_once(offload->runtime, NULL);
        (void)nanosleep(&pause, NULL);
    }
    /* After a poison the scheduler has given up what the device goes on with. */
    for (int i = 0; offload->asynchronous && done && i < PST__DIRECTION_COUNT; i++)
        done = pst__device_wait_stream(offload->device, pst_lane_stream(offload->queues[i].lane),
                                       offload->drained, until);
    return done;
}
