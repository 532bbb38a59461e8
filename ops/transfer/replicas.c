#include "ops/transfer/replicas.h"

/* Where an element of the bucket lies among the sums. */
static size_t place_of(const pst__operation *across, size_t offset, pst_dtype travels) {
    return offset / pst_dtype_size(travels) * pst_dtype_size(across->work.collective.dtype);
}

/* The second part of `across`: what the pieces of a reduce-scatter say, of the sums. */
static pst_status deliver(pst__operation *across, pst_stream *stream) {
    const pst_status status = pst__operation_deliver(across, across->delivery_count, stream);
    if (status != PST_OK) return status;
    if (across->copies.count > 0)
        return pst__copies_launch(across->carrier->device, stream, &across->copies);
    return pst__updates_launch(across->carrier->device, stream, &across->updates);
}

static void move_deliveries(pst__operation *within, pst__operation *across) {
    const pst_dtype travels = within->work.collective.dtype;
    pst_reduce_piece *pieces = across->pieces;
    const size_t capacity = across->piece_capacity;
    across->pieces = within->pieces;
    across->piece_capacity = within->piece_capacity;
    across->delivery_count = within->work.collective.piece_count;
    for (size_t i = 0; i < across->delivery_count; i++)
        across->pieces[i].offset = place_of(across, across->pieces[i].offset, travels);
    within->pieces = pieces;
    within->piece_capacity = capacity;
    within->work.collective.piece_count = 0;
    const pst__updates updates = across->updates;
    across->updates = within->updates;
    within->updates = updates;
    const pst__copies copies = across->copies;
    across->copies = within->copies;
    within->copies = copies;
    across->sums = within->sums;
    within->sums = (pst_lease){0};
    across->then = deliver;
    within->then = NULL;
}

/* Who waits for the gradients, or times them, does so for both. */
static void move_ends(pst__operation *within, pst__operation *across) {
    across->wait_name = within->wait_name;
    across->timing = within->timing;
    within->wait_name = NULL;
    within->goes_on = 1;
}

static pst_status sum_all(pst__operation *within, const pst__operation *across) {
    const pst_collective *sums = &across->work.collective;
    const pst_status status =
        pst__operation_add_piece(within, &(pst_reduce_piece){.count = sums->count,
                                                             .destination = sums->destination,
                                                             .destination_dtype = sums->dtype});
    within->work.collective.pieces = within->pieces;
    return status;
}

/* Between replicas sums travel in the precision that they have. */
pst_status pst__replicas_split(pst__operation *within, pst__operation **across) {
    pst__carrier *carrier = within->carrier;
    const pst_collective *bucket = &within->work.collective;
    pst__operation *made;
    pst_status status = pst__operation_take(carrier, PST__REPLICA_LANE, &made);
    if (status != PST_OK) return status;
    pst_collective *sums = &made->work.collective;
    sums->kind = PST_ALL_REDUCE;
    sums->name = bucket->name;
    sums->dtype = bucket->dtype == PST_FLOAT64 ? PST_FLOAT64 : PST_FLOAT32;
    sums->count = bucket->source_bytes / pst_dtype_size(bucket->dtype);
    sums->reduce = PST_REDUCE_SUM;
    status = pst_arena_acquire(carrier->staging, sums->count * pst_dtype_size(sums->dtype),
                               &made->summed);
    sums->destination = made->summed.memory;
    move_deliveries(within, made);
    move_ends(within, made);
    if (status == PST_OK) status = sum_all(within, made);
    if (status == PST_OK) {
        *across = made;
        return PST_OK;
    }
    pst__operation_give(carrier, made);
    return pst__carrier_fail(carrier, status, "no memory for the sums of '%s'", bucket->name);
}

pst_status pst__replicas_submit_maxima(pst__operation *operation, size_t bytes,
                                       pst__operation **last) {
    pst__carrier *carrier = operation->carrier;
    const pst_collective *words = &operation->work.collective;
    pst__operation *across = NULL;
    pst_status status = PST_OK;
    *last = operation;
    if (carrier->replicas == 1) return pst__operation_submit(operation, bytes, NULL, 0);
    status = pst__operation_take(carrier, PST__REPLICA_LANE, &across);
    if (status != PST_OK) {
        pst__operation_give(carrier, operation);
        return status;
    }
    pst_collective *maxima = &across->work.collective;
    maxima->kind = words->kind;
    maxima->name = words->name;
    maxima->dtype = words->dtype;
    maxima->destination = words->destination;
    maxima->count = words->count;
    maxima->reduce = words->reduce;
    across->owner = operation->owner;
    across->argument = operation->argument;
    across->done = operation->done;
    operation->done = NULL;
    *last = across;
    status = pst__operation_submit(operation, bytes, NULL, 0);
    if (status == PST_OK) return pst__operation_submit_behind(across, operation, bytes);
    pst__operation_give(carrier, across);
    return status;
}
