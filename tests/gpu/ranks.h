/* Ranks for tests of communicators: processes (forked before anything of CUDA is called) or threads
 * of this one, with an exchange over shared memory that notices when a rank is gone. */
#ifndef PST_TESTS_GPU_RANKS_H
#define PST_TESTS_GPU_RANKS_H

#include <penstock/exchange.h>

#define RANKS_MOST 16
#define RANKS_TEXT 1024

typedef struct rank_context {
    int rank, size;
    pst_exchange exchange;
    void *argument; /* of ranks_run */
    char *failure;  /* RANKS_TEXT bytes; empty: none */
} rank_context;

typedef void (*rank_body)(rank_context *context);

typedef struct ranks_options {
    int count;
    int threads;      /* ranks are threads, not processes */
    double seconds;   /* after that all are killed; threads: the process ends */
    unsigned may_die; /* by bit: ranks that end themselves, which is no failure */
} ranks_options;

/* Runs `body` on each rank and returns how many have failed, printing each one's text. */
int ranks_run(const ranks_options *options, rank_body body, void *argument);

/* The first text counts. */
void rank_fail(rank_context *context, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Some of the ranks: `size` from `first` on, each `stride` behind the other; this one is among
 * them. Ranks are in one group of each stride. */
typedef struct rank_group {
    struct rank *rank;
    struct gate *gate;
    int first, stride, size;
} rank_group;

/* An exchange within a group, which lives as long. */
pst_exchange rank_group_exchange(rank_context *context, rank_group *group, int first, int stride,
                                 int size);

/* All ranks come, or it is a failure. */
void rank_meet(rank_context *context);

#define RANK_CHECK(context, condition, ...)                                                        \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            rank_fail((context), __FILE__, __LINE__, __VA_ARGS__);                                 \
            return;                                                                                \
        }                                                                                          \
    } while (0)

#endif
