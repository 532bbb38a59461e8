/* What peers read: the shard itself, or a piece of memory that it is cast or copied to. */
#include "ops/flat.h"

#include "mem/arena.h"

/* Peers that read by themselves read only memory that was opened to them. */
static int needs_opening(const pst_flat *flat) {
    return flat->options.gather_comm->ops->open_memory != NULL;
}

static int is_opened(const pst_flat *flat, const char *memory, size_t bytes) {
    for (size_t i = 0; i < flat->region_count; i++) {
        const pst__flat_region *region = &flat->regions[i];
        size_t distance = (size_t)((uintptr_t)memory - (uintptr_t)region->memory);
        if (distance < region->bytes && bytes <= region->bytes - distance) return 1;
    }
    return 0;
}

/* Does what peers read of it in this dtype lie elsewhere than the shard? */
static int has_source(const pst_flat *flat, const pst__flat_parameter *parameter, pst_dtype dtype) {
    if (parameter->chunk == 0) return 0;
    if (parameter->dtype != dtype) return 1;
    return needs_opening(flat) &&
           !is_opened(flat, parameter->shard, parameter->chunk * pst_dtype_size(dtype));
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
    pst_arena_stats stats = {.size = sizeof stats};
    pst_arena_get_stats(engine->sources, &stats);
    /* A segment of its own: what is opened has the same size on all ranks. */
    bytes = pst__zero_opened_bytes(engine, bytes);
    pst_status status = pst_arena_add_segment(engine->sources, bytes);
    if (status == PST_OK)
        status = pst_arena_acquire_at(engine->sources, stats.reserved, bytes, lease);
    if (status == PST_OK) status = open_to(flat, flat->options.gather_comm, lease);
    if (status == PST_OK && !engine->one_comm)
        status = open_to(flat, flat->options.reduce_comm, lease);
    return status;
}

pst_status pst_flat_open_memory(pst_flat *flat, void *memory, size_t bytes) {
    if (flat == NULL || memory == NULL || bytes == 0) return PST_EINVAL;
    pst_zero *engine = flat->engine;
    if (!needs_opening(flat)) return PST_OK;
    pst_status status =
        pst__heap_grow(engine->heap, (void **)&flat->regions, &flat->region_capacity,
                       flat->region_count + 1, sizeof *flat->regions);
    if (status != PST_OK) return pst__flat_fail(flat, status, "%s", "no memory to open memory");
    const pst_lease lease = {.memory = memory, .bytes = bytes};
    status = open_to(flat, flat->options.gather_comm, &lease);
    if (status == PST_OK) flat->regions[flat->region_count++] = (pst__flat_region){memory, bytes};
    return status;
}

/* ---- copies of shards ------------------------------------------------------------------------ */

static int has_place(const pst__flat_sources *sources, size_t parameter) {
    return parameter < sources->count && sources->first[parameter] != PST__FLAT_NOWHERE;
}

/* A place for each parameter that needs one, by now or before: the same layout on all ranks. */
static pst_status lay_out(pst_flat *flat, pst_dtype dtype, size_t *elements) {
    pst__flat_sources *sources = &flat->sources[dtype];
    const pst__heap *heap = flat->engine->heap;
    size_t *first = pst__heap_alloc(heap, flat->parameter_count * sizeof *first);
    if (first == NULL)
        return pst__flat_fail(flat, PST_ENOMEM, "%s", "no memory for the places of shards");
    *elements = 0;
    for (size_t i = 0; i < flat->parameter_count; i++) {
        const pst__flat_parameter *parameter = &flat->parameters[i];
        first[i] = PST__FLAT_NOWHERE;
        if (!has_place(sources, i) && !has_source(flat, parameter, dtype)) continue;
        first[i] = *elements;
        *elements += pst__round_up(parameter->chunk, PST__FLAT_ALIGNMENT);
    }
    pst__heap_free(heap, sources->first, sources->count * sizeof *first);
    sources->first = first;
    sources->count = flat->parameter_count;
    return PST_OK;
}

/* One piece of memory a dtype. */
static pst_status make_sources(pst_flat *flat, pst_dtype dtype) {
    size_t elements = 0;
    pst_lease lease;
    pst_status status = lay_out(flat, dtype, &elements);
    if (status == PST_OK) status = pst__flat_open(flat, elements * pst_dtype_size(dtype), &lease);
    if (status != PST_OK) return status;
    flat->sources[dtype].memory = lease.memory;
    flat->stats.source_bytes += elements * pst_dtype_size(dtype);
    for (size_t i = 0; i < flat->copy_count; i++)
        if (flat->copies[i].dtype == dtype) flat->copies[i].source_is_old = 1;
    return PST_OK;
}

void pst__flat_sources_free(pst_flat *flat) {
    if (flat->engine == NULL) return;
    const pst__heap *heap = flat->engine->heap;
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        pst__flat_sources *sources = &flat->sources[dtype];
        pst__heap_free(heap, sources->first, sources->count * sizeof *sources->first);
    }
    pst__heap_free(heap, flat->regions, flat->region_capacity * sizeof *flat->regions);
}

pst_status pst__flat_source(pst_flat *flat, uint32_t index, pst__flat_place *place) {
    const pst__flat_copy *copy = &flat->copies[index];
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    const pst__flat_sources *sources = &flat->sources[copy->dtype];
    if (parameter->shard == NULL && parameter->chunk > 0)
        return pst__flat_fail(flat, PST_ESTATE, "parameter '%s' has no shard: call pst_flat_bind",
                              parameter->name);
    *place = (pst__flat_place){parameter->shard, parameter->home};
    if (!has_source(flat, parameter, copy->dtype)) return PST_OK;
    size_t distance = sources->first[copy->parameter] * pst_dtype_size(copy->dtype);
    *place = (pst__flat_place){sources->memory + distance, sources->memory};
    return PST_OK;
}

/* Compute waits until no peer reads what this rank gathers from any more. */
static pst_status guard(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    pst_comm *comm = flat->options.gather_comm;
    if (comm->ops->source_wait == NULL || engine->gather_ticket == 0) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, engine->compute, engine->gather_ticket);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "waiting for the readers of ticket %llu failed: %s",
                          (unsigned long long)engine->gather_ticket, comm->ops->error_text(comm));
}

pst_status pst__flat_wait_readers(pst_flat *flat, uint32_t parameter) {
    pst_status status = PST_OK;
    for (uint32_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        const pst__flat_copy *copy = &flat->copies[i];
        if (copy->state != PST__IN_FLIGHT) continue;
        if (parameter == PST__FLAT_ALL || copy->parameter == parameter)
            status = pst_flat_wait(flat, i);
    }
    return status == PST_OK ? guard(flat) : status;
}

static int is_due(const pst_flat *flat, const pst__flat_copy *copy) {
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    return copy->source_is_old && parameter->shard != NULL &&
           has_source(flat, parameter, copy->dtype);
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

/* Before anything is cast: what is laid out anew has to be cast anew. */
static pst_status find_places(pst_flat *flat) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        const pst__flat_copy *copy = &flat->copies[i];
        if (is_due(flat, copy) && !has_place(&flat->sources[copy->dtype], copy->parameter))
            status = make_sources(flat, copy->dtype);
    }
    return status;
}

/* All that is old at once: compute waits for the readers of what was gathered before, which in
 * mid-step would be those of gathers that are to overlap with it. */
static pst_status cast_all(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    size_t casts = 0;
    pst_status status = pst__heap_grow(engine->heap, (void **)&flat->casts, &flat->cast_capacity,
                                       flat->copy_count, sizeof *flat->casts);
    if (status == PST_OK) status = find_places(flat);
    if (status == PST_OK) status = guard(flat);
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
