#include "ops/comm/failure.h"

#include <stdio.h>
#include <string.h>

void pst__failure_init(pst__failure *failure, int rank, const char *kind, const char *name) {
    ck_spinlock_init(&failure->lock);
    (void)snprintf(failure->prefix, sizeof failure->prefix, "rank %d, %s'%.64s': ", rank, kind,
                   name);
}

int pst__failure_set(pst__failure *failure, pst_status status, const char *format,
                     va_list arguments) {
    ck_spinlock_lock(&failure->lock);
    const int is_first = failure->status == PST_OK;
    if (is_first) {
        const size_t begin = strlen(failure->prefix);
        memcpy(failure->text, failure->prefix, begin);
        (void)vsnprintf(failure->text + begin, sizeof failure->text - begin, format, arguments);
        if (failure->publish != NULL) failure->publish(failure->context, status, failure->text);
        /* Release: pairs with the acquire in status. */
        pst__store_release(&failure->status, (int)status);
    }
    ck_spinlock_unlock(&failure->lock);
    return is_first;
}

void pst__failure_note(pst__failure *failure, const char *text) {
    ck_spinlock_lock(&failure->lock);
    if (failure->status == PST_OK) (void)snprintf(failure->text, sizeof failure->text, "%s", text);
    ck_spinlock_unlock(&failure->lock);
}

const char *pst__failure_text(pst__failure *failure) {
    ck_spinlock_lock(&failure->lock);
    memcpy(failure->copy, failure->text, sizeof failure->copy);
    ck_spinlock_unlock(&failure->lock);
    return failure->copy;
}
