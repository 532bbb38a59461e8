/* Gradients into flat shards: copied into a bucket as they come, which goes out when it is full. */
#include "ops/flat.h"

#include "mem/arena.h"

#include <time.h>

/* ---- buckets --------------------------------------------------------------------------------- */

static size_t chunk_bytes(const pst_flat *flat) {
    size_t world = flat->engine->world;
    return pst__round_up((flat->options.bucket_bytes + world - 1) / world, PST__FLAT_ALIGNMENT);
}

/* Peers may still read what a bucket has held. */
static pst_status refill(void *context, uint64_t id, pst_stream *stream) {
    pst_flat *flat = context;
    pst_comm *comm = flat->options.reduce_comm;
    uint64_t ticket = flat->engine->bucket_tickets[id];
    if (comm->ops->source_wait == NULL || ticket == 0) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, stream, ticket);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "waiting for the readers of ticket %llu failed: %s",
                          (unsigned long long)ticket, comm->ops->error_text(comm));
}

static pst_status create_buckets(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    if (engine->buckets != NULL) return PST_OK;
    pst_buckets_options options = {.size = sizeof options,
                                   .arena = engine->sources,
                                   .ranks = engine->world,
                                   .chunk_bytes = chunk_bytes(flat),
                                   .alignment = PST__FLAT_ALIGNMENT,
                                   .fixed = engine->asynchronous,
                                   .refill = engine->asynchronous ? refill : NULL,
                                   .refill_context = flat};
    return pst_buckets_create(engine->runtime, &options, &engine->buckets);
}

/* On an asynchronous device a dtype's two buckets lie in memory that is opened to peers once. */
static pst_status prepare(pst_flat *flat, pst_dtype dtype) {
    pst_zero *engine = flat->engine;
    pst_lease both;
    pst_status status = create_buckets(flat);
    if (status != PST_OK || !engine->asynchronous || flat->has_buckets[dtype]) return status;
    size_t bytes = pst__round_up(chunk_bytes(flat) * engine->world, PST_ARENA_ALIGNMENT);
    status = pst__flat_open(flat, 2 * bytes, &both);
    if (status != PST_OK) return status;
    pst_arena_release(engine->sources, &both, NULL);
    flat->has_buckets[dtype] = 1;
    return PST_OK;
}

/* ---- going out ------------------------------------------------------------------------------- */

static pst_status submit(pst_flat *flat, pst_dtype dtype, pst__operation *operation) {
    pst_zero *engine = flat->engine;
    pst_bucket bucket;
    pst_status status = pst_buckets_flush(engine->buckets, dtype, &bucket);
    if (status != PST_OK) return status;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_REDUCE_SCATTER;
    collective->name = "gradients";
    collective->dtype = dtype;
    collective->source = bucket.memory;
    collective->source_bytes = bucket.used_bytes;
    collective->stride = bucket.stride;
    collective->pieces = operation->pieces;
    collective->scale = 1.0;
    operation->bucket = bucket.id;
    operation->has_bucket = 1;
    status = pst__zero_record(engine, operation->ready);
    if (status != PST_OK) {
        pst__operation_give(engine, operation);
        return status;
    }
    size_t bytes = bucket.used_bytes * engine->world;
    status = pst__operation_submit(operation, bytes, &operation->ready, 1);
    if (status != PST_OK) return status;
    if (engine->asynchronous) engine->bucket_tickets[bucket.id] = collective->ticket;
    flat->stats.reduces++;
    flat->stats.reduce_bytes += bytes;
    if (!flat->options.single_buffer) return PST_OK;
    return pst__operation_wait(operation, "wait gradients", PST__REDUCE_LANE);
}

static pst_status flush(pst_flat *flat, pst_dtype dtype) {
    pst__operation *operation = flat->engine->open[dtype].operation;
    if (operation == NULL) return PST_OK;
    flat->engine->open[dtype] = (pst__open_bucket){0};
    flat->open_number[dtype] = 0;
    return pst__reduce_give_up(flat->engine, submit(flat, dtype, operation));
}

pst_status pst__flat_flush_all(pst_flat *flat) {
    pst_status status = PST_OK;
    for (int dtype = 0; status == PST_OK && dtype < PST_DTYPE_COUNT; dtype++)
        status = flush(flat, (pst_dtype)dtype);
    return status;
}

static int is_open(const pst_flat *flat, const pst__flat_parameter *parameter) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        if (flat->open_number[dtype] != 0 && parameter->bucket == flat->open_number[dtype])
            return 1;
    return 0;
}

/* Gradients that have not gone out are forgotten. */
void pst__flat_abandon_all(pst_flat *flat) {
    for (size_t i = 0; i < flat->parameter_count; i++) {
        pst__flat_parameter *parameter = &flat->parameters[i];
        if (is_open(flat, parameter) && !parameter->adds) parameter->has_sum = 0;
    }
    if (flat->engine->buckets != NULL) pst__bucket_abandon_all(flat->engine);
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        flat->open_number[dtype] = 0;
}

/* ---- coming in ------------------------------------------------------------------------------- */

/* Both buckets are on their way: the host waits for the launch of the older one. */
static pst_status wait_for_bucket(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    pst__operation *operation = pst__queue_of(engine, PST__REDUCE_LANE)->holding;
    while (operation != NULL && !operation->has_bucket)
        operation = operation->next;
    pst_status status = operation == NULL ? PST_ESTATE : pst__operation_wait_launch(operation);
    pst__operation_reap(engine);
    return status;
}

static pst_status take_slot(pst_flat *flat, pst_dtype dtype, size_t bytes, pst_slot *slot) {
    pst_zero *engine = flat->engine;
    for (;;) {
        pst_status status = pst_buckets_slot(engine->buckets, dtype, bytes, engine->compute, slot);
        if (status == PST_EBUSY)
            status = flush(flat, dtype);
        else if (status == PST_PENDING)
            status = wait_for_bucket(flat);
        else
            return status;
        if (status != PST_OK) return status;
    }
}

/* Elements [first, first + count) of every rank's chunk of a gradient. */
typedef struct part {
    pst__flat_parameter *parameter;
    const char *source;
    pst_dtype dtype, travels;
    size_t first, count;
} part;

static pst_status add_piece(pst_flat *flat, const part *part, const pst_slot *slot) {
    pst_zero *engine = flat->engine;
    pst__open_bucket *open = &engine->open[part->travels];
    pst_status status = PST_OK;
    if (open->operation == NULL) {
        status = pst__operation_take(engine, PST__REDUCE_LANE, &open->operation);
        if (status == PST_OK) flat->open_number[part->travels] = ++flat->buckets;
    }
    if (status != PST_OK) return status;
    size_t *count = &open->operation->work.collective.piece_count;
    status = pst__heap_grow(engine->heap, (void **)&open->operation->pieces,
                            &open->operation->piece_capacity, *count + 1,
                            sizeof *open->operation->pieces);
    if (status != PST_OK) return status;
    const pst__flat_parameter *parameter = part->parameter;
    char *target =
        (char *)parameter->target + part->first * pst_dtype_size(parameter->target_dtype);
    open->operation->pieces[(*count)++] =
        (pst_reduce_piece){.offset = slot->offset,
                           .count = part->count,
                           .destination = target,
                           .destination_dtype = parameter->target_dtype,
                           .accumulate = parameter->has_sum};
    return PST_OK;
}

/* What there is of the gradient, divided by the number of ranks, and zeros behind its end. */
static pst_status copy_in(pst_flat *flat, const part *part, const pst_slot *slot) {
    pst_zero *engine = flat->engine;
    const pst__flat_parameter *parameter = part->parameter;
    size_t casts = 0, size = pst_dtype_size(part->travels);
    for (size_t rank = 0; rank < engine->world; rank++) {
        size_t begin = rank * parameter->chunk + part->first;
        size_t left = begin < parameter->elements ? parameter->elements - begin : 0;
        size_t real = left < part->count ? left : part->count;
        char *memory = (char *)slot->memory + rank * slot->stride;
        if (real > 0)
            flat->casts[casts++] =
                (pst_cast){memory, part->source + begin * pst_dtype_size(part->dtype), real,
                           part->travels, part->dtype};
        if (real < part->count)
            flat->casts[casts++] = (pst_cast){memory + real * size, NULL, part->count - real,
                                              part->travels, part->travels};
    }
    pst_device *device = engine->device;
    pst_status status = device->ops->cast_scale_copy(device, engine->compute, flat->casts, casts,
                                                     1.0 / (double)engine->world);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "parameter '%s': copying its %s gradient failed",
                          parameter->name, pst_dtype_name(part->dtype));
}

static pst_status add_part(pst_flat *flat, const part *part) {
    pst_slot slot;
    pst_status status =
        take_slot(flat, part->travels, part->count * pst_dtype_size(part->travels), &slot);
    if (status == PST_OK) status = add_piece(flat, part, &slot);
    return status == PST_OK ? copy_in(flat, part, &slot) : status;
}

static pst_status add_gradient(pst_flat *flat, part part) {
    pst__flat_parameter *parameter = part.parameter;
    size_t most = chunk_bytes(flat) / pst_dtype_size(part.travels);
    pst_status status = prepare(flat, part.travels);
    if (status == PST_OK)
        status = pst__heap_grow(flat->engine->heap, (void **)&flat->casts, &flat->cast_capacity,
                                2 * flat->engine->world, sizeof *flat->casts);
    for (; status == PST_OK && part.first < parameter->chunk; part.first += part.count) {
        size_t left = parameter->chunk - part.first;
        part.count = left < most ? left : most;
        status = add_part(flat, &part);
    }
    parameter->bucket = flat->open_number[part.travels];
    parameter->adds = parameter->has_sum;
    parameter->has_sum = 1;
    return status;
}

pst_status pst_flat_reduce(pst_flat *flat, uint32_t index, const void *source, pst_dtype dtype,
                           pst_dtype travels) {
    pst_status status = pst__flat_check(flat, index);
    if (status != PST_OK) return status;
    pst__flat_parameter *parameter = &flat->parameters[index];
    if (parameter->target == NULL || parameter->elements == 0) return PST_OK;
    if (source == NULL || pst_dtype_size(dtype) == 0 || pst_dtype_size(travels) == 0)
        return pst__flat_fail(flat, PST_EINVAL,
                              "parameter '%s': its gradient has no memory, or no dtype",
                              parameter->name);
    /* No two of a parameter travel together: the second is added to the first. */
    if (is_open(flat, parameter)) status = pst__flat_flush_all(flat);
    if (status == PST_OK)
        status = add_gradient(
            flat,
            (part){.parameter = parameter, .source = source, .dtype = dtype, .travels = travels});
    return pst__reduce_give_up(flat->engine, status);
}

/* ---- backwards ------------------------------------------------------------------------------- */

pst_status pst_flat_begin_backward(pst_flat *flat, int is_last) {
    if (flat == NULL) return PST_EINVAL;
    pst__flat_abandon_all(flat);
    for (size_t i = 0; flat->is_last && i < flat->parameter_count; i++) {
        pst__flat_parameter *parameter = &flat->parameters[i];
        parameter->is_old |= parameter->has_sum;
        parameter->has_sum = 0;
    }
    flat->is_last = is_last != 0;
    return pst__operation_check_comms(flat->engine);
}

static pst_status zero(pst_flat *flat, const pst__flat_parameter *parameter) {
    pst_device *device = flat->engine->device;
    const pst_cast zeros = {.destination = parameter->target,
                            .count = parameter->chunk,
                            .destination_dtype = parameter->target_dtype,
                            .source_dtype = parameter->target_dtype};
    return device->ops->cast_scale_copy(device, flat->engine->compute, &zeros, 1, 1.0);
}

/* The optimizer finds zeros where nothing had a gradient since the last update. */
static pst_status zero_old(pst_flat *flat) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->parameter_count; i++) {
        pst__flat_parameter *parameter = &flat->parameters[i];
        if (parameter->target != NULL && parameter->is_old && !parameter->has_sum)
            status = zero(flat, parameter);
        parameter->is_old = 0;
    }
    return status;
}

static pst_status wait_reductions(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    pst_status status = PST_OK;
    for (pst__operation *operation = pst__queue_of(engine, PST__REDUCE_LANE)->oldest;
         status == PST_OK && operation != NULL; operation = operation->next)
        if (operation->work.collective.kind == PST_REDUCE_SCATTER)
            status = pst__operation_wait(operation, "wait gradients", PST__REDUCE_LANE);
    return status == PST_OK ? pst_runtime_status(engine->runtime) : status;
}

/* On the host a reduction's callback may be behind its task's end. */
static void release_buckets(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    const struct timespec pause = {0, 50000};
    const pst__queue *queue = pst__queue_of(engine, PST__REDUCE_LANE);
    if (engine->buckets == NULL) return;
    pst__operation_reap(engine);
    for (int i = 0; i < 2000 && queue->holding != NULL && queue->holding->has_bucket; i++) {
        (void)nanosleep(&pause, NULL);
        pst__operation_reap(engine);
    }
    pst_buckets_trim(engine->buckets);
    pst_arena_trim(engine->sources);
}

pst_status pst_flat_end_backward(pst_flat *flat, int release) {
    if (flat == NULL) return PST_EINVAL;
    pst_status status = pst_runtime_status(flat->engine->runtime);
    if (status == PST_OK) status = pst__flat_flush_all(flat);
    if (status == PST_OK) status = wait_reductions(flat);
    if (status == PST_OK && flat->is_last) status = zero_old(flat);
    if (status == PST_OK && flat->is_last) status = pst__flat_guard(flat);
    if (status == PST_OK && flat->is_last) status = pst_flat_updated(flat);
    if (status == PST_OK) status = pst__operation_check_comms(flat->engine);
    if (status == PST_OK && release) release_buckets(flat);
    return status;
}
