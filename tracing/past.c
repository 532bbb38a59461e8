#include "tracing/past.h"

#include "tracing/state.h"

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
