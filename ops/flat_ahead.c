/* What is gathered ahead: what followed a use the last time follows it again. The history is the
 * order of uses, which is the same on all ranks, and so is what is read out of it. */
#include "ops/flat.h"

#include <string.h>

pst_status pst__flat_history_alloc(pst_flat *flat) {
    pst__flat_history *history = &flat->history;
    history->uses = pst__heap_alloc(flat->engine->heap, PST__FLAT_HISTORY * sizeof *history->uses);
    return history->uses == NULL
               ? pst__flat_fail(flat, PST_ENOMEM, "%s", "no memory for what was used")
               : PST_OK;
}

void pst__flat_history_free(pst_flat *flat) {
    if (flat->engine == NULL) return;
    pst__heap_free(flat->engine->heap, flat->history.uses,
                   PST__FLAT_HISTORY * sizeof *flat->history.uses);
}

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
        if (copy == wanted || !pst__flat_is_large(flat, copy)) continue;
        if (copy->state != PST__SHARDED || is_in(flat->batch, count, (uint32_t)i)) return 0;
    }
    return 1;
}

int pst__flat_has_room(const pst_flat *flat, const pst__flat_copy *copy, size_t count,
                       size_t taken) {
    const size_t room = flat->options.ahead_bytes;
    if (copy->is_resident) return 1;
    if (pst__flat_is_large(flat, copy)) return has_place(flat, copy, count);
    return taken <= room && pst__flat_bytes(flat, copy) <= room - taken;
}

/* As many of the coming copies as there is room for, in the order of their uses. */
static pst_status collect(pst_flat *flat, size_t *count) {
    const pst__flat_history *history = &flat->history;
    size_t taken = flat->ahead_bytes;
    *count = 0;
    for (size_t i = history->next; i < history->count; i++) {
        uint32_t index = history->uses[i];
        if (index == PST__FLAT_UPDATE) break;
        const pst__flat_copy *copy = &flat->copies[index];
        if (is_away(flat, copy)) continue;
        if (pst__flat_is_current(copy) || is_in(flat->batch, *count, index)) continue;
        if (!pst__flat_has_room(flat, copy, *count, taken)) break;
        taken += pst__flat_room_of(flat, copy);
        pst_status status = pst__heap_grow(flat->engine->heap, (void **)&flat->batch,
                                           &flat->batch_capacity, *count + 1, sizeof *flat->batch);
        if (status != PST_OK) return status;
        flat->batch[(*count)++] = index;
    }
    return PST_OK;
}

/* Only when half of the room is free, so that what goes out goes out together. */
pst_status pst__flat_gather_ahead(pst_flat *flat) {
    size_t count;
    if (flat->ahead_bytes > flat->options.ahead_bytes / 2) return PST_OK;
    pst_status status = collect(flat, &count);
    if (status == PST_OK && count > 0) status = pst__flat_issue(flat, flat->batch, count);
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        pst__flat_copy *copy = &flat->copies[flat->batch[i]];
        if (copy->is_resident) continue;
        pst__flat_count_ahead(flat, copy, 1);
        flat->stats.ahead++;
    }
    return status;
}

int pst__flat_is_near(const pst_flat *flat, uint32_t index) {
    const pst__flat_history *history = &flat->history;
    size_t bytes = flat->ahead_bytes;
    for (size_t i = history->next; i < history->count; i++) {
        uint32_t use = history->uses[i];
        if (use == PST__FLAT_UPDATE) return 0;
        const pst__flat_copy *copy = &flat->copies[use];
        if (use == index) return pst__flat_room_of(flat, copy) + bytes <= flat->options.ahead_bytes;
        if (!pst__flat_is_current(copy)) bytes += pst__flat_room_of(flat, copy);
        if (bytes > flat->options.ahead_bytes) return 0;
    }
    return 0;
}

pst_status pst__flat_drop_ahead(pst_flat *flat) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < flat->copy_count; i++) {
        pst__flat_copy *copy = &flat->copies[i];
        if (!copy->is_ahead || copy->uses > 0) continue;
        flat->stats.unused++;
        status = pst__flat_drop(flat, copy);
    }
    return status;
}
