/* The kernels of the device `cuda`: cast-scale-copy of many pieces, sum of several sources, fill.
 * NVRTC compiles this text, behind arguments.h, for the device that is found; there are no
 * headers. Results are those of host_kernels.c bit for bit, but for the payload of a NaN.
 *
 * A block takes a range of one piece. Memory is accessed by vectors, 16 bytes of the wider dtype,
 * where all addresses can be aligned together, with single elements before and after; and by single
 * elements where they cannot. */

typedef unsigned char byte;
typedef unsigned long long address;

struct half {
    unsigned short bits;
};
struct bfloat {
    unsigned short bits;
};

/* ---- conversions ------------------------------------------------------------------------ */

#ifndef PST_CUDA_EMULATED
static __device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

static __device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ unsigned short double_to_half(double value) {
    unsigned short bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
    return bits;
}

static __device__ __forceinline__ float bfloat_to_float(unsigned short bits) {
    return __uint_as_float((unsigned)bits << 16);
}

static __device__ __forceinline__ unsigned short float_to_bfloat(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned short result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(bits >> 16 | 0x40u);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

/* Within some units of the last place. Of any square; but the quotient is infinite where a divisor
 * is subnormal, and 0 where it itself is. */
static __device__ __forceinline__ float root(float square) {
    float found;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(found) : "f"(square));
    return found;
}

static __device__ __forceinline__ float quotient(float dividend, float divisor) {
    float found;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(found) : "f"(dividend), "f"(divisor));
    return found;
}

/* By way of a float rounded to odd, so that the second rounding gives what one would. */
static __device__ __forceinline__ unsigned short double_to_bfloat(double value) {
    const float cut = __double2float_rz(value);
    const bool inexact = (double)cut != value && value == value;
    return float_to_bfloat(inexact ? __uint_as_float(__float_as_uint(cut) | 1u) : cut);
}
#endif

/* An element in the type that is computed with (float, or double if one side is double). */
template <typename W> static __device__ __forceinline__ W load(float value) {
    return value;
}
template <typename W> static __device__ __forceinline__ W load(double value) {
    return value;
}
template <typename W> static __device__ __forceinline__ W load(half value) {
    return half_to_float(value.bits);
}
template <typename W> static __device__ __forceinline__ W load(bfloat value) {
    return bfloat_to_float(value.bits);
}

template <typename W> static __device__ __forceinline__ void store(float &to, W value) {
    to = (float)value;
}
static __device__ __forceinline__ void store(double &to, double value) {
    to = value;
}
static __device__ __forceinline__ void store(half &to, float value) {
    to.bits = float_to_half(value);
}
static __device__ __forceinline__ void store(half &to, double value) {
    to.bits = double_to_half(value);
}
static __device__ __forceinline__ void store(bfloat &to, float value) {
    to.bits = float_to_bfloat(value);
}
static __device__ __forceinline__ void store(bfloat &to, double value) {
    to.bits = double_to_bfloat(value);
}

template <typename D, typename S> struct pair {
    typedef float wide;
};
template <typename S> struct pair<double, S> {
    typedef double wide;
};
template <typename D> struct pair<D, double> {
    typedef double wide;
};
template <> struct pair<double, double> {
    typedef double wide;
};

/* Elements of a vector. */
template <typename D, typename S> static __device__ constexpr unsigned vector_length() {
    return 16 / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));
}

template <typename T, unsigned N> struct alignas(N * sizeof(T)) pack {
    T at[N];
};

/* A vector is one access: by instructions of its own, as the compiler takes vectors apart that are
 * made of small elements. */
template <unsigned BYTES> struct words {
    typedef pack<unsigned, BYTES / sizeof(unsigned)> type;
};
template <> struct words<2> {
    typedef unsigned short type;
};

#ifdef PST_CUDA_EMULATED
template <typename W> static W read_words(const W *from) {
    return *from;
}
template <typename W> static void write_words(W *to, const W &given) {
    *to = given;
}
#else
/* Reads and writes of 16 and 8 bytes, with what the instruction says of the caches. */
#define PST_VECTOR_ACCESS(which, caches)                                                           \
    static __device__ __forceinline__ pack<unsigned, 4> read_##which(                              \
        const pack<unsigned, 4> *from) {                                                           \
        pack<unsigned, 4> w;                                                                       \
        asm volatile("ld.global" caches ".v4.u32 {%0, %1, %2, %3}, [%4];"                          \
                     : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])                  \
                     : "l"(from));                                                                 \
        return w;                                                                                  \
    }                                                                                              \
    static __device__ __forceinline__ pack<unsigned, 2> read_##which(                              \
        const pack<unsigned, 2> *from) {                                                           \
        pack<unsigned, 2> w;                                                                       \
        asm volatile("ld.global" caches ".v2.u32 {%0, %1}, [%2];"                                  \
                     : "=r"(w.at[0]), "=r"(w.at[1])                                                \
                     : "l"(from));                                                                 \
        return w;                                                                                  \
    }                                                                                              \
    static __device__ __forceinline__ void write_##which(pack<unsigned, 4> *to,                    \
                                                         const pack<unsigned, 4> &w) {             \
        asm volatile("st.global" caches ".v4.u32 [%0], {%1, %2, %3, %4};"                          \
                     :                                                                             \
                     : "l"(to), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3])             \
                     : "memory");                                                                  \
    }                                                                                              \
    static __device__ __forceinline__ void write_##which(pack<unsigned, 2> *to,                    \
                                                         const pack<unsigned, 2> &w) {             \
        asm volatile("st.global" caches ".v2.u32 [%0], {%1, %2};"                                  \
                     :                                                                             \
                     : "l"(to), "r"(w.at[0]), "r"(w.at[1])                                         \
                     : "memory");                                                                  \
    }
PST_VECTOR_ACCESS(words, "")
static __device__ __forceinline__ pack<unsigned, 1> read_words(const pack<unsigned, 1> *from) {
    return *from;
}
static __device__ __forceinline__ unsigned short read_words(const unsigned short *from) {
    return *from;
}

static __device__ __forceinline__ void write_words(pack<unsigned, 1> *to,
                                                   const pack<unsigned, 1> &w) {
    *to = w;
}
static __device__ __forceinline__ void write_words(unsigned short *to, unsigned short w) {
    *to = w;
}
#endif

/* The same for what is not needed again soon: it leaves the caches before other things. */
template <typename W> static __device__ __forceinline__ W read_passing(const W *from) {
    return read_words(from);
}
template <typename W> static __device__ __forceinline__ void write_passing(W *to, const W &w) {
    write_words(to, w);
}
#ifndef PST_CUDA_EMULATED
PST_VECTOR_ACCESS(passing, ".cs")
#endif

template <typename T, unsigned N> union vector {
    pack<T, N> elements;
    typename words<N * sizeof(T)>::type moved;
};

template <unsigned N, bool PASSING = false, typename T>
static __device__ __forceinline__ pack<T, N> read_vector(const T *from) {
    const auto *moved = (const typename words<N * sizeof(T)>::type *)from;
    vector<T, N> found;
    if constexpr (PASSING)
        found.moved = read_passing(moved);
    else
        found.moved = read_words(moved);
    return found.elements;
}

template <unsigned N, bool PASSING = false, typename T>
static __device__ __forceinline__ void write_vector(T *to, const pack<T, N> &elements) {
    auto *moved = (typename words<N * sizeof(T)>::type *)to;
    vector<T, N> given;
    given.elements = elements;
    if constexpr (PASSING)
        write_passing(moved, given.moved);
    else
        write_words(moved, given.moved);
}

/* A vector that begins `before` bytes into the first of two. */
template <unsigned N, typename T, unsigned WORDS>
static __device__ __forceinline__ pack<T, N> read_across(const pack<unsigned, WORDS> *around,
                                                         unsigned before) {
    const pack<unsigned, WORDS> first = read_words(around), second = read_words(around + 1);
    unsigned word[2 * WORDS];
    vector<T, N> found;
#pragma unroll
    for (unsigned w = 0; w < WORDS; w++) {
        word[w] = first.at[w];
        word[WORDS + w] = second.at[w];
    }
#pragma unroll
    for (unsigned step = WORDS / 2; step > 0; step /= 2)
#pragma unroll
        for (unsigned w = 0; w + step < 2 * WORDS; w++)
            word[w] = (before / sizeof(unsigned) & step) != 0 ? word[w + step] : word[w];
#pragma unroll
    for (unsigned w = 0; w < WORDS; w++)
        found.moved.at[w] =
            (unsigned)(((address)word[w + 1] << 32 | word[w]) >> before % sizeof(unsigned) * 8);
    return found.elements;
}

/* ---- ranges ----------------------------------------------------------------------------- */

/* Part `index` of `count` things that are handed out in parts of `share`. */
struct range {
    address begin;
    unsigned count;
};

static __device__ __forceinline__ range share_of(address count, unsigned share, unsigned index) {
    range part;
    part.begin = (address)index * share;
    part.count = (unsigned)(count - part.begin < share ? count - part.begin : share);
    return part;
}

/* Bytes from `pointer` up to the next multiple of `alignment`. */
static __device__ __forceinline__ unsigned gap(const void *pointer, unsigned alignment) {
    return (unsigned)(0 - (address)pointer) & (alignment - 1);
}

static __device__ __forceinline__ unsigned least(unsigned a, unsigned b) {
    return a < b ? a : b;
}

/* ---- bytes ------------------------------------------------------------------------------ */

static __device__ void fill_bytes(byte *to, unsigned count, unsigned value) {
    typedef pack<unsigned, 4> word;
    const unsigned four = (value & 255u) * 0x01010101u;
    const word filled = {{four, four, four, four}};
    const unsigned head = least(gap(to, sizeof(word)), count);
    const unsigned words = (count - head) / sizeof(word), tail = head + words * sizeof(word);
    for (unsigned i = threadIdx.x; i < head; i += PST_CUDA_THREADS)
        to[i] = (byte)value;
    for (unsigned i = threadIdx.x; i < words; i += PST_CUDA_THREADS)
        ((word *)(to + head))[i] = filled;
    for (unsigned i = tail + threadIdx.x; i < count; i += PST_CUDA_THREADS)
        to[i] = (byte)value;
}

/* All loads of a round come before its stores, so that several are under way. */
template <typename T>
static __device__ __forceinline__ void copy_words(T *to, const T *from, unsigned count) {
    enum { ROUND = 4 };
    for (unsigned i = threadIdx.x; i < count; i += ROUND * PST_CUDA_THREADS) {
        T word[ROUND];
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++)
            if (i + r * PST_CUDA_THREADS < count) word[r] = from[i + r * PST_CUDA_THREADS];
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++)
            if (i + r * PST_CUDA_THREADS < count) to[i + r * PST_CUDA_THREADS] = word[r];
    }
}

template <typename T>
static __device__ __forceinline__ void copy_aligned(byte *to, const byte *from, unsigned count) {
    const unsigned head = least(gap(to, sizeof(T)), count);
    const unsigned words = (count - head) / sizeof(T), tail = head + words * sizeof(T);
    copy_words(to, from, head);
    copy_words((T *)(to + head), (const T *)(from + head), words);
    copy_words(to + tail, from + tail, count - tail);
}

/* By the widest words that both sides can be aligned to. */
static __device__ void copy_bytes(byte *to, const byte *from, unsigned count) {
    const address apart = (address)to ^ (address)from;
    if (apart % 16 == 0)
        copy_aligned<pack<unsigned, 4>>(to, from, count);
    else if (apart % 8 == 0)
        copy_aligned<pack<unsigned, 2>>(to, from, count);
    else if (apart % 4 == 0)
        copy_aligned<unsigned>(to, from, count);
    else if (apart % 2 == 0)
        copy_aligned<unsigned short>(to, from, count);
    else
        copy_words(to, from, count);
}

/* ---- cast, scale, copy ------------------------------------------------------------------ */

/* Vectors of N elements number 0 to count - 1; number `skip_at` and what follows lie `skip` further.
 * ACROSS: the source's addresses do not fit them, and nothing is skipped. */
template <unsigned N, bool ACROSS, typename D, typename S>
static __device__ __forceinline__ void convert_vectors(D *to, const S *from, unsigned count,
                                                       unsigned skip_at, unsigned skip,
                                                       typename pair<D, S>::wide scale) {
    typedef typename pair<D, S>::wide W;
    typedef pack<unsigned, (N * sizeof(S) + 3) / sizeof(unsigned)> around;
    enum { ROUND = N * sizeof(S) < 16 ? 8 : 4 };
    const unsigned before = (unsigned)((address)from % (N * sizeof(S)));
    const around *aligned = (const around *)((address)from - before);
    for (unsigned i = threadIdx.x; i < count; i += ROUND * PST_CUDA_THREADS) {
        pack<S, N> in[ROUND];
        address at[ROUND];
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++) {
            const unsigned number = i + r * PST_CUDA_THREADS;
            at[r] = (address)(number < skip_at ? number : number + skip) * N;
            if (number >= count) continue;
            if constexpr (ACROSS)
                in[r] = read_across<N, S>(aligned + number, before);
            else
                in[r] = read_vector<N>(from + at[r]);
        }
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++) {
            pack<D, N> out;
#pragma unroll
            for (unsigned e = 0; e < N; e++)
                store(out.at[e], load<W>(in[r].at[e]) * scale);
            if (i + r * PST_CUDA_THREADS < count) write_vector<N>(to + at[r], out);
        }
    }
}

/* Where vectors are read across, the first one of a piece and the last one would reach over its
 * source's ends; `begins`, `ends`: there is nothing before, less than a vector behind. Ranges within
 * a piece have no single elements then, and whole lines to write. */
template <typename D, typename S>
static __device__ void convert(D *to, const S *from, unsigned count, bool begins, bool ends,
                               double scale) {
    constexpr unsigned N = vector_length<D, S>();
    const auto factor = (typename pair<D, S>::wide)scale;
    unsigned head = least(gap(to, N * sizeof(D)) / sizeof(D), count);
    const bool across = gap(from + head, N * sizeof(S)) != 0;
    if (across && begins) head = least(head + N, count);
    unsigned vectors = (count - head) / N;
    if (across && ends && vectors > 0) vectors--;
    if (across)
        convert_vectors<N, true>(to + head, from + head, vectors, vectors, 0, factor);
    else
        convert_vectors<N, false>(to + head, from + head, vectors, vectors, 0, factor);
    convert_vectors<1, false>(to, from, count - vectors * N, head, vectors * N, factor);
}

template <typename D, typename S>
static __device__ __forceinline__ void convert_part(const pst_cuda_piece &piece, double scale,
                                                    unsigned block_bytes, unsigned block) {
    constexpr unsigned N = vector_length<D, S>();
    const range part = share_of(piece.count, block_bytes / 16 * N, block);
    convert((D *)piece.destination + part.begin, (const S *)piece.source + part.begin, part.count,
            part.begin == 0, piece.count - part.begin - part.count < N, scale);
}

template <typename D>
static __device__ __forceinline__ void convert_from(unsigned source, const pst_cuda_piece &piece,
                                                    double scale, unsigned block_bytes,
                                                    unsigned block) {
    switch (source) {
    case 0: convert_part<D, float>(piece, scale, block_bytes, block); break;
    case 1: convert_part<D, double>(piece, scale, block_bytes, block); break;
    case 2: convert_part<D, half>(piece, scale, block_bytes, block); break;
    case 3: convert_part<D, bfloat>(piece, scale, block_bytes, block); break;
    }
}

static __device__ __forceinline__ void move_bytes(const pst_cuda_piece &piece,
                                                  unsigned block_bytes, unsigned block) {
    const range part = share_of(piece.count, block_bytes, block);
    byte *to = (byte *)piece.destination + part.begin;
    if (piece.action == PST_CUDA_ZERO)
        fill_bytes(to, part.count, 0);
    else
        copy_bytes(to, (const byte *)piece.source + part.begin, part.count);
}

/* The last piece whose first block is not after this one. */
template <typename Table> static __device__ unsigned piece_of(const Table &table, unsigned block) {
    unsigned low = 0, high = table.piece_count;
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        if (table.piece[middle].first_block <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

template <typename Table>
static __device__ __forceinline__ void cast_scale_copy(const Table &table) {
    const pst_cuda_piece &piece = table.piece[piece_of(table, blockIdx.x)];
    const unsigned block = blockIdx.x - piece.first_block, source = piece.action % 4;
    switch (piece.action / 4) {
    case 0: convert_from<float>(source, piece, table.scale, table.block_bytes, block); break;
    case 1: convert_from<double>(source, piece, table.scale, table.block_bytes, block); break;
    case 2: convert_from<half>(source, piece, table.scale, table.block_bytes, block); break;
    case 3: convert_from<bfloat>(source, piece, table.scale, table.block_bytes, block); break;
    default: move_bytes(piece, table.block_bytes, block);
    }
}

extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS)
    pst_cast_scale_copy(const __grid_constant__ pst_cuda_cast table) {
    cast_scale_copy(table);
}

#ifdef PST_CUDA_LARGE_PARAMETERS
extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS)
    pst_cast_scale_copy_many(const __grid_constant__ pst_cuda_cast_many table) {
    cast_scale_copy(table);
}
#endif

/* ---- sum of several sources ------------------------------------------------------------- */

/* V vectors of N elements, the first from `index` on, `stride` elements apart; `valid` of them are
 * there. The sum begins with -0, to which adding changes nothing. All loads of a round come before
 * its additions, so that several are under way. */
template <unsigned V, unsigned N, bool PASSING, typename D, typename S>
static __device__ __forceinline__ void sum_vectors(const pst_cuda_sum &sum, address index,
                                                   unsigned stride, unsigned valid) {
    typedef typename pair<D, S>::wide W;
    enum { ROUND = 4 };
    W total[V][N];
    pack<D, N> out[V];
#pragma unroll
    for (unsigned v = 0; v < V; v++) {
        if (sum.accumulate && v < valid)
            out[v] = read_vector<N, PASSING>((const D *)sum.destination + index + v * stride);
#pragma unroll
        for (unsigned e = 0; e < N; e++)
            total[v][e] = sum.source_count == 0 ? (W)0 : -(W)0;
    }
    for (unsigned k = 0; k < sum.source_count; k += ROUND) {
        pack<S, N> in[ROUND][V];
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++)
#pragma unroll
            for (unsigned v = 0; v < V; v++)
                if (k + r < sum.source_count && v < valid)
                    in[r][v] =
                        read_vector<N, PASSING>((const S *)sum.source[k + r] + index + v * stride);
#pragma unroll
        for (unsigned r = 0; r < ROUND; r++)
#pragma unroll
            for (unsigned v = 0; v < V; v++)
#pragma unroll
                for (unsigned e = 0; e < N; e++)
                    if (k + r < sum.source_count) total[v][e] += load<W>(in[r][v].at[e]);
    }
#pragma unroll
    for (unsigned v = 0; v < V; v++) {
#pragma unroll
        for (unsigned e = 0; e < N; e++) {
            total[v][e] *= (W)sum.scale;
            if (sum.accumulate) total[v][e] += load<W>(out[v].at[e]);
            store(out[v].at[e], total[v][e]);
        }
        if (v < valid) write_vector<N, PASSING>((D *)sum.destination + index + v * stride, out[v]);
    }
}

/* Elements before the first vector: all of them if not all addresses can be aligned together. */
template <unsigned N, typename D, typename S>
static __device__ __forceinline__ unsigned sum_head(const pst_cuda_sum &sum, range part) {
    const D *to = (const D *)sum.destination + part.begin;
    const unsigned head = least(gap(to, N * sizeof(D)) / sizeof(D), part.count);
    for (unsigned k = 0; k < sum.source_count; k++)
        if (gap((const S *)sum.source[k] + part.begin + head, N * sizeof(S)) != 0)
            return part.count;
    return head;
}

template <bool PASSING, typename D, typename S>
static __device__ void sum_range(const pst_cuda_sum &sum) {
    constexpr unsigned N = vector_length<D, S>(), V = N * sizeof(S) < 16 ? 2 : 1;
    const range part = share_of(sum.count, sum.block_bytes / 16 * N, blockIdx.x);
    const unsigned head = sum_head<N, D, S>(sum, part);
    const unsigned vectors = (part.count - head) / N, single = part.count - vectors * N;
    for (unsigned i = threadIdx.x; i < vectors; i += V * blockDim.x)
        sum_vectors<V, N, PASSING, D, S>(sum, part.begin + head + (address)i * N, blockDim.x * N,
                                i + (V - 1) * blockDim.x < vectors ? V : 1);
    for (unsigned i = threadIdx.x; i < single; i += blockDim.x)
        sum_vectors<1, 1, PASSING, D, S>(sum, part.begin + i + (i < head ? 0 : vectors * N), 0, 1);
}

template <bool PASSING, typename D>
static __device__ __forceinline__ void sum_from(unsigned source, const pst_cuda_sum &sum) {
    switch (source) {
    case 0: sum_range<PASSING, D, float>(sum); break;
    case 1: sum_range<PASSING, D, double>(sum); break;
    case 2: sum_range<PASSING, D, half>(sum); break;
    case 3: sum_range<PASSING, D, bfloat>(sum); break;
    }
}

template <bool PASSING> static __device__ __forceinline__ void sum_all(const pst_cuda_sum &sum) {
    const unsigned source = sum.action % 4;
    switch (sum.action / 4) {
    case 0: sum_from<PASSING, float>(source, sum); break;
    case 1: sum_from<PASSING, double>(source, sum); break;
    case 2: sum_from<PASSING, half>(source, sum); break;
    case 3: sum_from<PASSING, bfloat>(source, sum); break;
    }
}

extern "C" __global__ void __launch_bounds__(PST_CUDA_WIDE_THREADS)
    pst_sum(const __grid_constant__ pst_cuda_sum sum) {
    sum_all<false>(sum);
}

extern "C" __global__ void __launch_bounds__(PST_CUDA_WIDE_THREADS)
    pst_sum_passing(const __grid_constant__ pst_cuda_sum sum) {
    sum_all<true>(sum);
}

/* ---- largest of several sources ---------------------------------------------------------- */

template <typename T> static __device__ void maximum_range(const pst_cuda_sum &given) {
    const range part = share_of(given.count, given.block_bytes / sizeof(T), blockIdx.x);
    for (unsigned i = threadIdx.x; i < part.count; i += blockDim.x) {
        const address at = part.begin + i;
        T largest = ((const T *)given.source[0])[at];
        for (unsigned k = 1; k < given.source_count; k++) {
            const T value = ((const T *)given.source[k])[at];
            if (value > largest) largest = value;
        }
        ((T *)given.destination)[at] = largest;
    }
}

extern "C" __global__ void __launch_bounds__(PST_CUDA_WIDE_THREADS)
    pst_maximum(const __grid_constant__ pst_cuda_sum given) {
    switch (given.action) {
    case 0: maximum_range<float>(given); break;
    case 1: maximum_range<double>(given); break;
    case 4: maximum_range<signed char>(given); break;
    case 6: maximum_range<short>(given); break;
    case 7: maximum_range<int>(given); break;
    case 8: maximum_range<long long>(given); break;
    default: maximum_range<byte>(given); break;
    }
}

/* ---- fill ------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS)
    pst_fill(const __grid_constant__ pst_cuda_fill fill) {
    const range part = share_of(fill.bytes, fill.block_bytes, blockIdx.x);
    fill_bytes((byte *)fill.destination + part.begin, part.count, fill.byte);
}

/* ---- rows by number --------------------------------------------------------------------- */

/* A row that is named twice is written twice, with the same. */
extern "C" __global__ void __launch_bounds__(PST_CUDA_THREADS)
    pst_copy_rows(const __grid_constant__ pst_cuda_rows table) {
    const address row = (address)table.indices[blockIdx.x];
    if (row >= table.rows) return;
    const address row_begin = row * table.row_bytes, row_end = row_begin + table.row_bytes;
    for (unsigned i = 0; i < table.range_count; i++) {
        const pst_cuda_row_range &range = table.range[i];
        const address begin = row_begin > range.first ? row_begin : range.first;
        const address end = row_end < range.end ? row_end : range.end;
        if (begin < end)
            copy_bytes((byte *)range.destination + (begin - range.first),
                       (const byte *)range.source + (begin - range.first),
                       (unsigned)(end - begin));
    }
}
