/* The engine's life: created, sealed, bound, destroyed. */
#include "ops/zero/engine.h"

#include "base/options.h"
#include "sched/runtime.h"

#include <string.h>

#define DEFAULT_BUCKET_BYTES ((size_t)8 << 20)
#define DEFAULT_PUSH_BYTES   ((size_t)1 << 20)

/* Before a hook changes anything. */
static pst_status check_compute(pst_zero *engine) {
    pst_device *device = engine->carrier.device;
    if (device->ops->stream_ready == NULL) return PST_OK;
    pst_status status = device->ops->stream_ready(device, engine->carrier.compute);
    if (status == PST_OK) return PST_OK;
    const char *text = device->ops->error_text != NULL ? device->ops->error_text(device) : NULL;
    return pst__zero_fail(engine, status, "compute takes no work now: %s",
                          text != NULL ? text : pst_status_text(status));
}

pst_status pst__zero_check(pst_zero *engine, uint32_t group) {
    if (engine == NULL) return PST_EINVAL;
    if (!engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "call pst_zero_seal first");
    if (group != PST__NO_GROUP && group >= engine->group_count)
        return pst__zero_fail(engine, PST_EINVAL, "there is no group %u", group);
    pst_status status = pst_runtime_status(engine->carrier.runtime);
    return status == PST_OK ? check_compute(engine) : status;
}

/* ---- creating -------------------------------------------------------------------------------- */

static pst_status check_options(pst_runtime *runtime, const pst_zero_options *given,
                                pst_zero_options *options) {
    pst__error *error = pst__runtime_error(runtime);
    if (!pst__read_options(options, sizeof *options, given))
        return pst__fail(error, PST_EINVAL, "engine: set options.size to sizeof(pst_zero_options)");
    if (options->name == NULL) options->name = "zero";
    if (options->stage < 1 || options->stage > 3)
        return pst__fail(error, PST_EINVAL, "engine '%s': stage %d is not 1, 2 or 3", options->name,
                         options->stage);
    if (options->bucket_bytes == 0) options->bucket_bytes = DEFAULT_BUCKET_BYTES;
    if (options->push_bytes == 0) options->push_bytes = DEFAULT_PUSH_BYTES;
    if (options->part_bytes != 0 && options->part_bytes < PST_ZERO_ALIGNMENT)
        return pst__fail(error, PST_EINVAL, "engine '%s': part_bytes is %zu, less than %u",
                         options->name, options->part_bytes, PST_ZERO_ALIGNMENT);
    return PST_OK;
}

static pst_status create_carrier(pst_runtime *runtime, pst_zero *engine) {
    const pst_zero_options *given = &engine->options;
    const pst__callers_order order =
        given->in_callers_order ? PST__IN_ALL_PASSES : PST__WITHOUT_PROGRAM;
    const pst__carrier_options options = {.name = given->name,
                                          .gather_comm = given->gather_comm,
                                          .reduce_comm = given->reduce_comm,
                                          .replica_comm = given->replica_comm,
                                          .device = given->device,
                                          .compute = given->compute,
                                          .pumped = given->pumped,
                                          .callers_order = order,
                                          .time_waits = given->time_waits,
                                          .segment_alloc = given->segment_alloc,
                                          .segment_free = given->segment_free,
                                          .segment_context = given->segment_context};
    return pst__carrier_create(runtime, &options, &engine->carrier);
}

static pst_status build(pst_runtime *runtime, pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    engine->replay = 1;
    engine->history[0].latest = engine->history[1].latest = PST__NO_PATH;
    pst_status status = create_carrier(runtime, engine);
    if (status != PST_OK) return status;
    engine->options.name = carrier->name;
    for (int grad = 0; grad < 2; grad++)
        engine->history[grad].notes.timings =
            (pst__timings){.heap = carrier->heap, .device = carrier->device};
    engine->passes.timings = engine->graphs.timings = engine->history[0].notes.timings;
    /* Both directions ask between replicas, on one communicator. */
    engine->one_order = carrier->one_comm || carrier->asynchronous || carrier->replicas > 1;
    status = pst__hosted_create(engine);
    if (status == PST_OK) status = pst__carrier_create_arena(carrier, "places", 0, &engine->places);
    if (status != PST_OK) return status;
    return carrier->device->ops->event_create(carrier->device, 0, &engine->shards_ready);
}

static void zero_free(const pst__heap *heap, pst_zero *engine) {
    pst_device *device = engine->carrier.device;
    if (device != NULL) {
        pst__hosted_free(engine);
        pst__seal_free(engine);
        pst__record_free(engine);
        pst__timings_free(&engine->passes.timings);
        pst__timings_free(&engine->graphs.timings);
        pst__carrier_free(&engine->carrier);
        pst_arena_destroy(engine->places);
        pst__registry_free(engine);
        if (engine->shards_ready != NULL) device->ops->event_destroy(device, engine->shards_ready);
        pst__heap_free(heap, engine->extra, engine->extra_capacity * sizeof *engine->extra);
    }
    pst__heap_free(heap, engine, sizeof *engine);
}

pst_status pst_zero_create(pst_runtime *runtime, const pst_zero_options *given,
                           pst_zero **created) {
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    pst_zero_options options;
    pst_status status = check_options(runtime, given, &options);
    if (status != PST_OK) return status;
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst__error *error = pst__runtime_error(runtime);
    pst_zero *engine = pst__heap_alloc(heap, sizeof *engine);
    if (engine == NULL) return pst__fail(error, PST_ENOMEM, "engine '%s': no memory", options.name);
    engine->options = options;
    status = build(runtime, engine);
    if (status != PST_OK) {
        zero_free(heap, engine);
        return status;
    }
    *created = engine;
    return PST_OK;
}

/* ---- shards ---------------------------------------------------------------------------------- */

static void mark_stale(pst__group *group) {
    group->gathered.is_stale = 1;
    group->copy_is_old = 1;
}

pst_status pst_zero_shard_place(pst_zero *engine, uint32_t index, void **memory) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    if (memory == NULL) return PST_EINVAL;
    const pst__group *group = &engine->groups[index];
    *memory = pst__has_place(group) && !engine->options.shards_on_host ? group->copy.memory : NULL;
    return PST_OK;
}

/* A part of its place that is copied to all of it would spoil itself. */
static int is_part_of_place(const pst__group *group, const void *shard) {
    const uintptr_t place = (uintptr_t)group->copy.memory, begin = (uintptr_t)shard;
    const size_t bytes = group->layout.shard_elements * group->layout.element_bytes;
    return pst__has_place(group) && begin != place && begin < place + bytes &&
           place < begin + bytes;
}

pst_status pst_zero_bind_shard(pst_zero *engine, uint32_t index, void *shard) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    pst__group *group = &engine->groups[index];
    if (shard == NULL && group->layout.shard_elements > 0)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s': its shard is NULL", group->name);
    if (is_part_of_place(group, shard))
        return pst__zero_fail(engine, PST_EINVAL,
                              "group '%s': its shard overlaps its place %p: bind it there, or "
                              "outside of it",
                              group->name, group->copy.memory);
    /* Peers may still read the copy in the place that the shard now comes to lie in. */
    if (pst__has_place(group) && shard == group->copy.memory && group->is_bound)
        status = pst__wait_gather_readers(&engine->carrier);
    if (status != PST_OK) return status;
    group->shard = shard;
    group->is_bound = 1;
    mark_stale(group);
    return pst__gather_sources_written(engine);
}

pst_status pst_zero_updated(pst_zero *engine) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < engine->group_count; i++)
        mark_stale(&engine->groups[i]);
    status = pst__gather_sources_written(engine);
    /* Those on the host may be written further until a forward begins. */
    if (status != PST_OK || engine->options.shards_on_host) return status;
    return pst__gather_refresh(engine);
}

/* ---- figures --------------------------------------------------------------------------------- */

static size_t reserved_by(const pst_arena *arena) {
    pst_arena_stats stats = {.size = sizeof stats};
    pst_arena_get_stats(arena, &stats);
    return stats.reserved;
}

/* Of the rank's own rows; and what others' rows take beside those that lie within. */
static size_t shard_bytes(const pst_zero *engine, size_t *others) {
    size_t own = *others = 0;
    for (uint32_t i = 0; i < engine->group_count; i++) {
        const pst__layout *layout = &engine->groups[i].layout;
        const size_t bytes = layout->shard_elements * layout->element_bytes;
        const size_t part = layout->is_within ? bytes / engine->carrier.world : bytes;
        own += part;
        *others += bytes - part;
    }
    return own;
}

void pst__zero_post(pst_zero *engine) {
    pst_page *page = pst__runtime_page(engine->carrier.runtime);
    if (page == NULL || engine->carrier.outside != NULL) return; /* nothing runs in a capture */
    pst_zero_stats stats = {.size = sizeof stats};
    pst_zero_get_stats(engine, &stats);
    size_t others;
    const size_t own = shard_bytes(engine, &others);
    const pst_page_engine figures = {
        .passes = stats.forwards + stats.backwards,
        .gathers = stats.gathers,
        .gather_bytes = stats.gather_bytes,
        .reduces = stats.reduces,
        .reduce_bytes = stats.reduce_bytes,
        .all_reduces = stats.all_reduces,
        .all_reduce_bytes = stats.all_reduce_bytes,
        .exposed_ns = stats.exposed_ns,
        .stalled_ns = stats.device_gather_ns + stats.device_reduce_ns,
        .timed_waits = stats.timed_waits,
        .untimed_waits = stats.untimed_waits,
        .shard_bytes = own,
        .gathered_bytes = stats.arena_reserved + others,
        .bucket_bytes = stats.sources_reserved + stats.staging_reserved,
    };
    pst__page_post(page, &figures);
}

void pst_zero_get_stats(pst_zero *engine, pst_zero_stats *given) {
    pst__stalls_collect(&engine->carrier.stalls);
    pst_zero_stats stats = engine->stats;
    stats.timed_waits = engine->carrier.stalls.measured;
    stats.untimed_waits = engine->carrier.stalls.missed;
    const pst__waits *waits = &engine->carrier.waits;
    stats.exposed_gather_ns = waits->exposed_gather_ns;
    stats.exposed_reduce_ns = waits->exposed_reduce_ns;
    stats.exposed_ns = stats.exposed_gather_ns + stats.exposed_reduce_ns;
    stats.device_gather_ns = waits->device_gather_ns;
    stats.device_reduce_ns = waits->device_reduce_ns;
    stats.late_launches = waits->late_launches;
    pst__clock_collect(&engine->passes);
    pst__clock_collect(&engine->graphs);
    stats.passes_ns = engine->passes.total_ns;
    stats.timed_passes = engine->passes.count;
    stats.graphs_ns = engine->graphs.total_ns;
    stats.timed_graphs = engine->graphs.count;
    pst_arena_stats arena = {.size = sizeof arena};
    pst_arena_get_stats(engine->carrier.gathered, &arena);
    stats.arena_peak = arena.peak;
    stats.arena_reserved = arena.reserved;
    stats.places_reserved = reserved_by(engine->places);
    stats.sources_reserved = reserved_by(engine->carrier.sources);
    stats.staging_reserved = reserved_by(engine->carrier.staging);
    pst__write_sized(given, &stats, sizeof stats);
}

void pst_zero_reset_stats(pst_zero *engine) {
    size_t peak = engine->stats.plan_peak, bound = engine->stats.plan_lower_bound;
    memset(&engine->stats, 0, sizeof engine->stats);
    engine->stats.plan_peak = peak;
    engine->stats.plan_lower_bound = bound;
    engine->carrier.waits = (pst__waits){0};
    pst__clock_reset(&engine->passes);
    pst__clock_reset(&engine->graphs);
    engine->carrier.stalls.measured = engine->carrier.stalls.missed = 0;
    pst_arena_reset_peak(engine->carrier.gathered);
}

/* ---- the end --------------------------------------------------------------------------------- */

void pst_zero_destroy(pst_zero *engine) {
    if (engine == NULL) return;
    pst__replay_leave(engine);
    if (engine->sealed && engine->pass.kind == PST__BACKWARD) pst__reduce_abandon(engine);
    if (pst__carrier_close(&engine->carrier)) zero_free(engine->carrier.heap, engine);
}
