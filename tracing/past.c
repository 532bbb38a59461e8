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

pst__copy *pst__copy_of_track(const pst__track *track) {
    uint64_t overwritten;
    const uint64_t count = pst__ring_count(&track->ring, &overwritten);
    const size_t room = (size_t)(count - overwritten);
    pst__copy *copy = make(&track->trace->heap, track->name, room);
    if (copy == NULL) return NULL;
    copy->index = track->index;
    copy->kind = track->kind;
    copy->count = pst__ring_copy(&track->ring, copy->records, room);
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

void pst__past_keep(pst__trace *trace, const pst__track *track) {
    pst__past *past = &trace->past;
    uint64_t overwritten;
    uint64_t lost = pst__ring_count(&track->ring, &overwritten);
    if (lost == 0) return;
    pst__copy *copy = pst__copy_of_track(track);
    if (copy != NULL) {
        append(past, copy);
        lost -= copy->count;
    }
    while (past->tracks > PST__PAST_TRACKS || past->records > PST__PAST_RINGS * trace->capacity)
        lost += drop_first(&trace->heap, past);
    /* Relaxed: a number to show; partner: pst__trace_get_stats. */
    (void)pst__add_relaxed(&trace->lost, lost);
}

void pst__past_forget(pst__trace *trace) {
    while (trace->past.first != NULL)
        (void)drop_first(&trace->heap, &trace->past);
}
