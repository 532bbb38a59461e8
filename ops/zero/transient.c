/* Communication copies that do not stay: each gather makes its own, in memory that gathers take in
 * turn.
 *
 * A gather's worker makes the copy right before it launches the gather, on the stream of copies, so
 * that the next copy is made while this gather is on its way. Memory is taken anew once the gathers
 * that had it before have ended here and have been read by the peers; all of them are gathers of
 * one queue, so that the newest of them says it for all. Ranks take the same memory for the same
 * gather, as their gathers are the same. */
#include "ops/zero/engine.h"

#include "mem/arena.h"

#define USUAL_COPIES 3u /* at once: one that is read, one that is made, one in between */

/* ---- how much -------------------------------------------------------------------------------- */

int pst__is_transient(const pst_zero *engine, const pst__group *group) {
    return engine->options.transient_copies && !group->is_filled_outside &&
           (engine->options.shards_on_host || group->gather_dtype != group->dtype);
}

static size_t copy_bytes(const pst__group *group) {
    return pst__round_up(group->layout.shard_elements * group->layout.gather_element_bytes,
                         PST_ARENA_ALIGNMENT);
}

/* What comes from the host is cast on the device: there it is behind the copy. */
static size_t bytes_of(const pst_zero *engine, const pst__group *group) {
    const int has_scratch = engine->options.shards_on_host && group->gather_dtype != group->dtype;
    const size_t scratch = group->layout.shard_elements * group->layout.element_bytes;
    if (!pst__is_transient(engine, group)) return 0;
    return copy_bytes(group) + (has_scratch ? pst__round_up(scratch, PST_ARENA_ALIGNMENT) : 0);
}

static size_t bytes_within(const pst_zero *engine, size_t most) {
    size_t bytes = 0;
    for (size_t i = 0; i < engine->group_count; i++) {
        const size_t own = bytes_of(engine, &engine->groups[i]);
        if (own <= most) bytes += own;
    }
    return bytes;
}

/* An embedding that is larger than all blocks is alone there. */
size_t pst__transient_bytes(const pst_zero *engine) {
    size_t usual = SIZE_MAX, largest = 0;
    const size_t all = bytes_within(engine, SIZE_MAX);
    for (size_t i = 0; i < engine->group_count; i++) {
        const size_t own = bytes_of(engine, &engine->groups[i]);
        if (own > largest) largest = own;
        if (own < usual && bytes_within(engine, own) >= all / 2) usual = own;
    }
    if (all == 0) return 0;
    return largest > USUAL_COPIES * usual ? largest : USUAL_COPIES * usual;
}

/* ---- life ------------------------------------------------------------------------------------ */

pst_status pst__transient_create(pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    pst__transient *turns = &engine->transient;
    const size_t bytes = pst__transient_bytes(engine);
    if (bytes == 0) return PST_OK;
    pst_status status = pst_arena_acquire(carrier->sources, bytes, &turns->memory);
    for (size_t i = 0; i < PST__TRANSIENT_USES && status == PST_OK; i++)
        status = carrier->device->ops->event_create(carrier->device, 0, &turns->uses[i].ended);
    return status == PST_OK ? pst__carrier_add_copying(carrier) : status;
}

void pst__transient_free(pst_zero *engine) {
    pst__carrier *carrier = &engine->carrier;
    pst__transient *turns = &engine->transient;
    for (size_t i = 0; i < PST__TRANSIENT_USES; i++)
        if (turns->uses[i].ended != NULL)
            carrier->device->ops->event_destroy(carrier->device, turns->uses[i].ended);
    if (turns->memory.memory != NULL) pst_arena_release(carrier->sources, &turns->memory, NULL);
    *turns = (pst__transient){0};
}

/* ---- making a copy --------------------------------------------------------------------------- */

static pst_status cast_there(const pst_zero *engine, const pst__group *group, void *copy,
                             pst_stream *stream) {
    pst_device *device = engine->carrier.device;
    const pst_cast cast = {.destination = copy,
                           .source = group->shard,
                           .count = group->layout.shard_elements,
                           .destination_dtype = group->gather_dtype,
                           .source_dtype = group->dtype};
    return device->ops->cast_scale_copy(device, stream, &cast, 1, 1.0);
}

static pst_status fill(const pst_zero *engine, const pst__operation *operation,
                       pst_stream *stream) {
    const pst__group *group = &engine->groups[operation->argument];
    char *copy = (char *)(uintptr_t)operation->work.collective.source;
    if (group->layout.shard_elements == 0) return PST_OK;
    if (!engine->options.shards_on_host) return cast_there(engine, group, copy, stream);
    return pst__hosted_bring_up(engine, group, copy, copy + copy_bytes(group), stream);
}

/* Shards are written only when what was recorded of that before is launched, and waited for. */
static pst_status wait_on(const pst_zero *engine, const pst__operation *operation,
                          pst_stream *copying) {
    pst_device *device = engine->carrier.device;
    const pst_status status = device->ops->stream_wait(device, copying, engine->shards_ready);
    if (status != PST_OK || operation->source_free == NULL) return status;
    return device->ops->stream_wait(device, copying, operation->source_free);
}

/* On the gather's worker; within a capture on the thread that captures. */
static pst_status make(pst__operation *operation, pst_stream *lane) {
    pst_zero *engine = operation->owner;
    pst__carrier *carrier = &engine->carrier;
    pst_device *device = carrier->device;
    pst_stream *stream = carrier->copying != NULL ? carrier->copying : lane;
    pst_status status = carrier->copying == NULL ? PST_OK : wait_on(engine, operation, stream);
    if (status == PST_OK)
        status = pst__wait_readers(carrier, operation->work.comm, stream, operation->source_read);
    if (status == PST_OK) status = fill(engine, operation, stream);
    if (status == PST_OK && carrier->copying != NULL)
        status = device->ops->event_record(device, operation->ready, stream);
    if (status == PST_OK && carrier->copying != NULL)
        status = device->ops->stream_wait(device, lane, operation->ready);
    return status;
}

/* ---- taking memory --------------------------------------------------------------------------- */

static pst__transient_use *use_of(pst__transient *turns, uint64_t number) {
    return &turns->uses[number % PST__TRANSIENT_USES];
}

/* The first use that what is taken from `begin` to `end` need not wait for. */
static uint64_t first_beside(pst__transient *turns, size_t begin, size_t end) {
    uint64_t first = turns->free_from;
    if (turns->taken >= PST__TRANSIENT_USES && first < turns->taken - PST__TRANSIENT_USES + 1)
        first = turns->taken - PST__TRANSIENT_USES + 1; /* one more takes the oldest one's event */
    for (uint64_t number = first; number < turns->taken; number++) {
        const pst__transient_use *use = use_of(turns, number);
        if (use->begin < end && begin < use->end) first = number + 1;
    }
    return first;
}

void pst__transient_take(pst_zero *engine, uint32_t group, pst__operation *operation) {
    pst__transient *turns = &engine->transient;
    const size_t bytes = bytes_of(engine, &engine->groups[group]);
    const size_t begin = turns->head + bytes <= turns->memory.bytes ? turns->head : 0;
    const uint64_t first = first_beside(turns, begin, begin + bytes);
    if (first > turns->free_from) {
        const pst__transient_use *before = use_of(turns, first - 1);
        operation->source_free = before->ended;
        operation->source_read = before->ticket;
        turns->free_from = first;
    }
    pst__transient_use *use = use_of(turns, turns->taken);
    operation->make_source = make;
    operation->owner = engine;
    operation->argument = group;
    operation->work.collective.source = (char *)turns->memory.memory + begin;
    operation->source_ended = engine->carrier.asynchronous ? use->ended : NULL;
    use->begin = begin;
    use->end = turns->head = begin + bytes;
    use->ticket = 0;
    engine->uploads.is_running = 1;
}

void pst__transient_taken(pst_zero *engine, uint64_t ticket) {
    use_of(&engine->transient, engine->transient.taken++)->ticket = ticket;
}
