/* The arithmetic of a step of AdamW, in the order of operations of torch's fused one on CPUs. This
 * text is compiled by the host's compiler and, put in front of the kernels, by NVRTC, which has no
 * headers. Without contraction both give the same bits. */
#ifndef PST_SCHED_DEVICE_ADAMW_H
#define PST_SCHED_DEVICE_ADAMW_H

#ifdef __CUDACC_RTC__
#define PST_ADAMW_FUNCTION  static __device__ __forceinline__
#define PST_ADAMW_FMA       __fmaf_rn
#define PST_ADAMW_ROOT      __fsqrt_rn
#define PST_ADAMW_WIDE_ROOT __dsqrt_rn
#define PST_ADAMW_BITS      __float_as_uint
#else
#include "sched/device/half.h"
/* Whatever is inlined into a function for a processor is compiled for that processor. */
#define PST_ADAMW_FUNCTION  static inline __attribute__((always_inline, unused))
#define PST_ADAMW_FMA       __builtin_fmaf
#define PST_ADAMW_ROOT      __builtin_sqrtf
#define PST_ADAMW_WIDE_ROOT __builtin_sqrt
#define PST_ADAMW_BITS      pst__bits_of
#endif

/* What all pieces of a step share; see pst_adamw_settings. */
typedef struct pst__adamw_settings {
    double lr, beta1, beta2, eps, weight_decay;
    const float *lr_at, *gradient_scale, *gradient_factor, *found_inf;
    unsigned long long seed;
    int maximize;
} pst__adamw_settings;

/* What an element needs of them; PST_ADAMW_COEFFICIENTS_BYTES in the device's memory. */
typedef struct pst__adamw_coefficients {
    float decay;      /* 1 - lr * weight_decay */
    float beta1_rest; /* 1 - beta1 */
    float beta2;      /* */
    float beta2_rest; /* 1 - beta2 */
    float step_size;  /* lr / (1 - beta1^step) */
    float root;       /* of 1 - beta2^step */
    float eps;        /* */
    float factor;     /* of gradients; negative where the loss is to grow */
    unsigned key;     /* of this step's random numbers */
    unsigned is_skipped;
    unsigned reserved[6];
} pst__adamw_coefficients;

/* ---- coefficients ----------------------------------------------------------------------- */

/* By squaring, so that it is the same everywhere. */
PST_ADAMW_FUNCTION double pst__adamw_power(double base, unsigned exponent) {
    double power = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1u) power *= base;
        base *= base;
    }
    return power;
}

PST_ADAMW_FUNCTION unsigned pst__adamw_mix(unsigned value) {
    value ^= value >> 16;
    value *= 0x7feb352du;
    value ^= value >> 15;
    value *= 0x846ca68bu;
    return value ^ value >> 16;
}

PST_ADAMW_FUNCTION unsigned pst__adamw_key(unsigned long long seed, unsigned step) {
    const unsigned low = pst__adamw_mix((unsigned)seed + 0x9e3779b9u);
    return pst__adamw_mix(pst__adamw_mix(low ^ (unsigned)(seed >> 32)) + step * 0x9e3779b9u);
}

PST_ADAMW_FUNCTION float pst__adamw_factor(const pst__adamw_settings *of) {
    double factor = of->maximize ? -1.0 : 1.0;
    if (of->gradient_scale) factor /= (double)*of->gradient_scale;
    if (of->gradient_factor) factor *= (double)*of->gradient_factor;
    return (float)factor;
}

/* Counts the step in *step, unless it is skipped. */
PST_ADAMW_FUNCTION void pst__adamw_prepare(const pst__adamw_settings *of, float *step,
                                           pst__adamw_coefficients *to) {
    const double lr = of->lr_at ? (double)*of->lr_at : of->lr;
    to->is_skipped = of->found_inf && *of->found_inf != 0.0f;
    if (!to->is_skipped) *step += 1.0f;
    const unsigned number = (unsigned)*step;
    to->decay = (float)(1.0 - lr * of->weight_decay);
    to->beta1_rest = (float)(1.0 - of->beta1);
    to->beta2 = (float)of->beta2;
    to->beta2_rest = (float)(1.0 - of->beta2);
    to->step_size = (float)(lr / (1.0 - pst__adamw_power(of->beta1, number)));
    to->root = (float)PST_ADAMW_WIDE_ROOT(1.0 - pst__adamw_power(of->beta2, number));
    to->eps = (float)of->eps;
    to->factor = pst__adamw_factor(of);
    to->key = pst__adamw_key(of->seed, number);
}

/* ---- an element ------------------------------------------------------------------------- */

typedef struct pst__adamw_element {
    float parameter, gradient, exp_avg, exp_avg_sq;
} pst__adamw_element;

/* As torch's lerp: from the nearer end. */
PST_ADAMW_FUNCTION float pst__adamw_blend(float from, float to, float weight) {
    const int is_near = weight < 0.5f;
    return PST_ADAMW_FMA(is_near ? weight : weight - 1.0f, to - from, is_near ? from : to);
}

PST_ADAMW_FUNCTION void pst__adamw_moments(const pst__adamw_coefficients *with,
                                           pst__adamw_element *of) {
    const float gradient = of->gradient * with->factor;
    of->exp_avg = pst__adamw_blend(of->exp_avg, gradient, with->beta1_rest);
    of->exp_avg_sq =
        PST_ADAMW_FMA(with->beta2_rest * gradient, gradient, of->exp_avg_sq * with->beta2);
}

/* `square` is exp_avg_sq, or the largest that it has been. */
PST_ADAMW_FUNCTION void pst__adamw_move(const pst__adamw_coefficients *with, float square,
                                        pst__adamw_element *of) {
    const float divisor = PST_ADAMW_ROOT(square) / with->root + with->eps;
    of->parameter = of->parameter * with->decay - with->step_size * of->exp_avg / divisor;
}

/* ---- stochastic rounding ---------------------------------------------------------------- */

/* 32 random bits for the element with this number: 16 for each moment. */
PST_ADAMW_FUNCTION unsigned pst__adamw_random(unsigned key, unsigned low, unsigned high) {
    return pst__adamw_mix(low ^ (key + high * 0x85ebca6bu));
}

/* To bfloat16: up as often as the rest is large. Infinity stays, as its rest is 0. */
PST_ADAMW_FUNCTION unsigned short pst__adamw_round(float value, unsigned random) {
    const unsigned bits = PST_ADAMW_BITS(value);
    const unsigned rounded = (bits + (random & 0xffffu)) >> 16;
    return (unsigned short)(value == value ? rounded : bits >> 16 | 0x40u);
}

#endif
