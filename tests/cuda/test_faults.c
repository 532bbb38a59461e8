/* Each driver call fails in turn: the status says so, the text names it, nothing is left behind. */
#include "tests/cuda/fixture.h"

#include <pthread.h>
#include <unistd.h>

static char bytes[16] = "abcdefgh";
static const pst_copy one_copy[] = {{&bytes[8], &bytes[0], 2}};
static const pst_copy two_copies[] = {{&bytes[8], &bytes[0], 2}, {&bytes[12], &bytes[4], 2}};

/* ---- what is done while a call fails ------------------------------------------------ */

static pst_status create_stream(fixture *f) {
    pst_stream *stream = NULL;
    const pst_status status = f->ops->stream_create(f->device, 0, &stream);
    assert_int_equal(stream != NULL, status == PST_OK);
    f->ops->stream_destroy(f->device, stream);
    return status;
}

/* Two: one may come from the pool. */
static pst_status create_events(fixture *f) {
    pst_event *first = NULL, *second = NULL;
    pst_status status = f->ops->event_create(f->device, 0, &first);
    if (status == PST_OK) status = f->ops->event_create(f->device, 0, &second);
    f->ops->event_destroy(f->device, first);
    f->ops->event_destroy(f->device, second);
    return status;
}

static pst_status time_event(fixture *f) {
    pst_event *event = NULL;
    uint64_t at;
    pst_status status = f->ops->event_create(f->device, 1, &event);
    if (status == PST_OK) status = f->ops->event_record(f->device, event, f->a);
    if (status == PST_OK) finish(f, f->a);
    if (status == PST_OK) status = f->ops->event_time(f->device, event, &at);
    f->ops->event_destroy(f->device, event);
    return status;
}

static pst_status with_event(fixture *f, pst_status (*act)(fixture *f, pst_event *event)) {
    pst_event *event = NULL;
    assert_ok(f->ops->event_create(f->device, 0, &event));
    const pst_status status = act(f, event);
    f->ops->event_destroy(f->device, event);
    return status;
}

static pst_status act_record(fixture *f, pst_event *event) {
    return f->ops->event_record(f->device, event, f->a);
}

static pst_status act_wait(fixture *f, pst_event *event) {
    return f->ops->stream_wait(f->device, f->a, event);
}

static pst_status act_query(fixture *f, pst_event *event) {
    return f->ops->event_query(f->device, event);
}

static pst_status record_event(fixture *f) {
    return with_event(f, act_record);
}

static pst_status wait_event(fixture *f) {
    return with_event(f, act_wait);
}

static pst_status query_event(fixture *f) {
    return with_event(f, act_query);
}

static pst_status copy_one(fixture *f) {
    return f->ops->copy(f->device, f->a, one_copy, 1);
}

static pst_status copy_two(fixture *f) {
    return f->ops->copy(f->device, f->a, two_copies, 2);
}

static pst_status copy_rows(fixture *f) {
    return f->ops->copy_2d(f->device, f->a, &bytes[8], 2, bytes, 2, 1, 2);
}

static pst_status alloc_device(fixture *f) {
    void *memory = NULL;
    const pst_status status = f->ops->alloc(f->device, PST_MEMORY_DEVICE, 4096, &memory);
    f->ops->free(f->device, PST_MEMORY_DEVICE, memory, 4096);
    return status;
}

static pst_status alloc_pinned(fixture *f) {
    void *memory = NULL;
    const pst_status status = f->ops->alloc(f->device, PST_MEMORY_PINNED, 4096, &memory);
    f->ops->free(f->device, PST_MEMORY_PINNED, memory, 4096);
    return status;
}

static pst_status share(fixture *f) {
    void *memory = NULL, *again = NULL;
    int descriptor = -1;
    pst_status status = f->ops->alloc(f->device, PST_MEMORY_SHARED, 4096, &memory);
    if (status == PST_OK) status = f->ops->memory_export(f->device, memory, &descriptor);
    if (status == PST_OK) status = f->ops->memory_import(f->device, descriptor, 4096, &again);
    if (descriptor >= 0) (void)close(descriptor);
    f->ops->memory_unmap(f->device, again, 4096);
    f->ops->free(f->device, PST_MEMORY_SHARED, memory, 4096);
    return status;
}

/* Allocating calls cuMemAddressReserve, cuMemMap and cuMemSetAccess once too. */
static pst_status export_and_import(fixture *f) {
    void *memory = NULL, *again = NULL;
    int descriptor = -1;
    pst_status status = f->ops->alloc(f->device, PST_MEMORY_DEVICE, 4096, &memory);
    if (status == PST_OK) status = f->ops->memory_export(f->device, memory, &descriptor);
    if (status == PST_OK) status = f->ops->memory_import(f->device, descriptor, 4096, &again);
    if (descriptor >= 0) (void)close(descriptor);
    f->ops->memory_unmap(f->device, again, 4096);
    f->ops->free(f->device, PST_MEMORY_DEVICE, memory, 4096);
    return status;
}

static uint32_t *flag;

static pst_status write_flag(fixture *f) {
    return f->ops->stream_write32(f->device, f->a, flag, 1);
}

static pst_status write_and_wait(fixture *f) {
    const pst_flag_step steps[] = {{flag, 1, 0}, {flag, 1, 1}};
    return f->ops->stream_flags32(f->device, f->a, steps, 2);
}

static pst_status wait_flag(fixture *f) {
    return f->ops->stream_wait32(f->device, f->a, flag, 0);
}

static pst_status write_flag_now(fixture *f) {
    return f->ops->flag_write32(f->device, flag, 1);
}

static pst_status cast(fixture *f) {
    const pst_cast piece = {&bytes[8], bytes, 4, PST_UINT8, PST_UINT8};
    return f->ops->cast_scale_copy(f->device, f->a, &piece, 1, 1.0);
}

static pst_status sum(fixture *f) {
    static float from[2] = {1, 2}, to[2];
    const void *sources[] = {from};
    const pst_sum sum = {to, sources, 1, 2, 1.0, 0, PST_FLOAT32, PST_FLOAT32, 0, 0};
    return f->ops->sum(f->device, f->a, &sum);
}

static pst_status fill(fixture *f) {
    return f->ops->fill(f->device, f->a, &bytes[8], 1, 4);
}

static pst_status copy_named_rows(fixture *f) {
    static const int64_t row = 1;
    const pst_row_range range = {&bytes[8], bytes, 0, 8};
    const pst_row_copy copy = {&row, 1, 2, 4, &range, 1};
    return f->ops->copy_rows(f->device, f->a, &copy);
}

/* ---- the table ---------------------------------------------------------------------- */

typedef struct fault {
    pst_status (*act)(fixture *f);
    const char *call;
    size_t nth;
} fault;

static const fault faults[] = {
    {create_stream, "cuCtxGetCurrent", 1},
    {create_stream, "cuStreamCreateWithPriority", 1},
    {time_event, "cuEventCreate", 1},
    {time_event, "cuEventElapsedTime", 1},
    {create_events, "cuEventCreate", 1},
    {record_event, "cuEventRecord", 1},
    {wait_event, "cuStreamWaitEvent", 1},
    {query_event, "cuEventQuery", 1},
    {copy_one, "cuMemcpyAsync", 1},
    {copy_two, "cuMemcpyBatchAsync", 1},
    {copy_rows, "cuMemcpy2DAsync", 1},
    {alloc_device, "cuMemCreate", 1},
    {alloc_device, "cuMemAddressReserve", 1},
    {alloc_device, "cuMemMap", 1},
    {alloc_device, "cuMemSetAccess", 1},
    {alloc_pinned, "cuMemHostRegister", 1},
    {share, "cuMemHostRegister", 1},
    {share, "cuMemHostRegister", 2},
    {export_and_import, "cuMemRetainAllocationHandle", 1},
    {export_and_import, "cuMemExportToShareableHandle", 1},
    {export_and_import, "cuMemImportFromShareableHandle", 1},
    {export_and_import, "cuMemAddressReserve", 2},
    {export_and_import, "cuMemMap", 2},
    {export_and_import, "cuMemSetAccess", 2},
    {write_flag, "cuStreamWriteValue32", 1},
    {wait_flag, "cuStreamWaitValue32", 1},
    {write_and_wait, "cuStreamBatchMemOp", 1},
    {write_flag_now, "cuStreamWriteValue32", 1},
    {write_flag_now, "cuStreamQuery", 1},
    {cast, "cuLaunchKernel", 1},
    {sum, "cuLaunchKernel", 1},
    {fill, "cuLaunchKernel", 1},
    {copy_named_rows, "cuLaunchKernel", 1},
};
#define FAULTS (sizeof faults / sizeof faults[0])

static void warm_up(fixture *f) {
    flag = alloc(f, PST_MEMORY_DEVICE, sizeof *flag);
    finish(f, f->a);
}

static void assert_text_names(fixture *f, const char *call, const char *error) {
    const char *text = f->ops->error_text(f->device);
    if (strstr(text, "device cuda:0") == NULL || strstr(text, call) == NULL ||
        strstr(text, error) == NULL)
        fail_msg("\"%s\" names not the device, %s and %s", text, call, error);
}

static void each_call_that_fails_is_named_and_leaves_nothing(void **state) {
    fixture *f = *state;
    warm_up(f);
    for (size_t i = 0; i < FAULTS; i++) {
        const size_t memory = fake_cuda_live_memory();
        fake_cuda_fail(faults[i].call, faults[i].nth, CUDA_ERROR_INVALID_VALUE);
        if (faults[i].act(f) != PST_EINVAL) fail_msg("%s failed unnoticed", faults[i].call);
        assert_text_names(f, faults[i].call, "CUDA_ERROR_INVALID_VALUE");
        assert_int_equal(fake_cuda_live_memory(), memory);
        finish(f, f->a);
        assert_ok(faults[i].act(f));
        finish(f, f->a);
    }
    assert_ok(pst_runtime_status(f->runtime));
    f->ops->free(f->device, PST_MEMORY_DEVICE, flag, sizeof *flag);
}

static void memory_that_is_not_there_is_no_failure_of_the_device(void **state) {
    fixture *f = *state;
    fake_cuda_fail("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
    assert_status(alloc_device(f), PST_ENOMEM);
    assert_non_null(strstr(f->ops->error_text(f->device), "2097152 bytes"));
    assert_ok(alloc_device(f));
    assert_ok(pst_runtime_status(f->runtime));
}

/* Not named: cuCtxGetCurrent, which a lost context does not keep from answering. */
static void an_error_that_ends_the_context_poisons_the_runtime_with_its_name(void **state) {
    fixture *f = *state;
    char text[1024];
    pst_event *event = record(f, f->a);
    fake_cuda_break(CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_status(f->ops->event_query(f->device, event), PST_EDEVICE);
    assert_text_names(f, "cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS (700)");
    assert_status(pst_runtime_status(f->runtime), PST_EDEVICE);
    (void)pst_runtime_error(f->runtime, text, sizeof text);
    assert_non_null(strstr(text, "an illegal memory access was encountered"));
    fake_cuda_break(CUDA_SUCCESS);
    f->ops->event_destroy(f->device, event);
}

static void *fail_a_copy(void *argument) {
    fake_cuda_fail("cuMemcpyAsync", 1, CUDA_ERROR_INVALID_VALUE);
    assert_status(copy_one(argument), PST_EINVAL);
    assert_text_names(argument, "cuMemcpyAsync", "2 bytes");
    return NULL;
}

static void error_texts_are_the_threads_own(void **state) {
    fixture *f = *state;
    pthread_t thread;
    fake_cuda_fail("cuMemcpy2DAsync", 1, CUDA_ERROR_INVALID_VALUE);
    assert_status(copy_rows(f), PST_EINVAL);
    assert_int_equal(pthread_create(&thread, NULL, fail_a_copy, f), 0);
    (void)pthread_join(thread, NULL);
    assert_text_names(f, "cuMemcpy2DAsync", "2 rows of 1 bytes");
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(each_call_that_fails_is_named_and_leaves_nothing),
        TEST(memory_that_is_not_there_is_no_failure_of_the_device),
        TEST(an_error_that_ends_the_context_poisons_the_runtime_with_its_name),
        TEST(error_texts_are_the_threads_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
