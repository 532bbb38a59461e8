/* The operating system as the library sees it in a run. */
#ifndef PST_TESTS_SIM_SYSTEM_H
#define PST_TESTS_SIM_SYSTEM_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

/* Once in `spurious` times a futex wait returns for no reason (0: never), and the `refused`-th
 * thread cannot be created (0: all can). */
void system_begin(uint32_t spurious, uint32_t refused);

/* What a foreign loop does: sleeps until the run's event descriptor is readable, somebody has poked
 * since there were `pokes`, or so many nanoseconds have passed (-1: for ever). */
void system_poll(int64_t timeout_ns, uint64_t pokes);
void system_poke(void);
uint64_t system_pokes(void);

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __real_nanosleep(const struct timespec *length, struct timespec *left);
ssize_t __real_write(int descriptor, const void *bytes, size_t size);
ssize_t __real_read(int descriptor, void *bytes, size_t size);
int __real_close(int descriptor);

long __wrap_syscall(long number, const void *address, int operation, uint32_t value,
                    const struct timespec *until);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_nanosleep(const struct timespec *length, struct timespec *left);
int __wrap_sched_yield(void);
int __wrap_eventfd(unsigned count, int flags);
ssize_t __wrap_write(int descriptor, const void *bytes, size_t size);
ssize_t __wrap_read(int descriptor, void *bytes, size_t size);
int __wrap_close(int descriptor);
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*body)(void *),
                          void *argument);
int __wrap_pthread_join(pthread_t id, void **result);
pid_t __wrap_gettid(void);
int __wrap_tgkill(pid_t process, pid_t thread, int signal);
int __wrap_pthread_sigmask(int how, const void *set, void *before);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __wrap_pthread_key_create(pthread_key_t *key, void (*destructor)(void *));
int __wrap_pthread_key_delete(pthread_key_t key);
void *__wrap_pthread_getspecific(pthread_key_t key);
int __wrap_pthread_setspecific(pthread_key_t key, const void *value);

#endif
