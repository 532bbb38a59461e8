/* Seeded random numbers: the seed is printed, PST_SEED in the environment replays it. */
#ifndef PST_TESTS_RANDOM_H
#define PST_TESTS_RANDOM_H

#include "tests/sanitizer.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline uint64_t random_seed(const char *test) {
    const char *given = getenv("PST_SEED");
    const uint64_t seed = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    printf("%s: PST_SEED=%llu\n", test, (unsigned long long)seed);
    return seed;
}

/* How many of a test's seeds are run: under a sanitizer, where each takes several times as long,
 * the first fourth. */
static inline uint64_t seeds_of(uint64_t count) {
    return UNDER_SANITIZER ? (count + 3) / 4 : count;
}

/* How many programs a test draws, others in each run: one of a seed that is given. */
static inline int random_programs(int count) {
    return getenv("PST_SEED") != NULL ? 1 : (int)seeds_of((uint64_t)count);
}

/* splitmix64: a stream of numbers from a seed. */
static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline uint64_t mix(uint64_t value) {
    return random_next(&value);
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
