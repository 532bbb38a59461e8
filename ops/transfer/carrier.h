/* What carries an executor's collectives: the lanes and queues of its communicators, its growing
 * graph, the memory that all executors need, and the watch over the communicators. An executor has
 * one, and decides what goes over it and when. One thread at a time. */
#ifndef PST_OPS_TRANSFER_CARRIER_H
#define PST_OPS_TRANSFER_CARRIER_H

#include "base/error.h"
#include "base/heap.h"
#include "mem/arena.h"
#include "ops/transfer/program.h"
#include "ops/transfer/stalls.h"
#include "sched/device/device.h"

#include <penstock/comm.h>
#include <penstock/graph.h>
#include <penstock/memory.h>
#include <penstock/runtime.h>

typedef struct pst__operation pst__operation;

/* On asynchronous devices: when is an operation launched before the executor's call that submits it
 * returns? Each holds of the passes that the one before it holds of, too. */
typedef enum pst__callers_order {
    PST__IN_NO_PASS = 0,
    PST__WITHOUT_PROGRAM,
    PST__IN_ALL_PASSES
} pst__callers_order;

typedef struct pst__carrier_options {
    const char *name;
    pst_comm *gather_comm, *reduce_comm; /* may be one */
    pst_comm *replica_comm;              /* NULL: there is one replica */
    pst_device *device;                  /* NULL: the runtime's host */
    pst_lane *compute;                   /* BORROWED; NULL: the calling thread, on the host only */
    int pumped;
    pst__callers_order callers_order;
    int time_waits; /* of compute's stream, even untraced */
    /* Where device memory comes from; NULL: from the device. */
    pst_status (*segment_alloc)(void *context, size_t bytes, void **memory);
    void (*segment_free)(void *context, void *memory, size_t bytes);
    void *segment_context;
} pst__carrier_options;

typedef enum pst__lane_index {
    PST__GATHER_LANE = 0,
    PST__REDUCE_LANE,
    PST__REPLICA_LANE, /* what is reduced between replicas */
    PST__LANE_COUNT
} pst__lane_index;

/* A communicator's queue: its lane, its tickets, its collectives in flight (oldest first). */
typedef struct pst__queue {
    pst_comm *comm;
    pst_lane *lane;                     /* NULL: this direction has no communicator of its own */
    pst_lane *sum_lane;                 /* of reductions' second parts; NULL where they have none */
    pst_lane *then_lane;                /* of operations' `then`; NULL where nobody has one */
    uint64_t tickets, captured_tickets; /* the latter of this capture */
    pst__operation *oldest, *newest;
    pst__operation *holding; /* the first one that has its memory still */
} pst__queue;

/* A reduction that is being put together: one a dtype. */
typedef struct pst__open_bucket {
    pst__operation *operation;
    size_t whole_bytes;
    uint64_t number;          /* of all buckets so far; 0: none is open */
    int has_slots;            /* memory of the carrier's buckets that is filled */
    const char *first, *last; /* of what it carries, by the executor's names */
    unsigned names;           /* how many there are */
} pst__open_bucket;

/* Where gradients are copied into buckets. On an asynchronous device that is a stream of its own:
 * compute goes on beside the copies. On others it is compute's. The same of buckets that peers
 * write to: which of them are free is waited for apart, as compute waits for copies. Within a
 * capture that is the stream which what is pushed goes out on: waits that no work follows would add
 * up there, each of them an edge to all that is pushed later. */
typedef struct pst__filling {
    pst_stream *stream, *landing; /* compute, or: */
    pst_stream *own, *own_landing;
    pst_event *reached; /* compute, by the latest gradients */
    int is_landing;     /* behind that */
    pst_event *filled;  /* their copies */
    int is_apart;       /* compute does not wait for `filled` yet */
} pst__filling;

/* What waits have cost, in nanoseconds. */
typedef struct pst__waits {
    uint64_t exposed_gather_ns, exposed_reduce_ns; /* compute's thread has waited */
    uint64_t device_gather_ns, device_reduce_ns;   /* compute's stream has, where that is timed */
    uint64_t late_launches; /* waits of the host for a launch, on asynchronous devices */
} pst__waits;

/* The largest parameter: the bytes of more would overflow, padded and for all ranks. */
#define PST__MOST_ELEMENTS (SIZE_MAX >> 8)

#define PST__MOST_BUCKETS 4u /* of a dtype, where they are all there is */

typedef struct pst__carrier {
    pst_runtime *runtime;
    const pst__heap *heap;
    pst__error *error;
    char *name;
    pst__carrier_options options;
    pst_device *device;
    pst_stream *compute;      /* the stream of the compute lane, or of the calling thread */
    size_t world, rank;       /* of this replica's ranks */
    size_t replicas, replica; /* how many there are, and which one this is */
    int asynchronous;         /* the device keeps its streams' order itself */
    int one_comm;             /* both directions share a communicator */
    int is_abandoned;         /* atomic: tasks ask the communicators no more */

    pst_graph *graph;      /* growing; every collective is one of its tasks, but those of: */
    pst__program *program; /* of the pass that runs; NULL: none, or the pass has left it */
    pst__script script;    /* what the pass submits, where that is to become a program */
    pst__queue queues[PST__LANE_COUNT];
    pst__operation *spare, *last_spare;
    uint64_t gather_ticket; /* of the last gather of what peers read */

    pst_arena *gathered;
    pst_arena *staging; /* scratch of collectives */
    pst_arena *sources; /* communication copies and buckets: what peers read */
    pst_buckets *buckets;
    int keeps_tickets; /* the buckets are fixed: by their ids, of their last reductions */
    uint64_t bucket_tickets[PST__MOST_BUCKETS * PST_DTYPE_COUNT + 1];
    pst_arena *bucket_arena; /* theirs, where they are opened to peers by dtype: */
    size_t opened_bytes;
    int has_opened[PST_DTYPE_COUNT];
    pst__open_bucket open[PST_DTYPE_COUNT];
    uint64_t bucket_count; /* begun so far */
    pst__filling filling;
    pst_stream *copying; /* beside compute, of communication copies; NULL: these are on compute's */
    pst_event *reached;  /* compute's position, for the host to wait for */
    pst_stream *outside; /* compute's own stream while another one is captured; NULL: none is */
    uint64_t captures;   /* begun so far, the same number on all ranks */
    int is_pushed_to;    /* ranks write to buckets of each other's */
    pst_event *graph_begins; /* compute, before the latest graph */
    int is_behind_graph;     /* a graph has run that no lane was put in order with */
    int is_beside_graph;     /* lanes have run what no graph was put in order with */
    pst__stalls stalls;
    pst__waits waits;
} pst__carrier;

/* ---- life.c ---------------------------------------------------------------------------------- */
/* On failure what has been made is freed by pst__carrier_free. */
pst_status pst__carrier_create(pst_runtime *runtime, const pst__carrier_options *options,
                               pst__carrier *carrier);
/* A lane for what comes behind this queue's collectives: that of their sums, or one of its own. On
 * the host it is the queue's, which has to be through with one before it begins the next. */
pst_status pst__carrier_add_then_lane(const pst__carrier *carrier, pst__queue *queue,
                                      const char *name);
/* A stream to make communication copies on, beside compute, where the device is asynchronous. */
pst_status pst__carrier_add_copying(pst__carrier *carrier);
/* An arena of device memory; segment_bytes as in pst_arena_options. */
pst_status pst__carrier_create_arena(const pst__carrier *carrier, const char *name,
                                     size_t segment_bytes, pst_arena **arena);
void pst__carrier_free(pst__carrier *carrier);
/* Ends what is in flight, by waiting and else by an abort; 0: a collective may still write. */
int pst__carrier_quiesce(pst__carrier *carrier);
/* The first step of destroying an executor: nobody calls it, or its communicators for it, from here
 * on. 1: its memory can be freed. 0: a communicator may still write there, and the log says so. */
int pst__carrier_close(pst__carrier *carrier);
#define PST__PATIENCE_NS 2000000000u /* with what should end by itself, and with an abort */
/* Blocks until compute has done what it was given so far; 0: not within `patience_ns`. */
int pst__carrier_wait_compute(pst__carrier *carrier, uint64_t patience_ns);
/* The same of another stream. */
int pst__carrier_wait_stream(const pst__carrier *carrier, pst_stream *stream, uint64_t patience_ns);
/* Compute's position now. */
pst_status pst__carrier_record(pst__carrier *carrier, pst_event *event);
/* A failure that leaves the ranks with different sequences: nothing may go on, here and elsewhere.
 * Returns `status`. */
pst_status pst__carrier_give_up(pst__carrier *carrier, pst_status status);
#define pst__carrier_fail(carrier, status, format, ...)                                            \
    pst__fail((carrier)->error, (status), "rank %zu, engine '%s': " format,                        \
              pst__carrier_number(carrier), (carrier)->name, __VA_ARGS__)
/* The same, with what the device says. */
#define pst__carrier_fail_device(carrier, status, format, ...)                                     \
    pst__carrier_fail(carrier, status, format ": %s %s", __VA_ARGS__, pst_status_text(status),     \
                      pst__device_text((carrier)->device))

/* The same queue for both directions where they share a communicator. */
static inline pst__queue *pst__queue_of(pst__carrier *carrier, pst__lane_index lane) {
    const int is_shared = carrier->one_comm && lane == PST__REDUCE_LANE;
    return &carrier->queues[is_shared ? PST__GATHER_LANE : lane];
}

/* Of all replicas' ranks: how many there are, and which one this is, as others call it. */
static inline size_t pst__carrier_ranks(const pst__carrier *carrier) {
    return carrier->world * carrier->replicas;
}

static inline size_t pst__carrier_number(const pst__carrier *carrier) {
    return carrier->replica * carrier->world + carrier->rank;
}

static inline int pst__carrier_is_alone(const pst__carrier *carrier) {
    return pst__carrier_ranks(carrier) == 1;
}

/* Whether gathers are copies that the device's own processors make, beside compute. */
static inline int pst__carrier_copies_locally(const pst__carrier *carrier) {
    return carrier->world == 1 && carrier->asynchronous;
}

/* ---- capture.c: collectives as parts of a CUDA graph ----------------------------------------- */
/* Blocks until nothing is in flight, on the host and on the device. */
pst_status pst__carrier_drain(pst__carrier *carrier);
/* The native stream, which is under capture, is compute's until the end of the capture: what is
 * submitted meanwhile is launched by the calling thread, into the graph. Nothing is in flight. */
pst_status pst__carrier_begin_capture(pst__carrier *carrier, void *native);
/* Joins all streams to the captured one. Whatever it returns, compute's own stream is back. */
pst_status pst__carrier_end_capture(pst__carrier *carrier);
/* Around a launch of the graph on compute's stream: what the lanes have done comes before it. What
 * they do next comes behind it, and begins with pst__carrier_join_graph. */
pst_status pst__carrier_before_graph(pst__carrier *carrier);
pst_status pst__carrier_after_graph(pst__carrier *carrier);
pst_status pst__carrier_join_graph(pst__carrier *carrier);

/* ---- peers.c: memory that peers read by themselves ------------------------------------------- */
/* Peers may read it over this communicator. Blocks; all ranks. */
pst_status pst__open_to_peers(pst__carrier *carrier, pst_comm *comm, const pst_lease *memory);
/* A segment of the arena's own, of at least so many bytes, over both communicators: at the same
 * offset on all ranks. */
pst_status pst__open_segment(pst__carrier *carrier, pst_arena *arena, size_t bytes,
                             pst_lease *opened);
/* The stream waits until no peer reads the source of this ticket any more; 0: of none. */
pst_status pst__wait_readers(pst__carrier *carrier, pst_comm *comm, pst_stream *stream,
                             uint64_t ticket);
/* Compute waits until no peer reads any source of this rank's. */
pst_status pst__wait_all_readers(pst__carrier *carrier);
/* Compute waits until no peer reads what was gathered from so far. */
pst_status pst__wait_gather_readers(pst__carrier *carrier);
/* An operation, not submitted yet, that gathers `bytes` of the pinned memory of each rank of this
 * lane's communicator to behind them, in the order of ranks. */
pst_status pst__take_gather_of_bytes(pst__carrier *carrier, pst__lane_index lane, const char *name,
                                     void *memory, size_t bytes, pst__operation **operation);
/* The `bytes` of host memory of each rank of all replicas, in the order of their numbers. Blocks.
 */
pst_status pst__gather_bytes(pst__carrier *carrier, const char *name, const void *own, size_t bytes,
                             void *everyone);

/* ---- life.c: copies of gradients into buckets ------------------------------------------------ */
/* Around copies: behind what compute was given so far, and behind the copies before. */
pst_status pst__fill_begin(pst__carrier *carrier);
pst_status pst__fill_end(pst__carrier *carrier);
/* Compute waits for the copies that have begun. */
pst_status pst__fill_join(pst__carrier *carrier);
/* What is pushed next goes out behind compute, as the copies do; and behind the copies so far. */
pst_status pst__fill_land(pst__carrier *carrier);
pst_status pst__fill_land_behind(pst__carrier *carrier);

#endif
