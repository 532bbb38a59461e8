/* A step of AdamW, by the arithmetic of sched/device/adamw.h, which host_adamw.c has, too: the same
 * bits, but for parameters whose moments have 16 of them. There root and quotients are the device's
 * own, off by some 1e-7 of an update: exact ones take half of the instructions, and it is these
 * that a step takes its time for. This text comes behind kernels.cu, whose vectors, ranges and
 * conversions it uses.
 *
 * A block takes a range of one piece. Where all addresses can be aligned together, and dtypes are
 * float and bfloat16, memory is accessed by vectors; else by single elements, which a warp still
 * reads and writes side by side. */

/* ---- the parameter ----------------------------------------------------------------------- */

/* `square`: see pst__adamw_move. */
template <bool EXACT>
static __device__ __forceinline__ void adamw_move(const pst__adamw_coefficients &with, float square,
                                                  pst__adamw_element &of) {
    if (EXACT) {
        pst__adamw_move(&with, square, &of);
    } else {
        const float divisor = root(square) * quotient(1.0f, with.root) + with.eps;
        of.parameter =
            of.parameter * with.decay - quotient(with.step_size * of.exp_avg, divisor);
    }
}

/* ---- single elements of any dtype -------------------------------------------------------- */

/* The loads of a round come before its conversions, so that several are under way. */
static __device__ __forceinline__ unsigned adamw_read(const void *from, address at,
                                                      unsigned dtype) {
    return dtype == PST_CUDA_ADAMW_FLOAT ? ((const unsigned *)from)[at]
                                         : ((const unsigned short *)from)[at];
}

static __device__ __forceinline__ float adamw_value(unsigned bits, unsigned dtype) {
    if (dtype == PST_CUDA_ADAMW_FLOAT) return __uint_as_float(bits);
    return dtype == PST_CUDA_ADAMW_HALF ? half_to_float((unsigned short)bits)
                                        : bfloat_to_float((unsigned short)bits);
}

static __device__ __forceinline__ void adamw_write(void *to, address at, unsigned dtype,
                                                   float value) {
    if (dtype == PST_CUDA_ADAMW_FLOAT)
        ((float *)to)[at] = value;
    else
        ((unsigned short *)to)[at] =
            dtype == PST_CUDA_ADAMW_HALF ? float_to_half(value) : float_to_bfloat(value);
}

static __device__ __forceinline__ unsigned adamw_random(const pst_cuda_adamw_piece &piece,
                                                        unsigned key, address at) {
    const address number = piece.first + at;
    return pst__adamw_random(key, (unsigned)number, (unsigned)(number >> 32));
}

static __device__ __forceinline__ void adamw_write_moments(const pst_cuda_adamw_piece &piece,
                                                           unsigned key, address at,
                                                           const pst__adamw_element &element) {
    if (PST_CUDA_ADAMW_ROUNDS(piece.kinds)) {
        const unsigned random = adamw_random(piece, key, at);
        ((unsigned short *)piece.exp_avg)[at] = pst__adamw_round(element.exp_avg, random);
        ((unsigned short *)piece.exp_avg_sq)[at] =
            pst__adamw_round(element.exp_avg_sq, random >> 16);
    } else {
        adamw_write(piece.exp_avg, at, PST_CUDA_ADAMW_MOMENT(piece.kinds), element.exp_avg);
        adamw_write(piece.exp_avg_sq, at, PST_CUDA_ADAMW_MOMENT(piece.kinds), element.exp_avg_sq);
    }
}

static __device__ __forceinline__ void adamw_write_single(const pst_cuda_adamw_piece &piece,
                                                          unsigned key, address at, float largest,
                                                          const pst__adamw_element &element) {
    adamw_write(piece.parameter, at, PST_CUDA_ADAMW_PARAMETER(piece.kinds), element.parameter);
    adamw_write_moments(piece, key, at, element);
    if (piece.max_exp_avg_sq)
        adamw_write(piece.max_exp_avg_sq, at, PST_CUDA_ADAMW_MOMENT(piece.kinds), largest);
    if (piece.copy)
        adamw_write(piece.copy, at, PST_CUDA_ADAMW_COPY(piece.kinds), element.parameter);
}

template <typename T> static __device__ __forceinline__ const T *at_element(const void *base,
                                                                            address at) {
    return (const T *)base + at;
}
template <typename T> static __device__ __forceinline__ T *at_element(void *base, address at) {
    return (T *)base + at;
}

/* ---- gradients --------------------------------------------------------------------------- */

/* One that is there. A single element is read at once, and converted when all loads of a round are
 * under way. */
struct adamw_written {
    const void *memory;
    __device__ __forceinline__ unsigned read(address at, unsigned dtype) const {
        return adamw_read(memory, at, dtype);
    }
    __device__ __forceinline__ float value(unsigned bits, unsigned dtype) const {
        return adamw_value(bits, dtype);
    }
    template <unsigned N, typename G>
    __device__ __forceinline__ void read_all(address at, float *to) const {
        const auto in = read_vector<N, true>(at_element<G>(memory, at));
#pragma unroll
        for (unsigned e = 0; e < N; e++)
            to[e] = load<float>(in.at[e]);
    }
};

/* The sum of sources, as pst_sum has it: see there. */
struct adamw_added {
    const pst_cuda_adamw_sum &sum;
    template <unsigned N> __device__ __forceinline__ void round(float *totals) const {
#pragma unroll
        for (unsigned e = 0; e < N; e++)
            totals[e] *= sum.scale;
        if (sum.rounds_to == PST_CUDA_ADAMW_BFLOAT) {
#pragma unroll
            for (unsigned e = 0; e < N; e++)
                totals[e] = bfloat_to_float(float_to_bfloat(totals[e]));
        } else if (sum.rounds_to == PST_CUDA_ADAMW_HALF) {
#pragma unroll
            for (unsigned e = 0; e < N; e++)
                totals[e] = half_to_float(float_to_half(totals[e]));
        }
    }
    __device__ __forceinline__ unsigned read(address at, unsigned dtype) const {
        float total = -0.0f;
        for (unsigned k = 0; k < sum.source_count; k++)
            total += adamw_value(adamw_read(sum.source[k], at, dtype), dtype);
        round<1>(&total);
        return __float_as_uint(total);
    }
    __device__ __forceinline__ float value(unsigned bits, unsigned) const {
        return __uint_as_float(bits);
    }
    template <unsigned N, typename G>
    __device__ __forceinline__ void read_all(address at, float *to) const {
        enum { ROUND = 2 };
#pragma unroll
        for (unsigned e = 0; e < N; e++)
            to[e] = -0.0f;
        for (unsigned k = 0; k < sum.source_count; k += ROUND) {
            pack<G, N> in[ROUND];
#pragma unroll
            for (unsigned r = 0; r < ROUND; r++)
                if (k + r < sum.source_count)
                    in[r] = read_vector<N, true>(at_element<G>(sum.source[k + r], at));
#pragma unroll
            for (unsigned r = 0; r < ROUND; r++)
#pragma unroll
                for (unsigned e = 0; e < N; e++)
                    if (k + r < sum.source_count) to[e] += load<float>(in[r].at[e]);
        }
        round<N>(to);
    }
};

/* ---- single elements of a piece ---------------------------------------------------------- */

/* `count` elements; number `skip_at` and what follows lie `skip` further. A function of its own, as
 * all ways end with it; it reads the coefficients again, which for a call would lie on a stack. */
template <typename Gradient>
static __device__ __noinline__ void adamw_singles(const pst_cuda_adamw_piece &piece,
                                     Gradient gradients, address begin, unsigned count,
                                     unsigned skip_at, unsigned skip) {
    enum { ROUND = 4 };
    const pst__adamw_coefficients with = *(const pst__adamw_coefficients *)piece.coefficients;
    if (with.is_skipped) return;
    const unsigned parameter = PST_CUDA_ADAMW_PARAMETER(piece.kinds),
                   gradient = PST_CUDA_ADAMW_GRADIENT(piece.kinds),
                   moment = PST_CUDA_ADAMW_MOMENT(piece.kinds);
    for (unsigned i = threadIdx.x; i < count; i += ROUND * PST_CUDA_THREADS) {
        unsigned in[ROUND][5];
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++) {
            const unsigned number = i + r * PST_CUDA_THREADS;
            const address at = begin + number + (number < skip_at ? 0 : skip);
            if (number >= count) continue;
            in[r][0] = adamw_read(piece.parameter, at, parameter);
            in[r][1] = gradients.read(at, gradient);
            in[r][2] = adamw_read(piece.exp_avg, at, moment);
            in[r][3] = adamw_read(piece.exp_avg_sq, at, moment);
            if (piece.max_exp_avg_sq) in[r][4] = adamw_read(piece.max_exp_avg_sq, at, moment);
        }
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++) {
            const unsigned number = i + r * PST_CUDA_THREADS;
            const address at = begin + number + (number < skip_at ? 0 : skip);
            if (number >= count) continue;
            pst__adamw_element element = {
                adamw_value(in[r][0], parameter), gradients.value(in[r][1], gradient),
                adamw_value(in[r][2], moment), adamw_value(in[r][3], moment)};
            pst__adamw_moments(&with, &element);
            float square = element.exp_avg_sq;
            if (piece.max_exp_avg_sq) {
                const float largest = adamw_value(in[r][4], moment);
                square = largest > square ? largest : square;
            }
            if (moment == PST_CUDA_ADAMW_FLOAT)
                adamw_move<true>(with, square, element);
            else
                adamw_move<false>(with, square, element);
            adamw_write_single(piece, with.key, at, square, element);
        }
    }
}

/* ---- vectors ----------------------------------------------------------------------------- */

template <typename P, typename G, typename M>
static __device__ constexpr unsigned adamw_vector_length() {
    return PST_CUDA_ADAMW_VECTOR(sizeof(P), sizeof(G), sizeof(M));
}

static __device__ __forceinline__ void adamw_round(float &to, float value, unsigned) {
    to = value;
}
static __device__ __forceinline__ void adamw_round(bfloat &to, float value, unsigned random) {
    to.bits = pst__adamw_round(value, random);
}

/* Gradients and moments are not needed again soon; parameters are what is gathered next. All reads
 * are under way before the first one is waited for, and that of the coefficients with them. */
template <typename P, typename G, typename M, bool ROUNDS, typename Gradient>
static __device__ __forceinline__ void adamw_vector(const pst_cuda_adamw_piece &piece,
                                                    const Gradient &gradients,
                                                    const pst__adamw_coefficients &with,
                                                    address at) {
    constexpr unsigned N = adamw_vector_length<P, G, M>();
    auto parameter = read_vector<N>(at_element<P>((const void *)piece.parameter, at));
    auto exp_avg = read_vector<N, true>(at_element<M>((const void *)piece.exp_avg, at));
    auto exp_avg_sq = read_vector<N, true>(at_element<M>((const void *)piece.exp_avg_sq, at));
    float gradient[N];
    gradients.template read_all<N, G>(at, gradient);
    if (with.is_skipped) return;
    pack<bfloat, N> copy;
#pragma unroll
    for (unsigned e = 0; e < N; e++) {
        pst__adamw_element element = {
            load<float>(parameter.at[e]), gradient[e], load<float>(exp_avg.at[e]),
            load<float>(exp_avg_sq.at[e])};
        pst__adamw_moments(&with, &element);
        adamw_move<sizeof(M) == sizeof(float)>(with, element.exp_avg_sq, element);
        store(parameter.at[e], element.parameter);
        store(copy.at[e], element.parameter);
        if constexpr (ROUNDS) {
            const unsigned random = adamw_random(piece, with.key, at + e);
            adamw_round(exp_avg.at[e], element.exp_avg, random);
            adamw_round(exp_avg_sq.at[e], element.exp_avg_sq, random >> 16);
        } else {
            store(exp_avg.at[e], element.exp_avg);
            store(exp_avg_sq.at[e], element.exp_avg_sq);
        }
    }
    write_vector<N>(at_element<P>(piece.parameter, at), parameter);
    write_vector<N, true>(at_element<M>(piece.exp_avg, at), exp_avg);
    write_vector<N, true>(at_element<M>(piece.exp_avg_sq, at), exp_avg_sq);
    if (piece.copy) write_vector<N>(at_element<bfloat>(piece.copy, at), copy);
}

/* Vectors begin at the first line of the parameter's memory; `piece.before` elements lie before it,
 * which the first block takes, too. */
template <typename P, typename G, typename M, typename Gradient>
static __device__ __forceinline__ void adamw_range(const pst_cuda_adamw_piece &piece,
                                                   const Gradient &gradients,
                                                   const pst__adamw_coefficients &with,
                                                   unsigned each, unsigned block) {
    constexpr unsigned N = adamw_vector_length<P, G, M>();
    const range part = share_of(piece.count - piece.before, each, block);
    const address first = piece.before + part.begin;
    const unsigned head = block == 0 ? piece.before : 0, vectors = part.count / N;
    if (sizeof(M) == sizeof(bfloat) && PST_CUDA_ADAMW_ROUNDS(piece.kinds))
        for (unsigned i = threadIdx.x; i < vectors; i += PST_CUDA_THREADS)
            adamw_vector<P, G, M, true>(piece, gradients, with, first + (address)i * N);
    else
        for (unsigned i = threadIdx.x; i < vectors; i += PST_CUDA_THREADS)
            adamw_vector<P, G, M, false>(piece, gradients, with, first + (address)i * N);
    const unsigned single = head + part.count - vectors * N;
    if (single > 0)
        adamw_singles(piece, gradients, first - head, single, head, vectors * N);
}

/* ---- kernels ----------------------------------------------------------------------------- */

/* So few registers a thread that a multiprocessor has room for as many blocks: what it has under
 * way hides how long memory takes. */
enum { ADAMW_BLOCKS = 4 };

/* Of the dtypes of parameter, gradient and moments bits 2, 1 and 0 of the way are set for bfloat16;
 * a block takes `each` elements. */
template <typename Gradient>
static __device__ __forceinline__ void adamw_piece(const pst_cuda_adamw_piece &piece,
                                                   const Gradient &gradients, unsigned each,
                                                   unsigned block) {
    const pst__adamw_coefficients with = *(const pst__adamw_coefficients *)piece.coefficients;
    switch (piece.way) {
    case 0: adamw_range<float, float, float>(piece, gradients, with, each, block); break;
    case 1: adamw_range<float, float, bfloat>(piece, gradients, with, each, block); break;
    case 2: adamw_range<float, bfloat, float>(piece, gradients, with, each, block); break;
    case 3: adamw_range<float, bfloat, bfloat>(piece, gradients, with, each, block); break;
    case 4: adamw_range<bfloat, float, float>(piece, gradients, with, each, block); break;
    case 5: adamw_range<bfloat, float, bfloat>(piece, gradients, with, each, block); break;
    case 6: adamw_range<bfloat, bfloat, float>(piece, gradients, with, each, block); break;
    case 7: adamw_range<bfloat, bfloat, bfloat>(piece, gradients, with, each, block); break;
    default: {
        const range part = share_of(piece.count, each, block);
        adamw_singles(piece, gradients, part.begin, part.count, part.count, 0);
    }
    }
}

extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS, ADAMW_BLOCKS)
    pst_adamw(const __grid_constant__ pst_cuda_adamw table) {
    const pst_cuda_adamw_piece &piece = table.piece[piece_of(table, blockIdx.x)];
    const adamw_written gradients = {piece.gradient};
    adamw_piece(piece, gradients, table.block_elements, blockIdx.x - piece.first_block);
}

extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS, ADAMW_BLOCKS)
    pst_adamw_sums(const __grid_constant__ pst_cuda_adamw_sums table) {
    const unsigned index = piece_of(table, blockIdx.x);
    const pst_cuda_adamw_piece &piece = table.piece[index];
    const adamw_added gradients = {table.sum[index]};
    adamw_piece(piece, gradients, table.block_elements, blockIdx.x - piece.first_block);
}

#ifdef PST_CUDA_LARGE_PARAMETERS
extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS, ADAMW_BLOCKS)
    pst_adamw_many(const __grid_constant__ pst_cuda_adamw_many table) {
    const pst_cuda_adamw_piece &piece = table.piece[piece_of(table, blockIdx.x)];
    const adamw_written gradients = {piece.gradient};
    adamw_piece(piece, gradients, table.block_elements, blockIdx.x - piece.first_block);
}
#endif

extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS)
    pst_adamw_prepare(const __grid_constant__ pst_cuda_adamw_steps given) {
    const unsigned i = blockIdx.x * PST_CUDA_THREADS + threadIdx.x;
    if (i >= given.count) return;
    pst__adamw_coefficients coefficients;
    pst__adamw_prepare(&given.settings, given.step[i], &coefficients);
    ((pst__adamw_coefficients *)given.coefficients)[i] = coefficients;
}
