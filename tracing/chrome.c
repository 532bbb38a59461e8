#include "tracing/chrome.h"

#include "tracing/flow.h"
#include "tracing/json.h"
#include "tracing/snapshot.h"

#include <string.h>

/* One export. Ids of arrows and of overlapping slices count from the rank's own range, so that
 * files of several ranks can be merged; they stay below 2^53, which is where JSON numbers end. */
typedef struct chrome {
    pst__trace *trace;
    pst__json json;
    uint64_t next_id;
    const char *separator; /* before the next event */
} chrome;

static const char *const slice_category[] = {"task", "host"}; /* by pst__track_kind */

static void raw(chrome *chrome, const char *text) {
    pst__json_raw(&chrome->json, text);
}

/* `"key":value`, after `before`. */
static void number(chrome *chrome, const char *before, const char *key, uint64_t value) {
    raw(chrome, before);
    pst__json_string(&chrome->json, key);
    raw(chrome, ":");
    pst__json_unsigned(&chrome->json, value);
}

static void text(chrome *chrome, const char *before, const char *key, const char *value) {
    raw(chrome, before);
    pst__json_string(&chrome->json, key);
    raw(chrome, ":");
    pst__json_string(&chrome->json, value);
}

static void moment(chrome *chrome, const char *key, uint64_t nanoseconds) {
    raw(chrome, ",");
    pst__json_string(&chrome->json, key);
    raw(chrome, ":");
    pst__json_microseconds(&chrome->json, nanoseconds);
}

/* The part that all events share; the caller closes the brace. */
static void begin_event(chrome *chrome, const char *phase, const char *name, unsigned track) {
    raw(chrome, chrome->separator);
    chrome->separator = ",\n";
    text(chrome, "{", "ph", phase);
    text(chrome, ",", "name", name);
    number(chrome, ",", "pid", (uint64_t)chrome->trace->rank + 1);
    number(chrome, ",", "tid", track);
}

static void event_time(chrome *chrome, uint64_t time) {
    moment(chrome, "ts", time - chrome->trace->begin);
}

static void metadata_name(chrome *chrome, const char *kind, unsigned track, const char *name) {
    begin_event(chrome, "M", kind, track);
    text(chrome, ",\"args\":{", "name", name);
    raw(chrome, "}}");
}

static void metadata_order(chrome *chrome, const char *kind, unsigned track, uint64_t order) {
    begin_event(chrome, "M", kind, track);
    number(chrome, ",\"args\":{", "sort_index", order);
    raw(chrome, "}}");
}

static void put_process(chrome *chrome) {
    uint64_t rank = (uint64_t)chrome->trace->rank;
    begin_event(chrome, "M", "process_name", 1);
    raw(chrome, ",\"args\":{\"name\":\"rank ");
    pst__json_unsigned(&chrome->json, rank);
    raw(chrome, "\"}}");
    metadata_order(chrome, "process_sort_index", 1, rank);
}

/* Lanes stand above threads. */
static void put_track(chrome *chrome, const pst__copy *track) {
    metadata_name(chrome, "thread_name", track->index, track->name);
    uint64_t order = (uint64_t)track->kind * 1000000 + track->index;
    metadata_order(chrome, "thread_sort_index", track->index, order);
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
        if (record->kind == PST__RECORD_OVERLAP) put_overlap(chrome, track, record);
        if (record->kind == PST__RECORD_COUNT) put_count(chrome, track, record);
    }
}

static void put_flow_end(chrome *chrome, const char *phase, pst__flow_end end) {
    begin_event(chrome, phase, "edge", end.track);
    text(chrome, ",", "cat", "edge");
    number(chrome, ",", "id", chrome->next_id);
    event_time(chrome, end.time);
}

static void put_flow(chrome *chrome, const pst__flow *flow) {
    put_flow_end(chrome, "s", flow->from);
    raw(chrome, "}");
    put_flow_end(chrome, "f", flow->to);
    raw(chrome, ",\"bp\":\"e\"}");
    ++chrome->next_id;
}

static void put_header(chrome *chrome) {
    pst__trace *trace = chrome->trace;
    uint64_t records, overwritten;
    pst__trace_get_stats(trace, &records, &overwritten);
    number(chrome, "{", "schemaVersion", 1);
    number(chrome, ",\n\"distributedInfo\":{\"backend\":\"penstock\",", "rank",
           (uint64_t)trace->rank);
    number(chrome, ",", "world_size", (uint64_t)trace->world_size);
    number(chrome, "},\n", "baseTimeNanoseconds", trace->begin_real);
    number(chrome, ",\n\"penstock\":{", "records", records);
    number(chrome, ",", "overwritten", overwritten);
    raw(chrome, "},\n\"displayTimeUnit\":\"ns\",\n\"traceEvents\":[\n");
}

/* Arrows come last: at equal times a viewer keeps the file's order, and the slice has to be open.
 */
static void put_all(chrome *chrome, const pst__snapshot *snapshot, const pst__flows *flows) {
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

static pst_status write_file(pst__trace *trace, const pst__snapshot *snapshot,
                             const pst__flows *flows, const char *path) {
    chrome chrome = {.trace = trace, .separator = ""};
    chrome.next_id = ((uint64_t)trace->rank << 32) + 1;
    pst_status status = pst__json_open(&chrome.json, &trace->heap, path);
    if (status == PST_OK) {
        put_all(&chrome, snapshot, flows);
        status = pst__json_close(&chrome.json);
    }
    if (status != PST_EIO) return status;
    char reason[128];
    return pst__fail(trace->error, PST_EIO,
                     "rank %d: the trace cannot be written to %s: %s; choose another path",
                     trace->rank, path, strerror_r(chrome.json.error, reason, sizeof reason));
}

pst_status pst__chrome_write(pst__trace *trace, const char *path) {
    pst__snapshot snapshot;
    pst__flows flows;
    pst_status status = pst__snapshot_create(trace, &snapshot);
    if (status != PST_OK) goto no_memory;
    status = pst__flows_create(&snapshot, &flows);
    if (status == PST_OK) {
        status = write_file(trace, &snapshot, &flows, path);
        pst__flows_destroy(&trace->heap, &flows);
    }
    pst__snapshot_destroy(&snapshot);

no_memory:
    if (status != PST_ENOMEM) return status;
    return pst__fail(trace->error, PST_ENOMEM,
                     "rank %d: no memory to write the trace to %s; record fewer events",
                     trace->rank, path);
}
