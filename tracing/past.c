/* Copies of what tracks hold, and those that tracks leave when they end. */
#include "tracing/state.h"

#include <string.h>

static pst__copy *make(const pst__heap *heap, const char *name, size_t room) {
    const size_t text = strlen(name) + 1;
    const size_t before_text = sizeof(pst__copy) + room * sizeof(pst__record);
    pst__copy *copy = pst__heap_alloc(heap, before_text + text);
    if (copy == NULL) return NULL;
    copy->bytes = before_text + text;
    copy->name = memcpy((char *)copy + before_text, name, text);
    return copy;
}

static size_t held(const pst__ring *ring) {
    uint64_t overwritten;
    const uint64_t count = pst__ring_count(ring, &overwritten);
    return (size_t)(count - overwritten);
}

pst__copy *pst__copy_of_track(const pst__track *track, pst__tape_kind first, pst__tape_kind last) {
    size_t room[PST__TAPES], all = 0;
    for (unsigned kind = first; kind <= last; ++kind)
        all += room[kind] = held(&track->rings[kind]);
    pst__copy *copy = make(&track->trace->heap, track->name, all);
    if (copy == NULL) return NULL;
    copy->index = track->index;
    copy->kind = track->kind;
    for (unsigned kind = first; kind <= last; ++kind)
        copy->count += pst__ring_copy(&track->rings[kind], copy->records + copy->count, room[kind]);
    return copy;
}

pst__copy *pst__copy_of_copy(const pst__heap *heap, const pst__copy *copy) {
    pst__copy *made = make(heap, copy->name, copy->count);
    if (made == NULL) return NULL;
    made->index = copy->index;
    made->kind = copy->kind;
    made->count = copy->count;
    memcpy(made->records, copy->records, copy->count * sizeof *copy->records);
    return made;
}

void pst__copy_free(const pst__heap *heap, pst__copy *copy) {
    pst__heap_free(heap, copy, copy->bytes);
}

/* ---- the past --------------------------------------------------------------------------- */

static void append(pst__past *past, pst__copy *copy) {
    if (past->first == NULL) past->end = &past->first;
    *past->end = copy;
    past->end = &copy->next;
    past->tracks++;
    past->records += copy->count;
}

/* Returns how many records went. */
static uint64_t drop_first(const pst__heap *heap, pst__past *past) {
    pst__copy *copy = past->first;
    const size_t count = copy->count;
    past->first = copy->next;
    past->tracks--;
    past->records -= count;
    pst__copy_free(heap, copy);
    return count;
}

void pst__past_keep(const pst__track *track, pst__tape_kind kind) {
    const pst__heap *heap = &track->trace->heap;
    pst__tape *tape = &track->trace->tapes[kind];
    pst__past *past = &tape->past;
    uint64_t overwritten;
    uint64_t lost = pst__ring_count(&track->rings[kind], &overwritten);
    if (lost == 0) return;
    pst__copy *copy = pst__copy_of_track(track, kind, kind);
    if (copy != NULL) {
        append(past, copy);
        lost -= copy->count;
    }
    while (past->tracks > PST__PAST_TRACKS || past->records > PST__PAST_RINGS * tape->capacity)
        lost += drop_first(heap, past);
    /* Relaxed: a number to show; partner: pst__tape_count. */
    (void)pst__add_relaxed(&tape->lost, lost);
}

void pst__past_forget(const pst__heap *heap, pst__past *past) {
    while (past->first != NULL)
        (void)drop_first(heap, past);
}

uint64_t pst__tape_count(const pst__trace *trace, pst__tape_kind kind, uint64_t *lost) {
    const pst__tape *tape = &trace->tapes[kind];
    /* Relaxed: a number to show; partners: pst__track_of_thread, pst__past_keep. */
    *lost = pst__load_relaxed(&tape->lost);
    uint64_t records = *lost + tape->past.records;
    for (const pst__track *track = trace->tracks; track != NULL; track = track->next) {
        uint64_t gone;
        records += pst__ring_count(&track->rings[kind], &gone);
        *lost += gone;
    }
    return records;
}
