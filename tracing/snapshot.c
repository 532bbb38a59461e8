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

static void put_in_order(pst__copy *copy, uint64_t begin) {
    copy->count = cut_at_begin(copy->records, copy->count, begin);
    pst__records_sort(copy->records, copy->count, before_in_track);
    lay_out(copy->records, copy->count);
}

/* Returns the end of the list, which has grown by this copy; NULL when there was no memory for it.
 */
static pst__copy **append(pst__copy **end, pst__copy *copy) {
    if (copy == NULL) return NULL;
    *end = copy;
    return &copy->next;
}

/* The trace's lock is held. */
static pst_status copy_tracks(const pst__trace *trace, pst__snapshot *snapshot) {
    pst__copy **end = &snapshot->first;
    for (const pst__copy *past = trace->past.first; past != NULL && end != NULL; past = past->next)
        end = append(end, pst__copy_of_copy(snapshot->heap, past));
    for (const pst__track *track = trace->tracks; track != NULL && end != NULL; track = track->next)
        end = append(end, pst__copy_of_track(track));
    return end == NULL ? PST_ENOMEM : PST_OK;
}

pst_status pst__snapshot_create(pst__trace *trace, pst__snapshot *snapshot) {
    *snapshot = (pst__snapshot){.heap = &trace->heap};
    (void)pthread_mutex_lock(&trace->lock);
    const pst_status status = copy_tracks(trace, snapshot);
    const uint64_t begin = trace->begin;
    (void)pthread_mutex_unlock(&trace->lock);
    if (status != PST_OK) pst__snapshot_destroy(snapshot);
    for (pst__copy *copy = snapshot->first; copy != NULL; copy = copy->next)
        put_in_order(copy, begin);
    return status;
}

void pst__snapshot_destroy(pst__snapshot *snapshot) {
    while (snapshot->first != NULL) {
        pst__copy *copy = snapshot->first;
        snapshot->first = copy->next;
        pst__copy_free(snapshot->heap, copy);
    }
}
