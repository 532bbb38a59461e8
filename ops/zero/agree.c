#include "ops/zero/engine.h"

#include "sched/runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- what a rank has, as lines: subject NUL description NUL ---------------------------------- */

typedef struct text_sink {
    char *text; /* NULL: only count */
    size_t used, capacity;
} text_sink;

__attribute__((format(printf, 2, 3))) static void put(text_sink *sink, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *place = sink->text == NULL ? NULL : sink->text + sink->used;
    int written =
        vsnprintf(place, sink->text == NULL ? 0 : sink->capacity - sink->used, format, arguments);
    va_end(arguments);
    sink->used += (size_t)written + 1;
}

static const pst__group *first_group_of(const pst_zero *engine, uint32_t parameter) {
    for (size_t i = 0; i < engine->group_count; i++)
        for (size_t j = 0; j < engine->groups[i].layout.member_count; j++)
            if (engine->groups[i].layout.members[j].parameter == parameter)
                return &engine->groups[i];
    return NULL;
}

static void put_parameter(const pst_zero *engine, uint32_t index, text_sink *sink) {
    const pst__parameter *parameter = &engine->parameters[index];
    const pst__group *group = first_group_of(engine, index);
    put(sink, "parameter '%s'", parameter->name);
    put(sink, "%zux%zu %s %s", parameter->rows, parameter->row_elements,
        group == NULL ? "of no group" : pst_dtype_name(group->dtype),
        parameter->trainable ? "trainable" : "frozen");
}

static void put_group(const pst_zero *engine, const pst__group *group, text_sink *sink) {
    const pst__layout *layout = &group->layout;
    uint64_t members = PST__HASH_SEED;
    for (size_t i = 0; i < layout->member_count; i++) {
        const char *name = engine->parameters[layout->members[i].parameter].name;
        members = pst__hash(members, name, strlen(name) + 1);
    }
    put(sink, "group '%s'", group->name);
    put(sink, "%zu parameters (%08x), %s gathered as %s%s%s%s, reduced as %s", layout->member_count,
        (unsigned)members, pst_dtype_name(group->dtype), pst_dtype_name(group->gather_dtype),
        group->is_filled_outside ? " by the caller" : "", group->forward_only ? " in forwards" : "",
        group->is_looked_up ? " by rows" : "", pst_dtype_name(group->reduce_dtype));
}

static void put_everything(const pst_zero *engine, text_sink *sink) {
    const pst_zero_options *options = &engine->options;
    put(sink, "engine '%s'", engine->carrier.name);
    put(sink,
        "stage %d, prefetch_ahead %u, prefetch_bytes %zu, bucket_bytes %zu, part_bytes %zu, "
        "push_bytes %zu%s%s",
        options->stage, options->prefetch_ahead, options->prefetch_bytes, options->bucket_bytes,
        options->part_bytes, options->push_bytes,
        options->shards_on_host ? ", shards on the host" : "",
        options->transient_copies ? ", transient copies" : "");
    for (uint32_t i = 0; i < engine->parameter_count; i++)
        put_parameter(engine, i, sink);
    for (size_t i = 0; i < engine->group_count; i++)
        put_group(engine, &engine->groups[i], sink);
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* One line of a rank's text; an empty subject ends it. */
typedef struct line {
    const char *subject, *description;
} line;

static line next_line(const char **cursor, const char *end) {
    line found = {"", ""};
    if (*cursor >= end || **cursor == '\0') return found;
    found.subject = *cursor;
    found.description = found.subject + strlen(found.subject) + 1;
    *cursor = found.description + strlen(found.description) + 1;
    return found;
}

static pst_status report(pst_zero *engine, line first, size_t rank, line other) {
    if (strcmp(first.subject, other.subject) == 0)
        return pst__fail(engine->carrier.error, PST_EMISMATCH, "%s: rank 0 has %s, rank %zu has %s",
                         first.subject, first.description, rank, other.description);
    return pst__fail(engine->carrier.error, PST_EMISMATCH,
                     "rank 0 has %s %s where rank %zu has %s %s",
                     *first.subject ? first.subject : "nothing more", first.description, rank,
                     *other.subject ? other.subject : "nothing more", other.description);
}

static pst_status compare_texts(pst_zero *engine, const char *first, size_t rank, const char *other,
                                size_t bytes) {
    const char *a = first, *b = other;
    for (;;) {
        line one = next_line(&a, first + bytes), two = next_line(&b, other + bytes);
        if (strcmp(one.subject, two.subject) != 0 || strcmp(one.description, two.description) != 0)
            return report(engine, one, rank, two);
        if (*one.subject == '\0') return PST_OK;
    }
}

#define TEXT_LIMIT ((size_t)1 << 20) /* what any communicator gathers from any memory */

/* What is beyond the limit is cut, behind a whole line. */
static pst_status write_texts(pst_zero *engine, char *texts, size_t longest, size_t bytes) {
    text_sink sink = {pst__heap_alloc(engine->carrier.heap, longest), 0, longest};
    if (sink.text == NULL) return PST_ENOMEM;
    put_everything(engine, &sink);
    size_t whole = 0;
    const char *cursor = sink.text;
    while (*next_line(&cursor, sink.text + sink.used).subject != '\0' &&
           (size_t)(cursor - sink.text) < bytes)
        whole = (size_t)(cursor - sink.text);
    memcpy(texts, sink.text, whole);
    pst__heap_free(engine->carrier.heap, sink.text, longest);
    return PST_OK;
}

static pst_status no_memory(pst_zero *engine) {
    return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to compare the ranks");
}

/* Finds the first difference; all ranks hold all texts and so name the same. */
static pst_status exchange_texts(pst_zero *engine, size_t longest) {
    const size_t bytes = longest < TEXT_LIMIT ? longest : TEXT_LIMIT,
                 world = pst__carrier_ranks(&engine->carrier);
    char *own = pst__heap_alloc(engine->carrier.heap, (world + 1) * bytes); /* then everybody's */
    if (own == NULL) return no_memory(engine);
    char *all = own + bytes;
    pst_status status = write_texts(engine, own, longest, bytes);
    if (status == PST_OK)
        status = pst__gather_bytes(&engine->carrier, "registry", own, bytes, all);
    else
        status = no_memory(engine);
    for (size_t rank = 1; status == PST_OK && rank < world; rank++)
        status = compare_texts(engine, all, rank, all + rank * bytes, bytes);
    pst__heap_free(engine->carrier.heap, own, (world + 1) * bytes);
    if (status == PST_OK)
        status = pst__zero_fail(engine, PST_EMISMATCH, "%s", "ranks hash one registry differently");
    return status;
}

typedef struct digest {
    uint64_t hash, bytes;
} digest;

static pst_status digest_registry(pst_zero *engine, digest *out) {
    text_sink sink = {NULL, 0, 0};
    put_everything(engine, &sink);
    size_t bytes = sink.used + 1; /* an empty subject at the end */
    sink = (text_sink){pst__heap_alloc(engine->carrier.heap, bytes), 0, bytes};
    if (sink.text == NULL) return no_memory(engine);
    put_everything(engine, &sink);
    *out = (digest){pst__hash(PST__HASH_SEED, sink.text, bytes), bytes};
    pst__heap_free(engine->carrier.heap, sink.text, bytes);
    return PST_OK;
}

pst_status pst__agree_registry(pst_zero *engine) {
    const size_t world = pst__carrier_ranks(&engine->carrier);
    digest own;
    pst_status status = digest_registry(engine, &own);
    if (status != PST_OK) return status;
    digest *all = pst__heap_alloc(engine->carrier.heap, world * sizeof own);
    if (all == NULL) return no_memory(engine);
    status = pst__gather_bytes(&engine->carrier, "digest", &own, sizeof own, all);
    uint64_t longest = 0;
    int differ = 0;
    for (size_t rank = 0; status == PST_OK && rank < world; rank++) {
        differ |= all[rank].hash != own.hash || all[rank].bytes != own.bytes;
        if (all[rank].bytes > longest) longest = all[rank].bytes;
    }
    pst__heap_free(engine->carrier.heap, all, world * sizeof own);
    return status == PST_OK && differ ? exchange_texts(engine, longest) : status;
}

static pst_status take_largest(pst_zero *engine, uint64_t *words, size_t count, uint64_t *all) {
    const pst_status status =
        pst__gather_bytes(&engine->carrier, "times", words, count * sizeof *words, all);
    for (size_t i = 0; status == PST_OK && i < pst__carrier_ranks(&engine->carrier) * count; i++)
        if (all[i] > words[i % count]) words[i % count] = all[i];
    return status;
}

pst_status pst__agree_largest(pst_zero *engine, uint64_t *words, size_t count) {
    const size_t most = TEXT_LIMIT / sizeof *words, at_once = count < most ? count : most;
    const size_t bytes = pst__carrier_ranks(&engine->carrier) * at_once * sizeof *words;
    pst_status status = PST_OK;
    if (pst__carrier_is_alone(&engine->carrier)) return PST_OK;
    uint64_t *all = pst__heap_alloc(engine->carrier.heap, bytes);
    if (all == NULL) return no_memory(engine);
    for (size_t done = 0; status == PST_OK && done < count; done += at_once)
        status = take_largest(engine, words + done, count - done < at_once ? count - done : at_once,
                              all);
    pst__heap_free(engine->carrier.heap, all, bytes);
    return status;
}
