#include "sched/cuda/arguments.h"
#include "sched/cuda/kernels.h"
#include "sched/device/host.h"

_Static_assert(sizeof(pst_cuda_adamw) <= 4096 && sizeof(pst_cuda_adamw_many) <= 32764 &&
                   sizeof(pst_cuda_adamw_sums) <= 4096 && sizeof(pst_cuda_adamw_steps) <= 4096,
               "they are parameters of kernels");
_Static_assert(PST_CUDA_ADAMW_SOURCES == PST_ADAMW_MOST_SOURCES, "as many as a piece may have");

/* ---- coefficients ----------------------------------------------------------------------- */

pst_status pst__cuda_adamw_prepare(pst__cuda *cuda, CUstream stream,
                                   const pst_adamw_settings *settings, float *const *steps,
                                   size_t count, void *coefficients) {
    pst_cuda_adamw_steps given = {.settings = pst__adamw_settings_of(settings)};
    pst_status status = PST_OK;
    for (size_t done = 0; status == PST_OK && done < count; done += given.count) {
        const size_t left = count - done;
        given.count = (unsigned)(left < PST_CUDA_ADAMW_STEPS ? left : PST_CUDA_ADAMW_STEPS);
        given.coefficients = (char *)coefficients + done * PST_ADAMW_COEFFICIENTS_BYTES;
        for (unsigned i = 0; i < given.count; i++)
            given.step[i] = steps[done + i];
        status = pst__cuda_launch_kernel(cuda, cuda->kernels->adamw_prepare,
                                         (given.count + PST_CUDA_THREADS - 1) / PST_CUDA_THREADS,
                                         PST_CUDA_THREADS, stream, &given, "pst_adamw_prepare");
    }
    return status;
}

/* ---- pieces ----------------------------------------------------------------------------- */

static unsigned kind_of(pst_dtype dtype) {
    return dtype == PST_FLOAT32    ? PST_CUDA_ADAMW_FLOAT
           : dtype == PST_BFLOAT16 ? PST_CUDA_ADAMW_BFLOAT
                                   : PST_CUDA_ADAMW_HALF;
}

static int is_aligned(const void *memory, pst_dtype dtype) {
    return (uintptr_t)memory % pst_dtype_size(dtype) == 0;
}

static int has_aligned_sources(const pst_adamw_piece *piece) {
    for (size_t i = 0; i < piece->source_count; i++)
        if (!is_aligned(piece->sources[i], piece->source_dtype)) return 0;
    return 1;
}

static pst_status check(pst__cuda *cuda, const pst_adamw_piece *piece, size_t index) {
    const pst_status status = pst__adamw_check(piece);
    if (status != PST_OK)
        return pst__cuda_refuse(
            cuda, status,
            "adamw: piece %zu: parameter %s, gradient %s (%zu sources of %s), moments %s%s, copy "
            "%s: "
            "they are float32, bfloat16 or float16, and there are up to %u sources",
            index, pst_dtype_name(piece->parameter_dtype), pst_dtype_name(piece->gradient_dtype),
            piece->source_count, pst_dtype_name(piece->source_dtype),
            pst_dtype_name(piece->moment_dtype),
            piece->rounds_randomly ? " (rounded randomly: bfloat16 only)" : "",
            piece->copy != NULL ? pst_dtype_name(piece->copy_dtype) : "none",
            PST_ADAMW_MOST_SOURCES);
    if (!is_aligned(piece->parameter, piece->parameter_dtype) ||
        !is_aligned(piece->gradient, piece->gradient_dtype) ||
        !is_aligned(piece->exp_avg, piece->moment_dtype) ||
        !is_aligned(piece->exp_avg_sq, piece->moment_dtype) ||
        !is_aligned(piece->max_exp_avg_sq, piece->moment_dtype) ||
        (piece->copy != NULL && !is_aligned(piece->copy, piece->copy_dtype)) ||
        !has_aligned_sources(piece))
        return pst__cuda_refuse(cuda, PST_EINVAL,
                                "adamw: piece %zu at %p: an address is not aligned to its elements",
                                index, piece->parameter);
    return PST_OK;
}

/* Elements before the first line of the parameter's memory, at most all. */
static unsigned before_lines(const pst_adamw_piece *piece) {
    const size_t size = pst_dtype_size(piece->parameter_dtype);
    const size_t before = (0 - (uintptr_t)piece->parameter) % (PST_CUDA_ADAMW_LINE * size) / size;
    return (unsigned)(before < piece->count ? before : piece->count);
}

/* Whether a vector of `length` elements can begin `before` elements behind the address, if any. */
static int is_vector(const void *memory, pst_dtype dtype, unsigned before, unsigned length) {
    const size_t size = pst_dtype_size(dtype);
    return memory == NULL || ((uintptr_t)memory + before * size) % (length * size) == 0;
}

static int are_vectors(const pst_adamw_piece *piece, unsigned before) {
    const pst_dtype gradient =
        piece->source_count > 0 ? piece->source_dtype : piece->gradient_dtype;
    const unsigned length =
        PST_CUDA_ADAMW_VECTOR(pst_dtype_size(piece->parameter_dtype), pst_dtype_size(gradient),
                              pst_dtype_size(piece->moment_dtype));
    for (size_t i = 0; i < piece->source_count; i++)
        if (!is_vector(piece->sources[i], gradient, before, length)) return 0;
    return (piece->source_count > 0 || is_vector(piece->gradient, gradient, before, length)) &&
           is_vector(piece->exp_avg, piece->moment_dtype, before, length) &&
           is_vector(piece->exp_avg_sq, piece->moment_dtype, before, length) &&
           is_vector(piece->copy, PST_BFLOAT16, before, length);
}

/* Vectors know neither halves nor AMSGrad. */
static unsigned way_of(const pst_adamw_piece *piece, unsigned parameter, unsigned gradient,
                       unsigned moment, unsigned before) {
    const int has_copy = piece->copy != NULL;
    if (parameter > 1 || gradient > 1 || moment > 1 || piece->max_exp_avg_sq != NULL ||
        (has_copy && piece->copy_dtype != PST_BFLOAT16) || !are_vectors(piece, before))
        return PST_CUDA_ADAMW_SINGLES;
    return parameter << 2 | gradient << 1 | moment;
}

static pst_cuda_adamw_piece entry_of(const pst_adamw_piece *piece) {
    const unsigned parameter = kind_of(piece->parameter_dtype),
                   gradient = kind_of(piece->source_count > 0 ? piece->source_dtype
                                                              : piece->gradient_dtype),
                   moment = kind_of(piece->moment_dtype),
                   copy = piece->copy != NULL ? kind_of(piece->copy_dtype) : 0,
                   rounds = piece->rounds_randomly != 0, before = before_lines(piece),
                   way = way_of(piece, parameter, gradient, moment, before);
    return (pst_cuda_adamw_piece){
        .parameter = piece->parameter,
        .gradient = piece->gradient,
        .exp_avg = piece->exp_avg,
        .exp_avg_sq = piece->exp_avg_sq,
        .max_exp_avg_sq = piece->max_exp_avg_sq,
        .copy = piece->copy,
        .coefficients = piece->coefficients,
        .count = piece->count,
        .first = piece->first,
        .kinds = (unsigned short)PST_CUDA_ADAMW_KINDS(parameter, gradient, moment, copy, rounds),
        .way = (unsigned char)way,
        .before = (unsigned char)(way == PST_CUDA_ADAMW_SINGLES ? 0 : before),
    };
}

/* Small enough that all processors have several blocks, as far as that makes sense. */
static unsigned block_elements_for(const pst__cuda *cuda, size_t elements) {
    enum { STEP = 2048, MOST = 8 * STEP, BLOCKS_EACH = 16 };
    const size_t share = elements / ((size_t)cuda->processors * BLOCKS_EACH);
    return share >= MOST ? MOST : (unsigned)(share / STEP + 1) * STEP;
}

static pst_cuda_adamw_sum sum_of(const pst_adamw_piece *piece) {
    pst_cuda_adamw_sum sum = {.scale = (float)piece->scale,
                              .source_count = (unsigned short)piece->source_count,
                              .rounds_to = (unsigned short)kind_of(piece->gradient_dtype)};
    for (size_t i = 0; i < piece->source_count; i++)
        sum.source[i] = piece->sources[i];
    return sum;
}

/* Returns how many blocks they take. */
static size_t share_blocks(const pst__cuda *cuda, pst_cuda_adamw_piece *pieces, unsigned count,
                           unsigned *block_elements) {
    size_t elements = 0, blocks = 0;
    for (unsigned i = 0; i < count; i++)
        elements += pieces[i].count;
    const unsigned each = *block_elements = block_elements_for(cuda, elements);
    for (unsigned i = 0; i < count; i++) {
        const unsigned long long whole = pieces[i].count - pieces[i].before;
        pieces[i].first_block = (unsigned)blocks;
        blocks += whole > each ? (whole + each - 1) / each : 1;
    }
    return blocks;
}

/* The beginning of a table is the same whatever its size, and a kernel takes no more than its own.
 */
static pst_status launch_table(pst__cuda *cuda, CUstream stream, pst_cuda_adamw_many *table) {
    const size_t blocks =
        share_blocks(cuda, table->piece, table->piece_count, &table->block_elements);
    if (blocks == 0) return PST_OK;
    return pst__cuda_launch_kernel(cuda,
                                   table->piece_count <= PST_CUDA_ADAMW_PIECES
                                       ? cuda->kernels->adamw
                                       : cuda->kernels->adamw_many,
                                   blocks, PST_CUDA_THREADS, stream, table, "pst_adamw");
}

static pst_status launch_sums(pst__cuda *cuda, CUstream stream, pst_cuda_adamw_sums *table) {
    const size_t blocks =
        share_blocks(cuda, table->piece, table->piece_count, &table->block_elements);
    if (blocks == 0) return PST_OK;
    return pst__cuda_launch_kernel(cuda, cuda->kernels->adamw_sums, blocks, PST_CUDA_THREADS,
                                   stream, table, "pst_adamw_sums");
}

static pst_status update_written(pst__cuda *cuda, CUstream stream, const pst_adamw_piece *pieces,
                                 size_t count) {
    const unsigned most =
        cuda->kernels->adamw_many != NULL ? PST_CUDA_ADAMW_MANY_PIECES : PST_CUDA_ADAMW_PIECES;
    pst_status status = PST_OK;
    pst_cuda_adamw_many table;
    table.piece_count = 0;
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        if (pieces[i].count > 0 && pieces[i].source_count == 0)
            table.piece[table.piece_count++] = entry_of(&pieces[i]);
        if (table.piece_count < most && i + 1 < count) continue;
        status = launch_table(cuda, stream, &table);
        table.piece_count = 0;
    }
    return status;
}

static pst_status update_sums(pst__cuda *cuda, CUstream stream, const pst_adamw_piece *pieces,
                              size_t count) {
    pst_status status = PST_OK;
    pst_cuda_adamw_sums table;
    table.piece_count = 0;
    for (size_t i = 0; status == PST_OK && i < count; i++) {
        if (pieces[i].count > 0 && pieces[i].source_count > 0) {
            table.piece[table.piece_count] = entry_of(&pieces[i]);
            table.sum[table.piece_count++] = sum_of(&pieces[i]);
        }
        if (table.piece_count < PST_CUDA_ADAMW_SUMS && i + 1 < count) continue;
        status = launch_sums(cuda, stream, &table);
        table.piece_count = 0;
    }
    return status;
}

pst_status pst__cuda_adamw(pst__cuda *cuda, CUstream stream, const pst_adamw_piece *pieces,
                           size_t count) {
    pst_status status = PST_OK;
    for (size_t i = 0; status == PST_OK && i < count; i++)
        status = check(cuda, &pieces[i], i);
    if (status == PST_OK) status = update_written(cuda, stream, pieces, count);
    return status == PST_OK ? update_sums(cuda, stream, pieces, count) : status;
}
