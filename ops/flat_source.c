/* What peers read: the shard itself, or a piece of memory that it is cast or copied to. */
#include "ops/flat.h"

#include "mem/arena.h"

/* Peers that read by themselves read only memory that was opened to them. */
static int needs_opening(const pst_flat *flat) {
    return flat->options.gather_comm->ops->open_memory != NULL;
}

static int has_source(const pst_flat *flat, const pst__flat_copy *copy) {
    return needs_opening(flat) || flat->parameters[copy->parameter].dtype != copy->dtype;
}

static pst_status open_to(pst_flat *flat, pst_comm *comm, const pst_lease *lease) {
    if (comm->ops->open_memory == NULL) return PST_OK;
    pst_status status = comm->ops->open_memory(comm, lease->memory, lease->bytes);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "opening %zu bytes to the peers failed: %s", lease->bytes,
                          comm->ops->error_text(comm));
}

pst_status pst__flat_open(pst_flat *flat, size_t bytes, pst_lease *lease) {
    pst_zero *engine = flat->engine;
    pst_arena_stats stats;
    pst_arena_get_stats(engine->sources, &stats);
    /* A segment of its own: what is opened has the same size on all ranks. */
    bytes = pst__round_up(bytes, PST_ARENA_ALIGNMENT);
    pst_status status = pst_arena_add_segment(engine->sources, bytes);
    if (status == PST_OK)
        status = pst_arena_acquire_at(engine->sources, stats.reserved, bytes, lease);
    if (status == PST_OK) status = open_to(flat, flat->options.gather_comm, lease);
    if (status == PST_OK && !engine->one_comm)
        status = open_to(flat, flat->options.reduce_comm, lease);
    return status;
}

/* One piece of memory a dtype, with room for every parameter: the same layout on all ranks. */
static pst_status make_sources(pst_flat *flat, pst_dtype dtype) {
    pst__flat_sources *sources = &flat->sources[dtype];
    pst_lease lease;
    if (sources->elements >= flat->elements) return PST_OK;
    pst_status status = pst__flat_open(flat, flat->elements * pst_dtype_size(dtype), &lease);
    if (status != PST_OK) return status;
    *sources = (pst__flat_sources){lease.memory, flat->elements};
    for (size_t i = 0; i < flat->copy_count; i++)
        if (flat->copies[i].dtype == dtype) flat->copies[i].source_is_old = 1;
    return PST_OK;
}

pst_status pst__flat_source(pst_flat *flat, uint32_t index, pst__flat_place *place) {
    const pst__flat_copy *copy = &flat->copies[index];
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    if (parameter->shard == NULL && parameter->chunk > 0)
        return pst__flat_fail(flat, PST_ESTATE, "parameter '%s' has no shard: call pst_flat_bind",
                              parameter->name);
    *place = (pst__flat_place){parameter->shard, parameter->home};
    if (!has_source(flat, copy)) return PST_OK;
    pst_status status = make_sources(flat, copy->dtype);
    const char *memory = flat->sources[copy->dtype].memory;
    *place =
        (pst__flat_place){memory + parameter->first_of_home * pst_dtype_size(copy->dtype), memory};
    return status;
}

pst_status pst__flat_guard(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    pst_comm *comm = flat->options.gather_comm;
    if (comm->ops->source_wait == NULL || engine->gather_ticket == 0) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, engine->compute, engine->gather_ticket);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "waiting for the readers of ticket %llu failed: %s",
                          (unsigned long long)engine->gather_ticket, comm->ops->error_text(comm));
}

static int is_due(const pst_flat *flat, const pst__flat_copy *copy) {
    return copy->source_is_old && has_source(flat, copy) &&
           (flat->parameters[copy->parameter].shard != NULL);
}

static pst_status add_cast(pst_flat *flat, uint32_t index, size_t *casts) {
    pst__flat_copy *copy = &flat->copies[index];
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    pst__flat_place place;
    pst_status status = PST_OK;
    if (copy->state == PST__IN_FLIGHT) status = pst_flat_wait(flat, index); /* it is still read */
    if (status == PST_OK) status = pst__flat_source(flat, index, &place);
    if (status != PST_OK) return status;
    copy->source_is_old = 0;
    flat->casts[(*casts)++] = (pst_cast){.destination = (void *)(uintptr_t)place.memory,
                                         .source = parameter->shard,
                                         .count = parameter->chunk,
                                         .destination_dtype = copy->dtype,
                                         .source_dtype = parameter->dtype};
    return PST_OK;
}

/* All that is old at once: compute waits for the readers of what was gathered before, which in
 * mid-step would be those of gathers that are to overlap with it. */
static pst_status cast_all(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    size_t casts = 0;
    pst_status status = pst__heap_grow(engine->heap, (void **)&flat->casts, &flat->cast_capacity,
                                       flat->copy_count, sizeof *flat->casts);
    if (status == PST_OK) status = pst__flat_guard(flat);
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++)
        if (is_due(flat, &flat->copies[i])) status = add_cast(flat, (uint32_t)i, &casts);
    if (status != PST_OK) return status;
    status = engine->device->ops->cast_scale_copy(engine->device, engine->compute, flat->casts,
                                                  casts, 1.0);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "%s", "casting shards for their gathers failed");
}

pst_status pst__flat_refresh(pst_flat *flat, const uint32_t *copies, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (is_due(flat, &flat->copies[copies[i]])) return cast_all(flat);
    return PST_OK;
}
