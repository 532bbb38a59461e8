/* A device cuda on the fake driver, for the tests of this folder and of those who build on it. */
#ifndef PST_TESTS_CUDA_FIXTURE_H
#define PST_TESTS_CUDA_FIXTURE_H

#include "tests/sched/harness.h"

#include <fake_driver.h>
#include <penstock/cuda.h>

typedef struct fixture {
    pst_runtime *runtime;
    pst_device *device;
    const pst_device_ops *ops;
    pst_stream *a, *b;
} fixture;

static inline pst_cuda_options fake_options(int ordinal) {
    return (pst_cuda_options){.size = sizeof(pst_cuda_options),
                              .ordinal = ordinal,
                              .driver = FAKE_CUDA_PATH,
                              .nvrtc = FAKE_CUDA_PATH,
                              .cache = FAKE_CUDA_CACHE};
}

static inline int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    const pst_cuda_options options = fake_options(0);
    f->runtime = open_runtime(20000);
    assert_ok(pst_cuda_device_create(f->runtime, &options, &f->device));
    f->ops = f->device->ops;
    assert_ok(f->ops->stream_create(f->device, 0, &f->a));
    assert_ok(f->ops->stream_create(f->device, 0, &f->b));
    fake_cuda_reset();
    *state = f;
    return 0;
}

static inline int teardown(void **state) {
    fixture *f = *state;
    fake_cuda_reset();
    f->ops->stream_destroy(f->device, f->a);
    f->ops->stream_destroy(f->device, f->b);
    pst_runtime_destroy(f->runtime);
    f->ops->destroy(f->device);
    assert_int_equal(fake_cuda_live(), 0);
    assert_int_equal(fake_cuda_live_memory(), 0);
    free(f);
    return 0;
}

static inline pst_event *record(fixture *f, pst_stream *stream) {
    pst_event *event = NULL;
    assert_ok(f->ops->event_create(f->device, 0, &event));
    assert_ok(f->ops->event_record(f->device, event, stream));
    return event;
}

/* Until all that is enqueued on the stream is done. */
static inline void finish(fixture *f, pst_stream *stream) {
    pst_event *event = record(f, stream);
    while (f->ops->event_query(f->device, event) == PST_PENDING)
        yield_briefly();
    assert_ok(f->ops->event_query(f->device, event));
    f->ops->event_destroy(f->device, event);
}

static inline void *alloc(fixture *f, pst_memory_kind kind, size_t bytes) {
    void *memory = NULL;
    assert_ok(f->ops->alloc(f->device, kind, bytes, &memory));
    return memory;
}

#endif
