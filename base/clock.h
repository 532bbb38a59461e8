/* Nanoseconds of CLOCK_MONOTONIC (durations, traces) and CLOCK_REALTIME (a trace's base). */
#ifndef PST_BASE_CLOCK_H
#define PST_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t pst__clock_read(clockid_t clock) {
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t pst__now(void) {
    return pst__clock_read(CLOCK_MONOTONIC);
}

#endif
