/* How long a thread stays in a lane's turn. What counts is time, but reading the clock costs as
 * much as a short task: a lane whose launches are quick looks at it every 16 launches, another one
 * after each. */
#ifndef PST_SCHED_BUDGET_H
#define PST_SCHED_BUDGET_H

#include "base/clock.h"

#include <stddef.h>

#define PST__LAUNCHES_A_TURN 256u
/* Of a turn that keeps the thread from another lane, or from what it waits for. */
#define PST__TURN_NS 100000u

typedef struct pst__budget {
    uint32_t launches;
    uint64_t nanoseconds;                   /* after which no launch follows; 0: no limit */
    int (*is_enough)(const void *argument); /* (optional) asked after each launch; cheap */
    const void *argument;
} pst__budget;

/* What a lane knows of its launches, from turn to turn. */
typedef struct pst__pace {
    uint64_t looked;  /* at the clock */
    uint32_t between; /* launches between two looks; 0: nothing is known, and so 1 */
    uint32_t since;   /* the last look */
} pst__pace;

/* One turn's use of a budget. */
typedef struct pst__spending {
    const pst__budget *budget;
    pst__pace *pace;
    uint64_t until; /* 0: not known before the first look */
    uint32_t launches;
    int is_over; /* no launch follows */
} pst__spending;

#define PST__LAUNCHES_A_LOOK 16u
#define PST__QUICK_NS        5000u /* a launch; so a look comes after 80 us at most */

static inline pst__spending pst__spending_begin(const pst__budget *budget, pst__pace *pace) {
    pst__spending spending = {budget, pace, 0, 0, 0};
    if (budget->nanoseconds == 0 || pace->between == PST__LAUNCHES_A_LOOK) return spending;
    pace->looked = pst__now();
    pace->since = 0;
    spending.until = pace->looked + budget->nanoseconds;
    return spending;
}

/* A look at the clock. */
static inline void pst__spending_look(pst__spending *spending) {
    pst__pace *pace = spending->pace;
    const uint64_t now = pst__now();
    const int is_quick = now - pace->looked <= (uint64_t)pace->since * PST__QUICK_NS;
    pace->between = is_quick ? PST__LAUNCHES_A_LOOK : 1;
    pace->looked = now;
    pace->since = 0;
    if (spending->until == 0) spending->until = now + spending->budget->nanoseconds;
    spending->is_over = now >= spending->until;
}

/* Counts a launch. */
static inline void pst__spending_count(pst__spending *spending) {
    const pst__budget *budget = spending->budget;
    if (++spending->launches >= budget->launches ||
        (budget->is_enough != NULL && budget->is_enough(budget->argument)))
        spending->is_over = 1;
    else if (budget->nanoseconds != 0 && ++spending->pace->since >= spending->pace->between)
        pst__spending_look(spending);
}

#endif
