/* What a trace and a track are made of; for tracing's own files. */
#ifndef PST_TRACING_STATE_H
#define PST_TRACING_STATE_H

#include "tracing/ring.h"
#include "tracing/trace.h"

#include <pthread.h>

typedef struct pst__mark {
    const char *name;
    uint64_t begin;
} pst__mark;

typedef struct pst__name {
    struct pst__name *next;
    char *text;
} pst__name;

#define PST__NAME_LISTS 1024u /* so that a name is found in one step, in a run with hundreds */

struct pst__track {
    pst__track *next; /* made before this one; fixed once the track is published */
    pst__trace *trace;
    char *name;
    unsigned index; /* from 1, in order of creation: the tid */
    pst__track_kind kind;
    pst__ring ring; /* empty until the trace is first started */
    pst__mark marks[PST__TRACE_MARKS_MAX];
    unsigned depth;        /* open marks, those beyond the maximum included */
    uint64_t mark_session; /* the recording that the open marks belong to */
};

struct pst__trace {
    int recording; /* first: see pst__trace_on */
    int rank, world_size;
    uint64_t capacity;   /* of every ring */
    uint64_t session;    /* recordings started so far */
    uint64_t begin;      /* of this recording, pst__now() */
    uint64_t begin_real; /* the same moment of CLOCK_REALTIME */
    uint64_t lost;       /* records of threads that got no track */
    pst__track *tracks;  /* the newest; push-only */
    unsigned track_count;
    unsigned thread_count;             /* tracks made by pst__track_of_thread */
    pst__name *names[PST__NAME_LISTS]; /* by their hash */
    pthread_mutex_t lock;              /* guards names, the list of tracks, rings being made */
    pthread_key_t key;                 /* the calling thread's track */
    pst__heap heap;
    pst__error *error;
};

/* Acquire, partner: the release that publishes a track; its fields are visible. */
static inline pst__track *pst__trace_tracks(const pst__trace *trace) {
    return pst__load_acquire(&trace->tracks);
}

#endif
