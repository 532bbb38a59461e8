/* How a communicator fails: once, for good, for the first reason, which has a text. Any thread. */
#ifndef PST_OPS_COMM_FAILURE_H
#define PST_OPS_COMM_FAILURE_H

#include "base/atomic.h"

#include <ck_spinlock.h>
#include <penstock/status.h>
#include <stdarg.h>

#define PST__FAILURE_TEXT 768

typedef struct pst__failure {
    char prefix[128]; /* of the text */
    /* (optional) Lets the peers know, before the failure is seen here. */
    void (*publish)(void *context, pst_status status, const char *text);
    void *context;
    ck_spinlock_t lock; /* of the texts and of becoming failed */
    int status;         /* pst_status; written once */
    char text[PST__FAILURE_TEXT], copy[PST__FAILURE_TEXT];
} pst__failure;

/* A zeroed one; texts begin "rank 2, KIND'NAME': ". */
void pst__failure_init(pst__failure *failure, int rank, const char *kind, const char *name);

/* 1: this is the first reason. */
int pst__failure_set(pst__failure *failure, pst_status status, const char *format,
                     va_list arguments);
/* What a call that failed alone says; it is no failure of the communicator. */
void pst__failure_note(pst__failure *failure, const char *text);
/* Valid until the next call. */
const char *pst__failure_text(pst__failure *failure);

static inline pst_status pst__failure_status(const pst__failure *failure) {
    /* Acquire: pairs with the release in set. The text is read under the lock. */
    return (pst_status)pst__load_acquire(&failure->status);
}

#endif
