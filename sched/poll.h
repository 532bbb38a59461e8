/* How long a thread sleeps before it asks again about something launched that only the outside can
 * end: training needs the cores more than we do. pst_lane_wake ends such a sleep at once. */
#ifndef PST_SCHED_POLL_H
#define PST_SCHED_POLL_H

#include <stdint.h>

#define PST__POLL_FIRST_NS 50000u
#define PST__POLL_LONG_NS  1000000u
#define PST__POLL_LAST_NS  20000000u

/* The sleep after one of `ns` in vain: doubled at first; from 1 ms on it grows with the time that
 * has passed and stays a 64th of it, which is the most that an end is noticed too late by. */
static inline uint64_t pst__poll_longer(uint64_t ns) {
    const uint64_t longer = ns + (ns < PST__POLL_LONG_NS ? ns : ns / 64);
    return longer < PST__POLL_LAST_NS ? longer : PST__POLL_LAST_NS;
}

#endif
