#include "mem/arena.h"

#include "base/options.h"
#include "sched/runtime.h"

#include <limits.h>

#define DEFAULT_ALIGNMENT 128u

/* idle -> filling (first slot) -> reducing (flush, or take) -> idle (retire) */
typedef enum bucket_state { BUCKET_IDLE = 0, BUCKET_FILLING, BUCKET_REDUCING } bucket_state;

typedef struct bucket {
    uint64_t id;
    bucket_state state;
    pst_dtype dtype;
    pst_lease lease;
    pst_event *retired;    /* behind it the memory is free again; NULL: lease.after counts */
    uint64_t retire_order; /* 0: never used */
    size_t chunk_bytes, used_bytes, slot_count;
    int transient; /* extra or of its own size: goes back to the arena when retired */
} bucket;

struct pst_buckets {
    const pst__heap *heap;
    pst__error *error;
    pst_buckets_options options;
    pst_device *device; /* the arena's */
    pst_cast *padding;  /* a piece a rank */
    bucket *items;
    size_t count, capacity;
    uint64_t last_id, retires;
    pst_buckets_stats stats;
};

/* ---- creating ------------------------------------------------------------------------------- */

static pst_status check_options(pst__error *error, const pst_buckets_options *given,
                                pst_buckets_options *options) {
    if (!pst__read_options(options, sizeof *options, given))
        return pst__fail(error, PST_EINVAL,
                         "buckets: set options.size to sizeof(pst_buckets_options)");
    if (options->alignment == 0) options->alignment = DEFAULT_ALIGNMENT;
    if (options->per_dtype == 0) options->per_dtype = 2;
    if ((options->alignment & (options->alignment - 1)) != 0 ||
        options->alignment > PST_ARENA_ALIGNMENT)
        return pst__fail(error, PST_EINVAL, "buckets: alignment %zu is no power of two up to %u",
                         options->alignment, PST_ARENA_ALIGNMENT);
    if (options->arena == NULL || options->ranks == 0 || options->chunk_bytes == 0)
        return pst__fail(error, PST_EINVAL, "buckets: arena, ranks and chunk_bytes must be set");
    options->chunk_bytes = pst__round_up(options->chunk_bytes, options->alignment);
    if (options->ranks > SIZE_MAX / options->chunk_bytes || options->ranks > INT_MAX)
        return pst__fail(error, PST_EINVAL, "buckets: %zu chunks of %zu bytes overflow",
                         options->ranks, options->chunk_bytes);
    return PST_OK;
}

pst_status pst_buckets_create(pst_runtime *runtime, const pst_buckets_options *given,
                              pst_buckets **created) {
    if (created == NULL) return PST_EINVAL;
    *created = NULL;
    if (runtime == NULL) return PST_EINVAL;
    pst__error *error = pst__runtime_error(runtime);
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst_buckets_options options;
    pst_status status = check_options(error, given, &options);
    if (status != PST_OK) return status;
    pst_buckets *buckets = pst__heap_alloc(heap, sizeof *buckets);
    pst_cast *padding = pst__heap_alloc(heap, options.ranks * sizeof *padding);
    if (buckets == NULL || padding == NULL) {
        pst__heap_free(heap, padding, options.ranks * sizeof *padding);
        pst__heap_free(heap, buckets, sizeof *buckets);
        return pst__fail(error, PST_ENOMEM, "buckets: no memory for their metadata");
    }
    *buckets = (pst_buckets){.heap = heap,
                             .error = error,
                             .options = options,
                             .device = pst__arena_device(options.arena),
                             .padding = padding};
    *created = buckets;
    return PST_OK;
}

/* ---- the list ------------------------------------------------------------------------------- */

static void remove_bucket(pst_buckets *buckets, bucket *removed) {
    buckets->stats.buckets--;
    buckets->stats.bytes -= removed->lease.bytes;
    *removed = buckets->items[--buckets->count];
}

static void return_bucket(pst_buckets *buckets, bucket *idle) {
    pst_arena_release(buckets->options.arena, &idle->lease, idle->retired);
    remove_bucket(buckets, idle);
}

static void return_idle(pst_buckets *buckets) {
    for (size_t i = buckets->count; i-- > 0;)
        if (buckets->items[i].state == BUCKET_IDLE) return_bucket(buckets, &buckets->items[i]);
}

void pst_buckets_trim(pst_buckets *buckets) {
    if (!buckets->options.fixed) return_idle(buckets);
}

void pst_buckets_destroy(pst_buckets *buckets) {
    if (buckets == NULL) return;
    return_idle(buckets);
    for (size_t i = 0; i < buckets->count; i++)
        pst_arena_quarantine(buckets->options.arena, &buckets->items[i].lease);
    pst__heap_free(buckets->heap, buckets->items, buckets->capacity * sizeof(bucket));
    pst__heap_free(buckets->heap, buckets->padding,
                   buckets->options.ranks * sizeof *buckets->padding);
    pst__heap_free(buckets->heap, buckets, sizeof *buckets);
}

static bucket *filling_bucket(pst_buckets *buckets, pst_dtype dtype) {
    for (size_t i = 0; i < buckets->count; i++) {
        bucket *item = &buckets->items[i];
        if (item->state == BUCKET_FILLING && item->dtype == dtype) return item;
    }
    return NULL;
}

static size_t count_regular(const pst_buckets *buckets, pst_dtype dtype) {
    size_t count = 0;
    for (size_t i = 0; i < buckets->count; i++)
        count += buckets->items[i].dtype == dtype && !buckets->items[i].transient;
    return count;
}

/* ---- choosing a bucket ---------------------------------------------------------------------- */

/* The events behind which an idle bucket may be filled. */
static size_t waits_of(bucket *item, pst_event ***events) {
    *events = item->retired != NULL ? &item->retired : item->lease.after;
    return item->retired != NULL ? 1 : item->lease.after_count;
}

/* Of the idle buckets that are large enough the one that was retired first. */
static bucket *idle_bucket(pst_buckets *buckets, pst_dtype dtype, size_t padded) {
    bucket *oldest = NULL;
    for (size_t i = 0; i < buckets->count; i++) {
        bucket *item = &buckets->items[i];
        if (item->state != BUCKET_IDLE || item->dtype != dtype || item->chunk_bytes < padded)
            continue;
        if (oldest == NULL || item->retire_order < oldest->retire_order) oldest = item;
    }
    return oldest;
}

static int is_waiting(pst_buckets *buckets, bucket *item) {
    pst_event **events;
    size_t count = waits_of(item, &events);
    for (size_t i = 0; i < count; i++)
        if (buckets->device->ops->event_query(buckets->device, events[i]) != PST_OK) return 1;
    return 0;
}

static pst_status make_bucket(pst_buckets *buckets, pst_dtype dtype, size_t padded, bucket **made) {
    size_t chunk = padded > buckets->options.chunk_bytes ? padded : buckets->options.chunk_bytes;
    int own_size = chunk > buckets->options.chunk_bytes;
    int extra = !own_size && count_regular(buckets, dtype) >= buckets->options.per_dtype;
    if (chunk > SIZE_MAX / buckets->options.ranks)
        return pst__fail(buckets->error, PST_EINVAL, "buckets: %zu slots of %zu bytes overflow",
                         buckets->options.ranks, padded);
    if (pst__heap_grow(buckets->heap, (void **)&buckets->items, &buckets->capacity,
                       buckets->count + 1, sizeof(bucket)) != PST_OK)
        return pst__fail(buckets->error, PST_ENOMEM, "buckets: no memory for their metadata");
    bucket *item = &buckets->items[buckets->count];
    *item = (bucket){.dtype = dtype, .chunk_bytes = chunk, .transient = own_size || extra};
    pst_status status =
        pst_arena_acquire(buckets->options.arena, chunk * buckets->options.ranks, &item->lease);
    if (status != PST_OK) return status;
    item->id = ++buckets->last_id;
    buckets->count++;
    buckets->stats.buckets++;
    buckets->stats.bytes += item->lease.bytes;
    buckets->stats.extra += (uint64_t)extra;
    buckets->stats.own_size += (uint64_t)own_size;
    *made = item;
    return PST_OK;
}

/* All in turn, whatever they wait for. */
static pst_status next_fixed(pst_buckets *buckets, pst_dtype dtype, size_t padded, bucket **next) {
    pst_status status = PST_OK;
    if (padded > buckets->options.chunk_bytes)
        return pst__fail(buckets->error, PST_EINVAL,
                         "buckets: a slot of %zu bytes is larger than the fixed buckets' %zu",
                         padded, buckets->options.chunk_bytes);
    while (status == PST_OK && count_regular(buckets, dtype) < buckets->options.per_dtype)
        status = make_bucket(buckets, dtype, padded, next);
    if (status != PST_OK) return status;
    *next = idle_bucket(buckets, dtype, padded);
    return *next == NULL ? PST_PENDING : PST_OK;
}

/* An idle bucket that is free at once, else a new one as long as there are fewer than `per_dtype`,
 * else an idle one that still waits (this bounds how far the host runs ahead), else an extra one.
 */
static pst_status next_bucket(pst_buckets *buckets, pst_dtype dtype, size_t padded, bucket **next) {
    if (buckets->options.fixed) return next_fixed(buckets, dtype, padded, next);
    bucket *idle = idle_bucket(buckets, dtype, padded);
    *next = idle;
    if (idle != NULL &&
        (count_regular(buckets, dtype) >= buckets->options.per_dtype || !is_waiting(buckets, idle)))
        return PST_OK;
    pst_status status = make_bucket(buckets, dtype, padded, next);
    /* With no memory for the second one, the first is worth waiting for. */
    if (status == PST_ENOMEM && idle != NULL) {
        *next = idle_bucket(buckets, dtype, padded); /* the list may have moved */
        return PST_OK;
    }
    return status;
}

/* ---- slots ---------------------------------------------------------------------------------- */

/* Once for a bucket: what follows comes behind it. */
static pst_status wait_for_memory(pst_buckets *buckets, bucket *item, pst_stream *stream) {
    if (item->state != BUCKET_IDLE) return PST_OK;
    pst_device *device = buckets->device;
    pst_event **events;
    size_t count = waits_of(item, &events);
    for (size_t i = 0; i < count; i++) {
        pst_status status = device->ops->event_query(device, events[i]);
        if (status == PST_PENDING) status = device->ops->stream_wait(device, stream, events[i]);
        if (status < 0)
            return pst__fail(buckets->error, status,
                             "bucket %llu of %s: waiting for the memory's earlier use failed",
                             (unsigned long long)item->id, pst_dtype_name(item->dtype));
        if (status == PST_PENDING) return PST_PENDING;
    }
    if (buckets->options.refill == NULL) return PST_OK;
    return buckets->options.refill(buckets->options.refill_context, item->id, stream);
}

/* Zeroes the bytes behind a slot on all ranks' chunks, in one launch. */
static pst_status zero_padding(pst_buckets *buckets, const pst_slot *slot, pst_stream *stream) {
    size_t bytes = slot->padded_bytes - slot->bytes;
    if (bytes == 0) return PST_OK;
    for (size_t rank = 0; rank < buckets->options.ranks; rank++)
        buckets->padding[rank] =
            (pst_cast){.destination = (char *)slot->memory + rank * slot->stride + slot->bytes,
                       .count = bytes,
                       .destination_dtype = PST_UINT8,
                       .source_dtype = PST_UINT8};
    pst_device *device = buckets->device;
    pst_status status =
        device->ops->cast_scale_copy(device, stream, buckets->padding, buckets->options.ranks, 1.0);
    if (status != PST_OK)
        return pst__fail(buckets->error, status, "buckets: device %s could not zero %zu bytes",
                         device->ops->name, bytes);
    return PST_OK;
}

static pst_status check_slot(const pst_buckets *buckets, pst_dtype dtype, size_t bytes) {
    size_t element = pst_dtype_size(dtype);
    if (element == 0)
        return pst__fail(buckets->error, PST_EINVAL, "buckets: %d is no dtype", (int)dtype);
    if (bytes == 0 || bytes % element != 0 || bytes > SIZE_MAX - buckets->options.alignment)
        return pst__fail(buckets->error, PST_EINVAL,
                         "buckets: a slot of %zu bytes is no number of whole %s elements", bytes,
                         pst_dtype_name(dtype));
    return PST_OK;
}

pst_status pst_buckets_slot(pst_buckets *buckets, pst_dtype dtype, size_t bytes, pst_stream *stream,
                            pst_slot *slot) {
    pst_status status = check_slot(buckets, dtype, bytes);
    if (status != PST_OK) return status;
    size_t padded = pst__round_up(bytes, buckets->options.alignment);
    bucket *item = filling_bucket(buckets, dtype);
    if (item == NULL) status = next_bucket(buckets, dtype, padded, &item);
    if (status != PST_OK) return status;
    if (padded > item->chunk_bytes - item->used_bytes) return PST_EBUSY;
    pst_slot taken = {.memory = (char *)item->lease.memory + item->used_bytes,
                      .stride = item->chunk_bytes,
                      .offset = item->used_bytes,
                      .bytes = bytes,
                      .padded_bytes = padded};
    status = wait_for_memory(buckets, item, stream);
    if (status == PST_OK) status = zero_padding(buckets, &taken, stream);
    if (status != PST_OK) return status;
    item->state = BUCKET_FILLING;
    item->used_bytes += padded;
    item->slot_count++;
    *slot = taken;
    return PST_OK;
}

/* ---- taking a whole one --------------------------------------------------------------------- */

static pst_bucket described(const bucket *item) {
    return (pst_bucket){.memory = item->lease.memory,
                        .stride = item->chunk_bytes,
                        .used_bytes = item->used_bytes,
                        .slot_count = item->slot_count,
                        .dtype = item->dtype,
                        .id = item->id};
}

pst_status pst_buckets_take(pst_buckets *buckets, pst_dtype dtype, size_t bytes, pst_stream *stream,
                            pst_bucket *taken) {
    bucket *item = NULL;
    pst_status status = check_slot(buckets, dtype, bytes);
    if (status == PST_OK)
        status =
            next_bucket(buckets, dtype, pst__round_up(bytes, buckets->options.alignment), &item);
    if (status == PST_OK) status = wait_for_memory(buckets, item, stream);
    if (status != PST_OK) return status;
    item->state = BUCKET_REDUCING;
    *taken = described(item);
    return PST_OK;
}

/* ---- flush and retire ----------------------------------------------------------------------- */

pst_status pst_buckets_flush(pst_buckets *buckets, pst_dtype dtype, pst_bucket *flushed) {
    bucket *item = filling_bucket(buckets, dtype);
    if (item == NULL)
        return pst__fail(buckets->error, PST_ESTATE, "buckets: flush of %s with nothing in it",
                         pst_dtype_name(dtype));
    item->state = BUCKET_REDUCING;
    buckets->stats.flushes++;
    *flushed = described(item);
    return PST_OK;
}

static bucket *reducing_bucket(pst_buckets *buckets, uint64_t id) {
    for (size_t i = 0; i < buckets->count; i++)
        if (buckets->items[i].id == id && buckets->items[i].state == BUCKET_REDUCING)
            return &buckets->items[i];
    return NULL;
}

void pst_buckets_retire(pst_buckets *buckets, uint64_t id, pst_event *event) {
    bucket *item = reducing_bucket(buckets, id);
    if (item == NULL) {
        (void)pst__fail(
            buckets->error, PST_EINVAL,
            "buckets: retire of bucket %llu, which was not flushed or is retired already",
            (unsigned long long)id);
        return;
    }
    item->state = BUCKET_IDLE;
    item->retired = event;
    item->retire_order = ++buckets->retires;
    item->used_bytes = item->slot_count = 0;
    if (item->transient) return_bucket(buckets, item);
}

void pst_buckets_get_stats(const pst_buckets *buckets, pst_buckets_stats *stats) {
    pst__write_sized(stats, &buckets->stats, sizeof buckets->stats);
}
