/* The operating system as the library sees it in a run: the linker leads these calls here
 * (--wrap), and outside of a run on to the real ones. */
#include "system.h"

#include "threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EVENT_DESCRIPTOR (1 << 20) /* no real one's number */

static uint32_t spurious_once_in, refuse_thread;
static unsigned keys;
static struct {
    int is_open;
    uint64_t count, pokes;
} event;

void system_begin(uint32_t spurious, uint32_t refused_thread) {
    spurious_once_in = spurious;
    refuse_thread = refused_thread;
    keys = 0;
    memset(&event, 0, sizeof event);
}

static uint64_t nanoseconds(const struct timespec *time) {
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

/* ---- futexes, clocks, sleeps ------------------------------------------------------------ */

static long futex_wait(const uint32_t *address, uint32_t expected, const struct timespec *until) {
    if (*(const volatile uint32_t *)address != expected) {
        errno = EAGAIN;
        return -1;
    }
    if (spurious_once_in != 0 && sim_choose(spurious_once_in) == 0) {
        errno = EINTR;
        return -1;
    }
    if (sim_block(address, until == NULL ? SIM_FOREVER : nanoseconds(until))) return 0;
    errno = ETIMEDOUT;
    return -1;
}

long __wrap_syscall(long number, const void *address, int operation, uint32_t value,
                    const struct timespec *until) {
    if (number != SYS_futex || !sim_is_running()) sim_fail("a system call that is not simulated");
    sim_flush();
    sim_point();
    if ((operation & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) return futex_wait(address, value, until);
    sim_wake(address);
    return 0;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now) {
    if (!sim_is_running()) return __real_clock_gettime(clock, now);
    sim_point();
    now->tv_sec = (time_t)(sim_clock() / 1000000000u);
    now->tv_nsec = (long)(sim_clock() % 1000000000u);
    return 0;
}

int __wrap_nanosleep(const struct timespec *length, struct timespec *left) {
    if (!sim_is_running()) return __real_nanosleep(length, left);
    (void)sim_block(NULL, sim_clock() + nanoseconds(length));
    return 0;
}

int __wrap_sched_yield(void) {
    if (sim_is_running()) sim_yield();
    return 0;
}

/* ---- an event descriptor ----------------------------------------------------------------- */

int __wrap_eventfd(unsigned count, int flags) {
    (void)flags;
    if (event.is_open) sim_fail("a second event descriptor in one run");
    event.is_open = 1;
    event.count = count;
    return EVENT_DESCRIPTOR;
}

ssize_t __wrap_write(int descriptor, const void *bytes, size_t size) {
    if (descriptor != EVENT_DESCRIPTOR) return __real_write(descriptor, bytes, size);
    sim_flush();
    sim_point();
    if (!event.is_open) sim_fail("a write to the event descriptor after it was closed");
    uint64_t added;
    memcpy(&added, bytes, sizeof added);
    event.count += added;
    sim_wake(&event);
    return (ssize_t)size;
}

ssize_t __wrap_read(int descriptor, void *bytes, size_t size) {
    if (descriptor != EVENT_DESCRIPTOR) return __real_read(descriptor, bytes, size);
    sim_flush();
    sim_point();
    if (event.count == 0) {
        errno = EAGAIN;
        return -1;
    }
    memcpy(bytes, &event.count, sizeof event.count);
    event.count = 0;
    return (ssize_t)size;
}

int __wrap_close(int descriptor) {
    if (descriptor != EVENT_DESCRIPTOR) return __real_close(descriptor);
    event.is_open = 0;
    return 0;
}

void system_poke(void) {
    event.pokes++;
    sim_wake(&event);
}

uint64_t system_pokes(void) {
    return event.pokes;
}

void system_poll(int64_t timeout_ns, uint64_t pokes) {
    sim_point();
    if (event.count != 0 || event.pokes != pokes || timeout_ns == 0) return;
    const uint64_t until = timeout_ns < 0 ? SIM_FOREVER : sim_clock() + (uint64_t)timeout_ns;
    (void)sim_block(&event, until);
}

/* ---- threads, mutexes, keys ------------------------------------------------------------- */

int __wrap_pthread_create(pthread_t *id, const pthread_attr_t *attributes, void *(*body)(void *),
                          void *argument) {
    (void)attributes;
    if (refuse_thread != 0 && --refuse_thread == 0) return EAGAIN;
    if (sim_thread_create(id, body, argument) != 0) return EAGAIN;
    sim_point();
    return 0;
}

int __wrap_pthread_join(pthread_t id, void **result) {
    (void)result;
    sim_thread_join(id);
    return 0;
}

pid_t __wrap_gettid(void) {
    return (pid_t)sim_thread_id();
}

int __wrap_tgkill(pid_t process, pid_t thread, int signal) {
    if (process != getpid() || signal != 0) sim_fail("a signal that is not simulated");
    sim_point();
    if (!sim_thread_has_ended((unsigned long)thread)) return 0;
    errno = ESRCH;
    return -1;
}

int __wrap_pthread_sigmask(int how, const void *set, void *before) {
    (void)how, (void)set, (void)before;
    return 0;
}

int __wrap_pthread_mutex_lock(pthread_mutex_t *mutex) {
    if (!sim_is_running()) return 0;
    sim_point();
    sim_flush();
    while (mutex->__data.__lock != 0)
        (void)sim_block(mutex, SIM_FOREVER);
    mutex->__data.__lock = 1;
    return 0;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *mutex) {
    if (!sim_is_running()) return 0;
    sim_flush();
    mutex->__data.__lock = 0;
    sim_wake(mutex);
    sim_point();
    return 0;
}

int __wrap_pthread_key_create(pthread_key_t *key, void (*destructor)(void *)) {
    if (destructor != NULL || keys == SIM_KEYS) return EAGAIN;
    *key = keys++;
    return 0;
}

int __wrap_pthread_key_delete(pthread_key_t key) {
    (void)key;
    return 0;
}

void *__wrap_pthread_getspecific(pthread_key_t key) {
    return *sim_thread_value(key);
}

int __wrap_pthread_setspecific(pthread_key_t key, const void *value) {
    *sim_thread_value(key) = (void *)(uintptr_t)value;
    return 0;
}
