#include "tracing/flow.h"

static int is_flow(const pst__record *record) {
    return record->kind == PST__RECORD_FLOW_START || record->kind == PST__RECORD_FLOW_END;
}

static size_t count_ends(const pst__snapshot *snapshot) {
    size_t count = 0;
    for (const pst__copy *copy = snapshot->first; copy != NULL; copy = copy->next)
        for (size_t i = 0; i < copy->count; ++i)
            count += (size_t)is_flow(&copy->records[i]);
    return count;
}

/* Copies the ends; a copy's `bytes` is the index of its track. */
static void gather_ends(const pst__snapshot *snapshot, pst__record *ends) {
    for (const pst__copy *copy = snapshot->first; copy != NULL; copy = copy->next)
        for (size_t i = 0; i < copy->count; ++i) {
            if (!is_flow(&copy->records[i])) continue;
            *ends = copy->records[i];
            ends++->bytes = copy->index;
        }
}

static int before_in_flow(const pst__record *a, const pst__record *b) {
    if (a->ticket != b->ticket) return a->ticket < b->ticket;
    if (a->begin != b->begin) return a->begin < b->begin;
    return a->kind == PST__RECORD_FLOW_START && b->kind == PST__RECORD_FLOW_END;
}

static pst__flow_end end_of(const pst__record *record) {
    return (pst__flow_end){(unsigned)record->bytes, record->begin};
}

static void pair_ends(const pst__record *ends, size_t count, pst__flows *flows) {
    const pst__record *start = NULL;
    for (const pst__record *end = ends; end != ends + count; ++end) {
        if (end->kind == PST__RECORD_FLOW_START)
            start = end;
        else if (start != NULL && start->ticket == end->ticket)
            flows->pairs[flows->count++] = (pst__flow){end_of(start), end_of(end)};
    }
}

pst_status pst__flows_create(const pst__snapshot *snapshot, pst__flows *flows) {
    *flows = (pst__flows){0};
    size_t count = count_ends(snapshot);
    if (count == 0) return PST_OK;
    pst__record *ends = pst__heap_alloc(snapshot->heap, count * sizeof *ends);
    if (ends == NULL) return PST_ENOMEM;
    flows->pairs = pst__heap_alloc(snapshot->heap, count * sizeof *flows->pairs);
    if (flows->pairs != NULL) {
        flows->room = count;
        gather_ends(snapshot, ends);
        pst__records_sort(ends, count, before_in_flow);
        pair_ends(ends, count, flows);
    }
    pst__heap_free(snapshot->heap, ends, count * sizeof *ends);
    return flows->pairs == NULL ? PST_ENOMEM : PST_OK;
}

void pst__flows_destroy(const pst__heap *heap, pst__flows *flows) {
    pst__heap_free(heap, flows->pairs, flows->room * sizeof *flows->pairs);
}
