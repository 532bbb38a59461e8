#include "device.h"

#include "memory.h"
#include "random.h"
#include "threads.h"

static struct {
    pst__heap heap;
    uint64_t random;
    uint32_t fail_at, jitter_ns, late_ns;
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

static pst_status fault(void *context, const char *call) {
    (void)context, (void)call;
    return drawn.fail_at != 0 && --drawn.fail_at == 0 ? PST_EDEVICE : PST_OK;
}

pst_device *device_open(uint64_t seed, uint32_t fail_at) {
    drawn.heap = (pst__heap){memory_allocator()};
    drawn.random = seed;
    drawn.fail_at = fail_at;
    drawn.jitter_ns = 1 + (64u << random_below(&drawn.random, 12));
    drawn.late_ns = 1 + (64u << random_below(&drawn.random, 12));
    const pst__sim_options options = {.now = now,
                                      .fault = fault,
                                      .jitter = jitter,
                                      .late = late,
                                      .latency_ns = random_below(&drawn.random, 3000),
                                      .bytes_each_us = 100 + random_below(&drawn.random, 10000)};
    pst_device *device = NULL;
    (void)pst__sim_create(&drawn.heap, &options, &device);
    return device;
}
