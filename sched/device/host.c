#include "sched/device/host.h"

#include "base/atomic.h"

#include <string.h>
#include <sys/mman.h>

/* Work is done, or begun, by the thread that launches. One launch at a time can be pending. */
struct pst_stream {
    pst_status (*test)(void *argument); /* of the pending launch; NULL: none */
    void *argument;
    uint64_t launched; /* read by event_record, which the launching thread calls */
    uint64_t finished; /* read by any thread that asks for an event */
};

/* Done when its stream has finished `launches` launches. Recorded by one thread at a time, asked
 * for by any: an odd version says that the other two are being written. */
struct pst_event {
    uint64_t version;
    pst_stream *stream; /* NULL: never recorded */
    uint64_t launches;
};

static const pst__heap *heap_of(const pst_device *device) {
    return device->context;
}

/* ---- streams ---------------------------------------------------------------------------- */

static pst_status stream_create(pst_device *device, int priority, pst_stream **stream) {
    (void)priority;
    *stream = pst__heap_alloc(heap_of(device), sizeof **stream);
    return *stream == NULL ? PST_ENOMEM : PST_OK;
}

static pst_status stream_wrap(pst_device *device, void *native, pst_stream **stream) {
    return native != NULL ? PST_EUNSUPPORTED : stream_create(device, 0, stream);
}

static void stream_destroy(pst_device *device, pst_stream *stream) {
    pst__heap_free(heap_of(device), stream, sizeof *stream);
}

/* Release: whoever sees the count (event_query) sees what the work wrote. One thread at a time
 * launches on a stream, so the count needs no read-modify-write. */
static pst_status finish(pst_stream *stream, pst_status status) {
    stream->test = NULL;
    pst__store_release(&stream->finished, stream->launched);
    return status;
}

static pst_status launch(pst_device *device, pst_stream *stream, const pst_work *work) {
    (void)device;
    if (stream->test != NULL) return PST_EBUSY;
    stream->launched++;
    pst_status status = work->start(work->argument, stream);
    if (status != PST_PENDING || work->test == NULL) return finish(stream, status);
    stream->test = work->test;
    stream->argument = work->argument;
    return PST_PENDING;
}

static pst_status progress(pst_device *device, pst_stream *stream) {
    (void)device;
    if (stream->test == NULL) return PST_OK;
    pst_status status = stream->test(stream->argument);
    return status == PST_PENDING ? PST_PENDING : finish(stream, status);
}

/* ---- events ----------------------------------------------------------------------------- */

static pst_status event_create(pst_device *device, int timed, pst_event **event) {
    if (timed) return PST_EUNSUPPORTED;
    *event = pst__heap_alloc(heap_of(device), sizeof **event);
    return *event == NULL ? PST_ENOMEM : PST_OK;
}

static void event_destroy(pst_device *device, pst_event *event) {
    pst__heap_free(heap_of(device), event, sizeof *event);
}

/* Release of the fields: who sees one of them (event_query) sees the odd version too; and what the
 * recording thread wrote before. Release of the even version: who sees it sees both fields. */
static pst_status event_record(pst_device *device, pst_event *event, pst_stream *stream) {
    (void)device;
    const uint64_t version = pst__load_relaxed(&event->version); /* this thread's own */
    pst__store_relaxed(&event->version, version + 1);
    pst__store_release(&event->stream, stream);
    pst__store_release(&event->launches, stream->launched);
    pst__store_release(&event->version, version + 2);
    return PST_OK;
}

/* Caught in the middle of a recording, the event counts as not done. */
static pst_status event_query(pst_device *device, pst_event *event) {
    (void)device;
    /* Acquires: pair with the releases in event_record; the second look at the version comes after
     * the fields because their loads acquire. */
    const uint64_t version = pst__load_acquire(&event->version);
    pst_stream *stream = pst__load_acquire(&event->stream);
    const uint64_t launches = pst__load_acquire(&event->launches);
    if (version % 2 != 0 || pst__load_relaxed(&event->version) != version) return PST_PENDING;
    if (stream == NULL) return PST_OK;
    /* Acquire: pairs with the release in finish. */
    return pst__load_acquire(&stream->finished) >= launches ? PST_OK : PST_PENDING;
}

static pst_status stream_wait(pst_device *device, pst_stream *stream, pst_event *event) {
    (void)stream;
    return event_query(device, event);
}

/* ---- copies and kernels ----------------------------------------------------------------- */

static pst_status copy(pst_device *device, pst_stream *stream, const pst_copy *copies,
                       size_t count) {
    (void)device, (void)stream;
    for (size_t i = 0; i < count; i++)
        if (copies[i].bytes > 0) memmove(copies[i].destination, copies[i].source, copies[i].bytes);
    return PST_OK;
}

static pst_status copy_2d(pst_device *device, pst_stream *stream, void *destination,
                          size_t destination_pitch, const void *source, size_t source_pitch,
                          size_t row_bytes, size_t rows) {
    (void)device, (void)stream;
    if (row_bytes == 0) return PST_OK;
    for (size_t row = 0; row < rows; row++)
        memcpy((unsigned char *)destination + row * destination_pitch,
               (const unsigned char *)source + row * source_pitch, row_bytes);
    return PST_OK;
}

static pst_status cast_scale_copy(pst_device *device, pst_stream *stream, const pst_cast *pieces,
                                  size_t count, double scale) {
    (void)device, (void)stream;
    for (size_t i = 0; i < count; i++) {
        pst_status status = pst__host_cast(&pieces[i], scale);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static pst_status sum(pst_device *device, pst_stream *stream, const pst_sum *sum) {
    (void)device, (void)stream;
    return pst__host_sum(sum);
}

static pst_status maximum(pst_device *device, pst_stream *stream, const pst_sum *maximum) {
    (void)device, (void)stream;
    return pst__host_maximum(maximum);
}

static pst_status copy_rows(pst_device *device, pst_stream *stream, const pst_row_copy *copy) {
    (void)device, (void)stream;
    pst__host_copy_rows(copy);
    return PST_OK;
}

static pst_status adamw_prepare(pst_device *device, pst_stream *stream,
                                const pst_adamw_settings *settings, float *const *steps,
                                size_t count, void *coefficients) {
    (void)device, (void)stream;
    pst__host_adamw_prepare(settings, steps, count, coefficients);
    return PST_OK;
}

static pst_status adamw(pst_device *device, pst_stream *stream, const pst_adamw_piece *pieces,
                        size_t count) {
    (void)device, (void)stream;
    for (size_t i = 0; i < count; i++) {
        pst_status status = pst__host_adamw(&pieces[i]);
        if (status != PST_OK) return status;
    }
    return PST_OK;
}

static pst_status fill(pst_device *device, pst_stream *stream, void *memory, int byte,
                       size_t bytes) {
    (void)device, (void)stream;
    if (bytes > 0) memset(memory, byte, bytes);
    return PST_OK;
}

/* ---- memory ----------------------------------------------------------------------------- */

/* Whole pages of the kernel's; device and pinned memory are the same here. */
static pst_status alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory) {
    (void)device, (void)kind;
    *memory = NULL;
    if (bytes == 0) return PST_EINVAL;
    void *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return PST_ENOMEM;
    *memory = mapped;
    return PST_OK;
}

static void release(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes) {
    (void)device, (void)kind;
    if (memory != NULL) (void)munmap(memory, bytes);
}

/* ---- the device ------------------------------------------------------------------------- */

static void destroy(pst_device *device) {
    pst__heap_free(heap_of(device), device, sizeof *device);
}

static const pst_device_ops host_ops = {
    .api_version = PST_DEVICE_API_VERSION,
    .caps = PST_DEVICE_STREAM_IS_WORKER | PST_DEVICE_HOST_ACCESS,
    .name = "host",
    .stream_create = stream_create,
    .stream_wrap = stream_wrap,
    .stream_destroy = stream_destroy,
    .launch = launch,
    .progress = progress,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_query = event_query,
    .copy = copy,
    .copy_2d = copy_2d,
    .alloc = alloc,
    .free = release,
    .cast_scale_copy = cast_scale_copy,
    .sum = sum,
    .fill = fill,
    .maximum = maximum,
    .copy_rows = copy_rows,
    .adamw_prepare = adamw_prepare,
    .adamw = adamw,
    .destroy = destroy,
};

pst_status pst__host_create(const pst__heap *heap, pst_device **created) {
    pst_device *device = pst__heap_alloc(heap, sizeof *device);
    if (device == NULL) return PST_ENOMEM;
    device->ops = &host_ops;
    device->context = (void *)(uintptr_t)heap;
    *created = device;
    return PST_OK;
}
