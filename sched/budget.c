#include "sched/budget.h"

void pst__spending_look(pst__spending *spending) {
    pst__pace *pace = spending->pace;
    if (spending->budget->nanoseconds != 0) {
        const uint64_t now = pst__now();
        const uint64_t quick = (uint64_t)pace->between * PST__PACE_NS / (now - pace->looked + 1);
        pace->between = quick == 0                     ? 1
                        : quick < PST__LAUNCHES_A_LOOK ? (uint32_t)quick
                                                       : PST__LAUNCHES_A_LOOK;
        pace->looked = now;
        if (spending->until == 0) spending->until = now + spending->budget->nanoseconds;
        spending->is_spent = now >= spending->until;
    }
    pace->rest = pace->between;
}
