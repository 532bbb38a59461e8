/* Events of the device cuda: pooled, and their times on the host's clock. */
#include "base/clock.h"
#include "sched/cuda/cuda.h"

/* Times come from a float of milliseconds: within this span of the anchor its steps are 0.1 us. */
#define ANCHOR_SPAN_NS        1000000000u
#define ANCHOR_GOOD_NS        20000u
#define ANCHOR_LIMIT_NS       1000000u
#define FIRST_ANCHOR_LIMIT_NS 1000000000u
#define ANCHOR_TRIES          3

void *pst_cuda_event(const pst_event *event) {
    return event == NULL ? NULL : event->native;
}

/* ---- the pools ---------------------------------------------------------------------- */

static void push(pst__cuda_pool *pool, pst_event *event) {
    ck_spinlock_lock(&pool->lock);
    event->next = pool->first;
    pool->first = event;
    ck_spinlock_unlock(&pool->lock);
}

static pst_event *pop(pst__cuda_pool *pool) {
    ck_spinlock_lock(&pool->lock);
    pst_event *event = pool->first;
    if (event != NULL) pool->first = event->next;
    ck_spinlock_unlock(&pool->lock);
    return event;
}

static pst_status create(pst__cuda *cuda, pst__cuda_pool *pool, pst_event **created) {
    pst_event *event = pst__heap_alloc(&cuda->heap, sizeof *event);
    if (event == NULL) return pst__cuda_refuse(cuda, PST_ENOMEM, "no memory for an event");
    const unsigned flags = pool == &cuda->timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
    event->pool = pool;
    const pst_status status =
        pst__cuda_call(cuda, cuEventCreate, (&event->native, flags), "flags %u", flags);
    if (status == PST_OK)
        *created = event;
    else
        pst__heap_free(&cuda->heap, event, sizeof *event);
    return status;
}

/* What is in a pool is done, so that it looks like one that was never recorded. */
static pst_status take(pst__cuda *cuda, pst__cuda_pool *pool, pst_event **event) {
    *event = pop(pool);
    return *event != NULL ? PST_OK : create(cuda, pool, event);
}

static void free_pool(pst__cuda *cuda, pst__cuda_pool *pool) {
    for (pst_event *event = pop(pool); event != NULL; event = pop(pool)) {
        (void)cuda->driver.cuEventDestroy(event->native);
        pst__heap_free(&cuda->heap, event, sizeof *event);
    }
}

/* ---- the anchor --------------------------------------------------------------------- */

/* How long it took until the record of `event` was seen, at most `limit`; 0: it was not. The record
 * happened within that span, whose middle on the host's clock is *middle. */
static uint64_t try_anchor(pst__cuda *cuda, CUevent event, uint64_t limit, uint64_t *middle) {
    const uint64_t begin = pst__now();
    if (cuda->driver.cuEventRecord(event, cuda->service) != CUDA_SUCCESS) return 0;
    while (cuda->driver.cuEventQuery(event) != CUDA_SUCCESS)
        if (pst__now() - begin > limit) return 0;
    const uint64_t span = pst__now() - begin;
    *middle = begin + span / 2;
    return span == 0 ? 1 : span;
}

/* Under the lock, within the context. What stands is kept where this does not succeed. */
static void renew(pst__cuda *cuda, uint64_t limit) {
    pst__cuda_anchor *anchor = &cuda->anchor;
    uint64_t middle = 0, span = 0;
    for (int tries = 0; tries < ANCHOR_TRIES; tries++) {
        span = try_anchor(cuda, anchor->spare, limit, &middle);
        if (span == 0) return;
        if (span < ANCHOR_GOOD_NS) break;
    }
    CUevent old = anchor->event;
    anchor->event = anchor->spare;
    anchor->spare = old;
    anchor->host_ns = middle;
}

/* The first timed event takes the anchor. */
static pst_status ensure_anchor(pst__cuda *cuda) {
    pst__cuda_anchor *anchor = &cuda->anchor;
    pst_status status = PST_OK;
    (void)pthread_mutex_lock(&anchor->lock);
    if (anchor->event == NULL)
        status = pst__cuda_call(cuda, cuEventCreate, (&anchor->event, CU_EVENT_DEFAULT), "timed");
    if (status == PST_OK && anchor->spare == NULL)
        status = pst__cuda_call(cuda, cuEventCreate, (&anchor->spare, CU_EVENT_DEFAULT), "timed");
    if (status == PST_OK && anchor->host_ns == 0) {
        renew(cuda, FIRST_ANCHOR_LIMIT_NS);
        if (anchor->host_ns == 0)
            status = pst__cuda_refuse(cuda, PST_ETIMEDOUT, "an event was not seen for a second");
    }
    (void)pthread_mutex_unlock(&anchor->lock);
    return status;
}

/* ---- the table's functions ---------------------------------------------------------- */

pst_status pst__cuda_event_create(pst_device *device, int timed, pst_event **event) {
    pst__cuda *cuda = pst__cuda_of(device);
    *event = NULL;
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    const pst_status status = timed ? ensure_anchor(cuda) : PST_OK;
    return status != PST_OK ? status : take(cuda, timed ? &cuda->timed : &cuda->untimed, event);
}

void pst__cuda_event_destroy(pst_device *device, pst_event *event) {
    (void)device;
    if (event != NULL) push(event->pool, event);
}

/* A thread that holds the event from its use before may ask for it meanwhile, and the driver
 * refuses questions about events of captures: so the event is known as one before its record in a
 * capture, and no longer behind its record outside. Releases: see pst__cuda_event_capture. */
pst_status pst__cuda_event_record(pst_device *device, pst_event *event, pst_stream *stream) {
    pst__cuda *cuda = pst__cuda_of(device);
    PST__CUDA_ENTER_OR_RETURN(cuda, stream);
    const uint64_t capture = pst__cuda_capture_of(cuda, stream);
    if (capture != 0) pst__store_release(&event->capture, capture);
    const pst_status status =
        pst__cuda_call(cuda, cuEventRecord, (event->native, stream->native), "event %p, stream %p",
                       (void *)event->native, (void *)stream->native);
    if (status == PST_OK) pst__store_release(&event->capture, capture);
    return status;
}

/* The thread that captures may ask the driver for no event; this asks for it all the same. */
static pst_status query_beside_capture(pst__cuda *cuda, const pst_event *event) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    pst_status status = pst__cuda_call(cuda, cuThreadExchangeStreamCaptureMode, (&mode), "relaxed");
    if (status != PST_OK) return status;
    status = pst__cuda_call(cuda, cuEventQuery, (event->native), "event %p", (void *)event->native);
    (void)cuda->driver.cuThreadExchangeStreamCaptureMode(&mode);
    return status;
}

pst_status pst__cuda_event_query(pst_device *device, pst_event *event) {
    pst__cuda *cuda = pst__cuda_of(device);
    const uint64_t recorded = pst__cuda_event_capture(event);
    const uint64_t running = pst__load_relaxed(&cuda->capture);
    if (recorded != 0) return recorded == running ? PST_PENDING : PST_OK; /* see capture.c */
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    if (running != 0) return query_beside_capture(cuda, event);
    return pst__cuda_call(cuda, cuEventQuery, (event->native), "event %p", (void *)event->native);
}

static pst_status get_time(pst__cuda *cuda, const pst_event *event, uint64_t *nanoseconds) {
    pst__cuda_anchor *anchor = &cuda->anchor;
    float milliseconds = 0;
    (void)pthread_mutex_lock(&anchor->lock);
    /* A renewal asks for events, which would end a capture. */
    if (pst__load_relaxed(&cuda->capture) == 0 && pst__now() - anchor->host_ns > ANCHOR_SPAN_NS)
        renew(cuda, ANCHOR_LIMIT_NS);
    const pst_status status =
        pst__cuda_call(cuda, cuEventElapsedTime, (&milliseconds, anchor->event, event->native),
                       "event %p", (void *)event->native);
    if (status == PST_OK)
        *nanoseconds = anchor->host_ns + (uint64_t)(int64_t)((double)milliseconds * 1e6);
    (void)pthread_mutex_unlock(&anchor->lock);
    return status;
}

pst_status pst__cuda_event_time(pst_device *device, pst_event *event, uint64_t *nanoseconds) {
    pst__cuda *cuda = pst__cuda_of(device);
    if (event->pool != &cuda->timed)
        return pst__cuda_refuse(cuda, PST_EINVAL, "event %p was not created as a timed one",
                                (void *)event->native);
    PST__CUDA_ENTER_OR_RETURN(cuda, NULL);
    return get_time(cuda, event, nanoseconds);
}

/* ---- for the device ----------------------------------------------------------------- */

void pst__cuda_events_free(pst__cuda *cuda) {
    free_pool(cuda, &cuda->untimed);
    free_pool(cuda, &cuda->timed);
    if (cuda->anchor.event != NULL) (void)cuda->driver.cuEventDestroy(cuda->anchor.event);
    if (cuda->anchor.spare != NULL) (void)cuda->driver.cuEventDestroy(cuda->anchor.spare);
}
