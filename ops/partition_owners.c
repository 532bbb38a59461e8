/* What the ranks tell each other of a partition: who owns which elements, and what was reported. */
#include "ops/partition.h"
#include "sched/runtime.h"

#include <stdio.h>
#include <string.h>

/* ---- who owns what --------------------------------------------------------------------------- */

static pst_status compare_sizes(pst_partition *partition) {
    pst_zero *engine = partition->engine;
    uint64_t own[2] = {partition->split_count, PST__HASH_SEED};
    for (size_t i = 0; i < partition->split_count; i++)
        own[1] = pst__hash(own[1], &partition->splits[i].elements, sizeof(size_t));
    own[1] = pst__hash(own[1], &partition->options.bucket_bytes, sizeof(size_t));
    own[1] = pst__hash(own[1], &partition->options.reduce_in_fp32, sizeof(int));
    own[1] = pst__hash(own[1], &partition->options.route, sizeof partition->options.route);
    uint64_t *all = pst__heap_alloc(engine->heap, engine->world * sizeof own);
    if (all == NULL) return PST_ENOMEM;
    pst_status status = pst__agree_gather(engine, "partition sizes", own, sizeof own, all);
    for (size_t rank = 0; status == PST_OK && rank < engine->world; rank++)
        if (memcmp(&all[2 * rank], own, sizeof own) != 0)
            status = pst__partition_fail(
                partition, PST_EMISMATCH,
                "%zu parameters here, %llu on rank %zu, or of other sizes, or other options",
                partition->split_count, (unsigned long long)all[2 * rank], rank);
    pst__heap_free(engine->heap, all, engine->world * sizeof own);
    return status;
}

static pst_status add_owner(pst_partition *partition, size_t rank, pst__range range) {
    pst_status status = pst__heap_grow(partition->engine->heap, (void **)&partition->owners,
                                       &partition->owner_capacity, partition->owner_count + 1,
                                       sizeof *partition->owners);
    if (status == PST_OK) partition->owners[partition->owner_count++] = (pst__owner){rank, range};
    return status;
}

/* The rank whose elements begin at `first`, or `world`. */
static size_t rank_at(const pst_partition *partition, const pst__range *all, size_t split,
                      size_t first) {
    size_t rank = 0;
    for (; rank < partition->engine->world; rank++) {
        const pst__range *range = &all[rank * partition->split_count + split];
        if (range->count > 0 && range->first == first) break;
    }
    return rank;
}

/* The owners of a parameter follow one another; a parameter that nobody owns has none. */
static pst_status enter(pst_partition *partition, const pst__range *all, size_t index) {
    const size_t world = partition->engine->world;
    pst__split *split = &partition->splits[index];
    size_t first = 0, owned = 0;
    split->first_owner = partition->owner_count;
    for (size_t rank = 0; rank < world; rank++)
        owned += all[rank * partition->split_count + index].count;
    while (owned > 0 && first < split->elements) {
        size_t rank = rank_at(partition, all, index, first);
        if (rank == world) break;
        pst__range range = all[rank * partition->split_count + index];
        pst_status status = add_owner(partition, rank, range);
        if (status != PST_OK) return status;
        first += range.count;
    }
    split->owner_count = partition->owner_count - split->first_owner;
    if (owned == 0 || (owned == split->elements && first == owned)) return PST_OK;
    return pst__partition_fail(partition, PST_EMISMATCH,
                               "parameter '%s' of %zu elements: the ranks have bound %zu of them, "
                               "those from %zu on to none or to several ranks",
                               split->name, split->elements, owned, first);
}

static pst_status compare_ranges(pst_partition *partition) {
    pst_zero *engine = partition->engine;
    size_t bytes = partition->split_count * sizeof(pst__range);
    pst__range *own = pst__heap_alloc(engine->heap, (engine->world + 1) * bytes);
    if (own == NULL) return PST_ENOMEM;
    for (size_t i = 0; i < partition->split_count; i++)
        own[i] = partition->splits[i].own;
    pst__range *all = own + partition->split_count;
    pst_status status = pst__agree_gather(engine, "partition owners", own, bytes, all);
    partition->owner_count = 0;
    for (size_t i = 0; status == PST_OK && i < partition->split_count; i++)
        status = enter(partition, all, i);
    pst__heap_free(engine->heap, own, (engine->world + 1) * bytes);
    return status;
}

pst_status pst__owners_compare(pst_partition *partition) {
    pst_status status = compare_sizes(partition);
    if (status == PST_OK) status = compare_ranges(partition);
    if (status == PST_ENOMEM)
        return pst__partition_fail(partition, status, "%s", "no memory to compare the ranks");
    partition->is_compared = status == PST_OK;
    return status;
}

/* ---- what was reported ----------------------------------------------------------------------- */

static size_t words_bytes(const pst_partition *partition) {
    return PST__COMPARISONS * (partition->engine->world + 1) * sizeof(uint64_t);
}

pst_status pst__comparisons_alloc(pst_partition *partition) {
    pst_zero *engine = partition->engine;
    pst_device *device = engine->device;
    void *memory = NULL;
    partition->segments =
        pst__heap_alloc(engine->heap, engine->world * sizeof *partition->segments);
    if (partition->segments == NULL) return PST_ENOMEM;
    for (size_t rank = 0; rank < engine->world; rank++)
        partition->segments[rank] =
            (pst_segment){(uint32_t)rank, 0, rank * sizeof(uint64_t), sizeof(uint64_t)};
    pst_status status =
        device->ops->alloc(device, PST_MEMORY_PINNED, words_bytes(partition), &memory);
    for (size_t i = 0; status == PST_OK && i < PST__COMPARISONS; i++)
        partition->comparisons[i] = (pst__comparison){
            .partition = partition, .words = (uint64_t *)memory + i * (engine->world + 1)};
    return status;
}

void pst__comparisons_free(pst_partition *partition) {
    pst_zero *engine = partition->engine;
    if (partition->comparisons[0].words != NULL)
        engine->device->ops->free(engine->device, PST_MEMORY_PINNED,
                                  partition->comparisons[0].words, words_bytes(partition));
    pst__heap_free(engine->heap, partition->segments, engine->world * sizeof *partition->segments);
}

static void poison_if_different(pst__operation *operation) {
    const pst__comparison *comparison = (const pst__comparison *)(uintptr_t)operation->argument;
    const pst_zero *engine = operation->engine;
    const uint64_t *words = comparison->words;
    for (size_t rank = 0; rank < engine->world; rank++) {
        if (words[1 + rank] == words[0]) continue;
        char text[PST__ERROR_BYTES];
        (void)snprintf(text, sizeof text,
                       "rank %zu, engine '%s': rank %zu reported other gradients in a backward, or "
                       "in another order; the reduced gradients are wrong",
                       engine->rank, engine->name, rank);
        pst_runtime_poison(engine->runtime, PST_EMISMATCH, text);
        return;
    }
}

/* The slot's last use is several backwards ago; in all but odd cases it has ended. */
static pst_status free_slot(pst_partition *partition, pst__comparison *comparison) {
    const pst__queue *queue = &partition->engine->queues[PST__GATHER_LANE];
    for (pst__operation *found = queue->oldest; found != NULL; found = found->next)
        if (found == comparison->exchange && found->argument == (uint64_t)(uintptr_t)comparison)
            return pst__operation_wait_end(found);
    return PST_OK;
}

pst_status pst__comparison_begin(pst_partition *partition) {
    pst__comparison *comparison = &partition->comparisons[partition->compared % PST__COMPARISONS];
    pst__operation *operation;
    if (!partition->has_reduced) return PST_OK;
    pst_status status = free_slot(partition, comparison);
    if (status == PST_OK)
        status = pst__operation_take(partition->engine, PST__REDUCE_LANE, &operation);
    if (status != PST_OK) return status;
    comparison->words[0] = partition->hash;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_GATHER;
    collective->name = "order of gradients";
    collective->dtype = PST_UINT8;
    collective->source = comparison->words;
    collective->source_bytes = sizeof(uint64_t);
    collective->destination = comparison->words + 1;
    collective->segments = partition->segments;
    collective->segment_count = partition->engine->world;
    operation->argument = (uint64_t)(uintptr_t)comparison;
    operation->done = poison_if_different;
    comparison->exchange = operation;
    partition->compared++;
    partition->has_reduced = 0;
    partition->hash = PST__HASH_SEED;
    return pst__operation_submit(operation, sizeof(uint64_t), NULL, 0);
}
