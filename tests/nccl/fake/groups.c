/* Calls that move data: collected to a group, and run when all ranks' streams have come to it. */
#include "internal.h"

#include "sched/cuda/driver.h"

#include <stdio.h>
#include <unistd.h>

static _Thread_local int depth;
static _Thread_local fake_group *open;
static size_t mismatches;

/* Of the fake driver, as its table has them. */
static PFN_cuLaunchHostFunc_v10000 launch_host;
static PFN_cuStreamWaitValue32_v11070 wait_value;
static PFN_cuMemHostRegister_v6050 register_host;
static PFN_cuMemHostUnregister_v4000 unregister_host;

CUresult CUDAAPI fake_driver_entry(const char *name, void **entry, int version,
                                   cuuint64_t flags) __asm__("cuGetProcAddress");

static void find(const char *name, int version, void *entry) {
    void *found = NULL;
    if (fake_driver_entry(name, &found, version, 0) != CUDA_SUCCESS) abort();
    memcpy(entry, &found, sizeof found);
}

static void find_all(void) {
    find("cuLaunchHostFunc", 10000, &launch_host);
    find("cuStreamWaitValue32", 11070, &wait_value);
    find("cuMemHostRegister", 6050, &register_host);
    find("cuMemHostUnregister", 4000, &unregister_host);
}

int fake_nccl_open_groups(void) {
    return depth;
}

size_t fake_nccl_mismatches(void) {
    fake_nccl_lock();
    size_t found = mismatches;
    fake_nccl_leave();
    return found;
}

/* ---- in stream order, under the driver's lock ------------------------------------------------ */

void fake_nccl_release(ncclComm_t comm) {
    if (comm->flag != NULL) __atomic_store_n(comm->flag, 0x7fffffffu, __ATOMIC_RELEASE);
}

/* The page itself stays: operations in streams may still look at it. */
void fake_nccl_unregister(ncclComm_t comm) {
    fake_nccl_lock();
    uint32_t *flag = comm->flag;
    fake_nccl_leave();
    if (flag != NULL && unregister_host(flag) != CUDA_SUCCESS) abort();
}

static fake_group *group_of(ncclComm_t comm, uint32_t number) {
    fake_group *group = comm->groups;
    while (group != NULL && group->number != number)
        group = group->next;
    return group;
}

static void forget(ncclComm_t comm, uint32_t number) {
    fake_group **link = &comm->groups;
    while (*link != NULL && (*link)->number != number)
        link = &(*link)->next;
    if (*link == NULL) return;
    fake_group *group = *link;
    *link = group->next;
    free(group);
}

/* The last rank that comes to a group does it for all. */
static void move(fake_world *world, uint32_t number) {
    fake_group *groups[FAKE_RANKS];
    for (int rank = 0; rank < world->size; rank++) {
        ncclComm_t comm = world->ranks[rank];
        if (comm == NULL || comm->aborted || comm->arrived < number) return;
        groups[rank] = group_of(comm, number);
    }
    if (!fake_nccl_move(groups, world->size)) mismatches++;
    world->moved = number;
    for (int rank = 0; rank < world->size; rank++) {
        forget(world->ranks[rank], number);
        /* Release: pairs with the acquire of the driver, whose stream then sees the data. */
        __atomic_store_n(world->ranks[rank]->flag, number, __ATOMIC_RELEASE);
    }
}

static void arrive(void *argument) {
    fake_group *group = argument;
    fake_nccl_lock();
    if (!group->comm->aborted) {
        group->comm->arrived = group->number;
        move(group->comm->world, group->number);
    }
    fake_nccl_leave();
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* The driver takes its own lock, so ours is not held here. */
static uint32_t *flag_of(ncclComm_t comm) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, find_all);
    fake_nccl_lock();
    uint32_t *flag = comm->flag;
    fake_nccl_leave();
    if (flag != NULL) return flag;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *memory = NULL;
    if (posix_memalign(&memory, page, page) != 0) abort();
    memset(memory, 0, page);
    if (register_host(memory, page, 0) != CUDA_SUCCESS) abort();
    fake_nccl_lock();
    comm->flag = memory;
    int ended = comm->ended; /* meanwhile, by another thread */
    fake_nccl_leave();
    if (ended) fake_nccl_unregister(comm);
    return memory;
}

static ncclResult_t issue(fake_group *group) {
    ncclComm_t comm = group->comm;
    cudaStream_t stream = group->stream; /* the group may be done and gone before its wait is in */
    uint32_t *flag = flag_of(comm);
    fake_nccl_lock();
    group->number = ++comm->issued;
    group->next = comm->groups;
    comm->groups = group;
    uint32_t number = group->number;
    fake_nccl_leave();
    if (launch_host(stream, arrive, group) != CUDA_SUCCESS ||
        wait_value(stream, (CUdeviceptr)(uintptr_t)flag, number, CU_STREAM_WAIT_VALUE_GEQ) !=
            CUDA_SUCCESS)
        return ncclUnhandledCudaError;
    fake_nccl_lock();
    return fake_nccl_end(fake_nccl_answer(comm, "ncclGroupEnd"));
}

ncclResult_t ncclGroupStart(void) {
    ENTER(ncclGroupStart);
    depth++;
    return fake_nccl_end(ncclSuccess);
}

static ncclResult_t close_group(void) {
    fake_group *group = open;
    if (--depth > 0 || group == NULL) return ncclSuccess;
    open = NULL;
    fake_nccl_lock();
    fake_nccl_note(group->comm->rank, "] ");
    fake_nccl_leave();
    return issue(group);
}

ncclResult_t ncclGroupEnd(void) {
    ncclResult_t fault = fake_nccl_enter("ncclGroupEnd");
    if (fault == ncclSuccess) {
        fake_nccl_leave();
        return close_group();
    }
    depth--;
    free(open); /* what was called in it is lost */
    open = NULL;
    return fault;
}

static const char *const short_names[] = {"AllGather", "AllReduce", "Broadcast", "Send", "Recv"};

static void note_call(int rank, const fake_call *call) {
    char text[64];
    int used = snprintf(text, sizeof text, "%s%s %zu", open == NULL ? "[" : ", ",
                        short_names[call->kind], call->count);
    if (call->peer >= 0) (void)snprintf(text + used, sizeof text - (size_t)used, ">%d", call->peer);
    fake_nccl_note(rank, text);
}

/* Under the lock, which it gives back. */
static ncclResult_t add(ncclComm_t comm, cudaStream_t stream, fake_call call) {
    note_call(comm->rank, &call);
    depth++;
    if (open == NULL) {
        open = fake_nccl_zeroed(sizeof *open);
        open->comm = comm;
        open->stream = stream;
    }
    int fits = open->comm == comm && open->stream == stream && open->count < FAKE_CALLS;
    if (fits) open->calls[open->count++] = call;
    fake_nccl_leave();
    ncclResult_t result = close_group();
    return fits ? result : ncclInvalidUsage;
}

/* ---- the calls ------------------------------------------------------------------------------- */

ncclResult_t ncclAllGather(const void *source, void *destination, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    ENTER(ncclAllGather);
    return add(comm, stream,
               (fake_call){FAKE_ALL_GATHER, source, destination, count, type, ncclSum, -1});
}

ncclResult_t ncclAllReduce(const void *source, void *destination, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduce, ncclComm_t comm, cudaStream_t stream) {
    ENTER(ncclAllReduce);
    return add(comm, stream,
               (fake_call){FAKE_ALL_REDUCE, source, destination, count, type, reduce, -1});
}

ncclResult_t ncclBroadcast(const void *source, void *destination, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
    ENTER(ncclBroadcast);
    return add(comm, stream,
               (fake_call){FAKE_BROADCAST, source, destination, count, type, ncclSum, root});
}

ncclResult_t ncclSend(const void *source, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    ENTER(ncclSend);
    return add(comm, stream, (fake_call){FAKE_SEND, source, NULL, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void *destination, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    ENTER(ncclRecv);
    return add(comm, stream,
               (fake_call){FAKE_RECEIVE, NULL, destination, count, type, ncclSum, peer});
}
