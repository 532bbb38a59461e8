#include "comms.h"

#include "faults.h"
#include "threads.h"

#include <string.h>

#define STARTS 4096u

typedef struct wrapper {
    pst_comm comm;
    pst_comm *inner;
    uint64_t starts[STARTS]; /* what was started, as a number */
    uint32_t count;
} wrapper;

static wrapper wrappers[COMMS_CHANNELS][COMMS_RANKS];
static fault struck, aborts;

static int is_fault(const char *call) {
    return fault_strikes(&struck, call);
}

static pst_comm *inner_of(const pst_comm *comm) {
    return ((const wrapper *)comm->context)->inner;
}

static uint64_t number_of(const pst_collective *collective) {
    uint64_t number = collective->ticket * 31u + (uint64_t)collective->kind;
    for (const char *c = collective->name; c != NULL && *c != '\0'; c++)
        number = number * 0x100000001b3u + (unsigned char)*c;
    return number * 31u + (uint64_t)collective->dtype;
}

static size_t staging_bytes(pst_comm *comm, const pst_collective *collective) {
    if (is_fault("staging_bytes")) return (size_t)1 << 50; /* nobody has that much */
    return inner_of(comm)->ops->staging_bytes(inner_of(comm), collective);
}

static pst_status start(pst_comm *comm, const pst_collective *collective, pst_stream *stream,
                        void **request) {
    wrapper *self = comm->context;
    sim_point();
    if (is_fault("start")) return PST_EIO;
    if (self->count < STARTS) self->starts[self->count++] = number_of(collective);
    return self->inner->ops->start(self->inner, collective, stream, request);
}

/* A test that fails is the end of its request, and of all others. */
static pst_status test(pst_comm *comm, void *request) {
    pst_comm *inner = inner_of(comm);
    sim_point();
    if (is_fault("test")) (void)inner->ops->abort(inner, PST_EIO);
    return inner->ops->test(inner, request);
}

/* One that fails cannot promise that the memory is left alone. */
static pst_status abort_all(pst_comm *comm, pst_status status) {
    const pst_status aborted = inner_of(comm)->ops->abort(inner_of(comm), status);
    return fault_strikes(&aborts, "abort") ? PST_EBUSY : aborted;
}

static pst_status status_of(pst_comm *comm) {
    return is_fault("status") ? PST_EIO : inner_of(comm)->ops->status(inner_of(comm));
}

static const char *error_text(pst_comm *comm) {
    return inner_of(comm)->ops->error_text(inner_of(comm));
}

static void destroy(pst_comm *comm) {
    inner_of(comm)->ops->destroy(inner_of(comm));
}

void comms_begin(uint64_t seed, int fails) {
    static const char *const calls[] = {"staging_bytes", "start", "test", "status"};
    uint64_t random = seed;
    memset(wrappers, 0, sizeof wrappers);
    struck = fault_draw(&random, calls, sizeof calls / sizeof *calls, 60);
    aborts = (fault){"abort", random_below(&random, 4)};
    if (!fails) struck.nth = aborts.nth = 0;
}

pst_comm *comms_wrap(pst_comm *inner, int channel) {
    static pst_comm_ops ops;
    wrapper *self = &wrappers[channel][inner->rank];
    ops = (pst_comm_ops){.api_version = inner->ops->api_version,
                         .kinds = inner->ops->kinds,
                         .name = "watched",
                         .staging_bytes = staging_bytes,
                         .start = start,
                         .test = test,
                         .abort = abort_all,
                         .status = status_of,
                         .error_text = error_text,
                         .destroy = destroy};
    self->comm = (pst_comm){&ops, self, inner->rank, inner->size};
    self->inner = inner;
    return &self->comm;
}

static void compare(const wrapper *a, const wrapper *b) {
    for (uint32_t i = 0; i < a->count && i < b->count; i++)
        if (a->starts[i] != b->starts[i])
            sim_fail("ranks %d and %d started different collectives at place %u", a->comm.rank,
                     b->comm.rank, i);
}

void comms_check(void) {
    for (int channel = 0; channel < COMMS_CHANNELS; channel++)
        for (int rank = 1; rank < COMMS_RANKS; rank++)
            compare(&wrappers[channel][0], &wrappers[channel][rank]);
}
