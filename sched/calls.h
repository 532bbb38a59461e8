/* Calls of the user's code by a lane's turn: a task's start, its test, its callback. While one runs
 * the turn stands on the calling thread's list, so that a wait inside of it is noticed; and one
 * that does not return, as an exception or the thread's end unwinds it, is completed as the turn's
 * scope ends. */
#ifndef PST_SCHED_CALLS_H
#define PST_SCHED_CALLS_H

#include "sched/advance.h"

/* The innermost turn of the calling thread; a task may pump another runtime. */
pst__advance **pst__calls_of_thread(void);

static inline void pst__calls_enter(pst__advance *turn) {
    pst__advance **innermost = pst__calls_of_thread();
    turn->outer = *innermost;
    *innermost = turn;
}

/* The end of the scope of `turn`: takes it off the list, and completes the call that it is in. */
void pst__calls_leave(pst__advance *turn);

/* PST_OK, or PST_ESTATE with a text when the calling thread is in a task of this runtime, where
 * `what` must not be done. */
pst_status pst__calls_refuse(pst_runtime *runtime, const char *what, const char *name);

/* Whether the calling thread is in a task of this graph. */
int pst__calls_are_in(const pst_graph *graph);

/* ---- failures ------------------------------------------------------------------------- */

/* Before a lane does what may fail: texts from here on say why. Relaxed: what this thread writes
 * itself is what it asks about. */
static inline void pst__note_texts(pst_lane *lane) {
    lane->texts = pst__load_relaxed(&lane->runtime->error.count);
}

/* Says that the task failed, and why. In a poisoned runtime the text of the poison stays: what
 * fails then fails because of it. */
void pst__report_failure(const pst__node *node, const pst_lane *lane, pst_status status);

/* The same, and the node ends. */
void pst__fail_node(pst__advance *advance, pst__node *node, uint64_t number, pst_status status,
                    pst__phase phase);

#endif
