/* What a trace, its tracks and the copies of what they hold are made of; for tracing's own files.
 */
#ifndef PST_TRACING_STATE_H
#define PST_TRACING_STATE_H

#include "tracing/ring.h"
#include "tracing/trace.h"

#include <pthread.h>
#include <sys/types.h>

/* ---- names ------------------------------------------------------------------------------ */

typedef struct pst__name {
    struct pst__name *next;
    char *text;
} pst__name;

#define PST__NAME_LISTS 1024u /* so that a name is found in one step, in a run with hundreds */
#define PST__NAMES_MAX  8192u /* beyond, the flight record adds none: see pst__trace_name */

/* Copies of names that outlive their owners (pst__trace_intern). With a lock of its own: tasks are
 * named while another thread copies rings under the trace's. */
typedef struct pst__names {
    pst__name *lists[PST__NAME_LISTS]; /* by their hash */
    size_t count;
    pthread_mutex_t lock;
} pst__names;

/* ---- copies ----------------------------------------------------------------------------- */

/* What a track holds, copied into one block of memory: it outlives the track, and the export works
 * on it. */
typedef struct pst__copy {
    struct pst__copy *next; /* of the list that it is in */
    size_t bytes;           /* of the block */
    const char *name;       /* the track's, behind the records */
    unsigned index;         /* of the track; in an export its tid */
    pst__track_kind kind;
    size_t count;
    pst__record records[];
} pst__copy;

/* The bounds of the past, so that a recording over which threads and lanes come and go needs no
 * memory without end. */
#define PST__PAST_RINGS  4u /* as many records as so many rings have */
#define PST__PAST_TRACKS 1024u

/* What tracks that have ended have left. */
typedef struct pst__past {
    pst__copy *first; /* the track that ended first */
    pst__copy **end;  /* where the next one goes, unless this is empty */
    size_t tracks, records;
} pst__past;

/* ---- tapes ------------------------------------------------------------------------------ */

/* A trace has two: one that always runs, if it is wanted at all, and the one that is started and
 * stopped. Each track has a ring of each; its writer takes one of them (pst__track). */
typedef enum pst__tape_kind {
    PST__TAPE_FLIGHT = 0,
    PST__TAPE_RECORDING,
    PST__TAPES,
} pst__tape_kind;

typedef struct pst__tape {
    uint64_t capacity; /* of every ring; 0: there is no such tape */
    uint64_t lost;     /* records that neither a ring nor the past counts */
    pst__past past;
} pst__tape;

/* ---- tracks and the trace --------------------------------------------------------------- */

typedef struct pst__mark {
    const char *name;
    uint64_t begin;
} pst__mark;

struct pst__track {
    pst__track *next; /* of the trace: the one made after this; under the trace's lock */
    pst__trace *trace;
    char *name;
    unsigned index; /* from 1, in order of creation */
    pst__track_kind kind;
    pst__ring rings[PST__TAPES]; /* that of the recording is empty until it is first started */
    pst__ring *ring;             /* the one that is written to; NULL: there is none yet */
    pst__mark marks[PST__TRACE_MARKS_MAX];
    unsigned depth;        /* open marks, those beyond the maximum included */
    uint64_t mark_session; /* the recording that the open marks belong to */
    pid_t thread;          /* that made the track for itself, by the kernel's number; 0: none did */
};

typedef struct pst__moment {
    uint64_t now;  /* pst__now() */
    uint64_t real; /* CLOCK_REALTIME */
} pst__moment;

struct pst__trace {
    int level; /* pst__trace_level; first: see pst__trace_on */
    int rank, world_size;
    uint64_t session;    /* recordings started so far */
    pst__moment made;    /* when the trace was created */
    pst__moment begin;   /* of this recording */
    uint64_t full_until; /* no thread looks for a track before: there was none a moment ago */
    pst__tape tapes[PST__TAPES];
    pst__track *tracks;    /* the oldest */
    unsigned track_count;  /* made so far */
    unsigned thread_count; /* of the tracks: those that threads have made for themselves */
    pst__names names;
    pthread_mutex_t lock; /* guards the tracks, rings being made, and what is past */
    pthread_key_t key;    /* the calling thread's track */
    pst__heap heap;
    pst__error *error;
};

/* ---- newest.c --------------------------------------------------------------------------- */

/* Moves `begin` to where what the copies hold of later is a file of about `most_bytes` at most, and
 * returns how many of their records end before it. */
uint64_t pst__newest(const pst__copy *first, uint64_t most_bytes, uint64_t *begin);

/* ---- under the trace's lock ------------------------------------------------------------- */

/* With its rings, as far as the trace records. NULL without memory, with a text. */
pst__track *pst__track_add(pst__trace *trace, pst__track_kind kind, const char *name);
/* Gives the track its ring of this tape if it has none. PST_ENOMEM names the track. */
pst_status pst__track_prepare(pst__track *track, pst__tape_kind kind);
/* Has the track's writer take this tape, if the track has a ring of it. */
void pst__track_take(pst__track *track, pst__tape_kind kind);
/* Takes the track, which has no writer any more, out of the trace, but for what it holds. */
void pst__track_remove(pst__track *track);
/* Frees a track that is in no trace any more, or whose trace goes. */
void pst__track_free(pst__track *track);

/* Removes the tracks of threads that have ended. `caller` is the calling thread's number if it has
 * no track, else 0. */
void pst__threads_reap(pst__trace *trace, pid_t caller);

/* Copies what the track holds on the tapes from `first` to `last`, beside its writer: the records
 * that are whole, oldest first within a tape. NULL without memory. */
pst__copy *pst__copy_of_track(const pst__track *track, pst__tape_kind first, pst__tape_kind last);
pst__copy *pst__copy_of_copy(const pst__heap *heap, const pst__copy *copy);
void pst__copy_free(const pst__heap *heap, pst__copy *copy);

/* Keeps what the track holds on a tape; beyond the bounds what ended first goes. What goes, and
 * what there is no memory for, counts as lost. */
void pst__past_keep(const pst__track *track, pst__tape_kind kind);
void pst__past_forget(const pst__heap *heap, pst__past *past);
/* Records of the tape, and how many of them are lost. */
uint64_t pst__tape_count(const pst__trace *trace, pst__tape_kind kind, uint64_t *lost);

#endif
