#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CALLS = 400 };

unsigned fuzz_below(fuzz_world *world, unsigned limit) {
    if (world->input.left == 0 || limit == 0) return 0;
    world->input.left--;
    return *world->input.bytes++ % limit;
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
                                         .task_capacity = 1 + fuzz_below(world, 4)};
    world->fail_in = fuzz_below(world, 64);
    const pst_status status = pst_runtime_create(&options, &world->runtime);
    fuzz_check(status == PST_OK || (world->may_fail && world->runtime == NULL),
               "no runtime, and no allocation has failed");
    return status == PST_OK;
}

static void call_one(fuzz_world *world) {
    const unsigned which = fuzz_below(world, fuzz_graph_call_count + fuzz_memory_call_count + 1);
    if (which < fuzz_graph_call_count)
        fuzz_graph_calls[which](world);
    else if (which < fuzz_graph_call_count + fuzz_memory_call_count)
        fuzz_memory_calls[which - fuzz_graph_call_count](world);
    else
        world->fail_in = fuzz_below(world, 16);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static fuzz_world world;
    memset(&world, 0, sizeof world);
    world.input = (fuzz_input){bytes, size};
    const int drains = fuzz_below(&world, 2) != 0;
    if (begin(&world)) {
        fuzz_begin_graphs(&world);
        for (int i = 0; i < MAX_CALLS && world.input.left > 0; i++)
            call_one(&world);
        if (drains) fuzz_drain_graphs(&world);
        fuzz_end_memory(&world);
        pst_runtime_destroy(world.runtime);
        fuzz_check_callbacks(&world);
    }
    fuzz_check(world.live == 0, "memory is left");
    return 0;
}
