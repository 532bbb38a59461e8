/* The device `sim`: effects come when the clock gets there, in the order of the streams. */
#include "tests/sched/harness.h"

#include "tests/device/sim.h"

#include <unistd.h>

typedef struct fixture {
    pst__heap heap;
    uint64_t clock, late;
    const char *fails; /* the call that does; NULL: none */
    pst_device *device;
    pst_stream *one, *other;
    pst_event *event;
} fixture;

static uint64_t now(void *context) {
    return ((fixture *)context)->clock;
}

static uint64_t late(void *context) {
    return ((fixture *)context)->late;
}

static pst_status fault(void *context, const char *call) {
    const fixture *f = context;
    return f->fails != NULL && strcmp(f->fails, call) == 0 ? PST_EDEVICE : PST_OK;
}

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    const pst__sim_options options = {.now = now,
                                      .late = late,
                                      .fault = fault,
                                      .context = f,
                                      .latency_ns = 100,
                                      .bytes_each_us = 1000};
    assert_ok(pst__heap_init(&f->heap, NULL));
    assert_ok(pst__sim_create(&f->heap, &options, &f->device));
    assert_ok(f->device->ops->stream_create(f->device, 0, &f->one));
    assert_ok(f->device->ops->stream_create(f->device, 0, &f->other));
    assert_ok(f->device->ops->event_create(f->device, 0, &f->event));
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    f->device->ops->event_destroy(f->device, f->event);
    f->device->ops->stream_destroy(f->device, f->one);
    f->device->ops->stream_destroy(f->device, f->other);
    f->device->ops->destroy(f->device);
    free(f);
    return 0;
}

static void fill(const fixture *f, pst_stream *stream, int *value, int byte) {
    assert_ok(f->device->ops->fill(f->device, stream, value, byte, sizeof *value));
}

static pst_status query(fixture *f, uint64_t clock) {
    f->clock = clock;
    return f->device->ops->event_query(f->device, f->event);
}

static void an_effect_comes_at_the_operations_end(void **state) {
    fixture *f = *state;
    int value = 0;
    fill(f, f->one, &value, 1);
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_status(query(f, 103), PST_PENDING);
    assert_int_equal(value, 0);
    assert_ok(query(f, 104)); /* 100 ns and 4 bytes at one a nanosecond */
    assert_int_equal(value, 0x01010101);
}

static void a_stream_goes_on_behind_the_event_that_it_waits_for(void **state) {
    fixture *f = *state;
    int value = 0;
    for (int i = 0; i < 3; i++)
        fill(f, f->one, &value, 1);
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_ok(f->device->ops->stream_wait(f->device, f->other, f->event));
    fill(f, f->other, &value, 2);
    assert_ok(query(f, 312));
    assert_int_equal(value, 0x01010101);
    assert_ok(query(f, 416));
    assert_int_equal(value, 0x02020202);
}

static void streams_that_nobody_orders_run_by_the_clock_and_not_by_the_calls(void **state) {
    fixture *f = *state;
    int value = 0, elsewhere = 0;
    fill(f, f->one, &elsewhere, 1);
    fill(f, f->one, &value, 1);
    fill(f, f->other, &value, 2);
    assert_ok(query(f, 1000));
    assert_int_equal(value, 0x01010101);
}

static void a_late_event_is_seen_late_and_holds_no_stream_up(void **state) {
    fixture *f = *state;
    int value = 0;
    f->late = 50;
    fill(f, f->one, &value, 1);
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_ok(f->device->ops->stream_wait(f->device, f->other, f->event));
    assert_status(query(f, 153), PST_PENDING);
    assert_ok(query(f, 154));
}

static void a_fault_takes_the_place_of_its_call_alone(void **state) {
    fixture *f = *state;
    int value = 0;
    f->fails = "fill";
    assert_status(f->device->ops->fill(f->device, f->one, &value, 1, sizeof value), PST_EDEVICE);
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_ok(query(f, 1000));
    assert_int_equal(value, 0);
}

static void a_wait_ends_when_the_flag_is_written(void **state) {
    fixture *f = *state;
    const pst_device_ops *ops = f->device->ops;
    uint32_t flag = 6;
    int value = 0;
    assert_ok(ops->stream_wait32(f->device, f->one, &flag, 7));
    fill(f, f->one, &value, 1);
    assert_ok(ops->event_record(f->device, f->event, f->one));
    assert_status(query(f, 1000), PST_PENDING);
    assert_ok(ops->stream_write32(f->device, f->other, &flag, 7));
    assert_status(query(f, 1100), PST_PENDING); /* the write takes 100, the fill 104 */
    assert_int_equal(flag, 7);
    assert_status(query(f, 1203), PST_PENDING);
    assert_ok(query(f, 1204));
    assert_int_equal(value, 0x01010101);
}

static void a_flag_is_compared_across_the_wrap(void **state) {
    fixture *f = *state;
    uint32_t flag = UINT32_MAX;
    assert_ok(f->device->ops->stream_wait32(f->device, f->one, &flag, 1));
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_status(query(f, 1000), PST_PENDING);
    assert_ok(f->device->ops->stream_write32(f->device, f->other, &flag, 2));
    assert_ok(query(f, 2000));
}

static void the_host_releases_a_wait(void **state) {
    fixture *f = *state;
    uint32_t flag = 0;
    assert_ok(f->device->ops->stream_wait32(f->device, f->one, &flag, 7));
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_status(query(f, 1000), PST_PENDING);
    assert_ok(f->device->ops->flag_write32(f->device, &flag, 7));
    assert_ok(query(f, 1000));
}

static void an_event_is_waited_for_as_it_was_recorded_then(void **state) {
    fixture *f = *state;
    uint32_t flag = 0;
    int value = 0;
    fill(f, f->one, &value, 1);
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_ok(f->device->ops->stream_wait(f->device, f->other, f->event));
    fill(f, f->other, &value, 2);
    assert_ok(f->device->ops->stream_wait32(f->device, f->one, &flag, 1));
    assert_ok(f->device->ops->event_record(f->device, f->event, f->one));
    assert_status(query(f, 1000), PST_PENDING);
    assert_int_equal(value, 0x02020202);
}

static void a_destroyed_stream_ends_what_it_has(void **state) {
    fixture *f = *state;
    int value = 0;
    pst_stream *stream;
    assert_ok(f->device->ops->stream_create(f->device, 0, &stream));
    fill(f, stream, &value, 1);
    assert_ok(f->device->ops->event_record(f->device, f->event, stream));
    f->device->ops->stream_destroy(f->device, stream);
    assert_ok(query(f, 1000));
    assert_int_equal(value, 0x01010101);
}

static void exported_memory_is_imported_at_its_place(void **state) {
    fixture *f = *state;
    void *memory, *imported = NULL;
    int descriptor = -1;
    assert_ok(f->device->ops->alloc(f->device, PST_MEMORY_DEVICE, 64, &memory));
    assert_ok(f->device->ops->memory_export(f->device, memory, &descriptor));
    assert_ok(f->device->ops->memory_import(f->device, descriptor, 64, &imported));
    assert_ptr_equal(imported, memory);
    assert_int_equal(close(descriptor), 0);
    f->device->ops->free(f->device, PST_MEMORY_DEVICE, memory, 64);
    *(int *)imported = 7; /* it is there until the last one lets go of it */
    f->device->ops->memory_unmap(f->device, imported, 64);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(an_effect_comes_at_the_operations_end),
        TEST(a_stream_goes_on_behind_the_event_that_it_waits_for),
        TEST(streams_that_nobody_orders_run_by_the_clock_and_not_by_the_calls),
        TEST(a_late_event_is_seen_late_and_holds_no_stream_up),
        TEST(a_fault_takes_the_place_of_its_call_alone),
        TEST(a_wait_ends_when_the_flag_is_written),
        TEST(a_flag_is_compared_across_the_wrap),
        TEST(the_host_releases_a_wait),
        TEST(an_event_is_waited_for_as_it_was_recorded_then),
        TEST(a_destroyed_stream_ends_what_it_has),
        TEST(exported_memory_is_imported_at_its_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
