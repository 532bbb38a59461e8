/* How many threads a process has. */
#ifndef PENSTOCK_TESTS_THREADS_H
#define PENSTOCK_TESTS_THREADS_H

#include "cmocka_all.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* The kernel lists a thread for a moment after it was joined, and calls it one that is exiting. */
static inline int is_running_thread(const char *id) {
    char path[64];
    char line[512];
    unsigned flags = 0;
    (void)snprintf(path, sizeof path, "/proc/self/task/%.20s/stat", id);
    FILE *file = fopen(path, "r");
    if (file == NULL) return 0;
    const size_t length = fread(line, 1, sizeof line - 1, file);
    (void)fclose(file);
    line[length] = '\0';
    const char *const after_name = strrchr(line, ')');
    if (after_name == NULL) return 0; /* it went while it was read */
    assert_int_equal(sscanf(after_name, ") %*c %*d %*d %*d %*d %*d %u", &flags), 1);
    const unsigned is_exiting = 4; /* PF_EXITING of linux/sched.h */
    return (flags & is_exiting) == 0;
}

static inline int count_threads(void) {
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (const struct dirent *entry; (entry = readdir(tasks)) != NULL;)
        count += entry->d_name[0] != '.' && is_running_thread(entry->d_name);
    (void)closedir(tasks);
    return count;
}

static inline void *end_at_once(void *argument) {
    return argument;
}

/* A sanitizer adds a thread of its own when the first one starts. */
static inline void start_first_thread(void) {
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, end_at_once, NULL), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
}

#endif
