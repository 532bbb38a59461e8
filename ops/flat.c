/* Flat shards' life: created, parameters added and bound, destroyed. */
#include "ops/flat.h"

#include "base/options.h"
#include "mem/arena.h"
#include "sched/runtime.h"

#define DEFAULT_BUCKET_BYTES ((size_t)64 << 20)
#define DEFAULT_BATCH_BYTES  ((size_t)32 << 20)

/* ---- creating -------------------------------------------------------------------------------- */

static pst_status create_engine(pst_runtime *runtime, pst_flat *flat) {
    const pst_flat_options *given = &flat->options;
    pst_zero_options options = {.size = sizeof options,
                                .name = given->name == NULL ? "flat" : given->name,
                                .stage = 3,
                                .gather_comm = given->gather_comm,
                                .reduce_comm = given->reduce_comm,
                                .device = given->device,
                                .compute = given->compute,
                                .pumped = given->pumped,
                                .segment_alloc = given->segment_alloc,
                                .segment_free = given->segment_free,
                                .segment_context = given->segment_context};
    return pst_zero_create(runtime, &options, &flat->engine);
}

static void flat_free(const pst__heap *heap, pst_flat *flat) {
    pst_zero *engine = flat->engine;
    for (size_t i = 0; i < flat->copy_count; i++)
        engine->device->ops->event_destroy(engine->device, flat->copies[i].released);
    pst__flat_history_free(flat);
    pst__flat_sources_free(flat);
    pst__flat_held_free(heap, flat);
    pst__heap_free(heap, flat->parameters, flat->parameter_capacity * sizeof *flat->parameters);
    pst__heap_free(heap, flat->copies, flat->copy_capacity * sizeof *flat->copies);
    pst__heap_free(heap, flat->reports, flat->report_capacity * sizeof *flat->reports);
    pst__heap_free(heap, flat->casts, flat->cast_capacity * sizeof *flat->casts);
    pst__heap_free(heap, flat->batch, flat->batch_capacity * sizeof *flat->batch);
    pst__heap_free(heap, flat, sizeof *flat);
}

/* The events of copies are asked for by the arena to its end: it goes first. */
static void engine_free(pst_flat *flat) {
    pst_zero *engine = flat->engine;
    pst_buckets_destroy(engine->buckets);
    engine->buckets = NULL;
    pst_arena_destroy(flat->large);
    pst_arena_destroy(engine->gathered);
    engine->gathered = NULL;
}

static pst_status create_large(pst_flat *flat) {
    const pst_arena_options options = {.size = sizeof options,
                                       .name = "large",
                                       .device = flat->engine->device,
                                       .kind = PST_MEMORY_DEVICE,
                                       .segment_bytes = PST_ARENA_ALIGNMENT,
                                       .segment_alloc = flat->options.segment_alloc,
                                       .segment_free = flat->options.segment_free,
                                       .segment_context = flat->options.segment_context};
    return pst_arena_create(flat->engine->runtime, &options, &flat->large);
}

static pst_status build(pst_runtime *runtime, pst_flat *flat) {
    pst_status status = create_engine(runtime, flat);
    if (status != PST_OK) return status;
    flat->options.name = flat->engine->name;
    flat->options.device = flat->engine->device;
    status = pst__flat_history_alloc(flat);
    return status == PST_OK ? create_large(flat) : status;
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
        pst_zero *engine = flat->engine;
        flat_free(heap, flat);
        if (engine != NULL) pst__zero_free(engine);
        return status;
    }
    *created = flat;
    return PST_OK;
}

void pst_flat_destroy(pst_flat *flat) {
    if (flat == NULL) return;
    pst_zero *engine = flat->engine;
    pst__flat_abandon_all(flat);
    if (!pst__zero_close(engine)) return;
    pst__flat_held_forget(flat);
    engine_free(flat);
    flat_free(engine->heap, flat);
    pst__zero_free(engine);
}

/* ---- parameters ------------------------------------------------------------------------------ */

pst_status pst__flat_check(pst_flat *flat, uint32_t parameter) {
    if (flat == NULL) return PST_EINVAL;
    if (parameter >= flat->parameter_count)
        return pst__flat_fail(flat, PST_EINVAL, "there is no parameter %u", parameter);
    return pst_runtime_status(flat->engine->runtime);
}

pst_status pst__flat_check_copy(pst_flat *flat, uint32_t copy) {
    if (flat == NULL) return PST_EINVAL;
    if (copy >= flat->copy_count)
        return pst__flat_fail(flat, PST_EINVAL, "there is no copy %u", copy);
    return pst_runtime_status(flat->engine->runtime);
}

pst_status pst__flat_give_up(pst_flat *flat, pst_status status) {
    const int is_refused = status == PST_EINVAL || status == PST_ESTATE;
    return is_refused ? status : pst__reduce_give_up(flat->engine, status);
}

pst_status pst_flat_add(pst_flat *flat, const char *name, size_t elements, uint32_t *parameter) {
    if (flat == NULL || parameter == NULL) return PST_EINVAL;
    if (elements > PST__MOST_ELEMENTS)
        return pst__flat_fail(flat, PST_EINVAL, "parameter '%s': %zu elements are too many",
                              name == NULL ? "" : name, elements);
    pst_zero *engine = flat->engine;
    pst__trace *trace = pst__runtime_trace(engine->runtime); /* which may outlive this */
    const char *kept = pst__trace_intern(trace, name == NULL ? "" : name);
    pst_status status =
        pst__heap_grow(engine->heap, (void **)&flat->parameters, &flat->parameter_capacity,
                       flat->parameter_count + 1, sizeof *flat->parameters);
    if (kept == NULL || status != PST_OK)
        return pst__flat_fail(flat, PST_ENOMEM, "no memory for parameter '%s'",
                              name == NULL ? "" : name);
    size_t chunk = (elements + engine->world - 1) / engine->world;
    flat->parameters[flat->parameter_count] =
        (pst__flat_parameter){.name = kept, .elements = elements, .chunk = chunk};
    *parameter = (uint32_t)flat->parameter_count++;
    return PST_OK;
}

static void touch(pst_flat *flat, uint32_t parameter) {
    for (size_t i = 0; i < flat->copy_count; i++)
        if (flat->copies[i].parameter == parameter)
            flat->copies[i].is_stale = flat->copies[i].source_is_old = 1;
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
    parameter->target = target;
    parameter->target_dtype = dtype;
    parameter->has_sum = parameter->is_old = 0;
    return PST_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static pst_status add_copy(pst_flat *flat, uint32_t parameter, pst_dtype dtype) {
    pst_zero *engine = flat->engine;
    pst_status status = pst__heap_grow(engine->heap, (void **)&flat->copies, &flat->copy_capacity,
                                       flat->copy_count + 1, sizeof *flat->copies);
    if (status != PST_OK)
        return pst__flat_fail(flat, status, "no memory for a copy of '%s'",
                              flat->parameters[parameter].name);
    pst__flat_copy *copy = &flat->copies[flat->copy_count];
    *copy = (pst__flat_copy){.parameter = parameter, .dtype = dtype, .source_is_old = 1};
    status = engine->device->ops->event_create(engine->device, 0, &copy->released);
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
        if (flat->parameters[copy->parameter].target != NULL)
            copy->is_stale = copy->source_is_old = 1;
    }
    (void)pst__flat_note(flat, PST__FLAT_UPDATE);
    return pst__flat_drop_ahead(flat);
}

void pst_flat_get_stats(const pst_flat *flat, pst_flat_stats *stats) {
    pst_arena_stats arena = {.size = sizeof arena}, large = {.size = sizeof large};
    pst_buckets_stats buckets = {.size = sizeof buckets};
    pst_arena_get_stats(flat->engine->gathered, &arena);
    pst_arena_get_stats(flat->large, &large);
    if (flat->engine->buckets != NULL) pst_buckets_get_stats(flat->engine->buckets, &buckets);
    const pst_zero_stats *waits = &flat->engine->stats;
    pst_flat_stats now = flat->stats;
    now.exposed_ns = waits->exposed_gather_ns + waits->exposed_reduce_ns;
    now.late_launches = waits->late_launches;
    now.arena_reserved = arena.reserved + large.reserved;
    now.arena_peak = arena.peak + large.peak;
    now.bucket_bytes = buckets.bytes;
    pst__write_sized(stats, &now, sizeof now);
}
