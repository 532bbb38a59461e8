#include "tracing/copy.h"

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
