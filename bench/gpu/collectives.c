#include "collectives.h"

#include <penstock/copy_engine.h>
#include <penstock/cuda.h>
#include <penstock/nccl.h>
#include <penstock/penstock.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 16
#define IN_FLIGHT  2 /* buckets, and stagings */

/* What one collective in flight needs until it is over. */
typedef struct slot {
    pst_collective_work work;
    pst_reduce_piece piece;
    void *staging;
    size_t staging_bytes;
    pst_event *filled;        /* its bucket */
    pst_event *pulled, *over; /* its first part, and all of it */
    uint64_t ticket;
} slot;

struct collectives {
    pst_runtime *runtime;
    pst_device *device;
    pst_comm *comm;
    pst_stream *stream;  /* the caller's: copies into buckets */
    pst_stream *lane;    /* collectives */
    pst_stream *summing; /* second parts of reductions */
    int one_sided;       /* registered memory only, and scaling with the sum */
    size_t gap;          /* bytes at the end of a chunk that are not reduced */
    unsigned parts;      /* of a reduction, that are run */
    void *memory;
    size_t memory_bytes;
    pst_segment segments[MOST_RANKS];
    slot slots[IN_FLIGHT];
    uint64_t tickets, reductions;
    collectives_exchange exchange;
    pst_work work;
    char text[1024];
};

static pst_status exchange_of(void *context, const void *mine, size_t bytes, void *all) {
    collectives *own = context;
    return own->exchange(NULL, mine, bytes, all) == 0 ? PST_OK : PST_EPEER;
}

const char *collectives_error(const collectives *own) {
    return own->text;
}

static int failed(collectives *own, pst_status status) {
    const char *of_device = own->device != NULL && own->device->ops->error_text != NULL
                                ? own->device->ops->error_text(own->device)
                                : "";
    char text[512] = "";
    if (status == PST_OK) return 0;
    if (own->runtime != NULL) (void)pst_runtime_error(own->runtime, text, sizeof text);
    (void)snprintf(own->text, sizeof own->text, "%s [%s] [%s]", pst_status_text(status), text,
                   of_device);
    return 1;
}

/* ---- opening --------------------------------------------------------------------------------- */

static pst_status create_crossover(collectives *own, const pst_exchange *exchange) {
    pst_comm *large = NULL, *small = NULL;
    pst_status status = pst_ce_create(own->runtime, own->device, exchange, NULL, &large);
    if (status == PST_OK)
        status = pst_nccl_comm_create(own->runtime, own->device, exchange, NULL, &small);
    if (status != PST_OK) return status;
    return pst_crossover_create(own->runtime, large, small, exchange, NULL, &own->comm);
}

static pst_status create_comm(collectives *own, const char *name, const pst_exchange *exchange) {
    const pst_nccl_options options = {.size = sizeof options, .name = name};
    if (strcmp(name, "crossover") == 0) {
        own->one_sided = 1;
        return create_crossover(own, exchange);
    }
    if (strncmp(name, "ce", 2) == 0) {
        const pst_ce_options by_engines = {
            .size = sizeof by_engines, .name = name, .sums_pass = strstr(name, "-pass") != NULL};
        own->one_sided = 1;
        return pst_ce_create(own->runtime, own->device, exchange, &by_engines, &own->comm);
    }
    if (strcmp(name, "nccl-gaps") == 0) own->gap = 512;
    return pst_nccl_comm_create(own->runtime, own->device, exchange, &options, &own->comm);
}

static pst_status create_slots(collectives *own) {
    const pst_device_ops *ops = own->device->ops;
    pst_status status = ops->stream_create(own->device, 0, &own->summing);
    if (status == PST_OK) status = ops->stream_create(own->device, 0, &own->lane);
    for (int i = 0; status == PST_OK && i < IN_FLIGHT; i++) {
        status = ops->event_create(own->device, 0, &own->slots[i].filled);
        if (status == PST_OK) status = ops->event_create(own->device, 0, &own->slots[i].pulled);
        if (status == PST_OK) status = ops->event_create(own->device, 0, &own->slots[i].over);
    }
    return status;
}

int collectives_open(const char *comm, int rank, int size, int ordinal,
                     collectives_exchange exchange, collectives **opened) {
    collectives *own = calloc(1, sizeof *own);
    *opened = own;
    if (own == NULL || size > MOST_RANKS) return 1;
    own->exchange = exchange;
    own->parts = COLLECTIVES_ALL_PARTS;
    pst_exchange table = {exchange_of, own, rank, size};
    const pst_runtime_options options = {.size = sizeof options, .rank = rank, .world_size = size};
    const pst_cuda_options cuda = {.size = sizeof cuda, .ordinal = ordinal};
    pst_status status = pst_runtime_create(&options, &own->runtime);
    if (status == PST_OK) status = pst_cuda_device_create(own->runtime, &cuda, &own->device);
    if (status == PST_OK) status = create_comm(own, comm, &table);
    if (status == PST_OK) status = create_slots(own);
    return failed(own, status);
}

int collectives_use_stream(collectives *own, void *native) {
    return failed(own, own->device->ops->stream_wrap(own->device, native, &own->stream));
}

int collectives_memory(collectives *own, size_t bytes, void **memory) {
    pst_status status =
        own->device->ops->alloc(own->device, PST_MEMORY_DEVICE, bytes, &own->memory);
    own->memory_bytes = bytes;
    *memory = own->memory;
    if (status == PST_OK && own->comm->ops->open_memory != NULL)
        status = own->comm->ops->open_memory(own->comm, own->memory, bytes);
    return failed(own, status);
}

static void free_staging(collectives *own, slot *slot) {
    if (slot->staging != NULL)
        own->device->ops->free(own->device, PST_MEMORY_DEVICE, slot->staging, slot->staging_bytes);
    slot->staging = NULL;
}

/* Everything enqueued is over. */
void collectives_close(collectives *own) {
    const pst_device_ops *ops = own->device->ops;
    for (int i = 0; i < IN_FLIGHT; i++)
        free_staging(own, &own->slots[i]);
    if (own->comm != NULL) own->comm->ops->destroy(own->comm);
    for (int i = 0; i < IN_FLIGHT; i++) {
        ops->event_destroy(own->device, own->slots[i].filled);
        ops->event_destroy(own->device, own->slots[i].pulled);
        ops->event_destroy(own->device, own->slots[i].over);
    }
    ops->stream_destroy(own->device, own->summing);
    ops->stream_destroy(own->device, own->lane);
    if (own->stream != NULL) ops->stream_destroy(own->device, own->stream);
    if (own->memory != NULL)
        ops->free(own->device, PST_MEMORY_DEVICE, own->memory, own->memory_bytes);
    ops->destroy(own->device);
    pst_runtime_destroy(own->runtime);
    free(own);
}

/* ---- collectives ----------------------------------------------------------------------------- */

static pst_status grow_staging(collectives *own, slot *slot) {
    size_t bytes = own->comm->ops->staging_bytes(own->comm, &slot->work.collective);
    if (bytes > slot->staging_bytes) {
        free_staging(own, slot);
        slot->staging_bytes = 0;
        pst_status status =
            own->device->ops->alloc(own->device, PST_MEMORY_DEVICE, bytes, &slot->staging);
        if (status != PST_OK) return status;
        slot->staging_bytes = bytes;
    }
    slot->work.collective.staging = slot->staging;
    return PST_OK;
}

/* Behind what is on the caller's stream. */
static pst_status launch(collectives *own, slot *slot) {
    const pst_device_ops *ops = own->device->ops;
    slot->work.collective.ticket = slot->ticket = ++own->tickets;
    pst_status status = ops->event_record(own->device, slot->filled, own->stream);
    if (status == PST_OK) status = ops->stream_wait(own->device, own->lane, slot->filled);
    own->work = pst_collective_as_work(&slot->work);
    return status == PST_OK ? ops->launch(own->device, own->lane, &own->work) : status;
}

/* The second part runs beside the next collective. */
static pst_status launch_sum(collectives *own, slot *slot, pst_stream *behind) {
    const pst_device_ops *ops = own->device->ops;
    own->work = pst_combine_as_work(&slot->work);
    pst_status status = ops->event_record(own->device, slot->pulled, behind);
    if (status == PST_OK) status = ops->stream_wait(own->device, own->summing, slot->pulled);
    if (status == PST_OK) status = ops->launch(own->device, own->summing, &own->work);
    if (status == PST_OK) status = ops->event_record(own->device, slot->over, own->summing);
    return status;
}

int collectives_gather(collectives *own, const void *source, size_t chunk, void *destination) {
    slot *slot = &own->slots[0];
    for (int rank = 0; rank < own->comm->size; rank++)
        own->segments[rank] = (pst_segment){(uint32_t)rank, 0, (size_t)rank * chunk, chunk};
    slot->work = (pst_collective_work){.comm = own->comm,
                                       .collective = {.kind = PST_ALL_GATHER,
                                                      .name = "gather",
                                                      .dtype = PST_BFLOAT16,
                                                      .source = source,
                                                      .source_bytes = chunk,
                                                      .destination = destination,
                                                      .segments = own->segments,
                                                      .segment_count = (size_t)own->comm->size}};
    pst_status status = grow_staging(own, slot);
    if (status == PST_OK) status = launch(own, slot);
    if (status == PST_OK)
        status = own->device->ops->event_record(own->device, slot->over, own->lane);
    return failed(own, status);
}

/* The slot's last use is over here, and its bucket has been read by the others. */
static pst_status wait_for_slot(collectives *own, slot *slot) {
    pst_status status = own->device->ops->stream_wait(own->device, own->stream, slot->over);
    if (status != PST_OK || own->comm->ops->source_wait == NULL || slot->ticket == 0) return status;
    return own->comm->ops->source_wait(own->comm, own->stream, slot->ticket);
}

static pst_status fill_bucket(collectives *own, void *bucket, const void *gradients, size_t bytes) {
    pst_cast cast = {bucket, gradients, bytes / 2, PST_BFLOAT16, PST_BFLOAT16};
    return own->device->ops->cast_scale_copy(own->device, own->stream, &cast, 1,
                                             own->one_sided ? 1.0 : 1.0 / own->comm->size);
}

static pst_collective reduction_of(const collectives *own, slot *slot, const void *bucket,
                                   size_t chunk, float *target) {
    size_t reduced = chunk > 8 * own->gap ? chunk - own->gap : chunk;
    slot->piece = (pst_reduce_piece){.count = reduced / 2,
                                     .destination = target,
                                     .destination_dtype = PST_FLOAT32,
                                     .accumulate = 1};
    return (pst_collective){.kind = PST_REDUCE_SCATTER,
                            .name = "reduce",
                            .dtype = PST_BFLOAT16,
                            .source = bucket,
                            .source_bytes = reduced,
                            .stride = chunk,
                            .scale = own->one_sided ? 1.0 / own->comm->size : 1,
                            .pieces = &slot->piece,
                            .piece_count = 1};
}

static pst_status run_parts(collectives *own, slot *slot, void *bucket, const void *gradients,
                            size_t bytes) {
    const pst_device_ops *ops = own->device->ops;
    pst_stream *last = own->stream;
    pst_status status = wait_for_slot(own, slot);
    if (status == PST_OK && (own->parts & COLLECTIVES_COPY_IN) != 0)
        status = fill_bucket(own, bucket, gradients, bytes);
    if (status == PST_OK && (own->parts & COLLECTIVES_PULL) != 0) {
        status = launch(own, slot);
        last = own->lane;
    }
    if (status != PST_OK) return status;
    if (slot->work.combine_apart && (own->parts & COLLECTIVES_SUM) != 0)
        return launch_sum(own, slot, last);
    return ops->event_record(own->device, slot->over, last);
}

int collectives_reduce(collectives *own, const void *gradients, size_t chunk, void *buckets,
                       float *target) {
    const uint64_t turn = own->reductions++ % IN_FLIGHT;
    slot *slot = &own->slots[turn];
    size_t bytes = chunk * (size_t)own->comm->size;
    char *bucket = (char *)buckets + turn * bytes;
    slot->work = (pst_collective_work){.comm = own->comm,
                                       .collective = reduction_of(own, slot, bucket, chunk, target),
                                       .combine_apart = own->comm->ops->combine != NULL};
    pst_status status = grow_staging(own, slot);
    return failed(own, status == PST_OK ? run_parts(own, slot, bucket, gradients, bytes) : status);
}

int collectives_choose(collectives *own, unsigned parts) {
    const unsigned split = parts & (COLLECTIVES_PULL | COLLECTIVES_SUM);
    if (own->comm->ops->combine == NULL && (split == COLLECTIVES_PULL || split == COLLECTIVES_SUM))
        return failed(own, PST_EUNSUPPORTED); /* it does both in one */
    own->parts = parts;
    return 0;
}

int collectives_join(collectives *own) {
    pst_status status = PST_OK;
    for (int i = 0; status == PST_OK && i < IN_FLIGHT; i++)
        status = own->device->ops->stream_wait(own->device, own->stream, own->slots[i].over);
    return failed(own, status);
}

int collectives_status(collectives *own) {
    return failed(own, own->comm->ops->status(own->comm));
}
