/* penstock/page.h - the page of a rank: memory that says where the rank is, what its engine has
 * done, what memory it has and what has not ended, for other processes of the same user on the same
 * machine. `python -m penstock.top` shows it, dumps of the flight record say by it where the other
 * ranks are.
 *
 * A page is a memory file without a name in any folder (memfd_create), PST_PAGE_BYTES long, that
 * its owner alone may open (mode 0600): others find it as a link "/memfd:penstock" among the open
 * files of the process, /proc/PID/fd/N, and map it. So it goes with its process, and stays for whom
 * has mapped it when the process is stopped or killed. A child of fork has a copy of the
 * descriptor: a page whose `pid` is another process's is not to be read there.
 *
 * A reader needs no library: the layout is this header's. Numbers have 64 or 32 bits, are
 * little-endian on all that Penstock runs on, and each is whole by itself; only the lanes are read
 * as one block, by `sequence`. Nothing is written by a task or at each launch: a place costs some
 * stores and a reading of the clock, a pass some stores, and lanes are looked at four times a
 * second. */
#ifndef PENSTOCK_PAGE_H
#define PENSTOCK_PAGE_H

#include <penstock/status.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PST_PAGE_MAGIC   UINT64_C(0x656761702d747370) /* the bytes "pst-page" */
#define PST_PAGE_VERSION 1u /* of the layout: another number, another layout */
#define PST_PAGE_BYTES   65536u
#define PST_PAGE_LANES   16u

typedef enum pst_phase {
    PST_PHASE_NONE = 0, /* before the first forward */
    PST_PHASE_FORWARD,
    PST_PHASE_RECOMPUTE,
    PST_PHASE_BACKWARD,
    PST_PHASE_OPTIMIZER,
    PST_PHASE_CAPTURED_STEP,
    PST_PHASE_COUNT
} pst_phase;

/* Where the program is: see pst_page_reach, whose thread writes it. Times are nanoseconds of
 * CLOCK_MONOTONIC. */
typedef struct pst_page_place {
    uint64_t count; /* places that the program has been at */
    uint64_t place; /* step (32 bits), unit (24), phase (7), whether it is behind it (1) */
    uint64_t since;
    uint64_t steps, steps_ns; /* that have ended: a step goes to where the next one begins */
    uint64_t step_began;
} pst_page_place;

/* What a ZeRO engine (zero.h) has done, as in pst_zero_stats, and what memory it has in bytes. The
 * thread that calls the engine writes it when a pass ends. */
typedef struct pst_page_engine {
    uint64_t passes; /* forwards and backwards */
    uint64_t gathers, gather_bytes, reduces, reduce_bytes, all_reduces, all_reduce_bytes;
    uint64_t exposed_ns;                 /* the thread waited */
    uint64_t stalled_ns;                 /* the compute stream stood still, by the device's clock */
    uint64_t timed_waits, untimed_waits; /* that this is the sum of, and that are missing in it */
    uint64_t shard_bytes;                /* of the rank's parts of parameters */
    uint64_t gathered_bytes;             /* reserved for gathered groups */
    uint64_t bucket_bytes; /* reserved for buckets, for copies of shards in another dtype, and for
                              what reductions bring together */
} pst_page_engine;

/* A lane: what has ended on it, as far as the flight record or a trace has it, and its oldest task
 * that is launched and has not. Texts are cut. */
typedef struct pst_page_lane {
    char name[32];
    char task[64];    /* "" where all has ended that was launched */
    uint64_t ticket;  /* of the task, as the next one */
    uint64_t since;   /* when it was launched, or was first seen unfinished; 0: there is none */
    uint64_t ended;   /* tasks that move a known number of bytes, as the next ones */
    uint64_t bytes;   /* that they moved */
    uint64_t busy_ns; /* from launches to ends, counted once where tasks overlap */
} pst_page_lane;

typedef struct pst_page {
    uint64_t magic; /* PST_PAGE_MAGIC while a runtime has the page, and all of this block is there:
                       it is written last, and read first */
    uint32_t version, head_bytes; /* PST_PAGE_VERSION; where `names` begins */
    int64_t pid;                  /* in the process's own namespace */
    int32_t descriptor; /* its number in the process that made it; -1: nobody else can open it */
    int32_t rank, world_size;
    uint32_t unit_count;    /* names in `names`, which are there before this is */
    char job[128];          /* pst_runtime_options.dump_name: the same on all ranks of a job */
    pst_page_place place;   /* the program's */
    pst_page_engine engine; /* the engine's */
    uint64_t pinned_bytes;  /* of pinned host memory in pools of the library */
    uint64_t looked;        /* when the lanes were looked at last: CLOCK_MONOTONIC */
    uint64_t sequence;      /* odd while the lanes are written: read it before and behind them, and
                               once more if it was odd or has changed */
    uint64_t lane_count;
    pst_page_lane lanes[PST_PAGE_LANES];
    char names[]; /* of units, each with its NUL, as many as there is room for */
} pst_page;

/* Makes a page, to be given to a runtime (pst_runtime_options.page) and destroyed behind it. Where
 * no memory file is to be had nobody else can read it, and its descriptor is -1. PST_EINVAL,
 * PST_ESYSTEM (no memory: errno). */
PST_API pst_status pst_page_create(pst_page **page);
/* Others who have mapped it keep what is in it. NULL is fine. */
PST_API void pst_page_destroy(pst_page *page);

/* Says how the units of the program are called, by number: a unit is what pst_page_reach takes,
 * number 0 the whole. Once, before the first place. PST_EINVAL, PST_ESTATE. */
PST_API pst_status pst_page_name_units(pst_page *page, const char *const *names, size_t count);

/* Notes that the program is in (or, is_behind, behind) a phase, or a unit's part of it. Another
 * `step` than that of the place before ends the step. One thread at a time; never blocks. */
PST_API void pst_page_reach(pst_page *page, uint32_t step, uint32_t unit, pst_phase phase,
                            int is_behind);

/* Describes a place in words, such as "in 'blocks.1' (step 2, backward)", of this process's page or
 * of another one's that is mapped: cut at `size`. *since (may be NULL): since when; 0: not known.
 * Any thread, also while it is written. */
PST_API void pst_page_describe(const pst_page *page, char *text, size_t size, uint64_t *since);

#ifdef __cplusplus
}
#endif
#endif
