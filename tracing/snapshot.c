#include "tracing/snapshot.h"

#define OPEN_SLICES 64

static void sift_down(pst__record *records, size_t root, size_t count,
                      int (*before)(const pst__record *, const pst__record *)) {
    pst__record moved = records[root];
    for (size_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
        if (child + 1 < count && before(&records[child], &records[child + 1])) ++child;
        if (!before(&moved, &records[child])) break;
        records[root] = records[child];
        root = child;
    }
    records[root] = moved;
}

/* Heap sort. */
void pst__records_sort(pst__record *records, size_t count,
                       int (*before)(const pst__record *, const pst__record *)) {
    for (size_t root = count / 2; root-- > 0;)
        sift_down(records, root, count, before);
    for (size_t end = count; end-- > 1;) {
        pst__record largest = records[0];
        records[0] = records[end];
        records[end] = largest;
        sift_down(records, 0, end, before);
    }
}

static int before_in_track(const pst__record *a, const pst__record *b) {
    if (a->begin != b->begin) return a->begin < b->begin;
    int a_is_slice = a->kind == PST__RECORD_SLICE, b_is_slice = b->kind == PST__RECORD_SLICE;
    if (a_is_slice != b_is_slice) return a_is_slice;
    return a->end > b->end;
}

/* Records of before this recording go: a thread that looked at pst__trace_on long ago, or a task
 * that ended before. What only began before is cut. */
static size_t cut_at_begin(pst__record *records, size_t count, uint64_t begin) {
    size_t kept = 0;
    for (size_t i = 0; i < count; ++i) {
        pst__record record = records[i];
        if (record.end < record.begin) record.end = record.begin;
        if (record.end < begin) continue;
        if (record.begin < begin) record.begin = begin;
        records[kept++] = record;
    }
    return kept;
}

/* Walks one track in order: which slices are open, and how far they reach. */
typedef struct walk {
    uint64_t ends[OPEN_SLICES]; /* of the open slices; the innermost is the last */
    size_t depth;
    uint64_t reach, reach_begin; /* the slice that ends last */
} walk;

static void walk_slice(walk *walk, pst__record *slice) {
    while (walk->depth > 0 && walk->ends[walk->depth - 1] <= slice->begin)
        --walk->depth;
    int overlaps = walk->depth > 0 && walk->ends[walk->depth - 1] < slice->end;
    if (overlaps || walk->depth == OPEN_SLICES) {
        slice->kind = PST__RECORD_OVERLAP;
        return;
    }
    walk->ends[walk->depth++] = slice->end;
    if (slice->end < walk->reach) return;
    walk->reach = slice->end;
    walk->reach_begin = slice->begin;
}

/* Viewers bind an arrow to the innermost slice that is open at its time. At a slice's very end none
 * is, so such a time moves back into the slice. */
static void walk_flow(walk *walk, pst__record *flow) {
    if (walk->reach < flow->begin || walk->reach == 0)
        flow->kind = PST__RECORD_DROPPED;
    else if (walk->reach == flow->begin && walk->reach_begin < flow->begin)
        --flow->begin;
}

static void lay_out(pst__record *records, size_t count) {
    walk walk = {.depth = 0};
    for (size_t i = 0; i < count; ++i) {
        if (records[i].kind == PST__RECORD_SLICE)
            walk_slice(&walk, &records[i]);
        else if (records[i].kind != PST__RECORD_COUNT)
            walk_flow(&walk, &records[i]);
    }
}

static pst_status copy_track(const pst__trace *trace, pst__track_copy *copy) {
    uint64_t overwritten;
    uint64_t count = pst__ring_count(&copy->track->ring, &overwritten);
    copy->room = (size_t)(count - overwritten);
    if (copy->room == 0) return PST_OK;
    copy->records = pst__heap_alloc(&trace->heap, copy->room * sizeof *copy->records);
    if (copy->records == NULL) return PST_ENOMEM;
    size_t copied = pst__ring_copy(&copy->track->ring, copy->records, copy->room);
    copy->count = cut_at_begin(copy->records, copied, trace->begin);
    pst__records_sort(copy->records, copy->count, before_in_track);
    lay_out(copy->records, copy->count);
    return PST_OK;
}

/* Tracks come newest first and have indices 1, 2, ...; later ones are not in this list. */
static pst_status copy_tracks(const pst__trace *trace, const pst__track *newest,
                              pst__snapshot *snapshot) {
    pst_status status = PST_OK;
    for (const pst__track *track = newest; track != NULL; track = track->next)
        snapshot->tracks[track->index - 1].track = track;
    for (size_t i = 0; i < snapshot->track_count && status == PST_OK; ++i)
        status = copy_track(trace, &snapshot->tracks[i]);
    return status;
}

pst_status pst__snapshot_create(const pst__trace *trace, pst__snapshot *snapshot) {
    const pst__track *newest = pst__trace_tracks(trace);
    *snapshot = (pst__snapshot){.heap = &trace->heap};
    snapshot->track_count = newest == NULL ? 0 : newest->index;
    snapshot->tracks =
        pst__heap_alloc(snapshot->heap, snapshot->track_count * sizeof *snapshot->tracks);
    if (snapshot->tracks == NULL) return PST_ENOMEM;
    pst_status status = copy_tracks(trace, newest, snapshot);
    if (status != PST_OK) pst__snapshot_destroy(snapshot);
    return status;
}

void pst__snapshot_destroy(pst__snapshot *snapshot) {
    for (size_t i = 0; i < snapshot->track_count; ++i) {
        pst__track_copy *copy = &snapshot->tracks[i];
        pst__heap_free(snapshot->heap, copy->records, copy->room * sizeof *copy->records);
    }
    pst__heap_free(snapshot->heap, snapshot->tracks,
                   snapshot->track_count * sizeof *snapshot->tracks);
}
