/* penstock/zero.h - the ZeRO engine: who holds which parameters, when they are gathered, released
 * and reduced. Knows nothing of torch: parameters are names, shapes and memory.
 *
 * Rows: a parameter of shape [rows, ...] is sharded by rows as torch.chunk does it: with
 * c = ceil(rows / world), rank r holds rows [min(r*c, rows), min((r+1)*c, rows)); the last ranks
 * may hold fewer or none.
 *
 * Use of an engine: add parameters and groups, seal, bind the shards; then for each pass
 *
 *     pst_zero_begin_forward
 *         gather, wait ... compute ... release            for each use of a group
 *     pst_zero_end_forward
 *     pst_zero_begin_backward
 *         gather, wait ... compute ... gradients, release  for each group
 *     pst_zero_end_backward
 *     pst_zero_updated                                     after the optimizer changed the shards
 *
 * One thread at a time calls an engine (which one may change). These may block: wait,
 * end_backward, seal, compile, make_drafts, drain and destroy; end_forward where shards are on the
 * host; begin_forward behind a pass that was broken off; gather in a backward of several forwards;
 * and on asynchronous devices, as below, begin_forward, end_forward, gather and gradients. A
 * binding drops its interpreter's lock around them. Every choice of a collective depends on the
 * order of these calls and on sizes, and a plan's also on times and budgets that the ranks have
 * agreed on, never on a rank's own, so that it is the same on all of them.
 *
 * On an asynchronous device all of this is in the order of the compute stream: what a call says of
 * memory holds for what the stream is given after it. There `wait` and a backward block until
 * collectives are launched, as do a forward's begin and end and gather by
 * options.in_callers_order, never until they are over, with these exceptions, in which a backward
 * that reduces waits on the host for what all ranks had in it: passes without a plan (their end
 * waits for the ranks' times, too, and in stage 3 for compute, for at most two seconds); as long
 * as a trainable parameter that the forward used had no gradient on any rank, or a group's
 * gradients were reported more than once; and when the host is three such backwards ahead of the
 * device.
 */
#ifndef PENSTOCK_ZERO_H
#define PENSTOCK_ZERO_H

#include <penstock/comm.h>
#include <penstock/graph.h>
#include <penstock/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct pst_zero pst_zero;

#define PST_ZERO_ALIGNMENT 128u /* bytes, of parameters in shards, gathered groups and slots */

typedef struct pst_zero_options {
    size_t size;      /* sizeof(pst_zero_options) */
    const char *name; /* of the engine; copied */
    int stage; /* 1: gradients stay whole until a backward that reduces; 2: the same collectives,
                  parameters whole; 3: parameters sharded too. 1 and 2 keep gathered parameters
                  from step to step and gather what pst_zero_updated made stale. */
    pst_comm *gather_comm;   /* both owned by the caller, alive until the engine is destroyed; */
    pst_comm *reduce_comm;   /* two communicators, or the same one twice: then, and on asynchronous
                                devices, gathers and reductions of a backward have one order: by
                                plan, and without one reductions go out at end_backward only */
    pst_device *device;      /* NULL: the runtime's host device */
    pst_lane *compute;       /* BORROWED lane; NULL: the calling thread of the host device */
    int pumped;              /* 1: lanes are pumped (no worker thread) */
    uint32_t prefetch_ahead; /* groups gathered ahead of their use once a pass was recorded */
    size_t prefetch_bytes;   /* and at most so many bytes gathered or in flight; 0: no limit */
    size_t bucket_bytes;     /* of gradients a rank's chunk that travel together; 0: 8 MiB */
    size_t part_bytes;       /* of a rank's chunk of a group's gradients: what is more travels in
                                parts, so that buckets stay small; 0: what half of all gradients,
                                by bytes, need; at least bucket_bytes, at most 32 MiB */
    /* See memory.h. Called by the threads that call the engine. Where a communicator opens memory
     * to peers, it is asked for 16 MiB or more at once, and gives memory that the device's
     * memory_export takes, of that size rounded up as the device rounds it. */
    pst_status (*segment_alloc)(void *context, size_t bytes, void **memory);
    void (*segment_free)(void *context, void *memory, size_t bytes);
    void *segment_context;
    /* Where the reduced gradient of this group goes: memory of layout.gradient_bytes that lives
     * until end_backward (on an asynchronous device until compute gets there); *accumulate = 1 adds
     * to what is there. Called in `gradients` and `end_backward`.
     */
    pst_status (*gradient_target)(void *context, uint32_t group, void **memory, int *accumulate);
    /* Optional, and asked for one rank alone: the sources given to `gradients` for this group, of
     * its dtype and none of a trainable parameter missing, are its reduced gradients. 1: the caller
     * keeps them as such, and neither gradient_target nor gradients_consumed is called for them; 0:
     * as if there were several ranks. Called in `gradients`. */
    int (*gradients_kept)(void *context, uint32_t group);
    /* The sources given to `gradients` for this group are not needed any more (on an asynchronous
     * device: behind what the compute stream was given so far). Called in `gradients`, and on
     * such a device when later ones are reported; for all of them by the end of `end_backward`. */
    void (*gradients_consumed)(void *context, uint32_t group);
    void *callback_context;
    int time_waits; /* 1: device_gather_ns and device_reduce_ns of the stats are taken all the time;
                       0: while the runtime is traced */
    /* (optional) The ranks of all replicas that have this rank's shards, where the ranks of
     * gather_comm are one replica of several: its rank is the replica's number. What a bucket's
     * reduction has summed is summed between replicas behind it, so that gradients are means over
     * all ranks of all replicas, which call alike. A communicator of its own with all-reduces and
     * all-gathers of any memory, owned by the caller, alive until the engine is destroyed. In texts
     * rank r of replica k is then rank k * (size of gather_comm) + r. */
    pst_comm *replica_comm;
    /* Where reductions' communicator pushes (pst_comm_ops.pushes): gradients of parameters whose
     * rows all ranks share evenly, with at least so many bytes a rank, go out from where they lie,
     * and are consumed when they have been added up; 0: 1 MiB; SIZE_MAX: none. */
    size_t push_bytes;
    /* 1: shards, and what gradient_target gives, are pinned memory of the host, for an optimizer
     * that works there. The device has a copy of each shard, in gather_dtype, which comes up when a
     * forward begins behind an update, beside the groups before (but see transient_copies); reduced
     * gradients go down behind their reductions. end_forward blocks until shards may be written,
     * end_backward until the gradients are there. Nothing is updated in backwards. Alike on all
     * ranks. */
    int shards_on_host;
    /* 1: communication copies, and those of shards on the host, do not stay: each gather makes its
     * own, on a stream beside compute, in memory that gathers take in turn: as much as the largest
     * copy, or three usual ones. One rank alone gathers, too, then. Alike on all ranks. */
    int transient_copies;
    /* Writes what is to be gathered of this rank's part of a group that is `filled` to `copy`, of
     * layout.shard_bytes / (bytes of dtype) elements of gather_dtype, which lie as those of the
     * shard do; on the compute stream, behind what that was given. Called in begin_forward behind
     * an update, or in `gather`, by the thread that calls these, which return its error. Not called
     * by `updated`: what it reads may be written until a forward begins. */
    pst_status (*fill_copy)(void *context, uint32_t group, void *copy);
    /* Asynchronous devices. 1: the calling thread also launches collectives of other communicators
     * during passes. A call then returns only once what it has submitted is launched, so that on
     * all ranks these and those are launched in the order of the program. 0: this holds only in
     * passes that no program is launched for: the first ones, and those that begin before the last
     * launch of theirs has ended. */
    int in_callers_order;
} pst_zero_options;

PST_API pst_status pst_zero_create(pst_runtime *runtime, const pst_zero_options *options,
                                   pst_zero **engine);
/* Waits for what is in flight (at most the deadline), then aborts the communicators; never fails.
 * If a communicator says that it may still write, memory is left to it and a warning logged. No
 * communicator is called for this engine any more when it returns. */
PST_API void pst_zero_destroy(pst_zero *engine);

typedef struct pst_parameter_options {
    size_t size;         /* sizeof(pst_parameter_options) */
    const char *name;    /* copied */
    size_t rows;         /* size of dimension 0 */
    size_t row_elements; /* product of the other dimensions */
    int trainable;
} pst_parameter_options;

typedef struct pst_group_options {
    size_t size;      /* sizeof(pst_group_options) */
    const char *name; /* copied */
    const uint32_t *parameters;
    size_t parameter_count;
    pst_dtype dtype;        /* of the shards */
    pst_dtype gather_dtype; /* of the gathered parameters: `dtype`, whatever that is, or another one
                               where both are floats of 16 bits or more, or the group is filled */
    pst_dtype reduce_dtype; /* in which gradients travel; they are summed in fp32. Where a parameter
                               is trainable, it and `dtype` are floats of 16 bits or more */
    int forward_only;       /* backwards need its gradients alone, not its values (the rows of an
                               embedding): they gather it only where they use it, and from the
                               first use on all ranks must do so alike */
    int looked_up; /* uses in forwards read rows that pst_zero_name_rows has named. Where the
                      communicators know rows no use shares what another has gathered, and
                      nothing is gathered ahead of its use; elsewhere this changes nothing.
                      Of one parameter, and forward_only; else PST_EINVAL */
    int filled; /* options.fill_copy writes what is gathered, in whatever dtype, in place of a cast;
                   PST_EUNSUPPORTED where shards are on the host */
    pst_dtype used_dtype; /* of a filled group: what the caller makes of it, and the dtype of most
                             of its gradients */
} pst_group_options;

/* A parameter may be in several groups of different gather_dtype: it has one state for each
 * (parameter, gather dtype). PST_EINVAL, PST_EUNSUPPORTED (the dtypes), PST_ENOMEM, PST_ESTATE once
 * sealed. */
PST_API pst_status pst_zero_add_parameter(pst_zero *engine, const pst_parameter_options *options,
                                          uint32_t *parameter);
PST_API pst_status pst_zero_add_group(pst_zero *engine, const pst_group_options *options,
                                      uint32_t *group);

/* Fixes the layouts and compares parameters and groups with the other ranks (a collective).
 * PST_EMISMATCH names the first parameter or group that differs, with what each of two ranks has.
 */
PST_API pst_status pst_zero_seal(pst_zero *engine);

typedef struct pst_group_layout {
    size_t shard_bytes;    /* of this rank's flat shard, in `dtype`; equal on all ranks */
    size_t gathered_bytes; /* all parameters whole, in gather_dtype */
    size_t gradient_bytes; /* flat shard of the trainable parameters' gradients, in `dtype` */
} pst_group_layout;

typedef struct pst_parameter_layout {
    size_t first_row, shard_rows; /* this rank's rows */
    size_t shard_offset;          /* bytes in the flat shard */
    size_t gathered_offset;       /* bytes in the gathered group */
    size_t gradient_offset;       /* bytes in the flat gradient; SIZE_MAX for frozen ones */
} pst_parameter_layout;

PST_API pst_status pst_zero_group_layout(const pst_zero *engine, uint32_t group,
                                         pst_group_layout *layout);
PST_API pst_status pst_zero_parameter_layout(const pst_zero *engine, uint32_t group,
                                             uint32_t parameter, pst_parameter_layout *layout);

/* In stages 1 and 2, where the communicator has open_memory and gathers_within, the shard of a
 * group that is gathered as it is lies within what is gathered: shard_bytes are gathered_bytes
 * then, of which the rank's rows, at their offsets, are its shard, and the rest is written by
 * gathers.
 *
 * Where the shard of a group is best bound: device memory of layout.shard_bytes, not cleared, from
 * where peers read it. It is the engine's, and freed with it, by segment_free if that is set. The
 * engine copies a shard that lies elsewhere to this place after each update. *memory is NULL where
 * shards have no such place: if the communicator reads any memory, of a group that is gathered in
 * another dtype, and if they are on the host. PST_ESTATE before seal. */
PST_API pst_status pst_zero_shard_place(pst_zero *engine, uint32_t group, void **memory);

/* The flat shard of a group: layout.shard_bytes of zero-padded device memory, its place or owned by
 * the caller, alive as long as the engine. May be called again when it moves, between passes and
 * before anything is written to a place that it moves to; the group counts as updated. PST_EINVAL:
 * a part of its place. */
PST_API pst_status pst_zero_bind_shard(pst_zero *engine, uint32_t group, void *shard);

/* ---- a pass ---------------------------------------------------------------------------------- */

/* A forward pass of the whole model begins. grad: a backward may follow. May be called again before
 * a backward (several forwards, one backward). What a pass that was broken off has left is put
 * right first: its groups are released (which may wait for gathers that nobody waited for) and its
 * gradients forgotten. All ranks break a backward off alike, be it at different places: what it has
 * not begun on this rank others may have, and is done with nothing to give. */
PST_API pst_status pst_zero_begin_forward(pst_zero *engine, int grad);

/* A use of the group begins: its gather is issued unless it is gathered or in flight already, then
 * those that the plan wants ahead. Does not block, but for launches (options.in_callers_order) and
 * in a backward of several forwards, where the ranks ask each other how far they go. In a backward,
 * gathers that the backward order has before this one are issued first: groups by the end of their
 * uses in the forward, last one first. Groups that this rank does not reach are gathered at
 * end_backward, because others may reach them; frozen groups that no rank reached in a backward
 * that reduced leave the order, and must from then on be reached by all ranks alike. Outside of a
 * pass a use is gathered on demand and not recorded. */
PST_API pst_status pst_zero_gather(pst_zero *engine, uint32_t group);

/* The next use of a group that is looked_up reads these rows of its parameter alone, and in a
 * backward no other rows have gradients: so others need not travel; not every communicator makes
 * use of it. A use in a forward that names no rows reads all of them, and those of a group that has
 * been used several times since the last backward may all have gradients. `indices`: in the
 * device's memory, written by compute before; it keeps its values until that use has been waited
 * for, and until gradients_consumed. */
PST_API pst_status pst_zero_name_rows(pst_zero *engine, uint32_t group, const int64_t *indices,
                                      size_t count);

/* The compute lane waits for the group; then *memory is where it lies gathered. PST_ETIMEDOUT,
 * PST_EPEER, PST_EMISMATCH, PST_ESTATE (gather was not called). */
PST_API pst_status pst_zero_wait(pst_zero *engine, uint32_t group, void **memory);

/* A use ends (uses nest and are counted). The last one returns the memory behind the compute lane's
 * work so far, unless stage or plan keep it. */
PST_API pst_status pst_zero_release(pst_zero *engine, uint32_t group);

/* Uses of the group that have begun and not ended, in this pass or outside of one. */
PST_API uint32_t pst_zero_uses(const pst_zero *engine, uint32_t group);

/* The compute lane waits for gathers that no use has waited for, and for peers that still read
 * shards. With grad = 0 this ends the pass. */
PST_API pst_status pst_zero_end_forward(pst_zero *engine);

/* A backward begins. reduce = 0: gradients stay with the caller (accumulation without
 * communication); otherwise options.gradient_target must be set. A second backward after one
 * forward is like the first. */
PST_API pst_status pst_zero_begin_backward(pst_zero *engine, int reduce);

/* The gradients of a group in this backward are complete: sources[i] is the whole gradient of the
 * group's i-th parameter, contiguous, of sources_dtype, or NULL (frozen, or none here). Groups
 * reduce in the reverse order of their first use in the forward, whatever the order of these calls.
 * A second call in one backward (a parameter used under several nested backwards) adds, and so does
 * one for a group that no forward has used since it was reduced last (a graph that was kept over
 * other passes): they are reduced at end_backward. On an asynchronous device either is
 * PST_EMISMATCH in a planned backward unless the one before had such calls; so is a call for a
 * group whose turn is over, because groups behind it were needed before: this ends the training.
 * May issue gathers, those that this group's turn held back. */
PST_API pst_status pst_zero_gradients(pst_zero *engine, uint32_t group, const void *const *sources,
                                      pst_dtype sources_dtype);

/* 1: the backward that runs may update this group behind its reduction: on an asynchronous device,
 * by plan, where every gradient was there when that was last agreed on, so that no group is
 * reported twice; where no gather of it comes behind its reduction, and in stages 1 and 2, of one
 * rank alone and of shards that lie within what is gathered, where the forward has used it once;
 * and where AdamW takes its dtype. Between begin_backward and the first gradients. */
PST_API int pst_zero_may_update(const pst_zero *engine, uint32_t group);

/* Updates such groups behind their reductions, by AdamW: those whose trainable parameters all have
 * a piece with `coefficients`. gradient_target is not asked for them. `pieces` are copied, one a
 * parameter, `count` of them, each of this rank's rows, and none for one that is in several groups;
 * their gradients are the engine's, of the group's dtype. What they point to lasts until the
 * backward has ended for compute, which has written it before this call. A group goes to its target
 * all the same where it is used again behind the report of its gradients. A backward that is broken
 * off leaves some parameters updated. Before the first gradients. PST_ESTATE, PST_EINVAL,
 * PST_EUNSUPPORTED, PST_ENOMEM. */
PST_API pst_status pst_zero_update(pst_zero *engine, const pst_adamw_piece *pieces, size_t count);

/* Whether the group's parameters, or some of them, are updated behind its reduction in the latest
 * backward: once that has gone out. */
PST_API int pst_zero_is_updated(const pst_zero *engine, uint32_t group);

/* Groups that were not reported count as having no gradient here; the compute lane waits for all
 * reductions (the calling thread, where options.shards_on_host is set), and for peers that still
 * read shards. Gradients are means over ranks. */
PST_API pst_status pst_zero_end_backward(pst_zero *engine);

/* Whether any rank had a gradient for this parameter in the last backward that reduced. Where that
 * backward did not wait for the ranks' answer (see the top) each trainable parameter that the
 * forward used counts as having one, of zeros if no rank had one. */
PST_API int pst_zero_has_gradient(const pst_zero *engine, uint32_t parameter);

/* Whether a reduction of the latest backward writes to the target of this group, or has written
 * there: if that backward was broken off and had *accumulate, what was in the target is lost, and
 * the target is written until the next begin_forward. */
PST_API int pst_zero_has_written(const pst_zero *engine, uint32_t group);

/* The shards changed (optimizer, loading): gathered copies are stale, and communication copies are
 * cast anew. Shards may change between passes: one that ended, and the begin of the next. */
PST_API pst_status pst_zero_updated(pst_zero *engine);

/* ---- passes as a CUDA graph ------------------------------------------------------------------ */

/* Passes whose calls lie between begin_capture and end_capture become a part of the graph that
 * their compute is captured into. A launch of the graph is then that many passes, of which this
 * engine is told by before_graph and after_graph, on compute's stream:
 *
 *     pst_zero_drain                   then the caller begins its capture of `stream`
 *     pst_zero_begin_capture, passes, pst_zero_end_capture             and ends it
 *     pst_zero_before_graph, the launch, pst_zero_after_graph          each time
 *
 * All ranks do so alike, and launch their graphs of one step in one order. The communicators are
 * `ce`, and `nccl`, which ends only once all such graphs are destroyed. A rank that is late,
 * stopped or dead is noticed as in other steps: what the others have launched ends, with no result.
 */

/* 1: the last backward that reduced followed a plan and asked nothing of the host, so that one like
 * it can be captured. The same on all ranks. */
PST_API int pst_zero_is_steady(const pst_zero *engine);

/* Blocks until nothing is in flight on the host and the device; ends a pass that was broken off.
 * PST_ETIMEDOUT. */
PST_API pst_status pst_zero_drain(pst_zero *engine);

/* `stream` is a native stream under capture, in a mode that lets this thread allocate: compute's
 * until end_capture. PST_EUNSUPPORTED: the device captures nothing, or shards are on the host;
 * PST_EBUSY: another engine is captured on it; PST_ESTATE: within a pass. A call within the capture
 * that the host would have to wait in, as without a plan, is PST_ESTATE. */
PST_API pst_status pst_zero_begin_capture(pst_zero *engine, void *stream);

/* Before the caller ends its capture, successful or not. PST_ESTATE: within a pass, which then is
 * one that was broken off. */
PST_API pst_status pst_zero_end_capture(pst_zero *engine);

/* Right before and behind a launch on compute's own stream. Gathered copies are stale behind it, as
 * after pst_zero_updated. before_graph returns the error of a rank that has failed. */
PST_API pst_status pst_zero_before_graph(pst_zero *engine);
PST_API pst_status pst_zero_after_graph(pst_zero *engine);

/* ---- record, compile, replay ----------------------------------------------------------------- */

typedef enum pst_zero_op_kind {
    PST_ZERO_GATHER = 0, /* a use began */
    PST_ZERO_RELEASE,
    PST_ZERO_REDUCE, /* gradients of a group went out */
} pst_zero_op_kind;

typedef struct pst_zero_op {
    pst_zero_op_kind kind;
    uint32_t group;
    int backward; /* 0 in the forward */
    size_t bytes; /* gathered or reduced */
} pst_zero_op;

/* Recording is on by itself: the last complete pass that had a backward (or, with grad = 0, an
 * evaluation) is kept. Copies at most `capacity` operations and returns their number in *count. */
PST_API pst_status pst_zero_recorded(const pst_zero *engine, int grad, pst_zero_op *operations,
                                     size_t capacity, size_t *count);

/* When that was, in nanoseconds of the host's clock, or of the device's by timed events; 0: not
 * known. */
typedef struct pst_zero_op_time {
    uint64_t reached_ns;    /* compute got there: since its first operation, counted from 1 */
    uint64_t waited_ns;     /* it stood still there: for the group, or before a reduction until
                               gradients of other groups had been read */
    uint64_t collective_ns; /* the gather that this use was the first of, or the share by bytes of
                               the reductions: from their start on this rank to their end, where
                               time of several at once is charged to each in equal parts */
} pst_zero_op_time;

/* The times of these operations. A pass that runs eagerly has them (the first one on a path, and
 * those without replay), and any with pst_zero_set_timing, as far as the device has come; *count is
 * 0 for others. */
PST_API pst_status pst_zero_recorded_times(pst_zero *engine, int grad, pst_zero_op_time *times,
                                           size_t capacity, size_t *count);

typedef struct pst_zero_plan {
    size_t groups, uses;
    size_t peak_bytes, lower_bound_bytes; /* of gathered groups in the arena */
    uint64_t hash;                        /* the same on all ranks */
} pst_zero_plan;

typedef struct pst_zero_compile_options {
    size_t size; /* sizeof(pst_zero_compile_options) */
    int grad;    /* for passes with a backward */
    const pst_zero_op *operations;
    const pst_zero_op_time *times; /* of the operations; NULL: not known */
    size_t count;                  /* of both */
    uint32_t prefetch_ahead;       /* as in pst_zero_options, as the next one */
    size_t prefetch_bytes;
    size_t keep_bytes; /* of groups that stay gathered from forward to backward, beside those that
                          are gathered ahead (stage 3, with a backward): those whose gathers take
                          longest a byte, and of equal ones those that were used last. The smallest
                          value of all ranks counts. */
} pst_zero_compile_options;

/* Compiles a recording into the plan for passes of its kind and path from the next begin_forward on
 * (a collective: the ranks compare hashes; PST_EMISMATCH). Without such a call the engine does it
 * itself after the first complete pass on each path, with its own prefetch_ahead, prefetch_bytes
 * and keep_bytes. The plans of eight paths are kept; the one that no pass has followed for longest
 * makes room.
 *
 * Plans of passes with a backward go by times, which differ between ranks and so are agreed on
 * first: of a group's compute the longest that any rank has measured, of its collectives the
 * shortest, as the rank that came last has not waited for others. Blocks for that. */
PST_API pst_status pst_zero_compile(pst_zero *engine, const pst_zero_compile_options *options,
                                    pst_zero_plan *plan);
/* What the engine makes its own plans with from now on: prefetch_ahead instead of that of its
 * options, alike on all ranks, and keep_bytes instead of 0. */
PST_API void pst_zero_plan_with(pst_zero *engine, uint32_t prefetch_ahead, size_t keep_bytes);

/* What a plan says of the passes that follow it, simulated: compute as it was measured, and a link
 * that has one collective at a time, in the plan's order. The same on all ranks. */
typedef struct pst_zero_forecast {
    size_t size;                    /* sizeof(pst_zero_forecast) */
    uint64_t step_ns;               /* from begin_forward to end_backward; 0: no times are known */
    uint64_t exposed_ns;            /* of which compute waits for collectives */
    size_t peak_bytes;              /* of gathered groups */
    size_t kept_groups, kept_bytes; /* that keep_bytes has paid for */
    size_t keep_bytes;              /* as agreed on */
} pst_zero_forecast;

typedef enum pst_zero_keep {
    PST_ZERO_KEEP_UNUSED = 0, /* the forward does not use it */
    PST_ZERO_KEEP_ALL,        /* everything stays: stages 1 and 2, one rank */
    PST_ZERO_KEEP_NO_NEED,    /* no backward needs its values, or none comes */
    PST_ZERO_KEEP_NEAR,       /* stays: the backward begins with it */
    PST_ZERO_KEEP_PAID,       /* stays, within keep_bytes */
    PST_ZERO_KEEP_TOO_DEAR,   /* is gathered again: others save more, and it does not fit */
    PST_ZERO_KEEP_ROWS,       /* each use gathers the rows that it has named */
} pst_zero_keep;

/* Nanoseconds since begin_forward; all 0: there is no such gather, or no times are known. */
typedef struct pst_zero_gather_forecast {
    uint64_t start_ns, lands_ns; /* of its gather */
    uint64_t used_ns;            /* compute asks for it, and waits if that is before it lands */
} pst_zero_gather_forecast;

typedef struct pst_zero_group_forecast {
    size_t size;  /* sizeof(pst_zero_group_forecast) */
    size_t bytes; /* gathered */
    pst_zero_keep keep;
    uint64_t gather_ns, reduce_ns;              /* by the curves of what was measured */
    pst_zero_gather_forecast forward, backward; /* the first ones of each */
} pst_zero_group_forecast;

/* Of the plan that was made last for this kind of pass, and of a group in it. PST_ESTATE: there is
 * none. */
PST_API pst_status pst_zero_get_forecast(const pst_zero *engine, int grad,
                                         pst_zero_forecast *forecast);
PST_API pst_status pst_zero_get_group_forecast(const pst_zero *engine, int grad, uint32_t group,
                                               pst_zero_group_forecast *forecast);
/* A plan that was not made. */
typedef struct pst_zero_draft {
    uint32_t prefetch_ahead;
    size_t keep_bytes; /* with which its groups stay */
    size_t peak_bytes; /* as in pst_zero_forecast, as the next ones */
    uint64_t step_ns, exposed_ns;
} pst_zero_draft;

#define PST_ZERO_MOST_DRAFTS 15u

/* What plans of these options would take, and say: the first one with their prefetch_ahead and no
 * keep_bytes; then, where times are known, some with others, of which keep_bytes of the options is
 * the most that groups take which stay. `drafts` has room for PST_ZERO_MOST_DRAFTS. A collective,
 * as pst_zero_compile, after which all ranks have the same ones; nothing is compiled. */
PST_API pst_status pst_zero_make_drafts(pst_zero *engine, const pst_zero_compile_options *options,
                                        pst_zero_draft *drafts, size_t *count);
/* A recorded pass, and what its groups are; by group `group_count` of each. */
typedef struct pst_zero_predict_options {
    size_t size; /* sizeof(pst_zero_predict_options) */
    int grad;    /* a backward follows */
    int stage;
    const pst_zero_op *operations;
    const pst_zero_op_time *times; /* what collectives are to take, and what compute took */
    size_t count;                  /* of both */
    size_t group_count;
    const size_t *gather_bytes, *reduce_bytes;
    const unsigned char *needed;  /* 1: the backward needs its values */
    const unsigned char *by_rows; /* (optional) 1: each use gathers the rows that it names */
    uint32_t prefetch_ahead;      /* as in pst_zero_compile_options, as the next ones */
    size_t prefetch_bytes, keep_bytes;
} pst_zero_predict_options;

/* What a plan of it would say, without an engine: for other links and other numbers of ranks, whose
 * times the caller works out. PST_EINVAL: the operations are no pass. Any thread. */
PST_API pst_status pst_zero_predict(pst_runtime *runtime, const pst_zero_predict_options *options,
                                    pst_zero_forecast *forecast);
/* 0: passes run eagerly, without gathering ahead; 1 (default): by plan, and once a pass has
 * followed it, as launches of a sealed graph (stats.replayed_passes), which says the same to other
 * ranks. From the next pass on. */
PST_API void pst_zero_set_replay(pst_zero *engine, int enabled);
/* 1: passes that begin from now on and follow a plan have times as well, and are no launches of a
 * sealed graph; 0 (default): those without a plan alone have them. A rank's own choice. */
PST_API void pst_zero_set_timing(pst_zero *engine, int enabled);

typedef struct pst_zero_stats {
    size_t size; /* sizeof(pst_zero_stats); where it is not set, nothing is written */
    uint64_t gathers, gather_bytes; /* collectives issued; bytes of gathered groups */
    uint64_t reduces, reduce_bytes; /* collectives issued; bytes of whole gradients */
    uint64_t exposed_ns; /* the calling thread waited: on the host device compute did, for
                            communication; on others for a launch only */
    uint64_t exposed_gather_ns, exposed_reduce_ns;
    uint64_t forwards, backwards;
    uint64_t planned_passes; /* that a plan was followed in, to the end */
    uint64_t deviations; /* passes left the path that was expected, for another or an unknown one */
    uint64_t prefetches;
    size_t arena_peak, arena_reserved, bucket_peak; /* of gathered groups; of gradient buckets */
    size_t plan_peak, plan_lower_bound;             /* of the training plan; 0 before it */
    uint64_t late_launches; /* asynchronous devices: waits for a collective not launched by then */
    /* Asynchronous devices with timed events, see options.time_waits: how long the compute stream
     * stood still for gathers and reductions, by the device's own clock, from an event before each
     * wait to one behind it; so a wait for what is there already counts with the few microseconds
     * that two events are apart. Of waits that the device has passed; reading them never blocks. */
    uint64_t device_gather_ns, device_reduce_ns;
    uint64_t timed_waits;   /* that these are the sum of */
    uint64_t untimed_waits; /* that are missing in them: too many at once, or an event failed */
    /* Bytes reserved, beside arena_reserved: for shards, and what is gathered around them
     * (pst_zero_shard_place); for communication copies and buckets; for what reductions bring
     * together before they sum it. */
    size_t places_reserved, sources_reserved, staging_reserved;
    uint64_t replayed_passes; /* of planned ones: their collectives were one sealed graph */
    uint64_t updates;         /* groups that were updated behind their reductions */
    /* From begin_forward to end_backward, by the clock of compute; and of how many passes, as far
     * as the device has come. What passes of a graph do is counted once, in its capture. */
    uint64_t passes_ns, timed_passes;
    uint64_t all_reduces, all_reduce_bytes; /* of gradients between replicas; of a rank's sums */
    uint64_t graphs_ns, timed_graphs; /* likewise of launches, from before_graph to after_graph */
} pst_zero_stats;
PST_API void pst_zero_get_stats(pst_zero *engine, pst_zero_stats *stats);
PST_API void pst_zero_reset_stats(pst_zero *engine);

#ifdef __cplusplus
}
#endif
#endif
