#include "ops/comm/join/pair.h"

void pst__pair_destroy_parts(const pst__pair *pair) {
    for (int side = 0; side < 2; side++)
        pair->parts[side]->ops->destroy(pair->parts[side]);
}

/* ---- failing --------------------------------------------------------------------------------- */

pst_status pst__pair_fail(pst__pair *pair, pst_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)pst__failure_set(&pair->failure, status, format, arguments);
    va_end(arguments);
    return pst__pair_failure(pair);
}

pst_status pst__pair_fail_part(pst__pair *pair, int side, pst_status status) {
    pst_comm *part = pair->parts[side], *other = pair->parts[1 - side];
    status = pst__pair_fail(pair, status, "its %s part '%s': %s", pair->roles[side],
                            part->ops->name, part->ops->error_text(part));
    (void)other->ops->abort(other, status);
    return status;
}

static pst_status pair_status(pst_comm *comm) {
    pst__pair *pair = comm->context;
    pst_status status = pst__pair_failure(pair);
    for (int side = 0; side < 2 && status == PST_OK; side++) {
        pst_comm *part = pair->parts[side];
        if (part->ops->status != NULL) status = part->ops->status(part);
        if (status != PST_OK) status = pst__pair_fail_part(pair, side, status);
    }
    return status;
}

static const char *pair_error_text(pst_comm *comm) {
    pst__pair *pair = comm->context;
    return pst__failure_text(&pair->failure);
}

pst_status pst__pair_abort(pst__pair *pair, pst_status status) {
    int quiet = 1;
    if (status >= PST_OK) status = PST_ECANCELED;
    (void)pst__pair_fail(pair, status, "aborted: %s", pst_status_text(status));
    /* Between nodes first: what an abort within the node lets go on is not to travel further. */
    for (int side = 1; side >= 0; side--)
        quiet &= pair->parts[side]->ops->abort(pair->parts[side], status) == PST_OK;
    return quiet ? PST_OK : PST_EBUSY;
}

/* ---- memory ---------------------------------------------------------------------------------- */

pst_status pst__pair_open_memory(const pst__pair *pair, void *memory, size_t bytes) {
    for (int side = 0; side < 2; side++) {
        pst_comm *part = pair->parts[side];
        pst_status status =
            part->ops->open_memory == NULL ? PST_OK : part->ops->open_memory(part, memory, bytes);
        if (status != PST_OK)
            return pst__fail(pair->error, status,
                             "rank %d, '%s': its %s part '%s' cannot open %zu bytes: %s",
                             pair->comm.rank, pair->name, pair->roles[side], part->ops->name, bytes,
                             part->ops->error_text(part));
    }
    return PST_OK;
}

static pst_status pair_open_memory(pst_comm *comm, void *memory, size_t bytes) {
    return pst__pair_open_memory(comm->context, memory, bytes);
}

/* ---- creation -------------------------------------------------------------------------------- */

static pst_status pair_abort(pst_comm *comm, pst_status status) {
    return pst__pair_abort(comm->context, status);
}

pst_status pst__pair_init(pst__pair *pair, const pst__meeting_place *place, const pst_comm_ops *ops,
                          pst_comm *first, pst_comm *second, const char *const *roles) {
    const int rank = place->exchange->rank;
    pair->comm = (pst_comm){&pair->ops, pair, rank, place->exchange->size};
    pair->ops = *ops;
    pair->ops.kinds = first->ops->kinds & second->ops->kinds;
    pair->ops.status = pair_status;
    pair->ops.error_text = pair_error_text;
    if (ops->abort == NULL) pair->ops.abort = pair_abort;
    if (first->ops->open_memory != NULL || second->ops->open_memory != NULL)
        pair->ops.open_memory = pair_open_memory;
    pair->parts[0] = first;
    pair->parts[1] = second;
    pair->roles = roles;
    pair->heap = place->heap;
    pair->error = place->error;
    pst__failure_init(&pair->failure, rank, "", place->what);
    pair->name = pst__heap_text(place->heap, place->what);
    return pair->name == NULL ? PST_ENOMEM : PST_OK;
}
