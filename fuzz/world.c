#include "world.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CALLS = 400 };

unsigned fuzz_below(fuzz_world *world, unsigned limit) {
    if (world->input.left == 0 || limit == 0) return 0;
    world->input.left--;
    return *world->input.bytes++ % limit;
}

pst_lane *fuzz_lane(fuzz_world *world) {
    const unsigned which = fuzz_below(world, (unsigned)world->lane_count + 1);
    return which < world->lane_count ? world->lanes[which] : world->borrowed;
}

unsigned fuzz_events(fuzz_world *world, pst_event **events) {
    unsigned count = 0;
    const unsigned wanted = fuzz_below(world, 1u << EVENTS);
    for (unsigned i = 0; i < EVENTS; i++)
        if ((wanted >> i & 1) && world->events[i] != NULL) events[count++] = world->events[i];
    return count;
}

void fuzz_check(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "fuzz: %s\n", what);
    abort();
}

/* ---- metadata memory -------------------------------------------------------------------- */

static void *take(void *context, size_t bytes, size_t alignment) {
    fuzz_world *world = context;
    void *memory = NULL;
    if (world->fail_in > 0 && --world->fail_in == 0) {
        world->may_fail = 1;
        return NULL;
    }
    if (posix_memalign(&memory, alignment, bytes) != 0) return NULL;
    world->live++;
    return memory;
}

static void give(void *context, void *memory, size_t bytes, size_t alignment) {
    fuzz_world *world = context;
    (void)bytes;
    (void)alignment;
    world->live--;
    free(memory);
}

/* ---- a sequence ------------------------------------------------------------------------- */

static int begin(fuzz_world *world) {
    const pst_runtime_options options = {.size = sizeof options,
                                         .allocator = {take, give, world},
                                         .spin = 1,
                                         .trace_records = 64,
                                         .flight_records = 64,
                                         .task_capacity = 1 + fuzz_below(world, 4)};
    world->fail_in = fuzz_below(world, 64);
    const pst_status status = pst_runtime_create(&options, &world->runtime);
    fuzz_check(status == PST_OK || (world->may_fail && world->runtime == NULL),
               "no runtime, and no allocation has failed");
    return status == PST_OK;
}

static void call_one(fuzz_world *world) {
    const unsigned memory = fuzz_graph_call_count, small = memory + fuzz_memory_call_count;
    const unsigned which = fuzz_below(world, small + fuzz_small_call_count + 1);
    if (which < memory)
        fuzz_graph_calls[which](world);
    else if (which < small)
        fuzz_memory_calls[which - memory](world);
    else if (which < small + fuzz_small_call_count)
        fuzz_small_calls[which - small](world);
    else
        world->fail_in = fuzz_below(world, 16);
}

/* The device is large: its streams are emptied, not overwritten. */
static void begin_world(fuzz_world *world, fuzz_input input) {
    memset(world, 0, offsetof(fuzz_world, device));
    memset((char *)world + offsetof(fuzz_world, events), 0,
           sizeof *world - offsetof(fuzz_world, events));
    fuzz_device_open(&world->device);
    world->input = input;
}

static void end_device(fuzz_world *world) {
    pst_device *device = &world->device.device;
    for (int i = 0; i < EVENTS; i++)
        if (world->events[i] != NULL) device->ops->event_destroy(device, world->events[i]);
    fuzz_check(world->device.live_events == 0, "an event is left");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static fuzz_world world;
    begin_world(&world, (fuzz_input){bytes, size});
    const int drains = fuzz_below(&world, 2) != 0;
    if (begin(&world)) {
        fuzz_begin_graphs(&world);
        for (int i = 0; i < MAX_CALLS && world.input.left > 0; i++)
            call_one(&world);
        if (drains) fuzz_drain_graphs(&world);
        world.device.is_eager = 1;
        fuzz_end_memory(&world);
        pst_runtime_destroy(world.runtime);
        fuzz_check_callbacks(&world);
    }
    end_device(&world);
    fuzz_check(world.live == 0, "memory is left");
    return 0;
}
