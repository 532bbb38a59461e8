/* Gathers: several copies in one collective, what comes next gathered ahead (what followed a use
 * the last time follows it again), waiting for copies, giving their memory back. */
#include "ops/deepcompile/flat.h"

#include "mem/arena.h"
#include "sched/runtime.h"

#include <string.h>

#define MOST_COPIES 64u /* in one collective */

static size_t bytes_of(const pst_flat *flat, const pst__flat_copy *copy) {
    return flat->parameters[copy->parameter].chunk * flat->carrier.world *
           pst_dtype_size(copy->dtype);
}

/* Larger than all that may be gathered ahead. It has memory apart and goes ahead alone. */
static int is_large(const pst_flat *flat, const pst__flat_copy *copy) {
    const size_t room = flat->options.ahead_bytes;
    return room > 0 && bytes_of(flat, copy) > room;
}

/* Bytes that it takes of the room for what is gathered ahead. */
static size_t room_of(const pst_flat *flat, const pst__flat_copy *copy) {
    return copy->is_resident || is_large(flat, copy) ? 0 : bytes_of(flat, copy);
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
        batch->bytes += bytes_of(flat, copy);
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
        if (copy->gathered.released != event || copy->release <= batch->after_number) continue;
        batch->after = event;
        batch->after_number = copy->release;
    }
}

static pst_status record_release(pst_flat *flat, pst__flat_copy *copy) {
    copy->release = ++flat->releases;
    return pst__carrier_record(&flat->carrier, copy->gathered.released);
}

static pst_arena *arena_of(const pst_flat *flat, const pst__flat_copy *copy) {
    return is_large(flat, copy) ? flat->large : flat->carrier.gathered;
}

static pst_status take_memory(pst_flat *flat, batch *batch) {
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        if (copy->gathered.state != PST__SHARDED) { /* stale: in place, behind compute's uses */
            pst_status status = copy->gathered.state == PST__IN_FLIGHT
                                    ? pst_flat_wait(flat, batch->copies[i])
                                    : PST_OK;
            if (status == PST_OK) status = record_release(flat, copy);
            if (status != PST_OK) return status;
            note_after(flat, batch, copy->gathered.released);
        } else {
            pst_status status = pst_arena_acquire(arena_of(flat, copy), bytes_of(flat, copy),
                                                  &copy->gathered.lease);
            if (status != PST_OK) return status;
            for (size_t j = 0; j < copy->gathered.lease.after_count; j++)
                note_after(flat, batch, copy->gathered.lease.after[j]);
        }
        char *memory = copy->gathered.lease.memory;
        if (batch->destination == NULL || memory < batch->destination) batch->destination = memory;
    }
    return PST_OK;
}

static void give_memory(pst_flat *flat, const batch *batch) {
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        if (copy->gathered.state != PST__SHARDED || copy->gathered.lease.memory == NULL) continue;
        pst_arena_release(arena_of(flat, copy), &copy->gathered.lease, NULL);
        copy->gathered.lease = (pst_lease){0};
    }
}

/* ---- the collective -------------------------------------------------------------------------- */

static pst_status add_segments(pst_flat *flat, const batch *batch, pst__operation *operation) {
    pst__carrier *carrier = &flat->carrier;
    size_t count = 0;
    pst_status status =
        pst__heap_grow(carrier->heap, (void **)&operation->segments, &operation->segment_capacity,
                       batch->count * carrier->world, sizeof *operation->segments);
    for (size_t i = 0; status == PST_OK && i < batch->count; i++) {
        const pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        size_t part = part_bytes(flat, copy);
        pst__flat_place place;
        status = pst__flat_source(flat, batch->copies[i], &place);
        for (size_t rank = 0; status == PST_OK && rank < carrier->world; rank++)
            operation->segments[count++] = (pst_segment){
                .peer = (uint32_t)rank,
                .source = (size_t)(place.memory - batch->source),
                .destination = (size_t)((char *)copy->gathered.lease.memory - batch->destination) +
                               rank * part,
                .bytes = part};
    }
    operation->work.collective.segments = operation->segments;
    operation->work.collective.segment_count = count;
    return status;
}

static pst_status submit(pst_flat *flat, const batch *batch) {
    pst__carrier *carrier = &flat->carrier;
    pst__operation *operation;
    pst_status status = pst__operation_take(carrier, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    const pst__flat_copy *first = &flat->copies[batch->copies[0]];
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_GATHER;
    collective->name = operation->wait_name = flat->parameters[first->parameter].name;
    collective->dtype = first->dtype;
    collective->source = batch->source;
    collective->source_bytes = batch->source_bytes;
    collective->destination = batch->destination;
    status = add_segments(flat, batch, operation);
    /* Whatever changed the shards did so before this. The event is the operation's own, since the
     * lane may come to wait for it only when others have been recorded again. */
    if (status == PST_OK) status = pst__carrier_record(carrier, operation->ready);
    if (status != PST_OK) {
        pst__operation_give(carrier, operation);
        return status;
    }
    pst_event *after[2] = {operation->ready, batch->after};
    status = pst__operation_submit(operation, batch->bytes, after, batch->after == NULL ? 1 : 2);
    if (status != PST_OK) return status;
    carrier->gather_ticket = collective->ticket;
    for (size_t i = 0; i < batch->count; i++) {
        pst__flat_copy *copy = &flat->copies[batch->copies[i]];
        pst__gathered_note(&copy->gathered, operation);
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
        copy->gathered.is_stale = 0;
        status = pst__gather_state_step(&copy->gathered.state, PST__STEP_ISSUE);
        if (status != PST_OK) return status;
    }
    flat->stats.gathers++;
    flat->stats.gathered += batch->count;
    flat->stats.gather_bytes += batch->bytes;
    return PST_OK;
}

/* Gathers what is needed of these (indices of copies, without repetition). */
static pst_status issue(pst_flat *flat, const uint32_t *copies, size_t count) {
    pst_status status = pst__flat_refresh(flat, copies, count);
    for (size_t done = 0; status == PST_OK && done < count;) {
        batch batch;
        status = count_batch(flat, copies + done, count - done, &batch);
        if (status == PST_OK) status = issue_batch(flat, &batch);
        done += batch.count;
    }
    return pst__flat_give_up(flat, status);
}

/* ---- history: the order of uses, the same on all ranks, and so is what is read out of it ----- */

/* Forgets the older half. */
static void make_room(pst__flat_history *history) {
    const size_t half = PST__FLAT_HISTORY / 2;
    if (history->count < PST__FLAT_HISTORY) return;
    memmove(history->uses, history->uses + half, half * sizeof *history->uses);
    history->next = history->next >= half ? history->next - half : half;
    history->count = half;
}

/* Where this use stood last behind the same one as now; `count`: nowhere. */
static size_t find(const pst__flat_history *history, uint32_t use) {
    for (size_t i = history->count; i-- > 1;)
        if (history->uses[i] == use && history->uses[i - 1] == history->uses[history->count - 1])
            return i;
    return history->count;
}

int pst__flat_note(pst_flat *flat, uint32_t use) {
    pst__flat_history *history = &flat->history;
    make_room(history);
    int was_unknown = history->next == history->count;
    int is_foreseen = !was_unknown && history->uses[history->next] == use;
    size_t at = is_foreseen ? history->next : find(history, use);
    int is_new = at == history->count;
    history->uses[history->count++] = use;
    history->next = is_new ? history->count : at + 1;
    return is_foreseen || was_unknown;
}

/* ---- ahead ----------------------------------------------------------------------------------- */

/* Is the copy one of those that were gathered ahead, for which there is so much room? */
static void count_ahead(pst_flat *flat, pst__flat_copy *copy, int is_ahead) {
    size_t bytes = room_of(flat, copy);
    if (copy->is_ahead) flat->ahead_bytes -= bytes;
    copy->is_ahead = is_ahead;
    if (is_ahead) flat->ahead_bytes += bytes;
}

/* Compute has waited, and the memory goes back. */
static pst_status drop(pst_flat *flat, pst__flat_copy *copy) {
    pst_status status = PST_OK;
    if (copy->gathered.state == PST__SHARDED) return PST_OK;
    if (copy->gathered.state == PST__IN_FLIGHT)
        status = pst_flat_wait(flat, (uint32_t)(copy - flat->copies));
    copy->release = ++flat->releases;
    if (status == PST_OK)
        status = pst__gathered_drop(&flat->carrier, arena_of(flat, copy), &copy->gathered);
    if (status != PST_OK) return pst__flat_give_up(flat, status);
    count_ahead(flat, copy, 0);
    return PST_OK;
}

static int is_in(const uint32_t *copies, size_t count, uint32_t copy) {
    for (size_t i = 0; i < count; i++)
        if (copies[i] == copy) return 1;
    return 0;
}

/* Its shard is not there now. */
static int is_away(const pst_flat *flat, const pst__flat_copy *copy) {
    const pst__flat_parameter *parameter = &flat->parameters[copy->parameter];
    return parameter->shard == NULL && parameter->chunk > 0;
}

/* One large copy has its place at a time. */
static int has_place(const pst_flat *flat, const pst__flat_copy *wanted, size_t count) {
    for (size_t i = 0; i < flat->copy_count; i++) {
        const pst__flat_copy *copy = &flat->copies[i];
        if (copy == wanted || !is_large(flat, copy)) continue;
        if (copy->gathered.state != PST__SHARDED || is_in(flat->batch, count, (uint32_t)i))
            return 0;
    }
    return 1;
}

/* Is there room to gather the copy ahead, behind the first `count` of flat->batch? `taken`: bytes
 * in use, with theirs. */
static int has_room(const pst_flat *flat, const pst__flat_copy *copy, size_t count, size_t taken) {
    const size_t room = flat->options.ahead_bytes;
    if (copy->is_resident) return 1;
    if (is_large(flat, copy)) return has_place(flat, copy, count);
    return taken <= room && bytes_of(flat, copy) <= room - taken;
}

/* Puts a copy behind the first `count` of flat->batch if it has to be gathered; 0: there is no room
 * for it. `taken`: bytes in use, with those of the batch. */
static int want(pst_flat *flat, uint32_t index, size_t *count, size_t *taken) {
    const pst__flat_copy *copy = &flat->copies[index];
    if (pst__gathered_is_current(&copy->gathered) || is_in(flat->batch, *count, index)) return 1;
    if (!has_room(flat, copy, *count, *taken)) return 0;
    *taken += room_of(flat, copy);
    flat->batch[(*count)++] = index;
    return 1;
}

/* How many of the coming copies there is room for, in the order of their uses. */
static size_t collect(pst_flat *flat) {
    const pst__flat_history *history = &flat->history;
    size_t count = 0, taken = flat->ahead_bytes;
    for (size_t i = history->next; i < history->count; i++) {
        const uint32_t index = history->uses[i];
        if (index == PST__FLAT_UPDATE) break;
        if (!is_away(flat, &flat->copies[index]) && !want(flat, index, &count, &taken)) break;
    }
    return count;
}

/* Only when half of the room is free, so that what goes out goes out together. */
static pst_status gather_ahead(pst_flat *flat) {
    if (flat->ahead_bytes > flat->options.ahead_bytes / 2) return PST_OK;
    const size_t count = collect(flat);
    pst_status status = issue(flat, flat->batch, count);
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        pst__flat_copy *copy = &flat->copies[flat->batch[i]];
        if (copy->is_resident) continue;
        count_ahead(flat, copy, 1);
        flat->stats.ahead++;
    }
    return status;
}

/* Is the copy used again within what may be gathered ahead? */
static int is_near(const pst_flat *flat, uint32_t index) {
    const pst__flat_history *history = &flat->history;
    size_t bytes = flat->ahead_bytes;
    for (size_t i = history->next; i < history->count; i++) {
        uint32_t use = history->uses[i];
        if (use == PST__FLAT_UPDATE) return 0;
        const pst__flat_copy *copy = &flat->copies[use];
        if (use == index) return room_of(flat, copy) + bytes <= flat->options.ahead_bytes;
        if (!pst__gathered_is_current(&copy->gathered)) bytes += room_of(flat, copy);
        if (bytes > flat->options.ahead_bytes) return 0;
    }
    return 0;
}

pst_status pst__flat_drop_ahead(pst_flat *flat) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        pst__flat_copy *copy = &flat->copies[i];
        if (!copy->is_ahead || copy->gathered.uses > 0) continue;
        flat->stats.unused++;
        status = drop(flat, copy);
    }
    return status;
}

/* ---- a use ----------------------------------------------------------------------------------- */

pst_status pst_flat_gather(pst_flat *flat, uint32_t index, void **memory) {
    pst_status status = pst__flat_check_copy(flat, index);
    int foreseen = status == PST_OK && pst__flat_note(flat, index);
    if (status == PST_OK && !pst__gathered_is_current(&flat->copies[index].gathered))
        status = issue(flat, &index, 1);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    count_ahead(flat, copy, 0);
    copy->gathered.uses++;
    *memory = copy->gathered.lease.memory;
    if (!foreseen) status = pst__flat_drop_ahead(flat);
    return status == PST_OK ? gather_ahead(flat) : status;
}

/* Gathers the first ones, as far as there is room: they are used first. */
pst_status pst_flat_prefetch(pst_flat *flat, const uint32_t *copies, size_t count) {
    size_t wanted = 0, taken = flat->ahead_bytes;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < count; i++)
        status = pst__flat_check_copy(flat, copies[i]);
    for (size_t i = 0; status == PST_OK && i < count; i++)
        if (!want(flat, copies[i], &wanted, &taken)) break;
    if (status == PST_OK) status = issue(flat, flat->batch, wanted);
    for (size_t i = 0; status == PST_OK && i < wanted; i++) {
        pst__flat_copy *copy = &flat->copies[flat->batch[i]];
        if (!copy->is_resident) count_ahead(flat, copy, 1);
        flat->stats.ahead++;
    }
    return status;
}

pst_status pst_flat_wait(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    if (copy->gathered.state == PST__SHARDED)
        return pst__flat_fail(
            flat, PST_ESTATE, "parameter '%s' is waited for and %s: gather it first",
            flat->parameters[copy->parameter].name, pst__gather_state_name(copy->gathered.state));
    return pst__flat_give_up(flat, pst__gathered_wait(&flat->carrier, &copy->gathered));
}

/* After the last use. */
static pst_status retire(pst_flat *flat, pst__flat_copy *copy) {
    if (copy->is_resident) return PST_OK;
    if (copy->gathered.is_stale || !is_near(flat, (uint32_t)(copy - flat->copies)))
        return drop(flat, copy);
    count_ahead(flat, copy, 1);
    return PST_OK;
}

pst_status pst_flat_release(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    if (copy->gathered.uses == 0)
        return pst__flat_fail(flat, PST_ESTATE, "parameter '%s' is released more often than used",
                              flat->parameters[copy->parameter].name);
    if (--copy->gathered.uses > 0) return PST_OK;
    return retire(flat, copy);
}

size_t pst_flat_uses(const pst_flat *flat, uint32_t copy) {
    return copy < flat->copy_count ? flat->copies[copy].gathered.uses : 0;
}

pst_status pst_flat_end_uses(pst_flat *flat) {
    pst_status status = flat == NULL ? PST_EINVAL : PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        flat->copies[i].gathered.uses = 0;
        if (!flat->copies[i].is_resident) status = drop(flat, &flat->copies[i]);
    }
    return status;
}

pst_status pst_flat_set_resident(pst_flat *flat, uint32_t index, int resident) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    if (resident) count_ahead(flat, copy, 0);
    copy->is_resident = resident != 0;
    if (copy->is_resident || copy->gathered.uses > 0 || copy->is_ahead) return PST_OK;
    return drop(flat, copy);
}

pst_status pst_flat_invalidate(pst_flat *flat, uint32_t index) {
    pst_status status = pst__flat_check_copy(flat, index);
    if (status != PST_OK) return status;
    pst__flat_copy *copy = &flat->copies[index];
    copy->gathered.is_stale = 1;
    if (copy->is_resident || copy->gathered.uses > 0) return PST_OK;
    return drop(flat, copy);
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
    const pst__gathered kept =
        copy->gathered; /* the collective is made for the caller's memory instead */
    copy->gathered.lease = (pst_lease){.memory = memory};
    batch.destination = memory;
    status = submit(flat, &batch);
    operation = copy->gathered.gather;
    copy->gathered = kept;
    if (status == PST_OK) status = pst__operation_wait(operation);
    if (status == PST_OK) status = pst_runtime_status(flat->carrier.runtime);
    return pst__flat_give_up(flat, status);
}
