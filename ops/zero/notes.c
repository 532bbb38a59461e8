#include "ops/zero/notes.h"

#include <stdlib.h>
#include <string.h>

void pst__notes_begin(pst__notes *notes, int is_on) {
    pst__timings_reset(&notes->timings);
    notes->is_on = is_on;
    notes->is_complete = 0;
    notes->count = notes->share_count = 0;
}

void pst__notes_cut(pst__notes *notes, size_t count) {
    notes->is_complete = 0;
    if (notes->count > count) notes->count = count;
    while (notes->share_count > 0 && notes->shares[notes->share_count - 1].operation >= count)
        notes->share_count--;
}

/* What cannot be noted leaves the pass without times. */
pst__timing *pst__notes_reach(pst__notes *notes, pst__timing *noted, pst_stream *compute) {
    if (!notes->is_on) return NULL;
    pst__timing *timing = noted != NULL ? noted : pst__timings_take(&notes->timings);
    notes->is_on = timing != NULL &&
                   pst__heap_grow(notes->timings.heap, (void **)&notes->reached, &notes->capacity,
                                  notes->count + 1, sizeof(void *)) == PST_OK;
    if (!notes->is_on) return NULL;
    if (noted == NULL) pst__timing_note(timing, PST__BEGAN, compute);
    return notes->reached[notes->count++] = timing;
}

void pst__notes_share(pst__notes *notes, pst__timing *timing, size_t bytes) {
    if (!notes->is_on || timing == NULL) return;
    if (pst__heap_grow(notes->timings.heap, (void **)&notes->shares, &notes->share_capacity,
                       notes->share_count + 1, sizeof *notes->shares) != PST_OK)
        return;
    timing->bytes += bytes;
    notes->shares[notes->share_count++] = (pst__share){notes->count, timing, bytes};
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The device's clock may have been set anew between two readings. */
static uint64_t length_of(pst__timing *timing) {
    const uint64_t began = pst__timing_read(timing, PST__BEGAN);
    const uint64_t ended = pst__timing_read(timing, PST__ENDED);
    return began != 0 && ended > began ? ended - began : 0;
}

/* ---- collectives beside each other ----------------------------------------------------------- */

typedef struct edge {
    uint64_t at;
    pst__timing *timing;
    int is_begin;
} edge;

static int by_time(const void *left, const void *right) {
    const edge *a = left, *b = right;
    if (a->at != b->at) return a->at < b->at ? -1 : 1;
    return a->is_begin - b->is_begin;
}

static size_t find_edges(pst__notes *notes, edge *edges) {
    size_t count = 0;
    for (size_t i = 0; i < notes->timings.count; i++) {
        pst__timing *timing = notes->timings.all[i];
        timing->charged = 0;
        if (timing->bytes == 0 || length_of(timing) == 0) continue;
        edges[count++] = (edge){timing->at[PST__BEGAN], timing, 1};
        edges[count++] = (edge){timing->at[PST__ENDED], timing, 0};
    }
    qsort(edges, count, sizeof *edges, by_time);
    return count;
}

static void charge(const edge *edges, size_t count, pst__timing **running) {
    size_t many = 0;
    uint64_t before = 0;
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < many; k++)
            running[k]->charged += (edges[i].at - before) / many;
        before = edges[i].at;
        if (edges[i].is_begin) {
            running[many++] = edges[i].timing;
            continue;
        }
        size_t place = 0;
        while (running[place] != edges[i].timing)
            place++;
        running[place] = running[--many];
    }
}

static void charge_all(pst__notes *notes) {
    const pst__heap *heap = notes->timings.heap;
    const size_t most = notes->timings.count, edge_bytes = 2 * most * sizeof(edge);
    edge *edges = pst__heap_alloc(heap, edge_bytes);
    pst__timing **running = pst__heap_alloc(heap, most * sizeof(void *));
    if (edges != NULL && running != NULL) charge(edges, find_edges(notes, edges), running);
    pst__heap_free(heap, edges, edge_bytes);
    pst__heap_free(heap, running, most * sizeof(void *));
}

/* A share of what the collective is charged. */
static uint64_t length_of_share(const pst__share *share) {
    const uint64_t all = share->timing->charged;
    if (share->bytes == share->timing->bytes) return all;
    return (uint64_t)((double)all * (double)share->bytes / (double)share->timing->bytes);
}

static void read_reached(pst__notes *notes) {
    const uint64_t origin = notes->count == 0 ? 0 : pst__timing_read(notes->reached[0], PST__BEGAN);
    for (size_t i = 0; i < notes->count && origin != 0; i++) {
        const uint64_t began = pst__timing_read(notes->reached[i], PST__BEGAN);
        /* Counted from 1: 0 is what is not known. */
        notes->times[i].reached_ns = began >= origin ? began - origin + 1 : 0;
        notes->times[i].waited_ns = length_of(notes->reached[i]);
    }
}

void pst__notes_complete(pst__notes *notes, size_t count) {
    notes->is_complete =
        notes->is_on && notes->count == count && count > 0 &&
        pst__heap_grow(notes->timings.heap, (void **)&notes->times, &notes->time_capacity, count,
                       sizeof *notes->times) == PST_OK;
    notes->time_count = notes->is_complete ? count : 0;
}

void pst__notes_read(pst__notes *notes) {
    if (!notes->is_complete) return;
    memset(notes->times, 0, notes->time_count * sizeof *notes->times);
    read_reached(notes);
    charge_all(notes);
    for (size_t i = 0; i < notes->share_count; i++)
        if (notes->shares[i].operation < notes->time_count)
            notes->times[notes->shares[i].operation].collective_ns +=
                length_of_share(&notes->shares[i]);
}

void pst__notes_free(pst__notes *notes) {
    const pst__heap *heap = notes->timings.heap;
    if (heap == NULL) return;
    pst__timings_free(&notes->timings);
    pst__heap_free(heap, notes->reached, notes->capacity * sizeof(void *));
    pst__heap_free(heap, notes->shares, notes->share_capacity * sizeof *notes->shares);
    pst__heap_free(heap, notes->times, notes->time_capacity * sizeof *notes->times);
    *notes = (pst__notes){0};
}
