/* Calls that ask, name, count and wake, and the device's own. */
#include "world.h"

#include <string.h>

enum { HOOKS = 3, HOOK_CALLS = 400 };

static void ask_runtime(fuzz_world *world) {
    char text[64];
    pst_runtime_stats stats = {.size = sizeof stats};
    const size_t length = pst_runtime_error(world->runtime, text, fuzz_below(world, sizeof text));
    fuzz_check(length < 4096, "an error text without an end");
    pst_runtime_get_stats(world->runtime, &stats);
    fuzz_check(stats.watchdog_reports == 0, "a watchdog that nobody wanted");
    const pst_status status = pst_runtime_status(world->runtime);
    fuzz_check(status == PST_OK || status == PST_EDEVICE, "a poison that nobody gave");
}

static void note_poison(void *context, pst_status status) {
    fuzz_world *world = context;
    fuzz_check(status < 0 && world->hooks > 0, "a hook that nobody wanted");
    fuzz_check(++world->hook_calls <= HOOK_CALLS, "hooks without an end");
}

static void tend_hooks(fuzz_world *world) {
    if (fuzz_below(world, 2) && world->hooks < HOOKS) {
        world->hooks++;
        if (pst_runtime_add_poison_hook(world->runtime, note_poison, world) != PST_OK)
            world->hooks--;
    } else {
        pst_runtime_remove_poison_hook(world->runtime, note_poison, world);
        world->hooks -= world->hooks > 0;
    }
}

static void ask_lane(fuzz_world *world) {
    pst_lane *lane = fuzz_lane(world);
    fuzz_check(lane == NULL || pst_lane_stream(lane) != NULL, "a lane without a stream");
    fuzz_check(strcmp(pst_lane_name(lane), lane == NULL ? "" : "fuzzed") == 0, "a wrong name");
    pst_lane_wake(lane);
}

static void ask_loop(fuzz_world *world) {
    int descriptor = -1;
    fuzz_check(pst_fd(world->runtime, &descriptor) == PST_OK && descriptor >= 0, "no descriptor");
    fuzz_check(pst_timeout(world->runtime) >= -1, "a timeout that is none");
}

static void ask_dtype(fuzz_world *world) {
    const pst_dtype dtype = (pst_dtype)fuzz_below(world, 64);
    const size_t bytes = pst_dtype_size(dtype);
    fuzz_check((bytes > 0) == (dtype < PST_DTYPE_COUNT), "the size of a dtype that is none");
    fuzz_check(pst_dtype_name(dtype) != NULL, "a dtype without a name");
}

static void ask_memory(fuzz_world *world) {
    pst_arena_stats stats = {.size = sizeof stats};
    pst_buckets_stats buckets = {.size = sizeof buckets};
    if (world->arena != NULL) pst_arena_reset_peak(world->arena);
    if (world->pinned != NULL) {
        pst_arena_get_stats(world->pinned, &stats);
        fuzz_check(stats.leased <= stats.reserved, "wrong statistics");
    }
    if (world->buckets == NULL) return;
    pst_buckets_get_stats(world->buckets, &buckets);
    fuzz_check((buckets.buckets == 0) == (buckets.bytes == 0), "wrong statistics");
}

static void write_trace(fuzz_world *world) {
    pst_trace_stats stats = {.size = sizeof stats};
    pst_trace_get_stats(world->runtime, &stats);
    fuzz_check(stats.overwritten <= stats.records, "wrong statistics");
    const unsigned most_bytes = fuzz_below(world, 10000);
    (void)pst_trace_write_newest(world->runtime, fuzz_below(world, 2) ? "/dev/null" : "/dev/full",
                                 most_bytes);
}

/* ---- the device ------------------------------------------------------------------------- */

static void step_device(fuzz_world *world) {
    const unsigned stream = fuzz_below(world, DEVICE_STREAMS);
    for (unsigned steps = 1 + fuzz_below(world, 4); steps > 0; steps--)
        (void)fuzz_device_step(&world->device, stream);
}

static void record_event(fuzz_world *world) {
    fuzz_device *device = &world->device;
    pst_event **event = &world->events[fuzz_below(world, EVENTS)];
    const pst_device_ops *ops = device->device.ops;
    if (world->borrowed == NULL) return;
    if (*event == NULL && ops->event_create(&device->device, 0, event) != PST_OK) return;
    (void)ops->event_record(&device->device, *event, pst_lane_stream(world->borrowed));
}

static void fail_device(fuzz_world *world) {
    if (fuzz_below(world, 4) == 3) world->device.fail_in = 1 + fuzz_below(world, 8);
}

fuzz_call *const fuzz_small_calls[] = {ask_runtime, tend_hooks,  ask_lane,     ask_loop,
                                       ask_dtype,   ask_memory,  write_trace,  step_device,
                                       step_device, step_device, record_event, fail_device};
const unsigned fuzz_small_call_count = sizeof fuzz_small_calls / sizeof *fuzz_small_calls;
