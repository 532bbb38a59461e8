/* How long a thread stays in a lane's turn. What counts is time, but reading the clock costs as
 * much as a short task: a lane looks at it every 50 us as its last launches went, after 16 of them
 * at most. */
#ifndef PST_SCHED_BUDGET_H
#define PST_SCHED_BUDGET_H

#include "base/atomic.h"
#include "base/clock.h"

#include <stddef.h>

#define PST__LAUNCHES_A_TURN 256u
/* The limit of a turn that keeps the thread from another lane, or from what it waits for. */
#define PST__TURN_NS 100000u

typedef struct pst__budget {
    uint32_t launches;
    uint64_t nanoseconds;                   /* after which no launch follows; 0: no limit */
    int (*is_enough)(const void *argument); /* (optional) asked after each launch; cheap */
    const void *argument;
    const uint64_t *open; /* (optional) while its lower half is not 0 a turn need not ask */
} pst__budget;

#define PST__LAUNCHES_A_LOOK 16u /* at most */
#define PST__PACE_NS         50000u

/* What a lane knows of its launches, from turn to turn. */
typedef struct pst__pace {
    uint64_t looked;  /* at the clock */
    uint32_t between; /* launches between two looks; 0: nothing is known, and so 1 */
    uint32_t rest;    /* of them before the next one */
} pst__pace;

/* One turn's use of a budget. */
typedef struct pst__spending {
    const pst__budget *budget;
    pst__pace *pace;
    uint64_t until;    /* 0: not known before the first look */
    uint32_t launches; /* that may follow */
    int is_spent;      /* none does */
} pst__spending;

static inline pst__spending pst__spending_begin(const pst__budget *budget, pst__pace *pace) {
    pst__spending spending = {budget, pace, 0, budget->launches, 0};
    if (budget->nanoseconds == 0 || pace->between == PST__LAUNCHES_A_LOOK) return spending;
    if (pace->between == 0) pace->between = 1;
    pace->rest = pace->between;
    pace->looked = pst__now();
    spending.until = pace->looked + budget->nanoseconds;
    return spending;
}

/* A look at the clock, if time counts. */
void pst__spending_look(pst__spending *spending);

/* Counts a launch. Relaxed: the question itself is asked then. */
static inline void pst__spending_count(pst__spending *spending) {
    const pst__budget *budget = spending->budget;
    if (--spending->launches == 0 ||
        (budget->is_enough != NULL &&
         (budget->open == NULL || (uint32_t)pst__load_relaxed(budget->open) == 0) &&
         budget->is_enough(budget->argument)))
        spending->is_spent = 1;
    else if (--spending->pace->rest == 0)
        pst__spending_look(spending);
}

#endif
