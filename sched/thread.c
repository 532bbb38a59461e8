#include "sched/thread.h"

#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};

int pst__thread_start(pthread_t *thread, void *(*run)(void *argument), void *argument) {
    sigset_t others, before;
    (void)sigfillset(&others);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        (void)sigdelset(&others, faults[i]);
    (void)pthread_sigmask(SIG_SETMASK, &others, &before);
    const int error = pthread_create(thread, NULL, run, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* ---- parking -------------------------------------------------------------------------- */

static int monotonic(const struct ck_ec_ops *ops, struct timespec *out) {
    (void)ops;
    return clock_gettime(CLOCK_MONOTONIC, out);
}

/* FUTEX_WAIT_BITSET, because it takes an absolute time. */
static void futex_wait(const struct ck_ec_wait_state *state, const uint32_t *address,
                       uint32_t expected, const struct timespec *deadline) {
    (void)state;
    (void)syscall(SYS_futex, address, FUTEX_WAIT_BITSET_PRIVATE, expected, deadline, NULL,
                  FUTEX_BITSET_MATCH_ANY);
}

static void futex_wake(const struct ck_ec_ops *ops, const uint32_t *address) {
    (void)ops;
    (void)syscall(SYS_futex, address, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

const struct ck_ec_ops pst__park_ops = {
    .gettime = monotonic, .wait32 = futex_wait, .wake32 = futex_wake};

/* ck_ec would sleep for 2 ms first and for eight times longer after each wake-up without a reason,
 * beyond the deadline: one sleep to the deadline is what we want. */
static int sleep_to_deadline(const struct ck_ec_wait_state *state, struct timespec *until) {
    *until = *(const struct timespec *)state->data;
    return 0;
}

void pst__park_wait(pst__park *park, uint32_t seen, uint64_t timeout_ns) {
    static const struct ck_ec_mode mode = {&pst__park_ops, false};
    if (timeout_ns == PST__FOREVER) {
        (void)ck_ec32_wait(&park->count, &mode, seen, NULL);
        return;
    }
    const struct timespec timeout = {(time_t)(timeout_ns / 1000000000u),
                                     (long)(timeout_ns % 1000000000u)};
    struct timespec deadline;
    if (ck_ec_deadline(&deadline, &mode, &timeout) == 0)
        (void)ck_ec32_wait_pred(&park->count, &mode, seen, sleep_to_deadline, &deadline, &deadline);
}
