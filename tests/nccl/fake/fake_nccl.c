/* Calls, faults, communicators. */
#include "internal.h"

#include <fake_driver.h>
#include <stdio.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct counter {
    const char *name; /* literals */
    size_t count;
} counter;

static counter counters[64];
static char trails[FAKE_RANKS][4096];
static struct {
    const char *name;
    size_t left;
    ncclResult_t result;
} fault;
static ncclResult_t broken;
static size_t live;
static const char *hanging;
static unsigned ids;
static fake_world *worlds;

/* ---- entering -------------------------------------------------------------------------------- */

static void count(const char *name) {
    counter *at = counters;
    while (at->name != NULL && strcmp(at->name, name) != 0)
        at++;
    at->name = name;
    at->count++;
}

ncclResult_t fake_nccl_enter(const char *name) {
    (void)pthread_mutex_lock(&lock);
    count(name);
    if (fault.name == NULL || strcmp(fault.name, name) != 0 || --fault.left > 0) return ncclSuccess;
    fault.name = NULL;
    ncclResult_t result = fault.result;
    (void)pthread_mutex_unlock(&lock);
    return result;
}

void fake_nccl_leave(void) {
    (void)pthread_mutex_unlock(&lock);
}

void fake_nccl_lock(void) {
    (void)pthread_mutex_lock(&lock);
}

/* Long enough for others to get the lock. */
static void pause_unlocked(void) {
    fake_nccl_leave();
    (void)nanosleep(&(struct timespec){0, 100000}, NULL);
    fake_nccl_lock();
}

ncclResult_t fake_nccl_answer(ncclComm_t comm, const char *name) {
    if (hanging != NULL && strcmp(hanging, name) == 0) comm->hangs = 1;
    while (comm->hangs && !comm->aborted) /* what blocks ends by an abort */
        pause_unlocked();
    return comm->aborted ? ncclInternalError : ncclSuccess;
}

void fake_nccl_note(int rank, const char *text) {
    size_t used = strlen(trails[rank]);
    (void)snprintf(trails[rank] + used, sizeof trails[rank] - used, "%s", text);
}

/* ---- communicators --------------------------------------------------------------------------- */

ncclResult_t ncclGetVersion(int *version) {
    ENTER(ncclGetVersion);
    *version = NCCL_VERSION_CODE;
    return fake_nccl_end(ncclSuccess);
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",       "unhandled cuda error", "system error",
                                        "internal error", "invalid argument",     "invalid usage",
                                        "remote error",   "in progress"};
    return (unsigned)result < ncclNumResults ? texts[result] : "unknown result";
}

const char *ncclGetLastError(ncclComm_t comm) {
    (void)comm;
    return "told by the stand-in";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    ENTER(ncclGetUniqueId);
    memset(id, 0, sizeof *id);
    unsigned fresh = ++ids;
    memcpy(id->internal, &fresh, sizeof fresh);
    return fake_nccl_end(ncclSuccess);
}

static fake_world *world_of(const ncclUniqueId *id, int size) {
    unsigned number;
    memcpy(&number, id->internal, sizeof number);
    fake_world *world = worlds;
    while (world != NULL && world->id != number)
        world = world->next;
    if (world != NULL) return world;
    world = fake_nccl_zeroed(sizeof *world);
    world->id = number;
    world->size = size;
    world->next = worlds;
    worlds = world;
    return world;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    ENTER(ncclCommInitRankConfig);
    if (!config->blocking) return fake_nccl_end(ncclInvalidArgument); /* not stood in for */
    ncclComm_t fresh = fake_nccl_zeroed(sizeof *fresh);
    fresh->world = world_of(&id, size);
    fresh->rank = rank;
    fresh->world->ranks[rank] = fresh;
    fresh->world->joined++;
    live++;
    /* Others may look at it while this blocks. */
    __atomic_store_n(comm, fresh, __ATOMIC_RELEASE);
    ncclResult_t result = fake_nccl_answer(fresh, "ncclCommInitRankConfig");
    while (fresh->world->joined < size && !fresh->aborted)
        pause_unlocked();
    return fake_nccl_end(fresh->aborted ? ncclInternalError : result);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
    ENTER(ncclCommGetAsyncError);
    *result = broken;
    (void)comm;
    return fake_nccl_end(ncclSuccess);
}

static void wait_for_graphs(ncclComm_t comm) {
    while (comm->captured > 0)
        pause_unlocked();
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ENTER(ncclCommFinalize);
    const ncclResult_t result = fake_nccl_answer(comm, "ncclCommFinalize");
    if (result == ncclSuccess) wait_for_graphs(comm);
    return fake_nccl_end(result);
}

/* As NCCL does: raises the flag by which kernels end, waits until they have, and then until no
 * graph has any that could be launched. The structure stays: it is small. */
static ncclResult_t end(ncclComm_t comm) {
    if (comm->aborted) return fake_nccl_end(ncclInvalidArgument);
    comm->aborted = 1;
    while (comm->unfinished > 0 || comm->running != NULL) {
        fake_nccl_leave();
        fake_cuda_poll();
        fake_nccl_lock();
        pause_unlocked();
    }
    wait_for_graphs(comm);
    live--;
    return fake_nccl_end(ncclSuccess);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    ENTER(ncclCommDestroy);
    return end(comm);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    ENTER(ncclCommAbort);
    return end(comm);
}

/* ---- the tests' side ------------------------------------------------------------------------- */

void fake_nccl_forget(void) {
    fake_nccl_lock();
    memset(counters, 0, sizeof counters);
    memset(trails, 0, sizeof trails);
    fake_nccl_leave();
}

void fake_nccl_reset(void) {
    fake_nccl_forget();
    fake_nccl_lock();
    fault.name = NULL;
    broken = ncclSuccess;
    hanging = NULL;
    fake_nccl_leave();
}

size_t fake_nccl_calls(const char *name) {
    size_t found = 0;
    fake_nccl_lock();
    for (const counter *at = counters; at->name != NULL; at++)
        if (strcmp(at->name, name) == 0) found = at->count;
    fake_nccl_leave();
    return found;
}

const char *fake_nccl_trail(int rank) {
    static char copy[sizeof trails[0]];
    fake_nccl_lock();
    memcpy(copy, trails[rank], sizeof copy);
    trails[rank][0] = '\0';
    fake_nccl_leave();
    return copy;
}

size_t fake_nccl_live(void) {
    fake_nccl_lock();
    size_t copy = live;
    fake_nccl_leave();
    return copy;
}

void fake_nccl_end_all(void) {
    for (fake_world *world = worlds; world != NULL; world = world->next)
        for (int rank = 0; rank < world->size; rank++)
            if (world->ranks[rank] != NULL) (void)ncclCommAbort(world->ranks[rank]);
}

void fake_nccl_fail(const char *name, size_t nth, ncclResult_t result) {
    fake_nccl_lock();
    fault.name = name;
    fault.left = nth;
    fault.result = result;
    fake_nccl_leave();
}

void fake_nccl_break(ncclResult_t result) {
    fake_nccl_lock();
    broken = result;
    fake_nccl_leave();
}

void fake_nccl_hang(const char *name) {
    fake_nccl_lock();
    hanging = name;
    fake_nccl_leave();
}
