#include "ops/pair.h"

#include "base/atomic.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

pst_status pst__pair_init(pst__pair *pair, const pst__heap *heap, pst__error *error,
                          const char *name, int rank, pst_comm *first, pst_comm *second,
                          const char *const *roles) {
    pair->parts[0] = first;
    pair->parts[1] = second;
    pair->roles = roles;
    pair->rank = rank;
    pair->error = error;
    ck_spinlock_init(&pair->lock);
    pair->name = pst__heap_text(heap, name);
    return pair->name == NULL ? PST_ENOMEM : PST_OK;
}

void pst__pair_clear(pst__pair *pair, const pst__heap *heap) {
    pst__heap_free_text(heap, pair->name);
}

void pst__pair_destroy_parts(const pst__pair *pair) {
    for (int side = 0; side < 2; side++)
        pair->parts[side]->ops->destroy(pair->parts[side]);
}

/* ---- failing --------------------------------------------------------------------------------- */

pst_status pst__pair_failure(const pst__pair *pair) {
    return (pst_status)pst__load_acquire(&pair->failure); /* pairs with the release in fail */
}

pst_status pst__pair_fail(pst__pair *pair, pst_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    ck_spinlock_lock(&pair->lock);
    if (pair->failure == PST_OK) {
        const int named =
            snprintf(pair->text, sizeof pair->text, "rank %d, '%s': ", pair->rank, pair->name);
        if (named > 0 && (size_t)named < sizeof pair->text)
            (void)vsnprintf(pair->text + named, sizeof pair->text - (size_t)named, format,
                            arguments);
        /* Release: pairs with the acquire in failure. The text is read under the lock. */
        pst__store_release(&pair->failure, (int)status);
    }
    status = (pst_status)pair->failure;
    ck_spinlock_unlock(&pair->lock);
    va_end(arguments);
    return status;
}

pst_status pst__pair_fail_part(pst__pair *pair, int side, pst_status status) {
    pst_comm *part = pair->parts[side], *other = pair->parts[1 - side];
    status = pst__pair_fail(pair, status, "its %s part '%s': %s", pair->roles[side],
                            part->ops->name, part->ops->error_text(part));
    (void)other->ops->abort(other, status);
    return status;
}

pst_status pst__pair_status(pst__pair *pair) {
    pst_status status = pst__pair_failure(pair);
    for (int side = 0; side < 2 && status == PST_OK; side++) {
        pst_comm *part = pair->parts[side];
        if (part->ops->status != NULL) status = part->ops->status(part);
        if (status != PST_OK) status = pst__pair_fail_part(pair, side, status);
    }
    return status;
}

const char *pst__pair_text(pst__pair *pair) {
    ck_spinlock_lock(&pair->lock);
    memcpy(pair->told, pair->text, sizeof pair->told);
    ck_spinlock_unlock(&pair->lock);
    return pair->told;
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
                             pair->rank, pair->name, pair->roles[side], part->ops->name, bytes,
                             part->ops->error_text(part));
    }
    return PST_OK;
}
