/* The life of an offload object, and its public entry points. */
#include "ops/offload/offload.h"

#include "base/options.h"
#include "sched/device/device.h"
#include "sched/runtime.h"

#include <inttypes.h>
#include <string.h>

#define PIECE_BYTES ((size_t)256 << 20)

/* ---- the table, sorted by key ---------------------------------------------------------------- */

/* The first whose key is not below `key`. */
static size_t place_of(const pst_offload *offload, uint64_t key) {
    size_t low = 0, high = offload->table_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (offload->table[middle]->key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int is_at(const pst_offload *offload, size_t place, uint64_t key) {
    return place < offload->table_count && offload->table[place]->key == key;
}

/* NULL if there is none. */
static pst__stored *stored_find(const pst_offload *offload, uint64_t key) {
    size_t place = place_of(offload, key);
    return is_at(offload, place, key) ? offload->table[place] : NULL;
}

void pst__stored_let_go(pst_offload *offload, pst__stored *stored) {
    if (--stored->holders > 0) return;
    if (stored->lease.memory != NULL) pst_arena_release(offload->host, &stored->lease, NULL);
    pst__heap_free(offload->heap, stored, sizeof *stored);
}

static pst_status create_stored(pst_offload *offload, uint64_t key, void *memory, size_t bytes,
                                pst__stored **created) {
    pst__stored *stored = pst__heap_alloc(offload->heap, sizeof *stored);
    if (stored == NULL) return pst__offload_fail(offload, PST_ENOMEM, "%s", "no memory for a key");
    pst_status status = PST_OK;
    if (memory == NULL) status = pst_arena_acquire(offload->host, bytes, &stored->lease);
    if (status != PST_OK) {
        pst__heap_free(offload->heap, stored, sizeof *stored);
        return status;
    }
    stored->key = key;
    stored->memory = memory != NULL ? memory : stored->lease.memory;
    stored->bytes = bytes;
    stored->holders = 1;
    *created = stored;
    return PST_OK;
}

static void insert(pst_offload *offload, size_t place, pst__stored *stored) {
    pst__stored **at = &offload->table[place];
    memmove(at + 1, at, (offload->table_count - place) * sizeof(pst__stored *));
    *at = stored;
    offload->table_count++;
}

/* Makes a new one of this size with memory of the arena's, or `memory`, and puts it in the place of
 * what the key had. */
static pst_status stored_replace(pst_offload *offload, uint64_t key, void *memory, size_t bytes,
                                 pst__stored **stored) {
    if (pst__heap_grow(offload->heap, (void **)&offload->table, &offload->table_capacity,
                       offload->table_count + 1, sizeof(pst__stored *)) != PST_OK)
        return pst__offload_fail(offload, PST_ENOMEM, "%s", "no memory for a key");
    size_t place = place_of(offload, key);
    pst__stored *old = is_at(offload, place, key) ? offload->table[place] : NULL;
    pst_status status = create_stored(offload, key, memory, bytes, stored);
    if (status != PST_OK) return status;
    if (old == NULL) {
        insert(offload, place, *stored);
    } else {
        offload->table[place] = *stored;
        pst__stored_let_go(offload, old);
    }
    return PST_OK;
}

static void stored_remove(pst_offload *offload, uint64_t key) {
    size_t place = place_of(offload, key);
    if (!is_at(offload, place, key)) return;
    pst__stored **at = &offload->table[place];
    pst__stored_let_go(offload, *at);
    offload->table_count--;
    memmove(at, at + 1, (offload->table_count - place) * sizeof(pst__stored *));
}

/* ---- life ------------------------------------------------------------------------------------ */

static pst_status check_options(pst_runtime *runtime, const pst_offload_options *given,
                                pst_offload_options *options) {
    pst__error *error = pst__runtime_error(runtime);
    if (!pst__read_options(options, sizeof *options, given))
        return pst__fail(error, PST_EINVAL,
                         "offload: set options.size to sizeof(pst_offload_options)");
    if (options->name == NULL) options->name = "offload";
    if (options->device == NULL) options->device = pst_runtime_host(runtime);
    if (options->piece_bytes == 0) options->piece_bytes = PIECE_BYTES;
    const char *slot = pst__device_lacks(options->device, PST__NEEDS_ALL);
    if (slot != NULL)
        return pst__fail(error, PST_EINVAL, "offload '%s': device %s has no '%s', which it needs",
                         options->name, options->device->ops->name, slot);
    unsigned caps = options->device->ops->caps;
    if (options->compute == NULL && !(caps & PST_DEVICE_STREAM_IS_WORKER))
        return pst__fail(error, PST_EINVAL,
                         "offload '%s': device %s needs options.compute, a BORROWED lane",
                         options->name, options->device->ops->name);
    return PST_OK;
}

static pst_status create_lanes(pst_offload *offload) {
    pst_status status = PST_OK;
    pst_lane *first = NULL;
    for (int i = 0; i < PST__DIRECTION_COUNT && status == PST_OK; i++) {
        pst_lane_options options = {.size = sizeof options,
                                    .name = pst__direction_name((pst__direction)i),
                                    .device = offload->device,
                                    .order = PST_LANE_BY_SUBMISSION,
                                    .takes_help = 1};
        if (offload->options.pumped) {
            options.mode = PST_LANE_PUMPED;
        } else if (first != NULL && offload->asynchronous) {
            options.mode = PST_LANE_SHARED;
            options.share_with = first;
        }
        status = pst_lane_create(offload->runtime, &options, &offload->queues[i].lane);
        first = offload->queues[0].lane;
    }
    return status;
}

static pst_status build(pst_offload *offload) {
    const pst_offload_options *options = &offload->options;
    pst_device *device = options->device;
    offload->device = device;
    offload->asynchronous = !(options->device->ops->caps & PST_DEVICE_STREAM_IS_WORKER);
    if (options->compute != NULL) offload->compute = pst_lane_stream(options->compute);
    offload->name = pst__heap_text(offload->heap, options->name);
    if (offload->name == NULL) return PST_ENOMEM;
    offload->options.name = offload->name;
    const pst_arena_options host = {.size = sizeof host,
                                    .name = "offloaded",
                                    .device = offload->device,
                                    .kind = PST_MEMORY_PINNED,
                                    .segment_bytes = options->piece_bytes};
    pst_status status = pst_arena_create(offload->runtime, &host, &offload->host);
    if (status == PST_OK)
        status =
            pst_graph_create(offload->runtime, PST_GRAPH_GROWING, offload->name, &offload->graph);
    if (status == PST_OK && offload->asynchronous)
        status = device->ops->event_create(device, 0, &offload->drained);
    return status == PST_OK ? create_lanes(offload) : status;
}

static void free_all(pst_offload *offload) {
    pst_device *device = offload->device;
    while (offload->table_count > 0)
        pst__stored_let_go(offload, offload->table[--offload->table_count]);
    pst__heap_free(offload->heap, offload->table, offload->table_capacity * sizeof(pst__stored *));
    (void)pst_graph_destroy(offload->graph);
    for (int i = PST__DIRECTION_COUNT; i-- > 0;) /* the first one last: others share its worker */
        (void)pst_lane_destroy(offload->queues[i].lane);
    pst__transfer_free_spare(offload);
    if (offload->drained != NULL) device->ops->event_destroy(device, offload->drained);
    pst_arena_destroy(offload->host);
    pst__heap_free_text(offload->heap, offload->name);
    pst__heap_free(offload->heap, offload, sizeof *offload);
}

pst_status pst_offload_create(pst_runtime *runtime, const pst_offload_options *given,
                              pst_offload **created) {
    if (runtime == NULL || created == NULL) return PST_EINVAL;
    *created = NULL;
    pst_offload_options options;
    pst_status status = check_options(runtime, given, &options);
    if (status != PST_OK) return status;
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst__error *error = pst__runtime_error(runtime);
    pst_offload *offload = pst__heap_alloc(heap, sizeof *offload);
    if (offload == NULL)
        return pst__fail(error, PST_ENOMEM, "offload '%s': no memory", options.name);
    offload->runtime = runtime;
    offload->heap = heap;
    offload->error = error;
    offload->options = options;
    status = build(offload);
    if (status != PST_OK) {
        free_all(offload);
        return status == PST_ENOMEM ? pst__fail(error, status, "offload: no memory") : status;
    }
    *created = offload;
    return PST_OK;
}

void pst_offload_destroy(pst_offload *offload) {
    if (offload == NULL) return;
    if (pst__transfer_drain(offload))
        free_all(offload);
    else
        pst__log(offload->error, PST_LOG_WARNING,
                 "offload '%s': a copy may still use its memory, which is not freed",
                 offload->name);
}

/* ---- what is stored -------------------------------------------------------------------------- */

pst_status pst_offload_reserve(pst_offload *offload, size_t bytes) {
    if (offload == NULL) return PST_EINVAL;
    return pst_arena_add_segment(offload->host, bytes);
}

/* What every call that starts something begins with. */
static pst_status enter(pst_offload *offload, uint64_t key, const void *memory, size_t bytes) {
    if (offload == NULL) return PST_EINVAL;
    if (memory == NULL || bytes == 0)
        return pst__offload_fail(offload, PST_EINVAL,
                                 "key %" PRIu64 ": %zu bytes at %p are no memory", key, bytes,
                                 memory);
    pst__transfer_reap(offload);
    return pst_runtime_status(offload->runtime);
}

/* The memory that the key has already, if that fits. */
static pst_status place_for(pst_offload *offload, uint64_t key, size_t bytes, pst__stored **stored,
                            int *is_new) {
    *stored = stored_find(offload, key);
    *is_new = *stored == NULL || (*stored)->bytes != bytes || (*stored)->lease.memory == NULL;
    return *is_new ? stored_replace(offload, key, NULL, bytes, stored) : PST_OK;
}

pst_status pst_offload_store(pst_offload *offload, uint64_t key, const void *source, size_t bytes,
                             void *owner) {
    pst_status status = enter(offload, key, source, bytes);
    if (status != PST_OK) return status;
    pst__stored *stored;
    int is_new;
    status = place_for(offload, key, bytes, &stored, &is_new);
    if (status != PST_OK) return status;
    void *memory = (void *)(uintptr_t)source; /* a store only reads it */
    status = pst__transfer_submit(offload, stored, PST__STORE, memory, NULL, 0, owner);
    if (status != PST_OK) {
        if (is_new) stored_remove(offload, key);
        return status;
    }
    offload->stats.stores++;
    offload->stats.store_bytes += bytes;
    return PST_OK;
}

pst_status pst_offload_adopt(pst_offload *offload, uint64_t key, const void *memory, size_t bytes) {
    pst_status status = enter(offload, key, memory, bytes);
    if (status != PST_OK) return status;
    pst__stored *stored;
    return stored_replace(offload, key, (void *)(uintptr_t)memory, bytes, &stored);
}

static pst_status find(pst_offload *offload, uint64_t key, pst__stored **stored) {
    *stored = stored_find(offload, key);
    if (*stored != NULL) return PST_OK;
    return pst__offload_fail(offload, PST_ESTATE, "nothing is stored under key %" PRIu64, key);
}

static pst_status check_load(pst_offload *offload, const pst__stored *stored, size_t bytes,
                             size_t after_count) {
    if (stored->bytes != bytes)
        return pst__offload_fail(offload, PST_EINVAL,
                                 "key %" PRIu64 " has %zu bytes, and %zu are asked for",
                                 stored->key, stored->bytes, bytes);
    if (after_count > PST_OFFLOAD_MOST_AFTER)
        return pst__offload_fail(offload, PST_EINVAL,
                                 "key %" PRIu64 ": a load comes behind at most %u events, not %zu",
                                 stored->key, PST_OFFLOAD_MOST_AFTER, after_count);
    if (stored->status[PST__STORE] != PST_OK)
        return pst__offload_fail(offload, stored->status[PST__STORE],
                                 "key %" PRIu64 " is lost: storing it failed", stored->key);
    return PST_OK;
}

pst_status pst_offload_load(pst_offload *offload, uint64_t key, void *destination, size_t bytes,
                            pst_event *const *after, size_t after_count, void *owner) {
    pst_status status = enter(offload, key, destination, bytes);
    if (status != PST_OK) return status;
    pst__stored *stored;
    status = find(offload, key, &stored);
    if (status == PST_OK) status = check_load(offload, stored, bytes, after_count);
    if (status != PST_OK) return status;
    status =
        pst__transfer_submit(offload, stored, PST__LOAD, destination, after, after_count, owner);
    if (status != PST_OK) return status;
    offload->stats.loads++;
    offload->stats.load_bytes += bytes;
    return PST_OK;
}

void pst_offload_drop(pst_offload *offload, uint64_t key) {
    if (offload == NULL) return;
    pst__transfer_reap(offload);
    stored_remove(offload, key);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static pst_status wait_for(pst_offload *offload, uint64_t key, pst__direction direction) {
    if (offload == NULL) return PST_EINVAL;
    pst__transfer_reap(offload);
    pst__stored *stored;
    pst_status status = find(offload, key, &stored);
    if (status != PST_OK) return status;
    if (!stored->is_begun[direction])
        return pst__offload_fail(offload, PST_ESTATE, "no %s of key %" PRIu64 " has been started",
                                 pst__direction_name(direction), key);
    pst__transfer *transfer = stored->last[direction];
    return transfer != NULL ? pst__transfer_wait(transfer) : stored->status[direction];
}

pst_status pst_offload_wait_store(pst_offload *offload, uint64_t key) {
    return wait_for(offload, key, PST__STORE);
}

pst_status pst_offload_wait_load(pst_offload *offload, uint64_t key) {
    return wait_for(offload, key, PST__LOAD);
}

pst_status pst_offload_host_memory(pst_offload *offload, uint64_t key, void **memory,
                                   size_t *bytes) {
    if (offload == NULL) return PST_EINVAL;
    pst__stored *stored;
    pst_status status = find(offload, key, &stored);
    for (int i = 0; i < PST__DIRECTION_COUNT && status == PST_OK; i++)
        if (stored->last[i] != NULL) status = pst__transfer_wait_end(stored->last[i]);
    pst__transfer_reap(offload);
    if (status != PST_OK) return status;
    if (stored->status[PST__STORE] != PST_OK) return stored->status[PST__STORE];
    *memory = stored->memory;
    *bytes = stored->bytes;
    return PST_OK;
}

pst_status pst_offload_address(pst_offload *offload, uint64_t key, void **memory, size_t *bytes) {
    if (offload == NULL || memory == NULL || bytes == NULL) return PST_EINVAL;
    pst__stored *stored;
    pst_status status = find(offload, key, &stored);
    if (status != PST_OK) return status;
    *memory = stored->memory;
    *bytes = stored->bytes;
    return PST_OK;
}

void pst_offload_reap(pst_offload *offload) {
    if (offload != NULL) pst__transfer_reap(offload);
}

void pst_offload_get_stats(pst_offload *offload, pst_offload_stats *stats) {
    pst_arena_stats host = {.size = sizeof host};
    pst__transfer_reap(offload);
    pst_arena_get_stats(offload->host, &host);
    pst_offload_stats now = offload->stats;
    now.keys = offload->table_count;
    now.host_bytes = host.leased;
    now.host_peak = host.peak;
    now.host_registered = host.reserved;
    pst__write_sized(stats, &now, sizeof now);
}
