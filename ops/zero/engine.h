/* The engine's structs, and what its parts ask of one another. */
#ifndef PST_OPS_ZERO_ENGINE_H
#define PST_OPS_ZERO_ENGINE_H

#include "base/hash.h"
#include "ops/transfer/bucket.h"
#include "ops/transfer/compare.h"
#include "ops/transfer/gathered.h"
#include "ops/transfer/operation.h"
#include "ops/zero/clock.h"
#include "ops/zero/layout.h"
#include "ops/zero/notes.h"
#include "ops/zero/order.h"
#include "ops/zero/plan.h"

#include <penstock/zero.h>

typedef struct pst__parameter {
    char *name;
    size_t rows, row_elements;
    int trainable;
    int has_gradient_here; /* in this backward */
    int has_gradient;      /* on any rank, in the last backward that reduced */
} pst__parameter;

/* Where a group was reported in a backward: positions of the order that were needed by then, from
 * PST__REPORTED_FIRST on. */
enum { PST__NOT_AGREED = 0, PST__NOT_REPORTED, PST__REPORTED_FIRST };

/* What the ranks agreed on in a backward: see presence.c. */
typedef struct pst__agreed_group {
    uint32_t after; /* where the last rank reported it: see above */
    uint32_t extra; /* further reports, the most over all ranks */
} pst__agreed_group;

typedef struct pst__agreement {
    uint64_t order;              /* of that backward: its hash; it says nothing of another order */
    size_t turns;                /* of the order, that it took */
    pst__agreed_group *groups;   /* by group */
    unsigned char *has_gradient; /* by parameter: on any rank */
} pst__agreement;

typedef struct pst__group {
    char *name;
    const char *wait_name, *full_name; /* in traces: interned */
    pst_dtype dtype, gather_dtype, reduce_dtype;
    pst_dtype used_dtype; /* what compute has of it, and mostly gives gradients in */
    int forward_only;
    int is_filled_outside; /* its copy is the caller's work: options.fill_copy */
    int may_be_looked_up;  /* by its options, and: */
    int is_looked_up;      /* each use gathers anew, by the rows that it has named: see lookup.c */
    pst_table_rows named;  /* for the next use; no indices: all */
    pst_event *named_at;   /* behind what wrote them */
    pst_table_rows named_first; /* by the first use whose gradients are not reduced yet */
    uint32_t lookups;           /* such uses */
    pst__layout layout;

    void *shard; /* the caller's */
    int is_bound;
    pst_lease
        copy; /* of the shard in gather_dtype; where that is its own dtype, the shard's place */
    int copy_is_old;     /* the shard changed since it was cast */
    pst_event *uploaded; /* of a shard on the host: its copy, by the latest upload; or NULL */

    pst__gathered gathered;
    pst__timing *gather_timing; /* of a gather that no use was recorded of yet */
    pst__timing *use_timing;    /* of its latest use */
    uint32_t more_uses;         /* in this backward, that the latest gather is for, too */

    const void **sources; /* of the reported gradients, by member */
    pst_dtype sources_dtype;
    int reported;
    int was_used;            /* in a forward with gradients, ever */
    int reduced;             /* its turn in this backward is over */
    int is_updated;          /* behind its reduction in this backward: it has no target */
    int is_filled;           /* a part of it is in a bucket that has not gone out */
    int is_written;          /* a bucket with a part of it has gone out in this backward */
    uint32_t extra_reports;  /* in this backward, behind the first one */
    uint32_t reported_after; /* where it was reported: see above */
    void *target;            /* of its reduced gradient in this backward */
} pst__group;

/* A second report of a group's gradients in one backward. */
typedef struct pst__extra {
    uint32_t group, round;
    const void **sources;
    size_t source_count;
    pst_dtype dtype;
} pst__extra;

typedef enum pst__pass_kind { PST__NO_PASS = 0, PST__FORWARD, PST__BACKWARD } pst__pass_kind;

typedef struct pst__recording {
    pst_zero_op *operations;
    size_t count, capacity;
} pst__recording;

/* What a path has programs of. */
typedef enum pst__program_kind {
    PST__PROGRAM_FORWARD = 0,
    PST__PROGRAM_BACKWARD,
    PST__PROGRAM_ACCUMULATION, /* a backward that does not reduce */
    PST__PROGRAMS
} pst__program_kind;

/* A path that passes of one kind take through the model. */
typedef struct pst__path {
    pst__plan *plan;                       /* NULL: none */
    uint64_t used;                         /* number of the last pass that took it */
    uint32_t successor;                    /* the path of the pass after that, or PST__NO_PATH */
    pst__agreement agreed;                 /* of the last backward on it that was read */
    pst__program *programs[PST__PROGRAMS]; /* NULL: no pass has been noted yet */
} pst__path;

#define PST__MOST_PATHS 8u
#define PST__NO_PATH    UINT32_MAX

/* What one kind of pass has done and will do; index 1: with gradients, 0: evaluation. */
typedef struct pst__history {
    pst__recording current, complete; /* of the latest pass, of the last complete one */
    size_t forward_count;             /* of `current`: operations before the backward */
    pst__notes notes;                 /* of the pass that runs, then of the complete one */
    pst__path paths[PST__MOST_PATHS]; /* those that are known */
    uint32_t latest;                  /* of them, which was taken last, or PST__NO_PATH */
    uint64_t passes;                  /* that took one of them */
    pst__plan *next_plan;             /* comes among them when a pass begins */
} pst__history;

/* Where the training step is. */
typedef struct pst__pass {
    pst__pass_kind kind;
    int grad;                 /* of the forward */
    int reduce;               /* of the backward */
    int after_backward;       /* the uses so far belong to a backward that is complete */
    int after_reduce;         /* and their gradients are reduced */
    pst__path *path;          /* that the forward follows; NULL: eager */
    pst__path *backward_path; /* that the last forward with gradients has followed */
    size_t position;          /* in the path's plan */
    const pst__plan *refresh; /* stages 1 and 2: whose order stale groups have; NULL: their own */
    size_t refreshed;         /* places of that which are behind us */
    uint64_t clock;           /* counts uses and releases */
} pst__pass;

/* What the ranks exchange at the end of a backward: see presence.c. */
#define PST__PRESENCE_SLOTS 3u

typedef struct pst__presence {
    int32_t *words;
    uint64_t hash;             /* of the order of this rank's backward, with its turns */
    uint64_t order;            /* without */
    pst__agreement *agreement; /* that the answer is for */
    pst__operation *exchange;  /* until it has arrived */
    int arrived;               /* atomic: the words are everybody's now */
    int is_open;               /* to be read */
    int is_broken;             /* this rank's backward was broken off */
} pst__presence;

/* What comes up from shards on the host. */
typedef struct pst__uploads {
    pst_event *reached; /* compute, where the latest ones began */
    int is_running;     /* the host has not waited for the latest ones */
} pst__uploads;

/* Memory of communication copies that do not stay. Uses are numbered as they are taken. */
#define PST__TRANSIENT_USES 8u

typedef struct pst__transient_use {
    size_t begin, end; /* bytes */
    uint64_t ticket;   /* of its gather */
    pst_event *ended;  /* asynchronous devices: that has read it on this rank */
} pst__transient_use;

typedef struct pst__transient {
    pst_lease memory;
    size_t head;        /* where the next use begins, if it fits there */
    uint64_t taken;     /* uses so far */
    uint64_t free_from; /* the first one that somebody may still wait for */
    pst__transient_use uses[PST__TRANSIENT_USES];
} pst__transient;

/* Gradients that copies and reductions read, and whose caller was not called yet. Of one group more
 * than what is being reported: so compute is a group ahead before it waits for sums. */
#define PST__MOST_LENT 2u

typedef struct pst__lent {
    uint32_t group;
    uint64_t pushed; /* as the engine's; 0: none of theirs */
} pst__lent;

struct pst_zero {
    pst__carrier carrier;
    pst_zero_options options;
    int one_order;       /* gathers and reductions of a backward take turns: see backward.c */
    pst_arena *places;   /* of shards */
    size_t bucket_count; /* of a dtype, on asynchronous devices */
    size_t chunk_bytes;  /* of a bucket, for a rank */
    size_t widest_bytes; /* of an element of any shard */
    pst__uploads uploads;
    pst__transient transient;
    pst_event *shards_ready; /* compute's last write to shards or communication copies */
    pst__lent lent[PST__MOST_LENT];
    size_t lent_count;
    uint64_t pushed;      /* the ticket of the last reduction that reads some where they lie */
    pst__timing *joining; /* compute's wait for sums before what is recorded next; NULL: none */

    pst__parameter *parameters;
    size_t parameter_count, parameter_capacity;
    pst__group *groups;
    size_t group_count, group_capacity;
    int sealed;

    pst__pass pass;
    pst__clock passes, graphs;
    pst__history history[2];
    int replay;
    int is_timed; /* passes that follow a plan are, too */
    size_t keep_bytes;
    pst__program **replayed; /* where the program is that this pass has begun with; NULL: none */
    pst__program **retired;  /* of no use, and not idle when that was seen */
    size_t retired_count, retired_capacity;
    pst__order order;     /* of uses; orders of backward */
    size_t *reduce_bytes; /* by group: of its whole gradients */
    pst__need *need;      /* by group: does anybody need it in backward? */
    unsigned char *needed_here;
    unsigned char *is_looked_up; /* by group: as that has it */
    unsigned char *held;         /* by group: gathered when the backward began */
    size_t issued;               /* positions of the backward order that are behind us */
    size_t needed;               /* positions up to the last one that was asked for */
    size_t wanted;               /* and with those that are gathered ahead of it */
    size_t sure;   /* positions that all ranks take; further ones if one asks for them */
    int is_ending; /* this rank needs no gather any more */

    uint64_t backward_order;        /* of this backward: its hash */
    pst__agreement agreed_eagerly;  /* of the last backward without a plan */
    pst__agreement *agreed;         /* of this backward: what will be known of it */
    const pst__agreement *expected; /* and what was known of the same order before; NULL: nothing */

    size_t reduced;           /* positions of the reduce order that are behind us */
    int is_steady;            /* the last backward that reduced followed a plan, and was not: */
    int careful;              /* the host reads the ranks' presence before the backward ends */
    int is_broken;            /* this backward was broken off */
    pst_adamw_piece *updates; /* by parameter, of this backward; no coefficients: none */
    pst__updates own_updates; /* of one rank alone, for a launch */
    pst_cast *casts;
    size_t cast_capacity;
    pst__extra *extra;
    size_t extra_count, extra_capacity;

    pst__presence presence[PST__PRESENCE_SLOTS];
    size_t presence_words;
    uint64_t exchanges;                 /* of presence so far */
    int32_t *question;                  /* pinned */
    pst__comparisons plans[2];          /* of evaluation, of training */
    pst__comparisons replicas_plans[2]; /* the same between replicas, where there are several */

    pst_zero_stats stats;
};

/* ---- zero.c ---------------------------------------------------------------------------------- */
/* Writes the engine's figures to the runtime's page, if it has one. */
void pst__zero_post(pst_zero *engine);

/* PST_EINVAL for an unknown group, PST_ESTATE before seal, the runtime's own error. */
pst_status pst__zero_check(pst_zero *engine, uint32_t group);
#define pst__zero_fail(engine, status, format, ...)                                                \
    pst__carrier_fail(&(engine)->carrier, status, format, __VA_ARGS__)

/* ---- seal.c ---------------------------------------------------------------------------------- */
void pst__seal_free(pst_zero *engine);
/* Its copy's memory is a place for the shard itself. */
int pst__has_place(const pst__group *group);

/* ---- gather.c -------------------------------------------------------------------------------- */
/* Issues the gather of a group unless it is gathered and up to date. `offset`: where a plan wants
 * it in the arena, or PST__ANYWHERE. */
pst_status pst__gather_issue(pst_zero *engine, uint32_t group, size_t offset, int ahead);
/* For traces: the gather of this group would go out now if prefetch_bytes had room for it. */
void pst__gather_refused(const pst_zero *engine, uint32_t group);
/* Takes part in a gather whose result this rank does not need. */
pst_status pst__gather_for_others(pst_zero *engine, uint32_t group);
/* The memory goes back, behind what compute was given so far. */
pst_status pst__gather_drop(pst_zero *engine, pst__group *group);
/* Compute waits for the group. */
pst_status pst__gather_wait(pst_zero *engine, pst__group *group);
/* At the end of a pass (or after one that was broken off): nothing is in flight, no use is open and
 * stage 3 holds nothing gathered. */
pst_status pst__gather_settle(pst_zero *engine);
/* Nothing is in flight; what no use has waited for is kept. */
pst_status pst__gather_wait_all(pst_zero *engine);
/* The communication copies of all groups whose shard changed, in one go. */
pst_status pst__gather_refresh(pst_zero *engine);
/* Those that the caller fills. */
pst_status pst__gather_fill(pst_zero *engine);
/* What compute has written so far to shards and communication copies is for gathers from now on. */
pst_status pst__gather_sources_written(pst_zero *engine);
/* Compute waits until no peer reads shards themselves: the caller may write them. */
pst_status pst__gather_guard_shards(pst_zero *engine);

/* ---- backward.c ------------------------------------------------------------------------------ */
pst_status pst__backward_begin(pst_zero *engine);
/* A use in the backward: its gather, and all whose turn it is. */
pst_status pst__backward_gather(pst_zero *engine, uint32_t group);
/* A use has ended, the last one that was open: does the group stay, as its next use has no gather
 * of its own? */
int pst__backward_keeps(const pst_zero *engine, pst__group *group);
/* Behind a report: the reductions whose turn it is now, and gathers that they held back. */
pst_status pst__backward_reported(pst_zero *engine);
/* All that is left of the order. */
pst_status pst__backward_finish(pst_zero *engine);
/* After a backward that was broken off, and at different places on different ranks: the rest of its
 * collectives for the others' sake, with nothing to give and to take. */
pst_status pst__backward_break_off(pst_zero *engine);
/* A hash of what this backward gathers and reduces, in which orders. */
uint64_t pst__backward_order(const pst_zero *engine);
/* `order` and the turns behind which reductions go, for comparing ranks. */
uint64_t pst__backward_hash(const pst_zero *engine, uint64_t order);

/* ---- reduce.c -------------------------------------------------------------------------------- */
/* Notes a group's gradients; pst__backward_reported says what goes out then. */
pst_status pst__reduce_report(pst_zero *engine, uint32_t group, const void *const *sources,
                              pst_dtype dtype);
void pst__reduce_begin(pst_zero *engine);
/* The next reduction of the order: with what was reported, or zeros; in a backward that was broken
 * off zeros, and the sum goes nowhere. */
pst_status pst__reduce_next(pst_zero *engine);
/* After a backward that was broken off. */
void pst__reduce_abandon(pst_zero *engine);
/* The rest of a backward's reductions; compute may read all gradients when it gets there. */
pst_status pst__reduce_end(pst_zero *engine);
/* How many elements of a rank's chunk of the group's gradients travel at once, at most. */
size_t pst__part_elements(const pst_zero *engine, const pst__group *group);
/* Buckets go out, full or not. */
pst_status pst__reduce_flush(pst_zero *engine);
/* A part of a group's gradients, by member (NULL: zeros), to `place` as a rank-major slot of
 * elements of dtype `as`, on the filling stream. */
pst_status pst__reduce_copy_in(pst_zero *engine, const pst__group *group, pst__part part,
                               void *place, size_t stride, const void *const *sources,
                               pst_dtype dtype, pst_dtype as);

/* A part of a group, which lies at `offset` of this reduction's chunk, is reduced to scratch of the
 * reduction's own, on top of what is there if it accumulates. */
pst_status pst__reduce_to_sums(pst_zero *engine, pst__operation *operation, const pst__group *group,
                               pst__part part, size_t offset, int accumulate, void **sums);

/* ---- hosted.c -------------------------------------------------------------------------------- */
/* Nothing, unless shards are on the host. */
pst_status pst__hosted_create(pst_zero *engine);
void pst__hosted_free(pst_zero *engine);
/* The device's copy of a shard becomes what that holds now. */
pst_status pst__hosted_upload(pst_zero *engine, pst__group *group);
/* Copies a shard to the device as it is gathered; `scratch`, where that is cast: as large as the
 * shard. */
pst_status pst__hosted_bring_up(const pst_zero *engine, const pst__group *group, void *copy,
                                void *scratch, pst_stream *stream);
/* Compute waits for the group's copy. */
pst_status pst__hosted_follow(const pst_zero *engine, const pst__group *group);
/* Blocks until no upload reads a shard. */
pst_status pst__hosted_wait_uploads(pst_zero *engine);
/* A part of a group, which lies at `offset` of this reduction's chunk, goes to its target. */
pst_status pst__hosted_download(pst_zero *engine, pst__operation *operation,
                                const pst__group *group, pst__part part, size_t offset,
                                int accumulate);

/* ---- transient.c ----------------------------------------------------------------------------- */
/* Does each gather of this group make its communication copy? */
int pst__is_transient(const pst_zero *engine, const pst__group *group);
size_t pst__transient_bytes(const pst_zero *engine);
/* Nothing, unless some group's copies do not stay. */
pst_status pst__transient_create(pst_zero *engine);
void pst__transient_free(pst_zero *engine);
/* Gives a gather its source, which its worker makes; then, once it is submitted: */
void pst__transient_take(pst_zero *engine, uint32_t group, pst__operation *operation);
void pst__transient_taken(pst_zero *engine, uint64_t ticket);

/* ---- lookup.c -------------------------------------------------------------------------------- */
/* Do communicators and the device know rows, so that uses are gathered by those that they name? */
int pst__lookup_serves(const pst_zero *engine);
/* A use has begun. */
void pst__lookup_note_use(pst_zero *engine, uint32_t group);
/* All gradients of the uses so far are reduced. */
void pst__lookup_forget(pst_zero *engine);
/* What a gather, or a push from element `first` of the table on, takes of it, where it is looked
 * up. `is_made`: the source has other strides than the table. */
void pst__lookup_gather(const pst__group *group, pst__operation *operation);
void pst__lookup_push(const pst__group *group, pst__operation *operation, size_t first,
                      int is_made);
/* That the next use has gathered. */
size_t pst__lookup_bytes(const pst__group *group);
/* Was it gathered for a use that has ended, of rows that another one may not want? */
int pst__lookup_is_over(const pst__group *group);

/* ---- push.c ---------------------------------------------------------------------------------- */
/* This member's gradients need no bucket to go out from. */
int pst__is_pushed(const pst_zero *engine, const pst__group *group, const pst__member *member);
/* They go out. */
pst_status pst__push(pst_zero *engine, pst__group *group, size_t member, const void *const *sources,
                     pst_dtype dtype, int accumulate);

/* ---- update.c -------------------------------------------------------------------------------- */
/* The group's gradients were reported: it is not updated where it is used again behind that. */
void pst__update_reported(pst_zero *engine, uint32_t group);
/* A part of a group, which lies at `offset` of this reduction's chunk, is updated behind it. */
pst_status pst__update_add(pst_zero *engine, pst__operation *operation, const pst__group *group,
                           pst__part part, size_t offset);
/* One rank alone, that has reported all gradients of a group that is to be updated: now. */
int pst__update_is_alone(const pst_zero *engine, const pst__group *group);
pst_status pst__update_alone(pst_zero *engine, const pst__group *group);

/* ---- presence.c ------------------------------------------------------------------------------ */
pst_status pst__presence_alloc(pst_zero *engine);
void pst__presence_free(pst_zero *engine);
/* What is known of a backward of this order: from here on `expected`, `agreed` and `careful`
 * count. All the same on all ranks. */
void pst__presence_begin(pst_zero *engine);
void pst__agreement_copy(const pst_zero *engine, pst__agreement *to, const pst__agreement *from);
/* Sends what this rank had, and asks for what the others had. */
pst_status pst__presence_exchange(pst_zero *engine);
/* The largest of the ranks' values. Blocks. */
pst_status pst__presence_ask(pst_zero *engine, int32_t own, int32_t *largest);
/* What the others had, in this backward if it is a careful one, or in an earlier one. */
pst_status pst__presence_read(pst_zero *engine);

/* ---- registry.c ------------------------------------------------------------------------------ */
void pst__registry_free(pst_zero *engine);

/* ---- pass.c ---------------------------------------------------------------------------------- */
/* What a pass that was broken off has left is put right: no pass runs, nothing is gathered. */
pst_status pst__pass_end_broken(pst_zero *engine);

/* ---- record.c -------------------------------------------------------------------------------- */
/* Notes a use, a release or a reduction of this pass. */
pst_status pst__record(pst_zero *engine, pst_zero_op_kind kind, uint32_t group, size_t bytes);
void pst__record_begin(pst_zero *engine, int grad);
/* A pass of this kind is complete: its recording is kept, and compiled if that is due. */
pst_status pst__record_complete(pst_zero *engine, int grad);
/* What a part of the group's gradients goes out by, before its reduction is recorded. */
void pst__record_reduction(pst_zero *engine, pst__operation *operation, size_t bytes);
/* Compute comes to the sums that it waits for, where gradients are lent, before the reduction that
 * is recorded next: the caller notes the end in `joining`. */
void pst__record_joining(pst_zero *engine);
/* For a collective of the pass that runs; NULL: it is not timed. */
pst__timing *pst__record_timing(pst_zero *engine);
void pst__record_free(pst_zero *engine);

/* ---- compile.c ------------------------------------------------------------------------------- */
/* The recording becomes the plan of its path, by the engine's own options. */
pst_status pst__compile(pst_zero *engine, int grad);

/* ---- path.c ---------------------------------------------------------------------------------- */
/* The plan becomes that of a path, which counts as taken last; the plan of that path before, or, if
 * there are too many, of the one that was taken the longest ago, is destroyed. */
void pst__path_add(pst_zero *engine, int grad, pst__plan *plan);
/* Bytes of the largest plan of those that are known, once the next one has replaced that of its
 * path. */
size_t pst__path_largest_peak(const pst_zero *engine);
/* The path that the next pass of this kind is likely to take; NULL: none. The same on all ranks
 * whose passes are alike, as is all that follows. */
pst__path *pst__path_expected(pst_zero *engine, int grad);
/* Does the path go on like this behind `position` steps? `group` PST__NO_GROUP: does it end? */
int pst__path_goes_on(const pst__path *path, size_t position, uint32_t group, int is_use);
/* Another path that has begun as `left` and goes on like this; NULL: none. */
pst__path *pst__path_other(pst_zero *engine, int grad, const pst__path *left, size_t position,
                           uint32_t group, int is_use);
/* A pass has taken it to its end. */
void pst__path_taken(pst_zero *engine, int grad, const pst__path *path);
/* Is there a plan of the forward in this recording? */
int pst__path_is_known(const pst_zero *engine, int grad, const pst__recording *recording);
void pst__path_free_all(pst_zero *engine);

/* ---- replay.c -------------------------------------------------------------------------------- */
/* A pass begins on this path (NULL: none): by its program, or noted so that it gets one. */
void pst__replay_begin(pst_zero *engine, pst__path *path, pst__program_kind kind);
/* It leaves the path, or is broken off: what comes is neither replayed nor noted. */
void pst__replay_leave(pst_zero *engine);
/* It has taken the path to its end. */
void pst__replay_end(pst_zero *engine, pst__path *path, pst__program_kind kind);
/* The path is to be another one. */
void pst__replay_forget(pst_zero *engine, pst__path *path);
void pst__replay_free(pst_zero *engine);

/* ---- agree.c --------------------------------------------------------------------------------- */
/* Compares parameters, groups and options over the ranks. Blocks. */
pst_status pst__agree_registry(pst_zero *engine);
/* Each word becomes the largest that any rank has. Blocks. */
pst_status pst__agree_largest(pst_zero *engine, uint64_t *words, size_t count);

#endif
