/* penstock/comm.h - the interface to a communicator: collectives of one fixed set of ranks.
 *
 * A communicator is {ops, context, rank, size}. It is one queue, driven by one thread at a time,
 * and all ranks start the same collectives in the same order (their tickets). Nothing here blocks:
 * on a device whose stream is the worker (host) `start` begins and `test` asks; on an asynchronous
 * device `start` enqueues on the stream and is done. `local` (ranks as threads of one process) is
 * built in; others fill in the same table.
 */
#ifndef PENSTOCK_COMM_H
#define PENSTOCK_COMM_H

#include <penstock/device.h>
#include <penstock/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PST_COMM_API_VERSION 4u

typedef struct pst_comm pst_comm;

typedef enum pst_collective_kind {
    PST_ALL_GATHER = 0,
    PST_REDUCE_SCATTER,
    PST_ALL_REDUCE,
    PST_BROADCAST,
    PST_BARRIER,
    PST_COLLECTIVE_KIND_COUNT
} pst_collective_kind;

PST_API const char *pst_collective_name(pst_collective_kind kind); /* "all_gather", ... */

typedef enum pst_reduce_op { PST_REDUCE_SUM = 0, PST_REDUCE_MAX } pst_reduce_op;

/* all-gather: `bytes` bytes at `source + segment.source` of rank `peer` land at
 * `destination + segment.destination` here. Segments are the same on all ranks. */
typedef struct pst_segment {
    uint32_t peer;
    size_t source, destination, bytes;
} pst_segment;

/* reduce-scatter: the sum over ranks of `count` elements at byte `offset` of this rank's chunk goes
 * to `destination`. */
typedef struct pst_reduce_piece {
    size_t offset, count;
    void *destination; /* NULL: on to the next of the collective's updates */
    pst_dtype destination_dtype;
    int accumulate; /* add to what is there */
} pst_reduce_piece;

/* Rows of a table that a rank names by their numbers, others than its peers: see
 * pst_comm_ops.rows. */
typedef struct pst_table_rows {
    const int64_t *indices; /* in the device's memory, read in stream order; numbers may come
                               several times, and such as no row has. NULL: all rows */
    size_t count;
    size_t rows, row_bytes; /* of the whole table */
    size_t offset;          /* of the table in what is gathered; of a pushed source in the table */
} pst_table_rows;

/* One collective. Everything it points to lives until it has ended. Unused fields are zero. */
typedef struct pst_collective {
    pst_collective_kind kind;
    const char *name; /* of the group or bucket; for errors and traces */
    uint64_t ticket;  /* its place in this communicator's order, from 1 */
    pst_dtype dtype;  /* reductions: of the source */

    const void *source;
    size_t source_bytes; /* all-gather: equal on all ranks; reduce-scatter: bytes a chunk */
    size_t stride;       /* reduce-scatter: chunk of rank r at source + r * stride */
    void *destination;   /* all-gather; all-reduce and broadcast: in place, `count` elements */
    size_t count;        /* all-reduce, broadcast */
    pst_reduce_op reduce;
    double scale;  /* reductions by sum: factor of the sum; 0 counts as 1 */
    int root;      /* broadcast */
    int is_pushed; /* reduce-scatter; see pst_comm_ops.pushes */

    const pst_segment *segments;
    size_t segment_count;
    const pst_reduce_piece *pieces;
    size_t piece_count;
    /* In the order of the pieces without destination: what each one's sum, in place of a gradient
     * or sources, updates; see pst_comm_ops.updates. */
    const pst_adamw_piece *updates;

    const pst_table_rows *rows; /* (optional) see pst_comm_ops.rows */

    void *staging; /* scratch of at least ops->staging_bytes() bytes, NULL if that is 0 */

    /* (optional) called from any thread when `test` is worth asking again */
    void (*wake)(void *argument);
    void *wake_argument;
} pst_collective;

typedef struct pst_comm_ops {
    unsigned api_version; /* PST_COMM_API_VERSION */
    unsigned kinds;       /* bit (1 << kind) for each collective it can do */
    const char *name;

    /* Scratch memory of the device that this collective needs. */
    size_t (*staging_bytes)(pst_comm *comm, const pst_collective *collective);
    /* Begins. *request is the communicator's own; it has ended when start or test returns anything
     * but PST_PENDING. After an error the memory may still be touched, until abort returns PST_OK.
     * PST_EMISMATCH with a text naming ranks and collectives when ranks started different ones,
     * PST_EPEER when a rank is gone. */
    pst_status (*start)(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                        void **request);
    pst_status (*test)(pst_comm *comm, void *request);
    /* Ends all that is in flight with `status`, here and as far as possible on the peers. Any
     * thread. The memory of collectives in flight is not touched after it returns PST_OK;
     * PST_EBUSY: it may still be (quarantine it). */
    pst_status (*abort)(pst_comm *comm, pst_status status);
    /* PST_OK or the error that made this communicator unusable. Any thread. */
    pst_status (*status)(pst_comm *comm);
    /* Text of the last error (owned by the communicator, valid until the next call). */
    const char *(*error_text)(pst_comm *comm);
    void (*destroy)(pst_comm *comm);

    /* What one-sided communicators, on asynchronous devices, have beside that. */
    /* (optional) Where the others read a rank's source by themselves (one-sided), they may still do
     * so when its own part has ended: makes `stream` wait until all have read this rank's source of
     * the collective with this ticket, and so of all before it. Called before the source is written
     * again. May come before `start` of that ticket. Any thread, any stream of the device. NULL: a
     * collective that has ended has been read. */
    pst_status (*source_wait)(pst_comm *comm, pst_stream *stream, uint64_t ticket);
    /* (optional) The second part of a reduce-scatter, which adds up what `start` has only brought
     * into staging: so on another lane, behind `start`, while the communicator goes on with the
     * next collective. Until it has ended, source, staging and collective stay. Other kinds have no
     * second part. Any thread. NULL: `start` does all. */
    pst_status (*combine)(pst_comm *comm, const pst_collective *collective, pst_stream *stream);
    /* (optional) Sources of gathers and reduce-scatters have to lie in memory that was opened to
     * the peers, at the same distance from its begin on all ranks; up to 1 MiB of other memory is
     * copied, and free when the collective has ended. Memory that the device has allocated, of the
     * same size on all ranks, which call it together; it stays open as long as the communicator.
     * May block. */
    pst_status (*open_memory)(pst_comm *comm, void *memory, size_t bytes);
    /* (optional) Instead of `start`: this collective, the next one, runs on another communicator,
     * which has enqueued it on `stream`; here it only counts, for source_wait, and is compared as
     * those of `start` are. */
    pst_status (*pass)(pst_comm *comm, const pst_collective *collective, pst_stream *stream);
    /* (optional) Which way this collective takes, for traces, where that is not always the same: a
     * name that lives as long as the communicator. Any thread. NULL: `name`. */
    const char *(*path)(pst_comm *comm, const pst_collective *collective);
    /* (optional) Where collectives are captured into a CUDA graph in another way than they are
     * started: between these two calls, of which the second appends to `stream`, behind all else
     * in the graph, what ends each launch of it. Their tickets are PST_TICKET_CAPTURED. No
     * collective is in flight on any rank when a capture begins or a graph is launched, but graphs
     * may follow each other on one stream. NULL: as they are started. */
    pst_status (*capture_begin)(pst_comm *comm);
    pst_status (*capture_end)(pst_comm *comm, pst_stream *stream);
    /* (optional) A graph with such collectives has been launched on `stream`. */
    pst_status (*graph_launched)(pst_comm *comm, pst_stream *stream);
    /* (optional) 1: it knows reduce-scatters with `is_pushed`, of which each rank writes its chunks
     * into its peers' staging. Their source may be any memory of the device, and has been read when
     * the second part has ended; their staging is the caller's, lies in memory that was opened to
     * the peers, at the same place on all ranks, and is written from `start` on. */
    int pushes;
    /* (optional) 1: it knows updates in reduce-scatters over up to PST_ADAMW_MOST_SOURCES ranks, on
     * a device that has AdamW: its second part goes on to them, and their sums are not written. */
    int updates;
    /* (optional) 1: sources of gathers may lie within their destinations. A segment of this rank's
     * that lies where it goes is not touched, and others' parts of the source are not read. */
    int gathers_within;
    /* (optional) 1: it knows collectives with `rows`, of which each rank has named its own. Of an
     * all-gather those rows alone are read and written. Of a reduce-scatter that is pushed all
     * others are zeros in the source, and need not travel. All ranks give `rows` or none does. */
    int rows;
} pst_comm_ops;

/* The ticket of the `index`th collective, from 1, of the `capture`th capture. */
#define PST_TICKET_CAPTURED(capture, index)                                                        \
    (UINT64_C(1) << 63 | (uint64_t)(capture) << 16 | (index))
#define PST_MOST_CAPTURED 65535u /* collectives in a capture */

struct pst_comm {
    const pst_comm_ops *ops;
    void *context;
    int rank, size;
};

/* Which way a collective takes: "ce", "nccl", ...; see `path`. Any thread. */
PST_API const char *pst_comm_path(pst_comm *comm, const pst_collective *collective);

/* ---- local: ranks as threads of one process -------------------------------------------------- */

typedef struct pst_local_world pst_local_world;

/* A meeting place for `size` ranks; lives until destroyed, after its communicators. Each rank's
 * communicator belongs to a runtime of its own or shares one; `runtime` here gives the heap. */
PST_API pst_status pst_local_world_create(pst_runtime *runtime, int size, pst_local_world **world);
PST_API void pst_local_world_destroy(pst_local_world *world);

/* Communicator number `channel` of this rank (two communicators of one world do not mix). Destroy
 * it with comm->ops->destroy. */
PST_API pst_status pst_local_comm_create(pst_local_world *world, pst_runtime *runtime, int rank,
                                         int channel, pst_comm **comm);

/* ---- a collective as a task's work ----------------------------------------------------------- */

typedef struct pst_collective_work {
    pst_comm *comm;
    pst_collective collective;
    void *request;
    pst_status status; /* how it ended */
    int combine_apart; /* the second part (see pst_comm_ops) is a task of its own */
} pst_collective_work;

/* Work that runs `work->collective`; `work` lives until the task has ended. A second part, if the
 * communicator has one, comes right behind on the same stream unless `combine_apart` is set. */
PST_API pst_work pst_collective_as_work(pst_collective_work *work);

/* Work that runs the second part: for a task behind that of pst_collective_as_work, on a lane of
 * the same device. Nothing to do, and no error, where there is no second part. */
PST_API pst_work pst_combine_as_work(pst_collective_work *work);

#ifdef __cplusplus
}
#endif
#endif
