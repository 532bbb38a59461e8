/* The engine's life: created, sealed, bound, destroyed. */
#include "ops/engine.h"
#include "ops/operation.h"

#include "base/clock.h"
#include "base/options.h"
#include "sched/device/needs.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define DEFAULT_BUCKET_BYTES ((size_t)8 << 20)
#define GLANCE_NS            5000000u

/* Before a hook changes anything. */
static pst_status check_compute(pst_zero *engine) {
    pst_device *device = engine->device;
    if (device->ops->stream_ready == NULL) return PST_OK;
    pst_status status = device->ops->stream_ready(device, engine->compute);
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
    pst_status status = pst_runtime_status(engine->runtime);
    return status == PST_OK ? check_compute(engine) : status;
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
    if (options->part_bytes != 0 && options->part_bytes < PST_ZERO_ALIGNMENT)
        return pst__fail(error, PST_EINVAL, "engine '%s': part_bytes is %zu, less than %u",
                         options->name, options->part_bytes, PST_ZERO_ALIGNMENT);
    const char *slot = pst__device_lacks(options->device, PST__NEEDS_ALL);
    if (slot != NULL)
        return pst__fail(error, PST_EINVAL, "engine '%s': device %s has no '%s', which it needs",
                         options->name, options->device->ops->name, slot);
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
                                .order = PST_LANE_BY_SUBMISSION,
                                .takes_help = 1};
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
    engine->one_order = engine->one_comm || engine->asynchronous;
    pst_status status = create_lane(engine, "gather", NULL, &gather->lane);
    if (status == PST_OK && !engine->one_comm)
        status = create_lane(engine, "reduce", gather->lane, &reduce->lane);
    if (status != PST_OK || !engine->asynchronous || reduce->comm->ops->combine == NULL)
        return status;
    return create_lane(engine, "sum", gather->lane,
                       &pst__queue_of(engine, PST__REDUCE_LANE)->sum_lane);
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

/* A peer that has died is noticed here, whatever this rank's threads wait for. */
static void look_at_comms(void *engine) {
    (void)pst__operation_check_comms(engine);
}

static void stop_watching(pst_zero *engine) {
    pst__lookouts_remove(engine->runtime, look_at_comms, engine);
    pst_runtime_remove_poison_hook(engine->runtime, abort_on_poison, engine);
}

static pst_status create_arena(pst_zero *engine, const char *name, pst_arena **arena) {
    const pst_zero_options *options = &engine->options;
    const pst_arena_options wanted = {.size = sizeof wanted,
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
    engine->asynchronous = !(engine->device->ops->caps & PST_DEVICE_STREAM_IS_WORKER);
    engine->world = (size_t)options->gather_comm->size;
    engine->rank = (size_t)options->gather_comm->rank;
    engine->replay = 1;
    engine->history[0].latest = engine->history[1].latest = PST__NO_PATH;
    engine->name = pst__heap_text(engine->heap, options->name);
    if (engine->name == NULL) return PST_ENOMEM;
    engine->options.name = engine->name;
    pst_status status = find_compute(engine);
    engine->stalls = (pst__stalls){.heap = engine->heap,
                                   .device = engine->device,
                                   .compute = engine->compute,
                                   .trace = pst__runtime_trace(engine->runtime),
                                   .is_wanted = options->time_waits};
    if (status == PST_OK)
        status = pst_graph_create(engine->runtime, PST_GRAPH_GROWING, engine->name, &engine->graph);
    if (status == PST_OK) status = create_arena(engine, "gathered", &engine->gathered);
    if (status == PST_OK) status = create_arena(engine, "staging", &engine->staging);
    if (status == PST_OK) status = create_arena(engine, "places", &engine->places);
    if (status == PST_OK) status = create_arena(engine, "sources", &engine->sources);
    if (status == PST_OK)
        status = engine->device->ops->event_create(engine->device, 0, &engine->shards_ready);
    if (status == PST_OK)
        status = engine->device->ops->event_create(engine->device, 0, &engine->reached);
    if (status == PST_OK) status = pst__fill_create(engine);
    if (status == PST_OK) status = create_queues(engine);
    if (status == PST_OK)
        status = pst_runtime_add_poison_hook(engine->runtime, abort_on_poison, engine);
    if (status == PST_OK && engine->asynchronous)
        status = pst__lookouts_add(engine->runtime, look_at_comms, engine);
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

/* ---- shards ---------------------------------------------------------------------------------- */

static void mark_stale(pst__group *group) {
    group->is_stale = 1;
    group->copy_is_old = 1;
}

pst_status pst_zero_shard_place(pst_zero *engine, uint32_t index, void **memory) {
    pst_status status = pst__zero_check(engine, index);
    if (status != PST_OK) return status;
    if (memory == NULL) return PST_EINVAL;
    const pst__group *group = &engine->groups[index];
    *memory = pst__has_place(group) ? group->copy.memory : NULL;
    return PST_OK;
}

/* A part of its place that is copied to all of it would spoil itself. */
static int is_askew(const pst__group *group, const void *shard) {
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
    if (is_askew(group, shard))
        return pst__zero_fail(engine, PST_EINVAL,
                              "group '%s': its shard overlaps its place %p: bind it there, or "
                              "outside of it",
                              group->name, group->copy.memory);
    /* Peers may still read the copy in the place that the shard now comes to lie in. */
    if (pst__has_place(group) && shard == group->copy.memory && group->is_bound)
        status = pst__gather_guard_sources(engine);
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
    return status == PST_OK ? pst__gather_refresh(engine) : status;
}

/* ---- destroying ------------------------------------------------------------------------------ */

/* Those that have joined others go before these. What cannot go now goes with the runtime. */
static void destroy_lanes(pst_zero *engine) {
    for (int lane = PST__LANE_COUNT; lane-- > 0;) {
        pst__queue *queue = &engine->queues[lane];
        if (queue->then_lane != queue->sum_lane && queue->then_lane != queue->lane)
            (void)pst_lane_destroy(queue->then_lane);
        (void)pst_lane_destroy(queue->sum_lane);
        (void)pst_lane_destroy(queue->lane);
    }
}

void pst__zero_free(pst_zero *engine) {
    const pst__heap *heap = engine->heap;
    stop_watching(engine);
    pst__seal_free(engine);
    pst__record_free(engine);
    pst__operation_free_all(engine);
    pst__stalls_free(&engine->stalls);
    pst_arena_destroy(engine->gathered);
    pst_arena_destroy(engine->staging);
    pst_arena_destroy(engine->places);
    pst_arena_destroy(engine->sources);
    (void)pst_graph_destroy(engine->graph);
    destroy_lanes(engine);
    pst__registry_free(engine);
    if (engine->device != NULL) pst__fill_destroy(engine);
    if (engine->shards_ready != NULL)
        engine->device->ops->event_destroy(engine->device, engine->shards_ready);
    if (engine->reached != NULL)
        engine->device->ops->event_destroy(engine->device, engine->reached);
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

/* 1: all that `stream` was given so far is done. */
static int wait_stream(const pst_zero *engine, pst_stream *stream, uint64_t patience_ns) {
    const pst_device_ops *ops = engine->device->ops;
    const struct timespec pause = {0, 50000};
    uint64_t begin = pst__now();
    pst_status status = PST_OK;
    if (ops->event_record(engine->device, engine->reached, stream) != PST_OK) return 0;
    while ((status = ops->event_query(engine->device, engine->reached)) == PST_PENDING) {
        if (pst__now() - begin > patience_ns) return 0;
        (void)nanosleep(&pause, NULL);
    }
    return status == PST_OK;
}

int pst__zero_wait_compute(pst_zero *engine, uint64_t patience_ns) {
    return !engine->asynchronous || wait_stream(engine, engine->compute, patience_ns);
}

static int wait_lane(const pst_zero *engine, const pst_lane *lane, uint64_t patience_ns) {
    return lane == NULL || wait_stream(engine, pst_lane_stream(lane), patience_ns);
}

/* A task that has failed may still run on the device, if it is its event that has failed: its
 * lane's stream tells. */
static int wait_streams(pst_zero *engine, uint64_t patience_ns) {
    int done = pst__zero_wait_compute(engine, patience_ns);
    if (!engine->asynchronous) return done;
    for (int lane = 0; lane < PST__LANE_COUNT && done; lane++) {
        const pst__queue *queue = &engine->queues[lane];
        done = wait_lane(engine, queue->lane, patience_ns) &&
               wait_lane(engine, queue->sum_lane, patience_ns) &&
               wait_lane(engine, queue->then_lane, patience_ns);
    }
    const pst__filling *filling = &engine->filling;
    return done && (filling->own == NULL || wait_stream(engine, filling->own, patience_ns));
}

/* Compute uses the engine's memory, and so may peers that read for themselves: until here. */
static int all_have_read(pst_zero *engine) {
    for (int lane = 0; engine->asynchronous && lane < PST__LANE_COUNT; lane++) {
        const pst__queue *queue = &engine->queues[lane];
        if (queue->comm == NULL || queue->tickets == 0 || queue->comm->ops->source_wait == NULL)
            continue;
        if (queue->comm->ops->source_wait(queue->comm, engine->compute, queue->tickets) != PST_OK)
            return 0;
    }
    return pst__zero_wait_compute(engine, PST__PATIENCE_NS);
}

/* After an abort collectives end soon or never; it is asked again meanwhile. */
static int abort_in_time(pst_zero *engine) {
    uint64_t begin = pst__now();
    const struct timespec pause = {0, 200000};
    for (;;) {
        int quiet = abort_comms(engine, PST_ECANCELED);
        (void)pst_run_once(engine->runtime, NULL);
        if (quiet && all_ended(engine) && wait_streams(engine, GLANCE_NS)) return 1;
        if (pst__now() - begin > PST__PATIENCE_NS) return 0;
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

/* What is in flight ends by itself. On an asynchronous device the scheduler gives up what it has
 * launched when the runtime is poisoned, and the device goes on with it: that takes an abort. */
static int ends_well(pst_zero *engine) {
    if (engine->asynchronous && pst_runtime_status(engine->runtime) != PST_OK) return 0;
    return (all_ended(engine) || drained(engine)) && all_have_read(engine);
}

int pst__zero_quiesce(pst_zero *engine) {
    return ends_well(engine) || abort_in_time(engine);
}

int pst__zero_close(pst_zero *engine) {
    stop_watching(engine);
    if (pst__zero_quiesce(engine)) return 1;
    pst__operation_abandon_all(engine);
    if (!engine->asynchronous) destroy_lanes(engine); /* on others tasks are still in flight */
    pst__log(engine->error, PST_LOG_WARNING,
             "rank %zu, engine '%s': a collective may still write to its memory, which is not "
             "freed",
             engine->rank, engine->name);
    return 0;
}

void pst_zero_destroy(pst_zero *engine) {
    if (engine == NULL) return;
    if (engine->sealed && engine->pass.kind == PST__BACKWARD) pst__reduce_abandon(engine);
    if (pst__zero_close(engine)) pst__zero_free(engine);
}
