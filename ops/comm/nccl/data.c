/* Collectives as calls of NCCL. What is called depends on what is the same on all ranks alone. */
#include "ops/comm/nccl/nccl.h"
#include "ops/comm/sums.h"
#include "sched/device/device.h"
#include "sched/runtime.h"

#include <penstock/cuda.h>
#include <stdio.h>
#include <string.h>

/* ---- a group of calls ------------------------------------------------------------------------ */

typedef struct batch {
    pst__nccl *own;
    const pst_collective *collective;
    pst_stream *stream;
    cudaStream_t native;
    ncclResult_t result; /* the first error; then nothing more is called */
    const char *call;    /* whose result it is */
    int opened;
} batch;

static void note(batch *batch, ncclResult_t result, const char *call) {
    if (result == ncclSuccess) return;
    batch->result = result;
    batch->call = call;
}

#define CALL(batch, function, ...)                                                                 \
    do {                                                                                           \
        if ((batch)->result == ncclSuccess)                                                        \
            note((batch), (batch)->own->library.function(__VA_ARGS__), #function);                 \
    } while (0)

static void open_group(batch *batch) {
    CALL(batch, ncclGroupStart);
    batch->opened = batch->result == ncclSuccess;
}

/* Once open a group has to be ended, whatever became of its calls. */
static pst_status close_group(batch *batch) {
    const pst_collective *collective = batch->collective;
    char what[160];
    (void)snprintf(
        what, sizeof what, "%s '%.80s' (ticket %llu)", pst_collective_name(collective->kind),
        collective->name == NULL ? "" : collective->name, (unsigned long long)collective->ticket);
    ncclResult_t end = batch->opened ? batch->own->library.ncclGroupEnd() : ncclSuccess;
    if (batch->result != ncclSuccess)
        return pst__nccl_answer(batch->own, batch->result, batch->call, what);
    return pst__nccl_answer(batch->own, end, "ncclGroupEnd", what);
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static const struct {
    ncclDataType_t type;
    int known;
} reducible[PST_DTYPE_COUNT] = {
    [PST_FLOAT32] = {ncclFloat32, 1},
    [PST_FLOAT64] = {ncclFloat64, 1},
    [PST_FLOAT16] = {ncclFloat16, 1},
    [PST_BFLOAT16] = {ncclBfloat16, 1},
    [PST_INT8] = {ncclInt8, 1},
    [PST_UINT8] = {ncclUint8, 1},
    [PST_INT32] = {ncclInt32, 1},
    [PST_INT64] = {ncclInt64, 1},
    [PST_FLOAT8_E4M3] = {ncclFloat8e4m3, 1},
    [PST_FLOAT8_E5M2] = {ncclFloat8e5m2, 1},
};

static ncclDataType_t type_of(const pst_collective *collective) {
    return reducible[collective->dtype].type;
}

/* ---- all-gather ------------------------------------------------------------------------------ */

/* 1 if the segments from `first` on are what one ncclAllGather does. */
static int is_even(const pst_collective *collective, size_t first, int ranks) {
    const pst_segment *segment = collective->segments + first;
    if (collective->segment_count - first < (size_t)ranks) return 0;
    for (size_t rank = 0; rank < (size_t)ranks; rank++)
        if (segment[rank].peer != rank || segment[rank].source != segment->source ||
            segment[rank].bytes != segment->bytes ||
            segment[rank].destination != segment->destination + rank * segment->bytes)
            return 0;
    return 1;
}

static pst_status all_gather(batch *batch) {
    const pst_collective *collective = batch->collective;
    ncclComm_t handle = batch->own->handle;
    int ranks = batch->own->comm.size;
    open_group(batch);
    for (size_t i = 0; i < collective->segment_count;) {
        const pst_segment *segment = collective->segments + i;
        const char *source = (const char *)collective->source + segment->source;
        char *destination = (char *)collective->destination + segment->destination;
        int even = is_even(collective, i, ranks);
        i += even ? (size_t)ranks : 1;
        if (segment->bytes == 0) continue;
        if (even)
            CALL(batch, ncclAllGather, source, destination, segment->bytes, ncclInt8, handle,
                 batch->native);
        else
            CALL(batch, ncclBroadcast, source, destination, segment->bytes, ncclInt8,
                 (int)segment->peer, handle, batch->native);
    }
    return close_group(batch);
}

/* ---- reduce-scatter -------------------------------------------------------------------------- */

static const char *chunk_of(const pst_collective *collective, int rank) {
    return (const char *)collective->source + (size_t)rank * collective->stride;
}

static pst_status device_failed(const batch *batch, pst_status status) {
    return pst__fail(pst__runtime_error(batch->own->runtime), status,
                     "rank %d, communicator '%s': %s '%.80s': %s: %s", batch->own->comm.rank,
                     batch->own->name, pst_collective_name(batch->collective->kind),
                     batch->collective->name == NULL ? "" : batch->collective->name,
                     pst_status_text(status), pst__device_text(batch->own->device));
}

static pst_status sum(const batch *batch, const pst_reduce_piece *piece, const void *const *sources,
                      size_t count) {
    pst_device *device = batch->own->device;
    const pst_sum sum = pst__sum_of(batch->collective, piece, sources, count);
    if (piece->count == 0) return PST_OK;
    pst_status status = device->ops->sum(device, batch->stream, &sum);
    return status == PST_OK ? PST_OK : device_failed(batch, status);
}

/* Chunk `rank` of this rank's source, or what arrived from it: the others lie in staging, in the
 * order of ranks. */
static const char *sent_by(const batch *batch, int rank) {
    const pst_collective *collective = batch->collective;
    int me = batch->own->comm.rank;
    if (rank == me) return chunk_of(collective, me);
    return (const char *)collective->staging +
           (size_t)(rank < me ? rank : rank - 1) * collective->source_bytes;
}

static pst_status reduce_scatter(batch *batch) {
    const pst_collective *collective = batch->collective;
    const pst_comm *comm = &batch->own->comm;
    ncclComm_t handle = batch->own->handle;
    size_t bytes = collective->source_bytes;
    open_group(batch);
    for (int step = 1; step < comm->size; step++) {
        int to = (comm->rank + step) % comm->size;
        int from = (comm->rank + comm->size - step) % comm->size;
        CALL(batch, ncclSend, chunk_of(collective, to), bytes, ncclInt8, to, handle, batch->native);
        CALL(batch, ncclRecv, (void *)sent_by(batch, from), bytes, ncclInt8, from, handle,
             batch->native);
    }
    pst_status status = close_group(batch);
    for (size_t i = 0; status == PST_OK && i < collective->piece_count; i++) {
        const pst_reduce_piece *piece = &collective->pieces[i];
        for (int rank = 0; rank < comm->size; rank++)
            batch->own->sources[rank] = sent_by(batch, rank) + piece->offset;
        status = sum(batch, piece, batch->own->sources, (size_t)comm->size);
    }
    return status;
}

/* ---- in place -------------------------------------------------------------------------------- */

static pst_status all_reduce(batch *batch) {
    const pst_collective *collective = batch->collective;
    int sums = collective->reduce == PST_REDUCE_SUM;
    open_group(batch);
    CALL(batch, ncclAllReduce, collective->destination, collective->destination, collective->count,
         type_of(collective), sums ? ncclSum : ncclMax, batch->own->handle, batch->native);
    pst_status status = close_group(batch);
    if (status != PST_OK || !sums || pst__scale_of(collective) == 1.0) return status;
    const void *source = collective->destination;
    const pst_reduce_piece scaled = {.count = collective->count,
                                     .destination = collective->destination,
                                     .destination_dtype = collective->dtype};
    return sum(batch, &scaled, &source, 1);
}

static pst_status broadcast(batch *batch) {
    const pst_collective *collective = batch->collective;
    open_group(batch);
    CALL(batch, ncclBroadcast, collective->destination, collective->destination,
         collective->count * pst_dtype_size(collective->dtype), ncclInt8, collective->root,
         batch->own->handle, batch->native);
    return close_group(batch);
}

/* The byte's value does not matter. */
static pst_status barrier(batch *batch) {
    void *byte = batch->collective->staging;
    open_group(batch);
    CALL(batch, ncclAllReduce, byte, byte, 1, ncclUint8, ncclMax, batch->own->handle,
         batch->native);
    return close_group(batch);
}

/* ---- any ------------------------------------------------------------------------------------- */

size_t pst__nccl_staging_bytes(const pst__nccl *own, const pst_collective *collective) {
    size_t others = (size_t)own->comm.size - 1;
    if (collective->kind == PST_BARRIER) return 1;
    if (collective->kind != PST_REDUCE_SCATTER) return 0;
    return others * collective->source_bytes;
}

static int has_payload(const pst_collective *collective) {
    switch (collective->kind) {
    case PST_ALL_GATHER:
        return collective->segment_count > 0;
    case PST_REDUCE_SCATTER:
        return collective->source_bytes > 0;
    case PST_BARRIER:
        return 1;
    default:
        return collective->count > 0;
    }
}

static pst_status check(const pst__nccl *own, const pst_collective *collective) {
    if ((unsigned)collective->kind >= PST_COLLECTIVE_KIND_COUNT ||
        (unsigned)collective->dtype >= PST_DTYPE_COUNT)
        return PST_EINVAL;
    if (collective->kind != PST_ALL_REDUCE || reducible[collective->dtype].known) return PST_OK;
    return pst__fail(pst__runtime_error(own->runtime), PST_EUNSUPPORTED,
                     "rank %d, communicator '%s': %s '%.80s': NCCL does not reduce %s",
                     own->comm.rank, own->name, pst_collective_name(collective->kind),
                     collective->name == NULL ? "" : collective->name,
                     pst_dtype_name(collective->dtype));
}

pst_status pst__nccl_enqueue(pst__nccl *own, const pst_collective *collective, pst_stream *stream) {
    pst_status status = check(own, collective);
    if (status != PST_OK || !has_payload(collective)) return status;
    batch batch = {
        .own = own, .collective = collective, .stream = stream, .native = pst_cuda_stream(stream)};
    switch (collective->kind) {
    case PST_ALL_GATHER:
        return all_gather(&batch);
    case PST_REDUCE_SCATTER:
        return reduce_scatter(&batch);
    case PST_ALL_REDUCE:
        return all_reduce(&batch);
    case PST_BROADCAST:
        return broadcast(&batch);
    default:
        return barrier(&batch);
    }
}
