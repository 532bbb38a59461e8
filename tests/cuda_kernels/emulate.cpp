// The text of the kernels as the host's compiler sees it: a block's threads run one after the
// other, which is right for kernels whose threads never speak to each other.
#include "emulate.h"

#include "sched/device/half.h"

#include <string.h>

#define PST_CUDA_EMULATED
#define PST_CUDA_LARGE_PARAMETERS
#define __global__
#define __device__
#define __forceinline__        inline
#define __noinline__           /* of a function */
#define __launch_bounds__(...) /* of a kernel */
#define __grid_constant__

namespace {

struct position {
    unsigned x;
};
thread_local position threadIdx, blockIdx, blockDim;

// What the device does by instructions of its own.
inline float half_to_float(unsigned short bits) {
    return pst__from_float16(bits);
}
inline unsigned short float_to_half(float value) {
    return pst__to_float16(value);
}
inline unsigned short double_to_half(double value) {
    return pst__double_to_float16(value);
}
inline float bfloat_to_float(unsigned short bits) {
    return pst__from_bfloat16(bits);
}
inline unsigned short float_to_bfloat(float value) {
    return pst__to_bfloat16(value);
}
inline unsigned short double_to_bfloat(double value) {
    return pst__double_to_bfloat16(value);
}
inline float root(float square) {
    return __builtin_sqrtf(square);
}
inline float quotient(float dividend, float divisor) {
    return dividend / divisor;
}
inline float __uint_as_float(unsigned bits) {
    return pst__float_of(bits);
}
inline unsigned __float_as_uint(float value) {
    return pst__bits_of(value);
}

} // namespace

#include "sched/cuda/arguments.h"
#include "sched/cuda/kernels.cu"

#include "sched/cuda/adamw.cu"

namespace {

struct kernel {
    const char *name;
    void (*run)(const void *arguments);
};

const kernel kernels[] = {
    {"pst_cast_scale_copy",
     [](const void *table) { cast_scale_copy(*(const pst_cuda_cast *)table); }},
    {"pst_cast_scale_copy_many",
     [](const void *table) { cast_scale_copy(*(const pst_cuda_cast_many *)table); }},
    {"pst_sum", [](const void *arguments) { pst_sum(*(const pst_cuda_sum *)arguments); }},
    {"pst_sum_passing",
     [](const void *arguments) { pst_sum_passing(*(const pst_cuda_sum *)arguments); }},
    {"pst_maximum", [](const void *arguments) { pst_maximum(*(const pst_cuda_sum *)arguments); }},
    {"pst_adamw_prepare",
     [](const void *given) { pst_adamw_prepare(*(const pst_cuda_adamw_steps *)given); }},
    {"pst_adamw", [](const void *table) { pst_adamw(*(const pst_cuda_adamw *)table); }},
    {"pst_adamw_many",
     [](const void *table) { pst_adamw_many(*(const pst_cuda_adamw_many *)table); }},
    {"pst_adamw_sums",
     [](const void *table) { pst_adamw_sums(*(const pst_cuda_adamw_sums *)table); }},
    {"pst_copy_rows",
     [](const void *arguments) { pst_copy_rows(*(const pst_cuda_rows *)arguments); }},
    {"pst_fill", [](const void *arguments) { pst_fill(*(const pst_cuda_fill *)arguments); }},
};

const kernel *find(const char *name) {
    for (const kernel &each : kernels)
        if (strcmp(each.name, name) == 0) return &each;
    return nullptr;
}

} // namespace

int emulate_has(const char *name) {
    return find(name) != nullptr;
}

int emulate(const char *name, unsigned blocks, unsigned threads, const void *arguments) {
    const kernel *kernel = find(name);
    if (kernel == nullptr) return -1;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kernel->run(arguments);
    return 0;
}
