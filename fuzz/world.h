/* What a sequence of calls works on. */
#ifndef PST_FUZZ_WORLD_H
#define PST_FUZZ_WORLD_H

#include "device.h"

#include <penstock/penstock.h>

enum { LANES = 5, GRAPHS = 3, TASKS = 24, AFTER = 4, LEASES = 12, BUCKETS = 6, EVENTS = 4 };

typedef struct fuzz_input {
    const uint8_t *bytes;
    size_t left;
} fuzz_input;

typedef struct fuzz_graph fuzz_graph;

typedef struct fuzz_task {
    fuzz_graph *owner;
    pst_task handle;
    int is_gate, on_device, released;
    pst_status result;
    unsigned asks, asked; /* how often `test` says PST_PENDING; what is left of that */
    size_t after[AFTER], after_count;
    unsigned started, finished, ended; /* in how many launches; a gate has no callback */
} fuzz_task;

struct fuzz_graph {
    pst_graph *graph;
    int is_growing, sealed;
    pst_launch launch;
    unsigned launches;
    int relaunches; /* how often a callback launches it again */
    fuzz_task tasks[TASKS];
    size_t count;
};

typedef struct fuzz_lease {
    pst_lease lease;
    unsigned char mark;
} fuzz_lease;

typedef struct fuzz_world {
    fuzz_input input;
    pst_runtime *runtime;
    unsigned fail_in; /* the allocation that fails, from now; 0: none */
    long live;        /* allocations */
    int may_fail;     /* some allocation has failed: PST_ENOMEM is an answer */
    pst_lane *lanes[LANES];
    pst_lane_order orders[LANES];
    size_t lane_count, host_lanes;
    int hooks, hook_calls; /* registered and not removed; made */
    pst_lane *borrowed;
    fuzz_device device;
    pst_event *events[EVENTS]; /* of the device, recorded on the borrowed lane's stream */
    fuzz_graph graphs[GRAPHS];
    pst_arena *arena;
    int arena_on_device;
    fuzz_lease leases[LEASES];
    pst_buckets *buckets;
    pst_bucket flushed[BUCKETS];
    pst_arena *pinned;
    pst_lease pins[LEASES];
} fuzz_world;

/* The next byte of the input below `limit`; 0 when there is none left. */
unsigned fuzz_below(fuzz_world *world, unsigned limit);
/* Stops the process unless `holds`. */
void fuzz_check(int holds, const char *what);

typedef void fuzz_call(fuzz_world *world);
extern fuzz_call *const fuzz_graph_calls[], *const fuzz_memory_calls[], *const fuzz_small_calls[];
extern const unsigned fuzz_graph_call_count, fuzz_memory_call_count, fuzz_small_call_count;

/* Some lane, or NULL. */
pst_lane *fuzz_lane(fuzz_world *world);
/* Some of the events that have been recorded; how many. */
unsigned fuzz_events(fuzz_world *world, pst_event **events);

void fuzz_begin_graphs(fuzz_world *world);
/* Opens or cancels what is open and pumps until nothing is left. */
void fuzz_drain_graphs(fuzz_world *world);
/* The runtime is gone, and with it all graphs: were all callbacks made? */
void fuzz_check_callbacks(const fuzz_world *world);
void fuzz_end_memory(fuzz_world *world);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

#endif
