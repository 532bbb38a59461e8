#include "ops/ce_turn.h"

/* With two ranks each source has one reader. */
static int is_needless(const pst__turns *turns) {
    return turns->flags->size <= 2;
}

pst_status pst__turn_wait(const pst__turns *turns, pst_stream *stream, uint32_t sequence,
                          int step) {
    if (is_needless(turns)) return PST_OK;
    return pst__flag_wait(turns->flags, stream, PST__FLAG_TURN, step,
                          step == 0 ? turns->previous : sequence);
}

pst_status pst__turn_pass(pst__turns *turns, pst_stream *stream, uint32_t sequence, int step) {
    const int rank = turns->flags->rank, size = turns->flags->size;
    if (is_needless(turns)) return PST_OK;
    if (step < size - 2)
        return pst__flag_write(turns->flags, stream, (rank + size - 1) % size, PST__FLAG_TURN,
                               step + 1, sequence);
    turns->previous = sequence;
    return pst__flag_write(turns->flags, stream, (rank + size - 2) % size, PST__FLAG_TURN, 0,
                           sequence);
}
