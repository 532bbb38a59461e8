/* An asynchronous device whose streams are queues that the test advances by hand: what is launched,
 * recorded or waited for is an operation of its stream, and runs when the test says so. It counts
 * what it was asked, and can be told to fail. */
#ifndef PST_TESTS_SCHED_QUEUE_DEVICE_H
#define PST_TESTS_SCHED_QUEUE_DEVICE_H

#include "tests/sched/harness.h"

#include <pthread.h>

typedef enum operation_kind { OPERATION_WORK, OPERATION_RECORD, OPERATION_WAIT } operation_kind;

typedef struct operation {
    operation_kind kind;
    void *subject;   /* the work's argument; the event */
    uint64_t record; /* RECORD: the number of this record; WAIT: the record that is waited for */
    struct operation *next;
} operation;

struct pst_stream {
    operation *first, **end;
    pst_stream *next;
};

struct pst_event {
    uint64_t asked, reached; /* the numbers of the latest records, issued and run; 0: none */
    pst_event *next;
};

typedef struct queue_device {
    pst_device device;
    pst_device_ops ops;
    pthread_mutex_t lock; /* several lanes' threads launch while the test advances */
    pst_stream *streams;
    uint64_t records; /* a number for each record */
    size_t works, recorded, waits, queries, live_events, created_events;
    pst_status fail_record, fail_query, fail_create; /* what these calls answer from now on */
    void (*ran)(void *context, void *argument);      /* a work's turn has come */
    void *ran_context;
    pst_event *events; /* destroyed at the end; an event may still be in a queue */
} queue_device;

static inline queue_device *queue_of(pst_device *device) {
    return device->context;
}

static inline void enqueue(pst_stream *stream, operation_kind kind, void *subject,
                           uint64_t record) {
    operation *added = calloc(1, sizeof *added);
    *added = (operation){kind, subject, record, NULL};
    *stream->end = added;
    stream->end = &added->next;
}

static inline pst_status queue_stream_create(pst_device *device, int priority,
                                             pst_stream **created) {
    (void)priority;
    queue_device *queue = queue_of(device);
    pst_stream *stream = calloc(1, sizeof *stream);
    stream->end = &stream->first;
    pthread_mutex_lock(&queue->lock);
    stream->next = queue->streams;
    queue->streams = stream;
    pthread_mutex_unlock(&queue->lock);
    *created = stream;
    return PST_OK;
}

static inline pst_status queue_stream_wrap(pst_device *device, void *native, pst_stream **created) {
    (void)native;
    return queue_stream_create(device, 0, created);
}

/* Streams live as long as the device, so that the test can look into them. */
static inline void queue_stream_destroy(pst_device *device, pst_stream *stream) {
    (void)device, (void)stream;
}

static inline pst_status queue_launch(pst_device *device, pst_stream *stream,
                                      const pst_work *work) {
    queue_device *queue = queue_of(device);
    const pst_status status = work->start(work->argument, stream);
    if (status != PST_OK) return status;
    pthread_mutex_lock(&queue->lock);
    queue->works++;
    enqueue(stream, OPERATION_WORK, work->argument, 0);
    pthread_mutex_unlock(&queue->lock);
    return PST_OK;
}

static inline pst_status queue_event_create(pst_device *device, int timed, pst_event **created) {
    (void)timed;
    queue_device *queue = queue_of(device);
    if (queue->fail_create != PST_OK) return queue->fail_create;
    pst_event *event = calloc(1, sizeof *event);
    pthread_mutex_lock(&queue->lock);
    event->next = queue->events;
    queue->events = event;
    queue->live_events++;
    queue->created_events++;
    pthread_mutex_unlock(&queue->lock);
    *created = event;
    return PST_OK;
}

static inline void queue_event_destroy(pst_device *device, pst_event *event) {
    queue_device *queue = queue_of(device);
    (void)event;
    pthread_mutex_lock(&queue->lock);
    queue->live_events--;
    pthread_mutex_unlock(&queue->lock);
}

static inline pst_status queue_event_record(pst_device *device, pst_event *event,
                                            pst_stream *stream) {
    queue_device *queue = queue_of(device);
    if (queue->fail_record != PST_OK) return queue->fail_record;
    pthread_mutex_lock(&queue->lock);
    queue->recorded++;
    event->asked = ++queue->records;
    enqueue(stream, OPERATION_RECORD, event, event->asked);
    pthread_mutex_unlock(&queue->lock);
    return PST_OK;
}

static inline pst_status queue_stream_wait(pst_device *device, pst_stream *stream,
                                           pst_event *event) {
    queue_device *queue = queue_of(device);
    pthread_mutex_lock(&queue->lock);
    queue->waits++;
    enqueue(stream, OPERATION_WAIT, event, event->asked);
    pthread_mutex_unlock(&queue->lock);
    return PST_OK;
}

static inline pst_status queue_event_query(pst_device *device, pst_event *event) {
    queue_device *queue = queue_of(device);
    if (queue->fail_query != PST_OK) return queue->fail_query;
    pthread_mutex_lock(&queue->lock);
    queue->queries++;
    const int done = event->reached >= event->asked;
    pthread_mutex_unlock(&queue->lock);
    return done ? PST_OK : PST_PENDING;
}

/* ---- the test's side -------------------------------------------------------------------- */

static inline void queue_open(queue_device *queue) {
    *queue = (queue_device){.ops = {.api_version = PST_DEVICE_API_VERSION,
                                    .name = "queue",
                                    .stream_create = queue_stream_create,
                                    .stream_wrap = queue_stream_wrap,
                                    .stream_destroy = queue_stream_destroy,
                                    .launch = queue_launch,
                                    .event_create = queue_event_create,
                                    .event_destroy = queue_event_destroy,
                                    .event_record = queue_event_record,
                                    .stream_wait = queue_stream_wait,
                                    .event_query = queue_event_query}};
    queue->device = (pst_device){&queue->ops, queue};
    pthread_mutex_init(&queue->lock, NULL);
}

static inline void queue_close(queue_device *queue) {
    while (queue->streams != NULL) {
        pst_stream *stream = queue->streams;
        queue->streams = stream->next;
        while (stream->first != NULL) {
            operation *next = stream->first->next;
            free(stream->first);
            stream->first = next;
        }
        free(stream);
    }
    while (queue->events != NULL) {
        pst_event *next = queue->events->next;
        free(queue->events);
        queue->events = next;
    }
    pthread_mutex_destroy(&queue->lock);
}

/* Runs the stream's oldest operation. 0 when there is none, or when it waits. */
static inline int queue_step(queue_device *queue, pst_stream *stream) {
    int did = 0;
    void *argument = NULL;
    pthread_mutex_lock(&queue->lock);
    operation *oldest = stream->first;
    const pst_event *event = oldest == NULL ? NULL : oldest->subject;
    if (oldest != NULL && (oldest->kind != OPERATION_WAIT || event->reached >= oldest->record)) {
        if (oldest->kind == OPERATION_RECORD)
            ((pst_event *)oldest->subject)->reached = oldest->record;
        if (oldest->kind == OPERATION_WORK) argument = oldest->subject;
        stream->first = oldest->next;
        if (stream->first == NULL) stream->end = &stream->first;
        free(oldest);
        did = 1;
    }
    pthread_mutex_unlock(&queue->lock);
    if (argument != NULL && queue->ran != NULL) queue->ran(queue->ran_context, argument);
    return did;
}

/* Runs everything that can run on all streams. */
static inline int queue_drain(queue_device *queue) {
    int did = 0, again = 1;
    while (again) {
        again = 0;
        for (pst_stream *stream = queue->streams; stream != NULL; stream = stream->next)
            while (queue_step(queue, stream))
                did = again = 1;
    }
    return did;
}

/* The end of a test: what is enqueued runs, and no event is left behind by the runtime. */
static inline void queue_end(queue_device *queue, pst_runtime *runtime) {
    queue_drain(queue);
    pst_runtime_destroy(runtime);
    assert_int_equal(queue->live_events, 0);
    queue_close(queue);
}

static inline pst_lane *open_queue_lane(pst_runtime *runtime, queue_device *queue, const char *name,
                                        pst_lane_mode mode) {
    const pst_lane_options options = {
        .size = sizeof options, .name = name, .device = &queue->device, .mode = mode};
    pst_lane *lane = NULL;
    assert_ok(pst_lane_create(runtime, &options, &lane));
    return lane;
}

#endif
