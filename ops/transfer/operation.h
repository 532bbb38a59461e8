/* A collective in flight: its tasks with all that they point to. Pooled, so that a step allocates
 * nothing. Given back by the executor's thread, never by the callback, since arenas have one user
 * at a time.
 *
 * Its memory (staging, bucket) goes back when the collective has ended; on an asynchronous device
 * already when it is launched, behind its event `finished`: the host does not wait for the device.
 */
#ifndef PST_OPS_TRANSFER_OPERATION_H
#define PST_OPS_TRANSFER_OPERATION_H

#include "base/atomic.h"
#include "ops/transfer/carrier.h"
#include "ops/transfer/casts.h"
#include "ops/transfer/copies.h"
#include "ops/transfer/timings.h"
#include "ops/transfer/updates.h"

/* A memory's earlier use that a task waits for, compute's writes, an upload and names of rows, at
 * most. */
#define PST__MOST_AFTER (3 * PST_LEASE_EVENTS + 4)

struct pst__operation {
    pst_collective_work work;
    pst_task task;                     /* the last one */
    pst_launch launch;                 /* that it is of */
    pst_event *after[PST__MOST_AFTER]; /* that a step of a program waits for on its stream */
    size_t after_count;
    pst__carrier *carrier;
    pst__queue *queue;
    pst_event *ready;    /* compute's writes that the collective reads */
    pst_event *finished; /* asynchronous devices: the collective has ended on its stream */
    int launched;        /* atomic: `finished` is recorded */
    int unfinished;      /* atomic: tasks whose callbacks have not run */
    int ended;           /* atomic: all of them have, the scheduler refers to this no more */
    int failed;          /* atomic: a task did not end well: the communicator may still write */
    int failure;         /* atomic: with this pst_status, which nobody else has reported */
    int is_waited;       /* compute waits for it already */
    /* (optional) what makes the source, before the collective, and what that waits for: events and
     * a ticket, see transient.c */
    pst_status (*make_source)(pst__operation *operation, pst_stream *stream);
    pst_event *source_free;  /* NULL: nothing has read its memory before */
    pst_event *source_ended; /* recorded behind the collective; NULL: nobody asks */
    uint64_t source_read;    /* whose readers have to be through; 0: nobody's */
    /* (optional) a second part, behind the collective and its sums on its queue's then_lane, with
     * the memory still held */
    pst_status (*then)(pst__operation *operation, pst_stream *stream);
    void (*done)(pst__operation *operation); /* (optional) on the worker, when it went well */
    void *owner;                             /* theirs, with: */
    uint64_t argument;
    const char *wait_name; /* interned: what compute's wait for it is called; NULL: nothing */
    pst__timing *timing;   /* from its start to its end, on its streams; NULL: nobody asks */
    pst_lease staging;
    pst_lease sums; /* scratch for the second part */
    /* Between replicas: what another operation sums up, and this one sums up further. */
    const pst__operation *behind; /* that one, submitted right before; NULL: none */
    int goes_on;                  /* there is one behind this, with which it is over */
    pst_lease summed;
    size_t delivery_count; /* of its pieces, which `then` delivers */
    int is_for_others;     /* nobody here wants what it gathers */
    pst_lease unread;      /* where that goes */
    uint64_t bucket;       /* to be retired, if has_bucket */
    int has_bucket;
    pst_reduce_piece *pieces;
    size_t piece_capacity;
    pst__casts casts;      /* of the second part */
    pst__updates updates;  /* the same */
    pst__copies copies;    /* the same */
    pst_table_rows rows;   /* of its collective, where that has some */
    pst_segment *segments; /* of a gather, where its owner has none that lasts */
    size_t segment_capacity;
    struct pst__operation *next;
};

/* Pairs with the release when `finished` was recorded: who sees it may wait for that. */
static inline int pst__operation_is_launched(const pst__operation *operation) {
    return pst__load_acquire(&operation->launched);
}

/* An unused operation of this lane's communicator, its collective zeroed. */
pst_status pst__operation_take(pst__carrier *carrier, pst__lane_index lane,
                               pst__operation **operation);
void pst__operation_give(pst__carrier *carrier, pst__operation *operation);
/* Submits it: staging, ticket, the events that it waits for. On failure it is given back. */
pst_status pst__operation_submit(pst__operation *operation, size_t bytes, pst_event *const *after,
                                 size_t after_count);
/* The same, behind what the operation that was submitted last does, which is of another lane. */
pst_status pst__operation_submit_behind(pst__operation *operation, const pst__operation *before,
                                        size_t bytes);
/* What is delivered where; its pieces are the collective's when it is submitted. */
pst_status pst__operation_add_piece(pst__operation *operation, const pst_reduce_piece *piece);
/* Behind an all-reduce: its sums go to the first `count` pieces. */
pst_status pst__operation_deliver(const pst__operation *operation, size_t count,
                                  pst_stream *stream);
/* The capture in which they were launched has ended: so have they. */
void pst__operation_end_captured(pst__carrier *carrier);
/* Compute waits for it; what was really waited is added to the carrier's waits, and traced. */
pst_status pst__operation_wait(pst__operation *operation);
/* Compute waits for all reductions of gradients. */
pst_status pst__operation_wait_reductions(pst__carrier *carrier);
/* Blocks until they have ended, so that the host can read what they wrote. */
pst_status pst__operation_wait_reduced(pst__carrier *carrier);
/* Compute waits for those up to a ticket, which were submitted a while ago: rather than until they
 * have ended, the host waits until they are launched. */
pst_status pst__operation_follow_reductions(pst__carrier *carrier, uint64_t last);
/* Blocks until its tasks have ended; compute (NULL: the calling thread) as in pst_task_wait. */
pst_status pst__operation_wait_task(const pst__operation *operation, pst_lane *compute);
/* Blocks until it has ended, so that the host can read what it wrote. In traces the wait has this
 * interned name (NULL: it is not there). */
pst_status pst__operation_wait_end(const pst__operation *operation, const char *name);
/* Blocks until it is launched, so that its memory can be given back; on the host device, ended. */
pst_status pst__operation_wait_launch(pst__operation *operation);
/* The same as pst__operation_wait_launch, of all that is in flight. */
pst_status pst__operation_wait_launches(pst__carrier *carrier);
/* A call of the executor's ends. On an asynchronous device what it has submitted is launched when
 * this returns, where it has to come in the order of what the caller launches itself
 * (ops/README.md). Of what compute is to wait for, the wait is added to what is exposed and, where
 * no stalls are measured, traced; it is not in the carrier's late launches. A deadline that passes
 * poisons the runtime; of other failures, whoever waits for the operation is told. */
void pst__operation_keep_order(pst__carrier *carrier);
/* What a program calls for its steps. */
const pst__operation_calls *pst__operation_calls_of(const pst__carrier *carrier);
/* The pass goes on by itself: neither program nor script from here on. */
void pst__operation_leave_program(pst__carrier *carrier);
/* A graph has been launched on compute's stream: it is in flight until it has ended. */
pst_status pst__operation_follow_graph(pst__carrier *carrier);
/* Takes back what has ended, and the memory of what is launched; cheap. */
void pst__operation_reap(pst__carrier *carrier);
/* The same where compute has waited for all of a queue: on the host a callback may be behind its
 * task's end, and is waited for until no bucket is held. */
void pst__operation_reap_buckets(pst__carrier *carrier);
/* The runtime's status, after asking the communicators of an asynchronous device, whose error
 * poisons it: once a pass, for nothing else notices it before a deadline. */
pst_status pst__operation_check_comms(pst__carrier *carrier);
/* The communicators go back to their owner although they can neither end these collectives nor be
 * aborted: blocks until no task calls them any more (at most PST__PATIENCE_NS, as such calls do not
 * block). The collectives never end; their memory stays. */
void pst__operation_abandon_all(pst__carrier *carrier);
void pst__operation_free_all(pst__carrier *carrier);

#endif
