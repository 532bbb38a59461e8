/* Seeded random numbers for tests. The seed is printed, and PST_SEED in the environment replays it.
 */
#ifndef PST_TESTS_MEM_RANDOM_H
#define PST_TESTS_MEM_RANDOM_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct random_source {
    uint64_t state;
} random_source;

static inline random_source random_open(const char *test) {
    const char *given = getenv("PST_SEED");
    uint64_t seed = given != NULL ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    printf("%s: PST_SEED=%llu\n", test, (unsigned long long)seed);
    return (random_source){seed};
}

/* splitmix64 */
static inline uint64_t random_next(random_source *source) {
    uint64_t z = source->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0 <= result < bound */
static inline size_t random_below(random_source *source, size_t bound) {
    return (size_t)(random_next(source) % bound);
}

#endif
