/* Collectives in a CUDA graph, whose flags have the same numbers in each launch: so each launch
 * ends with all flags lowered. A rank lowers its own once all peers have read all of its sources;
 * only then do they write flags there again, for the next launch:
 *
 *     wait until each peer has read the last source     no flag here is written any more
 *     lower READY and DONE
 *     write LOWERED to each peer, wait for each peer's  now their flags may be written
 *     lower LOWERED                                     a peer writes it only once this rank's
 *                                                       DONE of the next launch has come
 */
#include "ops/comm/ce/ce.h"

pst_status pst__ce_capture_begin(pst_comm *comm) {
    pst__ce *ce = comm->context;
    ce->flags.is_captured = 1;
    ce->captured = 0;
    return PST_OK;
}

static void each_peer(const pst__ce *ce, pst__flag_steps *steps, pst__flag_kind kind,
                      uint32_t sequence, int is_write) {
    const int rank = ce->comm.rank;
    for (int peer = 0; peer < ce->comm.size; peer++) {
        if (peer == rank) continue;
        if (is_write)
            pst__flag_write(&ce->flags, steps, peer, kind, rank, sequence);
        else
            pst__flag_wait(&ce->flags, steps, kind, peer, sequence);
    }
}

static pst_status end_launch(const pst__ce *ce, pst_stream *stream) {
    const pst__flags *flags = &ce->flags;
    pst__flag_steps steps = {.count = 0};
    each_peer(ce, &steps, PST__FLAG_DONE, pst__ce_sequence(ce, ce->captured, 1), 0);
    pst_status status = pst__flags_enqueue(flags, stream, &steps);
    if (status == PST_OK) status = pst__flags_lower(flags, stream, PST__FLAG_READY, PST__FLAG_DONE);
    if (status != PST_OK) return status;
    each_peer(ce, &steps, PST__FLAG_LOWERED, 1, 1);
    each_peer(ce, &steps, PST__FLAG_LOWERED, 1, 0);
    status = pst__flags_enqueue(flags, stream, &steps);
    if (status != PST_OK) return status;
    return pst__flags_lower(flags, stream, PST__FLAG_LOWERED, PST__FLAG_LOWERED);
}

pst_status pst__ce_capture_end(pst_comm *comm, pst_stream *stream) {
    pst__ce *ce = comm->context;
    const int is_empty = ce->captured == 0 || comm->size == 1;
    const pst_status status = is_empty ? PST_OK : end_launch(ce, stream);
    ce->flags.is_captured = 0;
    return status;
}
