/* The recorded rings as Chrome trace JSON: copied, put in order, arrows paired, and written. */
#include "tracing/json.h"
#include "tracing/state.h"

#include <stdio.h>
#include <string.h>

#define OPEN_SLICES 64

/* What the layout makes of records besides the kinds of ring.h. */
#define RECORD_OVERLAP (PST__RECORD_COUNT + 1u) /* a slice that neither nests nor follows */
#define RECORD_DROPPED (PST__RECORD_COUNT + 2u) /* a flow's end that lies in no slice */

/* ---- in order --------------------------------------------------------------------------- */

/* Records stand by begin; an outer slice before the inner, slices before the rest. */
typedef struct snapshot {
    const pst__heap *heap;
    pst__tape_kind tape; /* that of the recording, or the flight record, and then both */
    pst__moment begin;   /* of the file's times */
    pst__copy *first;    /* tracks that have ended, in that order, then the others by age */
    uint64_t records;    /* of the tapes */
    uint64_t lost;       /* of these, and those that the file has no room for */
} snapshot;

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
static void sort_records(pst__record *records, size_t count,
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
        slice->kind = RECORD_OVERLAP;
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
        flow->kind = RECORD_DROPPED;
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
    sort_records(copy->records, copy->count, before_in_track);
    lay_out(copy->records, copy->count);
}

static unsigned process_of(const pst__trace *trace) {
    return (unsigned)trace->rank + 1;
}

/* Returns the end of the list, which has grown by this copy; NULL when there was no memory for it.
 */
static pst__copy **append(pst__copy **end, pst__copy *copy) {
    if (copy == NULL) return NULL;
    *end = copy;
    return &copy->next;
}

static pst__copy **append_past(pst__copy **end, const snapshot *snapshot, const pst__tape *tape) {
    for (const pst__copy *past = tape->past.first; past != NULL && end != NULL; past = past->next)
        end = append(end, pst__copy_of_copy(snapshot->heap, past));
    return end;
}

/* The trace's lock is held. */
static pst_status copy_tracks(const pst__trace *trace, snapshot *snapshot) {
    pst__copy **end = &snapshot->first;
    for (unsigned kind = snapshot->tape; kind < PST__TAPES && end != NULL; ++kind)
        end = append_past(end, snapshot, &trace->tapes[kind]);
    for (const pst__track *track = trace->tracks; track != NULL && end != NULL; track = track->next)
        end = append(end, pst__copy_of_track(track, snapshot->tape, PST__TAPE_RECORDING));
    return end == NULL ? PST_ENOMEM : PST_OK;
}

static void free_snapshot(snapshot *snapshot) {
    while (snapshot->first != NULL) {
        pst__copy *copy = snapshot->first;
        snapshot->first = copy->next;
        pst__copy_free(snapshot->heap, copy);
    }
}

/* Viewers put a thread whose number is its process's above all others, and the others in the order
 * of their numbers: so lanes come first, and none has the process's. */
static void number_tracks(const snapshot *snapshot, unsigned process) {
    unsigned next = process + 1;
    for (int kind = PST__TRACK_LANE; kind <= PST__TRACK_WORKER; ++kind)
        for (pst__copy *copy = snapshot->first; copy != NULL; copy = copy->next)
            if (copy->kind == (pst__track_kind)kind) copy->index = next++;
}

static void count_records(const pst__trace *trace, snapshot *snapshot) {
    for (unsigned kind = snapshot->tape; kind < PST__TAPES; ++kind) {
        uint64_t lost;
        snapshot->records += pst__tape_count(trace, kind, &lost);
        snapshot->lost += lost;
    }
}

/* PST_ENOMEM leaves nothing to destroy. */
static pst_status take_snapshot(pst__trace *trace, pst__tape_kind tape, uint64_t most_bytes,
                                snapshot *taken) {
    *taken = (snapshot){.heap = &trace->heap, .tape = tape};
    (void)pthread_mutex_lock(&trace->lock);
    const pst_status status = copy_tracks(trace, taken);
    taken->begin = tape == PST__TAPE_RECORDING ? trace->begin : trace->made;
    count_records(trace, taken);
    (void)pthread_mutex_unlock(&trace->lock);
    if (status != PST_OK) free_snapshot(taken);
    uint64_t begin = taken->begin.now;
    if (most_bytes != 0) taken->lost += pst__newest(taken->first, most_bytes, &begin);
    number_tracks(taken, process_of(trace));
    for (pst__copy *copy = taken->first; copy != NULL; copy = copy->next)
        put_in_order(copy, begin);
    return status;
}

/* ---- arrows: the recorded ends of edges, in pairs --------------------------------------- */

typedef struct flow_end {
    unsigned track; /* index */
    uint64_t time;
} flow_end;

typedef struct flow {
    flow_end from, to;
} flow;

typedef struct flows {
    flow *pairs;
    size_t count, room;
} flows;

static int is_flow(const pst__record *record) {
    return record->kind == PST__RECORD_FLOW_START || record->kind == PST__RECORD_FLOW_END;
}

static size_t count_ends(const snapshot *snapshot) {
    size_t count = 0;
    for (const pst__copy *copy = snapshot->first; copy != NULL; copy = copy->next)
        for (size_t i = 0; i < copy->count; ++i)
            count += (size_t)is_flow(&copy->records[i]);
    return count;
}

/* Copies the ends; a copy's `bytes` is the index of its track. */
static void gather_ends(const snapshot *snapshot, pst__record *ends) {
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

static flow_end end_of(const pst__record *record) {
    return (flow_end){(unsigned)record->bytes, record->begin};
}

static void pair_ends(const pst__record *ends, size_t count, flows *flows) {
    const pst__record *start = NULL;
    for (const pst__record *end = ends; end != ends + count; ++end) {
        if (end->kind == PST__RECORD_FLOW_START)
            start = end;
        else if (start != NULL && start->ticket == end->ticket)
            flows->pairs[flows->count++] = (flow){end_of(start), end_of(end)};
    }
}

/* Pairs each end with the latest start of its id; an end without one is left out, and so is a start
 * that nobody ends. PST_ENOMEM leaves nothing to free. */
static pst_status pair_flows(const snapshot *snapshot, flows *found) {
    *found = (flows){0};
    size_t count = count_ends(snapshot);
    if (count == 0) return PST_OK;
    pst__record *ends = pst__heap_alloc(snapshot->heap, count * sizeof *ends);
    if (ends == NULL) return PST_ENOMEM;
    found->pairs = pst__heap_alloc(snapshot->heap, count * sizeof *found->pairs);
    if (found->pairs != NULL) {
        found->room = count;
        gather_ends(snapshot, ends);
        sort_records(ends, count, before_in_flow);
        pair_ends(ends, count, found);
    }
    pst__heap_free(snapshot->heap, ends, count * sizeof *ends);
    return found->pairs == NULL ? PST_ENOMEM : PST_OK;
}

/* ---- the file --------------------------------------------------------------------------- */

/* One export. Ids of arrows and of overlapping slices count from the rank's own range, so that
 * files of several ranks can be merged; they stay below 2^53, which is where JSON numbers end. */
typedef struct chrome {
    const pst__trace *trace;
    const snapshot *snapshot;
    const flows *flows;
    const pst__trace_head *head; /* NULL: nothing more */
    pst__json json;
    uint64_t next_id;
    const char *separator; /* before the next event */
} chrome;

static const char *const slice_category[] = {"task", "host"}; /* by pst__track_kind */

static void raw(chrome *chrome, const char *text) {
    pst__json_raw(&chrome->json, text);
}

/* `"name":`, after `before`; the value follows. */
static void key(chrome *chrome, const char *before, const char *name) {
    raw(chrome, before);
    pst__json_string(&chrome->json, name);
    raw(chrome, ":");
}

static void number(chrome *chrome, const char *before, const char *name, uint64_t value) {
    key(chrome, before, name);
    pst__json_unsigned(&chrome->json, value);
}

static void text(chrome *chrome, const char *before, const char *name, const char *value) {
    key(chrome, before, name);
    pst__json_string(&chrome->json, value);
}

static void moment(chrome *chrome, const char *name, uint64_t nanoseconds) {
    key(chrome, ",", name);
    pst__json_microseconds(&chrome->json, nanoseconds);
}

/* The part that all events share; the caller closes the brace. */
static void begin_event(chrome *chrome, const char *phase, const char *name, unsigned track) {
    raw(chrome, chrome->separator);
    chrome->separator = ",\n";
    text(chrome, "{", "ph", phase);
    text(chrome, ",", "name", name);
    number(chrome, ",", "pid", process_of(chrome->trace));
    number(chrome, ",", "tid", track);
}

static void event_time(chrome *chrome, uint64_t time) {
    moment(chrome, "ts", time - chrome->snapshot->begin.now);
}

static void metadata(chrome *chrome, const char *kind, unsigned track, const char *name,
                     const char *value) {
    begin_event(chrome, "M", kind, track);
    text(chrome, ",\"args\":{", name, value);
    raw(chrome, "}}");
}

static void metadata_order(chrome *chrome, const char *kind, unsigned track, uint64_t order) {
    begin_event(chrome, "M", kind, track);
    number(chrome, ",\"args\":{", "sort_index", order);
    raw(chrome, "}}");
}

static void put_process(chrome *chrome) {
    const unsigned first = process_of(chrome->trace) + 1;
    char text[64];
    (void)snprintf(text, sizeof text, "rank %d", chrome->trace->rank);
    metadata(chrome, "process_name", first, "name", text);
    metadata_order(chrome, "process_sort_index", first, (uint64_t)chrome->trace->rank);
    if (chrome->snapshot->lost == 0) return;
    (void)snprintf(text, sizeof text, "oldest dropped, %llu records",
                   (unsigned long long)chrome->snapshot->lost);
    metadata(chrome, "process_labels", first, "labels", text);
}

static void put_track(chrome *chrome, const pst__copy *track) {
    metadata(chrome, "thread_name", track->index, "name", track->name);
    metadata_order(chrome, "thread_sort_index", track->index, track->index);
}

/* PyTorch's profiler's names for what a collective is. */
static void collective_args(chrome *chrome, const pst__record *slice) {
    text(chrome, "", "Collective name", slice->name);
    number(chrome, ",", "Seq", slice->ticket);
    number(chrome, ",", "Rank", (uint64_t)chrome->trace->rank);
    if (slice->path != NULL) text(chrome, ",", "path", slice->path);
    raw(chrome, ",");
}

/* A ticket makes a lane's task a collective; a thread's slice only has to do with one. */
static void slice_args(chrome *chrome, const pst__copy *track, const pst__record *slice) {
    if (slice->ticket == 0 && slice->bytes == 0) return;
    raw(chrome, ",\"args\":{");
    if (slice->ticket != 0) {
        if (track->kind == PST__TRACK_LANE) collective_args(chrome, slice);
        number(chrome, "", "ticket", slice->ticket);
    }
    if (slice->bytes != 0) number(chrome, slice->ticket != 0 ? "," : "", "bytes", slice->bytes);
    raw(chrome, "}");
}

static void put_slice(chrome *chrome, const pst__copy *track, const pst__record *slice) {
    begin_event(chrome, "X", slice->name, track->index);
    text(chrome, ",", "cat", slice_category[track->kind]);
    event_time(chrome, slice->begin);
    moment(chrome, "dur", slice->end - slice->begin);
    slice_args(chrome, track, slice);
    raw(chrome, "}");
}

static void overlap_end(chrome *chrome, const pst__copy *track, const pst__record *slice,
                        const char *phase, uint64_t time) {
    begin_event(chrome, phase, slice->name, track->index);
    text(chrome, ",", "cat", slice_category[track->kind]);
    number(chrome, ",", "id", chrome->next_id);
    event_time(chrome, time);
}

static void put_overlap(chrome *chrome, const pst__copy *track, const pst__record *slice) {
    overlap_end(chrome, track, slice, "b", slice->begin);
    slice_args(chrome, track, slice);
    raw(chrome, "}");
    overlap_end(chrome, track, slice, "e", slice->end);
    raw(chrome, "}");
    ++chrome->next_id;
}

static void put_count(chrome *chrome, const pst__copy *track, const pst__record *count) {
    begin_event(chrome, "C", count->name, track->index);
    event_time(chrome, count->begin);
    raw(chrome, ",\"args\":{\"value\":");
    pst__json_signed(&chrome->json, (int64_t)count->bytes);
    raw(chrome, "}}");
}

static void put_records(chrome *chrome, const pst__copy *track) {
    for (size_t i = 0; i < track->count; ++i) {
        const pst__record *record = &track->records[i];
        if (record->kind == PST__RECORD_SLICE) put_slice(chrome, track, record);
        if (record->kind == RECORD_OVERLAP) put_overlap(chrome, track, record);
        if (record->kind == PST__RECORD_COUNT) put_count(chrome, track, record);
    }
}

static void put_flow_end(chrome *chrome, const char *phase, flow_end end) {
    begin_event(chrome, phase, "edge", end.track);
    text(chrome, ",", "cat", "edge");
    number(chrome, ",", "id", chrome->next_id);
    event_time(chrome, end.time);
}

static void put_flow(chrome *chrome, const flow *flow) {
    put_flow_end(chrome, "s", flow->from);
    raw(chrome, "}");
    put_flow_end(chrome, "f", flow->to);
    raw(chrome, ",\"bp\":\"e\"}");
    ++chrome->next_id;
}

static void put_header(chrome *chrome) {
    const pst__trace *trace = chrome->trace;
    const snapshot *snapshot = chrome->snapshot;
    number(chrome, "{", "schemaVersion", 1);
    /* With a space, by which other tools find the rank. */
    raw(chrome, ",\n\"distributedInfo\":{\"backend\":\"penstock\",\"rank\": ");
    pst__json_unsigned(&chrome->json, (uint64_t)trace->rank);
    number(chrome, ",", "world_size", (uint64_t)trace->world_size);
    number(chrome, "},\n", "baseTimeNanoseconds", snapshot->begin.real);
    number(chrome, ",\n\"penstock\":{", "records", snapshot->records);
    number(chrome, ",", "overwritten", snapshot->lost);
    if (chrome->head != NULL) chrome->head->write(chrome->head->context, &chrome->json);
    raw(chrome, "},\n\"displayTimeUnit\":\"ns\",\n\"traceEvents\":[\n");
}

/* Arrows come last: at equal times a viewer keeps the file's order, and the slice has to be open.
 */
static void put_all(chrome *chrome) {
    const snapshot *snapshot = chrome->snapshot;
    const flows *flows = chrome->flows;
    put_header(chrome);
    put_process(chrome);
    for (const pst__copy *track = snapshot->first; track != NULL; track = track->next)
        put_track(chrome, track);
    for (const pst__copy *track = snapshot->first; track != NULL; track = track->next)
        put_records(chrome, track);
    for (size_t i = 0; i < flows->count; ++i)
        put_flow(chrome, &flows->pairs[i]);
    raw(chrome, "\n]}\n");
}

/* `error`: see pst__trace_dump. */
static pst_status write_file(chrome *chrome, const char *path, int *error) {
    chrome->separator = "";
    chrome->next_id = ((uint64_t)chrome->trace->rank << 32) + 1;
    pst_status status = pst__json_open(&chrome->json, &chrome->trace->heap, path);
    if (status == PST_OK) {
        put_all(chrome);
        status = pst__json_close(&chrome->json);
    }
    *error = chrome->json.error;
    return status;
}

static pst_status write_tape(pst__trace *trace, pst__tape_kind tape, const char *path,
                             uint64_t most_bytes, const pst__trace_head *head, int *error) {
    snapshot snapshot;
    flows flows;
    pst_status status = take_snapshot(trace, tape, most_bytes, &snapshot);
    if (status != PST_OK) return status;
    status = pair_flows(&snapshot, &flows);
    if (status == PST_OK) {
        chrome chrome = {.trace = trace, .snapshot = &snapshot, .flows = &flows, .head = head};
        status = write_file(&chrome, path, error);
        pst__heap_free(&trace->heap, flows.pairs, flows.room * sizeof *flows.pairs);
    }
    free_snapshot(&snapshot);
    return status;
}

pst_status pst__trace_dump(pst__trace *trace, const char *path, uint64_t most_bytes,
                           const pst__trace_head *head, int *error) {
    return write_tape(trace, PST__TAPE_FLIGHT, path, most_bytes, head, error);
}

pst_status pst__trace_write(pst__trace *trace, const char *path, uint64_t most_bytes) {
    char reason[128];
    int error = 0;
    const pst_status status =
        write_tape(trace, PST__TAPE_RECORDING, path, most_bytes, NULL, &error);
    if (status == PST_EIO)
        return pst__fail(trace->error, PST_EIO,
                         "rank %d: the trace cannot be written to %s: %s; choose another path",
                         trace->rank, path, strerror_r(error, reason, sizeof reason));
    if (status != PST_ENOMEM) return status;
    return pst__fail(trace->error, PST_ENOMEM,
                     "rank %d: no memory to write the trace to %s; record fewer events",
                     trace->rank, path);
}
