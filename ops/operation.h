/* A collective in flight: its tasks with all that they point to. Pooled, so that a step allocates
 * nothing. Given back by the engine's thread, never by the callback, since arenas have one user at
 * a time.
 *
 * Its memory (staging, bucket) goes back when the collective has ended; on an asynchronous device
 * already when it is launched, behind its event `finished`: the host does not wait for the device.
 */
#ifndef PST_OPS_OPERATION_H
#define PST_OPS_OPERATION_H

#include "base/atomic.h"
#include "ops/engine.h"

struct pst__operation {
    pst_collective_work work;
    pst_task task; /* the last one */
    pst_zero *engine;
    pst__queue *queue;
    pst_event *ready;    /* compute's writes that the collective reads */
    pst_event *finished; /* asynchronous devices: the collective is over on its stream */
    int launched;        /* atomic: `finished` is recorded */
    int unfinished;      /* atomic: tasks whose callbacks have not run */
    int ended;           /* atomic: all of them have, the scheduler refers to this no more */
    int failed;          /* atomic: a task did not end well: the communicator may still write */
    int failure;         /* atomic: with this pst_status, which nobody else has told */
    int is_waited;       /* compute waits for it already */
    /* (optional) a second part, behind the collective on its queue's then_lane, with the memory
     * still held */
    pst_status (*then)(pst__operation *operation, pst_stream *stream);
    void (*done)(pst__operation *operation); /* (optional) on the worker, when it went well */
    uint64_t argument;
    uint32_t group; /* whose gather this is, or PST__NO_GROUP */
    pst_lease staging;
    pst_lease unread; /* gathered here for the other ranks' sake */
    uint64_t bucket;  /* to be retired, if has_bucket */
    int has_bucket;
    pst_reduce_piece *pieces;
    size_t piece_capacity;
    pst_cast *casts; /* of the second part */
    size_t cast_count, cast_capacity;
    pst_segment *segments; /* of a gather that is no group's */
    size_t segment_capacity;
    struct pst__operation *next;
};

/* A memory's earlier use that a task waits for, and compute's writes, at most. */
#define PST__MOST_AFTER (2 * PST_LEASE_EVENTS + 2)

/* Pairs with the release when `finished` was recorded: who sees it may wait for that. */
static inline int pst__operation_is_launched(const pst__operation *operation) {
    return pst__load_acquire(&operation->launched);
}

/* The same queue for both directions where they share a communicator. */
static inline pst__queue *pst__queue_of(pst_zero *engine, pst__lane_index lane) {
    return &engine->queues[engine->one_comm ? PST__GATHER_LANE : lane];
}

/* An unused operation of this lane's communicator, its collective zeroed. */
pst_status pst__operation_take(pst_zero *engine, pst__lane_index lane, pst__operation **operation);
void pst__operation_give(pst_zero *engine, pst__operation *operation);
/* Submits it: staging, ticket, the events that it waits for. On failure it is given back. */
pst_status pst__operation_submit(pst__operation *operation, size_t bytes, pst_event *const *after,
                                 size_t after_count);
/* Compute waits for it; adds what was really waited to the stats of this direction, and traces it
 * as `name`. */
pst_status pst__operation_wait(pst__operation *operation, const char *name,
                               pst__lane_index direction);
/* Blocks until it is over, so that the host can read what it wrote. */
pst_status pst__operation_wait_end(const pst__operation *operation);
/* Blocks until it is launched, so that its memory can be given back; on the host device, over. */
pst_status pst__operation_wait_launch(pst__operation *operation);
/* Takes back what has ended, and the memory of what is launched; cheap. */
void pst__operation_reap(pst_zero *engine);
/* Makes the runtime's error out of a failed wait, so that everything later fails at once; in the
 * words of the communicator, if that knows more. */
pst_status pst__operation_lost(pst_zero *engine, pst_status status);
/* The runtime's status, after asking the communicators of an asynchronous device, whose error
 * poisons it: once a pass, for nothing else hears of it before a deadline. */
pst_status pst__operation_check_comms(pst_zero *engine);
/* The communicators go back to their owner although they can neither end these collectives nor be
 * aborted: blocks until no task calls them any more (at most PST__PATIENCE_NS, as such calls do not
 * block). The collectives never end; their memory stays. */
void pst__operation_abandon_all(pst_zero *engine);
void pst__operation_free_all(pst_zero *engine);

#endif
