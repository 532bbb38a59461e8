/* A partition's life: created, parameters added and bound, owners compared, backwards, destroyed.
 */
#include "ops/deepcompile/partition.h"

#include "base/options.h"
#include "mem/arena.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <string.h>

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
    options->bucket_bytes = pst__round_up(options->bucket_bytes, PST__SLOT_ALIGNMENT);
    return PST_OK;
}

static pst_status create_carrier(pst_runtime *runtime, pst_partition *partition) {
    const pst_partition_options *given = &partition->options;
    const pst__carrier_options options = {.name = given->name,
                                          .gather_comm = given->comm,
                                          .reduce_comm = given->comm,
                                          .device = given->device,
                                          .compute = given->compute,
                                          .pumped = given->pumped,
                                          .segment_alloc = given->segment_alloc,
                                          .segment_free = given->segment_free,
                                          .segment_context = given->segment_context};
    return pst__carrier_create(runtime, &options, &partition->carrier);
}

/* Segments as large as buckets. */
static pst_status create_buckets(pst_partition *partition) {
    pst__carrier *carrier = &partition->carrier;
    const pst_status status = pst__carrier_create_arena(carrier, partition->options.name,
                                                        PST_ARENA_ALIGNMENT, &partition->memory);
    if (status != PST_OK) return status;
    return pst__buckets_create(carrier, partition->memory, partition->chunk_bytes,
                               partition->options.single_buffer ? 1 : 2, partition->is_opened);
}

static pst_status build(pst_runtime *runtime, pst_partition *partition) {
    pst_status status = create_carrier(runtime, partition);
    if (status != PST_OK) return status;
    pst__carrier *carrier = &partition->carrier;
    partition->options.device = carrier->device;
    partition->options.name = carrier->name;
    partition->held = (pst__sources_held){.carrier = carrier,
                                          .consumed = partition->options.consumed,
                                          .context = partition->options.callback_context};
    partition->is_opened = partition->options.comm->ops->open_memory != NULL;
    partition->chunk_bytes =
        pst__round_up((partition->options.bucket_bytes + carrier->world - 1) / carrier->world,
                      PST__SLOT_ALIGNMENT);
    partition->chunk_used =
        pst__heap_alloc(carrier->heap, carrier->world * sizeof *partition->chunk_used);
    if (partition->chunk_used == NULL) return PST_ENOMEM;
    status = create_buckets(partition);
    if (status == PST_OK)
        status = pst__carrier_add_then_lane(
            &partition->carrier, &partition->carrier.queues[PST__GATHER_LANE], "deliver");
    if (status != PST_OK) return status;
    return pst__comparisons_create(carrier, PST__GATHER_LANE, "order of gradients",
                                   "reported other gradients in a backward, or in another order; "
                                   "the reduced gradients are wrong",
                                   &partition->comparisons);
}

static void partition_free(const pst__heap *heap, pst_partition *partition) {
    const size_t world = partition->carrier.world;
    pst__comparisons_free(&partition->comparisons);
    pst__carrier_free(&partition->carrier); /* and the buckets */
    pst_arena_destroy(partition->memory);
    pst__heap_free(heap, partition->chunk_used, world * sizeof *partition->chunk_used);
    for (size_t i = 0; i < partition->parameter_count; i++)
        pst__heap_free_text(heap, partition->parameters[i].name);
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        pst__heap_free(heap, partition->pending[dtype].entries,
                       partition->pending[dtype].capacity * sizeof(pst__partition_entry));
    pst__sources_free(&partition->held);
    pst__heap_free(heap, partition->parameters,
                   partition->parameter_capacity * sizeof(pst__partition_parameter));
    pst__heap_free(heap, partition->owners,
                   partition->owner_capacity * sizeof(pst__partition_owner));
    pst__casts_free(heap, &partition->casts);
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
    pst__partition_forget_pending(partition);
    if (!pst__carrier_close(&partition->carrier)) return;
    pst__sources_release_all(&partition->held);
    partition_free(partition->carrier.heap, partition);
}

/* ---- parameters ------------------------------------------------------------------------------ */

static pst_status check(pst_partition *partition, uint32_t parameter) {
    if (partition == NULL) return PST_EINVAL;
    if (parameter >= partition->parameter_count)
        return pst__partition_fail(partition, PST_EINVAL, "there is no parameter %u", parameter);
    return pst_runtime_status(partition->carrier.runtime);
}

pst_status pst_partition_add(pst_partition *partition, const char *name, size_t elements,
                             uint32_t *parameter) {
    if (partition == NULL || parameter == NULL) return PST_EINVAL;
    if (elements > PST__MOST_ELEMENTS)
        return pst__partition_fail(partition, PST_EINVAL,
                                   "parameter '%s': %zu elements are too many",
                                   name == NULL ? "" : name, elements);
    pst__carrier *carrier = &partition->carrier;
    char *copy = pst__heap_text(carrier->heap, name);
    pst_status status = pst__heap_grow(
        carrier->heap, (void **)&partition->parameters, &partition->parameter_capacity,
        partition->parameter_count + 1, sizeof *partition->parameters);
    if (copy == NULL || status != PST_OK) {
        pst__heap_free_text(carrier->heap, copy);
        return pst__partition_fail(partition, PST_ENOMEM, "no memory for parameter '%s'",
                                   name == NULL ? "" : name);
    }
    *parameter = (uint32_t)partition->parameter_count;
    partition->parameters[partition->parameter_count++] =
        (pst__partition_parameter){.name = copy, .elements = elements};
    partition->is_compared = 0;
    return PST_OK;
}

static pst_status check_range(pst_partition *partition, const pst__partition_parameter *parameter,
                              pst__partition_range range) {
    if (range.count > parameter->elements || range.first > parameter->elements - range.count)
        return pst__partition_fail(
            partition, PST_EINVAL, "parameter '%s': elements [%zu, %zu) are not all of its %zu",
            parameter->name, range.first, range.first + range.count, parameter->elements);
    if (!partition->is_compared ||
        (range.first == parameter->own.first && range.count == parameter->own.count))
        return PST_OK;
    return pst__partition_fail(partition, PST_EINVAL,
                               "parameter '%s': elements [%zu, %zu) are bound, but the ranks have "
                               "agreed that this one owns [%zu, %zu)",
                               parameter->name, range.first, range.first + range.count,
                               parameter->own.first, parameter->own.first + parameter->own.count);
}

pst_status pst_partition_bind(pst_partition *partition, uint32_t index, void *target,
                              pst_dtype dtype, size_t first, size_t count) {
    pst_status status = check(partition, index);
    if (status != PST_OK) return status;
    pst__partition_parameter *parameter = &partition->parameters[index];
    pst__partition_range range = {first, count};
    if (count > 0 && (target == NULL || pst_dtype_size(dtype) == 0))
        return pst__partition_fail(partition, PST_EINVAL,
                                   "parameter '%s': no memory, or no dtype, for its gradient",
                                   parameter->name);
    if (count > 0) status = check_range(partition, parameter, range);
    if (status != PST_OK) return status;
    if (pst__bucket_of(&partition->carrier, &parameter->target) != PST_DTYPE_COUNT)
        pst__partition_forget_pending(partition);
    status =
        pst__operation_wait_reductions(&partition->carrier); /* of a backward that was broken off */
    if (status != PST_OK) return status;
    if (count > 0) parameter->own = range;
    parameter->target =
        (pst__target){.memory = count > 0 ? target : NULL, .count = count, .dtype = dtype};
    return PST_OK;
}

/* ---- who owns which elements ----------------------------------------------------------------- */

static pst_status compare_sizes(pst_partition *partition) {
    pst__carrier *carrier = &partition->carrier;
    uint64_t own[2] = {partition->parameter_count, PST__HASH_SEED};
    for (size_t i = 0; i < partition->parameter_count; i++)
        own[1] = pst__hash(own[1], &partition->parameters[i].elements, sizeof(size_t));
    own[1] = pst__hash(own[1], &partition->options.bucket_bytes, sizeof(size_t));
    own[1] = pst__hash(own[1], &partition->options.reduce_in_fp32, sizeof(int));
    own[1] = pst__hash(own[1], &partition->options.route, sizeof partition->options.route);
    uint64_t *all = pst__heap_alloc(carrier->heap, carrier->world * sizeof own);
    if (all == NULL) return PST_ENOMEM;
    pst_status status = pst__gather_bytes(carrier, "partition sizes", own, sizeof own, all);
    for (size_t rank = 0; status == PST_OK && rank < carrier->world; rank++)
        if (memcmp(&all[2 * rank], own, sizeof own) != 0)
            status = pst__partition_fail(
                partition, PST_EMISMATCH,
                "%zu parameters here, %llu on rank %zu, or of other sizes, or other options",
                partition->parameter_count, (unsigned long long)all[2 * rank], rank);
    pst__heap_free(carrier->heap, all, carrier->world * sizeof own);
    return status;
}

static pst_status add_owner(pst_partition *partition, size_t rank, pst__partition_range range) {
    pst_status status = pst__heap_grow(partition->carrier.heap, (void **)&partition->owners,
                                       &partition->owner_capacity, partition->owner_count + 1,
                                       sizeof *partition->owners);
    if (status == PST_OK)
        partition->owners[partition->owner_count++] = (pst__partition_owner){rank, range};
    return status;
}

/* The rank whose elements begin at `first`, or `world`. */
static size_t rank_at(const pst_partition *partition, const pst__partition_range *all, size_t index,
                      size_t first) {
    size_t rank = 0;
    for (; rank < partition->carrier.world; rank++) {
        const pst__partition_range *range = &all[rank * partition->parameter_count + index];
        if (range->count > 0 && range->first == first) break;
    }
    return rank;
}

/* The owners of a parameter follow one another; a parameter that nobody owns has none. */
static pst_status enter_owners(pst_partition *partition, const pst__partition_range *all,
                               size_t index) {
    const size_t world = partition->carrier.world;
    pst__partition_parameter *parameter = &partition->parameters[index];
    size_t first = 0, owned = 0;
    parameter->first_owner = partition->owner_count;
    for (size_t rank = 0; rank < world; rank++)
        owned += all[rank * partition->parameter_count + index].count;
    while (owned > 0 && first < parameter->elements) {
        size_t rank = rank_at(partition, all, index, first);
        if (rank == world) break;
        pst__partition_range range = all[rank * partition->parameter_count + index];
        pst_status status = add_owner(partition, rank, range);
        if (status != PST_OK) return status;
        first += range.count;
    }
    parameter->owner_count = partition->owner_count - parameter->first_owner;
    if (owned == 0 || (owned == parameter->elements && first == owned)) return PST_OK;
    return pst__partition_fail(partition, PST_EMISMATCH,
                               "parameter '%s' of %zu elements: the ranks have bound %zu of them, "
                               "those from %zu on to none or to several ranks",
                               parameter->name, parameter->elements, owned, first);
}

static pst_status compare_ranges(pst_partition *partition) {
    pst__carrier *carrier = &partition->carrier;
    size_t bytes = partition->parameter_count * sizeof(pst__partition_range);
    pst__partition_range *own = pst__heap_alloc(carrier->heap, (carrier->world + 1) * bytes);
    if (own == NULL) return PST_ENOMEM;
    for (size_t i = 0; i < partition->parameter_count; i++)
        own[i] = partition->parameters[i].own;
    pst__partition_range *all = own + partition->parameter_count;
    pst_status status = pst__gather_bytes(carrier, "partition owners", own, bytes, all);
    partition->owner_count = 0;
    for (size_t i = 0; status == PST_OK && i < partition->parameter_count; i++)
        status = enter_owners(partition, all, i);
    pst__heap_free(carrier->heap, own, (carrier->world + 1) * bytes);
    return status;
}

pst_status pst__partition_compare_owners(pst_partition *partition) {
    pst_status status = compare_sizes(partition);
    if (status == PST_OK) status = compare_ranges(partition);
    if (status == PST_ENOMEM)
        return pst__partition_fail(partition, status, "%s", "no memory to compare the ranks");
    partition->is_compared = status == PST_OK;
    return status;
}

/* ---- backwards ------------------------------------------------------------------------------- */

pst_status pst_partition_begin_backward(pst_partition *partition, int is_last) {
    if (partition == NULL) return PST_EINVAL;
    pst__partition_forget_pending(partition);
    const pst_status status =
        pst__operation_wait_reductions(&partition->carrier); /* of a backward that was broken off */
    if (status != PST_OK) return status;
    partition->hash = PST__HASH_SEED;
    partition->has_reduced = 0;
    for (size_t i = 0; partition->is_last && i < partition->parameter_count; i++)
        pst__target_begin(&partition->parameters[i].target);
    partition->is_last = is_last;
    return pst__operation_check_comms(&partition->carrier);
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
        partition->parameters[parameter].elements > 0)
        status = pst__partition_fail(partition, PST_EINVAL,
                                     "parameter '%s': its gradient has no memory, or no dtype",
                                     partition->parameters[parameter].name);
    if (status == PST_OK && partition->parameters[parameter].elements > 0) {
        note_report(partition, parameter, dtype);
        return pst__partition_report(partition, parameter, source, dtype, token);
    }
    if (partition != NULL) pst__sources_drop(&partition->held, token);
    return status;
}

/* Compute has waited for all that was begun. */
static void release_buckets(pst_partition *partition) {
    pst__carrier *carrier = &partition->carrier;
    int in_order = carrier->asynchronous && partition->options.frees_in_compute_order;
    pst__operation_reap_buckets(carrier);
    pst_buckets_trim(carrier->buckets);
    if (in_order) {
        pst__arena_trim_in_order(partition->memory);
        pst__arena_trim_in_order(carrier->staging);
    } else {
        pst_arena_trim(partition->memory);
        pst_arena_trim(carrier->staging);
    }
}

/* Behind the backward; a difference poisons the runtime. */
static pst_status compare_reports(pst_partition *partition) {
    const uint64_t hash = partition->hash;
    if (!partition->has_reduced) return PST_OK;
    partition->has_reduced = 0;
    partition->hash = PST__HASH_SEED;
    return pst__compare(&partition->comparisons, hash);
}

pst_status pst_partition_end_backward(pst_partition *partition, int release) {
    if (partition == NULL) return PST_EINVAL;
    pst_status status = pst_runtime_status(partition->carrier.runtime);
    if (status == PST_OK) status = pst__partition_flush_all(partition);
    if (status == PST_OK) status = pst__operation_wait_reductions(&partition->carrier);
    if (status == PST_OK) status = pst__sources_join(&partition->held);
    for (size_t i = 0; status == PST_OK && partition->is_last && i < partition->parameter_count;
         i++)
        status = pst__target_zero_old(&partition->carrier, &partition->parameters[i].target);
    if (status == PST_OK && release) release_buckets(partition);
    if (status != PST_OK) return status;
    return pst__carrier_give_up(&partition->carrier, compare_reports(partition));
}

void pst_partition_get_stats(const pst_partition *partition, pst_partition_stats *stats) {
    pst_arena_stats memory = {.size = sizeof memory};
    pst_arena_get_stats(partition->memory, &memory);
    pst_partition_stats now = partition->stats;
    now.exposed_ns = partition->carrier.waits.exposed_reduce_ns;
    now.bucket_bytes = memory.reserved;
    pst__write_sized(stats, &now, sizeof now);
}
