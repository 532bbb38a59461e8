/* Random collectives of one communicator against a reference that is computed on the host. All
 * ranks draw the same collectives from the same seed; each compares every byte of what it may have
 * written, and of the gaps between. */
#ifndef PST_TESTS_GPU_COLLECTIVES_H
#define PST_TESTS_GPU_COLLECTIVES_H

#include "ranks.h"

#include <penstock/penstock.h>

typedef struct collectives_options {
    uint64_t seed;
    size_t count;         /* of collectives */
    size_t largest_bytes; /* of one collective's source and destination */
    unsigned kinds;       /* bits 1 << kind that are drawn */
    unsigned exact; /* bits of the kinds that sum in fp32 in the order of ranks: any floats are
                       drawn for them and compared bit for bit; for others small integers */
    double seconds; /* for one round to end */
} collectives_options;

/* What a rank works with. */
typedef struct collectives_rank {
    rank_context *context;
    pst_runtime *runtime;
    pst_device *device;
    pst_comm *comm;
    pst_stream *stream;
    pst_event *event;
    char *region;        /* device memory that the communicator knows: sources, destinations */
    size_t region_bytes; /* at least collectives_region_bytes() */
    uint64_t tickets;    /* so far */
} collectives_rank;

size_t collectives_region_bytes(const collectives_options *options);

/* Runs them; a failure is in the context, and begins with the seed and the round. */
void collectives_run(collectives_rank *rank, const collectives_options *options);

/* A few collectives of more than 4 GiB, in a region of collectives_large_bytes(). */
void collectives_run_large(collectives_rank *rank);
size_t collectives_large_bytes(void);

/* Enqueues one, with staging that it allocates; collective->ticket is set. */
pst_status collectives_launch(collectives_rank *rank, pst_collective_work *work);
void collectives_free_staging(collectives_rank *rank, pst_collective_work *work);

/* Until the stream has done all that was enqueued; PST_ETIMEDOUT. */
pst_status collectives_finish(collectives_rank *rank, double seconds);

#endif
