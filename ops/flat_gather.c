/* Gathers: several copies in one collective, waiting for them, giving their memory back. */
#include "ops/flat.h"

#include "mem/arena.h"
#include "sched/runtime.h"

#define MOST_COPIES 64u /* in one collective */

int pst__flat_is_current(const pst__flat_copy *copy) {
    return copy->state != PST__SHARDED && (!copy->is_stale || copy->uses > 0);
}

/* ---- what goes out together ------------------------------------------------------------------ */

typedef struct batch {
    const uint32_t *copies;
    size_t count;
    const char *source;  /* the first byte that peers read */
    size_t source_bytes; /* up to the last one */
    char *destination;   /* of the lowest copy */
    size_t bytes;        /* of all copies */
    pst_event *after;    /* the latest release of memory that they take; NULL: none */
    uint64_t after_number;
} batch;

static size_t part_bytes(const pst_flat *flat, const pst__flat_copy *copy) {
    return flat->parameters[copy->parameter].chunk * pst_dtype_size(copy->dtype);
}

/* How many of the copies can be one collective: pieces of one memory that lie close together. */
static pst_status count_batch(pst_flat *flat, const uint32_t *copies, size_t count, batch *batch) {
    const char *low = NULL, *high = NULL, *home = NULL;
    size_t parts = 0;
    *batch = (struct batch){.copies = copies};
    for (; batch->count < count && batch->count < MOST_COPIES; batch->count++) {
        const pst__flat_copy *copy = &flat->copies[copies[batch->count]];
        size_t part = part_bytes(flat, copy);
        pst__flat_place place;
        pst_status status = pst__flat_source(flat, copies[batch->count], &place);
        if (status != PST_OK) return status;
        const char *end = place.memory + part;
        if (batch->count == 0) {
            low = place.memory;
            high = end;
            home = place.home;
        } else if (place.home != home || batch->bytes >= flat->options.fuse_bytes) {
            break;
        }
        const char *first = place.memory < low ? place.memory : low;
        const char *last = end > high ? end : high;
        if ((size_t)(last - first) > 2 * (parts + part) + PST_ARENA_ALIGNMENT) break;
        low = first;
        high = last;
        parts += part;
        batch->bytes += pst__flat_bytes(flat, copy);
    }
    batch->source = low;
    batch->source_bytes = (size_t)(high - low);
    return PST_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Every release is an event of the compute stream: the latest one is behind all others. */
static void note_after(const pst_flat *flat, batch *batch, pst_event *event) {
    for (size_t i = 0; i < flat->copy_count; i++) {
        const pst__flat_copy *copy = &flat->copies[i];
        if (copy->released != event || copy->release <= batch->after_number) continue;
        batch->after = event;
        batch->after_number = copy->release;
    }
}

static pst_status record_release(pst_flat *flat, pst__flat_copy *copy) {
    copy->release = ++flat->releases;
    return pst__zero_record(flat->engine, copy->released);
}

static pst_arena *arena_of(const pst_flat *flat, const pst__flat_copy *copy) {
    return pst__flat_is_large(flat, copy) ? flat->large : flat->engine->gathered;
}

static pst_status take_memory(pst_flat *flat, batch *batch) {
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        if (copy->state != PST__SHARDED) { /* stale: in place, behind compute's uses */
            pst_status status =
                copy->state == PST__IN_FLIGHT ? pst_flat_wait(flat, batch->copies[i]) : PST_OK;
            if (status == PST_OK) status = record_release(flat, copy);
            if (status != PST_OK) return status;
            note_after(flat, batch, copy->released);
        } else {
            pst_status status =
                pst_arena_acquire(arena_of(flat, copy), pst__flat_bytes(flat, copy), &copy->lease);
            if (status != PST_OK) return status;
            for (size_t j = 0; j < copy->lease.after_count; j++)
                note_after(flat, batch, copy->lease.after[j]);
        }
        char *memory = copy->lease.memory;
        if (batch->destination == NULL || memory < batch->destination) batch->destination = memory;
    }
    return PST_OK;
}

static void give_memory(pst_flat *flat, const batch *batch) {
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        if (copy->state != PST__SHARDED || copy->lease.memory == NULL) continue;
        pst_arena_release(arena_of(flat, copy), &copy->lease, NULL);
        copy->lease = (pst_lease){0};
    }
}

/* ---- the collective -------------------------------------------------------------------------- */

static pst_status add_segments(pst_flat *flat, const batch *batch, pst__operation *operation) {
    pst_zero *engine = flat->engine;
    size_t count = 0;
    pst_status status =
        pst__heap_grow(engine->heap, (void **)&operation->segments, &operation->segment_capacity,
                       batch->count * engine->world, sizeof *operation->segments);
    for (size_t i = 0; status == PST_OK && i < batch->count; i++) {
        const pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        size_t part = part_bytes(flat, copy);
        pst__flat_place place;
        status = pst__flat_source(flat, batch->copies[i], &place);
        for (size_t rank = 0; status == PST_OK && rank < engine->world; rank++)
            operation->segments[count++] = (pst_segment){
                .peer = (uint32_t)rank,
                .source = (size_t)(place.memory - batch->source),
                .destination =
                    (size_t)((char *)copy->lease.memory - batch->destination) + rank * part,
                .bytes = part};
    }
    operation->work.collective.segments = operation->segments;
    operation->work.collective.segment_count = count;
    return status;
}

static pst_status submit(pst_flat *flat, const batch *batch) {
    pst_zero *engine = flat->engine;
    pst__operation *operation;
    pst_status status = pst__operation_take(engine, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    const pst__flat_copy *first = &flat->copies[batch->copies[0]];
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_GATHER;
    collective->name = flat->parameters[first->parameter].name;
    collective->dtype = first->dtype;
    collective->source = batch->source;
    collective->source_bytes = batch->source_bytes;
    collective->destination = batch->destination;
    status = add_segments(flat, batch, operation);
    /* Whatever changed the shards did so before this. The event is the operation's own, since the
     * lane may come to wait for it only when others have been recorded again. */
    if (status == PST_OK) status = pst__zero_record(engine, operation->ready);
    if (status != PST_OK) {
        pst__operation_give(engine, operation);
        return status;
    }
    pst_event *after[2] = {operation->ready, batch->after};
    status = pst__operation_submit(operation, batch->bytes, after, batch->after == NULL ? 1 : 2);
    if (status != PST_OK) return status;
    engine->gather_ticket = collective->ticket;
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        copy->gather = operation;
        copy->ticket = collective->ticket;
    }
    return PST_OK;
}

static pst_status issue_batch(pst_flat *flat, batch *batch) {
    pst_status status = take_memory(flat, batch);
    if (status == PST_OK) status = submit(flat, batch);
    if (status != PST_OK) {
        give_memory(flat, batch);
        return status;
    }
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        copy->is_stale = 0;
        status = pst__gather_state_step(&copy->state, PST__STEP_ISSUE);
        if (status != PST_OK) return status;
    }
    flat->stats.gathers++;
    flat->stats.gathered += batch->count;
    flat->stats.gather_bytes += batch->bytes;
    return PST_OK;
}

pst_status pst__flat_issue(pst_flat *flat, const uint32_t *copies, size_t count) {
    pst_status status = pst__flat_refresh(flat, copies, count);
    for (size_t done = 0; status == PST_OK && done < count;) {
        batch batch;
        status = count_batch(flat, copies + done, count - done, &batch);
        if (status == PST_OK) status = issue_batch(flat, &batch);
        done += batch.count;
    }
    return pst__flat_give_up(flat, status);
}

/* ---- a use ----------------------------------------------------------------------------------- */

void pst__flat_count_ahead(pst_flat *flat, pst__flat_copy *copy, int is_ahead) {
    size_t bytes = pst__flat_room_of(flat, copy);
    if (copy->is_ahead) flat->ahead_bytes -= bytes;
    copy->is_ahead = is_ahead;
    if (is_ahead) flat->ahead_bytes += bytes;
}

pst_status pst_flat_gather(pst_flat *flat, uint32_t index, void **memory) {
    pst_status status = pst__flat_check_copy(flat, index);
    int foreseen = status == PST_OK && pst__flat_note(flat, index);
    if (status == PST_OK && !pst__flat_is_current(&flat->copies[index]))
        status = pst__flat_issue(flat, &index, 1);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    pst__flat_count_ahead(flat, copy, 0);
    copy->uses++;
    *memory = copy->lease.memory;
    if (!foreseen) status = pst__flat_drop_ahead(flat);
    return status == PST_OK ? pst__flat_gather_ahead(flat) : status;
}

/* As far as there is room: the first ones, as they are used first. */
pst_status pst_flat_prefetch(pst_flat *flat, const uint32_t *copies, size_t count) {
    size_t wanted = 0, taken = flat->ahead_bytes;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < count; i++)
        status = pst__flat_check_copy(flat, copies[i]);
    if (status == PST_OK)
        status = pst__heap_grow(flat->engine->heap, (void **)&flat->batch, &flat->batch_capacity,
                                count, sizeof *flat->batch);
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        const pst__flat_copy *copy = &flat->copies[copies[i]];
        int again = 0;
        for (size_t j = 0; j < wanted; j++)
            again |= flat->batch[j] == copies[i];
        if (again || pst__flat_is_current(copy)) continue;
        if (!pst__flat_has_room(flat, copy, wanted, taken)) break;
        taken += pst__flat_room_of(flat, copy);
        flat->batch[wanted++] = copies[i];
    }
    if (status == PST_OK) status = pst__flat_issue(flat, flat->batch, wanted);
    for (size_t i = 0; status == PST_OK && i < wanted; i++) {
        pst__flat_copy *copy = &flat->copies[flat->batch[i]];
        if (!copy->is_resident) pst__flat_count_ahead(flat, copy, 1);
        flat->stats.ahead++;
    }
    return status;
}

/* The operation may have ended and be somebody else's by now. */
static pst__operation *in_flight(const pst__flat_copy *copy) {
    pst__operation *operation = copy->gather;
    if (operation == NULL) return NULL;
    const pst_collective *collective = &operation->work.collective;
    int is_own = collective->kind == PST_ALL_GATHER && collective->ticket == copy->ticket;
    /* Pairs with the release in ended: what it wrote is there. */
    return is_own && !pst__load_acquire(&operation->ended) ? operation : NULL;
}

pst_status pst_flat_wait(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    pst__operation *operation = in_flight(copy);
    if (operation != NULL)
        status = pst__operation_wait(operation, flat->parameters[copy->parameter].name,
                                     PST__GATHER_LANE);
    if (status == PST_OK) status = pst_runtime_status(flat->engine->runtime);
    if (status != PST_OK) return pst__flat_give_up(flat, status);
    status = pst__gather_state_step(&copy->state, PST__STEP_WAIT);
    if (status == PST_OK) return PST_OK;
    return pst__flat_fail(flat, status, "parameter '%s' is waited for and %s: gather it first",
                          flat->parameters[copy->parameter].name,
                          pst__gather_state_name(copy->state));
}

pst_status pst__flat_drop(pst_flat *flat, pst__flat_copy *copy) {
    pst_status status = PST_OK;
    if (copy->state == PST__SHARDED) return PST_OK;
    if (copy->state == PST__IN_FLIGHT)
        status = pst_flat_wait(flat, (uint32_t)(copy - flat->copies));
    if (status == PST_OK) status = record_release(flat, copy);
    if (status == PST_OK) status = pst__gather_state_step(&copy->state, PST__STEP_DROP);
    if (status != PST_OK) return pst__flat_give_up(flat, status);
    pst__flat_count_ahead(flat, copy, 0);
    pst_arena_release(arena_of(flat, copy), &copy->lease, copy->released);
    copy->lease = (pst_lease){0};
    return PST_OK;
}

/* After the last use. */
static pst_status retire(pst_flat *flat, pst__flat_copy *copy) {
    if (copy->is_resident) return PST_OK;
    if (copy->is_stale || !pst__flat_is_near(flat, (uint32_t)(copy - flat->copies)))
        return pst__flat_drop(flat, copy);
    pst__flat_count_ahead(flat, copy, 1);
    return PST_OK;
}

pst_status pst_flat_release(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    if (copy->uses == 0)
        return pst__flat_fail(flat, PST_ESTATE, "parameter '%s' is released more often than used",
                              flat->parameters[copy->parameter].name);
    if (--copy->uses > 0) return PST_OK;
    return retire(flat, copy);
}

size_t pst_flat_uses(const pst_flat *flat, uint32_t copy) {
    return copy < flat->copy_count ? flat->copies[copy].uses : 0;
}

pst_status pst_flat_end_uses(pst_flat *flat) {
    pst_status status = flat == NULL ? PST_EINVAL : PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        flat->copies[i].uses = 0;
        if (!flat->copies[i].is_resident) status = pst__flat_drop(flat, &flat->copies[i]);
    }
    return status;
}

pst_status pst_flat_set_resident(pst_flat *flat, uint32_t index, int resident) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    if (resident) pst__flat_count_ahead(flat, copy, 0);
    copy->is_resident = resident != 0;
    if (copy->is_resident || copy->uses > 0 || copy->is_ahead) return PST_OK;
    return pst__flat_drop(flat, copy);
}

pst_status pst_flat_invalidate(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    copy->is_stale = 1;
    if (copy->is_resident || copy->uses > 0) return PST_OK;
    return pst__flat_drop(flat, copy);
}

/* ---- beside all that ------------------------------------------------------------------------- */

pst_status pst_flat_gather_to(pst_flat *flat, uint32_t index, void *memory) {
    pst_status status = pst__flat_check_copy(flat, index);
    pst__operation *operation = NULL;
    if (status == PST_OK) status = pst__flat_refresh(flat, &index, 1);
    batch batch = {0};
    if (status == PST_OK) status = count_batch(flat, &index, 1, &batch);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    pst__flat_copy kept = *copy; /* the collective is made for the caller's memory instead */
    copy->lease = (pst_lease){.memory = memory};
    batch.destination = memory;
    status = submit(flat, &batch);
    operation = copy->gather;
    *copy = kept;
    if (status == PST_OK)
        status = pst__operation_wait(operation, flat->parameters[copy->parameter].name,
                                     PST__GATHER_LANE);
    if (status == PST_OK) status = pst_runtime_status(flat->engine->runtime);
    return pst__flat_give_up(flat, status);
}
