/* What the device puts into its streams, and what it tells of them. */
#include "base/clock.h"
#include "sched/cuda/cuda.h"
#include "tests/cuda/fixture.h"

/* ---- order -------------------------------------------------------------------------- */

static void copies_of_a_stream_happen_in_order(void **state) {
    fixture *f = *state;
    char bytes[3] = {'a', 'b', 'c'};
    for (int i = 0; i < 2; i++) {
        const pst_copy copy = {&bytes[i + 1], &bytes[i], 1};
        assert_ok(f->ops->copy(f->device, f->a, &copy, 1));
    }
    finish(f, f->a);
    assert_memory_equal(bytes, "aaa", 3);
}

static void a_stream_waits_for_an_event_of_another(void **state) {
    fixture *f = *state;
    char bytes[3] = {'a', 'b', 'c'};
    fake_cuda_hold(1);
    const pst_copy first = {&bytes[1], &bytes[0], 1}, second = {&bytes[2], &bytes[1], 1};
    assert_ok(f->ops->copy(f->device, f->a, &first, 1));
    pst_event *event = record(f, f->a);
    assert_ok(f->ops->stream_wait(f->device, f->b, event));
    assert_ok(f->ops->copy(f->device, f->b, &second, 1));
    assert_status(f->ops->event_query(f->device, event), PST_PENDING);
    assert_memory_equal(bytes, "abc", 3);
    fake_cuda_hold(0);
    finish(f, f->b);
    assert_ok(f->ops->event_query(f->device, event));
    assert_memory_equal(bytes, "aaa", 3);
    f->ops->event_destroy(f->device, event);
}

static void a_stream_of_the_programs_own_waits_for_a_tasks_event(void **state) {
    fixture *f = *state;
    const pst__cuda_driver *driver = &pst__cuda_of(f->device)->driver;
    char bytes[3] = {'a', 'b', 'c'};
    fake_cuda_hold(1);
    const pst_copy first = {&bytes[1], &bytes[0], 1}, second = {&bytes[2], &bytes[1], 1};
    assert_ok(f->ops->copy(f->device, f->a, &first, 1));
    pst_event *event = record(f, f->a);
    const CUevent native = pst_cuda_event(event);
    assert_int_equal(driver->cuEventQuery(native), CUDA_ERROR_NOT_READY);
    assert_int_equal(driver->cuStreamWaitEvent(pst_cuda_stream(f->b), native, 0), CUDA_SUCCESS);
    assert_ok(f->ops->copy(f->device, f->b, &second, 1));
    fake_cuda_hold(0);
    finish(f, f->b);
    assert_memory_equal(bytes, "aaa", 3);
    assert_null(pst_cuda_event(NULL));
    f->ops->event_destroy(f->device, event);
}

static pst_status enqueue_copy(void *argument, pst_stream *stream) {
    fixture *f = argument;
    static char bytes[2] = "x";
    const pst_copy copy = {&bytes[1], &bytes[0], 1};
    return f->ops->copy(f->device, stream, &copy, 1);
}

static void work_enqueues_on_the_stream_it_is_given(void **state) {
    fixture *f = *state;
    const pst_work work = {enqueue_copy, NULL, f};
    assert_ok(f->ops->launch(f->device, f->b, &work));
    assert_int_equal(fake_cuda_calls_on("cuMemcpyAsync", pst_cuda_stream(f->b)), 1);
    finish(f, f->b);
}

static void priorities_are_kept_within_the_devices(void **state) {
    fixture *f = *state;
    const int asked[] = {7, 0, -1, -100}; /* the fake driver refuses what is out of its range */
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        pst_stream *stream = NULL;
        assert_ok(f->ops->stream_create(f->device, asked[i], &stream));
        f->ops->stream_destroy(f->device, stream);
    }
}

/* ---- events ------------------------------------------------------------------------- */

static void an_event_that_was_never_recorded_is_done(void **state) {
    fixture *f = *state;
    pst_event *event = NULL;
    assert_ok(f->ops->event_create(f->device, 0, &event));
    assert_ok(f->ops->event_query(f->device, event));
    f->ops->event_destroy(f->device, event);
}

static void events_are_used_again(void **state) {
    fixture *f = *state;
    pst_event *event = NULL;
    for (int i = 0; i < 10; i++) {
        assert_ok(f->ops->event_create(f->device, 0, &event));
        assert_ok(f->ops->event_record(f->device, event, f->a));
        while (f->ops->event_query(f->device, event) == PST_PENDING)
            yield_briefly();
        f->ops->event_destroy(f->device, event);
    }
    assert_int_equal(fake_cuda_calls("cuEventCreate"), 1);
    assert_int_equal(fake_cuda_calls("cuEventQuery"), 10);
    assert_int_equal(fake_cuda_calls("cuEventDestroy"), 0);
}

static void timed_events_tell_the_hosts_time(void **state) {
    fixture *f = *state;
    pst_event *event = NULL;
    uint64_t at = 0;
    assert_ok(f->ops->event_create(f->device, 1, &event));
    const uint64_t before = pst__now();
    assert_ok(f->ops->event_record(f->device, event, f->a));
    while (f->ops->event_query(f->device, event) == PST_PENDING)
        yield_briefly();
    const uint64_t after = pst__now();
    assert_ok(f->ops->event_time(f->device, event, &at));
    /* As exact as the anchor is, which a busy machine makes late by as much as it takes here. */
    assert_in_range(at, before - 1000000000u, after + 1000000000u);
    f->ops->event_destroy(f->device, event);
}

static void the_time_of_an_untimed_or_pending_event_is_refused(void **state) {
    fixture *f = *state;
    uint64_t at = 0;
    pst_event *untimed = NULL, *timed = NULL;
    assert_ok(f->ops->event_create(f->device, 0, &untimed));
    assert_status(f->ops->event_time(f->device, untimed, &at), PST_EINVAL);
    assert_non_null(strstr(f->ops->error_text(f->device), "timed"));
    assert_ok(f->ops->event_create(f->device, 1, &timed));
    fake_cuda_hold(1);
    assert_ok(f->ops->event_record(f->device, timed, f->a));
    assert_status(f->ops->event_time(f->device, timed, &at), PST_PENDING);
    fake_cuda_hold(0);
    f->ops->event_destroy(f->device, untimed);
    f->ops->event_destroy(f->device, timed);
}

/* ---- wrapped streams, captures ------------------------------------------------------ */

static void the_default_stream_is_wrapped_and_not_destroyed(void **state) {
    fixture *f = *state;
    void *const natives[] = {NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    for (size_t i = 0; i < 3; i++) {
        pst_stream *stream = NULL;
        assert_ok(f->ops->stream_wrap(f->device, natives[i], &stream));
        assert_ptr_equal(pst_cuda_stream(stream), natives[i]);
        finish(f, stream);
        f->ops->stream_destroy(f->device, stream);
    }
    assert_int_equal(fake_cuda_calls("cuStreamDestroy"), 0);
}

static pst_status never(void *argument, pst_stream *stream) {
    (void)argument, (void)stream;
    fail_msg("started under capture");
    return PST_OK;
}

static void a_stream_under_capture_takes_nothing(void **state) {
    fixture *f = *state;
    pst_stream *wrapped = NULL;
    pst_event *event = record(f, f->b);
    char bytes[2] = "x";
    const pst_copy copy = {&bytes[1], &bytes[0], 1};
    const pst_work work = {never, NULL, NULL};
    assert_ok(f->ops->stream_wrap(f->device, pst_cuda_stream(f->a), &wrapped));
    assert_ok(f->ops->event_record(f->device, event, wrapped));
    fake_cuda_capture(pst_cuda_stream(f->a), 1);
    assert_status(f->ops->event_record(f->device, event, wrapped), PST_ESTATE);
    assert_non_null(strstr(f->ops->error_text(f->device), "capture"));
    assert_status(f->ops->stream_wait(f->device, wrapped, event), PST_ESTATE);
    assert_status(f->ops->copy(f->device, wrapped, &copy, 1), PST_ESTATE);
    assert_status(f->ops->fill(f->device, wrapped, bytes, 0, 1), PST_ESTATE);
    assert_status(f->ops->launch(f->device, wrapped, &work), PST_ESTATE);
    fake_cuda_capture(pst_cuda_stream(f->a), 0);
    assert_ok(f->ops->event_record(f->device, event, wrapped));
    assert_ok(pst_runtime_status(f->runtime));
    f->ops->event_destroy(f->device, event);
    f->ops->stream_destroy(f->device, wrapped);
}

/* Although the anchor that times are told by is old. A thread that had a context before may ask for
 * no event. */
static void times_of_before_a_capture_are_told_within(void **state) {
    fixture *f = *state;
    pst__cuda *cuda = pst__cuda_of(f->device);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    pst_stream *wrapped = NULL;
    pst_event *event = NULL;
    fake_graph *graph = NULL;
    uint64_t at = 0;
    assert_ok(f->ops->stream_wrap(f->device, pst_cuda_stream(f->a), &wrapped));
    assert_ok(f->ops->event_create(f->device, 1, &event));
    assert_ok(f->ops->event_record(f->device, event, wrapped));
    finish(f, wrapped);
    cuda->anchor.host_ns -= 2000000000u;
    assert_int_equal(cuda->driver.cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
    fake_cuda_begin_capture(pst_cuda_stream(f->a));
    assert_ok(f->ops->capture_begin(f->device, wrapped));
    assert_ok(f->ops->event_query(f->device, event));
    assert_ok(f->ops->event_time(f->device, event, &at));
    f->ops->capture_end(f->device);
    assert_int_equal(fake_cuda_end_capture(pst_cuda_stream(f->a), &graph), CUDA_SUCCESS);
    assert_int_equal(cuda->driver.cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
    fake_cuda_destroy(graph);
    f->ops->event_destroy(f->device, event);
    f->ops->stream_destroy(f->device, wrapped);
}

/* ---- events of captures ------------------------------------------------------------- */

static pst_event *record_captured(fixture *f) {
    fake_graph *graph = NULL;
    fake_cuda_begin_capture(pst_cuda_stream(f->a));
    assert_ok(f->ops->capture_begin(f->device, f->a));
    pst_event *event = record(f, f->a);
    assert_status(f->ops->event_query(f->device, event), PST_PENDING);
    f->ops->capture_end(f->device);
    assert_int_equal(fake_cuda_end_capture(pst_cuda_stream(f->a), &graph), CUDA_SUCCESS);
    fake_cuda_destroy(graph);
    return event;
}

/* As who asks for it meanwhile finds it, too. */
static void an_event_stays_a_captures_until_it_is_recorded_outside(void **state) {
    fixture *f = *state;
    pst_event *event = record_captured(f);
    assert_ok(f->ops->event_query(f->device, event));
    fake_cuda_fail("cuEventRecord", 1, CUDA_ERROR_INVALID_VALUE);
    assert_status(f->ops->event_record(f->device, event, f->b), PST_EINVAL);
    assert_ok(f->ops->event_query(f->device, event));
    assert_ok(f->ops->stream_wait(f->device, f->b, event));
    fake_cuda_hold(1);
    assert_ok(f->ops->event_record(f->device, event, f->b));
    assert_status(f->ops->event_query(f->device, event), PST_PENDING);
    fake_cuda_hold(0);
    f->ops->event_destroy(f->device, event);
}

static void a_step_of_adamw_may_be_captured(void **state) {
    fixture *f = *state;
    _Alignas(16) static unsigned char coefficients[PST_ADAMW_COEFFICIENTS_BYTES];
    static float step, parameter = 1, gradient = 1, exp_avg, exp_avg_sq;
    float *const steps[] = {&step};
    const pst_adamw_settings settings = {.lr = 0.5, .beta1 = 0.5, .beta2 = 0.5};
    const pst_adamw_piece piece = {.parameter = &parameter,
                                   .gradient = &gradient,
                                   .exp_avg = &exp_avg,
                                   .exp_avg_sq = &exp_avg_sq,
                                   .coefficients = coefficients,
                                   .count = 1};
    pst_stream *wrapped = NULL;
    fake_graph *graph = NULL;
    assert_ok(f->ops->stream_wrap(f->device, pst_cuda_stream(f->a), &wrapped));
    fake_cuda_begin_capture(pst_cuda_stream(f->a));
    assert_ok(f->ops->adamw_prepare(f->device, wrapped, &settings, steps, 1, coefficients));
    assert_ok(f->ops->adamw(f->device, wrapped, &piece, 1));
    assert_int_equal(fake_cuda_end_capture(pst_cuda_stream(f->a), &graph), CUDA_SUCCESS);
    assert_true(step == 0.0f && parameter == 1.0f);
    fake_cuda_launch(graph, pst_cuda_stream(f->a));
    finish(f, wrapped);
    assert_true(step == 1.0f && parameter == 0.5f && exp_avg == 0.5f && exp_avg_sq == 0.5f);
    f->ops->stream_destroy(f->device, wrapped);
}

/* ---- copies and kernels ------------------------------------------------------------- */

static void several_copies_are_one_batch_without_the_empty_ones(void **state) {
    fixture *f = *state;
    enum { COUNT = 300 };
    static unsigned char from[COUNT], to[COUNT];
    static pst_copy copies[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        from[i] = (unsigned char)(i % 250 + 1);
        copies[i] = (pst_copy){&to[i], &from[i], i % 3 == 0 ? 0 : 1};
    }
    assert_ok(f->ops->copy(f->device, f->a, copies, COUNT));
    finish(f, f->a);
    for (size_t i = 0; i < COUNT; i++)
        assert_int_equal(to[i], i % 3 == 0 ? 0 : from[i]);
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), 0);
    assert_int_equal(fake_cuda_calls("cuMemcpyBatchAsync"), 2); /* 200 copies, 128 in a batch */
}

static void the_default_stream_gets_single_copies(void **state) {
    fixture *f = *state;
    pst_stream *stream = NULL;
    char bytes[4] = "ab";
    const pst_copy copies[] = {{&bytes[2], &bytes[0], 1}, {&bytes[3], &bytes[1], 1}};
    assert_ok(f->ops->stream_wrap(f->device, NULL, &stream));
    assert_ok(f->ops->copy(f->device, stream, copies, 2));
    finish(f, stream);
    assert_memory_equal(bytes, "abab", 4);
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), 2);
    f->ops->stream_destroy(f->device, stream);
}

static void a_driver_without_batches_gets_single_copies(void **state) {
    fixture *f = *state;
    pst_device *device = NULL;
    pst_stream *stream = NULL;
    const pst_cuda_options options = fake_options(0);
    char bytes[4] = "ab";
    const pst_copy copies[] = {{&bytes[2], &bytes[0], 1}, {&bytes[3], &bytes[1], 1}};
    fake_cuda_lack("cuMemcpyBatchAsync");
    assert_ok(pst_cuda_device_create(f->runtime, &options, &device));
    assert_ok(device->ops->stream_create(device, 0, &stream));
    assert_ok(device->ops->copy(device, stream, copies, 2));
    finish(f, stream);
    assert_memory_equal(bytes, "abab", 4);
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), 2);
    device->ops->stream_destroy(device, stream);
    device->ops->destroy(device);
}

static void rows_are_copied_by_their_pitches(void **state) {
    fixture *f = *state;
    const char from[] = "ab..cd..ef..";
    char to[] = "---------";
    assert_ok(f->ops->copy_2d(f->device, f->a, to, 3, from, 4, 2, 3));
    assert_ok(f->ops->copy_2d(f->device, f->a, to, 3, from, 4, 0, 3));
    assert_ok(f->ops->copy_2d(f->device, f->a, to, 3, from, 4, 2, 0));
    finish(f, f->a);
    assert_string_equal(to, "ab-cd-ef-");
    assert_int_equal(fake_cuda_calls("cuMemcpy2DAsync"), 1);
}

static void the_three_kernels_come_in_stream_order(void **state) {
    fixture *f = *state;
    float values[4] = {1, 2, 3, 4}, doubled[4], total[4];
    const pst_cast piece = {doubled, values, 4, PST_FLOAT32, PST_FLOAT32};
    const void *sources[] = {values, doubled};
    const pst_sum sum = {total, sources, 2, 4, 1.0, 0, PST_FLOAT32, PST_FLOAT32, 0, 0};
    assert_ok(f->ops->fill(f->device, f->a, total, 0xff, sizeof total));
    assert_ok(f->ops->cast_scale_copy(f->device, f->a, &piece, 1, 2.0));
    assert_ok(f->ops->sum(f->device, f->a, &sum));
    finish(f, f->a);
    for (size_t i = 0; i < 4; i++)
        assert_float_equal(total[i], 3 * values[i], 0);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 3);
}

/* ---- flags -------------------------------------------------------------------------- */

static void a_wait_ends_when_the_flag_has_come_so_far_also_past_the_wrap(void **state) {
    static const uint32_t from[] = {0, 0x7ffffffeu, 0xfffffffeu};
    fixture *f = *state;
    uint32_t *flag = alloc(f, PST_MEMORY_DEVICE, sizeof *flag);
    for (size_t i = 0; i < sizeof from / sizeof from[0]; i++) {
        *flag = from[i];
        assert_ok(f->ops->stream_wait32(f->device, f->a, flag, from[i] + 3));
        pst_event *event = record(f, f->a);
        for (uint32_t step = 1; step <= 3; step++) {
            assert_status(f->ops->event_query(f->device, event), PST_PENDING);
            assert_ok(f->ops->stream_write32(f->device, f->b, flag, from[i] + step + (step == 3)));
            finish(f, f->b);
        }
        assert_ok(f->ops->event_query(f->device, event));
        f->ops->event_destroy(f->device, event);
    }
    f->ops->free(f->device, PST_MEMORY_DEVICE, flag, sizeof *flag);
}

static void a_flag_is_written_past_streams_that_wait_for_ever(void **state) {
    static const pst_memory_kind kinds[] = {PST_MEMORY_SHARED, PST_MEMORY_DEVICE};
    fixture *f = *state;
    for (size_t i = 0; i < 2; i++) {
        uint32_t *flags = alloc(f, kinds[i], 2 * sizeof *flags);
        assert_ok(f->ops->stream_wait32(f->device, f->a, &flags[0], 1));
        assert_ok(f->ops->stream_wait32(f->device, f->b, &flags[1], 1));
        pst_event *a = record(f, f->a), *b = record(f, f->b);
        assert_status(f->ops->event_query(f->device, a), PST_PENDING);
        assert_ok(f->ops->flag_write32(f->device, &flags[0], 1));
        assert_ok(f->ops->event_query(f->device, a));
        assert_status(f->ops->event_query(f->device, b), PST_PENDING);
        assert_ok(f->ops->flag_write32(f->device, &flags[1], 1));
        assert_ok(f->ops->event_query(f->device, b));
        f->ops->event_destroy(f->device, a);
        f->ops->event_destroy(f->device, b);
        f->ops->free(f->device, kinds[i], flags, 2 * sizeof *flags);
    }
}

/* As when the device has nothing left to write it with. */
static void a_flag_in_shared_memory_needs_no_device(void **state) {
    fixture *f = *state;
    uint32_t *flag = alloc(f, PST_MEMORY_SHARED, sizeof *flag);
    fake_cuda_reset();
    fake_cuda_break(CUDA_ERROR_LAUNCH_FAILED);
    assert_ok(f->ops->flag_write32(f->device, flag, 1));
    assert_int_equal(*flag, 1);
    assert_int_equal(fake_cuda_calls(NULL), 0);
    fake_cuda_break(CUDA_SUCCESS);
    f->ops->free(f->device, PST_MEMORY_SHARED, flag, sizeof *flag);
}

static void a_flag_on_the_device_that_is_not_written_within_a_second_is_an_error(void **state) {
    fixture *f = *state;
    uint32_t *flag = alloc(f, PST_MEMORY_DEVICE, sizeof *flag);
    fake_cuda_hold(1);
    assert_status(f->ops->flag_write32(f->device, flag, 1), PST_ETIMEDOUT);
    assert_non_null(strstr(f->ops->error_text(f->device), "shared memory"));
    fake_cuda_hold(0);
    finish(f, f->a);
    f->ops->free(f->device, PST_MEMORY_DEVICE, flag, sizeof *flag);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(copies_of_a_stream_happen_in_order),
        TEST(a_stream_waits_for_an_event_of_another),
        TEST(a_stream_of_the_programs_own_waits_for_a_tasks_event),
        TEST(work_enqueues_on_the_stream_it_is_given),
        TEST(priorities_are_kept_within_the_devices),
        TEST(an_event_that_was_never_recorded_is_done),
        TEST(events_are_used_again),
        TEST(timed_events_tell_the_hosts_time),
        TEST(the_time_of_an_untimed_or_pending_event_is_refused),
        TEST(the_default_stream_is_wrapped_and_not_destroyed),
        TEST(a_stream_under_capture_takes_nothing),
        TEST(times_of_before_a_capture_are_told_within),
        TEST(an_event_stays_a_captures_until_it_is_recorded_outside),
        TEST(a_step_of_adamw_may_be_captured),
        TEST(several_copies_are_one_batch_without_the_empty_ones),
        TEST(the_default_stream_gets_single_copies),
        TEST(a_driver_without_batches_gets_single_copies),
        TEST(rows_are_copied_by_their_pitches),
        TEST(the_three_kernels_come_in_stream_order),
        TEST(a_wait_ends_when_the_flag_has_come_so_far_also_past_the_wrap),
        TEST(a_flag_is_written_past_streams_that_wait_for_ever),
        TEST(a_flag_in_shared_memory_needs_no_device),
        TEST(a_flag_on_the_device_that_is_not_written_within_a_second_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
