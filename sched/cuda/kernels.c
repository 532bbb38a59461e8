#include "sched/cuda/kernels.h"

#include "sched/cuda/arguments.h"
#include "sched/cuda/compile.h"
#include "sched/device/host.h"

/* ---- loading ---------------------------------------------------------------------------- */

static pst_status get(pst__cuda *cuda, const char *name, CUfunction *function) {
    return pst__cuda_call(cuda, cuModuleGetFunction, (function, cuda->kernels->module, name),
                          "kernel %s", name);
}

/* It is only there where kernels may have so many parameters: else NULL. */
static void get_large(pst__cuda *cuda, const char *name, CUfunction *function) {
    if (cuda->driver.cuModuleGetFunction(function, cuda->kernels->module, name) != CUDA_SUCCESS)
        *function = NULL;
}

static pst_status load_module(pst__cuda *cuda, const void *image) {
    pst__cuda_kernels *kernels = cuda->kernels;
    pst_status status =
        pst__cuda_call(cuda, cuModuleLoadData, (&kernels->module, image), "the kernels");
    if (status == PST_OK) status = get(cuda, "pst_cast_scale_copy", &kernels->cast);
    if (status == PST_OK) status = get(cuda, "pst_sum", &kernels->sum);
    if (status == PST_OK) status = get(cuda, "pst_sum_passing", &kernels->sum_passing);
    if (status == PST_OK) status = get(cuda, "pst_maximum", &kernels->maximum);
    if (status == PST_OK) status = get(cuda, "pst_fill", &kernels->fill);
    if (status == PST_OK) status = get(cuda, "pst_copy_rows", &kernels->copy_rows);
    if (status == PST_OK) status = get(cuda, "pst_adamw_prepare", &kernels->adamw_prepare);
    if (status == PST_OK) status = get(cuda, "pst_adamw", &kernels->adamw);
    if (status == PST_OK) status = get(cuda, "pst_adamw_sums", &kernels->adamw_sums);
    if (status != PST_OK) return status;
    get_large(cuda, "pst_cast_scale_copy_many", &kernels->cast_many);
    get_large(cuda, "pst_adamw_many", &kernels->adamw_many);
    return PST_OK;
}

static pst_status compile(pst__cuda *cuda, const char *nvrtc, const char *cache,
                          pst__cuda_image *image) {
    pst__cuda_compile_options options = {
        .nvrtc = nvrtc, .cache = cache, .major = cuda->major, .minor = cuda->minor};
    pst_status status =
        pst__cuda_call(cuda, cuDriverGetVersion, (&options.newest_cuda), "the driver");
    if (status != PST_OK) return status;
    pst__error error;
    pst__error_init(&error, NULL, NULL);
    status = pst__cuda_compile(&cuda->heap, &options, image, NULL, &error);
    return status == PST_OK ? PST_OK : pst__cuda_refuse(cuda, status, "%s", error.text);
}

pst_status pst__cuda_kernels_load(pst__cuda *cuda, const char *nvrtc, const char *cache) {
    pst__cuda_image image;
    pst_status status = compile(cuda, nvrtc, cache, &image);
    if (status != PST_OK) return status;
    cuda->kernels = pst__heap_alloc(&cuda->heap, sizeof *cuda->kernels);
    status = cuda->kernels != NULL
                 ? load_module(cuda, image.data)
                 : pst__cuda_refuse(cuda, PST_ENOMEM, "no memory for the kernels' table");
    pst__heap_free(&cuda->heap, image.data, image.bytes);
    if (status != PST_OK) pst__cuda_kernels_unload(cuda);
    return status;
}

void pst__cuda_kernels_unload(pst__cuda *cuda) {
    if (cuda->kernels == NULL) return;
    if (cuda->kernels->module != NULL) (void)cuda->driver.cuModuleUnload(cuda->kernels->module);
    pst__heap_free(&cuda->heap, cuda->kernels, sizeof *cuda->kernels);
    cuda->kernels = NULL;
}

/* ---- launching -------------------------------------------------------------------------- */

enum { STEP = 4096, MOST_COPIED = 2 * STEP, MOST_SUMMED = 16 * STEP };

/* Small enough that all processors have several blocks, as far as that makes sense; and `most`,
 * which is less of what is copied: then products beside it soon have their processors back. */
static unsigned block_bytes_for(const pst__cuda *cuda, size_t bytes, unsigned most) {
    enum { BLOCKS_EACH = 8 };
    const size_t share = bytes / ((size_t)cuda->processors * BLOCKS_EACH);
    return share >= most ? most : (unsigned)(share / STEP + 1) * STEP;
}

/* So large that there are no more than `most` blocks (0: any number). */
static unsigned limited_block_bytes(const pst__cuda *cuda, size_t bytes, unsigned most) {
    const unsigned free = block_bytes_for(cuda, bytes, MOST_SUMMED);
    const size_t share = most == 0 ? 0 : (bytes / most / STEP + 1) * STEP;
    return share <= free ? free : share < UINT32_MAX ? (unsigned)share : UINT32_MAX / STEP * STEP;
}

static size_t blocks_of(size_t bytes, unsigned block_bytes) {
    return (bytes + block_bytes - 1) / block_bytes;
}

pst_status pst__cuda_launch_kernel(pst__cuda *cuda, CUfunction kernel, size_t blocks,
                                   unsigned threads, CUstream stream, void *arguments,
                                   const char *name) {
    void *parameters[] = {arguments};
    return pst__cuda_call(
        cuda, cuLaunchKernel,
        (kernel, (unsigned)blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL),
        "kernel %s, stream %p", name, (void *)stream);
}

/* The dtypes that are converted come first in pst_dtype. */
_Static_assert(PST_FLOAT32 < 4 && PST_FLOAT64 < 4 && PST_FLOAT16 < 4 && PST_BFLOAT16 < 4,
               "PST_CUDA_CONVERT takes two bits a dtype");

static int is_floating(pst_dtype dtype) {
    return (unsigned)dtype < 4;
}

/* Bytes an element, of these dtypes and of those that have a maximum. */
static const unsigned char sizes[PST_DTYPE_COUNT] = {
    [PST_FLOAT32] = 4, [PST_FLOAT64] = 8, [PST_FLOAT16] = 2, [PST_BFLOAT16] = 2, [PST_INT8] = 1,
    [PST_UINT8] = 1,   [PST_INT16] = 2,   [PST_INT32] = 4,   [PST_INT64] = 8,    [PST_BOOL] = 1};

static size_t wider(unsigned a, unsigned b) {
    return sizes[a] > sizes[b] ? sizes[a] : sizes[b];
}

static int is_aligned(const void *memory, pst_dtype dtype) {
    return (uintptr_t)memory % sizes[dtype] == 0;
}

/* ---- cast, scale, copy ------------------------------------------------------------------ */

static int is_plain(const pst_cast *piece, double scale) {
    return piece->source == NULL ||
           (piece->source_dtype == piece->destination_dtype && scale == 1.0);
}

static pst_status check_cast(pst__cuda *cuda, const pst_cast *piece, double scale, size_t index) {
    if (is_plain(piece, scale)) {
        if (pst_dtype_size(piece->destination_dtype) != 0) return PST_OK;
        return pst__cuda_refuse(cuda, PST_EUNSUPPORTED,
                                "cast_scale_copy: the destination of piece %zu has no dtype (%d)",
                                index, (int)piece->destination_dtype);
    }
    if (piece->count == 0) return PST_OK;
    if (!is_floating(piece->source_dtype) || !is_floating(piece->destination_dtype))
        return pst__cuda_refuse(
            cuda, PST_EUNSUPPORTED, "cast_scale_copy: piece %zu from %s to %s, scaled by %g", index,
            pst_dtype_name(piece->source_dtype), pst_dtype_name(piece->destination_dtype), scale);
    if (!is_aligned(piece->source, piece->source_dtype) ||
        !is_aligned(piece->destination, piece->destination_dtype))
        return pst__cuda_refuse(cuda, PST_EINVAL,
                                "cast_scale_copy: piece %zu at %p from %p is not aligned to its "
                                "elements",
                                index, piece->destination, piece->source);
    return PST_OK;
}

static pst_cuda_piece entry_of(const pst_cast *piece, double scale) {
    pst_cuda_piece entry = {.destination = piece->destination, .source = piece->source};
    entry.count = piece->count;
    if (is_plain(piece, scale)) {
        entry.count *= pst_dtype_size(piece->destination_dtype);
        entry.action = piece->source != NULL ? PST_CUDA_COPY : PST_CUDA_ZERO;
    } else {
        entry.action =
            PST_CUDA_CONVERT((unsigned)piece->destination_dtype, (unsigned)piece->source_dtype);
    }
    return entry;
}

/* Of a piece: how much its blocks divide between them. */
static size_t work_of(const pst_cuda_piece *piece) {
    if (piece->action >= PST_CUDA_COPY) return piece->count;
    return piece->count * wider(piece->action / 4, piece->action % 4);
}

/* The beginning of a table is the same whatever its size, and a kernel takes no more than its own.
 */
static pst_status launch_table(pst__cuda *cuda, CUstream stream, pst_cuda_cast_many *table) {
    const pst__cuda_kernels *kernels = cuda->kernels;
    size_t work = 0, blocks = 0;
    for (unsigned i = 0; i < table->piece_count; i++)
        work += work_of(&table->piece[i]);
    if (work == 0) return PST_OK;
    table->block_bytes = block_bytes_for(cuda, work, MOST_COPIED);
    for (unsigned i = 0; i < table->piece_count; i++) {
        table->piece[i].first_block = (unsigned)blocks;
        blocks += blocks_of(work_of(&table->piece[i]), table->block_bytes);
    }
    return pst__cuda_launch_kernel(
        cuda, table->piece_count <= PST_CUDA_PIECES ? kernels->cast : kernels->cast_many, blocks,
        PST_CUDA_THREADS, stream, table, "pst_cast_scale_copy");
}

pst_status pst__cuda_cast_scale_copy(pst__cuda *cuda, CUstream stream, const pst_cast *pieces,
                                     size_t count, double scale) {
    const unsigned most = cuda->kernels->cast_many != NULL ? PST_CUDA_MANY_PIECES : PST_CUDA_PIECES;
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < count; i++)
        status = check_cast(cuda, &pieces[i], scale, i);
    pst_cuda_cast_many table;
    table.scale = scale;
    table.piece_count = 0;
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        if (pieces[i].count > 0) table.piece[table.piece_count++] = entry_of(&pieces[i], scale);
        if (table.piece_count < most && i + 1 < count) continue;
        status = launch_table(cuda, stream, &table);
        table.piece_count = 0;
    }
    return status;
}

/* ---- sum -------------------------------------------------------------------------------- */

static pst_status check_sources(pst__cuda *cuda, const pst_sum *sum, const char *name) {
    if (sum->source_count > PST_CUDA_SOURCES)
        return pst__cuda_refuse(cuda, PST_EUNSUPPORTED, "%s: %zu sources; at most %d", name,
                                sum->source_count, PST_CUDA_SOURCES);
    int aligned = is_aligned(sum->destination, sum->destination_dtype);
    for (size_t k = 0; k < sum->source_count; k++)
        aligned &= is_aligned(sum->sources[k], sum->source_dtype);
    return aligned ? PST_OK
                   : pst__cuda_refuse(cuda, PST_EINVAL,
                                      "%s: at %p: an address is not aligned to its elements", name,
                                      sum->destination);
}

static pst_status launch_sum(pst__cuda *cuda, CUfunction kernel, CUstream stream,
                             const pst_sum *sum, unsigned action, const char *name) {
    const size_t work =
        sum->count * wider((unsigned)sum->destination_dtype, (unsigned)sum->source_dtype);
    pst_cuda_sum arguments = {
        .destination = sum->destination,
        .count = sum->count,
        .scale = sum->scale,
        .source_count = (unsigned)sum->source_count,
        .accumulate = sum->accumulate != 0,
        .action = action,
        .block_bytes = limited_block_bytes(cuda, work, sum->max_blocks),
    };
    for (size_t k = 0; k < sum->source_count; k++)
        arguments.source[k] = sum->sources[k];
    const int is_limited = arguments.block_bytes > block_bytes_for(cuda, work, MOST_SUMMED);
    return pst__cuda_launch_kernel(cuda, kernel, blocks_of(work, arguments.block_bytes),
                                   is_limited ? PST_CUDA_WIDE_THREADS : PST_CUDA_THREADS, stream,
                                   &arguments, name);
}

pst_status pst__cuda_sum(pst__cuda *cuda, CUstream stream, const pst_sum *sum) {
    if (!is_floating(sum->source_dtype) || !is_floating(sum->destination_dtype))
        return pst__cuda_refuse(cuda, PST_EUNSUPPORTED, "sum: from %s to %s",
                                pst_dtype_name(sum->source_dtype),
                                pst_dtype_name(sum->destination_dtype));
    pst_status status = check_sources(cuda, sum, "sum");
    if (status != PST_OK || sum->count == 0) return status;
    return launch_sum(
        cuda, sum->is_passing ? cuda->kernels->sum_passing : cuda->kernels->sum, stream, sum,
        PST_CUDA_CONVERT((unsigned)sum->destination_dtype, (unsigned)sum->source_dtype), "pst_sum");
}

pst_status pst__cuda_maximum(pst__cuda *cuda, CUstream stream, const pst_sum *maximum) {
    pst_sum nothing = *maximum;
    nothing.count = 0;
    pst_status status = pst__host_maximum(&nothing); /* the same dtypes */
    if (status != PST_OK)
        return pst__cuda_refuse(cuda, status, "maximum: of %zu sources, from %s to %s",
                                maximum->source_count, pst_dtype_name(maximum->source_dtype),
                                pst_dtype_name(maximum->destination_dtype));
    status = check_sources(cuda, maximum, "maximum");
    if (status != PST_OK || maximum->count == 0) return status;
    return launch_sum(cuda, cuda->kernels->maximum, stream, maximum,
                      (unsigned)maximum->source_dtype, "pst_maximum");
}

/* ---- fill ------------------------------------------------------------------------------- */

pst_status pst__cuda_fill(pst__cuda *cuda, CUstream stream, void *memory, int byte, size_t bytes) {
    if (bytes == 0) return PST_OK;
    pst_cuda_fill arguments = {.destination = memory,
                               .bytes = bytes,
                               .byte = (unsigned char)byte,
                               .block_bytes = block_bytes_for(cuda, bytes, MOST_SUMMED)};
    return pst__cuda_launch_kernel(cuda, cuda->kernels->fill,
                                   blocks_of(bytes, arguments.block_bytes), PST_CUDA_THREADS,
                                   stream, &arguments, "pst_fill");
}

/* ---- rows by number --------------------------------------------------------------------- */

static pst_status check_rows(pst__cuda *cuda, const pst_row_copy *copy) {
    const int is_aligned = (uintptr_t)copy->indices % sizeof *copy->indices == 0;
    if (is_aligned && copy->row_bytes <= UINT32_MAX && copy->count <= INT32_MAX) return PST_OK;
    return pst__cuda_refuse(cuda, is_aligned ? PST_EUNSUPPORTED : PST_EINVAL,
                            "copy_rows: %zu rows of %zu bytes, named at %p", copy->count,
                            copy->row_bytes, (const void *)copy->indices);
}

/* A block takes a row. */
pst_status pst__cuda_copy_rows(pst__cuda *cuda, CUstream stream, const pst_row_copy *copy) {
    pst_status status = check_rows(cuda, copy);
    pst_cuda_rows table = {
        .indices = copy->indices,
        .rows = copy->rows,
        .row_bytes = (unsigned)copy->row_bytes,
        .count = (unsigned)copy->count,
    };
    for (size_t i = 0; status == PST_OK && copy->count > 0 && i < copy->range_count; i++) {
        const pst_row_range *range = &copy->ranges[i];
        table.range[table.range_count++] = (pst_cuda_row_range){
            range->destination, range->source, range->first, range->first + range->bytes};
        if (table.range_count < PST_CUDA_ROW_RANGES && i + 1 < copy->range_count) continue;
        status = pst__cuda_launch_kernel(cuda, cuda->kernels->copy_rows, copy->count,
                                         PST_CUDA_THREADS, stream, &table, "pst_copy_rows");
        table.range_count = 0;
    }
    return status;
}
