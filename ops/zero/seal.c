/* Sealing: what a step needs is allocated, and the ranks compare what they have. */
#include "ops/zero/engine.h"

#include "mem/arena.h"

#include <stdio.h>

/* ---- sealing --------------------------------------------------------------------------------- */

/* ---- how large parts are --------------------------------------------------------------------- */

/* A step of the 8B shape holds less than FSDP2's with it. It holds more with whole layers (92 MiB),
 * which are 1.6 % faster (bench/results/train-2026-11-22-1114.txt). */
#define MOST_PART_BYTES ((size_t)32 << 20)

static size_t gradient_chunk(const pst__group *group) {
    return group->layout.gradient_elements * group->layout.reduce_element_bytes;
}

/* The gradient bytes of all groups whose chunks have at most `most` bytes. */
static size_t gradients_within(const pst_zero *engine, size_t most) {
    size_t bytes = 0;
    for (size_t i = 0; i < engine->group_count; i++)
        if (gradient_chunk(&engine->groups[i]) <= most) bytes += gradient_chunk(&engine->groups[i]);
    return bytes;
}

/* The chunk that half of all gradients fit into: layers travel whole, and an embedding that is
 * larger than these does not make all buckets so. */
static size_t usual_chunk(const pst_zero *engine) {
    size_t usual = SIZE_MAX;
    const size_t all = gradients_within(engine, SIZE_MAX);
    for (size_t i = 0; i < engine->group_count; i++) {
        const size_t chunk = gradient_chunk(&engine->groups[i]);
        if (chunk < usual && gradients_within(engine, chunk) >= all / 2) usual = chunk;
    }
    return usual;
}

static void choose_part(pst_zero *engine) {
    pst_zero_options *options = &engine->options;
    if (options->part_bytes != 0) return;
    const size_t usual = pst__round_up(usual_chunk(engine), PST_ZERO_ALIGNMENT);
    options->part_bytes = usual < MOST_PART_BYTES ? usual : MOST_PART_BYTES;
    if (options->part_bytes < options->bucket_bytes) options->part_bytes = options->bucket_bytes;
    if (options->part_bytes < PST_ZERO_ALIGNMENT) options->part_bytes = PST_ZERO_ALIGNMENT;
}

/* More where blocks go in parts: the host waits where the reduction of the bucket that comes next
 * is not launched yet. */
static void choose_buckets(pst_zero *engine) {
    const size_t usual = pst__round_up(usual_chunk(engine), PST_ZERO_ALIGNMENT);
    engine->bucket_count = usual > engine->options.part_bytes ? PST__MOST_BUCKETS : 2;
}

static pst_status alloc_tables(pst_zero *engine) {
    size_t count = engine->group_count;
    engine->cast_capacity = count; /* the communication copies of all groups at once */
    for (size_t i = 0; i < count; i++) {
        size_t casts = pst__layout_cast_limit(&engine->groups[i].layout, engine->carrier.world);
        if (casts > engine->cast_capacity) engine->cast_capacity = casts;
        if (engine->groups[i].layout.element_bytes > engine->widest_bytes)
            engine->widest_bytes = engine->groups[i].layout.element_bytes;
    }
    engine->casts =
        pst__heap_alloc(engine->carrier.heap, engine->cast_capacity * sizeof *engine->casts);
    engine->need = pst__heap_alloc(engine->carrier.heap, count * sizeof *engine->need);
    engine->needed_here = pst__heap_alloc(engine->carrier.heap, count);
    engine->is_looked_up = pst__heap_alloc(engine->carrier.heap, count);
    engine->reduce_bytes = pst__heap_alloc(engine->carrier.heap, count * sizeof(size_t));
    engine->held = pst__heap_alloc(engine->carrier.heap, count);
    engine->updates =
        pst__heap_alloc(engine->carrier.heap, engine->parameter_count * sizeof *engine->updates);
    if (engine->casts == NULL || engine->need == NULL || engine->needed_here == NULL ||
        engine->is_looked_up == NULL || engine->reduce_bytes == NULL || engine->held == NULL ||
        engine->updates == NULL)
        return PST_ENOMEM;
    pst_status status = pst__order_alloc(engine->carrier.heap, &engine->order, count);
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        const pst__layout *layout = &engine->groups[i].layout;
        engine->order.bytes[i] = layout->moves ? layout->gathered_bytes : 0; /* of a copy */
        engine->reduce_bytes[i] = engine->carrier.world > 1 ? layout->gradient_bytes_whole : 0;
        engine->is_looked_up[i] = engine->groups[i].is_looked_up != 0;
        engine->need[i] = engine->groups[i].forward_only ? PST__NEED_NONE : PST__NEED_UNKNOWN;
    }
    return status;
}

/* ---- what peers read ------------------------------------------------------------------------- */

/* A group has a communication copy where it is gathered in another dtype than its shard has, or the
 * caller fills that. Where peers read from memory that was opened to them, a group without one has
 * a place for its shard; a shard that lies elsewhere is copied to it. */
static int has_own_dtype(const pst__group *group) {
    return group->gather_dtype == group->dtype && !group->is_filled_outside;
}

int pst__has_place(const pst__group *group) {
    return group->copy.memory != NULL && has_own_dtype(group);
}

static pst_arena *arena_of(const pst_zero *engine, const pst__group *group) {
    return has_own_dtype(group) ? engine->places : engine->carrier.sources;
}

static size_t copy_bytes(const pst_zero *engine, const pst__group *group) {
    const pst_comm_ops *ops = engine->options.gather_comm->ops;
    const int is_read_there = ops->open_memory == NULL && !engine->options.shards_on_host;
    if (pst__is_transient(engine, group) || (has_own_dtype(group) && is_read_there)) return 0;
    return group->layout.shard_elements * group->layout.gather_element_bytes;
}

/* The bytes of all copies that lie in this arena. */
static size_t arena_bytes(const pst_zero *engine, const pst_arena *arena) {
    size_t bytes = 0;
    for (size_t i = 0; i < engine->group_count; i++)
        if (arena_of(engine, &engine->groups[i]) == arena)
            bytes += pst__round_up(copy_bytes(engine, &engine->groups[i]), PST_ARENA_ALIGNMENT);
    return bytes;
}

static pst_status alloc_copies(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        pst_status status =
            pst_arena_acquire(arena_of(engine, group), copy_bytes(engine, group), &group->copy);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

/* On an asynchronous device the buckets of a dtype are all there is: each holds a part of any
 * group; so does what sums are brought together in. */
static size_t chunk_bytes(const pst_zero *engine) {
    const int holds_any = engine->carrier.asynchronous || engine->options.shards_on_host;
    size_t chunk = engine->options.bucket_bytes;
    for (size_t i = 0; holds_any && i < engine->group_count; i++) {
        const pst__group *group = &engine->groups[i];
        size_t slot = pst__part_elements(engine, group) * group->layout.reduce_element_bytes;
        if (slot > chunk) chunk = slot;
    }
    return pst__round_up(chunk, PST_ZERO_ALIGNMENT);
}

static size_t bucket_bytes(const pst_zero *engine) {
    int is_used[PST_DTYPE_COUNT] = {0};
    size_t bytes = 0;
    for (size_t i = 0; i < engine->group_count; i++)
        is_used[engine->groups[i].reduce_dtype] |= engine->groups[i].layout.gradient_elements > 0;
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        if (is_used[dtype])
            bytes +=
                engine->bucket_count *
                pst__round_up(chunk_bytes(engine) * engine->carrier.world, PST_ARENA_ALIGNMENT);
    return bytes;
}

/* An arena's only segment, which peers read. */
static pst_status add_opened(pst_zero *engine, pst_arena *arena, size_t bytes) {
    pst_lease whole;
    if (bytes == 0) return PST_OK;
    const pst_status status = pst__open_segment(&engine->carrier, arena, bytes, &whole);
    if (status == PST_OK) pst_arena_release(arena, &whole, NULL);
    return status;
}

/* Shards may outlive the engine where the caller keeps their segment: so it is theirs alone. */
static pst_status alloc_sources(pst_zero *engine) {
    if (!engine->carrier.asynchronous) return PST_OK;
    pst_status status = add_opened(engine, engine->places, arena_bytes(engine, engine->places));
    if (status != PST_OK) return status;
    return add_opened(engine, engine->carrier.sources,
                      bucket_bytes(engine) + pst__transient_bytes(engine) +
                          arena_bytes(engine, engine->carrier.sources));
}

static pst_status alloc_buckets(pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    engine->chunk_bytes = chunk_bytes(engine);
    return pst__buckets_create(carrier, carrier->sources, engine->chunk_bytes,
                               carrier->asynchronous ? engine->bucket_count : 2,
                               carrier->asynchronous);
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Stages 1 and 2 hold all groups for ever: one segment for those that are no shards' places. */
static pst_status alloc_resident(pst_zero *engine) {
    size_t bytes = 0;
    if (engine->options.stage == 3) return PST_OK;
    for (size_t i = 0; i < engine->group_count; i++) {
        if (engine->groups[i].layout.is_within) continue;
        size_t more = pst__round_up(engine->order.bytes[i], PST_ARENA_ALIGNMENT);
        bytes = more > SIZE_MAX - bytes ? SIZE_MAX : bytes + more;
    }
    return bytes == 0 ? PST_OK : pst_arena_add_segment(engine->carrier.gathered, bytes);
}

static pst_status create_comparisons(pst_zero *engine, pst__lane_index lane,
                                     pst__comparisons plans[2]) {
    pst_status status = PST_OK;
    for (int grad = 0; status == PST_OK && grad < 2; grad++)
        status = pst__comparisons_create(
            &engine->carrier, lane, grad ? "plan of training" : "plan of evaluation",
            grad ? "has another plan of training: the ranks ran different passes"
                 : "has another plan of evaluation: the ranks ran different passes",
            &plans[grad]);
    return status;
}

static pst_status alloc_all(pst_zero *engine) {
    pst_status status = alloc_tables(engine);
    if (status == PST_OK) status = pst__presence_alloc(engine);
    if (status == PST_OK) status = create_comparisons(engine, PST__GATHER_LANE, engine->plans);
    if (status != PST_OK || engine->carrier.replicas == 1) return status;
    return create_comparisons(engine, PST__REPLICA_LANE, engine->replicas_plans);
}

/* What is as large as the parameters: only once the ranks agree on these. */
static pst_status alloc_large(pst_zero *engine) {
    choose_part(engine);
    choose_buckets(engine);
    pst_status status = alloc_sources(engine);
    if (status == PST_OK) status = alloc_copies(engine);
    if (status == PST_OK) status = pst__transient_create(engine);
    if (status == PST_OK) status = alloc_resident(engine);
    return status == PST_OK ? alloc_buckets(engine) : status;
}

static void free_copies(pst_zero *engine) {
    for (size_t i = 0; i < engine->group_count; i++) {
        pst__group *group = &engine->groups[i];
        if (group->copy.memory != NULL)
            pst_arena_release(arena_of(engine, group), &group->copy, NULL);
        group->copy = (pst_lease){0};
    }
}

void pst__seal_free(pst_zero *engine) {
    size_t count = engine->group_count;
    pst_buckets_destroy(engine->carrier.buckets);
    free_copies(engine);
    pst__transient_free(engine);
    for (int grad = 0; grad < 2; grad++) {
        pst__comparisons_free(&engine->plans[grad]);
        pst__comparisons_free(&engine->replicas_plans[grad]);
    }
    pst__presence_free(engine);
    pst__order_free(engine->carrier.heap, &engine->order);
    pst__heap_free(engine->carrier.heap, engine->casts,
                   engine->cast_capacity * sizeof *engine->casts);
    pst__heap_free(engine->carrier.heap, engine->need, count * sizeof *engine->need);
    pst__heap_free(engine->carrier.heap, engine->needed_here, count);
    pst__heap_free(engine->carrier.heap, engine->is_looked_up, count);
    pst__heap_free(engine->carrier.heap, engine->reduce_bytes, count * sizeof(size_t));
    pst__heap_free(engine->carrier.heap, engine->held, count);
    pst__heap_free(engine->carrier.heap, engine->updates,
                   engine->parameter_count * sizeof *engine->updates);
    pst__updates_free(engine->carrier.heap, &engine->own_updates);
    engine->carrier.buckets = NULL;
    engine->casts = NULL;
    engine->cast_capacity = 0;
    engine->need = NULL;
    engine->reduce_bytes = NULL;
    engine->needed_here = engine->held = engine->is_looked_up = NULL;
    engine->updates = NULL;
    engine->own_updates = (pst__updates){0};
}

pst_status pst_zero_seal(pst_zero *engine) {
    if (engine == NULL) return PST_EINVAL;
    if (engine->sealed)
        return pst__zero_fail(engine, PST_ESTATE, "%s", "the engine is sealed already");
    pst_status status = alloc_all(engine);
    if (status == PST_OK) status = pst__agree_registry(engine);
    if (status == PST_OK) status = alloc_large(engine);
    if (status == PST_ENOMEM) status = pst__zero_fail(engine, status, "%s", "no memory to seal");
    if (status != PST_OK) {
        pst__seal_free(engine);
        return status;
    }
    engine->sealed = 1;
    return PST_OK;
}
