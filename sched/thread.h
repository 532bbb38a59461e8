/* The library's own threads: how they start, and where and how long they sleep. */
#ifndef PST_SCHED_THREAD_H
#define PST_SCHED_THREAD_H

#include <ck_ec.h>
#include <pthread.h>
#include <stdint.h>

/* Starts a thread that takes no signals: those are for the program that we are in. What a fault of
 * its own raises it takes, or the program's handler, which may say where that was, would not run.
 * 0, or an errno value. */
int pst__thread_start(pthread_t *thread, void *(*run)(void *argument), void *argument);

/* ---- parking -------------------------------------------------------------------------- */

/* Where a thread sleeps until somebody has something for it: an event count (ck_ec, 32 bits,
 * several wakers) on a futex. The sleeper takes the count, looks for work once more, and sleeps
 * only if the count is still the same; wakers publish their work and then raise the count. Both
 * sides change the same word by read-modify-write, so neither needs a fence of its own. */
typedef struct pst__park {
    struct ck_ec32 count;
} pst__park;

#define PST__FOREVER UINT64_MAX

extern const struct ck_ec_ops pst__park_ops;

static inline uint32_t pst__park_count(const pst__park *park) {
    return ck_ec32_value(&park->count);
}

/* Sleeps until the count differs from `seen` or `timeout_ns` have passed. */
void pst__park_wait(pst__park *park, uint32_t seen, uint64_t timeout_ns);

/* Any thread; a system call only when somebody sleeps. */
static inline void pst__park_wake(pst__park *park) {
    static const struct ck_ec_mode mode = {&pst__park_ops, false};
    (void)ck_ec32_add(&park->count, &mode, 1);
}

/* ---- polling -------------------------------------------------------------------------- */

/* How long a thread sleeps before it asks again about something launched that only the outside can
 * end: training needs the cores more than we do. pst_lane_wake ends such a sleep at once. */
#define PST__POLL_FIRST_NS 50000u
#define PST__POLL_LONG_NS  1000000u
#define PST__POLL_LAST_NS  20000000u

/* The sleep after one of `ns` that found nothing: doubled at first; from 1 ms on it grows with the
 * time that has passed and stays a 64th of it, which is the most that an end is noticed too late
 * by. */
static inline uint64_t pst__poll_longer(uint64_t ns) {
    const uint64_t longer = ns + (ns < PST__POLL_LONG_NS ? ns : ns / 64);
    return longer < PST__POLL_LAST_NS ? longer : PST__POLL_LAST_NS;
}

#endif
