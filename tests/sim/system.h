/* The operating system as the library sees it in a run. */
#ifndef PST_TESTS_SIM_SYSTEM_H
#define PST_TESTS_SIM_SYSTEM_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* Once in `spurious` times a futex wait returns for no reason (0: never), and the `refused`-th
 * thread cannot be created (0: all can). */
void system_begin(uint32_t spurious, uint32_t refused);

int __real_clock_gettime(clockid_t clock, struct timespec *now);
int __real_nanosleep(const struct timespec *length, struct timespec *left);

long __wrap_syscall(long number, const void *address, int operation, uint32_t value,
                    const struct timespec *until);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_nanosleep(const struct timespec *length, struct timespec *left);
int __wrap_sched_yield(void);
int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*body)(void *),
                          void *argument);
int __wrap_pthread_join(pthread_t id, void **result);
int __wrap_pthread_sigmask(int how, const void *set, void *before);
int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex);
int __wrap_pthread_key_create(pthread_key_t *key, void (*destructor)(void *));
int __wrap_pthread_key_delete(pthread_key_t key);
void *__wrap_pthread_getspecific(pthread_key_t key);
int __wrap_pthread_setspecific(pthread_key_t key, const void *value);

#endif
