/* Calls of the user's code by a lane's turn: a task's start, its test, its callback. While one runs
 * it stands on the calling thread's list, so that a wait inside of it is noticed. */
#ifndef PST_SCHED_CALLS_H
#define PST_SCHED_CALLS_H

#include "sched/node.h"

/* A turn's place on the list. */
typedef struct pst__call {
    struct pst__call *outer; /* a task may pump another runtime */
    pst__node *node;         /* whose code runs; NULL: none does */
    enum { PST__CALL_START, PST__CALL_TEST, PST__CALL_DONE } kind;
} pst__call;

/* The innermost one of the calling thread. */
pst__call **pst__calls_of_thread(void);

static inline void pst__calls_enter(pst__call *call) {
    pst__call **innermost = pst__calls_of_thread();
    call->outer = *innermost;
    *innermost = call;
}

/* PST_OK, or PST_ESTATE with a text when the calling thread is in a task of this runtime, where
 * `what` must not be done. */
pst_status pst__calls_refuse(pst_runtime *runtime, const char *what, const char *name);

/* Whether the calling thread is in a task of this graph. */
int pst__calls_are_in(const pst_graph *graph);

#endif
