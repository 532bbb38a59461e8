/* The communicator `local`. Ranks meet at positions: the k-th collective that a rank starts on a
 * channel meets the k-th of every other rank. One small lock a channel guards the meetings; it is
 * held for bounded bookkeeping only, never while data moves. */
#include "base/atomic.h"
#include "base/error.h"
#include "base/heap.h"
#include "ops/comm/sums.h"
#include "sched/runtime.h"

#include <penstock/comm.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#define TEXT_BYTES 512

typedef struct pst__meeting {
    uint64_t position;
    const pst_collective **posted; /* by rank; NULL until it came */
    int arrived;                   /* how many came */
    int finished_reading;
    int left; /* how many know that it has ended */
    struct pst__meeting *next;
} pst__meeting;

typedef struct pst__channel {
    pst_local_world *world;
    int number;
    int lock;
    pst_status status; /* sticky: why no collective can be completed any more */
    char text[TEXT_BYTES];
    int readers; /* ranks that move data at this moment */
    struct pst__local_comm **ranks;
    pst__meeting *meetings, *spare;
    struct pst__channel *next;
} pst__channel;

typedef enum request_phase {
    MEETING = 0, /* not all ranks are here */
    READING      /* ours is read; the others may still read what is ours */
} request_phase;

typedef struct pst__request {
    pst__meeting *meeting;
    const pst_collective *collective;
    pst_stream *stream;
    request_phase phase;
    struct pst__request *next;
} pst__request;

typedef struct pst__local_comm {
    pst_comm comm;
    const pst__heap *heap;
    pst_device *device;
    pst__channel *channel;
    uint64_t started;
    const void **sources; /* scratch: one a rank */
    pst__request *active, *spare;
    char text[TEXT_BYTES];
} pst__local_comm;

struct pst_local_world {
    const pst__heap *heap;
    pst__error *error;
    int size;
    int lock; /* guards the list of channels */
    pst__channel *channels;
};

/* Acquire pairs with the release in unlock: what the last holder wrote is seen. */
static void lock(int *word) {
    while (pst__swap_acq_rel(word, 1) != 0)
        (void)sched_yield();
}

static void unlock(int *word) {
    pst__store_release(word, 0); /* pairs with the swap in lock */
}

/* ---- meetings; all under the channel's lock -------------------------------------------------- */

static size_t meeting_bytes(const pst_local_world *world) {
    return sizeof(pst__meeting) + (size_t)world->size * sizeof(pst_collective *);
}

static pst__meeting *meeting_create(pst__channel *channel) {
    pst__meeting *meeting = channel->spare;
    if (meeting != NULL) {
        channel->spare = meeting->next;
    } else {
        meeting = pst__heap_alloc(channel->world->heap, meeting_bytes(channel->world));
        if (meeting == NULL) return NULL;
    }
    memset(meeting, 0, meeting_bytes(channel->world));
    meeting->posted = (const pst_collective **)(meeting + 1);
    return meeting;
}

static pst__meeting *meeting_at(pst__channel *channel, uint64_t position) {
    pst__meeting **link = &channel->meetings;
    while (*link != NULL && (*link)->position != position)
        link = &(*link)->next;
    if (*link == NULL) {
        *link = meeting_create(channel);
        if (*link != NULL) (*link)->position = position;
    }
    return *link;
}

static void meeting_recycle(pst__channel *channel, pst__meeting *meeting) {
    pst__meeting **link = &channel->meetings;
    while (*link != meeting)
        link = &(*link)->next;
    *link = meeting->next;
    meeting->next = channel->spare;
    channel->spare = meeting;
}

/* The woken ranks' collectives live until they know that they have ended, which needs our lock. */
static void wake_meeting(const pst__channel *channel, const pst__meeting *meeting) {
    for (int rank = 0; rank < channel->world->size; rank++) {
        const pst_collective *posted = meeting->posted[rank];
        if (posted != NULL && posted->wake != NULL) posted->wake(posted->wake_argument);
    }
}

static void fail_channel(pst__channel *channel, pst_status status) {
    channel->status = status;
    for (pst__meeting *meeting = channel->meetings; meeting != NULL; meeting = meeting->next)
        wake_meeting(channel, meeting);
}

/* ---- do all ranks mean the same collective? -------------------------------------------------- */

static size_t payload_bytes(const pst_collective *collective) {
    if (collective->kind == PST_ALL_REDUCE || collective->kind == PST_BROADCAST)
        return collective->count * pst_dtype_size(collective->dtype);
    return collective->source_bytes;
}

static const char *name_of(const pst_collective *collective) {
    return collective->name == NULL ? "" : collective->name;
}

static int same_collective(const pst_collective *a, const pst_collective *b) {
    return a->kind == b->kind && strcmp(name_of(a), name_of(b)) == 0 && a->ticket == b->ticket &&
           a->dtype == b->dtype && payload_bytes(a) == payload_bytes(b) && a->reduce == b->reduce &&
           a->root == b->root && a->segment_count == b->segment_count;
}

static int describe(char *text, size_t size, int rank, const pst_collective *collective) {
    return snprintf(text, size, "rank %d: %s '%.80s' of %zu bytes (%s, ticket %llu)", rank,
                    pst_collective_name(collective->kind), name_of(collective),
                    payload_bytes(collective), pst_dtype_name(collective->dtype),
                    (unsigned long long)collective->ticket);
}

static pst_status report_mismatch(pst__channel *channel, int rank_a, const pst_collective *a,
                                  int rank_b, const pst_collective *b) {
    char one[192], other[192];
    (void)describe(one, sizeof one, rank_a, a);
    (void)describe(other, sizeof other, rank_b, b);
    (void)snprintf(channel->text, sizeof channel->text,
                   "channel %d: %s, %s; all ranks must start the same collectives in one order",
                   channel->number, one, other);
    fail_channel(channel, PST_EMISMATCH);
    return PST_EMISMATCH;
}

static pst_status check_same(pst__channel *channel, const pst__meeting *meeting, int rank,
                             const pst_collective *collective) {
    for (int peer = 0; peer < channel->world->size; peer++) {
        const pst_collective *posted = meeting->posted[peer];
        if (posted != NULL && !same_collective(posted, collective))
            return peer < rank ? report_mismatch(channel, peer, posted, rank, collective)
                               : report_mismatch(channel, rank, collective, peer, posted);
    }
    return PST_OK;
}

/* ---- data ------------------------------------------------------------------------------------ */

static const pst_collective *of_rank(const pst__request *request, int rank) {
    return request->meeting->posted[rank];
}

static pst_status copy(pst__local_comm *local, pst_stream *stream, void *destination,
                       const void *source, size_t bytes) {
    if (bytes == 0 || destination == source) return PST_OK;
    pst_copy piece = {destination, source, bytes};
    return local->device->ops->copy(local->device, stream, &piece, 1);
}

static pst_status read_gather(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    for (size_t i = 0; i < own->segment_count; i++) {
        const pst_segment *segment = &own->segments[i];
        const char *source = of_rank(request, (int)segment->peer)->source;
        pst_status status =
            copy(local, request->stream, (char *)own->destination + segment->destination,
                 source + segment->source, segment->bytes);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static pst_status read_piece(pst__local_comm *local, const pst__request *request,
                             const pst_reduce_piece *piece) {
    const pst_collective *own = request->collective;
    for (int rank = 0; rank < local->comm.size; rank++) {
        const pst_collective *theirs = of_rank(request, rank);
        local->sources[rank] = (const char *)theirs->source +
                               (size_t)local->comm.rank * theirs->stride + piece->offset;
    }
    const pst_sum sum = pst__sum_of(own, piece, local->sources, (size_t)local->comm.size);
    return local->device->ops->sum(local->device, request->stream, &sum);
}

static pst_status read_reduce_scatter(pst__local_comm *local, const pst__request *request) {
    for (size_t i = 0; i < request->collective->piece_count; i++) {
        pst_status status = read_piece(local, request, &request->collective->pieces[i]);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* In place, so the result waits in staging until every rank has read. */
static pst_status read_all_reduce(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    for (int rank = 0; rank < local->comm.size; rank++)
        local->sources[rank] = of_rank(request, rank)->destination;
    pst_sum sum = {.destination = own->staging,
                   .sources = local->sources,
                   .source_count = (size_t)local->comm.size,
                   .count = own->count,
                   .scale = pst__scale_of(own),
                   .destination_dtype = own->dtype,
                   .source_dtype = own->dtype};
    const pst_device_ops *ops = local->device->ops;
    return own->reduce == PST_REDUCE_MAX ? ops->maximum(local->device, request->stream, &sum)
                                         : ops->sum(local->device, request->stream, &sum);
}

static pst_status read_broadcast(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    return copy(local, request->stream, own->destination, of_rank(request, own->root)->destination,
                payload_bytes(own));
}

/* Moves this rank's share of the data: reads the others' sources, which no rank changes before all
 * have finished reading. */
static pst_status read_others(pst__local_comm *local, const pst__request *request) {
    switch (request->collective->kind) {
    case PST_ALL_GATHER:
        return read_gather(local, request);
    case PST_REDUCE_SCATTER:
        return read_reduce_scatter(local, request);
    case PST_ALL_REDUCE:
        return read_all_reduce(local, request);
    case PST_BROADCAST:
        return read_broadcast(local, request);
    default:
        return PST_OK;
    }
}

/* What may only be written when all ranks have read. */
static pst_status write_back(pst__local_comm *local, const pst__request *request) {
    const pst_collective *own = request->collective;
    if (own->kind != PST_ALL_REDUCE) return PST_OK;
    return copy(local, request->stream, own->destination, own->staging, payload_bytes(own));
}

/* ---- requests -------------------------------------------------------------------------------- */

static pst__request *request_take(pst__local_comm *local) {
    pst__request *request = local->spare;
    if (request != NULL)
        local->spare = request->next;
    else
        request = pst__heap_alloc(local->heap, sizeof *request);
    return request;
}

static void request_give(pst__local_comm *local, pst__request *request) {
    pst__request **link = &local->active;
    while (*link != request)
        link = &(*link)->next;
    *link = request->next;
    request->next = local->spare;
    local->spare = request;
}

static pst_status post(pst__local_comm *local, const pst_collective *collective,
                       pst__request *request) {
    pst__channel *channel = local->channel;
    int rank = local->comm.rank;
    if (channel->status != PST_OK) return channel->status;
    pst__meeting *meeting = meeting_at(channel, local->started);
    if (meeting == NULL) return PST_ENOMEM;
    pst_status status = check_same(channel, meeting, rank, collective);
    if (status != PST_OK) return status;
    local->started++;
    meeting->posted[rank] = collective;
    meeting->arrived++;
    request->meeting = meeting;
    if (meeting->arrived == channel->world->size) wake_meeting(channel, meeting);
    return PST_OK;
}

/* Ends a request that has failed: only while nobody reads what belongs to its caller. */
static pst_status give_up(pst__local_comm *local, pst__request *request) {
    pst__channel *channel = local->channel;
    if (channel->readers > 0) return PST_PENDING;
    request->meeting->posted[local->comm.rank] = NULL;
    request_give(local, request);
    return channel->status;
}

/* Called and left with the lock held, but data moves without it. */
static void read_unlocked(pst__local_comm *local, pst__request *request) {
    pst__channel *channel = local->channel;
    channel->readers++;
    unlock(&channel->lock);
    pst_status status = read_others(local, request);
    lock(&channel->lock);
    channel->readers--;
    request->phase = READING;
    if (status != PST_OK) {
        (void)snprintf(channel->text, sizeof channel->text,
                       "channel %d: rank %d could not move the data of %s '%.80s': %s",
                       channel->number, local->comm.rank,
                       pst_collective_name(request->collective->kind), name_of(request->collective),
                       pst_status_text(status));
        fail_channel(channel, status);
        return;
    }
    request->meeting->finished_reading++;
    int all = request->meeting->finished_reading == channel->world->size;
    if (all) wake_meeting(channel, request->meeting);
}

static void leave_meeting(pst__local_comm *local, pst__request *request) {
    pst__channel *channel = local->channel;
    pst__meeting *meeting = request->meeting;
    meeting->posted[local->comm.rank] = NULL;
    if (++meeting->left == channel->world->size) meeting_recycle(channel, meeting);
    request_give(local, request);
}

static pst_status advance(pst__local_comm *local, pst__request *request) {
    pst__channel *channel = local->channel;
    int size = channel->world->size;
    if (request->phase == MEETING && channel->status == PST_OK && request->meeting->arrived == size)
        read_unlocked(local, request);
    /* A rank may leave when its last collective has ended for it: that does not fail this one. */
    if (request->meeting->finished_reading < size)
        return channel->status == PST_OK ? PST_PENDING : give_up(local, request);
    pst_status status = write_back(local, request);
    leave_meeting(local, request);
    return status;
}

static pst_status local_test(pst_comm *comm, void *argument) {
    pst__local_comm *local = comm->context;
    lock(&local->channel->lock);
    pst_status status = advance(local, argument);
    unlock(&local->channel->lock);
    return status;
}

static pst_status local_start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                              void **request) {
    pst__local_comm *local = comm->context;
    pst__request *fresh = request_take(local);
    if (fresh == NULL) return PST_ENOMEM;
    *fresh = (pst__request){.collective = collective, .stream = stream, .next = local->active};
    local->active = fresh;
    lock(&local->channel->lock);
    pst_status status = post(local, collective, fresh);
    if (status == PST_OK)
        status = advance(local, fresh);
    else
        request_give(local, fresh);
    unlock(&local->channel->lock);
    *request = fresh;
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

static size_t local_staging_bytes(pst_comm *comm, const pst_collective *collective) {
    (void)comm;
    return collective->kind == PST_ALL_REDUCE ? payload_bytes(collective) : 0;
}

static pst_status local_abort(pst_comm *comm, pst_status status) {
    pst__local_comm *local = comm->context;
    pst__channel *channel = local->channel;
    lock(&channel->lock);
    if (channel->status == PST_OK) {
        (void)snprintf(channel->text, sizeof channel->text, "channel %d: rank %d aborted: %s",
                       channel->number, comm->rank, pst_status_text(status));
        fail_channel(channel, status);
    }
    pst_status result = channel->readers > 0 ? PST_EBUSY : PST_OK;
    unlock(&channel->lock);
    return result;
}

static pst_status local_status(pst_comm *comm) {
    pst__local_comm *local = comm->context;
    lock(&local->channel->lock);
    pst_status status = local->channel->status;
    unlock(&local->channel->lock);
    return status;
}

static const char *local_error_text(pst_comm *comm) {
    pst__local_comm *local = comm->context;
    lock(&local->channel->lock);
    memcpy(local->text, local->channel->text, sizeof local->text);
    unlock(&local->channel->lock);
    return local->text;
}

static void free_requests(pst__local_comm *local, pst__request *list) {
    while (list != NULL) {
        pst__request *next = list->next;
        pst__heap_free(local->heap, list, sizeof *list);
        list = next;
    }
}

/* Leaves the channel: who waits for this rank, or will, gets PST_EPEER. */
static void leave_channel(pst__local_comm *local) {
    pst__channel *channel = local->channel;
    lock(&channel->lock);
    channel->ranks[local->comm.rank] = NULL;
    if (channel->status == PST_OK) {
        (void)snprintf(channel->text, sizeof channel->text,
                       "channel %d: rank %d has left (its communicator was destroyed)",
                       channel->number, local->comm.rank);
        fail_channel(channel, PST_EPEER);
    }
    while (channel->readers > 0) { /* each reads for a bounded time and then none begins again */
        unlock(&channel->lock);
        (void)sched_yield();
        lock(&channel->lock);
    }
    for (pst__request *request = local->active; request != NULL; request = request->next)
        request->meeting->posted[local->comm.rank] = NULL;
    unlock(&channel->lock);
}

static void local_free(pst__local_comm *local) {
    free_requests(local, local->active);
    free_requests(local, local->spare);
    pst__heap_free(local->heap, local->sources, (size_t)local->comm.size * sizeof(void *));
    pst__heap_free(local->heap, local, sizeof *local);
}

static void local_destroy(pst_comm *comm) {
    pst__local_comm *local = comm->context;
    leave_channel(local);
    local_free(local);
}

static const pst_comm_ops local_ops = {
    .api_version = PST_COMM_API_VERSION,
    .kinds = (1u << PST_COLLECTIVE_KIND_COUNT) - 1u,
    .name = "local",
    .staging_bytes = local_staging_bytes,
    .start = local_start,
    .test = local_test,
    .abort = local_abort,
    .status = local_status,
    .error_text = local_error_text,
    .destroy = local_destroy,
};

/* ---- worlds and channels --------------------------------------------------------------------- */

pst_status pst_local_world_create(pst_runtime *runtime, int size, pst_local_world **world) {
    *world = NULL;
    pst__error *error = pst__runtime_error(runtime);
    if (size < 1) return pst__fail(error, PST_EINVAL, "local world: size %d is not positive", size);
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst_local_world *fresh = pst__heap_alloc(heap, sizeof *fresh);
    if (fresh == NULL) return pst__fail(error, PST_ENOMEM, "local world: no memory");
    fresh->heap = heap;
    fresh->error = error;
    fresh->size = size;
    *world = fresh;
    return PST_OK;
}

static void free_meetings(const pst_local_world *world, pst__meeting *list) {
    while (list != NULL) {
        pst__meeting *next = list->next;
        pst__heap_free(world->heap, list, meeting_bytes(world));
        list = next;
    }
}

static size_t ranks_bytes(const pst_local_world *world) {
    return (size_t)world->size * sizeof(pst__local_comm *);
}

void pst_local_world_destroy(pst_local_world *world) {
    if (world == NULL) return;
    for (pst__channel *channel = world->channels; channel != NULL;) {
        pst__channel *next = channel->next;
        free_meetings(world, channel->meetings);
        free_meetings(world, channel->spare);
        pst__heap_free(world->heap, channel->ranks, ranks_bytes(world));
        pst__heap_free(world->heap, channel, sizeof *channel);
        channel = next;
    }
    pst__heap_free(world->heap, world, sizeof *world);
}

static pst__channel *channel_create(pst_local_world *world, int number) {
    pst__channel *channel = pst__heap_alloc(world->heap, sizeof *channel);
    if (channel == NULL) return NULL;
    channel->ranks = pst__heap_alloc(world->heap, ranks_bytes(world));
    if (channel->ranks == NULL) {
        pst__heap_free(world->heap, channel, sizeof *channel);
        return NULL;
    }
    channel->world = world;
    channel->number = number;
    channel->next = world->channels;
    world->channels = channel;
    return channel;
}

static pst__channel *channel_find(pst_local_world *world, int number) {
    pst__channel *channel = world->channels;
    while (channel != NULL && channel->number != number)
        channel = channel->next;
    return channel != NULL ? channel : channel_create(world, number);
}

static pst_status join(pst_local_world *world, pst__local_comm *local, int number,
                       pst__error *error) {
    lock(&world->lock);
    pst__channel *channel = channel_find(world, number);
    unlock(&world->lock);
    if (channel == NULL) return pst__fail(error, PST_ENOMEM, "local channel %d: no memory", number);
    lock(&channel->lock);
    int taken = channel->ranks[local->comm.rank] != NULL;
    if (!taken) channel->ranks[local->comm.rank] = local;
    unlock(&channel->lock);
    local->channel = channel;
    return taken ? pst__fail(error, PST_EBUSY, "local channel %d: rank %d is there already", number,
                             local->comm.rank)
                 : PST_OK;
}

pst_status pst_local_comm_create(pst_local_world *world, pst_runtime *runtime, int rank,
                                 int channel, pst_comm **comm) {
    *comm = NULL;
    pst__error *error = pst__runtime_error(runtime);
    if (rank < 0 || rank >= world->size)
        return pst__fail(error, PST_EINVAL, "local channel %d: rank %d is not in 0..%d", channel,
                         rank, world->size - 1);
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst__local_comm *local = pst__heap_alloc(heap, sizeof *local);
    if (local == NULL) return pst__fail(error, PST_ENOMEM, "local communicator: no memory");
    local->heap = heap;
    local->device = pst_runtime_host(runtime);
    local->comm = (pst_comm){&local_ops, local, rank, world->size};
    local->sources = pst__heap_alloc(heap, (size_t)world->size * sizeof(void *));
    pst_status status = local->sources == NULL
                            ? pst__fail(error, PST_ENOMEM, "local communicator: no memory")
                            : join(world, local, channel, error);
    if (status != PST_OK) {
        local_free(local);
        return status;
    }
    *comm = &local->comm;
    return PST_OK;
}
