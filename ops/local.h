/* The communicator `local`, its parts. Ranks meet at positions: the k-th collective that a rank
 * starts on a channel meets the k-th of every other rank. One small lock a channel guards the
 * meetings; it is held for bounded bookkeeping only, never while data moves. */
#ifndef PST_OPS_LOCAL_H
#define PST_OPS_LOCAL_H

#include "base/heap.h"

#include <penstock/comm.h>

#define PST__LOCAL_TEXT 512

typedef struct pst__meeting {
    uint64_t position;
    const pst_collective **posted; /* by rank; NULL until it came */
    int arrived;                   /* how many came */
    int finished_reading;
    int left; /* how many know that it is over */
    struct pst__meeting *next;
} pst__meeting;

typedef struct pst__channel {
    pst_local_world *world;
    int number;
    int lock;
    pst_status status; /* sticky: why no collective can be completed any more */
    char text[PST__LOCAL_TEXT];
    int readers; /* ranks that move data at this moment */
    struct pst__local_comm **ranks;
    pst__meeting *meetings, *spare;
    struct pst__channel *next;
} pst__channel;

typedef enum pst__request_phase {
    PST__REQUEST_MEETING = 0, /* not all ranks are here */
    PST__REQUEST_READING      /* ours is read; the others may still read what is ours */
} pst__request_phase;

typedef struct pst__request {
    pst__meeting *meeting;
    const pst_collective *collective;
    pst_stream *stream;
    pst__request_phase phase;
    struct pst__request *next;
} pst__request;

typedef struct pst__local_comm {
    pst_comm comm;
    const pst__heap *heap;
    pst_device *device;
    pst__channel *channel;
    uint64_t started;
    const void **sources; /* scratch: one a rank */
    pst__request *active, *spare;
    char text[PST__LOCAL_TEXT];
} pst__local_comm;

/* Moves this rank's share of the data: reads the others' sources, which no rank changes before all
 * have finished reading. */
pst_status pst__local_read(pst__local_comm *local, const pst__request *request);
/* What may only be written when all ranks have read. */
pst_status pst__local_write_back(pst__local_comm *local, const pst__request *request);

#endif
