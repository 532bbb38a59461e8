/* The structs of flat shards. The engine inside has no parameters and no groups: it carries
 * collectives. */
#ifndef PST_OPS_FLAT_H
#define PST_OPS_FLAT_H

#include "ops/operation.h"

#include <penstock/flat.h>

typedef struct pst__flat_parameter {
    const char *name;       /* the trace's */
    size_t elements, chunk; /* of all ranks; of each */
    const char *shard, *home;
    pst_dtype dtype;
    void *target; /* NULL: frozen */
    pst_dtype target_dtype;
    int has_sum;     /* the target holds gradients since the last update */
    int is_old;      /* and those of an earlier one */
    uint64_t bucket; /* number of the one that the last of its gradients went into */
    int adds;        /* and it adds there */
} pst__flat_parameter;

typedef struct pst__flat_copy {
    uint32_t parameter;
    pst_dtype dtype;
    pst__gather_state state;
    uint32_t uses;
    int is_resident, is_ahead; /* gathered, no use yet */
    int is_stale;
    int source_is_old; /* what peers read is cast anew before the next gather */
    pst_lease lease;
    pst_event *released; /* compute's last use of the lease */
    uint64_t release;    /* its number: later ones come behind earlier ones */
    pst__operation *gather;
    uint64_t ticket; /* of `gather`, which may be somebody else's by now */
} pst__flat_copy;

/* Memory that holds what peers read, where shards themselves cannot serve: cast, or opened. */
typedef struct pst__flat_sources {
    char *memory;
    size_t *first; /* by parameter: elements before it, or PST__FLAT_NOWHERE */
    size_t count;  /* of parameters there */
} pst__flat_sources;
#define PST__FLAT_NOWHERE SIZE_MAX

/* The caller's memory that peers can read. */
typedef struct pst__flat_region {
    const char *memory;
    size_t bytes;
} pst__flat_region;

/* A gradient that waits to be copied into a bucket. */
typedef struct pst__flat_report {
    uint32_t parameter;
    const void *source;
    pst_dtype dtype, travels;
    void *token;
} pst__flat_report;

/* What was used, in order; PST__FLAT_UPDATE stands where shards changed. */
#define PST__FLAT_UPDATE  UINT32_MAX
#define PST__FLAT_HISTORY 8192u
typedef struct pst__flat_history {
    uint32_t *uses; /* PST__FLAT_HISTORY of them */
    size_t count;
    size_t next; /* where the use after the latest one stood the last time; == count: unknown */
} pst__flat_history;

/* Sources that are copied beside compute. */
#define PST__FLAT_HELD 8
typedef struct pst__flat_batch {
    pst_event *copied; /* behind the copies */
    size_t tokens, bytes;
} pst__flat_batch;

struct pst_flat {
    pst_flat_options options;
    pst_zero *engine;
    pst_arena *large; /* of large copies: others would break up their places */
    pst__flat_parameter *parameters;
    size_t parameter_count, parameter_capacity;
    pst__flat_copy *copies;
    size_t copy_count, copy_capacity;
    pst__flat_sources sources[PST_DTYPE_COUNT];
    pst__flat_region *regions;
    size_t region_count, region_capacity;
    pst__flat_history history;
    size_t ahead_bytes; /* gathered without a use yet, but for large and resident copies */
    uint64_t releases;
    int is_last;                           /* this backward */
    uint64_t buckets;                      /* numbered so far */
    uint64_t open_number[PST_DTYPE_COUNT]; /* of the bucket that is filled; 0: none */
    int has_buckets[PST_DTYPE_COUNT];      /* there is memory for them that peers can read */
    pst__flat_report *reports;
    size_t report_count, report_capacity, report_bytes;
    pst__flat_batch held[PST__FLAT_HELD]; /* a ring */
    size_t held_first, held_count, held_bytes;
    void **copied; /* the tokens of the batches, oldest first */
    size_t copied_count, copied_capacity;
    pst_cast *casts;
    size_t cast_count, cast_capacity;
    uint32_t *batch; /* copies of the next collective */
    size_t batch_capacity;
    pst_flat_stats stats;
};

#define PST__FLAT_ALIGNMENT 128u /* bytes, of sources and slots */

#define pst__flat_fail(flat, status, format, ...)                                                  \
    pst__zero_fail((flat)->engine, status, format, __VA_ARGS__)

/* ---- flat.c ---------------------------------------------------------------------------------- */
pst_status pst__flat_check(pst_flat *flat, uint32_t parameter);
pst_status pst__flat_check_copy(pst_flat *flat, uint32_t copy);
/* How a call ends that all ranks make alike. One that cannot do its part ends the training on all,
 * since they would wait for it; what is refused for its arguments is refused everywhere. */
pst_status pst__flat_give_up(pst_flat *flat, pst_status status);
static inline size_t pst__flat_bytes(const pst_flat *flat, const pst__flat_copy *copy) {
    return flat->parameters[copy->parameter].chunk * flat->engine->world *
           pst_dtype_size(copy->dtype);
}

/* Larger than all that may be gathered ahead. It has memory apart and goes ahead alone. */
static inline int pst__flat_is_large(const pst_flat *flat, const pst__flat_copy *copy) {
    const size_t room = flat->options.ahead_bytes;
    return room > 0 && pst__flat_bytes(flat, copy) > room;
}

/* Of the room for what is gathered ahead. */
static inline size_t pst__flat_room_of(const pst_flat *flat, const pst__flat_copy *copy) {
    return copy->is_resident || pst__flat_is_large(flat, copy) ? 0 : pst__flat_bytes(flat, copy);
}

/* ---- flat_source.c --------------------------------------------------------------------------- */
/* Where this rank's part of a copy lies for its peers, and the begin of the memory that it is a
 * piece of. */
typedef struct pst__flat_place {
    const char *memory, *home;
} pst__flat_place;
pst_status pst__flat_source(pst_flat *flat, uint32_t copy, pst__flat_place *place);
/* If a source of these copies is old, casts all that are. */
pst_status pst__flat_refresh(pst_flat *flat, const uint32_t *copies, size_t count);
/* Compute waits until nothing reads the shard of a parameter, or of all: gathers in flight do, and,
 * where peers read it in place, those that have ended. */
#define PST__FLAT_ALL UINT32_MAX
pst_status pst__flat_wait_readers(pst_flat *flat, uint32_t parameter);
void pst__flat_sources_free(pst_flat *flat);
/* Device memory that peers can read. Blocks. */
pst_status pst__flat_open(pst_flat *flat, size_t bytes, pst_lease *lease);

/* ---- flat_gather.c --------------------------------------------------------------------------- */
/* Gathers what is needed of these (indices of copies, without repetition). */
pst_status pst__flat_issue(pst_flat *flat, const uint32_t *copies, size_t count);
int pst__flat_is_current(const pst__flat_copy *copy);
/* Is the copy one of those that were gathered ahead, for which there is so much room? */
void pst__flat_count_ahead(pst_flat *flat, pst__flat_copy *copy, int is_ahead);
/* Compute has waited, and the memory goes back. */
pst_status pst__flat_drop(pst_flat *flat, pst__flat_copy *copy);

/* ---- flat_ahead.c ---------------------------------------------------------------------------- */
pst_status pst__flat_history_alloc(pst_flat *flat);
void pst__flat_history_free(pst_flat *flat);
/* A use begins; 1: it was foreseen, or nothing was. */
int pst__flat_note(pst_flat *flat, uint32_t copy);
/* Gathers what comes next. */
pst_status pst__flat_gather_ahead(pst_flat *flat);
/* Of the copy, behind the first `count` of flat->batch; `taken`: of the room, with theirs. */
int pst__flat_has_room(const pst_flat *flat, const pst__flat_copy *copy, size_t count,
                       size_t taken);
/* Is the copy used again within what may be gathered ahead? */
int pst__flat_is_near(const pst_flat *flat, uint32_t copy);
/* Gives back what was gathered ahead in vain. */
pst_status pst__flat_drop_ahead(pst_flat *flat);

/* ---- flat_bucket.c --------------------------------------------------------------------------- */
/* Room for a gradient; its copy is launched by the next pst__flat_bucket_copy. Full buckets go out.
 */
pst_status pst__flat_bucket_add(pst_flat *flat, const pst__flat_report *report);
pst_status pst__flat_bucket_copy(pst_flat *flat);
pst_status pst__flat_bucket_flush(pst_flat *flat, pst_dtype dtype);
/* Is the latest gradient of this parameter in a bucket that has not gone out? */
int pst__flat_bucket_has(const pst_flat *flat, const pst__flat_parameter *parameter);
void pst__flat_bucket_abandon(pst_flat *flat);

/* ---- flat_reduce.c --------------------------------------------------------------------------- */
void pst__flat_abandon_all(pst_flat *flat);

/* ---- flat_held.c ----------------------------------------------------------------------------- */
/* Before what was reported is copied: room to hold it. Compute waits for batches that are too much.
 */
pst_status pst__flat_held_room(pst_flat *flat);
/* Behind that: the reports become a batch. */
pst_status pst__flat_hold(pst_flat *flat);
/* Compute waits for all batches. */
pst_status pst__flat_held_join(pst_flat *flat);
/* Lets all go that are over, or that nobody will read. */
void pst__flat_held_forget(pst_flat *flat);
void pst__flat_held_free(const pst__heap *heap, pst_flat *flat);

#endif
