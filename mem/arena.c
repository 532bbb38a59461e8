#include "mem/arena.h"

#include "base/clock.h"
#include "base/options.h"
#include "mem/pool.h"
#include "sched/device/device.h"
#include "sched/runtime.h"
#include "tracing/trace.h"

#include <stdint.h>
#include <stdio.h>

#define SEGMENT_BYTES (64u << 20)

typedef struct segment {
    char *memory;
    size_t offset, bytes;
} segment;

struct pst_arena {
    const pst__heap *heap;
    pst__error *error;
    pst__trace *trace;
    pst_page *page; /* counts pinned memory; NULL: there is none */
    char *name;
    const char *counter; /* of the leased bytes; interned, for a trace may be written later */
    pst_arena_options options;
    segment *segments;
    size_t segment_count, segment_capacity;
    pst__pool pool;
    pst_arena_stats stats;
};

/* ---- creating ------------------------------------------------------------------------------- */

static const char *intern_counter(pst__trace *trace, const char *name) {
    char text[128];
    (void)snprintf(text, sizeof text, "%s bytes", name);
    return pst__trace_intern(trace, text);
}

static pst_status check_options(pst_runtime *runtime, const pst_arena_options *given,
                                pst_arena_options *options) {
    pst__error *error = pst__runtime_error(runtime);
    if (!pst__read_options(options, sizeof *options, given))
        return pst__fail(error, PST_EINVAL, "arena: set options.size to sizeof(pst_arena_options)");
    if (options->name == NULL) options->name = "arena";
    if (options->device == NULL) options->device = pst_runtime_host(runtime);
    if (options->segment_bytes == 0) options->segment_bytes = SEGMENT_BYTES;
    if ((options->segment_alloc == NULL) != (options->segment_free == NULL))
        return pst__fail(error, PST_EINVAL,
                         "arena %s: set both of segment_alloc and segment_free, or none",
                         options->name);
    const char *slot = options->segment_alloc != NULL
                           ? NULL
                           : pst__device_lacks(options->device, PST__NEEDS_MEMORY);
    if (slot != NULL)
        return pst__fail(error, PST_EINVAL, "arena %s: device %s has no '%s', which it needs",
                         options->name, options->device->ops->name, slot);
    return PST_OK;
}

pst_status pst_arena_create(pst_runtime *runtime, const pst_arena_options *given,
                            pst_arena **created) {
    if (created == NULL) return PST_EINVAL;
    *created = NULL;
    if (runtime == NULL) return PST_EINVAL;
    pst_arena_options options;
    pst_status status = check_options(runtime, given, &options);
    if (status != PST_OK) return status;
    pst__error *error = pst__runtime_error(runtime);
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst_arena *arena = pst__heap_alloc(heap, sizeof *arena);
    if (arena == NULL) goto fail;
    arena->heap = heap;
    arena->error = error;
    arena->trace = pst__runtime_trace(runtime);
    arena->page = pst__runtime_page(runtime);
    arena->options = options;
    pst__pool_init(&arena->pool, heap, options.device);
    arena->name = pst__heap_text(heap, options.name);
    arena->counter = intern_counter(arena->trace, options.name);
    if (arena->name == NULL || arena->counter == NULL) goto fail;
    arena->options.name = arena->name;
    *created = arena;
    return PST_OK;
fail:
    pst_arena_destroy(arena);
    return pst__fail(error, PST_ENOMEM, "arena %s: no memory for its metadata", options.name);
}

/* Arenas of several threads may count at once. Relaxed: a figure. Bytes that go wrap around. */
static void count_pinned(const pst_arena *arena, uint64_t bytes) {
    if (arena->page != NULL && arena->options.kind == PST_MEMORY_PINNED)
        (void)pst__add_relaxed(&arena->page->pinned_bytes, bytes);
}

static void free_segment(pst_arena *arena, const segment *part) {
    const pst_arena_options *options = &arena->options;
    if (options->segment_free != NULL)
        options->segment_free(options->segment_context, part->memory, part->bytes);
    else
        options->device->ops->free(options->device, options->kind, part->memory, part->bytes);
}

void pst_arena_destroy(pst_arena *arena) {
    if (arena == NULL) return;
    for (size_t i = 0; i < arena->segment_count; i++)
        free_segment(arena, &arena->segments[i]);
    count_pinned(arena, -(uint64_t)arena->stats.reserved);
    pst__arena_leave(arena);
}

void pst__arena_leave(pst_arena *arena) {
    if (arena == NULL) return;
    pst__pool_free(&arena->pool);
    pst__heap_free(arena->heap, arena->segments, arena->segment_capacity * sizeof(segment));
    pst__heap_free_text(arena->heap, arena->name);
    pst__heap_free(arena->heap, arena, sizeof *arena);
}

pst_device *pst__arena_device(const pst_arena *arena) {
    return arena->options.device;
}

/* ---- growing -------------------------------------------------------------------------------- */

static pst_status fail_no_metadata(const pst_arena *arena) {
    return pst__fail(arena->error, PST_ENOMEM, "arena %s: no memory for its metadata", arena->name);
}

static pst_status fail_limit(const pst_arena *arena, size_t needed) {
    return pst__fail(
        arena->error, PST_ENOMEM,
        "arena %s: no room for %zu bytes: %zu of %zu reserved bytes are leased, %zu in "
        "quarantine, the largest free piece has %zu, and the limit is %zu; release "
        "leases or raise limit_bytes",
        arena->name, needed, arena->stats.leased, arena->stats.reserved, arena->pool.quarantined,
        pst__pool_largest(&arena->pool), arena->options.limit_bytes);
}

static pst_status fail_device(const pst_arena *arena, pst_status status, size_t bytes) {
    pst_device *device = arena->options.device;
    const char *text = NULL;
    if (arena->options.segment_alloc == NULL && device->ops->error_text != NULL)
        text = device->ops->error_text(device);
    return pst__fail(arena->error, status,
                     "arena %s: device %s gave no segment of %zu bytes beside the %zu reserved: %s",
                     arena->name, device->ops->name, bytes, arena->stats.reserved,
                     text != NULL ? text : pst_status_text(status));
}

static pst_status alloc_memory(pst_arena *arena, size_t bytes, void **memory) {
    const pst_arena_options *options = &arena->options;
    *memory = NULL;
    if (options->segment_alloc != NULL)
        return options->segment_alloc(options->segment_context, bytes, memory);
    return options->device->ops->alloc(options->device, options->kind, bytes, memory);
}

static pst_status add_segment(pst_arena *arena, size_t bytes) {
    segment part = {.offset = arena->stats.reserved, .bytes = bytes};
    if (pst__heap_grow(arena->heap, (void **)&arena->segments, &arena->segment_capacity,
                       arena->segment_count + 1, sizeof(segment)) != PST_OK)
        return fail_no_metadata(arena);
    void *memory;
    pst_status status = alloc_memory(arena, bytes, &memory);
    if (status != PST_OK) return fail_device(arena, status, bytes);
    part.memory = memory;
    if (((uintptr_t)memory & (PST_ARENA_ALIGNMENT - 1)) != 0) {
        free_segment(arena, &part);
        return pst__fail(arena->error, PST_EDEVICE,
                         "arena %s: segment %p is not aligned to %u bytes", arena->name, memory,
                         PST_ARENA_ALIGNMENT);
    }
    if (pst__pool_add(&arena->pool, part.offset, bytes) != PST_OK) {
        free_segment(arena, &part);
        return fail_no_metadata(arena);
    }
    arena->segments[arena->segment_count++] = part;
    arena->stats.reserved += bytes;
    arena->stats.grows++;
    count_pinned(arena, bytes);
    return PST_OK;
}

/* Bytes that the limit still allows, a multiple of the alignment. */
static size_t room(const pst_arena *arena) {
    size_t limit = arena->options.limit_bytes;
    if (limit == 0) limit = SIZE_MAX;
    size_t left = limit > arena->stats.reserved ? limit - arena->stats.reserved : 0;
    return left & ~(size_t)(PST_ARENA_ALIGNMENT - 1);
}

/* A segment for `needed` bytes: of the usual size if the limit and the device allow that. */
static pst_status grow(pst_arena *arena, size_t needed) {
    size_t allowed = room(arena);
    if (needed > allowed) return fail_limit(arena, needed);
    size_t bytes = pst__round_up(arena->options.segment_bytes, PST_ARENA_ALIGNMENT);
    if (bytes > allowed) bytes = allowed;
    if (bytes <= needed) return add_segment(arena, needed);
    pst_status status = add_segment(arena, bytes);
    return status == PST_ENOMEM ? add_segment(arena, needed) : status;
}

pst_status pst_arena_add_segment(pst_arena *arena, size_t bytes) {
    if (bytes == 0)
        return pst__fail(arena->error, PST_EINVAL, "arena %s: a segment of 0 bytes", arena->name);
    size_t rounded = pst__round_up(bytes, PST_ARENA_ALIGNMENT);
    if (rounded > room(arena)) return fail_limit(arena, bytes);
    return add_segment(arena, rounded);
}

void pst_arena_trim(pst_arena *arena) {
    pst__pool_settle(&arena->pool);
    while (arena->segment_count > 0) {
        segment *last = &arena->segments[arena->segment_count - 1];
        if (!pst__pool_remove(&arena->pool, last->offset)) return;
        free_segment(arena, last);
        arena->stats.reserved -= last->bytes;
        count_pinned(arena, -(uint64_t)last->bytes);
        arena->segment_count--;
    }
}

void pst__arena_trim_in_order(pst_arena *arena) {
    pst__pool_forget_events(&arena->pool);
    pst_arena_trim(arena);
}

/* ---- leases --------------------------------------------------------------------------------- */

static void count_leased(pst_arena *arena) {
    if (arena->stats.leased > arena->stats.peak) arena->stats.peak = arena->stats.leased;
    if (!pst__trace_on(arena->trace)) return;
    pst__trace_count(pst__track_of_thread(arena->trace), arena->counter, pst__now(),
                     (int64_t)arena->stats.leased);
}

static const segment *segment_at(const pst_arena *arena, size_t offset) {
    const segment *part = arena->segments;
    while (offset - part->offset >= part->bytes)
        part++;
    return part;
}

static void fill_lease(const pst_arena *arena, const pst__piece *piece, pst_lease *lease) {
    const segment *part = segment_at(arena, piece->offset);
    *lease = (pst_lease){.memory = part->memory + (piece->offset - part->offset),
                         .offset = piece->offset,
                         .bytes = piece->bytes,
                         .after_count = piece->after_count};
    memcpy(lease->after, piece->after, piece->after_count * sizeof *piece->after);
}

static void begin_lease(pst_arena *arena, const pst__piece *piece, pst_lease *lease) {
    fill_lease(arena, piece, lease);
    arena->stats.acquires++;
    if (piece->after_count > 0) arena->stats.event_waits++;
    arena->stats.leased += piece->bytes;
    count_leased(arena);
}

pst_status pst_arena_acquire(pst_arena *arena, size_t bytes, pst_lease *lease) {
    *lease = (pst_lease){0};
    if (bytes == 0) return PST_OK;
    size_t rounded = pst__round_up(bytes, PST_ARENA_ALIGNMENT);
    if (rounded == PST__ROUND_FAILED) return fail_limit(arena, bytes);
    pst__piece *piece;
    pst_status status = pst__pool_take(&arena->pool, rounded, &piece);
    if (status == PST_EBUSY) {
        status = grow(arena, rounded);
        if (status != PST_OK) return status;
        status = pst__pool_take(&arena->pool, rounded, &piece);
    }
    if (status != PST_OK) return fail_no_metadata(arena);
    begin_lease(arena, piece, lease);
    return PST_OK;
}

pst_status pst_arena_acquire_at(pst_arena *arena, size_t offset, size_t bytes, pst_lease *lease) {
    *lease = (pst_lease){.offset = offset};
    if (bytes == 0) return PST_OK;
    size_t rounded = pst__round_up(bytes, PST_ARENA_ALIGNMENT);
    if (offset % PST_ARENA_ALIGNMENT != 0 || rounded == PST__ROUND_FAILED ||
        rounded > SIZE_MAX - offset)
        return pst__fail(
            arena->error, PST_EINVAL,
            "arena %s: %zu bytes at offset %zu: offsets are multiples of %u and end below "
            "the address space's size",
            arena->name, bytes, offset, PST_ARENA_ALIGNMENT);
    size_t end = offset + rounded, reserved = arena->stats.reserved;
    if (offset >= reserved) {
        pst_status status = grow(arena, end - reserved);
        if (status != PST_OK) return status;
    }
    pst__piece *piece;
    const char *reason;
    pst_status status = pst__pool_take_at(&arena->pool, offset, rounded, &piece, &reason);
    if (status == PST_EBUSY)
        return pst__fail(arena->error, PST_EBUSY, "arena %s: bytes [%zu, %zu) are not free: %s",
                         arena->name, offset, end, reason);
    if (status != PST_OK) return fail_no_metadata(arena);
    arena->stats.planned_hits++;
    begin_lease(arena, piece, lease);
    return PST_OK;
}

/* The piece of a lease that ends here; NULL for an empty lease and for what is none. */
static pst__piece *end_lease(pst_arena *arena, const pst_lease *lease, const char *verb) {
    if (lease->memory == NULL) return NULL;
    pst__piece *piece = pst__pool_find_leased(&arena->pool, lease->offset);
    if (piece == NULL || piece->bytes != lease->bytes) {
        (void)pst__fail(arena->error, PST_EINVAL,
                        "arena %s: %s of bytes [%zu, %zu), which are no lease; end a lease once",
                        arena->name, verb, lease->offset, lease->offset + lease->bytes);
        return NULL;
    }
    arena->stats.leased -= piece->bytes;
    count_leased(arena);
    return piece;
}

void pst_arena_release(pst_arena *arena, const pst_lease *lease, pst_event *event) {
    pst__piece *piece = end_lease(arena, lease, "release");
    if (piece != NULL) pst__pool_give(&arena->pool, piece, event);
}

pst_status pst_arena_forget(pst_arena *arena, const pst_event *event) {
    return pst__pool_forget(&arena->pool, event);
}

void pst_arena_quarantine(pst_arena *arena, const pst_lease *lease) {
    pst__piece *piece = end_lease(arena, lease, "quarantine");
    if (piece != NULL) pst__pool_quarantine(&arena->pool, piece);
}

/* ---- stats ---------------------------------------------------------------------------------- */

void pst_arena_get_stats(const pst_arena *arena, pst_arena_stats *stats) {
    pst_arena_stats now = arena->stats;
    now.quarantined = arena->pool.quarantined;
    pst__write_sized(stats, &now, sizeof now);
}

void pst_arena_reset_peak(pst_arena *arena) {
    arena->stats.peak = arena->stats.leased;
}
