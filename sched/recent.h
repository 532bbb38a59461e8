/* The last launches of a lane, of tasks that have a name, for the watchdog's report. The lane's
 * owner writes, anybody reads at any time. */
#ifndef PST_SCHED_RECENT_H
#define PST_SCHED_RECENT_H

#include "base/atomic.h"

#include <stdint.h>

#define PST__RECENT 8u

typedef struct pst__recent_launch {
    uint64_t graph_id; /* the name lives as long as this graph */
    uint64_t ticket;
    const char *name;
} pst__recent_launch;

typedef struct pst__recent {
    pst__recent_launch launches[PST__RECENT]; /* the n-th one at n % PST__RECENT */
    uint64_t count;
} pst__recent;

/* Release, each of them: who reads a field of the n-th launch, by an acquire in pst__recent_read,
 * finds the count at n at least; and who finds it at n + 1, all fields. */
static inline void pst__recent_note(pst__recent *recent, uint64_t graph_id, const char *name,
                                    uint64_t ticket) {
    const uint64_t n = recent->count;
    pst__recent_launch *launch = &recent->launches[n % PST__RECENT];
    pst__store_release(&launch->graph_id, graph_id);
    pst__store_release(&launch->ticket, ticket);
    pst__store_release(&launch->name, name);
    pst__store_release(&recent->count, n + 1);
}

/* The launch that is `back` launches ago, 0 the last one; 0 when there is none or when it was
 * overwritten meanwhile. */
static inline int pst__recent_read(const pst__recent *recent, uint64_t back,
                                   pst__recent_launch *read) {
    const uint64_t count = pst__load_acquire(&recent->count); /* see pst__recent_note */
    if (back >= count || back >= PST__RECENT) return 0;
    const uint64_t n = count - 1 - back;
    const pst__recent_launch *launch = &recent->launches[n % PST__RECENT];
    read->graph_id = pst__load_acquire(&launch->graph_id);
    read->ticket = pst__load_acquire(&launch->ticket);
    read->name = pst__load_acquire(&launch->name);
    /* While the count stands at n + PST__RECENT the n-th one is being overwritten. Relaxed: the
     * acquires above come first. */
    return pst__load_relaxed(&recent->count) < n + PST__RECENT;
}

#endif
