/* A graph program in a run, as its parts see it. */
#ifndef PST_TESTS_SIM_PROGRAM_H
#define PST_TESTS_SIM_PROGRAM_H

#include "plan.h"

#include <pthread.h>

#define PROGRAM_HELPERS 3u

typedef struct program program;

/* Several threads in one launch of the program, each with its own share of the gates. */
typedef struct helper {
    program *program;
    uint64_t random;
    uint32_t number;
    pthread_t thread;
} helper;

struct program {
    uint64_t random;
    plan plan;
    pst_runtime *runtime;
    pst_graph *graph;
    pst_launch launch;
    uint32_t launch_index;
    uint32_t helpers;
    uint64_t watchdog_ns;
    int loops;      /* the first thread waits as a foreign loop does */
    int descriptor; /* of pst_fd, if it loops */
    helper threads[PROGRAM_HELPERS];
};

/* Ends the run unless `status` is one that the call may return in this kind of program. */
void program_must(program *self, pst_status status, const char *call);

/* ---- helpers ---------------------------------------------------------------------------- */

void helpers_begin(program *self);
void helpers_end(program *self);
/* Opens the gates that are this thread's: 0 is the first thread's number. */
void helpers_open_share(program *self, uint32_t number);
/* Cancels or poisons, if the program is of that kind. */
void helpers_stop(program *self);

/* ---- the foreign loop ------------------------------------------------------------------- */

/* Waits, by pst_fd and pst_timeout, until all callbacks have come. */
void loop_run(program *self);

#endif
