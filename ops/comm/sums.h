/* Sums as collectives ask for them. */
#ifndef PST_OPS_COMM_SUMS_H
#define PST_OPS_COMM_SUMS_H

#include <penstock/comm.h>

static inline double pst__scale_of(const pst_collective *collective) {
    return collective->scale == 0 ? 1.0 : collective->scale;
}

/* Of what each rank's chunk has for the piece: `sources` points to the elements of each. */
static inline pst_sum pst__sum_of(const pst_collective *collective, const pst_reduce_piece *piece,
                                  const void *const *sources, size_t source_count) {
    return (pst_sum){.destination = piece->destination,
                     .sources = sources,
                     .source_count = source_count,
                     .count = piece->count,
                     .scale = pst__scale_of(collective),
                     .accumulate = piece->accumulate,
                     .destination_dtype = piece->destination_dtype,
                     .source_dtype = collective->dtype};
}

/* The same for a piece without destination. */
static inline pst_adamw_piece pst__update_of(const pst_collective *collective,
                                             const pst_adamw_piece *update,
                                             const void *const *sources, size_t source_count) {
    pst_adamw_piece piece = *update;
    piece.gradient = NULL;
    piece.sources = sources;
    piece.source_count = source_count;
    piece.scale = pst__scale_of(collective);
    piece.source_dtype = collective->dtype;
    return piece;
}

#endif
