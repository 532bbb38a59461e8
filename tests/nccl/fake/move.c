/* What the groups' calls do to memory. Sums of floats are in fp32, rounded once. */
#include "internal.h"
#include "sched/device/host.h"

static size_t size_of(ncclDataType_t type) {
    static const size_t sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

/* ---- reducing -------------------------------------------------------------------------------- */

static int dtype_of(ncclDataType_t type) {
    switch (type) {
    case ncclFloat16:
        return PST_FLOAT16;
    case ncclFloat32:
        return PST_FLOAT32;
    case ncclFloat64:
        return PST_FLOAT64;
    case ncclBfloat16:
        return PST_BFLOAT16;
    default:
        return -1;
    }
}

#define LARGEST(type)                                                                              \
    for (size_t i = 0; i < count; i++) {                                                           \
        type largest = ((const type *)sources[0])[i];                                              \
        for (int rank = 1; rank < size; rank++)                                                    \
            if (((const type *)sources[rank])[i] > largest)                                        \
                largest = ((const type *)sources[rank])[i];                                        \
        ((type *)to)[i] = largest;                                                                 \
    }

static int largest(void *to, const void *const *sources, int size, size_t count,
                   ncclDataType_t type) {
    if (type == ncclFloat32)
        LARGEST(float)
    else if (type == ncclFloat64)
        LARGEST(double)
    else if (type == ncclInt32)
        LARGEST(int32_t)
    else if (type == ncclInt64)
        LARGEST(int64_t)
    else if (type == ncclUint8)
        LARGEST(uint8_t)
    else
        return 0;
    return 1;
}

/* To memory of its own: the destination may be one of the sources. */
static int reduce(void *to, const void *const *sources, int size, const fake_call *call) {
    if (call->reduce == ncclMax) return largest(to, sources, size, call->count, call->type);
    int dtype = dtype_of(call->type);
    if (dtype < 0 || call->reduce != ncclSum) return 0;
    pst_sum sum = {.destination = to,
                   .sources = sources,
                   .source_count = (size_t)size,
                   .count = call->count,
                   .scale = 1,
                   .destination_dtype = (pst_dtype)dtype,
                   .source_dtype = (pst_dtype)dtype};
    return pst__host_sum(&sum) == PST_OK;
}

static int reduce_to_all(fake_group *const *groups, int size, size_t index) {
    const fake_call *first = &groups[0]->calls[index];
    size_t bytes = first->count * size_of(first->type);
    char *result = fake_nccl_zeroed(bytes + 1);
    const void *sources[FAKE_RANKS];
    for (int peer = 0; peer < size; peer++)
        sources[peer] = groups[peer]->calls[index].source;
    int done = reduce(result, sources, size, first);
    for (int rank = 0; done && rank < size; rank++)
        memcpy(groups[rank]->calls[index].destination, result, bytes);
    free(result);
    return done;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static void copy(char *to, const char *from, size_t bytes) {
    if (to != from) memcpy(to, from, bytes);
}

static void gather(fake_group *const *groups, int size, size_t index) {
    for (int rank = 0; rank < size; rank++) {
        const fake_call *call = &groups[rank]->calls[index];
        size_t bytes = call->count * size_of(call->type);
        for (int peer = 0; peer < size; peer++)
            copy(call->destination + (size_t)peer * bytes, groups[peer]->calls[index].source,
                 bytes);
    }
}

static void broadcast(fake_group *const *groups, int size, size_t index) {
    const fake_call *root = &groups[groups[0]->calls[index].peer]->calls[index];
    for (int rank = 0; rank < size; rank++)
        copy(groups[rank]->calls[index].destination, root->source,
             root->count * size_of(root->type));
}

static int is_paired(const fake_call *call) {
    return call->kind == FAKE_SEND || call->kind == FAKE_RECEIVE;
}

static int alike(const fake_call *a, const fake_call *b) {
    return a->kind == b->kind && a->count == b->count && a->type == b->type &&
           a->reduce == b->reduce && a->peer == b->peer;
}

static int collective(fake_group *const *groups, int size, size_t index) {
    const fake_call *first = &groups[0]->calls[index];
    for (int rank = 1; rank < size; rank++)
        if (groups[rank]->count != groups[0]->count || !alike(first, &groups[rank]->calls[index]))
            return 0;
    switch (first->kind) {
    case FAKE_ALL_GATHER:
        gather(groups, size, index);
        return 1;
    case FAKE_ALL_REDUCE:
        return reduce_to_all(groups, size, index);
    default:
        broadcast(groups, size, index);
        return 1;
    }
}

/* The nth call of one kind that names this peer. */
static const fake_call *find(const fake_group *group, fake_kind kind, int peer, size_t nth) {
    for (size_t i = 0; i < group->count; i++) {
        const fake_call *call = &group->calls[i];
        if (call->kind == kind && call->peer == peer && nth-- == 0) return call;
    }
    return NULL;
}

/* Everything that `rank` receives. */
static int receive(fake_group *const *groups, int rank) {
    size_t nth[FAKE_RANKS] = {0};
    for (size_t i = 0; i < groups[rank]->count; i++) {
        const fake_call *to = &groups[rank]->calls[i];
        if (to->kind != FAKE_RECEIVE) continue;
        const fake_call *from = find(groups[to->peer], FAKE_SEND, rank, nth[to->peer]++);
        if (from == NULL || from->count != to->count || from->type != to->type) return 0;
        memcpy(to->destination, from->source, to->count * size_of(to->type));
    }
    return 1;
}

int fake_nccl_move(fake_group *const *groups, int size) {
    if (is_paired(&groups[0]->calls[0])) {
        int done = 1;
        for (int rank = 0; rank < size; rank++)
            done &= receive(groups, rank);
        return done;
    }
    for (size_t i = 0; i < groups[0]->count; i++)
        if (!collective(groups, size, i)) return 0;
    return 1;
}

void fake_nccl_spoil(const fake_group *group) {
    for (size_t i = 0; i < group->count; i++) {
        const fake_call *call = &group->calls[i];
        const size_t times = call->kind == FAKE_ALL_GATHER ? (size_t)group->comm->world->size : 1;
        if (call->destination != NULL)
            memset(call->destination, 0xa5, call->count * size_of(call->type) * times);
    }
}
