/* An asynchronous device over host memory. A stream is a queue; one thread of the device takes the
 * oldest operation of a stream that it draws, so that streams overlap in any way that their events
 * allow, and everything happens later than it was asked for. What a test wants on a stream is a
 * call like any other. */
#ifndef PST_TESTS_OPS_ASYNC_DEVICE_H
#define PST_TESTS_OPS_ASYNC_DEVICE_H

#include "sched/device/host.h"

#include <penstock/device.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* PST_PENDING: the stream stays where it is and asks again. */
typedef pst_status (*async_run)(void *argument);

typedef enum async_kind { ASYNC_CALL, ASYNC_RECORD, ASYNC_WAIT } async_kind;

typedef struct async_operation {
    async_kind kind;
    async_run run;
    pst_event *event;
    uint64_t record; /* RECORD: its number; WAIT: the record that is waited for */
    struct async_operation *next;
    char argument[]; /* CALL: a copy of its own */
} async_operation;

struct pst_stream {
    async_operation *first, **end;
    size_t waits; /* enqueued so far */
    pst_stream *next;
};

struct pst_event {
    uint64_t asked, reached; /* numbers of the latest records, enqueued and passed; 0: none */
    pst_event *next;
};

typedef struct async_device {
    pst_device device;
    pst_device_ops ops;
    pthread_t thread;
    pthread_mutex_t lock; /* of all that follows, and of streams and events */
    pthread_cond_t changed;
    int stop, is_paused;
    uint64_t dice, records;
    unsigned delay_us; /* each operation takes up to so long */
    size_t calls;      /* enqueued so far */
    pst_stream *streams;
    pst_event *events;
    const char *host; /* (optional) memory that copies alone may touch */
    size_t host_bytes, host_copies;
} async_device;

/* ---- queues ---------------------------------------------------------------------------------- */

static inline async_device *async_of(pst_device *device) {
    return device->context;
}

static inline uint64_t async_draw(async_device *async, uint64_t bound) {
    async->dice = async->dice * 6364136223846793005u + 1442695040888963407u;
    return (async->dice >> 33) % bound;
}

static inline async_operation *async_operation_create(async_kind kind, size_t bytes) {
    async_operation *made = calloc(1, sizeof *made + bytes);
    made->kind = kind;
    return made;
}

/* Under the lock. */
static inline void async_append(async_device *async, pst_stream *stream, async_operation *added) {
    *stream->end = added;
    stream->end = &added->next;
    (void)pthread_cond_signal(&async->changed);
}

/* run(copy of the argument) when the stream gets there. Any thread. */
static inline void async_call(async_device *async, pst_stream *stream, async_run run,
                              const void *argument, size_t bytes) {
    async_operation *call = async_operation_create(ASYNC_CALL, bytes);
    call->run = run;
    memcpy(call->argument, argument, bytes);
    (void)pthread_mutex_lock(&async->lock);
    async->calls++;
    async_append(async, stream, call);
    (void)pthread_mutex_unlock(&async->lock);
}

/* ---- the thread ------------------------------------------------------------------------------ */

static inline int async_can_go(const async_operation *operation) {
    return operation != NULL &&
           (operation->kind != ASYNC_WAIT || operation->event->reached >= operation->record);
}

/* One of the streams that can go on, drawn; NULL: none. */
static inline pst_stream *async_choose(async_device *async) {
    pst_stream *chosen = NULL;
    uint64_t found = 0;
    for (pst_stream *stream = async->streams; stream != NULL; stream = stream->next)
        if (async_can_go(stream->first) && async_draw(async, ++found) == 0) chosen = stream;
    return chosen;
}

static inline void async_remove_first(pst_stream *stream) {
    async_operation *first = stream->first;
    stream->first = first->next;
    if (stream->first == NULL) stream->end = &stream->first;
    free(first);
}

static inline void async_sleep(uint64_t microseconds) {
    const struct timespec pause = {(time_t)(microseconds / 1000000),
                                   (long)(microseconds % 1000000) * 1000};
    if (microseconds > 0) (void)nanosleep(&pause, NULL);
}

/* The head of the stream; called and left under the lock. 0: it is pending. */
static inline int async_step(async_device *async, pst_stream *stream) {
    async_operation *first = stream->first;
    pst_status status = PST_OK;
    if (first->kind == ASYNC_RECORD && first->event->reached < first->record)
        first->event->reached = first->record;
    if (first->kind == ASYNC_CALL) {
        const uint64_t delay = async->delay_us == 0 ? 0 : async_draw(async, async->delay_us);
        (void)pthread_mutex_unlock(&async->lock);
        async_sleep(delay);
        status = first->run(first->argument);
        (void)pthread_mutex_lock(&async->lock);
    }
    if (status == PST_PENDING) return 0;
    async_remove_first(stream);
    return 1;
}

static inline void async_wait_for_change(async_device *async) {
    struct timespec until;
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    (void)pthread_cond_timedwait(&async->changed, &async->lock, &until);
}

static inline void *async_main(void *argument) {
    async_device *async = argument;
    unsigned idle = 0;
    (void)pthread_mutex_lock(&async->lock);
    while (!async->stop) {
        pst_stream *stream = async->is_paused ? NULL : async_choose(async);
        if (stream == NULL) {
            async_wait_for_change(async);
        } else if (async_step(async, stream)) {
            idle = 0;
        } else if (++idle > 8) { /* all that is asked waits for other ranks */
            (void)pthread_mutex_unlock(&async->lock);
            async_sleep(20);
            (void)pthread_mutex_lock(&async->lock);
        }
    }
    (void)pthread_mutex_unlock(&async->lock);
    return NULL;
}

/* ---- the table: streams and events ----------------------------------------------------------- */

static inline pst_status async_stream_create(pst_device *device, int priority,
                                             pst_stream **created) {
    async_device *async = async_of(device);
    pst_stream *stream = calloc(1, sizeof *stream);
    (void)priority;
    stream->end = &stream->first;
    (void)pthread_mutex_lock(&async->lock);
    stream->next = async->streams;
    async->streams = stream;
    (void)pthread_mutex_unlock(&async->lock);
    *created = stream;
    return PST_OK;
}

static inline pst_status async_stream_wrap(pst_device *device, void *native, pst_stream **created) {
    (void)native;
    return async_stream_create(device, 0, created);
}

/* What is enqueued still runs: memory lives until the device is closed. */
static inline void async_stream_destroy(pst_device *device, pst_stream *stream) {
    (void)device, (void)stream;
}

static inline pst_status async_launch(pst_device *device, pst_stream *stream,
                                      const pst_work *work) {
    (void)device;
    return work->start(work->argument, stream);
}

static inline pst_status async_event_create(pst_device *device, int timed, pst_event **created) {
    async_device *async = async_of(device);
    pst_event *event = calloc(1, sizeof *event);
    (void)timed;
    (void)pthread_mutex_lock(&async->lock);
    event->next = async->events;
    async->events = event;
    (void)pthread_mutex_unlock(&async->lock);
    *created = event;
    return PST_OK;
}

static inline void async_event_destroy(pst_device *device, pst_event *event) {
    (void)device, (void)event;
}

static inline pst_status async_event_record(pst_device *device, pst_event *event,
                                            pst_stream *stream) {
    async_device *async = async_of(device);
    async_operation *record = async_operation_create(ASYNC_RECORD, 0);
    record->event = event;
    (void)pthread_mutex_lock(&async->lock);
    record->record = event->asked = ++async->records;
    async_append(async, stream, record);
    (void)pthread_mutex_unlock(&async->lock);
    return PST_OK;
}

static inline pst_status async_stream_wait(pst_device *device, pst_stream *stream,
                                           pst_event *event) {
    async_device *async = async_of(device);
    async_operation *wait = async_operation_create(ASYNC_WAIT, 0);
    wait->event = event;
    (void)pthread_mutex_lock(&async->lock);
    wait->record = event->asked;
    stream->waits++;
    async_append(async, stream, wait);
    (void)pthread_mutex_unlock(&async->lock);
    return PST_OK;
}

static inline pst_status async_event_query(pst_device *device, pst_event *event) {
    async_device *async = async_of(device);
    (void)pthread_mutex_lock(&async->lock);
    const int done = event->reached >= event->asked;
    (void)pthread_mutex_unlock(&async->lock);
    return done ? PST_OK : PST_PENDING;
}

/* ---- the table: data and memory -------------------------------------------------------------- */

/* Whether it is the host's own. */
static inline int async_is_host(const async_device *async, const void *memory) {
    const uintptr_t at = (uintptr_t)memory, begin = (uintptr_t)async->host;
    return async->host != NULL && at >= begin && at < begin + async->host_bytes;
}

static inline pst_status async_do_copy(void *argument) {
    const pst_copy *piece = argument;
    memmove(piece->destination, piece->source, piece->bytes);
    return PST_OK;
}

static inline pst_status async_copy(pst_device *device, pst_stream *stream, const pst_copy *copies,
                                    size_t count) {
    async_device *async = async_of(device);
    for (size_t i = 0; i < count; i++) {
        if (async_is_host(async, copies[i].source) || async_is_host(async, copies[i].destination))
            (void)__atomic_add_fetch(&async->host_copies, 1, __ATOMIC_RELAXED);
        async_call(async, stream, async_do_copy, &copies[i], sizeof copies[i]);
    }
    return PST_OK;
}

typedef struct async_cast {
    pst_cast piece;
    double scale;
} async_cast;

static inline pst_status async_do_cast(void *argument) {
    const async_cast *cast = argument;
    return pst__host_cast(&cast->piece, cast->scale);
}

static inline pst_status async_cast_scale_copy(pst_device *device, pst_stream *stream,
                                               const pst_cast *pieces, size_t count, double scale) {
    for (size_t i = 0; i < count; i++) {
        const async_cast cast = {pieces[i], scale};
        if (async_is_host(async_of(device), pieces[i].source) ||
            async_is_host(async_of(device), pieces[i].destination))
            return PST_EDEVICE;
        async_call(async_of(device), stream, async_do_cast, &cast, sizeof cast);
    }
    return PST_OK;
}

typedef struct async_sum {
    pst_sum sum;
    const void *sources[4];
} async_sum;

static inline pst_status async_do_sum(void *argument) {
    async_sum *own = argument;
    own->sum.sources = own->sources;
    return pst__host_sum(&own->sum);
}

static inline pst_status async_add_up(pst_device *device, pst_stream *stream, const pst_sum *sum) {
    async_sum own = {.sum = *sum};
    if (async_is_host(async_of(device), sum->destination)) return PST_EDEVICE;
    for (size_t i = 0; i < sum->source_count; i++)
        own.sources[i] = sum->sources[i];
    async_call(async_of(device), stream, async_do_sum, &own, sizeof own);
    return PST_OK;
}

#define ASYNC_ROW_RANGES 4

typedef struct async_rows {
    pst_row_copy copy;
    pst_row_range ranges[ASYNC_ROW_RANGES];
} async_rows;

static inline pst_status async_do_copy_rows(void *argument) {
    async_rows *own = argument;
    own->copy.ranges = own->ranges;
    pst__host_copy_rows(&own->copy);
    return PST_OK;
}

static inline pst_status async_copy_rows(pst_device *device, pst_stream *stream,
                                         const pst_row_copy *copy) {
    async_rows own = {.copy = *copy};
    if (copy->range_count > ASYNC_ROW_RANGES) return PST_EUNSUPPORTED;
    for (size_t i = 0; i < copy->range_count; i++)
        own.ranges[i] = copy->ranges[i];
    async_call(async_of(device), stream, async_do_copy_rows, &own, sizeof own);
    return PST_OK;
}

typedef struct async_prepare {
    pst_adamw_settings settings;
    float *step;
    void *coefficients;
} async_prepare;

static inline pst_status async_do_prepare(void *argument) {
    const async_prepare *own = argument;
    pst__host_adamw_prepare(&own->settings, &own->step, 1, own->coefficients);
    return PST_OK;
}

static inline pst_status async_adamw_prepare(pst_device *device, pst_stream *stream,
                                             const pst_adamw_settings *settings,
                                             float *const *steps, size_t count,
                                             void *coefficients) {
    for (size_t i = 0; i < count; i++) {
        const async_prepare own = {*settings, steps[i],
                                   (char *)coefficients + i * PST_ADAMW_COEFFICIENTS_BYTES};
        async_call(async_of(device), stream, async_do_prepare, &own, sizeof own);
    }
    return PST_OK;
}

typedef struct async_update {
    pst_adamw_piece piece;
    const void *sources[PST_ADAMW_MOST_SOURCES];
} async_update;

static inline pst_status async_do_adamw(void *argument) {
    async_update *update = argument;
    update->piece.sources = update->sources;
    return pst__host_adamw(&update->piece);
}

static inline pst_status async_adamw(pst_device *device, pst_stream *stream,
                                     const pst_adamw_piece *pieces, size_t count) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < count; i++)
        status = pst__adamw_check(&pieces[i]);
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        async_update update = {.piece = pieces[i]};
        if (pieces[i].source_count > 0)
            memcpy(update.sources, pieces[i].sources, pieces[i].source_count * sizeof(void *));
        async_call(async_of(device), stream, async_do_adamw, &update, sizeof update);
    }
    return status;
}

static inline pst_status async_fill(pst_device *device, pst_stream *stream, void *memory, int byte,
                                    size_t bytes) {
    async_cast zeros = {{memory, NULL, bytes, PST_UINT8, PST_UINT8}, 1.0};
    if (byte != 0) return PST_EUNSUPPORTED;
    async_call(async_of(device), stream, async_do_cast, &zeros, sizeof zeros);
    return PST_OK;
}

static inline pst_status async_alloc(pst_device *device, pst_memory_kind kind, size_t bytes,
                                     void **memory) {
    (void)device, (void)kind;
    *memory = aligned_alloc(512, (bytes + 511) / 512 * 512);
    if (*memory == NULL) return PST_ENOMEM;
    memset(*memory, 0xfe, bytes < 65536 ? bytes : 65536); /* nobody may count on zeros */
    return PST_OK;
}

static inline void async_free(pst_device *device, pst_memory_kind kind, void *memory,
                              size_t bytes) {
    (void)device, (void)kind, (void)bytes;
    free(memory);
}

/* ---- opening and closing --------------------------------------------------------------------- */

static inline async_device *async_open(uint64_t seed, unsigned delay_us) {
    async_device *async = calloc(1, sizeof *async);
    async->ops = (pst_device_ops){.api_version = PST_DEVICE_API_VERSION,
                                  .name = "async",
                                  .stream_create = async_stream_create,
                                  .stream_wrap = async_stream_wrap,
                                  .stream_destroy = async_stream_destroy,
                                  .launch = async_launch,
                                  .event_create = async_event_create,
                                  .event_destroy = async_event_destroy,
                                  .event_record = async_event_record,
                                  .stream_wait = async_stream_wait,
                                  .event_query = async_event_query,
                                  .copy = async_copy,
                                  .alloc = async_alloc,
                                  .free = async_free,
                                  .cast_scale_copy = async_cast_scale_copy,
                                  .sum = async_add_up,
                                  .copy_rows = async_copy_rows,
                                  .fill = async_fill,
                                  .adamw_prepare = async_adamw_prepare,
                                  .adamw = async_adamw};
    async->device = (pst_device){&async->ops, async};
    async->dice = seed;
    async->delay_us = delay_us;
    (void)pthread_mutex_init(&async->lock, NULL);
    (void)pthread_cond_init(&async->changed, NULL);
    (void)pthread_create(&async->thread, NULL, async_main, async);
    return async;
}

/* What is still enqueued never happens. */
static inline void async_close(async_device *async) {
    if (async == NULL) return;
    (void)pthread_mutex_lock(&async->lock);
    async->stop = 1;
    (void)pthread_cond_signal(&async->changed);
    (void)pthread_mutex_unlock(&async->lock);
    (void)pthread_join(async->thread, NULL);
    while (async->streams != NULL) {
        pst_stream *next = async->streams->next;
        while (async->streams->first != NULL)
            async_remove_first(async->streams);
        free(async->streams);
        async->streams = next;
    }
    while (async->events != NULL) {
        pst_event *next = async->events->next;
        free(async->events);
        async->events = next;
    }
    (void)pthread_cond_destroy(&async->changed);
    (void)pthread_mutex_destroy(&async->lock);
    free(async);
}

/* 1: nothing happens from here on, whatever is enqueued; 0: it goes on. */
static inline void async_pause(async_device *async, int is_paused) {
    (void)pthread_mutex_lock(&async->lock);
    async->is_paused = is_paused;
    (void)pthread_cond_signal(&async->changed);
    (void)pthread_mutex_unlock(&async->lock);
}

#endif
