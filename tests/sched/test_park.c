/* What a thread that parks asks of the kernel: the linker leads its system call here. */
#include "sched/thread.h"
#include "tests/cmocka_all.h"

#include <errno.h>
#include <time.h>

#define TIMEOUT_NS 50000u
#define SPURIOUS   3

static struct { int sleeps, too_long, without_end; } asked;

static uint64_t nanoseconds(const struct timespec *time) {
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

/* Wakes up at once and for no reason a few times, and is punctual then. */
long __wrap_syscall(long number, const void *address, int operation, uint32_t value,
                    const struct timespec *until);
long __wrap_syscall(long number, const void *address, int operation, uint32_t value,
                    const struct timespec *until) {
    struct timespec now;
    (void)number, (void)address, (void)operation, (void)value;
    asked.sleeps++;
    if (until == NULL) {
        asked.without_end = 1;
        errno = EAGAIN;
        return -1;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    /* The end was asked for before now. */
    asked.too_long |= nanoseconds(until) > nanoseconds(&now) + TIMEOUT_NS;
    if (asked.sleeps > SPURIOUS) (void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, until, NULL);
    errno = asked.sleeps > SPURIOUS ? ETIMEDOUT : EINTR;
    return -1;
}

static void a_sleep_with_an_end_asks_for_that_end(void **state) {
    pst__park park;
    (void)state;
    asked = (__typeof__(asked)){0};
    ck_ec_init(&park.count, 0);
    /* A thread that was off its core until the end of its wait asks for no sleep. */
    for (int tries = 0; asked.sleeps == 0 && tries < 1000; tries++)
        pst__park_wait(&park, pst__park_count(&park), TIMEOUT_NS);
    assert_true(asked.sleeps > 0);
    assert_false(asked.without_end);
    assert_false(asked.too_long);
}

static void a_count_that_has_changed_needs_no_sleep(void **state) {
    pst__park park;
    (void)state;
    asked = (__typeof__(asked)){0};
    ck_ec_init(&park.count, 0);
    const uint32_t seen = pst__park_count(&park);
    pst__park_wake(&park);
    pst__park_wait(&park, seen, TIMEOUT_NS);
    pst__park_wait(&park, seen, PST__FOREVER);
    assert_int_equal(asked.sleeps, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sleep_with_an_end_asks_for_that_end),
        cmocka_unit_test(a_count_that_has_changed_needs_no_sleep),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
