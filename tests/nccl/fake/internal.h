/* What the stand-in's files share. One lock guards everything; it may be taken under the fake
 * driver's lock (an operation of a stream), never the other way round. */
#ifndef PST_TESTS_NCCL_FAKE_INTERNAL_H
#define PST_TESTS_NCCL_FAKE_INTERNAL_H

#include "fake_nccl.h"

#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FAKE_RANKS 8
#define FAKE_CALLS 512 /* in a group, at most */

typedef enum fake_kind {
    FAKE_ALL_GATHER = 0,
    FAKE_ALL_REDUCE,
    FAKE_BROADCAST,
    FAKE_SEND,
    FAKE_RECEIVE
} fake_kind;

typedef struct fake_call {
    fake_kind kind;
    const char *source;
    char *destination;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t reduce;
    int peer; /* or root; -1 */
} fake_call;

/* One group of one rank, from ncclGroupEnd on. */
typedef struct fake_group {
    ncclComm_t comm;
    cudaStream_t stream;
    int is_captured;
    uint32_t number; /* while it runs: from 1, by communicator; 0 */
    size_t count;
    fake_call calls[FAKE_CALLS];
} fake_group;

typedef struct fake_world {
    unsigned id;
    int size, joined;
    ncclComm_t ranks[FAKE_RANKS];
    uint32_t moved; /* groups whose data are where they belong */
    struct fake_world *next;
} fake_world;

struct ncclComm {
    fake_world *world;
    int rank, hangs, aborted;
    uint32_t arrived; /* how many groups have begun to run */
    fake_group *running;
    size_t unfinished, captured; /* groups: in streams, in graphs that are not destroyed */
};

/* ---- fake_nccl.c ----------------------------------------------------------------------------- */

/* Begins an entry point: counts it and takes the lock, unless it answers a fault. */
ncclResult_t fake_nccl_enter(const char *name);
void fake_nccl_leave(void);
void fake_nccl_lock(void);

#define ENTER(name)                                                                                \
    do {                                                                                           \
        const ncclResult_t fault_ = fake_nccl_enter(#name);                                        \
        if (fault_ != ncclSuccess) return fault_;                                                  \
    } while (0)

static inline ncclResult_t fake_nccl_end(ncclResult_t result) {
    fake_nccl_leave();
    return result;
}

/* Under the lock: what a call answers that may go on in the background. */
ncclResult_t fake_nccl_answer(ncclComm_t comm, const char *name);
void fake_nccl_note(int rank, const char *text);

static inline void *fake_nccl_zeroed(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (memory == NULL) abort();
    return memory;
}

/* ---- move.c ---------------------------------------------------------------------------------- */

/* Under the lock: does what the ranks' groups say, each at its rank; 0 if they do not match. */
int fake_nccl_move(fake_group *const *groups, int size);
/* Under the lock: what a kernel leaves that was aborted. */
void fake_nccl_spoil(const fake_group *group);

#endif
