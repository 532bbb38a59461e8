/* Calls that move data: collected to a group, which is a kernel in its stream. It runs when all
 * ranks' streams have come to it, or ends without a result by the abort flag; graphs launch it
 * again. */
#include "internal.h"

#include <fake_driver.h>
#include <stdio.h>

static _Thread_local int depth;
static _Thread_local fake_group *open;
static size_t mismatches;

int fake_nccl_open_groups(void) {
    return depth;
}

size_t fake_nccl_mismatches(void) {
    fake_nccl_lock();
    size_t found = mismatches;
    fake_nccl_leave();
    return found;
}

/* ---- kernels, under the driver's lock -------------------------------------------------------- */

/* The last rank that comes to a group does it for all. */
static void move(fake_world *world, uint32_t number) {
    fake_group *groups[FAKE_RANKS];
    for (int rank = 0; rank < world->size; rank++) {
        ncclComm_t comm = world->ranks[rank];
        if (comm == NULL || comm->aborted || comm->arrived < number) return;
        groups[rank] = comm->running;
    }
    if (!fake_nccl_move(groups, world->size)) mismatches++;
    world->moved = number;
}

/* Of one communicator one kernel runs behind the other, whatever streams they are in. */
static void begin(fake_group *group) {
    ncclComm_t comm = group->comm;
    if (comm->running != NULL) return;
    comm->running = group;
    group->number = ++comm->arrived;
    move(comm->world, group->number);
}

static void end(fake_group *group) {
    ncclComm_t comm = group->comm;
    if (comm->running == group) comm->running = NULL;
    if (comm->world->moved < group->number) fake_nccl_spoil(group);
    group->number = 0;
    if (group->is_captured) return;
    comm->unfinished--;
    free(group);
}

static int run(void *argument) {
    fake_group *group = argument;
    const ncclComm_t comm = group->comm;
    fake_nccl_lock();
    if (group->number == 0 && !comm->aborted) begin(group);
    const int is_over =
        comm->aborted || (group->number != 0 && comm->world->moved >= group->number);
    if (is_over) end(group);
    fake_nccl_leave();
    return is_over;
}

/* The graph that it is captured into has gone. */
static void reclaim(void *argument) {
    fake_group *group = argument;
    fake_nccl_lock();
    group->comm->captured--;
    fake_nccl_leave();
    free(group);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static ncclResult_t issue(fake_group *group) {
    const ncclComm_t comm = group->comm;
    const CUstream stream = group->stream; /* the group may be done and gone soon */
    group->is_captured = fake_cuda_at_destroy(stream, reclaim, group);
    fake_nccl_lock();
    comm->captured += (size_t)group->is_captured;
    comm->unfinished += (size_t)!group->is_captured;
    fake_nccl_leave();
    if (fake_cuda_run(stream, run, group) != CUDA_SUCCESS) return ncclUnhandledCudaError;
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
