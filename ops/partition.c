/* A partition's life: created, parameters added and bound, backwards, destroyed. */
#include "ops/partition.h"

#include "base/options.h"
#include "mem/arena.h"
#include "sched/runtime.h"

#include <time.h>

#define DEFAULT_BUCKET_BYTES ((size_t)64 << 20)

/* ---- creating -------------------------------------------------------------------------------- */

static pst_status check_options(pst_runtime *runtime, const pst_partition_options *given,
                                pst_partition_options *options) {
    pst__error *error = pst__runtime_error(runtime);
    if (!pst__read_options(options, sizeof *options, given))
        return pst__fail(error, PST_EINVAL,
                         "partition: set options.size to sizeof(pst_partition_options)");
    if (options->name == NULL) options->name = "partition";
    if (options->comm == NULL)
        return pst__fail(error, PST_EINVAL, "partition '%s': comm must be set", options->name);
    if (options->bucket_bytes == 0) options->bucket_bytes = DEFAULT_BUCKET_BYTES;
    options->bucket_bytes = pst__round_up(options->bucket_bytes, PST_ZERO_ALIGNMENT);
    return PST_OK;
}

/* The engine that carries the collectives. */
static pst_status create_engine(pst_runtime *runtime, pst_partition *partition) {
    const pst_partition_options *given = &partition->options;
    pst_zero_options options = {.size = sizeof options,
                                .name = given->name,
                                .stage = 1,
                                .gather_comm = given->comm,
                                .reduce_comm = given->comm,
                                .device = given->device,
                                .compute = given->compute,
                                .pumped = given->pumped,
                                .segment_alloc = given->segment_alloc,
                                .segment_free = given->segment_free,
                                .segment_context = given->segment_context};
    return pst_zero_create(runtime, &options, &partition->engine);
}

/* What leaves a bucket behind its all-reduce, beside the next one. On the host the lane of a
 * communicator has to be through with one before it begins the next. */
static pst_status create_delivery(pst_runtime *runtime, const pst_partition *partition) {
    pst__queue *queue = &partition->engine->queues[PST__GATHER_LANE];
    queue->then_lane = queue->sum_lane;
    if (queue->sum_lane != NULL) return PST_OK;
    queue->then_lane = queue->lane;
    if (!partition->engine->asynchronous) return PST_OK;
    const pst_lane_options options = {.size = sizeof options,
                                      .name = "deliver",
                                      .device = partition->engine->device,
                                      .order = PST_LANE_BY_SUBMISSION,
                                      .order_with = queue->lane};
    return pst_lane_create(runtime, &options, &queue->then_lane);
}

/* An opened bucket is filled again when its peers have read it. */
static pst_status refill(void *context, uint64_t id, pst_stream *stream) {
    pst_partition *partition = context;
    pst_comm *comm = partition->options.comm;
    uint64_t ticket = partition->bucket_tickets[id];
    if (comm->ops->source_wait == NULL || ticket == 0) return PST_OK;
    pst_status status = comm->ops->source_wait(comm, stream, ticket);
    if (status == PST_OK) return PST_OK;
    return pst__partition_fail(partition, status,
                               "waiting for the readers of ticket %llu failed: %s",
                               (unsigned long long)ticket, comm->ops->error_text(comm));
}

/* Segments as large as buckets. */
static pst_status create_buckets(pst_runtime *runtime, pst_partition *partition) {
    const pst_partition_options *given = &partition->options;
    pst_zero *engine = partition->engine;
    const pst_arena_options arena = {.size = sizeof arena,
                                     .name = given->name,
                                     .device = engine->device,
                                     .kind = PST_MEMORY_DEVICE,
                                     .segment_bytes = PST_ARENA_ALIGNMENT,
                                     .segment_alloc = given->segment_alloc,
                                     .segment_free = given->segment_free,
                                     .segment_context = given->segment_context};
    pst_status status = pst_arena_create(runtime, &arena, &partition->memory);
    if (status != PST_OK) return status;
    pst_buckets_options buckets = {.size = sizeof buckets,
                                   .arena = partition->memory,
                                   .ranks = engine->world,
                                   .chunk_bytes = partition->chunk_bytes,
                                   .alignment = PST_ZERO_ALIGNMENT,
                                   .per_dtype = given->single_buffer ? 1 : 2,
                                   .fixed = partition->is_opened,
                                   .refill = partition->is_opened ? refill : NULL,
                                   .refill_context = partition};
    return pst_buckets_create(runtime, &buckets, &engine->buckets);
}

static pst_status build(pst_runtime *runtime, pst_partition *partition) {
    pst_status status = create_engine(runtime, partition);
    if (status != PST_OK) return status;
    pst_zero *engine = partition->engine;
    partition->options.device = engine->device;
    partition->options.name = engine->name;
    partition->is_opened = partition->options.comm->ops->open_memory != NULL;
    partition->chunk_bytes = pst__round_up(
        (partition->options.bucket_bytes + engine->world - 1) / engine->world, PST_ZERO_ALIGNMENT);
    partition->chunk_used =
        pst__heap_alloc(engine->heap, engine->world * sizeof *partition->chunk_used);
    if (partition->chunk_used == NULL) return PST_ENOMEM;
    status = create_buckets(runtime, partition);
    if (status == PST_OK) status = create_delivery(runtime, partition);
    return status == PST_OK ? pst__comparisons_alloc(partition) : status;
}

static void partition_free(const pst__heap *heap, pst_partition *partition) {
    pst_zero *engine = partition->engine;
    if (engine != NULL) {
        const size_t world = engine->world;
        pst__comparisons_free(partition);
        pst__zero_free(engine); /* and its buckets */
        pst__heap_free(heap, partition->chunk_used, world * sizeof *partition->chunk_used);
    }
    pst_arena_destroy(partition->memory);
    for (size_t i = 0; i < partition->split_count; i++)
        pst__heap_free_text(heap, partition->splits[i].name);
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        pst__heap_free(heap, partition->pending[dtype].entries,
                       partition->pending[dtype].capacity * sizeof(pst__entry));
    pst__heap_free(heap, partition->copied, partition->copied_capacity * sizeof(void *));
    pst__heap_free(heap, partition->splits, partition->split_capacity * sizeof(pst__split));
    pst__heap_free(heap, partition->owners, partition->owner_capacity * sizeof(pst__owner));
    pst__heap_free(heap, partition->casts, partition->cast_capacity * sizeof(pst_cast));
    pst__heap_free(heap, partition, sizeof *partition);
}

pst_status pst_partition_create(pst_runtime *runtime, const pst_partition_options *given,
                                pst_partition **created) {
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    pst_partition_options options;
    pst_status status = check_options(runtime, given, &options);
    if (status != PST_OK) return status;
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst_partition *partition = pst__heap_alloc(heap, sizeof *partition);
    if (partition != NULL) {
        partition->options = options;
        partition->hash = PST__HASH_SEED;
        status = build(runtime, partition);
    }
    if (partition == NULL || status == PST_ENOMEM)
        status = pst__fail(pst__runtime_error(runtime), PST_ENOMEM, "partition '%s': no memory",
                           options.name);
    if (status != PST_OK) {
        if (partition != NULL) partition_free(heap, partition);
        return status;
    }
    *created = partition;
    return PST_OK;
}

void pst_partition_destroy(pst_partition *partition) {
    if (partition == NULL) return;
    pst_zero *engine = partition->engine;
    pst__pending_forget_all(partition);
    if (!pst__zero_close(engine)) return;
    pst__pending_forget_copied(partition);
    partition_free(engine->heap, partition);
}

/* ---- parameters ------------------------------------------------------------------------------ */

static pst_status check(pst_partition *partition, uint32_t parameter) {
    if (partition == NULL) return PST_EINVAL;
    if (parameter >= partition->split_count)
        return pst__partition_fail(partition, PST_EINVAL, "there is no parameter %u", parameter);
    return pst_runtime_status(partition->engine->runtime);
}

pst_status pst_partition_add(pst_partition *partition, const char *name, size_t elements,
                             uint32_t *parameter) {
    if (partition == NULL || parameter == NULL) return PST_EINVAL;
    if (elements > PST__MOST_ELEMENTS)
        return pst__partition_fail(partition, PST_EINVAL,
                                   "parameter '%s': %zu elements are too many",
                                   name == NULL ? "" : name, elements);
    pst_zero *engine = partition->engine;
    char *copy = pst__heap_text(engine->heap, name);
    pst_status status =
        pst__heap_grow(engine->heap, (void **)&partition->splits, &partition->split_capacity,
                       partition->split_count + 1, sizeof *partition->splits);
    if (copy == NULL || status != PST_OK) {
        pst__heap_free_text(engine->heap, copy);
        return pst__partition_fail(partition, PST_ENOMEM, "no memory for parameter '%s'",
                                   name == NULL ? "" : name);
    }
    *parameter = (uint32_t)partition->split_count;
    partition->splits[partition->split_count++] = (pst__split){.name = copy, .elements = elements};
    partition->is_compared = 0;
    return PST_OK;
}

static pst_status check_range(pst_partition *partition, const pst__split *split, pst__range range) {
    if (range.count > split->elements || range.first > split->elements - range.count)
        return pst__partition_fail(
            partition, PST_EINVAL, "parameter '%s': elements [%zu, %zu) are not all of its %zu",
            split->name, range.first, range.first + range.count, split->elements);
    if (!partition->is_compared ||
        (range.first == split->own.first && range.count == split->own.count))
        return PST_OK;
    return pst__partition_fail(partition, PST_EINVAL,
                               "parameter '%s': elements [%zu, %zu) are bound, but the ranks have "
                               "agreed that this one owns [%zu, %zu)",
                               split->name, range.first, range.first + range.count,
                               split->own.first, split->own.first + split->own.count);
}

static int waits(const pst_partition *partition, const pst__split *split) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++) {
        uint64_t number = partition->pending[dtype].number;
        if (number != 0 && split->bucket == number) return 1;
    }
    return 0;
}

static pst_status wait_all(pst_partition *partition) {
    pst_zero *engine = partition->engine;
    for (pst__operation *operation = engine->queues[PST__GATHER_LANE].oldest; operation != NULL;
         operation = operation->next) {
        if (operation->work.collective.kind == PST_ALL_GATHER) continue; /* an earlier comparison */
        pst_status status = pst__operation_wait(operation, "wait gradients", PST__REDUCE_LANE);
        if (status != PST_OK) return status;
    }
    return pst_runtime_status(engine->runtime);
}

pst_status pst_partition_bind(pst_partition *partition, uint32_t parameter, void *target,
                              pst_dtype dtype, size_t first, size_t count) {
    pst_status status = check(partition, parameter);
    if (status != PST_OK) return status;
    pst__split *split = &partition->splits[parameter];
    pst__range range = {first, count};
    if (count > 0 && (target == NULL || pst_dtype_size(dtype) == 0))
        return pst__partition_fail(partition, PST_EINVAL,
                                   "parameter '%s': no memory, or no dtype, for its gradient",
                                   split->name);
    if (count > 0) status = check_range(partition, split, range);
    if (status != PST_OK) return status;
    if (waits(partition, split)) pst__pending_forget_all(partition);
    status = wait_all(partition); /* of a backward that was broken off */
    if (status != PST_OK) return status;
    if (count > 0) split->own = range;
    split->target = count > 0 ? target : NULL;
    split->dtype = dtype;
    split->has_sum = split->is_old = 0;
    return PST_OK;
}

/* ---- backwards ------------------------------------------------------------------------------- */

pst_status pst_partition_begin_backward(pst_partition *partition, int is_last) {
    if (partition == NULL) return PST_EINVAL;
    pst__pending_forget_all(partition);
    partition->hash = PST__HASH_SEED;
    partition->has_reduced = 0;
    for (size_t i = 0; partition->is_last && i < partition->split_count; i++) {
        pst__split *split = &partition->splits[i];
        split->is_old |= split->has_sum;
        split->has_sum = 0;
    }
    partition->is_last = is_last;
    return pst__operation_check_comms(partition->engine);
}

static void note_report(pst_partition *partition, uint32_t parameter, pst_dtype dtype) {
    const uint32_t report[2] = {parameter, (uint32_t)dtype};
    partition->hash = pst__hash(partition->hash, report, sizeof report);
    partition->has_reduced = 1;
}

pst_status pst_partition_reduce(pst_partition *partition, uint32_t parameter, const void *source,
                                pst_dtype dtype, void *token) {
    pst_status status = check(partition, parameter);
    if (status == PST_OK && (source == NULL || pst_dtype_size(dtype) == 0) &&
        partition->splits[parameter].elements > 0)
        status = pst__partition_fail(partition, PST_EINVAL,
                                     "parameter '%s': its gradient has no memory, or no dtype",
                                     partition->splits[parameter].name);
    if (status == PST_OK && partition->splits[parameter].elements > 0) {
        note_report(partition, parameter, dtype);
        return pst__pending_add(partition, parameter, source, dtype, token);
    }
    if (partition != NULL && partition->options.consumed != NULL)
        partition->options.consumed(partition->options.callback_context, token);
    return status;
}

/* The optimizer finds zeros where no graph had a gradient since the last update. */
static pst_status zero_old(pst_partition *partition) {
    const pst_zero *engine = partition->engine;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < partition->split_count; i++) {
        pst__split *split = &partition->splits[i];
        if (split->target == NULL || !split->is_old || split->has_sum) continue;
        status = engine->device->ops->fill(engine->device, engine->compute, split->target, 0,
                                           split->own.count * pst_dtype_size(split->dtype));
        split->is_old = 0;
    }
    return status;
}

/* Takes the buckets back. On the host a reduction's callback may be behind its task's end. */
static void reap_all(pst_zero *engine) {
    const struct timespec pause = {0, 50000};
    pst__operation_reap(engine);
    for (int i = 0; i < 2000 && engine->queues[PST__GATHER_LANE].holding != NULL; i++) {
        (void)nanosleep(&pause, NULL);
        pst__operation_reap(engine);
    }
}

/* Compute has waited for all that was begun. */
static void release_buckets(pst_partition *partition) {
    pst_zero *engine = partition->engine;
    int in_order = engine->asynchronous && partition->options.frees_in_compute_order;
    reap_all(engine);
    pst_buckets_trim(engine->buckets);
    if (in_order) {
        pst__arena_trim_in_order(partition->memory);
        pst__arena_trim_in_order(engine->staging);
    } else {
        pst_arena_trim(partition->memory);
        pst_arena_trim(engine->staging);
    }
}

pst_status pst_partition_end_backward(pst_partition *partition, int release) {
    if (partition == NULL) return PST_EINVAL;
    pst_status status = pst_runtime_status(partition->engine->runtime);
    if (status == PST_OK) status = pst__pending_flush_all(partition);
    if (status == PST_OK) status = wait_all(partition);
    if (status == PST_OK) status = pst__pending_join(partition);
    if (status == PST_OK && partition->is_last) status = zero_old(partition);
    if (status == PST_OK && release) release_buckets(partition);
    if (status != PST_OK) return status;
    return pst__reduce_give_up(partition->engine, pst__comparison_begin(partition));
}

void pst_partition_get_stats(const pst_partition *partition, pst_partition_stats *stats) {
    pst_arena_stats memory = {.size = sizeof memory};
    pst_arena_get_stats(partition->memory, &memory);
    pst_partition_stats now = partition->stats;
    now.exposed_ns = partition->engine->stats.exposed_reduce_ns;
    now.bucket_bytes = memory.reserved;
    pst__write_sized(stats, &now, sizeof now);
}
