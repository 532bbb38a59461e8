/* Runs a small program of threads in every order of its atomic operations, within bounds. */
#ifndef PST_TESTS_MODEL_EXPLORER_H
#define PST_TESTS_MODEL_EXPLORER_H

#include "atomics.h"

#include <penstock/runtime.h>

#define MODEL_PROGRAM_THREADS 4
#define MODEL_UNBOUNDED       255u

/* Bugs beneath the code: each breaks what one structure relies on. */
typedef enum model_plant {
    MODEL_NO_PLANT = 0,
    MODEL_SPLIT_MODIFY,   /* adding and subtracting are a load and a store */
    MODEL_SPLIT_EXCHANGE, /* so is an exchange */
    MODEL_SPLIT_CAS,      /* and a compare-and-swap */
    MODEL_NO_FENCE,       /* fences order nothing */
    MODEL_LATE_COUNT,     /* a sleeper takes the event count after its last look for work */
} model_plant;

typedef struct model_program {
    void (*setup)(void); /* alone, before the threads */
    void (*threads[MODEL_PROGRAM_THREADS])(void);
    void (*finish)(void); /* alone with the workers, when all threads have ended and all sleep */
    unsigned preemptions; /* bounds; see README.md */
    unsigned delays;
} model_program;

typedef struct model_outcome {
    unsigned long runs;
    unsigned steps;     /* of the longest run */
    const char *failed; /* what went wrong in the last run; NULL: nothing in all of them */
    char schedule[512]; /* of that run: thread:steps, thread:steps, ... */
} model_outcome;

/* Explores until something fails or all has been tried. */
model_outcome model_explore(const model_program *program, model_plant plant);

/* ---- for the programs ------------------------------------------------------------------- */

/* Ends the run as failed unless `holds`. */
void model_check(int holds, const char *what);
/* A point at which another thread may go on. */
void model_point(void);
/* Metadata memory of this run: counted, and overwritten when it is freed. */
pst_allocator model_allocator(void);

/* ---- for the shims ---------------------------------------------------------------------- */

int model_is_planted(model_plant plant);
/* Sleeps until model_wake(word), unless the word is not `expected`. */
void model_sleep(const uint32_t *word, uint32_t expected);
void model_wake(const uint32_t *word);

#endif
