#include "tests/device/sim_queue.h"

#include "base/atomic.h"
#include "sched/device/host.h"

#include <string.h>

#define NEVER UINT64_MAX

/* ---- operations ------------------------------------------------------------------------- */

pst__sim_operation *pst__sim_operation_create(const pst__sim *sim, pst__sim_kind kind,
                                              size_t source_count) {
    pst__sim_operation *made =
        pst__heap_alloc(sim->heap, sizeof *made + source_count * sizeof *made->sources);
    if (made == NULL) return NULL;
    made->kind = kind;
    made->sum.source_count = source_count;
    return made;
}

void pst__sim_mark_drop(const pst__sim *sim, pst__sim_mark *mark) {
    if (mark != NULL && --mark->holders == 0) pst__heap_free(sim->heap, mark, sizeof *mark);
}

static void operation_free(const pst__sim *sim, pst__sim_operation *operation) {
    pst__sim_mark_drop(sim, operation->mark);
    pst__heap_free(sim->heap, operation,
                   sizeof *operation + operation->sum.source_count * sizeof(void *));
}

static void do_rows(const pst__sim_rows *rows) {
    for (size_t i = 0; i < rows->count; i++) {
        char *destination = rows->destination + i * rows->destination_pitch;
        if (rows->source == NULL)
            memset(destination, rows->byte, rows->bytes);
        else
            memmove(destination, rows->source + i * rows->source_pitch, rows->bytes);
    }
}

static void copied(const pst__sim *sim, const pst__sim_operation *operation, uint64_t end) {
    const pst__sim_rows *rows = &operation->rows;
    if (sim->options.copied != NULL && rows->source != NULL)
        sim->options.copied(sim->options.context, rows->destination, rows->source,
                            end - operation->cost, end);
}

/* Arguments that the kernels refuse were refused when the operation was enqueued. */
static void happen(const pst__sim *sim, const pst__sim_operation *operation, uint64_t end) {
    switch (operation->kind) {
    case PST__SIM_CALL:
        operation->run(operation->argument);
        break;
    case PST__SIM_ROWS:
        do_rows(&operation->rows);
        copied(sim, operation, end);
        break;
    case PST__SIM_CAST:
        (void)pst__host_cast(&operation->cast, operation->scale);
        break;
    case PST__SIM_SUM:
        (void)pst__host_sum(&operation->sum);
        break;
    case PST__SIM_MAXIMUM:
        (void)pst__host_maximum(&operation->sum);
        break;
    case PST__SIM_NAMED:
        pst__host_copy_rows(&operation->named);
        break;
    case PST__SIM_PREPARE:
        pst__host_adamw_prepare(&operation->settings, &operation->step, 1, operation->coefficients);
        break;
    case PST__SIM_ADAMW:
        (void)pst__host_adamw(&operation->update);
        break;
    case PST__SIM_RECORD:
        operation->mark->done = 1;
        operation->mark->end = end;
        break;
    case PST__SIM_WRITE32:
        /* Release: pairs with a host thread that reads the flag and then what it announces. */
        pst__store_release(operation->flag, operation->value);
        break;
    case PST__SIM_WAIT_EVENT:
    case PST__SIM_WAIT32:
        break;
    }
}

/* ---- the clock -------------------------------------------------------------------------- */

static uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static int is_reached(const pst__sim_operation *operation) {
    /* Acquire: pairs with a release of the flag by a host thread (flag_write32). */
    return (int32_t)(pst__load_acquire(operation->flag) - operation->value) >= 0;
}

/* When a stream's first operation ends, as far as that is known. */
static uint64_t end_of(const pst__sim *sim, const pst_stream *stream) {
    const pst__sim_operation *first = stream->head;
    if (first == NULL) return NEVER;
    const uint64_t begin = later(stream->end, first->enqueued);
    if (first->kind == PST__SIM_WAIT_EVENT)
        return first->mark->done ? later(begin, first->mark->end) : NEVER;
    if (first->kind == PST__SIM_WAIT32) return is_reached(first) ? later(begin, sim->time) : NEVER;
    return begin + first->cost;
}

static pst_stream *next_to_end(const pst__sim *sim, uint64_t *end) {
    pst_stream *found = NULL;
    *end = NEVER;
    for (pst_stream *stream = sim->streams; stream != NULL; stream = stream->next) {
        const uint64_t other = end_of(sim, stream);
        if (other < *end) {
            found = stream;
            *end = other;
        }
    }
    return found;
}

static void take_first(pst__sim *sim, pst_stream *stream, uint64_t end) {
    pst__sim_operation *first = stream->head;
    stream->head = first->next;
    stream->end = end;
    sim->time = later(sim->time, end);
    happen(sim, first, end);
    operation_free(sim, first);
}

void pst__sim_settle(pst__sim *sim, uint64_t now) {
    uint64_t end;
    for (pst_stream *stream = next_to_end(sim, &end); stream != NULL && end <= now;
         stream = next_to_end(sim, &end))
        take_first(sim, stream, end);
    sim->time = later(sim->time, now);
    pst__sim_sweep(sim);
}

void pst__sim_enqueue(pst__sim *sim, pst_stream *stream, pst__sim_operation *operation,
                      uint64_t cost) {
    const uint64_t now = sim->options.now(sim->options.context);
    ck_spinlock_lock(&sim->lock);
    pst__sim_settle(sim, now);
    operation->enqueued = now;
    operation->cost = cost;
    if (stream->head == NULL)
        stream->head = operation;
    else
        stream->tail->next = operation;
    stream->tail = operation;
    ck_spinlock_unlock(&sim->lock);
}

/* ---- the end ---------------------------------------------------------------------------- */

static void stream_free(const pst__sim *sim, pst_stream *stream) {
    while (stream->head != NULL) {
        pst__sim_operation *next = stream->head->next;
        operation_free(sim, stream->head);
        stream->head = next;
    }
    pst__heap_free(sim->heap, stream, sizeof *stream);
}

void pst__sim_sweep(pst__sim *sim) {
    for (pst_stream **link = &sim->streams; *link != NULL;) {
        pst_stream *stream = *link;
        if (stream->destroyed && stream->head == NULL) {
            *link = stream->next;
            stream_free(sim, stream);
        } else {
            link = &stream->next;
        }
    }
}

void pst__sim_drop_streams(pst__sim *sim) {
    while (sim->streams != NULL) {
        pst_stream *next = sim->streams->next;
        stream_free(sim, sim->streams);
        sim->streams = next;
    }
}
