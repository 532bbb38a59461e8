#include "ops/ce_turn.h"

/* With two ranks each source has one reader. */
static int is_needless(const pst__turns *turns) {
    return turns->flags->size <= 2;
}

void pst__turn_wait(const pst__turns *turns, pst__flag_steps *steps, uint32_t sequence, int step) {
    if (is_needless(turns)) return;
    pst__flag_wait(turns->flags, steps, PST__FLAG_TURN, step,
                   step == 0 ? turns->previous : sequence);
}

void pst__turn_pass(pst__turns *turns, pst__flag_steps *steps, uint32_t sequence, int step) {
    const int rank = turns->flags->rank, size = turns->flags->size;
    if (is_needless(turns)) return;
    if (step < size - 2) {
        pst__flag_write(turns->flags, steps, (rank + size - 1) % size, PST__FLAG_TURN, step + 1,
                        sequence);
        return;
    }
    pst__flag_write(turns->flags, steps, (rank + size - 2) % size, PST__FLAG_TURN, 0, sequence);
    turns->previous = sequence;
}
