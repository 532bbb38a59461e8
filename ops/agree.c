#include "ops/engine.h"
#include "ops/operation.h"

#include "sched/runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- an all-gather of equal pieces of host-readable memory ----------------------------------- */

typedef struct exchange {
    size_t bytes;
    char *own;      /* `bytes` */
    char *everyone; /* `bytes` a rank, by rank */
    pst_segment *segments;
} exchange;

static size_t exchange_size(const pst_zero *engine, size_t bytes) {
    return bytes * (engine->world + 1);
}

static void exchange_free(pst_zero *engine, exchange *exchange) {
    if (exchange->own != NULL)
        engine->device->ops->free(engine->device, PST_MEMORY_PINNED, exchange->own,
                                  exchange_size(engine, exchange->bytes));
    pst__heap_free(engine->heap, exchange->segments, engine->world * sizeof *exchange->segments);
    memset(exchange, 0, sizeof *exchange);
}

static void fill_segments(pst_segment *segments, size_t world, size_t bytes) {
    for (size_t rank = 0; rank < world; rank++)
        segments[rank] = (pst_segment){(uint32_t)rank, 0, rank * bytes, bytes};
}

static pst_status exchange_alloc(pst_zero *engine, size_t bytes, exchange *exchange) {
    pst_device *device = engine->device;
    void *memory = NULL;
    exchange->bytes = bytes;
    exchange->segments = pst__heap_alloc(engine->heap, engine->world * sizeof(pst_segment));
    if (exchange->segments == NULL ||
        device->ops->alloc(device, PST_MEMORY_PINNED, exchange_size(engine, bytes), &memory) !=
            PST_OK) {
        exchange_free(engine, exchange);
        return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to compare the ranks");
    }
    exchange->own = memory;
    exchange->everyone = exchange->own + bytes;
    fill_segments(exchange->segments, engine->world, bytes);
    return PST_OK;
}

static pst_status gather_bytes(pst_zero *engine, const char *name, exchange *exchange) {
    pst__operation *operation;
    pst_status status = pst__operation_take(engine, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_GATHER;
    collective->name = name;
    collective->dtype = PST_UINT8;
    collective->source = exchange->own;
    collective->source_bytes = exchange->bytes;
    collective->destination = exchange->everyone;
    collective->segments = exchange->segments;
    collective->segment_count = engine->world;
    status = pst__operation_submit(operation, exchange->bytes, NULL, 0);
    if (status != PST_OK) return status;
    status = pst__operation_wait_end(operation);
    if (status != PST_OK && !pst__zero_quiesce(engine))
        exchange->own = NULL; /* somebody may still write there: it is lost */
    return status;
}

pst_status pst__agree_gather(pst_zero *engine, const char *name, const void *own, size_t bytes,
                             void *everyone) {
    exchange pieces = {0};
    pst_status status = exchange_alloc(engine, bytes, &pieces);
    if (status != PST_OK) return status;
    memcpy(pieces.own, own, bytes);
    status = gather_bytes(engine, name, &pieces);
    if (status == PST_OK) memcpy(everyone, pieces.everyone, engine->world * bytes);
    exchange_free(engine, &pieces);
    return status;
}

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
    put(sink, "%zu parameters (%08x), %s gathered as %s%s, reduced as %s", layout->member_count,
        (unsigned)members, pst_dtype_name(group->dtype), pst_dtype_name(group->gather_dtype),
        group->forward_only ? " in forwards" : "", pst_dtype_name(group->reduce_dtype));
}

static void put_everything(const pst_zero *engine, text_sink *sink) {
    const pst_zero_options *options = &engine->options;
    put(sink, "engine '%s'", engine->name);
    put(sink, "stage %d, prefetch_ahead %u, prefetch_bytes %zu, bucket_bytes %zu, part_bytes %zu",
        options->stage, options->prefetch_ahead, options->prefetch_bytes, options->bucket_bytes,
        options->part_bytes);
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
        return pst__fail(engine->error, PST_EMISMATCH, "%s: rank 0 has %s, rank %zu has %s",
                         first.subject, first.description, rank, other.description);
    return pst__fail(engine->error, PST_EMISMATCH, "rank 0 has %s %s where rank %zu has %s %s",
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
    text_sink sink = {pst__heap_alloc(engine->heap, longest), 0, longest};
    memset(texts, 0, bytes);
    if (sink.text == NULL)
        return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to compare the ranks");
    put_everything(engine, &sink);
    size_t whole = 0;
    const char *cursor = sink.text;
    while (*next_line(&cursor, sink.text + sink.used).subject != '\0' &&
           (size_t)(cursor - sink.text) < bytes)
        whole = (size_t)(cursor - sink.text);
    memcpy(texts, sink.text, whole);
    pst__heap_free(engine->heap, sink.text, longest);
    return PST_OK;
}

/* Finds the first difference; all ranks hold all texts and so name the same. */
static pst_status exchange_texts(pst_zero *engine, size_t longest) {
    exchange texts = {0};
    size_t bytes = longest < TEXT_LIMIT ? longest : TEXT_LIMIT;
    pst_status status = exchange_alloc(engine, bytes, &texts);
    if (status != PST_OK) return status;
    status = write_texts(engine, texts.own, longest, bytes);
    if (status == PST_OK) status = gather_bytes(engine, "registry", &texts);
    for (size_t rank = 1; status == PST_OK && rank < engine->world; rank++)
        status = compare_texts(engine, texts.everyone, rank, texts.everyone + rank * bytes, bytes);
    exchange_free(engine, &texts);
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
    sink = (text_sink){pst__heap_alloc(engine->heap, bytes), 0, bytes};
    if (sink.text == NULL)
        return pst__zero_fail(engine, PST_ENOMEM, "%s", "no memory to compare the ranks");
    put_everything(engine, &sink);
    *out = (digest){pst__hash(PST__HASH_SEED, sink.text, bytes), bytes};
    pst__heap_free(engine->heap, sink.text, bytes);
    return PST_OK;
}

pst_status pst__agree_registry(pst_zero *engine) {
    digest own;
    exchange digests = {0};
    pst_status status = digest_registry(engine, &own);
    if (status == PST_OK) status = exchange_alloc(engine, sizeof own, &digests);
    if (status != PST_OK) return status;
    memcpy(digests.own, &own, sizeof own);
    status = gather_bytes(engine, "digest", &digests);
    uint64_t longest = 0;
    int differ = 0;
    for (size_t rank = 0; status == PST_OK && rank < engine->world; rank++) {
        digest theirs;
        memcpy(&theirs, digests.everyone + rank * sizeof theirs, sizeof theirs);
        differ |= theirs.hash != own.hash || theirs.bytes != own.bytes;
        if (theirs.bytes > longest) longest = theirs.bytes;
    }
    exchange_free(engine, &digests);
    return status == PST_OK && differ ? exchange_texts(engine, longest) : status;
}

/* ---- plans ----------------------------------------------------------------------------------- */

static const char *const plan_names[2] = {"plan of evaluation", "plan of training"};

/* This kind's slot: the own hash, then everybody's. */
static uint64_t *hashes_of(const pst_zero *engine, int grad) {
    return engine->hashes + (size_t)grad * (engine->world + 1);
}

static size_t differing_rank(const pst_zero *engine, int grad) {
    const uint64_t *hashes = hashes_of(engine, grad);
    size_t rank = 0;
    while (rank < engine->world && hashes[1 + rank] == hashes[0])
        rank++;
    return rank;
}

static const char differing_format[] =
    "rank %zu, engine '%s': the %s differs from that of rank %zu: the ranks ran different passes";

static void poison_if_different(pst__operation *operation) {
    pst_zero *engine = operation->engine;
    int grad = (int)operation->argument;
    size_t rank = differing_rank(engine, grad);
    if (rank == engine->world) return;
    char text[PST__ERROR_BYTES];
    (void)snprintf(text, sizeof text, differing_format, engine->rank, engine->name,
                   plan_names[grad], rank);
    pst_runtime_poison(engine->runtime, PST_EMISMATCH, text);
}

/* The slot may still be in use by the previous agreement of this kind. */
static pst_status wait_for_slot(pst_zero *engine, int grad) {
    pst__queue *queue = &engine->queues[PST__GATHER_LANE];
    for (pst__operation *found = queue->oldest; found != NULL; found = found->next) {
        if (found->work.collective.name != plan_names[grad]) continue;
        pst_status status = pst__operation_wait_end(found);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static pst_status submit_hash(pst_zero *engine, int grad, int blocking,
                              pst__operation **submitted) {
    pst__operation *operation;
    pst_status status = pst__operation_take(engine, PST__GATHER_LANE, &operation);
    if (status != PST_OK) return status;
    pst_collective *collective = &operation->work.collective;
    collective->kind = PST_ALL_GATHER;
    collective->name = plan_names[grad];
    collective->dtype = PST_UINT8;
    collective->source = hashes_of(engine, grad);
    collective->source_bytes = sizeof(uint64_t);
    collective->destination = hashes_of(engine, grad) + 1;
    collective->segments = engine->hash_segments;
    collective->segment_count = engine->world;
    operation->argument = (uint64_t)grad;
    operation->done = blocking ? NULL : poison_if_different;
    *submitted = operation;
    return pst__operation_submit(operation, sizeof(uint64_t), NULL, 0);
}

pst_status pst__agree_plan(pst_zero *engine, int grad, uint64_t hash, int blocking) {
    pst__operation *operation;
    pst_status status = wait_for_slot(engine, grad);
    if (status != PST_OK) return status;
    hashes_of(engine, grad)[0] = hash;
    status = submit_hash(engine, grad, blocking, &operation);
    if (status == PST_OK && blocking) status = pst__operation_wait_end(operation);
    if (status != PST_OK || !blocking) return status;
    size_t rank = differing_rank(engine, grad);
    if (rank == engine->world) return PST_OK;
    return pst__fail(engine->error, PST_EMISMATCH, differing_format, engine->rank, engine->name,
                     plan_names[grad], rank);
}

static size_t hashes_bytes(const pst_zero *engine) {
    return 2 * exchange_size(engine, sizeof(uint64_t));
}

pst_status pst__agree_alloc(pst_zero *engine) {
    pst_device *device = engine->device;
    void *memory = NULL;
    engine->hash_segments = pst__heap_alloc(engine->heap, engine->world * sizeof(pst_segment));
    if (engine->hash_segments == NULL) return PST_ENOMEM;
    fill_segments(engine->hash_segments, engine->world, sizeof(uint64_t));
    pst_status status =
        device->ops->alloc(device, PST_MEMORY_PINNED, hashes_bytes(engine), &memory);
    engine->hashes = memory;
    return status;
}

void pst__agree_free(pst_zero *engine) {
    if (engine->hashes != NULL)
        engine->device->ops->free(engine->device, PST_MEMORY_PINNED, engine->hashes,
                                  hashes_bytes(engine));
    pst__heap_free(engine->heap, engine->hash_segments, engine->world * sizeof(pst_segment));
    engine->hashes = NULL;
    engine->hash_segments = NULL;
}
