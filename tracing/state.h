/* What a trace and a track are made of; for tracing's own files. */
#ifndef PST_TRACING_STATE_H
#define PST_TRACING_STATE_H

#include "tracing/names.h"
#include "tracing/past.h"
#include "tracing/ring.h"
#include "tracing/trace.h"

#include <pthread.h>
#include <sys/types.h>

typedef struct pst__mark {
    const char *name;
    uint64_t begin;
} pst__mark;

struct pst__track {
    pst__track *next; /* of the trace: the one made after this; under the trace's lock */
    pst__trace *trace;
    char *name;
    unsigned index; /* from 1, in order of creation: the tid */
    pst__track_kind kind;
    pst__ring ring; /* empty until the trace is first started */
    pst__mark marks[PST__TRACE_MARKS_MAX];
    unsigned depth;        /* open marks, those beyond the maximum included */
    uint64_t mark_session; /* the recording that the open marks belong to */
    pid_t thread;          /* that made the track for itself, by the kernel's number; 0: none did */
};

struct pst__trace {
    int recording; /* first: see pst__trace_on */
    int rank, world_size;
    uint64_t capacity;     /* of every ring */
    uint64_t session;      /* recordings started so far */
    uint64_t begin;        /* of this recording, pst__now() */
    uint64_t begin_real;   /* the same moment of CLOCK_REALTIME */
    uint64_t lost;         /* records of this recording that neither a ring nor the past counts */
    uint64_t full_until;   /* no thread looks for a track before: there was none a moment ago */
    pst__track *tracks;    /* the oldest */
    unsigned track_count;  /* made so far */
    unsigned thread_count; /* of the tracks: those that threads have made for themselves */
    pst__past past;
    pst__names names;
    pthread_mutex_t lock; /* guards the tracks, rings being made, and the past */
    pthread_key_t key;    /* the calling thread's track */
    pst__heap heap;
    pst__error *error;
};

#endif
