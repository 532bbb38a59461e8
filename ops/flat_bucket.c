/* Buckets of flat shards' gradients: filled beside compute, and out as one reduce-scatter when
 * full.
 */
#include "ops/flat.h"

#include "mem/arena.h"

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

static size_t buckets_of(const pst_flat *flat) {
    return flat->options.single_buffer ? 1 : 2;
}

static pst_status create_buckets(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    if (engine->buckets != NULL) return PST_OK;
    pst_buckets_options options = {.size = sizeof options,
                                   .arena = engine->sources,
                                   .ranks = engine->world,
                                   .chunk_bytes = chunk_bytes(flat),
                                   .alignment = PST__FLAT_ALIGNMENT,
                                   .per_dtype = buckets_of(flat),
                                   .fixed = engine->asynchronous,
                                   .refill = engine->asynchronous ? refill : NULL,
                                   .refill_context = flat};
    return pst_buckets_create(engine->runtime, &options, &engine->buckets);
}

/* On an asynchronous device a dtype's buckets lie in memory that is opened to peers once. */
static pst_status prepare(pst_flat *flat, pst_dtype dtype) {
    pst_zero *engine = flat->engine;
    pst_lease all;
    pst_status status = create_buckets(flat);
    if (status != PST_OK || !engine->asynchronous || flat->has_buckets[dtype]) return status;
    size_t bytes = pst__round_up(chunk_bytes(flat) * engine->world, PST_ARENA_ALIGNMENT);
    status = pst__flat_open(flat, buckets_of(flat) * bytes, &all);
    if (status != PST_OK) return status;
    pst_arena_release(engine->sources, &all, NULL);
    flat->has_buckets[dtype] = 1;
    return PST_OK;
}

/* ---- going out ------------------------------------------------------------------------------- */

/* What was put into buckets so far is copied there, in one launch. */
pst_status pst__flat_bucket_copy(pst_flat *flat) {
    const size_t casts = flat->cast_count;
    flat->cast_count = 0;
    if (casts == 0) return PST_OK;
    pst_device *device = flat->engine->device;
    pst_status status =
        device->ops->cast_scale_copy(device, flat->engine->filling.stream, flat->casts, casts, 1.0);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "copying %zu pieces of gradients failed", casts);
}

static void describe(const pst_flat *flat, pst__operation *operation, const pst_bucket *bucket) {
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_REDUCE_SCATTER;
    collective->name = "gradients";
    collective->dtype = bucket->dtype;
    collective->source = bucket->memory;
    collective->source_bytes = bucket->used_bytes;
    collective->stride = bucket->stride;
    collective->pieces = operation->pieces;
    collective->scale = 1.0 / (double)flat->engine->world;
    operation->bucket = bucket->id;
    operation->has_bucket = 1;
}

static pst_status submit(pst_flat *flat, pst_dtype dtype, pst__operation *operation) {
    pst_zero *engine = flat->engine;
    pst_bucket bucket;
    pst_status status = pst_buckets_flush(engine->buckets, dtype, &bucket);
    if (status != PST_OK) return status;
    describe(flat, operation, &bucket);
    status =
        engine->device->ops->event_record(engine->device, operation->ready, engine->filling.stream);
    if (status != PST_OK) {
        pst__operation_give(engine, operation);
        return status;
    }
    size_t bytes = bucket.used_bytes * engine->world;
    status = pst__operation_submit(operation, bytes, &operation->ready, 1);
    if (status != PST_OK) return status;
    if (engine->asynchronous) engine->bucket_tickets[bucket.id] = operation->work.collective.ticket;
    flat->stats.reduces++;
    flat->stats.reduce_bytes += bytes;
    return PST_OK;
}

pst_status pst__flat_bucket_flush(pst_flat *flat, pst_dtype dtype) {
    pst__operation *operation = flat->engine->open[dtype].operation;
    if (operation == NULL) return PST_OK;
    pst_status status = pst__flat_bucket_copy(flat);
    if (status != PST_OK) return status;
    flat->engine->open[dtype] = (pst__open_bucket){0};
    flat->open_number[dtype] = 0;
    return submit(flat, dtype, operation);
}

int pst__flat_bucket_has(const pst_flat *flat, const pst__flat_parameter *parameter) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        if (flat->open_number[dtype] != 0 && parameter->bucket == flat->open_number[dtype])
            return 1;
    return 0;
}

/* ---- coming in ------------------------------------------------------------------------------- */

static pst_status flush(void *flat, pst_dtype dtype) {
    return pst__flat_bucket_flush(flat, dtype);
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

/* What there is of the gradient, and zeros behind its end. */
static pst_status add_casts(pst_flat *flat, const part *part, const pst_slot *slot) {
    const size_t world = flat->engine->world, size = pst_dtype_size(part->travels);
    const pst__flat_parameter *parameter = part->parameter;
    pst_status status =
        pst__heap_grow(flat->engine->heap, (void **)&flat->casts, &flat->cast_capacity,
                       flat->cast_count + 2 * world, sizeof *flat->casts);
    for (size_t rank = 0; status == PST_OK && rank < world; rank++) {
        size_t begin = rank * parameter->chunk + part->first;
        size_t left = begin < parameter->elements ? parameter->elements - begin : 0;
        size_t real = left < part->count ? left : part->count;
        char *memory = (char *)slot->memory + rank * slot->stride;
        if (real > 0)
            flat->casts[flat->cast_count++] =
                (pst_cast){memory, part->source + begin * pst_dtype_size(part->dtype), real,
                           part->travels, part->dtype};
        if (real < part->count)
            flat->casts[flat->cast_count++] = (pst_cast){
                memory + real * size, NULL, part->count - real, part->travels, part->travels};
    }
    return status;
}

static pst_status add_part(pst_flat *flat, const part *part) {
    pst_slot slot;
    pst_status status =
        pst__bucket_slot(flat->engine, part->travels, part->count * pst_dtype_size(part->travels),
                         flush, flat, &slot);
    if (status == PST_OK) status = add_piece(flat, part, &slot);
    return status == PST_OK ? add_casts(flat, part, &slot) : status;
}

pst_status pst__flat_bucket_add(pst_flat *flat, const pst__flat_report *report) {
    pst__flat_parameter *parameter = &flat->parameters[report->parameter];
    part part = {.parameter = parameter,
                 .source = report->source,
                 .dtype = report->dtype,
                 .travels = report->travels};
    size_t most = chunk_bytes(flat) / pst_dtype_size(part.travels);
    pst_status status = prepare(flat, part.travels);
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

/* Buckets that have not gone out are forgotten. */
void pst__flat_bucket_abandon(pst_flat *flat) {
    for (size_t i = 0; i < flat->parameter_count; i++) {
        pst__flat_parameter *parameter = &flat->parameters[i];
        if (pst__flat_bucket_has(flat, parameter) && !parameter->adds) parameter->has_sum = 0;
    }
    if (flat->engine->buckets != NULL) pst__bucket_abandon_all(flat->engine);
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        flat->open_number[dtype] = 0;
    flat->cast_count = 0;
}
