/* The parts of concurrencykit's event count that are no inline functions, and the library's sleep:
 * the same protocol on the same word, with the explorer in the kernel's place. */
#include "explorer.h"

#include "sched/thread.h"

#define FLAG (1u << 31)

/* Somebody sleeps, says the flag: whoever raises the count then takes it down and wakes all. */
int ck_ec32_wait_slow(struct ck_ec32 *count, const struct ck_ec_ops *ops, uint32_t old_value,
                      const struct timespec *deadline) {
    (void)ops;
    (void)deadline;
    for (;;) {
        uint32_t seen = (uint32_t)model_load(&count->counter, sizeof count->counter);
        if ((seen & ~FLAG) != old_value) return 0;
        if (!(seen & FLAG) &&
            !model_cas(&count->counter, &seen, sizeof count->counter, seen | FLAG))
            continue;
        model_sleep(&count->counter, old_value | FLAG);
    }
}

/* For sleeps with an end, of which there are none here. */
int ck_ec32_wait_pred_slow(struct ck_ec32 *count, const struct ck_ec_ops *ops, uint32_t old_value,
                           int (*pred)(const struct ck_ec_wait_state *state,
                                       struct timespec *deadline),
                           void *data, const struct timespec *deadline) {
    (void)pred;
    (void)data;
    return ck_ec32_wait_slow(count, ops, old_value, deadline);
}

void ck_ec32_wake(struct ck_ec32 *count, const struct ck_ec_ops *ops) {
    (void)ops;
    (void)model_modify(&count->counter, sizeof count->counter, MODEL_AND, (uint32_t)~FLAG);
    model_wake(&count->counter);
}

int ck_ec_deadline_impl(struct timespec *deadline, const struct ck_ec_ops *ops,
                        const struct timespec *timeout) {
    (void)ops;
    *deadline = *timeout;
    return 0;
}

void __real_pst__park_wait(pst__park *park, uint32_t seen, uint64_t timeout_ns);
void __wrap_pst__park_wait(pst__park *park, uint32_t seen, uint64_t timeout_ns);

/* Timeouts never come: what needs one to go on is found. */
void __wrap_pst__park_wait(pst__park *park, uint32_t seen, uint64_t timeout_ns) {
    (void)timeout_ns;
    if (model_is_planted(MODEL_LATE_COUNT)) seen = pst__park_count(park);
    __real_pst__park_wait(park, seen, PST__FOREVER);
}
