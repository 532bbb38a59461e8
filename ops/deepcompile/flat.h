/* The structs of flat shards. */
#ifndef PST_OPS_DEEPCOMPILE_FLAT_H
#define PST_OPS_DEEPCOMPILE_FLAT_H

#include "ops/transfer/bucket.h"
#include "ops/transfer/gathered.h"
#include "ops/transfer/gradients.h"

#include <penstock/flat.h>

typedef struct pst__flat_parameter {
    const char *name;       /* the trace's */
    size_t elements, chunk; /* of all ranks; of each */
    const char *shard, *home;
    pst_dtype dtype;
    pst__target target; /* no memory: frozen */
} pst__flat_parameter;

typedef struct pst__flat_copy {
    uint32_t parameter;
    pst_dtype dtype;
    pst__gathered gathered;
    int is_resident, is_ahead; /* gathered, no use yet */
    int source_is_old;         /* what peers read is cast anew before the next gather */
    uint64_t release; /* number of gathered.released: later ones come behind earlier ones */
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
    uint32_t uses[PST__FLAT_HISTORY];
    size_t count;
    size_t next; /* where the use after the latest one stood the last time; == count: unknown */
} pst__flat_history;

struct pst_flat {
    pst_flat_options options;
    pst__carrier carrier;
    pst_arena *large;   /* of large copies: others would break up their places */
    size_t chunk_bytes; /* of a rank, in a bucket */
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
    int is_last; /* this backward */
    pst__flat_report *reports;
    size_t report_count, report_capacity, report_bytes;
    pst__sources_held held;
    pst__casts casts;
    uint32_t *batch; /* copies of the next collective: room for all */
    size_t batch_capacity;
    pst_flat_stats stats;
};

#define pst__flat_fail(flat, status, format, ...)                                                  \
    pst__carrier_fail(&(flat)->carrier, status, format, __VA_ARGS__)

/* ---- flat.c ---------------------------------------------------------------------------------- */
pst_status pst__flat_check(pst_flat *flat, uint32_t parameter);
pst_status pst__flat_check_copy(pst_flat *flat, uint32_t copy);
/* How a call ends that all ranks make alike. One that cannot do its part ends the training on all,
 * since they would wait for it; what is refused for its arguments is refused everywhere. */
pst_status pst__flat_give_up(pst_flat *flat, pst_status status);
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

/* ---- flat_gather.c --------------------------------------------------------------------------- */
/* A use begins; 1: it was foreseen, or nothing was. */
int pst__flat_note(pst_flat *flat, uint32_t copy);
/* Gives back what was gathered ahead and not used. */
pst_status pst__flat_drop_ahead(pst_flat *flat);

/* ---- flat_reduce.c --------------------------------------------------------------------------- */
void pst__flat_abandon_all(pst_flat *flat);

#endif
