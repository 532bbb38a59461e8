/* What the streams of a `sim` have before them, and the clock that takes it away. */
#ifndef PST_TESTS_DEVICE_SIM_QUEUE_H
#define PST_TESTS_DEVICE_SIM_QUEUE_H

#include "tests/device/sim.h"

#include <ck_spinlock.h>

typedef enum pst__sim_kind {
    PST__SIM_CALL,
    PST__SIM_ROWS,
    PST__SIM_CAST,
    PST__SIM_SUM,
    PST__SIM_MAXIMUM,
    PST__SIM_NAMED,
    PST__SIM_PREPARE,
    PST__SIM_ADAMW,
    PST__SIM_RECORD,
    PST__SIM_WAIT_EVENT,
    PST__SIM_WRITE32,
    PST__SIM_WAIT32
} pst__sim_kind;

/* One record of an event: lives as long as the event, the operation or a wait holds it. */
typedef struct pst__sim_mark {
    int holders;
    int done;
    uint64_t end;  /* when it was done */
    uint64_t late; /* how much later a query tells so */
} pst__sim_mark;

typedef struct pst__sim_rows {
    char *destination;
    const char *source; /* NULL: fill with `byte` */
    size_t destination_pitch, source_pitch, bytes, count;
    int byte;
} pst__sim_rows;

typedef struct pst__sim_operation {
    struct pst__sim_operation *next;
    pst__sim_kind kind;
    uint64_t enqueued; /* when */
    uint64_t cost;     /* nanoseconds */
    void (*run)(void *argument);
    void *argument;
    pst__sim_rows rows;
    pst_cast cast;
    double scale;
    pst_sum sum;
    pst_row_copy named; /* its ranges are in place of sources */
    pst_adamw_piece update;
    pst_adamw_settings settings; /* PREPARE, with: */
    float *step;
    void *coefficients;
    pst__sim_mark *mark; /* RECORD, WAIT_EVENT */
    uint32_t *flag;      /* WRITE32, WAIT32 */
    uint32_t value;
    const void *sources[]; /* SUM, MAXIMUM, ADAMW, NAMED */
} pst__sim_operation;

struct pst_stream {
    pst__sim_operation *head, *tail;
    uint64_t end;  /* of what has happened on it */
    int destroyed; /* goes when it is empty */
    struct pst_stream *next;
};

struct pst_event {
    pst__sim_mark *mark; /* of the latest record; NULL: never recorded */
};

typedef struct pst__sim_import pst__sim_import;

typedef struct pst__sim {
    pst_device device;
    const pst__heap *heap;
    pst__sim_options options;
    ck_spinlock_t lock; /* of the streams, their operations and all marks; held while effects happen
                         */
    pst_stream *streams;
    uint64_t time;            /* up to which all has happened */
    pst__sim_import *imports; /* memory that peers see; under the lock */
} pst__sim;

static inline pst__sim *pst__sim_of(const pst_device *device) {
    return device->context;
}

/* What the options say of this call. */
static inline pst_status pst__sim_fault(const pst__sim *sim, const char *call) {
    return sim->options.fault == NULL ? PST_OK : sim->options.fault(sim->options.context, call);
}

/* Zeroed, with room for so many sources. NULL: no memory. */
pst__sim_operation *pst__sim_operation_create(const pst__sim *sim, pst__sim_kind kind,
                                              size_t source_count);
/* What has come by the clock happens first. Takes the lock. */
void pst__sim_enqueue(pst__sim *sim, pst_stream *stream, pst__sim_operation *operation,
                      uint64_t cost);

/* The rest under the lock. */

/* All that ends until `now` happens, in the order of the ends over all streams. */
void pst__sim_settle(pst__sim *sim, uint64_t now);
void pst__sim_mark_drop(const pst__sim *sim, pst__sim_mark *mark);
/* Streams that are gone and have nothing before them. */
void pst__sim_sweep(pst__sim *sim);
/* What is enqueued never happens. */
void pst__sim_drop_streams(pst__sim *sim);

/* ---- sim_memory.c: see the table in penstock/device.h -------------------------------------- */

pst_status pst__sim_alloc(pst_device *device, pst_memory_kind kind, size_t bytes, void **memory);
void pst__sim_free(pst_device *device, pst_memory_kind kind, void *memory, size_t bytes);
pst_status pst__sim_memory_export(pst_device *device, void *memory, int *descriptor);
pst_status pst__sim_memory_import(pst_device *device, int descriptor, size_t bytes, void **memory);
void pst__sim_memory_unmap(pst_device *device, void *memory, size_t bytes);
/* What has been freed and is still imported. */
void pst__sim_drop_memory(pst__sim *sim);

#endif
