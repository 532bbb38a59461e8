/* Opening the device, and whose context its calls find. */
#include "tests/cuda/fixture.h"

#include <dlfcn.h>
#include <pthread.h>

static void without_a_driver_the_error_says_so(void **state) {
    fixture *f = *state;
    pst_device *device = f->device;
    pst_cuda_options options = fake_options(0);
    options.driver = "/nowhere/libcuda.so.1";
    assert_status(pst_cuda_device_create(f->runtime, &options, &device), PST_EUNSUPPORTED);
    assert_null(device);
    assert_error(f->runtime, "rank 3", "no CUDA driver", "/nowhere/libcuda.so.1");
}

static void a_gpu_that_is_not_there_is_named(void **state) {
    fixture *f = *state;
    pst_device *device = NULL;
    const pst_cuda_options options = fake_options(8);
    assert_status(pst_cuda_device_create(f->runtime, &options, &device), PST_EUNSUPPORTED);
    assert_error(f->runtime, "cuda:8", "8 GPUs");
    const pst_cuda_options negative = fake_options(-1);
    assert_status(pst_cuda_device_create(f->runtime, &negative, &device), PST_EUNSUPPORTED);
}

static void options_without_their_size_are_refused(void **state) {
    fixture *f = *state;
    pst_device *device = NULL;
    pst_cuda_options options = fake_options(0);
    options.size = 0;
    assert_status(pst_cuda_device_create(f->runtime, &options, &device), PST_EINVAL);
    assert_status(pst_cuda_device_create(NULL, &options, &device), PST_EINVAL);
    assert_status(pst_cuda_device_create(f->runtime, &options, NULL), PST_EINVAL);
}

/* Each call that opening makes, failing in turn: named, and nothing is left behind. */
static void each_call_of_opening_that_fails_is_named(void **state) {
    static const char *const calls[] = {"cuInit",
                                        "cuDeviceGetCount",
                                        "cuDeviceGet",
                                        "cuDeviceGetAttribute",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuCtxGetCurrent",
                                        "cuCtxGetStreamPriorityRange",
                                        "cuStreamCreateWithPriority",
                                        "cuMemGetAllocationGranularity"};
    fixture *f = *state;
    const pst_cuda_options options = fake_options(1);
    const size_t live = fake_cuda_live();
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        pst_device *device = NULL;
        fake_cuda_fail(calls[i], 1, CUDA_ERROR_INVALID_VALUE);
        assert_status(pst_cuda_device_create(f->runtime, &options, &device), PST_EINVAL);
        assert_null(device);
        assert_error(f->runtime, "device cuda:1", calls[i], "CUDA_ERROR_INVALID_VALUE",
                     "invalid argument");
        assert_int_equal(fake_cuda_live(), live);
    }
    assert_int_equal(fake_cuda_calls("cuDevicePrimaryCtxRetain"),
                     fake_cuda_calls("cuDevicePrimaryCtxRelease") + 1); /* the one that failed */
}

static void an_entry_point_that_the_driver_lacks_is_named(void **state) {
    fixture *f = *state;
    pst_device *device = NULL;
    const pst_cuda_options options = fake_options(0);
    fake_cuda_lack("cuMemRetainAllocationHandle");
    assert_status(pst_cuda_device_create(f->runtime, &options, &device), PST_EUNSUPPORTED);
    assert_null(device);
    assert_error(f->runtime, "libfakecuda.so", "no cuMemRetainAllocationHandle", "newer driver");
}

static void a_device_whose_context_is_lost_is_destroyed_after_its_runtime(void **state) {
    pst_runtime *runtime = open_runtime(20000);
    pst_device *device = NULL;
    const pst_cuda_options options = fake_options(1);
    (void)state;
    assert_ok(pst_cuda_device_create(runtime, &options, &device));
    pst_runtime_destroy(runtime);
    fake_cuda_reset();
    fake_cuda_fail("cuCtxSetCurrent", 1, CUDA_ERROR_ILLEGAL_ADDRESS);
    device->ops->destroy(device);
    assert_int_equal(fake_cuda_calls("cuCtxSetCurrent"), 1);
    assert_int_equal(fake_cuda_calls("cuDevicePrimaryCtxRelease"), 1);
}

/* ---- without a compiler ------------------------------------------------------------- */

static void without_a_compiler_everything_but_the_kernels_works(void **state) {
    fixture *f = *state;
    pst_device *device = NULL;
    pst_stream *stream = NULL;
    pst_cuda_options options = fake_options(1);
    options.nvrtc = "/nowhere/libnvrtc.so";
    options.cache = "/nowhere";
    assert_ok(pst_cuda_device_create(f->runtime, &options, &device));
    assert_ok(device->ops->stream_create(device, 0, &stream));
    char memory[8];
    assert_status(device->ops->fill(device, stream, memory, 1, sizeof memory), PST_EUNSUPPORTED);
    assert_non_null(strstr(device->ops->error_text(device), "/nowhere/libnvrtc.so"));
    device->ops->stream_destroy(device, stream);
    device->ops->destroy(device);
}

/* ---- contexts ----------------------------------------------------------------------- */

typedef CUresult (*get_current)(CUcontext *);
typedef CUresult (*set_current)(CUcontext);

static void *entry(const char *name) {
    void *library = dlopen(FAKE_CUDA_PATH, RTLD_NOW | RTLD_NOLOAD), *found = NULL;
    CUresult (*get)(const char *, void **, int, cuuint64_t) = NULL;
    void *symbol = dlsym(library, "cuGetProcAddress");
    memcpy(&get, &symbol, sizeof get);
    assert_int_equal(get(name, &found, 12080, 0), CUDA_SUCCESS);
    (void)dlclose(library);
    return found;
}

static CUcontext context_of_thread(void) {
    CUcontext current = NULL;
    get_current get = NULL;
    void *found = entry("cuCtxGetCurrent");
    memcpy(&get, &found, sizeof get);
    assert_int_equal(get(&current), CUDA_SUCCESS);
    return current;
}

static void *query_in_thread(void *argument) {
    fixture *f = argument;
    pst_event *event = NULL;
    assert_null(context_of_thread());
    assert_ok(f->ops->event_create(f->device, 0, &event));
    assert_ok(f->ops->event_query(f->device, event));
    f->ops->event_destroy(f->device, event);
    return context_of_thread();
}

static void a_thread_without_a_context_gets_the_devices_and_keeps_it(void **state) {
    fixture *f = *state;
    pthread_t thread;
    void *context = NULL;
    assert_int_equal(pthread_create(&thread, NULL, query_in_thread, f), 0);
    (void)pthread_join(thread, &context);
    assert_non_null(context);
    assert_int_equal(fake_cuda_calls("cuCtxSetCurrent"), 1);
    assert_int_equal(fake_cuda_calls("cuThreadExchangeStreamCaptureMode"), 1);
}

static void a_thread_with_another_context_has_it_back_after_each_call(void **state) {
    fixture *f = *state;
    pst_device *other = NULL;
    const pst_cuda_options options = fake_options(1);
    const CUcontext own = context_of_thread();
    assert_ok(pst_cuda_device_create(f->runtime, &options, &other));
    assert_ptr_equal(context_of_thread(), own);
    pst_stream *stream = NULL;
    pst_event *event = NULL;
    assert_ok(other->ops->stream_create(other, 0, &stream));
    assert_ok(other->ops->event_create(other, 0, &event));
    assert_ok(other->ops->event_record(other, event, stream));
    assert_ok(other->ops->event_query(other, event));
    assert_ptr_equal(context_of_thread(), own);
    other->ops->event_destroy(other, event);
    other->ops->stream_destroy(other, stream);
    other->ops->destroy(other);
    assert_ptr_equal(context_of_thread(), own);
}

static pst_status see_context(void *argument, pst_stream *stream) {
    CUcontext *seen = argument;
    assert_non_null(pst_cuda_stream(stream));
    *seen = context_of_thread();
    return PST_OK;
}

static void a_works_start_finds_the_devices_context(void **state) {
    fixture *f = *state;
    CUcontext seen = NULL;
    const CUcontext own = context_of_thread();
    pst_device *other = NULL;
    pst_stream *stream = NULL;
    const pst_cuda_options options = fake_options(1);
    assert_ok(pst_cuda_device_create(f->runtime, &options, &other));
    assert_ok(other->ops->stream_create(other, 0, &stream));
    const pst_work work = {see_context, NULL, &seen};
    assert_ok(other->ops->launch(other, stream, &work));
    assert_non_null(seen);
    assert_ptr_not_equal(seen, own);
    other->ops->stream_destroy(other, stream);
    other->ops->destroy(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(without_a_driver_the_error_says_so),
        TEST(a_gpu_that_is_not_there_is_named),
        TEST(options_without_their_size_are_refused),
        TEST(each_call_of_opening_that_fails_is_named),
        TEST(an_entry_point_that_the_driver_lacks_is_named),
        TEST(a_device_whose_context_is_lost_is_destroyed_after_its_runtime),
        TEST(without_a_compiler_everything_but_the_kernels_works),
        TEST(a_thread_without_a_context_gets_the_devices_and_keeps_it),
        TEST(a_thread_with_another_context_has_it_back_after_each_call),
        TEST(a_works_start_finds_the_devices_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
