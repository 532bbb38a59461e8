/* What collectives.py calls by ctypes: collectives of this library on a torch stream, each as a
 * training step has it. Functions return 0 or an error whose text collectives_error() has. */
#ifndef BENCH_GPU_COLLECTIVES_H
#define BENCH_GPU_COLLECTIVES_H

#include <penstock/status.h>
#include <stddef.h>

typedef struct collectives collectives;

typedef int (*collectives_exchange)(void *context, const void *mine, size_t bytes, void *all);

/* comm, one of these; all ranks call it:
 * "nccl", "nccl-gaps" (its buckets' chunks are not filled to the end);
 * "ce", "ce-pass" (sums pass through the cache);
 * "crossover". */
PST_API int collectives_open(const char *comm, int rank, int size, int ordinal,
                             collectives_exchange exchange, collectives **opened);
PST_API void collectives_close(collectives *own);
PST_API const char *collectives_error(const collectives *own);

/* `native`: the stream that all below is enqueued on. */
PST_API int collectives_use_stream(collectives *own, void *native);

/* Device memory of `bytes`, known to the communicator; one piece, given back by close. */
PST_API int collectives_memory(collectives *own, size_t bytes, void **memory);

/* `chunk` bytes of every rank from `source` on to `destination`. */
PST_API int collectives_gather(collectives *own, const void *source, size_t chunk,
                               void *destination);

/* Copies `size` chunks of bfloat16 gradients, `chunk` bytes each, into the bucket, scaled by
 * 1 / size (here or when they are summed); sums the chunks of all ranks; adds this rank's to the
 * fp32 `target`. Two buckets of size * chunk bytes at `buckets`, used in turn. */
PST_API int collectives_reduce(collectives *own, const void *gradients, size_t chunk, void *buckets,
                               float *target);

/* Which parts of a reduction collectives_reduce runs from now on, on all ranks alike: what is left
 * out takes no time, and the sums are wrong. */
enum {
    COLLECTIVES_COPY_IN = 1,
    COLLECTIVES_PULL = 2,
    COLLECTIVES_SUM = 4,
    COLLECTIVES_ALL_PARTS = 7
};
PST_API int collectives_choose(collectives *own, unsigned parts);

/* Makes the stream wait for all that was begun. */
PST_API int collectives_join(collectives *own);

/* What has to be true once the stream has been waited for. */
PST_API int collectives_status(collectives *own);

#endif
