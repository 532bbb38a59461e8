/* The library's own threads: they take no signals, those are for the program that we are in. */
#ifndef PST_SCHED_THREAD_H
#define PST_SCHED_THREAD_H

#include <pthread.h>

/* 0, or an errno value. */
int pst__thread_start(pthread_t *thread, void *(*run)(void *argument), void *argument);

#endif
