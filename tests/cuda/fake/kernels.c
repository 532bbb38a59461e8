/* Kernels by name: what those of kernels.cu do is done by the host's kernels, on the same
 * arguments. And a compiler, whose machine code is a name. */
#include "internal.h"
#include "sched/cuda/arguments.h"
#include "sched/device/host.h"

#include <stdio.h>

struct CUmod_st {
    int loaded;
};

struct CUfunc_st {
    const char *name;
    size_t bytes; /* of its one argument */
    void (*run)(const void *argument);
};

static pst_cast cast_of(const pst_cuda_piece *piece) {
    pst_cast cast = {.destination = piece->destination, .source = piece->source};
    cast.count = (size_t)piece->count;
    cast.destination_dtype = cast.source_dtype = PST_UINT8;
    if (piece->action >= PST_CUDA_COPY) return cast;
    cast.destination_dtype = (pst_dtype)(piece->action / 4);
    cast.source_dtype = (pst_dtype)(piece->action % 4);
    return cast;
}

/* The beginning of a table is the same whatever its size. */
static void run_cast(const void *argument) {
    const pst_cuda_cast_many *table = argument;
    for (unsigned i = 0; i < table->piece_count; i++) {
        const pst_cast cast = cast_of(&table->piece[i]);
        (void)pst__host_cast(&cast, table->piece[i].action >= PST_CUDA_COPY ? 1.0 : table->scale);
    }
}

static void run_sum(const void *argument) {
    const pst_cuda_sum *given = argument;
    const pst_sum sum = {.destination = given->destination,
                         .sources = given->source,
                         .source_count = given->source_count,
                         .count = (size_t)given->count,
                         .scale = given->scale,
                         .accumulate = (int)given->accumulate,
                         .destination_dtype = (pst_dtype)(given->action / 4),
                         .source_dtype = (pst_dtype)(given->action % 4)};
    (void)pst__host_sum(&sum);
}

static void run_maximum(const void *argument) {
    const pst_cuda_sum *given = argument;
    const pst_sum maximum = {.destination = given->destination,
                             .sources = given->source,
                             .source_count = given->source_count,
                             .count = (size_t)given->count,
                             .destination_dtype = (pst_dtype)given->action,
                             .source_dtype = (pst_dtype)given->action};
    (void)pst__host_maximum(&maximum);
}

static void run_fill(const void *argument) {
    const pst_cuda_fill *fill = argument;
    memset(fill->destination, (int)fill->byte, (size_t)fill->bytes);
}

static void run_copy_rows(const void *argument) {
    const pst_cuda_rows *given = argument;
    pst_row_range ranges[PST_CUDA_ROW_RANGES];
    for (unsigned i = 0; i < given->range_count; i++) {
        const pst_cuda_row_range *range = &given->range[i];
        ranges[i] = (pst_row_range){range->destination, range->source, (size_t)range->first,
                                    (size_t)(range->end - range->first)};
    }
    pst__host_copy_rows(&(pst_row_copy){.indices = given->indices,
                                        .count = given->count,
                                        .rows = (size_t)given->rows,
                                        .row_bytes = given->row_bytes,
                                        .ranges = ranges,
                                        .range_count = given->range_count});
}

static pst_dtype dtype_of(unsigned kind) {
    static const pst_dtype dtypes[] = {PST_FLOAT32, PST_BFLOAT16, PST_FLOAT16};
    return dtypes[kind];
}

static pst_adamw_piece adamw_of(const pst_cuda_adamw_piece *given) {
    return (pst_adamw_piece){.parameter = given->parameter,
                             .gradient = given->gradient,
                             .exp_avg = given->exp_avg,
                             .exp_avg_sq = given->exp_avg_sq,
                             .max_exp_avg_sq = given->max_exp_avg_sq,
                             .copy = given->copy,
                             .coefficients = given->coefficients,
                             .count = (size_t)given->count,
                             .first = given->first,
                             .parameter_dtype = dtype_of(PST_CUDA_ADAMW_PARAMETER(given->kinds)),
                             .gradient_dtype = dtype_of(PST_CUDA_ADAMW_GRADIENT(given->kinds)),
                             .moment_dtype = dtype_of(PST_CUDA_ADAMW_MOMENT(given->kinds)),
                             .copy_dtype = dtype_of(PST_CUDA_ADAMW_COPY(given->kinds)),
                             .rounds_randomly = (int)PST_CUDA_ADAMW_ROUNDS(given->kinds)};
}

static void run_adamw(const void *argument) {
    const pst_cuda_adamw_many *table = argument;
    for (unsigned i = 0; i < table->piece_count; i++) {
        const pst_adamw_piece piece = adamw_of(&table->piece[i]);
        (void)pst__host_adamw(&piece);
    }
}

static void run_adamw_sums(const void *argument) {
    const pst_cuda_adamw_sums *table = argument;
    for (unsigned i = 0; i < table->piece_count; i++) {
        const pst_cuda_adamw_sum *sum = &table->sum[i];
        pst_adamw_piece piece = adamw_of(&table->piece[i]);
        piece.source_dtype = piece.gradient_dtype;
        piece.gradient_dtype = dtype_of(sum->rounds_to);
        piece.sources = sum->source;
        piece.source_count = sum->source_count;
        piece.scale = sum->scale;
        (void)pst__host_adamw(&piece);
    }
}

static void run_adamw_prepare(const void *argument) {
    const pst_cuda_adamw_steps *given = argument;
    for (unsigned i = 0; i < given->count; i++)
        pst__adamw_prepare(&given->settings, given->step[i],
                           (pst__adamw_coefficients *)given->coefficients + i);
}

static struct CUfunc_st functions[] = {
    {"pst_cast_scale_copy", sizeof(pst_cuda_cast), run_cast},
    {"pst_cast_scale_copy_many", sizeof(pst_cuda_cast_many), run_cast},
    {"pst_sum", sizeof(pst_cuda_sum), run_sum},
    {"pst_sum_passing", sizeof(pst_cuda_sum), run_sum},
    {"pst_maximum", sizeof(pst_cuda_sum), run_maximum},
    {"pst_fill", sizeof(pst_cuda_fill), run_fill},
    {"pst_copy_rows", sizeof(pst_cuda_rows), run_copy_rows},
    {"pst_adamw_prepare", sizeof(pst_cuda_adamw_steps), run_adamw_prepare},
    {"pst_adamw", sizeof(pst_cuda_adamw), run_adamw},
    {"pst_adamw_many", sizeof(pst_cuda_adamw_many), run_adamw},
    {"pst_adamw_sums", sizeof(pst_cuda_adamw_sums), run_adamw_sums},
};

static struct CUmod_st module;

CUresult CUDAAPI cuModuleLoadData(CUmodule *loaded, const void *image) {
    CALL(cuModuleLoadData, NULL);
    (void)image;
    module.loaded++;
    *loaded = &module;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuModuleUnload(CUmodule unloaded) {
    CALL(cuModuleUnload, NULL);
    if (unloaded != &module || module.loaded == 0) return fake_end(CUDA_ERROR_INVALID_HANDLE);
    module.loaded--;
    return fake_end(CUDA_SUCCESS);
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule of, const char *name) {
    CALL(cuModuleGetFunction, NULL);
    (void)of;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (strcmp(functions[i].name, name) == 0) {
            *function = &functions[i];
            return fake_end(CUDA_SUCCESS);
        }
    return fake_end(CUDA_ERROR_NOT_FOUND);
}

static int run_kernel(operation *self) {
    self->of.kernel.run(self->owned);
    return 1;
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                unsigned grid_z, unsigned block_x, unsigned block_y,
                                unsigned block_z, unsigned shared, CUstream stream,
                                void **parameters, void **extra) {
    CALL(cuLaunchKernel, stream);
    (void)shared;
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 ||
        (block_x != PST_CUDA_THREADS && block_x != PST_CUDA_WIDE_THREADS) || block_y != 1 ||
        block_z != 1 || extra != NULL)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    operation made = {.run = run_kernel, .of.kernel = {.run = function->run}};
    made.owned = malloc(function->bytes);
    if (made.owned == NULL) abort();
    memcpy(made.owned, parameters[0], function->bytes);
    const CUresult result = fake_enqueue(stream, &made);
    if (result != CUDA_SUCCESS) free(made.owned);
    return fake_end(result);
}

/* ---- the compiler ------------------------------------------------------------------- */

static const char image[] = "penstock's kernels, by name";

FAKE_API int nvrtcVersion(int *major, int *minor);
FAKE_API int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers,
                                const char *const *texts, const char *const *names);
FAKE_API int nvrtcCompileProgram(void *program, int count, const char *const *options);
FAKE_API int nvrtcGetProgramLogSize(void *program, size_t *bytes);
FAKE_API int nvrtcGetProgramLog(void *program, char *log);
FAKE_API int nvrtcGetCUBINSize(void *program, size_t *bytes);
FAKE_API int nvrtcGetCUBIN(void *program, char *cubin);
FAKE_API int nvrtcDestroyProgram(void **program);
FAKE_API const char *nvrtcGetErrorString(int result);

int nvrtcVersion(int *major, int *minor) {
    *major = CUDA_VERSION / 1000;
    *minor = 99; /* no true compiler's: none of its images come from a cache of ours */
    return 0;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers,
                       const char *const *texts, const char *const *names) {
    (void)source, (void)name, (void)headers, (void)texts, (void)names;
    *program = &module;
    return 0;
}

int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program, (void)count, (void)options;
    return 0;
}

int nvrtcGetProgramLogSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = 1;
    return 0;
}

int nvrtcGetProgramLog(void *program, char *log) {
    (void)program;
    log[0] = '\0';
    return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *bytes) {
    (void)program;
    *bytes = sizeof image;
    return 0;
}

int nvrtcGetCUBIN(void *program, char *cubin) {
    (void)program;
    memcpy(cubin, image, sizeof image);
    return 0;
}

int nvrtcDestroyProgram(void **program) {
    *program = NULL;
    return 0;
}

const char *nvrtcGetErrorString(int result) {
    return result == 0 ? "no error" : "an error";
}
