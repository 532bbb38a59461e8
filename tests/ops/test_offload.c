/* Offload and reload on the host, on a device whose streams overlap at random, and in simulation.
 */
#include "async_device.h"
#include "base/clock.h"
#include "offload_cases.h"
#include "tests/device/sim.h"

/* ---- the devices ---------------------------------------------------------------------------- */

static int setup_host(void **state) {
    world *w = calloc(1, sizeof *w);
    w->runtime = open_runtime(20000);
    open_offload(w, pst_runtime_host(w->runtime), 0);
    *state = w;
    return 0;
}

static int setup_pumped(void **state) {
    world *w = calloc(1, sizeof *w);
    w->runtime = open_runtime(20000);
    open_offload(w, pst_runtime_host(w->runtime), 1);
    *state = w;
    return 0;
}

static int setup_async(void **state) {
    world *w = calloc(1, sizeof *w);
    async_device *async = async_open(random_seed("setup_async"), 20);
    w->runtime = open_runtime(20000);
    w->extra = async;
    open_offload(w, &async->device, 0);
    *state = w;
    return 0;
}

static int teardown(void **state) {
    world *w = *state;
    pst_offload_destroy(w->offload);
    pst_runtime_destroy(w->runtime);
    async_close(w->extra);
    free(w);
    return 0;
}

static uint64_t sim_now(void *context) {
    (void)context;
    return pst__now();
}

static int setup_sim(void **state) {
    world *w = calloc(1, sizeof *w);
    pst__heap heap;
    const pst__sim_options options = {.now = sim_now, .latency_ns = 2000, .bytes_each_us = 1000};
    pst_device *device = NULL;
    assert_ok(pst__heap_init(&heap, &(pst_allocator){NULL, NULL, NULL}));
    w->extra = malloc(sizeof heap);
    memcpy(w->extra, &heap, sizeof heap);
    assert_ok(pst__sim_create(w->extra, &options, &device));
    w->runtime = open_runtime(20000);
    open_offload(w, device, 0);
    *state = w;
    return 0;
}

static int teardown_sim(void **state) {
    world *w = *state;
    pst_offload_destroy(w->offload);
    pst_runtime_destroy(w->runtime);
    w->device->ops->destroy(w->device);
    free(w->extra);
    free(w);
    return 0;
}

/* ---- what only an asynchronous device shows ------------------------------------------------- */

static void a_source_is_held_while_it_is_read(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES);
    async_pause(w->extra, 1);
    compute_fill(w, there, 1, BYTES);
    assert_ok(pst_offload_store(w->offload, 3, there, BYTES, owner(2)));
    for (int i = 0; i < 100; i++)
        pst_offload_reap(w->offload);
    assert_int_equal(w->released[2], 0);
    /* Compute's stream comes behind the copy from here on, and the host did not wait for it. */
    assert_ok(pst_offload_wait_store(w->offload, 3));
    assert_int_equal(w->released[2], 1);
    async_pause(w->extra, 0);
    finish_compute(w);
    free_memory(w, there, BYTES);
}

/* With events of its own a load does not wait for compute. */
static void a_load_may_come_before_what_compute_does(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    pst_event *stuck = NULL, *free_now = NULL;
    pst_stream *elsewhere = NULL;
    const pst_device_ops *ops = w->device->ops;
    compute_fill(w, there, 1, BYTES);
    assert_ok(pst_offload_store(w->offload, 3, there, BYTES, owner(0)));
    assert_ok(pst_offload_wait_store(w->offload, 3));
    finish_compute(w);
    assert_ok(ops->stream_create(w->device, 0, &elsewhere));
    assert_ok(ops->event_create(w->device, 0, &stuck));
    assert_ok(ops->event_create(w->device, 0, &free_now));
    async_pause(w->extra, 1);
    stuck->asked = ++((async_device *)w->extra)->records; /* recorded, and never reached */
    async_pause(w->extra, 0);
    assert_ok(ops->stream_wait(w->device, pst_lane_stream(w->compute), stuck));
    assert_ok(ops->event_record(w->device, free_now, elsewhere));
    assert_ok(pst_offload_load(w->offload, 3, back, BYTES, &free_now, 1, owner(1)));
    void *memory;
    size_t bytes;
    assert_ok(pst_offload_host_memory(w->offload, 3, &memory, &bytes));
    assert_filled(back, 1, BYTES);
    void *address;
    assert_ok(pst_offload_address(w->offload, 3, &address, &bytes));
    assert_ptr_equal(address, memory);
    assert_int_equal(bytes, BYTES);
    assert_int_equal(pst_offload_address(w->offload, 4, &address, &bytes), PST_ESTATE);
    async_pause(w->extra, 1);
    stuck->reached = stuck->asked;
    async_pause(w->extra, 0);
    finish_compute(w);
    free_memory(w, there, BYTES), free_memory(w, back, BYTES);
}

static pst_status copy_that_fails(pst_device *device, pst_stream *stream, const pst_copy *copies,
                                  size_t count) {
    (void)device, (void)stream, (void)copies, (void)count;
    return PST_EDEVICE;
}

static void a_copy_that_fails_is_of_its_key_alone(void **state) {
    world *w = *state;
    async_device *async = w->extra;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    compute_fill(w, there, 6, BYTES);
    assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
    assert_ok(pst_offload_wait_store(w->offload, 1));
    async->ops.copy = copy_that_fails;
    assert_ok(pst_offload_store(w->offload, 2, there, BYTES, owner(1)));
    assert_status(pst_offload_wait_store(w->offload, 2), PST_EDEVICE);
    assert_error(w->runtime, "states", "offload", "key 2");
    while (w->released[1] == 0)
        pst_offload_reap(w->offload);
    assert_status(pst_offload_load(w->offload, 2, back, BYTES, NULL, 0, owner(2)), PST_EDEVICE);
    assert_error(w->runtime, "key 2", "lost");
    async->ops.copy = async_copy;
    assert_ok(pst_offload_load(w->offload, 1, back, BYTES, NULL, 0, owner(3)));
    assert_ok(pst_offload_wait_load(w->offload, 1));
    assert_ok(pst_offload_store(w->offload, 2, there, BYTES, owner(4)));
    assert_ok(pst_offload_load(w->offload, 2, there, BYTES, NULL, 0, owner(4)));
    assert_ok(pst_offload_wait_load(w->offload, 2));
    finish_compute(w);
    assert_filled(back, 6, BYTES);
    assert_filled(there, 6, BYTES);
    free_memory(w, there, BYTES), free_memory(w, back, BYTES);
}

static void destroying_waits_for_what_is_in_flight(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    compute_fill(w, there, 8, BYTES);
    assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
    assert_ok(pst_offload_load(w->offload, 1, back, BYTES, NULL, 0, owner(1)));
    pst_offload_destroy(w->offload);
    w->offload = NULL;
    assert_filled(back, 8, BYTES);
    assert_int_equal(w->released[0], 1);
    assert_int_equal(w->released[1], 1);
    free_memory(w, there, BYTES), free_memory(w, back, BYTES);
}

/* The scheduler gives up what the device goes on with. */
static void destroying_after_a_poison_frees_nothing_that_is_read(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    compute_fill(w, there, 8, BYTES);
    assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
    assert_ok(pst_offload_load(w->offload, 1, back, BYTES, NULL, 0, owner(1)));
    assert_ok(pst_offload_wait_load(w->offload, 1)); /* both are launched */
    pst_runtime_poison(w->runtime, PST_EPEER, "a rank is gone");
    assert_status(pst_offload_store(w->offload, 1, there, BYTES, owner(2)), PST_EPEER);
    pst_offload_destroy(w->offload);
    w->offload = NULL;
    assert_filled(back, 8, BYTES);
    assert_int_equal(w->released[2], 0);
    free_memory(w, there, BYTES), free_memory(w, back, BYTES);
}

/* ---- no memory ------------------------------------------------------------------------------ */

static long allowed, alive;

static void *scarce_alloc(void *context, size_t bytes, size_t alignment) {
    (void)context;
    if (__atomic_sub_fetch(&allowed, 1, __ATOMIC_RELAXED) < 0) return NULL;
    (void)__atomic_add_fetch(&alive, 1, __ATOMIC_RELAXED);
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void scarce_free(void *context, void *memory, size_t bytes, size_t alignment) {
    (void)context, (void)bytes, (void)alignment;
    (void)__atomic_sub_fetch(&alive, 1, __ATOMIC_RELAXED);
    free(memory);
}

static pst_status use_offload(pst_runtime *runtime) {
    static unsigned char there[BYTES], back[BYTES];
    const pst_offload_options options = {.size = sizeof options, .pumped = 1};
    pst_offload *offload = NULL;
    pst_status status = pst_offload_create(runtime, &options, &offload);
    for (uint64_t key = 0; key < 20 && status == PST_OK; key++)
        status = pst_offload_store(offload, key, there, BYTES, NULL);
    if (status == PST_OK) status = pst_offload_load(offload, 4, back, BYTES, NULL, 0, NULL);
    if (status == PST_OK) status = pst_offload_wait_load(offload, 4);
    pst_offload_destroy(offload);
    return status;
}

static void every_failing_allocation_is_reported_and_leaks_nothing(void **unused) {
    (void)unused;
    pst_status status = PST_ENOMEM;
    long given = 0;
    for (; status != PST_OK && given < 500; given++) {
        const pst_runtime_options options = {.size = sizeof options,
                                             .allocator = {scarce_alloc, scarce_free, NULL},
                                             .deadline_ns = 10000000000u,
                                             .task_capacity = 16};
        pst_runtime *runtime = NULL;
        allowed = given;
        status = pst_runtime_create(&options, &runtime);
        if (status == PST_OK) status = use_offload(runtime);
        if (status != PST_OK) assert_int_equal(status, PST_ENOMEM);
        pst_runtime_destroy(runtime);
        assert_int_equal(alive, 0);
    }
    assert_ok(status);
    assert_true(given > 30); /* it really went through all of them */
}

#define ASYNC_CASE(name) cmocka_unit_test_setup_teardown(name, setup_async, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        OFFLOAD_CASES(setup_host, teardown),
        OFFLOAD_CASES(setup_pumped, teardown),
        OFFLOAD_CASES(setup_async, teardown),
        OFFLOAD_CASES(setup_sim, teardown_sim),
        ASYNC_CASE(a_source_is_held_while_it_is_read),
        ASYNC_CASE(a_load_may_come_before_what_compute_does),
        ASYNC_CASE(a_copy_that_fails_is_of_its_key_alone),
        ASYNC_CASE(destroying_waits_for_what_is_in_flight),
        ASYNC_CASE(destroying_after_a_poison_frees_nothing_that_is_read),
        cmocka_unit_test(every_failing_allocation_is_reported_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
