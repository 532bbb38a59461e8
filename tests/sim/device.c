#include "device.h"

#include "faults.h"
#include "memory.h"
#include "threads.h"

static struct {
    pst__heap heap;
    uint64_t random;
    fault fault;
    uint32_t jitter_ns, late_ns;
} drawn;

static uint64_t now(void *context) {
    (void)context;
    return sim_clock();
}

static uint64_t jitter(void *context) {
    (void)context;
    return random_below(&drawn.random, drawn.jitter_ns);
}

static uint64_t late(void *context) {
    (void)context;
    return random_once_in(&drawn.random, 4) ? random_below(&drawn.random, drawn.late_ns) : 0;
}

static pst_status fail(void *context, const char *call) {
    (void)context;
    return fault_strikes(&drawn.fault, call) ? PST_EDEVICE : PST_OK;
}

pst_device *device_open(uint64_t seed, int fails) {
    static const char *const calls[] = {"stream_create", "launch",      "event_create",
                                        "event_record",  "stream_wait", "event_query"};
    drawn.heap = (pst__heap){memory_allocator()};
    drawn.random = seed;
    drawn.fault = fault_draw(&drawn.random, calls, sizeof calls / sizeof *calls, 60);
    if (!fails) drawn.fault.nth = 0;
    drawn.jitter_ns = 1 + (64u << random_below(&drawn.random, 12));
    drawn.late_ns = 1 + (64u << random_below(&drawn.random, 12));
    const pst__sim_options options = {.now = now,
                                      .fault = fail,
                                      .jitter = jitter,
                                      .late = late,
                                      .latency_ns = random_below(&drawn.random, 3000),
                                      .bytes_each_us = 100 + random_below(&drawn.random, 10000)};
    pst_device *device = NULL;
    (void)pst__sim_create(&drawn.heap, &options, &device);
    return device;
}
