/* Where a thread sleeps until somebody has something for it: an event count (ck_ec, 32 bits,
 * several wakers) on a futex. The sleeper takes the count, looks for work once more, and sleeps
 * only if the count is still the same; wakers publish their work and then raise the count. Both
 * sides change the same word by read-modify-write, so neither needs a fence of its own. */
#ifndef PST_SCHED_PARK_H
#define PST_SCHED_PARK_H

#include <ck_ec.h>
#include <stdint.h>

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

#endif
