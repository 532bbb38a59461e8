/* Flat shards' life: created, parameters added and bound, destroyed; and what peers read of them:
 * the shard itself, or a piece of memory that it is cast or copied to. */
#include "ops/deepcompile/flat.h"

#include "base/options.h"
#include "mem/arena.h"
#include "sched/runtime.h"

#define DEFAULT_BUCKET_BYTES ((size_t)64 << 20)
#define DEFAULT_BATCH_BYTES  ((size_t)32 << 20)

/* ---- what peers read ------------------------------------------------------------------------- */

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

pst_status pst_flat_open_memory(pst_flat *flat, void *memory, size_t bytes) {
    if (flat == NULL || memory == NULL || bytes == 0) return PST_EINVAL;
    pst__carrier *carrier = &flat->carrier;
    if (!needs_opening(flat)) return PST_OK;
    pst_status status =
        pst__heap_grow(carrier->heap, (void **)&flat->regions, &flat->region_capacity,
                       flat->region_count + 1, sizeof *flat->regions);
    if (status != PST_OK) return pst__flat_fail(flat, status, "%s", "no memory to open memory");
    const pst_lease lease = {.memory = memory, .bytes = bytes};
    status = pst__open_to_peers(carrier, flat->options.gather_comm, &lease);
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
    const pst__heap *heap = flat->carrier.heap;
    size_t *first = pst__heap_alloc(heap, flat->parameter_count * sizeof *first);
    if (first == NULL)
        return pst__flat_fail(flat, PST_ENOMEM, "%s", "no memory for the places of shards");
    *elements = 0;
    for (size_t i = 0; i < flat->parameter_count; i++) {
        const pst__flat_parameter *parameter = &flat->parameters[i];
        first[i] = PST__FLAT_NOWHERE;
        if (!has_place(sources, i) && !has_source(flat, parameter, dtype)) continue;
        first[i] = *elements;
        *elements += pst__round_up(parameter->chunk, PST__SLOT_ALIGNMENT);
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
    if (status == PST_OK)
        status = pst__open_segment(&flat->carrier, flat->carrier.sources,
                                   elements * pst_dtype_size(dtype), &lease);
    if (status != PST_OK) return status;
    flat->sources[dtype].memory = lease.memory;
    flat->stats.source_bytes += elements * pst_dtype_size(dtype);
    for (size_t i = 0; i < flat->copy_count; i++)
        if (flat->copies[i].dtype == dtype) flat->copies[i].source_is_old = 1;
    return PST_OK;
}

static void free_sources(const pst__heap *heap, pst_flat *flat) {
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

pst_status pst__flat_wait_readers(pst_flat *flat, uint32_t parameter) {
    pst_status status = PST_OK;
    for (uint32_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        const pst__flat_copy *copy = &flat->copies[i];
        if (copy->gathered.state != PST__IN_FLIGHT) continue;
        if (parameter == PST__FLAT_ALL || copy->parameter == parameter)
            status = pst_flat_wait(flat, i);
    }
    return status == PST_OK ? pst__wait_gather_readers(&flat->carrier) : status;
}

static int is_due(const pst_flat *flat, const pst__flat_copy *copy) {
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    return copy->source_is_old && parameter->shard != NULL &&
           has_source(flat, parameter, copy->dtype);
}

static pst_status add_cast(pst_flat *flat, uint32_t index) {
    pst__flat_copy *copy = &flat->copies[index];
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    pst__flat_place place;
    pst_status status = PST_OK;
    if (copy->gathered.state == PST__IN_FLIGHT)
        status = pst_flat_wait(flat, index); /* it is still read */
    if (status == PST_OK) status = pst__flat_source(flat, index, &place);
    if (status != PST_OK) return status;
    copy->source_is_old = 0;
    return pst__casts_add(flat->carrier.heap, &flat->casts,
                          (pst_cast){.destination = (void *)(uintptr_t)place.memory,
                                     .source = parameter->shard,
                                     .count = parameter->chunk,
                                     .destination_dtype = copy->dtype,
                                     .source_dtype = parameter->dtype});
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
    pst__carrier *carrier = &flat->carrier;
    pst_status status = find_places(flat);
    if (status == PST_OK) status = pst__wait_gather_readers(carrier);
    flat->casts.count = 0;
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++)
        if (is_due(flat, &flat->copies[i])) status = add_cast(flat, (uint32_t)i);
    if (status != PST_OK) return status;
    status = pst__casts_launch(carrier->device, carrier->compute, &flat->casts, 1.0);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "%s", "casting shards for their gathers failed");
}

pst_status pst__flat_refresh(pst_flat *flat, const uint32_t *copies, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (is_due(flat, &flat->copies[copies[i]])) return cast_all(flat);
    return PST_OK;
}

/* ---- creating -------------------------------------------------------------------------------- */

static pst_status create_carrier(pst_runtime *runtime, pst_flat *flat) {
    const pst_flat_options *given = &flat->options;
    const pst__carrier_options options = {.name = given->name == NULL ? "flat" : given->name,
                                          .gather_comm = given->gather_comm,
                                          .reduce_comm = given->reduce_comm,
                                          .device = given->device,
                                          .compute = given->compute,
                                          .pumped = given->pumped,
                                          .segment_alloc = given->segment_alloc,
                                          .segment_free = given->segment_free,
                                          .segment_context = given->segment_context};
    return pst__carrier_create(runtime, &options, &flat->carrier);
}

static void flat_free(const pst__heap *heap, pst_flat *flat) {
    pst_device *device = flat->carrier.device;
    /* The arenas ask for the events of copies to their end. */
    pst__carrier_free(&flat->carrier);
    pst_arena_destroy(flat->large);
    for (size_t i = 0; i < flat->copy_count; i++)
        device->ops->event_destroy(device, flat->copies[i].gathered.released);
    free_sources(heap, flat);
    pst__sources_free(&flat->held);
    pst__heap_free(heap, flat->parameters, flat->parameter_capacity * sizeof *flat->parameters);
    pst__heap_free(heap, flat->copies, flat->copy_capacity * sizeof *flat->copies);
    pst__heap_free(heap, flat->reports, flat->report_capacity * sizeof *flat->reports);
    pst__casts_free(heap, &flat->casts);
    pst__heap_free(heap, flat->batch, flat->batch_capacity * sizeof *flat->batch);
    pst__heap_free(heap, flat, sizeof *flat);
}

static pst_status build(pst_runtime *runtime, pst_flat *flat) {
    pst_status status = create_carrier(runtime, flat);
    if (status != PST_OK) return status;
    flat->options.name = flat->carrier.name;
    flat->options.device = flat->carrier.device;
    flat->held = (pst__sources_held){.carrier = &flat->carrier,
                                     .consumed = flat->options.consumed,
                                     .context = flat->options.callback_context};
    status = pst__carrier_create_arena(&flat->carrier, "large", PST_ARENA_ALIGNMENT, &flat->large);
    if (status != PST_OK) return status;
    const size_t world = flat->carrier.world;
    flat->chunk_bytes =
        pst__round_up((flat->options.bucket_bytes + world - 1) / world, PST__SLOT_ALIGNMENT);
    return pst__buckets_create(&flat->carrier, flat->carrier.sources, flat->chunk_bytes,
                               flat->options.single_buffer ? 1 : 2, flat->carrier.asynchronous);
}

pst_status pst_flat_create(pst_runtime *runtime, const pst_flat_options *given,
                           pst_flat **created) {
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    pst_flat_options options;
    if (!pst__read_options(&options, sizeof options, given))
        return pst__fail(pst__runtime_error(runtime), PST_EINVAL,
                         "flat shards: set options.size to sizeof(pst_flat_options)");
    if (options.bucket_bytes == 0) options.bucket_bytes = DEFAULT_BUCKET_BYTES;
    if (options.batch_bytes == 0) options.batch_bytes = DEFAULT_BATCH_BYTES;
    if (options.batch_bytes > options.bucket_bytes) options.batch_bytes = options.bucket_bytes;
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst_flat *flat = pst__heap_alloc(heap, sizeof *flat);
    if (flat == NULL)
        return pst__fail(pst__runtime_error(runtime), PST_ENOMEM, "flat shards: no memory");
    flat->options = options;
    pst_status status = build(runtime, flat);
    if (status != PST_OK) {
        flat_free(heap, flat);
        return status;
    }
    *created = flat;
    return PST_OK;
}

void pst_flat_destroy(pst_flat *flat) {
    if (flat == NULL) return;
    pst__flat_abandon_all(flat);
    if (!pst__carrier_close(&flat->carrier)) return;
    pst__sources_release_all(&flat->held);
    flat_free(flat->carrier.heap, flat);
}

/* ---- parameters ------------------------------------------------------------------------------ */

pst_status pst__flat_check(pst_flat *flat, uint32_t parameter) {
    if (flat == NULL) return PST_EINVAL;
    if (parameter >= flat->parameter_count)
        return pst__flat_fail(flat, PST_EINVAL, "there is no parameter %u", parameter);
    return pst_runtime_status(flat->carrier.runtime);
}

pst_status pst__flat_check_copy(pst_flat *flat, uint32_t copy) {
    if (flat == NULL) return PST_EINVAL;
    if (copy >= flat->copy_count)
        return pst__flat_fail(flat, PST_EINVAL, "there is no copy %u", copy);
    return pst_runtime_status(flat->carrier.runtime);
}

pst_status pst__flat_give_up(pst_flat *flat, pst_status status) {
    const int is_refused = status == PST_EINVAL || status == PST_ESTATE;
    return is_refused ? status : pst__carrier_give_up(&flat->carrier, status);
}

pst_status pst_flat_add(pst_flat *flat, const char *name, size_t elements, uint32_t *parameter) {
    if (flat == NULL || parameter == NULL) return PST_EINVAL;
    if (elements > PST__MOST_ELEMENTS)
        return pst__flat_fail(flat, PST_EINVAL, "parameter '%s': %zu elements are too many",
                              name == NULL ? "" : name, elements);
    pst__carrier *carrier = &flat->carrier;
    pst__trace *trace = pst__runtime_trace(carrier->runtime); /* which may outlive this */
    const char *kept = pst__trace_intern(trace, name == NULL ? "" : name);
    pst_status status =
        pst__heap_grow(carrier->heap, (void **)&flat->parameters, &flat->parameter_capacity,
                       flat->parameter_count + 1, sizeof *flat->parameters);
    if (kept == NULL || status != PST_OK)
        return pst__flat_fail(flat, PST_ENOMEM, "no memory for parameter '%s'",
                              name == NULL ? "" : name);
    size_t chunk = (elements + carrier->world - 1) / carrier->world;
    flat->parameters[flat->parameter_count] =
        (pst__flat_parameter){.name = kept, .elements = elements, .chunk = chunk};
    *parameter = (uint32_t)flat->parameter_count++;
    return PST_OK;
}

static void touch(pst_flat *flat, uint32_t parameter) {
    for (size_t i = 0; i < flat->copy_count; i++)
        if (flat->copies[i].parameter == parameter)
            flat->copies[i].gathered.is_stale = flat->copies[i].source_is_old = 1;
}

pst_status pst_flat_bind(pst_flat *flat, uint32_t index, const void *shard, const void *home,
                         pst_dtype dtype) {
    pst_status status = pst__flat_check(flat, index);
    if (status != PST_OK) return status;
    pst__flat_parameter *parameter = &flat->parameters[index];
    if ((shard == NULL && parameter->chunk > 0) || pst_dtype_size(dtype) == 0)
        return pst__flat_fail(flat, PST_EINVAL, "parameter '%s': its shard has no memory or dtype",
                              parameter->name);
    parameter->shard = shard;
    parameter->home = home;
    parameter->dtype = dtype;
    touch(flat, index);
    return PST_OK;
}

pst_status pst_flat_unbind(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check(flat, index);
    if (status == PST_OK) status = pst__flat_wait_readers(flat, index);
    if (status == PST_OK) flat->parameters[index].shard = NULL;
    return status;
}

pst_status pst_flat_bind_gradient(pst_flat *flat, uint32_t index, void *target, pst_dtype dtype) {
    pst_status status = pst__flat_check(flat, index);
    if (status != PST_OK) return status;
    pst__flat_parameter *parameter = &flat->parameters[index];
    if (target != NULL && pst_dtype_size(dtype) == 0)
        return pst__flat_fail(flat, PST_EINVAL, "parameter '%s': its gradient has no dtype",
                              parameter->name);
    parameter->target = (pst__target){.memory = target,
                                      .count = parameter->chunk,
                                      .dtype = dtype,
                                      .bucket = parameter->target.bucket}; /* may be open still */
    return PST_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static pst_status add_copy(pst_flat *flat, uint32_t parameter, pst_dtype dtype) {
    pst__carrier *carrier = &flat->carrier;
    pst_status status = pst__heap_grow(carrier->heap, (void **)&flat->copies, &flat->copy_capacity,
                                       flat->copy_count + 1, sizeof *flat->copies);
    if (status == PST_OK)
        status = pst__heap_grow(carrier->heap, (void **)&flat->batch, &flat->batch_capacity,
                                flat->copy_count + 1, sizeof *flat->batch);
    if (status != PST_OK)
        return pst__flat_fail(flat, status, "no memory for a copy of '%s'",
                              flat->parameters[parameter].name);
    pst__flat_copy *copy = &flat->copies[flat->copy_count];
    *copy = (pst__flat_copy){.parameter = parameter, .dtype = dtype, .source_is_old = 1};
    status = carrier->device->ops->event_create(carrier->device, 0, &copy->gathered.released);
    if (status != PST_OK) return status;
    flat->copy_count++;
    return PST_OK;
}

pst_status pst_flat_copy(pst_flat *flat, uint32_t parameter, pst_dtype dtype, uint32_t *copy) {
    pst_status status = pst__flat_check(flat, parameter);
    if (status != PST_OK) return status;
    if (pst_dtype_size(dtype) == 0 || copy == NULL)
        return pst__flat_fail(flat, PST_EINVAL, "parameter '%s': a copy needs a dtype",
                              flat->parameters[parameter].name);
    for (size_t i = 0; i < flat->copy_count; i++)
        if (flat->copies[i].parameter == parameter && flat->copies[i].dtype == dtype) {
            *copy = (uint32_t)i;
            return PST_OK;
        }
    status = add_copy(flat, parameter, dtype);
    *copy = (uint32_t)(flat->copy_count - 1);
    return status;
}

pst_status pst_flat_touched(pst_flat *flat, uint32_t parameter) {
    pst_status status = pst__flat_check(flat, parameter);
    if (status == PST_OK) touch(flat, parameter);
    return status;
}

pst_status pst_flat_updated(pst_flat *flat) {
    if (flat == NULL) return PST_EINVAL;
    for (size_t i = 0; i < flat->copy_count; i++) {
        pst__flat_copy *copy = &flat->copies[i];
        if (flat->parameters[copy->parameter].target.memory != NULL)
            copy->gathered.is_stale = copy->source_is_old = 1;
    }
    (void)pst__flat_note(flat, PST__FLAT_UPDATE);
    return pst__flat_drop_ahead(flat);
}

void pst_flat_get_stats(const pst_flat *flat, pst_flat_stats *stats) {
    pst_arena_stats arena = {.size = sizeof arena}, large = {.size = sizeof large};
    pst_arena_get_stats(flat->carrier.gathered, &arena);
    pst_arena_get_stats(flat->large, &large);
    const pst__waits *waits = &flat->carrier.waits;
    pst_flat_stats now = flat->stats;
    now.exposed_ns = waits->exposed_gather_ns + waits->exposed_reduce_ns;
    now.late_launches = waits->late_launches;
    now.arena_reserved = arena.reserved + large.reserved;
    now.arena_peak = arena.peak + large.peak;
    now.bucket_bytes = pst__bucket_bytes(&flat->carrier);
    pst__write_sized(stats, &now, sizeof now);
}
