#include "world.h"

#include <string.h>

/* ---- arenas ----------------------------------------------------------------------------- */

static void create_arena(fuzz_world *world) {
    if (world->arena != NULL) return;
    world->arena_on_device = fuzz_below(world, 2) != 0;
    const pst_arena_options options = {.size = sizeof options,
                                       .name = "fuzzed",
                                       .device =
                                           world->arena_on_device ? &world->device.device : NULL,
                                       .segment_bytes = 4096u << fuzz_below(world, 3),
                                       .limit_bytes = 65536};
    (void)pst_arena_create(world->runtime, &options, &world->arena);
}

static fuzz_lease *lease_of(fuzz_world *world) {
    return &world->leases[fuzz_below(world, LEASES)];
}

static void check_apart(const fuzz_world *world, const fuzz_lease *got) {
    const char *begin = got->lease.memory;
    for (int i = 0; i < LEASES; i++) {
        const fuzz_lease *other = &world->leases[i];
        const char *from = other->lease.memory;
        if (other == got || from == NULL) continue;
        fuzz_check(from + other->lease.bytes <= begin || begin + got->lease.bytes <= from,
                   "two leases overlap");
    }
}

static void use(fuzz_world *world, fuzz_lease *lease, pst_status status) {
    if (status != PST_OK) {
        lease->lease = (pst_lease){0};
        return;
    }
    if (lease->lease.memory == NULL) return;
    fuzz_check(lease->lease.offset % PST_ARENA_ALIGNMENT == 0, "a lease is not aligned");
    check_apart(world, lease);
    lease->mark = (unsigned char)fuzz_below(world, 256);
    memset(lease->lease.memory, lease->mark, lease->lease.bytes);
}

static void acquire(fuzz_world *world) {
    fuzz_lease *lease = lease_of(world);
    if (world->arena == NULL || lease->lease.memory != NULL) return;
    const size_t bytes = (size_t)fuzz_below(world, 256) << fuzz_below(world, 8);
    use(world, lease, pst_arena_acquire(world->arena, bytes, &lease->lease));
}

static void acquire_at(fuzz_world *world) {
    fuzz_lease *lease = lease_of(world);
    if (world->arena == NULL || lease->lease.memory != NULL) return;
    const size_t offset = (size_t)fuzz_below(world, 256) * 256;
    const size_t bytes = (size_t)fuzz_below(world, 256) * 32;
    use(world, lease, pst_arena_acquire_at(world->arena, offset, bytes, &lease->lease));
}

static void check_mark(const fuzz_lease *lease) {
    const unsigned char *bytes = lease->lease.memory;
    for (size_t i = 0; i < lease->lease.bytes; i++)
        fuzz_check(bytes[i] == lease->mark, "somebody wrote into a lease");
}

static void give_back(fuzz_world *world) {
    fuzz_lease *lease = lease_of(world);
    if (world->arena == NULL || lease->lease.memory == NULL) return;
    check_mark(lease);
    if (fuzz_below(world, 8) == 7)
        pst_arena_quarantine(world->arena, &lease->lease);
    else
        pst_arena_release(world->arena, &lease->lease,
                          world->arena_on_device ? world->events[fuzz_below(world, EVENTS)] : NULL);
    if (fuzz_below(world, 8) == 7) pst_arena_release(world->arena, &lease->lease, NULL); /* twice */
    lease->lease = (pst_lease){0};
}

static void tend_arena(fuzz_world *world) {
    pst_arena_stats stats = {.size = sizeof stats};
    if (world->arena == NULL) return;
    if (fuzz_below(world, 2))
        pst_arena_trim(world->arena);
    else
        (void)pst_arena_add_segment(world->arena, (size_t)fuzz_below(world, 64) * 100);
    pst_arena_get_stats(world->arena, &stats);
    fuzz_check(stats.leased <= stats.reserved && stats.leased <= stats.peak, "wrong statistics");
}

/* ---- buckets ---------------------------------------------------------------------------- */

static void create_buckets(fuzz_world *world) {
    if (world->arena == NULL || world->buckets != NULL || world->arena_on_device) return;
    const pst_buckets_options options = {.size = sizeof options,
                                         .arena = world->arena,
                                         .ranks = 1 + fuzz_below(world, 3),
                                         .chunk_bytes = 1 + (size_t)fuzz_below(world, 64) * 32,
                                         .alignment = (size_t)1 << fuzz_below(world, 10)};
    (void)pst_buckets_create(world->runtime, &options, &world->buckets);
}

static pst_dtype dtype_of(fuzz_world *world) {
    return fuzz_below(world, 2) ? PST_FLOAT32 : PST_BFLOAT16;
}

static void fill_slot(fuzz_world *world) {
    pst_slot slot;
    if (world->buckets == NULL || world->host_lanes == 0) return;
    const pst_dtype dtype = dtype_of(world);
    const size_t bytes = (size_t)fuzz_below(world, 256) * 4;
    const pst_status status =
        pst_buckets_slot(world->buckets, dtype, bytes, pst_lane_stream(world->lanes[0]), &slot);
    if (status != PST_OK) return;
    const unsigned char *padding = (const unsigned char *)slot.memory + bytes;
    for (size_t i = bytes; i < slot.padded_bytes; i++)
        fuzz_check(*padding++ == 0, "a slot's padding is not zero");
    memset(slot.memory, 0xa5, bytes);
}

static void flush(fuzz_world *world) {
    pst_bucket *bucket = &world->flushed[fuzz_below(world, BUCKETS)];
    if (world->buckets == NULL || bucket->id != 0) return;
    if (pst_buckets_flush(world->buckets, dtype_of(world), bucket) != PST_OK) bucket->id = 0;
}

static void retire(fuzz_world *world) {
    pst_bucket *bucket = &world->flushed[fuzz_below(world, BUCKETS)];
    if (world->buckets == NULL) return;
    pst_buckets_retire(world->buckets, bucket->id, NULL);
    bucket->id = 0;
    if (fuzz_below(world, 4) == 3) pst_buckets_trim(world->buckets);
}

static void destroy_buckets(fuzz_world *world) {
    pst_buckets_destroy(world->buckets);
    world->buckets = NULL;
    memset(world->flushed, 0, sizeof world->flushed);
}

/* ---- plans and pinned memory ------------------------------------------------------------ */

static int overlap(const pst_interval *a, const pst_interval *b) {
    if (a->bytes == 0 || b->bytes == 0 || a->last < b->first || b->last < a->first) return 0;
    return a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
}

static void plan(fuzz_world *world) {
    pst_interval intervals[8];
    pst_plan_result result;
    const size_t count = fuzz_below(world, 9);
    for (size_t i = 0; i < count; i++) {
        const uint64_t first = fuzz_below(world, 16);
        intervals[i] = (pst_interval){first, first + fuzz_below(world, 8),
                                      (size_t)fuzz_below(world, 256) * 16, 0};
    }
    if (pst_plan_offsets(world->runtime, intervals, count, &result) != PST_OK) return;
    fuzz_check(result.peak >= result.lower_bound, "a plan below its lower bound");
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < i; k++)
            fuzz_check(!overlap(&intervals[i], &intervals[k]), "a plan's intervals overlap");
}

static pst_status create_pinned(fuzz_world *world) {
    const pst_arena_options options = {
        .size = sizeof options, .name = "pinned", .kind = PST_MEMORY_PINNED, .segment_bytes = 8192};
    return pst_arena_create(world->runtime, &options, &world->pinned);
}

static void pin(fuzz_world *world) {
    pst_lease *lease = &world->pins[fuzz_below(world, LEASES)];
    if (world->pinned == NULL && create_pinned(world) != PST_OK) return;
    if (lease->memory == NULL) {
        const size_t bytes = (size_t)fuzz_below(world, 256) * 16;
        if (pst_arena_acquire(world->pinned, bytes, lease) == PST_OK && lease->memory != NULL)
            memset(lease->memory, 1, bytes);
    } else {
        pst_arena_release(world->pinned, lease, NULL);
        lease->memory = NULL;
    }
}

fuzz_call *const fuzz_memory_calls[] = {
    create_arena, acquire, acquire_at, give_back, give_back,       tend_arena, create_buckets,
    fill_slot,    flush,   retire,     retire,    destroy_buckets, plan,       pin,
};
const unsigned fuzz_memory_call_count = sizeof fuzz_memory_calls / sizeof *fuzz_memory_calls;

void fuzz_end_memory(fuzz_world *world) {
    pst_buckets_destroy(world->buckets);
    pst_arena_destroy(world->arena);
    pst_arena_destroy(world->pinned);
}
