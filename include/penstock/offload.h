/* penstock/offload.h - offload and reload: tensors leave the device for pinned host memory and come
 * back, each direction on a lane of its own.
 *
 * A key names what is stored: an activation, a parameter, an optimizer state. `store` copies device
 * memory to the host, `load` copies it back, any number of times; both return at once. What has the
 * same key is in order: a load comes behind its store, the next store behind the loads. Host memory
 * stays with its key until that is dropped, so that a step which stores what the one before has
 * stored takes no memory and registers none. Sizes are bytes.
 */
#ifndef PENSTOCK_OFFLOAD_H
#define PENSTOCK_OFFLOAD_H

#include <penstock/graph.h>
#include <penstock/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PST_OFFLOAD_MOST_AFTER 4u /* events that a load can name */

/* Used by one thread at a time, destroyed before its runtime. */
typedef struct pst_offload pst_offload;

typedef struct pst_offload_options {
    size_t size;        /* sizeof(pst_offload_options) */
    const char *name;   /* in errors and traces; copied; NULL: "offload" */
    pst_device *device; /* NULL: the runtime's host device */
    pst_lane *compute;  /* BORROWED lane; NULL: the calling thread of the host device */
    int pumped;         /* 1: the lanes are pumped (no worker thread) */
    size_t piece_bytes; /* in which host memory is registered, at least; 0: 256 MiB */
    /* (optional) The memory that was given with `owner` to a store or a load is not used any more,
     * or, on an asynchronous device, not by anything that compute's stream does not come behind
     * already: it may go back to an allocator whose memory compute uses next. Once for each store
     * and load that returned PST_OK, from within a function of this object. */
    void (*released)(void *context, void *owner);
    void *released_context;
} pst_offload_options;

/* Registers no memory yet. PST_EINVAL, PST_ENOMEM, PST_ESYSTEM and what the device returns; then
 * *offload is NULL. */
PST_API pst_status pst_offload_create(pst_runtime *runtime, const pst_offload_options *options,
                                      pst_offload **offload);
/* Blocks until what is in flight has ended (at most 10 seconds; then a warning is logged, and the
 * memory that a copy may still use is not freed). NULL is fine. */
PST_API void pst_offload_destroy(pst_offload *offload);

/* Has at least `bytes` of host memory registered in one piece, before training, because
 * page-locking is slow (about 0.4 s a GiB). Blocks. PST_ENOMEM. */
PST_API pst_status pst_offload_reserve(pst_offload *offload, size_t bytes);

/* Copies [source, source + bytes) to the host, behind all that compute was given so far. `source`
 * keeps its contents until `released` says so. Blocks only where host memory has to be registered:
 * when the key is new or has another size. PST_EINVAL, PST_ENOMEM, a poisoned runtime's status and
 * what the device returns; then nothing is stored, and `released` is not called for this. */
PST_API pst_status pst_offload_store(pst_offload *offload, uint64_t key, const void *source,
                                     size_t bytes, void *owner);

/* Host memory of the caller becomes what is stored under `key`: loads read it until it is dropped
 * or stored anew, and until the loads in flight then have ended. Not pinned, it is copied slowly
 * and blocks the lane. PST_EINVAL, PST_ENOMEM, a poisoned runtime's status. */
PST_API pst_status pst_offload_adopt(pst_offload *offload, uint64_t key, const void *memory,
                                     size_t bytes);

/* Copies what is stored to `destination`, behind its store and behind `after`: recorded events of
 * the device, at most PST_OFFLOAD_MOST_AFTER, which live until the load has ended; NULL: all that
 * compute was given so far. `bytes` is what was stored. `destination` is written until `released`
 * says otherwise. Does not block. PST_ESTATE when nothing is stored, PST_EINVAL, PST_ENOMEM, a
 * poisoned runtime's status and what the device returns; `released` is then not called for this. */
PST_API pst_status pst_offload_load(pst_offload *offload, uint64_t key, void *destination,
                                    size_t bytes, pst_event *const *after, size_t after_count,
                                    void *owner);

/* Make compute wait for the key's last store or load; PST_OK at once when that has ended or is
 * waited for already. On an asynchronous device this blocks only until the copy is launched, on the
 * host device until it is done. PST_ESTATE when there was none, PST_ETIMEDOUT, and the copy's
 * status. */
PST_API pst_status pst_offload_wait_store(pst_offload *offload, uint64_t key);
PST_API pst_status pst_offload_wait_load(pst_offload *offload, uint64_t key);

/* Blocks until the key's copies have ended; then the host may read and write [*memory, *memory +
 * *bytes) until the next store, load or drop. PST_ESTATE when nothing is stored, PST_ETIMEDOUT, and
 * a copy's status. */
PST_API pst_status pst_offload_host_memory(pst_offload *offload, uint64_t key, void **memory,
                                           size_t *bytes);

/* Where that memory is, without waiting: its contents are there behind the store, and it stays
 * there until the key is dropped or stored with another size. PST_ESTATE when nothing is stored. */
PST_API pst_status pst_offload_address(pst_offload *offload, uint64_t key, void **memory,
                                       size_t *bytes);

/* Forgets a key: its host memory is free for others once the copies in flight have ended. Does not
 * block. An unknown key is fine. */
PST_API void pst_offload_drop(pst_offload *offload, uint64_t key);

/* Calls `released` for what has ended by now. Each store, load and wait does so; this is for times
 * without any. Never blocks. */
PST_API void pst_offload_reap(pst_offload *offload);

typedef struct pst_offload_stats {
    size_t size; /* sizeof(pst_offload_stats); where it is not set, nothing is written */
    uint64_t stores, store_bytes;
    uint64_t loads, load_bytes;
    uint64_t exposed_ns; /* how long waits have blocked the calling thread */
    size_t keys;         /* with something stored */
    size_t in_flight;    /* copies that nobody has seen the end of */
    size_t host_bytes;   /* host memory of keys, and of copies in flight */
    size_t host_peak;
    size_t host_registered;
} pst_offload_stats;

PST_API void pst_offload_get_stats(pst_offload *offload, pst_offload_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
