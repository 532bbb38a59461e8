/* How long passes take by the clock of compute, from begin_forward to end_backward; or launches of
 * graphs of them, from before_graph to after_graph. */
#ifndef PST_OPS_ZERO_CLOCK_H
#define PST_OPS_ZERO_CLOCK_H

#include "ops/transfer/timings.h"

#define PST__CLOCK_PASSES 4u /* that the device may be behind; of others nothing is known */

typedef struct pst__clock {
    pst__timings timings;
    pst__timing *passes[PST__CLOCK_PASSES]; /* made at their first use */
    size_t running;                         /* of them, which one is next */
    int is_running;
    uint64_t total_ns, count; /* of those that were read */
} pst__clock;

/* A forward begins, or a launch; one whose end did not come is forgotten. */
void pst__clock_begin(pst__clock *clock, pst_stream *compute);
/* The backward ends, and with it the pass, or a launch, if one has begun. */
void pst__clock_end(pst__clock *clock, pst_stream *compute);
/* Adds up what the device has passed. */
void pst__clock_collect(pst__clock *clock);
/* Begins anew: of passes that have ended nothing is added any more, where the device has not come
 * to their end, either. */
void pst__clock_reset(pst__clock *clock);

#endif
