/* A trace's life, its recordings and its names. */
#include "tracing/trace.h"

#include "base/clock.h"
#include "base/hash.h"
#include "tracing/state.h"

#include <penstock/trace.h>
#include <string.h>

#define DEFAULT_RECORDS 65536u
#define MAX_RECORDS     (UINT64_C(1) << 40)

/* ---- names ------------------------------------------------------------------------------ */

static pst__name *find(pst__name *first, const char *text) {
    pst__name *name = first;
    while (name != NULL && strcmp(name->text, text) != 0)
        name = name->next;
    return name;
}

static pst__name *add(const pst__heap *heap, pst__name **first, const char *text) {
    pst__name *name = pst__heap_alloc(heap, sizeof *name);
    if (name == NULL) return NULL;
    name->text = pst__heap_text(heap, text);
    if (name->text == NULL) {
        pst__heap_free(heap, name, sizeof *name);
        return NULL;
    }
    name->next = *first;
    *first = name;
    return name;
}

static const char *intern(pst__trace *trace, const char *text, size_t most) {
    pst__names *names = &trace->names;
    pst__name **first =
        &names->lists[pst__hash(PST__HASH_SEED, text, strlen(text)) % PST__NAME_LISTS];
    (void)pthread_mutex_lock(&names->lock);
    pst__name *name = find(*first, text);
    if (name == NULL && names->count < most) {
        name = add(&trace->heap, first, text);
        names->count += name != NULL;
    }
    (void)pthread_mutex_unlock(&names->lock);
    return name == NULL ? NULL : name->text;
}

const char *pst__trace_intern(pst__trace *trace, const char *text) {
    return intern(trace, text, SIZE_MAX);
}

const char *pst__trace_name(pst__trace *trace, const char *text) {
    return intern(trace, text, pst__trace_on(trace) ? SIZE_MAX : PST__NAMES_MAX);
}

static void free_list(const pst__heap *heap, pst__name *first) {
    for (pst__name *name = first, *next; name != NULL; name = next) {
        next = name->next;
        pst__heap_free_text(heap, name->text);
        pst__heap_free(heap, name, sizeof *name);
    }
}

static void free_names(const pst__heap *heap, pst__names *names) {
    for (size_t i = 0; i < PST__NAME_LISTS; i++)
        free_list(heap, names->lists[i]);
    (void)pthread_mutex_destroy(&names->lock);
}

/* ---- life ------------------------------------------------------------------------------- */

/* MAX_RECORDS is more than memory holds, so asking for more ends in PST_ENOMEM all the same. */
static uint64_t ring_capacity(size_t records) {
    uint64_t capacity = 2;
    while (capacity < records && capacity < MAX_RECORDS)
        capacity *= 2;
    return capacity;
}

static pst__moment moment_now(void) {
    return (pst__moment){.real = pst__clock_read(CLOCK_REALTIME), .now = pst__now()};
}

/* `recording` is PST__TRACE_ALL within one, else 0. */
static int level_of(const pst__trace *trace, int recording) {
    const int kept = trace->tapes[PST__TAPE_FLIGHT].capacity == 0 ? 0 : PST__TRACE_FLIGHT;
    return (recording != 0 ? recording : kept) | (trace->level & PST__TRACE_SHOWN);
}

pst_status pst__trace_create(const pst__heap *heap, pst__error *error, int rank, int world_size,
                             size_t records, size_t flight_records, pst__trace **trace) {
    *trace = NULL;
    pst__trace *made = pst__heap_alloc(heap, sizeof *made);
    if (made == NULL) return pst__fail(error, PST_ENOMEM, "rank %d: no memory for a trace", rank);
    made->heap = *heap;
    made->error = error;
    made->rank = rank;
    made->world_size = world_size > 0 ? world_size : 1;
    made->tapes[PST__TAPE_RECORDING].capacity =
        ring_capacity(records == 0 ? DEFAULT_RECORDS : records);
    if (flight_records != 0) made->tapes[PST__TAPE_FLIGHT].capacity = ring_capacity(flight_records);
    made->made = moment_now();
    made->level = pst_profiler_is_attached() ? PST__TRACE_SHOWN : 0;
    made->level = level_of(made, 0);
    if (pthread_key_create(&made->key, NULL) != 0) goto fail_key;
    if (pthread_mutex_init(&made->lock, NULL) != 0) goto fail_lock;
    if (pthread_mutex_init(&made->names.lock, NULL) != 0) goto fail_names;
    *trace = made;
    return PST_OK;

fail_names:
    (void)pthread_mutex_destroy(&made->lock);
fail_lock:
    (void)pthread_key_delete(made->key);
fail_key:
    pst__heap_free(heap, made, sizeof *made);
    return pst__fail(error, PST_ESYSTEM,
                     "rank %d: the process has no thread-specific key or lock left for a trace; "
                     "destroy runtimes that are no longer used",
                     rank);
}

void pst__trace_destroy(pst__trace *trace) {
    if (trace == NULL) return;
    for (pst__track *track = trace->tracks, *next; track != NULL; track = next) {
        next = track->next;
        pst__track_free(track);
    }
    for (unsigned kind = 0; kind < PST__TAPES; ++kind)
        pst__past_forget(&trace->heap, &trace->tapes[kind].past);
    free_names(&trace->heap, &trace->names);
    (void)pthread_key_delete(trace->key);
    (void)pthread_mutex_destroy(&trace->lock);
    pst__heap heap = trace->heap;
    pst__heap_free(&heap, trace, sizeof *trace);
}

/* ---- recordings ------------------------------------------------------------------------- */

/* Cleared before threads are looked for, so that those that have ended leave nothing. */
static void forget_records(pst__trace *trace) {
    pst__tape *tape = &trace->tapes[PST__TAPE_RECORDING];
    pst__past_forget(&trace->heap, &tape->past);
    for (pst__track *track = trace->tracks; track != NULL; track = track->next)
        pst__ring_clear(&track->rings[PST__TAPE_RECORDING]);
    pst__threads_reap(trace, 0);
    /* Relaxed: a number to show. */
    pst__store_relaxed(&tape->lost, 0);
}

/* Every track gets its ring. Rings made before a failure stay for later. */
static pst_status prepare_rings(pst__trace *trace) {
    pst_status status = PST_OK;
    for (pst__track *track = trace->tracks; track != NULL && status == PST_OK; track = track->next)
        status = pst__track_prepare(track, PST__TAPE_RECORDING);
    return status;
}

static void take_tape(pst__trace *trace, pst__tape_kind kind) {
    for (pst__track *track = trace->tracks; track != NULL; track = track->next)
        pst__track_take(track, kind);
}

static pst_status start_locked(pst__trace *trace) {
    if (pst__trace_on(trace))
        return pst__fail(trace->error, PST_ESTATE,
                         "rank %d: the trace is recording already; stop it first", trace->rank);
    forget_records(trace);
    pst_status status = prepare_rings(trace);
    if (status != PST_OK) return status;
    /* Relaxed: a thread that records reads it after the acquire in pst__trace_on. */
    pst__store_relaxed(&trace->session, trace->session + 1);
    trace->begin = moment_now();
    take_tape(trace, PST__TAPE_RECORDING);
    /* Partner: the acquire in pst__trace_get_level; who sees it sees the rings. */
    pst__store_release(&trace->level, level_of(trace, PST__TRACE_ALL));
    return PST_OK;
}

pst_status pst__trace_start(pst__trace *trace) {
    (void)pthread_mutex_lock(&trace->lock);
    pst_status status = start_locked(trace);
    (void)pthread_mutex_unlock(&trace->lock);
    return status;
}

pst_status pst__trace_stop(pst__trace *trace) {
    (void)pthread_mutex_lock(&trace->lock);
    const int was_on = pst__trace_on(trace);
    /* Partner: pst__trace_get_level. Nothing hangs on the order: a thread that has just looked may
     * still push a record, and rings stay valid for it. */
    pst__store_release(&trace->level, level_of(trace, 0));
    take_tape(trace, PST__TAPE_FLIGHT);
    (void)pthread_mutex_unlock(&trace->lock);
    if (was_on) return PST_OK;
    return pst__fail(trace->error, PST_ESTATE,
                     "rank %d: the trace is not recording; start it first", trace->rank);
}

void pst__trace_get_stats(pst__trace *trace, uint64_t *records, uint64_t *overwritten) {
    (void)pthread_mutex_lock(&trace->lock);
    *records = pst__tape_count(trace, PST__TAPE_RECORDING, overwritten);
    (void)pthread_mutex_unlock(&trace->lock);
}
