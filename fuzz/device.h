/* An asynchronous device whose work happens when the bytes say so, and whose calls fail when they
 * say so. It outlives the runtime. */
#ifndef PST_FUZZ_DEVICE_H
#define PST_FUZZ_DEVICE_H

#include <penstock/device.h>

enum { DEVICE_STREAMS = 8, DEVICE_OPERATIONS = 4096 };

struct pst_event {
    const pst_stream *stream; /* NULL: never recorded */
    unsigned place;           /* how much of the stream comes before it */
};

/* A call, or a wait for an event as it was recorded then. */
typedef struct fuzz_operation {
    void (*run)(void *argument);
    void *argument;
    pst_event awaited;
} fuzz_operation;

struct pst_stream {
    fuzz_operation operations[DEVICE_OPERATIONS];
    unsigned enqueued, happened;
};

typedef struct fuzz_device {
    pst_device device;
    pst_stream streams[DEVICE_STREAMS];
    unsigned stream_count;
    long live_events;
    unsigned fail_in; /* the call that fails, from now; 0: none */
    int has_failed;
    int is_eager; /* all that can happen does as soon as somebody asks for an event */
} fuzz_device;

void fuzz_device_open(fuzz_device *self);

/* For the start of a work: run(argument) happens when the stream gets there. PST_ENOMEM when the
 * stream is full. */
pst_status fuzz_device_call(pst_stream *stream, void (*run)(void *argument), void *argument);

/* The next operation of this stream happens, if it can. 0 if not. */
int fuzz_device_step(fuzz_device *self, unsigned stream);
void fuzz_device_run(fuzz_device *self);

#endif
