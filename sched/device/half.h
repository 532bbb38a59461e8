/* Conversions of 16-bit floats by integer arithmetic, without branches that would keep a loop from
 * being vectorised. To 16 bits: round to nearest, ties to even; a NaN stays a NaN. */
#ifndef PST_SCHED_DEVICE_HALF_H
#define PST_SCHED_DEVICE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t pst__bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float pst__float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float pst__from_bfloat16(uint16_t half) {
    return pst__float_of((uint32_t)half << 16);
}

static inline uint16_t pst__to_bfloat16(float value) {
    const uint32_t bits = pst__bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const uint32_t quiet = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* Normal values move exponent and fraction into place; infinity and NaN keep the largest exponent;
 * subnormal ones are their fraction times 2^-24 (no arithmetic on float's own subnormals, for which
 * processors are slow). */
static inline float pst__from_float16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    const uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t exponent = half & 0x7c00u;
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude | 0x7f800000u;
    const uint32_t subnormal = pst__bits_of((float)(int)(half & 0x3ffu) * 0x1p-24f);
    const uint32_t finite = exponent == 0 ? subnormal : normal;
    return pst__float_of(sign | (exponent == 0x7c00u ? special : finite));
}

/* Three ranges: too large or NaN; normal, rounded by adding half of the last kept bit; subnormal,
 * rounded by the addition of 0.5, whose last fraction bit is worth 2^-24. */
static inline uint16_t pst__to_float16(float value) {
    const uint32_t bits = pst__bits_of(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = pst__bits_of(pst__float_of(magnitude) + 0.5f) - pst__bits_of(0.5f);
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    return (uint16_t)(sign | (magnitude >= 0x47800000u ? special : finite));
}

/* A double rounded to float so that a second rounding to fewer bits gives what one rounding would:
 * to odd, that is, an inexact result keeps its last bit set. */
static inline float pst__round_to_odd(double value) {
    const float nearest = (float)value;
    const uint32_t bits = pst__bits_of(nearest);
    const int exact = (double)nearest == value || nearest != nearest || (bits & 1u);
    /* An inexact even result lies next to the odd one on the side where the value is. */
    const int outwards = (value > (double)nearest) == (value > 0);
    const uint32_t odd = outwards ? bits + 1u : bits - 1u;
    return exact ? nearest : pst__float_of((bits & 0x7fffffffu) == 0 ? bits | 1u : odd);
}

static inline uint16_t pst__double_to_float16(double value) {
    return pst__to_float16(pst__round_to_odd(value));
}

static inline uint16_t pst__double_to_bfloat16(double value) {
    return pst__to_bfloat16(pst__round_to_odd(value));
}

#endif
