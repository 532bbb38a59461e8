/* The device's kernels on a GPU, through its table. PST_GPU chooses another GPU than the first. */
#include "cases.h"

#include <penstock/cuda.h>

#define ROUNDS 10
static const runner *the_runner(void);
#include "all_cases.h"

#include <string.h>

static struct {
    pst_runtime *runtime;
    pst_device *device;
    pst_stream *stream;
    pst_event *event;
    runner runner;
} it;

static const runner *the_runner(void) {
    return &it.runner;
}

static void check(pst_status status) {
    if (status != PST_OK)
        fail_msg("%s: %s", pst_status_name(status), it.device->ops->error_text(it.device));
}

/* ---- the runner ------------------------------------------------------------------------- */

static void finish(void) {
    pst_status status = PST_PENDING;
    check(it.device->ops->event_record(it.device, it.event, it.stream));
    while (status == PST_PENDING)
        status = it.device->ops->event_query(it.device, it.event);
    check(status);
}

static void copy(void *to, const void *from, size_t bytes) {
    const pst_copy copy = {to, from, bytes};
    check(it.device->ops->copy(it.device, it.stream, &copy, 1));
    finish();
}

static pst_status cast(void *context, const pst_cast *pieces, size_t count, double scale) {
    (void)context;
    return it.device->ops->cast_scale_copy(it.device, it.stream, pieces, count, scale);
}

static pst_status sum(void *context, const pst_sum *sum) {
    (void)context;
    return it.device->ops->sum(it.device, it.stream, sum);
}

static pst_status maximum(void *context, const pst_sum *maximum) {
    (void)context;
    return it.device->ops->maximum(it.device, it.stream, maximum);
}

static pst_status fill(void *context, void *memory, int byte, size_t bytes) {
    (void)context;
    return it.device->ops->fill(it.device, it.stream, memory, byte, bytes);
}

static pst_status copy_rows(void *context, const pst_row_copy *copy) {
    (void)context;
    return it.device->ops->copy_rows(it.device, it.stream, copy);
}

static pst_status adamw_prepare(void *context, const pst_adamw_settings *settings,
                                float *const *steps, size_t count, void *coefficients) {
    (void)context;
    return it.device->ops->adamw_prepare(it.device, it.stream, settings, steps, count,
                                         coefficients);
}

static pst_status adamw(void *context, const pst_adamw_piece *pieces, size_t count) {
    (void)context;
    return it.device->ops->adamw(it.device, it.stream, pieces, count);
}

static void put(void *context, const void *host) {
    (void)context;
    copy(it.runner.memory, host, CASES_BYTES);
}

static void get(void *context, void *host) {
    (void)context;
    copy(host, it.runner.memory, CASES_BYTES);
}

static unsigned char *alloc(size_t bytes) {
    void *memory = NULL;
    check(it.device->ops->alloc(it.device, PST_MEMORY_DEVICE, bytes, &memory));
    return memory;
}

static void release(void *memory, size_t bytes) {
    it.device->ops->free(it.device, PST_MEMORY_DEVICE, memory, bytes);
}

/* ---- more than 32 bits ------------------------------------------------------------------ */

enum { MARKS = 4 };

static void more_than_4_gib_are_copied(void **state) {
    (void)state;
    const size_t bytes = ((size_t)4 << 30) + 4099;
    const size_t marks[MARKS] = {0, ((size_t)4 << 30) - 1, (size_t)4 << 30, bytes - 1};
    unsigned char *from = alloc(bytes), *to = alloc(bytes);
    check(fill(NULL, from, 0x5a, bytes));
    check(fill(NULL, to, 0, bytes));
    for (size_t i = 0; i < MARKS; i++) {
        const unsigned char mark = (unsigned char)(i + 1);
        copy(from + marks[i], &mark, 1);
    }
    const pst_cast piece = {to, from, bytes, PST_INT8, PST_INT8};
    check(cast(NULL, &piece, 1, 1.0));
    for (size_t i = 0; i < MARKS; i++) {
        unsigned char found[2] = {0};
        const size_t neighbour = marks[i] + 1 < bytes ? marks[i] + 1 : marks[i] - 1;
        copy(&found[0], to + marks[i], 1);
        copy(&found[1], to + neighbour, 1);
        assert_int_equal(found[0], i + 1);
        assert_int_equal(found[1], i == 1 ? 3 : 0x5a);
    }
    release(from, bytes);
    release(to, bytes);
}

/* More elements than 32 bits count, to fewer bytes each. */
static void more_than_4_gi_elements_are_cast_and_summed(void **state) {
    (void)state;
    const size_t count = ((size_t)1 << 32) + 1027;
    unsigned char *memory = alloc(count * 2 * 2);
    uint16_t *from = (uint16_t *)memory, *to = from + count;
    const void *sources[2] = {from, from};
    const pst_cast piece = {to, from, count, PST_FLOAT16, PST_BFLOAT16};
    const pst_sum twice = {.destination = from,
                           .sources = sources,
                           .source_count = 2,
                           .count = count,
                           .scale = 1.0,
                           .destination_dtype = PST_BFLOAT16,
                           .source_dtype = PST_BFLOAT16};
    const uint16_t one = 0x3f80;
    uint16_t found = 0;
    check(fill(NULL, memory, 0, count * 4));
    copy(from + count - 1, &one, 2);
    check(cast(NULL, &piece, 1, 3.0));
    check(sum(NULL, &twice));
    copy(&found, to + count - 1, 2);
    assert_int_equal(found, 0x4200); /* 3 */
    copy(&found, from + count - 1, 2);
    assert_int_equal(found, 0x4000); /* 2 */
    copy(&found, to + count - 2, 2);
    assert_int_equal(found, 0);
    release(memory, count * 4);
}

/* ---- the group -------------------------------------------------------------------------- */

static int set_up(void **state) {
    (void)state;
    char text[512];
    const char *gpu = getenv("PST_GPU");
    const pst_cuda_options options = {.size = sizeof options,
                                      .ordinal = gpu != NULL ? atoi(gpu) : 0};
    assert_int_equal(pst_runtime_create(NULL, &it.runtime), PST_OK);
    if (pst_cuda_device_create(it.runtime, &options, &it.device) != PST_OK) {
        (void)pst_runtime_error(it.runtime, text, sizeof text);
        fail_msg("%s", text);
    }
    check(it.device->ops->stream_create(it.device, 0, &it.stream));
    check(it.device->ops->event_create(it.device, 0, &it.event));
    it.runner = (runner){cast,  sum, maximum, fill, copy_rows,         adamw_prepare,
                         adamw, put, get,     NULL, alloc(CASES_BYTES)};
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    if (it.device == NULL) return -1; /* what failed has been said */
    release(it.runner.memory, CASES_BYTES);
    it.device->ops->event_destroy(it.device, it.event);
    it.device->ops->stream_destroy(it.device, it.stream);
    pst_runtime_destroy(it.runtime);
    it.device->ops->destroy(it.device);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ALL_CASES,
        cmocka_unit_test(more_than_4_gib_are_copied),
        cmocka_unit_test(more_than_4_gi_elements_are_cast_and_summed),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
