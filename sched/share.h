/* A graph's tasks on one lane: what a launch hands to the lane, and how many of the tasks are
 * launched, have ended, and are left (the lane touches nothing of them any more).
 *
 * The lane's owner counts, in a line of its own and before anybody can see what is counted: a
 * launch before a callback, an end before a callback, a wait's end or a wake-up. So whoever learns
 * of a task's end in whatever way finds it counted. Of a sealed graph's run only the last task of a
 * share is told to the run (pst__run); of a growing graph, whoever asks adds up the shares. */
#ifndef PST_SCHED_SHARE_H
#define PST_SCHED_SHARE_H

#include "sched/node.h"

typedef struct pst__share pst__share;

struct pst__share {
    /* Sealed graphs, in the share of a queue's lane (a leader's): what a launch pushes: the tasks
     * that can start at once (BY_READINESS), or all in the order of adding (BY_SUBMISSION), those
     * of followers too. First, as it is queued like a node. */
    pst__node item;
    const uint32_t *indices;
    uint32_t count, cursor;
    uint32_t tasks; /* in all; of a growing graph, so far */
    pst_lane *lane;
    pst__share *next; /* of the graph; shares are only added */

    /* The owner's. Sealed graphs: of `tasks`, by the run's number & 1, as two runs can be in
     * flight; whoever counts the last one begins anew. It leaves one task after the other, and so
     * has left all when it leaves the last that ends. */
    _Alignas(PST__CACHE_LINE) uint32_t unlaunched;
    uint32_t unended[2];
    uint32_t ended, left; /* growing graphs */
};

/* One launch of a graph. Two are kept: launch k+1 may begin while tasks of k are launched and not
 * done. A growing graph uses the first. */
typedef struct pst__run {
    uint64_t number;
    /* Sealed graphs: shares and gates of which something has not ended (the low half), is not
     * launched (the high half); shares of which something is not left. A growing graph's low half
     * counts ended gates, down from 0. One word, as a gate is launched and ends at once: whoever
     * finds the one may rely on the other. */
    uint64_t open;
    uint32_t unleft;
    int status; /* the first error */
} pst__run;

#define PST__RUN_UNENDED    ((uint64_t)1)
#define PST__RUN_UNLAUNCHED ((uint64_t)1 << 32)

/* Counts a task; 1 for the last of the share, which is to be told to the run. */
static inline int pst__share_is_last(uint32_t *count, const pst__share *share) {
    if (--*count != 0) return 0;
    *count = share->tasks;
    return 1;
}

/* Growing graphs. Release: pairs with the acquire of whoever adds up. */
static inline void pst__share_count_grown(uint32_t *counted) {
    pst__store_release(counted, *counted + 1);
}

#endif
