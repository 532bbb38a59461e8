/* The engine's life: created, sealed, bound, destroyed. */
#include "ops/engine.h"
#include "ops/operation.h"

#include "base/clock.h"
#include "mem/options.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define DEFAULT_BUCKET_BYTES ((size_t)8 << 20)

pst_status pst__zero_check(pst_zero *engine, uint32_t group) {
    if (engine == NULL) return PST_EINVAL;
    if (!engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "call pst_zero_seal first");
    if (group != PST__NO_GROUP && group >= engine->group_count)
        return pst__zero_fail(engine, PST_EINVAL, "there is no group %u", group);
    return pst_runtime_status(engine->runtime);
}

pst_status pst__zero_record(pst_zero *engine, pst_event *event) {
    return engine->device->ops->event_record(engine->device, event, engine->compute);
}

/* ---- creating -------------------------------------------------------------------------------- */

static pst_status check_comms(pst__error *error, const pst_zero_options *options) {
    const pst_comm *gather = options->gather_comm, *reduce = options->reduce_comm;
    if (gather == NULL || reduce == NULL)
        return pst__fail(error, PST_EINVAL, "engine '%s': gather_comm and reduce_comm must be set",
                         options->name);
    if (gather->size != reduce->size || gather->rank != reduce->rank || gather->size < 1)
        return pst__fail(error, PST_EINVAL,
                         "engine '%s': gather_comm has rank %d of %d, reduce_comm rank %d of %d",
                         options->name, gather->rank, gather->size, reduce->rank, reduce->size);
    return PST_OK;
}

static pst_status check_options(pst_runtime *runtime, const pst_zero_options *given,
                                pst_zero_options *options) {
    pst__error *error = pst__runtime_error(runtime);
    if (!pst__read_options(options, sizeof *options, given))
        return pst__fail(error, PST_EINVAL, "engine: set options.size to sizeof(pst_zero_options)");
    if (options->name == NULL) options->name = "zero";
    if (options->stage < 1 || options->stage > 3)
        return pst__fail(error, PST_EINVAL, "engine '%s': stage %d is not 1, 2 or 3", options->name,
                         options->stage);
    if (options->device == NULL) options->device = pst_runtime_host(runtime);
    if (options->bucket_bytes == 0) options->bucket_bytes = DEFAULT_BUCKET_BYTES;
    unsigned caps = options->device->ops->caps;
    if (options->compute == NULL && !(caps & PST_DEVICE_STREAM_IS_WORKER))
        return pst__fail(error, PST_EINVAL,
                         "engine '%s': device %s needs options.compute, a BORROWED lane",
                         options->name, options->device->ops->name);
    return check_comms(error, options);
}

/* On an asynchronous device the launches of both communicators have one order, so that it is the
 * same on all ranks. On the host, where a launch takes its lane until it is done, each communicator
 * has its own: else one would hold up the other. */
static pst_status create_lane(pst_zero *engine, const char *name, pst_lane *first,
                              pst_lane **lane) {
    int in_one_order = first != NULL && !(engine->device->ops->caps & PST_DEVICE_STREAM_IS_WORKER);
    pst_lane_options options = {.size = sizeof options,
                                .name = name,
                                .device = engine->device,
                                .order = PST_LANE_BY_SUBMISSION};
    if (in_one_order) {
        options.order_with = first;
    } else if (engine->options.pumped) {
        options.mode = PST_LANE_PUMPED;
    } else if (first != NULL) {
        options.mode = PST_LANE_SHARED;
        options.share_with = first;
    }
    return pst_lane_create(engine->runtime, &options, lane);
}

/* The same communicator twice is one queue: one lane for both directions. */
static pst_status create_queues(pst_zero *engine) {
    pst__queue *gather = &engine->queues[PST__GATHER_LANE];
    pst__queue *reduce = &engine->queues[PST__REDUCE_LANE];
    gather->comm = engine->options.gather_comm;
    reduce->comm = engine->options.reduce_comm;
    engine->one_comm = gather->comm == reduce->comm;
    pst_status status = create_lane(engine, "gather", NULL, &gather->lane);
    if (status != PST_OK || engine->one_comm) return status;
    return create_lane(engine, "reduce", gather->lane, &reduce->lane);
}

static int abort_comms(pst_zero *engine, pst_status status) {
    int quiet = 1;
    for (int lane = 0; lane < PST__LANE_COUNT; lane++) {
        pst_comm *comm = engine->queues[lane].comm;
        quiet &= comm->ops->abort(comm, status) == PST_OK;
    }
    return quiet;
}

/* What is in flight ends, here and on the peers, which need not wait for this rank in vain. */
static void abort_on_poison(void *engine, pst_status status) {
    (void)abort_comms(engine, status);
}

static pst_status create_arena(pst_zero *engine, const char *name, pst_arena **arena) {
    const pst_zero_options *options = &engine->options;
    pst_arena_options wanted = {.size = sizeof wanted,
                                .name = name,
                                .device = engine->device,
                                .kind = PST_MEMORY_DEVICE,
                                .segment_alloc = options->segment_alloc,
                                .segment_free = options->segment_free,
                                .segment_context = options->segment_context};
    return pst_arena_create(engine->runtime, &wanted, arena);
}

static pst_status find_compute(pst_zero *engine) {
    if (engine->options.compute != NULL) {
        engine->compute = pst_lane_stream(engine->options.compute);
        return PST_OK;
    }
    return engine->device->ops->stream_wrap(engine->device, NULL, &engine->compute);
}

static pst_status build(pst_zero *engine) {
    const pst_zero_options *options = &engine->options;
    engine->device = options->device;
    engine->world = (size_t)options->gather_comm->size;
    engine->rank = (size_t)options->gather_comm->rank;
    engine->replay = 1;
    engine->name = pst__heap_text(engine->heap, options->name);
    if (engine->name == NULL) return PST_ENOMEM;
    engine->options.name = engine->name;
    pst_status status = find_compute(engine);
    if (status == PST_OK)
        status = pst_graph_create(engine->runtime, PST_GRAPH_GROWING, engine->name, &engine->graph);
    if (status == PST_OK) status = create_arena(engine, "gathered", &engine->gathered);
    if (status == PST_OK) status = create_arena(engine, "gradients", &engine->storage);
    if (status == PST_OK)
        status = engine->device->ops->event_create(engine->device, 0, &engine->shards_ready);
    if (status == PST_OK) status = create_queues(engine);
    if (status == PST_OK)
        status = pst_runtime_add_poison_hook(engine->runtime, abort_on_poison, engine);
    return status;
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
    engine->runtime = runtime;
    engine->heap = heap;
    engine->error = error;
    engine->options = options;
    status = build(engine);
    if (status != PST_OK) {
        pst__zero_free(engine);
        return status == PST_ENOMEM ? pst__fail(error, status, "engine: no memory") : status;
    }
    *created = engine;
    return PST_OK;
}

/* ---- sealing --------------------------------------------------------------------------------- */

static void name_buckets(pst_zero *engine) {
    for (int i = 0; i < PST_DTYPE_COUNT; i++)
        (void)snprintf(engine->bucket_names[i], sizeof engine->bucket_names[i], "gradients %s",
                       pst_dtype_name((pst_dtype)i));
}

static pst_status alloc_presence(pst_zero *engine) {
    pst_device *device = engine->device;
    void *memory = NULL;
    engine->presence_bytes = engine->parameter_count + 2 * engine->group_count;
    if (engine->presence_bytes == 0) engine->presence_bytes = 1;
    pst_status status =
        device->ops->alloc(device, PST_MEMORY_PINNED, engine->presence_bytes, &memory);
    engine->presence = memory;
    return status;
}

static pst_status alloc_tables(pst_zero *engine) {
    size_t count = engine->group_count;
    for (size_t i = 0; i < count; i++) {
        size_t casts = pst__layout_cast_limit(&engine->groups[i].layout, engine->world);
        if (casts > engine->cast_capacity) engine->cast_capacity = casts;
    }
    engine->casts = pst__heap_alloc(engine->heap, engine->cast_capacity * sizeof *engine->casts);
    engine->need = pst__heap_alloc(engine->heap, count * sizeof *engine->need);
    engine->needed_here = pst__heap_alloc(engine->heap, count);
    engine->held = pst__heap_alloc(engine->heap, count);
    if (engine->casts == NULL || engine->need == NULL || engine->needed_here == NULL ||
        engine->held == NULL)
        return PST_ENOMEM;
    pst_status status = pst__order_alloc(engine->heap, &engine->order, count);
    for (size_t i = 0; status == PST_OK && i < count; i++)
        engine->order.bytes[i] = engine->groups[i].layout.gathered_bytes;
    return status;
}

/* Communication copies, for groups that are gathered in another dtype than their shards have. */
static pst_status alloc_copies(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        if (group->gather_dtype == group->dtype) continue;
        pst_status status = pst_arena_acquire(
            engine->storage, group->layout.shard_elements * group->layout.gather_element_bytes,
            &group->copy);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* Stages 1 and 2 hold all groups for ever: one segment for them. */
static pst_status alloc_resident(pst_zero *engine) {
    size_t bytes = 0;
    if (engine->options.stage == 3) return PST_OK;
    for (size_t i = 0; i < engine->group_count; i++) {
        size_t more = (engine->order.bytes[i] + PST_ARENA_ALIGNMENT - 1) / PST_ARENA_ALIGNMENT *
                      PST_ARENA_ALIGNMENT;
        bytes = more > SIZE_MAX - bytes ? SIZE_MAX : bytes + more;
    }
    return bytes == 0 ? PST_OK : pst_arena_add_segment(engine->gathered, bytes);
}

static pst_status alloc_all(pst_zero *engine) {
    pst_buckets_options buckets = {.size = sizeof buckets,
                                   .arena = engine->storage,
                                   .ranks = engine->world,
                                   .chunk_bytes = engine->options.bucket_bytes,
                                   .alignment = PST_ZERO_ALIGNMENT};
    name_buckets(engine);
    pst_status status = alloc_tables(engine);
    if (status == PST_OK) status = alloc_presence(engine);
    if (status == PST_OK) status = pst__agree_alloc(engine);
    if (status == PST_OK) status = alloc_copies(engine);
    if (status == PST_OK) status = alloc_resident(engine);
    if (status == PST_OK) status = pst_buckets_create(engine->runtime, &buckets, &engine->buckets);
    return status;
}

static void free_copies(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        if (group->copy.memory != NULL) pst_arena_release(engine->storage, &group->copy, NULL);
        group->copy = (pst_lease){0};
    }
}

static void free_all(pst_zero *engine) {
    size_t count = engine->group_count;
    pst_buckets_destroy(engine->buckets);
    free_copies(engine);
    pst__agree_free(engine);
    if (engine->presence != NULL)
        engine->device->ops->free(engine->device, PST_MEMORY_PINNED, engine->presence,
                                  engine->presence_bytes);
    pst__order_free(engine->heap, &engine->order);
    pst__heap_free(engine->heap, engine->casts, engine->cast_capacity * sizeof *engine->casts);
    pst__heap_free(engine->heap, engine->need, count * sizeof *engine->need);
    pst__heap_free(engine->heap, engine->needed_here, count);
    pst__heap_free(engine->heap, engine->held, count);
    engine->buckets = NULL;
    engine->presence = NULL;
    engine->casts = NULL;
    engine->cast_capacity = 0;
    engine->need = NULL;
    engine->needed_here = engine->held = NULL;
}

pst_status pst_zero_seal(pst_zero *engine) {
    if (engine == NULL) return PST_EINVAL;
    if (engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "the engine is sealed already");
    pst_status status = alloc_all(engine);
    if (status == PST_ENOMEM) status = pst__zero_fail(engine, status, "%s", "no memory to seal");
    if (status == PST_OK) status = pst__agree_registry(engine);
    if (status != PST_OK) {
        free_all(engine);
        return status;
    }
    engine->sealed = 1;
    return PST_OK;
}

/* ---- shards ---------------------------------------------------------------------------------- */

static void mark_stale(pst__group *group) {
    group->is_stale = 1;
    group->copy_is_old = 1;
}

pst_status pst_zero_bind_shard(pst_zero *engine, uint32_t index, void *shard) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    pst__group *group = &engine->groups[index];
    if (shard == NULL && group->layout.shard_elements > 0)
        return pst__zero_fail(engine, PST_EINVAL, "group '%s': its shard is NULL", group->name);
    group->shard = shard;
    group->is_bound = 1;
    mark_stale(group);
    return pst__zero_record(engine, engine->shards_ready);
}

pst_status pst_zero_updated(pst_zero *engine) {
    pst_status status = pst__zero_check(engine, PST__NO_GROUP);
    if (status != PST_OK) return status;
    for (size_t i = 0; i < engine->group_count; i++)
        mark_stale(&engine->groups[i]);
    return pst__zero_record(engine, engine->shards_ready);
}

/* ---- destroying ------------------------------------------------------------------------------ */

void pst__zero_free(pst_zero *engine) {
    const pst__heap *heap = engine->heap;
    pst_runtime_remove_poison_hook(engine->runtime, abort_on_poison, engine);
    free_all(engine);
    pst__record_free(engine);
    pst__operation_free_all(engine);
    pst_arena_destroy(engine->gathered);
    pst_arena_destroy(engine->storage);
    (void)pst_graph_destroy(engine->graph);
    pst__registry_free(engine);
    if (engine->shards_ready != NULL)
        engine->device->ops->event_destroy(engine->device, engine->shards_ready);
    if (engine->options.compute == NULL && engine->compute != NULL)
        engine->device->ops->stream_destroy(engine->device, engine->compute);
    pst__heap_free(heap, engine->late, engine->late_capacity * sizeof *engine->late);
    pst__heap_free_text(heap, engine->name);
    pst__heap_free(heap, engine, sizeof *engine);
}

static int all_ended(pst_zero *engine) {
    pst__operation_reap(engine);
    for (int lane = 0; lane < PST__LANE_COUNT; lane++)
        if (engine->queues[lane].oldest != NULL) return 0;
    return 1;
}

#define ABORT_PATIENCE_NS 2000000000u

/* After an abort collectives end soon or never; it is asked again meanwhile. */
static int abort_in_time(pst_zero *engine) {
    uint64_t begin = pst__now();
    const struct timespec pause = {0, 200000};
    for (;;) {
        int quiet = abort_comms(engine, PST_ECANCELED);
        (void)pst_run_once(engine->runtime, NULL);
        if (quiet && all_ended(engine)) return 1;
        if (pst__now() - begin > ABORT_PATIENCE_NS) return 0;
        (void)nanosleep(&pause, NULL);
    }
}

/* A callback may still be on its last lines when its task counts as ended. */
static int drained(pst_zero *engine) {
    const struct timespec pause = {0, 50000};
    if (pst_launch_wait((pst_launch){engine->graph, 0}) != PST_OK) return 0;
    for (int i = 0; i < 1000 && !all_ended(engine); i++)
        (void)nanosleep(&pause, NULL);
    return all_ended(engine);
}

int pst__zero_quiesce(pst_zero *engine) {
    int ended = all_ended(engine) || drained(engine) || abort_in_time(engine);
    return ended && engine->lost == 0;
}

void pst_zero_destroy(pst_zero *engine) {
    if (engine == NULL) return;
    if (engine->sealed && engine->pass.kind == PST__BACKWARD) pst__reduce_abandon(engine);
    pst_runtime_remove_poison_hook(engine->runtime, abort_on_poison, engine);
    if (!pst__zero_quiesce(engine)) {
        pst__log(engine->error, PST_LOG_WARNING,
                 "rank %zu, engine '%s': a collective may still write to its memory, which is not "
                 "freed",
                 engine->rank, engine->name);
        return;
    }
    pst__zero_free(engine);
}
