/* splitmix64: a stream of numbers from a seed. */
#ifndef PST_TESTS_SIM_RANDOM_H
#define PST_TESTS_SIM_RANDOM_H

#include <stdint.h>

static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0 <= result < bound */
static inline uint32_t random_below(uint64_t *state, uint32_t bound) {
    return (uint32_t)(((random_next(state) >> 32) * bound) >> 32);
}

/* 1 once in `n` times */
static inline int random_once_in(uint64_t *state, uint32_t n) {
    return random_below(state, n) == 0;
}

#endif
