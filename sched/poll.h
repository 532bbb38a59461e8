/* How long a thread sleeps before it asks again about something launched that only the outside can
 * end: training needs the cores more than we do. pst_lane_wake ends such a sleep at once. */
#ifndef PST_SCHED_POLL_H
#define PST_SCHED_POLL_H

#include <stdint.h>

#define PST__POLL_FIRST_NS 50000u
#define PST__POLL_LAST_NS  1000000u

/* The sleep after one of `ns` in vain. */
static inline uint64_t pst__poll_longer(uint64_t ns) {
    return ns * 2 < PST__POLL_LAST_NS ? ns * 2 : PST__POLL_LAST_NS;
}

#endif
