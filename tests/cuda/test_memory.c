/* Memory of the device: its own, exported, pinned. */
#include "tests/cuda/fixture.h"

#include <sys/wait.h>
#include <unistd.h>

static void device_memory_is_aligned_and_given_back(void **state) {
    fixture *f = *state;
    const size_t sizes[] = {1, 512, ((size_t)2 << 20) - 1, (size_t)5 << 20};
    const size_t live = fake_cuda_live_memory();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *memory = alloc(f, PST_MEMORY_DEVICE, sizes[i]);
        assert_int_equal((uintptr_t)memory % 512, 0);
        assert_ok(f->ops->fill(f->device, f->a, memory, 7, sizes[i]));
        finish(f, f->a);
        assert_int_equal(memory[sizes[i] - 1], 7);
        f->ops->free(f->device, PST_MEMORY_DEVICE, memory, sizes[i]);
        assert_int_equal(fake_cuda_live_memory(), live);
    }
}

static void nothing_is_no_size(void **state) {
    fixture *f = *state;
    void *memory = f;
    assert_status(f->ops->alloc(f->device, PST_MEMORY_DEVICE, 0, &memory), PST_EINVAL);
    assert_null(memory);
    assert_status(f->ops->alloc(f->device, PST_MEMORY_PINNED, 0, &memory), PST_EINVAL);
    f->ops->free(f->device, PST_MEMORY_DEVICE, NULL, 0);
    f->ops->free(f->device, PST_MEMORY_PINNED, NULL, 0);
}

static void pinned_memory_is_the_hosts_and_the_devices(void **state) {
    fixture *f = *state;
    const size_t sizes[] = {1, 4097, ((size_t)40 << 20) + 1}; /* the last is touched by threads */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *memory = alloc(f, PST_MEMORY_PINNED, sizes[i]);
        uint32_t *flag = (void *)memory; /* the fake driver takes flags in memory it knows only */
        assert_int_equal(memory[sizes[i] - 1], 0);
        memory[sizes[i] - 1] = 1;
        assert_ok(f->ops->stream_write32(f->device, f->a, flag, 5));
        finish(f, f->a);
        assert_int_equal(*flag, 5);
        f->ops->free(f->device, PST_MEMORY_PINNED, memory, sizes[i]);
    }
    assert_int_equal(fake_cuda_calls("cuMemHostRegister"), 3);
    assert_int_equal(fake_cuda_calls("cuMemHostUnregister"), 3);
}

/* ---- between processes -------------------------------------------------------------- */

static void shared_memory_is_zero_and_seen_by_all_that_import_it(void **state) {
    fixture *f = *state;
    uint32_t *own = alloc(f, PST_MEMORY_SHARED, 5000);
    void *imported = NULL, *too_large = NULL;
    int descriptor = -1;
    assert_int_equal(own[1000], 0);
    assert_ok(f->ops->memory_export(f->device, own, &descriptor));
    assert_int_equal(ftruncate(descriptor, 0), -1); /* nobody pulls it away */
    assert_ok(f->ops->memory_import(f->device, descriptor, 5000, &imported));
    assert_status(f->ops->memory_import(f->device, descriptor, 100000, &too_large), PST_EINVAL);
    (void)close(descriptor);
    assert_ok(f->ops->stream_wait32(f->device, f->a, &own[1000], 3));
    pst_event *event = record(f, f->a);
    assert_ok(f->ops->stream_write32(f->device, f->b, (uint32_t *)imported + 1000, 2));
    finish(f, f->b);
    assert_status(f->ops->event_query(f->device, event), PST_PENDING);
    assert_ok(f->ops->flag_write32(f->device, (uint32_t *)imported + 1000, 3));
    assert_int_equal(own[1000], 3);
    assert_ok(f->ops->event_query(f->device, event));
    f->ops->event_destroy(f->device, event);
    f->ops->free(f->device, PST_MEMORY_SHARED, own, 5000);
    assert_int_equal(((uint32_t *)imported)[1000], 3);
    f->ops->memory_unmap(f->device, imported, 5000);
    assert_int_equal(fake_cuda_calls("cuMemHostUnregister"), 2);
}

#define SHARED_BYTES ((size_t)3 << 20)

static void exported_memory_outlives_its_first_mapping(void **state) {
    fixture *f = *state;
    char *first = alloc(f, PST_MEMORY_DEVICE, SHARED_BYTES);
    void *second = NULL;
    int descriptor = -1;
    assert_ok(f->ops->memory_export(f->device, first, &descriptor));
    assert_ok(f->ops->memory_import(f->device, descriptor, SHARED_BYTES, &second));
    assert_int_equal(close(descriptor), 0);
    assert_ptr_not_equal(first, second);
    first[SHARED_BYTES - 1] = 42;
    f->ops->free(f->device, PST_MEMORY_DEVICE, first, SHARED_BYTES);
    assert_int_equal(((char *)second)[SHARED_BYTES - 1], 42);
    f->ops->memory_unmap(f->device, second, SHARED_BYTES);
}

static void what_is_no_memory_of_the_device_is_not_exported(void **state) {
    fixture *f = *state;
    int descriptor = 0;
    assert_status(f->ops->memory_export(f->device, f, &descriptor), PST_EINVAL);
    assert_int_equal(descriptor, -1);
    assert_non_null(strstr(f->ops->error_text(f->device), "cuMemRetainAllocationHandle"));
}

static void what_is_no_memory_is_not_imported(void **state) {
    fixture *f = *state;
    void *memory = f;
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    assert_status(f->ops->memory_import(f->device, ends[0], SHARED_BYTES, &memory), PST_EINVAL);
    assert_null(memory);
    assert_non_null(strstr(f->ops->error_text(f->device), "same user"));
    assert_status(f->ops->memory_import(f->device, ends[0], 0, &memory), PST_EINVAL);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

/* The other process opens a device of its own, waits for this one's flag, reads and answers. */
static int other_process(int descriptor) {
    const pst_cuda_options options = fake_options(1);
    pst_runtime *runtime = NULL;
    pst_device *device = NULL;
    pst_stream *stream = NULL;
    pst_event *event = NULL;
    void *memory = NULL;
    if (pst_runtime_create(NULL, &runtime) != PST_OK) return 1;
    if (pst_cuda_device_create(runtime, &options, &device) != PST_OK) return 2;
    const pst_device_ops *ops = device->ops;
    if (ops->memory_import(device, descriptor, SHARED_BYTES, &memory) != PST_OK) return 3;
    uint32_t *words = memory;
    const pst_copy answer = {&words[3], &words[2], sizeof *words};
    if (ops->stream_create(device, 0, &stream) != PST_OK ||
        ops->event_create(device, 0, &event) != PST_OK ||
        ops->stream_wait32(device, stream, &words[0], 1) != PST_OK ||
        ops->copy(device, stream, &answer, 1) != PST_OK ||
        ops->stream_write32(device, stream, &words[1], 1) != PST_OK ||
        ops->event_record(device, event, stream) != PST_OK)
        return 4;
    while (ops->event_query(device, event) == PST_PENDING)
        yield_briefly();
    return ops->event_query(device, event) == PST_OK ? 0 : 5;
}

static void a_flag_and_data_go_from_process_to_process(void **state) {
    fixture *f = *state;
    int descriptor = -1, status = -1;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    print_message("skipped: a forked child of a sanitized process may hang\n");
    skip();
#endif
    uint32_t *words = alloc(f, PST_MEMORY_DEVICE, SHARED_BYTES);
    assert_ok(f->ops->memory_export(f->device, words, &descriptor));
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(other_process(descriptor));
    words[2] = 77;
    assert_ok(f->ops->stream_write32(f->device, f->a, &words[0], 1));
    assert_ok(f->ops->stream_wait32(f->device, f->a, &words[1], 1));
    finish(f, f->a);
    assert_int_equal(words[3], 77);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    (void)close(descriptor);
    f->ops->free(f->device, PST_MEMORY_DEVICE, words, SHARED_BYTES);
}

int main(void) {
    const struct CMUnitTest tests[] = {
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
        TEST(device_memory_is_aligned_and_given_back),
        TEST(nothing_is_no_size),
        TEST(pinned_memory_is_the_hosts_and_the_devices),
        TEST(shared_memory_is_zero_and_seen_by_all_that_import_it),
        TEST(exported_memory_outlives_its_first_mapping),
        TEST(what_is_no_memory_of_the_device_is_not_exported),
        TEST(what_is_no_memory_is_not_imported),
        TEST(a_flag_and_data_go_from_process_to_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
