/* The threads of a simulated run: coroutines on one real thread, under a virtual clock. At every
 * point (an atomic operation of the library, a lock, a sleep) a seeded choice says who goes on. The
 * same seed and body give the same run, step by step. */
#ifndef PST_TESTS_SIM_THREADS_H
#define PST_TESTS_SIM_THREADS_H

#include <stdint.h>

#define SIM_FOREVER UINT64_MAX

typedef struct sim_report {
    int failed;
    char text[2048];    /* why */
    uint64_t points;    /* how many choices there were */
    uint64_t clock;     /* virtual nanoseconds that passed */
    uint64_t signature; /* of all choices: equal for equal runs */
} sim_report;

/* Runs `body` as the first thread until all threads have ended, or until sim_fail. */
void sim_run(uint64_t seed, void (*body)(void *argument), void *argument, sim_report *report);

/* Ends the run as a failure; the first text counts. Does not return within a run. */
_Noreturn void sim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- within a run ----------------------------------------------------------------------- */

int sim_is_running(void);
uint64_t sim_clock(void);
/* A place where another thread may go on. */
void sim_point(void);
/* The thread sleeps until it is woken with this address or the clock has come there. 1: woken. */
int sim_block(const void *address, uint64_t until);
/* Wakes all threads that sleep at this address. */
void sim_wake(const void *address);
/* Lets any other thread that can go on do so. */
void sim_yield(void);
/* A number below `bound` of the schedule's own stream. */
uint32_t sim_choose(uint32_t bound);

/* 0, or -1 when there is no room for another thread. */
int sim_thread_create(unsigned long *id, void *(*body)(void *), void *argument);
void sim_thread_join(unsigned long id);
/* The running thread's id; that of one that was joined is given out again. */
unsigned long sim_thread_id(void);
int sim_thread_has_ended(unsigned long id);
/* The thread's own value of a key below SIM_KEYS. */
#define SIM_KEYS 64
void **sim_thread_value(unsigned key);

/* ---- delayed stores --------------------------------------------------------------------- */

/* An atomic store that is not sequentially consistent becomes visible to other threads some points
 * later, in the order of the thread's stores, as C11 and x86 allow: a store-load fence that is
 * missing is found. */
void sim_store(volatile void *address, unsigned bytes, uint64_t value);
/* 1 when the thread has a store to exactly this place that is not visible yet. */
int sim_own_store(const volatile void *address, unsigned bytes, uint64_t *value);
/* All of the thread's stores become visible. */
void sim_flush(void);
/* The same if one of them touches this place. */
void sim_flush_at(const volatile void *address, unsigned long bytes);
extern unsigned sim_delayed; /* how many stores of the running thread are not visible yet */

#endif
