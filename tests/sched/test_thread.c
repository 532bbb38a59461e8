/* The library's threads leave the program's signals alone, and have its handlers of faults. */
#include "sched/thread.h"
#include "tests/cmocka_all.h"

#include <signal.h>

static void *read_mask(void *mask) {
    (void)pthread_sigmask(SIG_SETMASK, NULL, mask);
    return NULL;
}

static void threads_take_faults_alone(void **state) {
    (void)state;
    static const int theirs[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM};
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    sigset_t mask, before, behind;
    pthread_t thread;
    (void)read_mask(&before);
    assert_int_equal(pst__thread_start(&thread, read_mask, &mask), 0);
    (void)pthread_join(thread, NULL);
    (void)read_mask(&behind);
    for (size_t i = 0; i < sizeof theirs / sizeof *theirs; i++)
        assert_true(sigismember(&mask, theirs[i]));
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        assert_false(sigismember(&mask, own[i]));
    for (int number = 1; number < SIGRTMIN; number++) /* of who starts one */
        assert_int_equal(sigismember(&before, number), sigismember(&behind, number));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_take_faults_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
