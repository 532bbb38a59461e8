/* The device's kernels without a GPU: their text, compiled for the host, behind a driver that runs
 * what is launched at once. */
#include "cases.h"
#include "emulate.h"

#include "sched/cuda/kernels.h"

static const runner *the_runner(void);
#include "all_cases.h"

#include <string.h>

/* ---- a driver of launches --------------------------------------------------------------- */

static struct {
    pst__cuda cuda;
    pst__cuda_kernels kernels;
    runner runner;
    unsigned launches;
    unsigned blocks, threads; /* of the latest */
    const char *kernel;
    CUresult answer; /* of the next launch */
} it;

static CUresult launch(CUfunction kernel, unsigned blocks, unsigned y, unsigned z, unsigned threads,
                       unsigned threads_y, unsigned threads_z, unsigned shared, CUstream stream,
                       void **parameters, void **extra) {
    (void)shared, (void)stream, (void)extra;
    assert_true(y == 1 && z == 1 && threads_y == 1 && threads_z == 1);
    it.launches++;
    it.blocks = blocks;
    it.threads = threads;
    it.kernel = (const char *)kernel;
    if (it.answer != CUDA_SUCCESS) return it.answer;
    assert_int_equal(emulate(it.kernel, blocks, threads, parameters[0]), 0);
    return CUDA_SUCCESS;
}

static CUresult error_name(CUresult error, const char **name) {
    *name = error == CUDA_ERROR_INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "?";
    return CUDA_SUCCESS;
}

/* A kernel's handle is its name. */
static CUfunction named(const char *name) {
    assert_true(emulate_has(name));
    return (CUfunction)(uintptr_t)name;
}

static pst_status cast(void *context, const pst_cast *pieces, size_t count, double scale) {
    return pst__cuda_cast_scale_copy(context, NULL, pieces, count, scale);
}

static pst_status sum(void *context, const pst_sum *sum) {
    return pst__cuda_sum(context, NULL, sum);
}

static pst_status maximum(void *context, const pst_sum *maximum) {
    return pst__cuda_maximum(context, NULL, maximum);
}

static pst_status fill(void *context, void *memory, int byte, size_t bytes) {
    return pst__cuda_fill(context, NULL, memory, byte, bytes);
}

static pst_status copy_rows(void *context, const pst_row_copy *copy) {
    return pst__cuda_copy_rows(context, NULL, copy);
}

static pst_status adamw_prepare(void *context, const pst_adamw_settings *settings,
                                float *const *steps, size_t count, void *coefficients) {
    return pst__cuda_adamw_prepare(context, NULL, settings, steps, count, coefficients);
}

static pst_status adamw(void *context, const pst_adamw_piece *pieces, size_t count) {
    return pst__cuda_adamw(context, NULL, pieces, count);
}

static void put(void *context, const void *host) {
    (void)context;
    memcpy(it.runner.memory, host, CASES_BYTES);
}

static void get(void *context, void *host) {
    (void)context;
    memcpy(host, it.runner.memory, CASES_BYTES);
}

static const runner *the_runner(void) {
    return &it.runner;
}

static int set_up(void **state) {
    (void)state;
    it.kernels.cast = named("pst_cast_scale_copy");
    it.kernels.cast_many = named("pst_cast_scale_copy_many");
    it.kernels.sum = named("pst_sum");
    it.kernels.sum_passing = named("pst_sum_passing");
    it.kernels.maximum = named("pst_maximum");
    it.kernels.fill = named("pst_fill");
    it.kernels.copy_rows = named("pst_copy_rows");
    it.kernels.adamw_prepare = named("pst_adamw_prepare");
    it.kernels.adamw = named("pst_adamw");
    it.kernels.adamw_many = named("pst_adamw_many");
    it.kernels.adamw_sums = named("pst_adamw_sums");
    it.cuda.kernels = &it.kernels;
    it.cuda.processors = 3; /* few, so that blocks of all sizes come up */
    it.cuda.driver.cuLaunchKernel = launch;
    it.cuda.driver.cuGetErrorName = error_name;
    it.cuda.driver.cuGetErrorString = error_name;
    it.runner = (runner){cast,
                         sum,
                         maximum,
                         fill,
                         copy_rows,
                         adamw_prepare,
                         adamw,
                         put,
                         get,
                         &it.cuda,
                         aligned_alloc(512, CASES_BYTES)};
    return it.runner.memory == NULL;
}

static int tear_down(void **state) {
    (void)state;
    free(it.runner.memory);
    return 0;
}

/* ---- what a launch is ------------------------------------------------------------------- */

static pst_cast copies[2100];

static unsigned launches_of(size_t count) {
    for (size_t i = 0; i < count; i++)
        copies[i] = (pst_cast){it.runner.memory + 2 * i, it.runner.memory + 2 * i + 1, 1, PST_INT8,
                               PST_INT8};
    it.launches = 0;
    assert_int_equal(cast(&it.cuda, copies, count, 1.0), PST_OK);
    return it.launches;
}

static void as_many_pieces_as_fit_are_one_launch(void **state) {
    (void)state;
    assert_int_equal(launches_of(0), 0);
    assert_int_equal(launches_of(1), 1);
    assert_int_equal(launches_of(127), 1);
    assert_int_equal(launches_of(128), 1);
    assert_int_equal(launches_of(1023), 1);
    assert_int_equal(launches_of(1024), 2);
    assert_int_equal(launches_of(2047), 3);
    it.kernels.cast_many = NULL; /* as with a driver that is older than CUDA 12.1 */
    assert_int_equal(launches_of(128), 2);
    it.kernels.cast_many = named("pst_cast_scale_copy_many");
}

static void a_sum_has_no_more_blocks_than_it_may(void **state) {
    (void)state;
    const void *source = it.runner.memory;
    pst_sum limited = {.destination = it.runner.memory,
                       .sources = &source,
                       .source_count = 1,
                       .count = CASES_BYTES / sizeof(float),
                       .scale = 1};
    assert_int_equal(sum(&it.cuda, &limited), PST_OK);
    const unsigned free_to = it.blocks;
    assert_int_equal(it.threads, 256);
    for (limited.max_blocks = 1; limited.max_blocks < 2 * free_to; limited.max_blocks++) {
        assert_int_equal(sum(&it.cuda, &limited), PST_OK);
        assert_in_range(it.blocks, 1, limited.max_blocks < free_to ? limited.max_blocks : free_to);
        assert_int_equal(it.threads, it.blocks < free_to ? 1024 : 256);
    }
}

static void a_sum_that_passes_is_a_kernel_of_its_own(void **state) {
    (void)state;
    const void *source = it.runner.memory;
    pst_sum passing = {.destination = it.runner.memory,
                       .sources = &source,
                       .source_count = 1,
                       .count = 1000,
                       .scale = 1};
    assert_int_equal(sum(&it.cuda, &passing), PST_OK);
    assert_string_equal(it.kernel, "pst_sum");
    passing.is_passing = 1;
    assert_int_equal(sum(&it.cuda, &passing), PST_OK);
    assert_string_equal(it.kernel, "pst_sum_passing");
}

static void nothing_is_launched_for_nothing(void **state) {
    (void)state;
    float number = 1;
    const void *source = &number;
    const pst_cast piece = {&number, &number, 0, PST_FLOAT32, PST_FLOAT16};
    const pst_sum empty = {.destination = &number, .sources = &source, .source_count = 1};
    it.launches = 0;
    assert_int_equal(cast(&it.cuda, &piece, 1, 1.0), PST_OK);
    assert_int_equal(sum(&it.cuda, &empty), PST_OK);
    assert_int_equal(fill(&it.cuda, &number, 0, 0), PST_OK);
    assert_int_equal(it.launches, 0);
}

static const char *text(void) {
    return pst__cuda_error_text(&it.cuda.device);
}

static void what_cannot_be_done_is_refused_before_anything_is(void **state) {
    (void)state;
    float numbers[4] = {0};
    const void *sources[65] = {numbers};
    pst_cast pieces[2] = {{numbers, numbers + 1, 1, PST_FLOAT32, PST_FLOAT32},
                          {numbers + 2, numbers + 3, 1, PST_FLOAT32, PST_INT32}};
    pst_sum wrong = {.destination = numbers, .sources = sources, .source_count = 65, .count = 1};
    it.launches = 0;
    assert_int_equal(cast(&it.cuda, pieces, 2, 1.0), PST_EUNSUPPORTED);
    assert_non_null(strstr(text(), "piece 1 from int32 to float32"));
    pieces[1].source_dtype = PST_FLOAT16;
    pieces[1].source = (const char *)pieces[1].source + 1;
    assert_int_equal(cast(&it.cuda, pieces, 2, 1.0), PST_EINVAL);
    assert_non_null(strstr(text(), "piece 1"));
    assert_int_equal(sum(&it.cuda, &wrong), PST_EUNSUPPORTED);
    assert_non_null(strstr(text(), "65 sources"));
    wrong.source_count = 1;
    wrong.source_dtype = PST_INT8;
    assert_int_equal(sum(&it.cuda, &wrong), PST_EUNSUPPORTED);
    assert_non_null(strstr(text(), "int8"));
    assert_int_equal(it.launches, 0);
}

static void a_launch_that_fails_is_named(void **state) {
    (void)state;
    char byte;
    it.answer = CUDA_ERROR_INVALID_HANDLE;
    assert_int_equal(fill(&it.cuda, &byte, 0, 1), PST_EDEVICE);
    it.answer = CUDA_SUCCESS;
    assert_non_null(strstr(text(), "cuLaunchKernel (kernel pst_fill"));
    assert_non_null(strstr(text(), "CUDA_ERROR_INVALID_HANDLE"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        ALL_CASES,
        cmocka_unit_test(as_many_pieces_as_fit_are_one_launch),
        cmocka_unit_test(a_sum_has_no_more_blocks_than_it_may),
        cmocka_unit_test(a_sum_that_passes_is_a_kernel_of_its_own),
        cmocka_unit_test(nothing_is_launched_for_nothing),
        cmocka_unit_test(what_cannot_be_done_is_refused_before_anything_is),
        cmocka_unit_test(a_launch_that_fails_is_named),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
