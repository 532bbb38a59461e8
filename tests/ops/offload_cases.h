/* What offload and reload promise, on whatever device `state` points to: a test includes this,
 * opens its device and lists OFFLOAD_CASES. */
#ifndef PST_TESTS_OPS_OFFLOAD_CASES_H
#define PST_TESTS_OPS_OFFLOAD_CASES_H

#include "tests/random.h"
#include "tests/sched/harness.h"

#include <penstock/offload.h>

typedef struct world {
    pst_runtime *runtime;
    pst_device *device;
    pst_lane *compute; /* NULL on the host device */
    pst_offload *offload;
    int released[16]; /* how often each owner was */
    void *extra;      /* of the device's side of the test */
} world;

enum { BYTES = 4096 };

static void on_released(void *context, void *owner) {
    ((world *)context)->released[(uintptr_t)owner]++;
}

static void *owner(uintptr_t number) {
    return (void *)number; /* an index into `released`, and no pointer */
}

static void open_offload(world *w, pst_device *device, int pumped) {
    w->device = device;
    if (!(device->ops->caps & PST_DEVICE_STREAM_IS_WORKER)) {
        const pst_lane_options lane = {
            .size = sizeof lane, .name = "compute", .device = device, .mode = PST_LANE_BORROWED};
        assert_ok(pst_lane_create(w->runtime, &lane, &w->compute));
    }
    const pst_offload_options options = {.size = sizeof options,
                                         .name = "states",
                                         .device = device,
                                         .compute = w->compute,
                                         .pumped = pumped,
                                         .piece_bytes = (size_t)4 * BYTES,
                                         .released = on_released,
                                         .released_context = w};
    assert_ok(pst_offload_create(w->runtime, &options, &w->offload));
}

static unsigned char *device_memory(world *w, size_t bytes) {
    void *memory = NULL;
    assert_ok(w->device->ops->alloc(w->device, PST_MEMORY_DEVICE, bytes, &memory));
    return memory;
}

static void free_memory(world *w, void *memory, size_t bytes) {
    w->device->ops->free(w->device, PST_MEMORY_DEVICE, memory, bytes);
}

/* Compute writes `bytes` of `byte`; on the host the calling thread is compute. */
static void compute_fill(world *w, void *memory, int byte, size_t bytes) {
    static unsigned char patterns[256][BYTES];
    memset(patterns[byte], byte, BYTES);
    const pst_copy copy = {memory, patterns[byte], bytes};
    if (w->compute == NULL)
        memcpy(memory, patterns[byte], bytes);
    else
        assert_ok(w->device->ops->copy(w->device, pst_lane_stream(w->compute), &copy, 1));
}

static void compute_copy(world *w, void *destination, const void *source, size_t bytes) {
    const pst_copy copy = {destination, source, bytes};
    if (w->compute == NULL)
        memcpy(destination, source, bytes);
    else
        assert_ok(w->device->ops->copy(w->device, pst_lane_stream(w->compute), &copy, 1));
}

static void finish_compute(world *w) {
    if (w->compute == NULL) return;
    pst_event *event = NULL;
    assert_ok(w->device->ops->event_create(w->device, 0, &event));
    assert_ok(w->device->ops->event_record(w->device, event, pst_lane_stream(w->compute)));
    while (w->device->ops->event_query(w->device, event) == PST_PENDING)
        yield_briefly();
    w->device->ops->event_destroy(w->device, event);
}

static void assert_filled(const unsigned char *memory, int byte, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (memory[i] != byte) fail_msg("byte %zu is %d and not %d", i, memory[i], byte);
}

/* ---- what is stored comes back -------------------------------------------------------------- */

static void what_is_stored_comes_back(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    unsigned char *seen = device_memory(w, BYTES);
    for (int step = 1; step <= 3; step++) {
        compute_fill(w, there, step, BYTES);
        assert_ok(pst_offload_store(w->offload, 7, there, BYTES, owner(0)));
        assert_ok(pst_offload_wait_store(w->offload, 7));
        assert_int_equal(w->released[0], step);
        compute_fill(w, there, 99, BYTES); /* somebody else has it now */
        assert_ok(pst_offload_load(w->offload, 7, back, BYTES, NULL, 0, owner(1)));
        assert_ok(pst_offload_wait_load(w->offload, 7));
        assert_ok(pst_offload_wait_load(w->offload, 7));
        compute_copy(w, seen, back, BYTES);
        compute_fill(w, back, 98, BYTES);
        finish_compute(w);
        assert_filled(seen, step, BYTES);
        assert_int_equal(w->released[1], step);
    }
    free_memory(w, there, BYTES), free_memory(w, back, BYTES), free_memory(w, seen, BYTES);
}

static void a_load_comes_behind_its_store_and_a_store_behind_the_loads(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back[4];
    for (int i = 0; i < 4; i++) {
        back[i] = device_memory(w, BYTES);
        if (i > 0) assert_ok(pst_offload_wait_store(w->offload, 1));
        compute_fill(w, there, 10 + i, BYTES);
        assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
        assert_ok(pst_offload_load(w->offload, 1, back[i], BYTES, NULL, 0, owner(1)));
    }
    assert_ok(pst_offload_wait_load(w->offload, 1));
    finish_compute(w);
    for (int i = 0; i < 4; i++)
        assert_filled(back[i], 10 + i, BYTES);
    assert_int_equal(w->released[1], 4); /* a wait for the last one is one for those before it */
    while (w->released[0] < 4) {
        pst_offload_reap(w->offload);
        (void)pst_run_once(w->runtime, NULL);
    }
    for (int i = 0; i < 4; i++)
        free_memory(w, back[i], BYTES);
    free_memory(w, there, BYTES);
}

static void one_store_is_loaded_many_times(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back[3];
    compute_fill(w, there, 5, BYTES);
    assert_ok(pst_offload_store(w->offload, 3, there, BYTES, owner(0)));
    for (int i = 0; i < 3; i++) {
        back[i] = device_memory(w, BYTES);
        assert_ok(pst_offload_load(w->offload, 3, back[i], BYTES, NULL, 0, owner(1)));
    }
    assert_ok(pst_offload_wait_load(w->offload, 3));
    finish_compute(w);
    for (int i = 0; i < 3; i++) {
        assert_filled(back[i], 5, BYTES);
        free_memory(w, back[i], BYTES);
    }
    free_memory(w, there, BYTES);
}

static void memory_is_released_when_nobody_waits_too(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES);
    compute_fill(w, there, 1, BYTES);
    assert_ok(pst_offload_store(w->offload, 3, there, BYTES, owner(2)));
    while (w->released[2] == 0) {
        pst_offload_reap(w->offload);
        (void)pst_run_once(w->runtime, NULL);
        yield_briefly();
    }
    assert_ok(pst_offload_wait_store(w->offload, 3));
    assert_int_equal(w->released[2], 1);
    free_memory(w, there, BYTES);
}

/* ---- host memory ---------------------------------------------------------------------------- */

static void a_known_step_takes_no_memory(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES);
    pst_offload_stats first = {.size = sizeof first}, last = {.size = sizeof last};
    for (int step = 0; step < 4; step++) {
        for (uint64_t key = 0; key < 6; key++) /* more than fits into one piece */
            assert_ok(pst_offload_store(w->offload, key, there, BYTES, owner(0)));
        for (uint64_t key = 6; key-- > 0;) {
            assert_ok(pst_offload_load(w->offload, key, there, BYTES, NULL, 0, owner(0)));
            assert_ok(pst_offload_wait_load(w->offload, key));
        }
        pst_offload_get_stats(w->offload, step == 0 ? &first : &last);
    }
    assert_int_equal(first.host_bytes, 6 * BYTES);
    assert_int_equal(first.host_registered, 8 * BYTES);
    assert_int_equal(last.host_bytes, first.host_bytes);
    assert_int_equal(last.host_peak, first.host_peak);
    assert_int_equal(last.host_registered, first.host_registered);
    assert_int_equal(last.keys, 6);
    assert_int_equal(last.stores, 24);
    assert_int_equal(last.load_bytes, (size_t)24 * BYTES);
    finish_compute(w);
    free_memory(w, there, BYTES);
}

static void reserved_memory_is_used(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, (size_t)8 * BYTES);
    pst_offload_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    assert_ok(pst_offload_reserve(w->offload, (size_t)8 * BYTES));
    pst_offload_get_stats(w->offload, &before);
    for (uint64_t key = 0; key < 8; key++)
        assert_ok(pst_offload_store(w->offload, key, there + key * BYTES, BYTES, owner(0)));
    pst_offload_get_stats(w->offload, &after);
    assert_int_equal(before.host_registered, 8 * BYTES);
    assert_int_equal(after.host_registered, 8 * BYTES);
    assert_ok(pst_offload_wait_store(w->offload, 7));
    finish_compute(w);
    free_memory(w, there, (size_t)8 * BYTES);
}

/* Copies of what the key had go on, each with its own memory. */
static void a_key_may_get_another_size(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    unsigned char *less = device_memory(w, 512);
    pst_offload_stats stats = {.size = sizeof stats};
    compute_fill(w, there, 21, BYTES);
    assert_ok(pst_offload_store(w->offload, 2, there, BYTES, owner(0)));
    assert_ok(pst_offload_load(w->offload, 2, back, BYTES, NULL, 0, owner(1)));
    compute_fill(w, less, 22, 512);
    assert_ok(pst_offload_store(w->offload, 2, less, 512, owner(2)));
    assert_status(pst_offload_load(w->offload, 2, back, BYTES, NULL, 0, owner(3)), PST_EINVAL);
    assert_error(w->runtime, "states", "key 2", "512", "4096");
    assert_ok(pst_offload_load(w->offload, 2, less, 512, NULL, 0, owner(4)));
    assert_ok(pst_offload_wait_load(w->offload, 2));
    finish_compute(w);
    assert_filled(back, 21, BYTES);
    assert_filled(less, 22, 512);
    do
        pst_offload_get_stats(w->offload, &stats);
    while (stats.in_flight > 0);
    assert_int_equal(stats.host_bytes, 512);
    assert_int_equal(w->released[3], 0);
    free_memory(w, there, BYTES), free_memory(w, back, BYTES), free_memory(w, less, 512);
}

static void a_dropped_key_is_forgotten_and_its_copies_go_on(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES), *back = device_memory(w, BYTES);
    pst_offload_stats stats = {.size = sizeof stats};
    compute_fill(w, there, 31, BYTES);
    assert_ok(pst_offload_store(w->offload, 2, there, BYTES, owner(0)));
    assert_ok(pst_offload_load(w->offload, 2, back, BYTES, NULL, 0, owner(1)));
    pst_offload_drop(w->offload, 2);
    pst_offload_drop(w->offload, 2);
    assert_status(pst_offload_wait_load(w->offload, 2), PST_ESTATE);
    do {
        (void)pst_run_once(w->runtime, NULL);
        pst_offload_get_stats(w->offload, &stats);
    } while (stats.in_flight > 0);
    assert_filled(back, 31, BYTES);
    assert_int_equal(stats.host_bytes, 0);
    assert_int_equal(stats.keys, 0);
    free_memory(w, there, BYTES), free_memory(w, back, BYTES);
}

static void memory_of_the_caller_is_adopted(void **state) {
    world *w = *state;
    unsigned char *back = device_memory(w, BYTES), *given = malloc(BYTES);
    pst_offload_stats stats = {.size = sizeof stats};
    void *memory = NULL;
    size_t bytes = 0;
    memset(given, 41, BYTES);
    assert_ok(pst_offload_adopt(w->offload, 9, given, BYTES));
    assert_ok(pst_offload_load(w->offload, 9, back, BYTES, NULL, 0, owner(0)));
    assert_ok(pst_offload_host_memory(w->offload, 9, &memory, &bytes));
    assert_ptr_equal(memory, given);
    assert_int_equal(bytes, BYTES);
    assert_filled(back, 41, BYTES);
    memset(given, 42, BYTES); /* the host has updated it */
    assert_ok(pst_offload_load(w->offload, 9, back, BYTES, NULL, 0, owner(0)));
    assert_ok(pst_offload_wait_load(w->offload, 9));
    finish_compute(w);
    assert_filled(back, 42, BYTES);
    /* A store takes memory of its own, and writes nothing of the caller's. */
    compute_fill(w, back, 43, BYTES);
    assert_ok(pst_offload_store(w->offload, 9, back, BYTES, owner(0)));
    assert_ok(pst_offload_host_memory(w->offload, 9, &memory, &bytes));
    assert_ptr_not_equal(memory, given);
    assert_filled(memory, 43, BYTES);
    assert_filled(given, 42, BYTES);
    pst_offload_get_stats(w->offload, &stats);
    assert_int_equal(stats.host_bytes, BYTES);
    free(given);
    free_memory(w, back, BYTES);
}

/* ---- errors --------------------------------------------------------------------------------- */

static void what_cannot_be_is_refused(void **state) {
    world *w = *state;
    unsigned char *there = device_memory(w, BYTES);
    void *memory;
    size_t bytes;
    assert_status(pst_offload_store(w->offload, 1, NULL, BYTES, NULL), PST_EINVAL);
    assert_error(w->runtime, "states", "key 1");
    assert_status(pst_offload_store(w->offload, 1, there, 0, NULL), PST_EINVAL);
    assert_status(pst_offload_adopt(w->offload, 1, NULL, BYTES), PST_EINVAL);
    assert_status(pst_offload_load(w->offload, 1, there, BYTES, NULL, 0, NULL), PST_ESTATE);
    assert_error(w->runtime, "nothing is stored", "key 1");
    assert_status(pst_offload_wait_store(w->offload, 1), PST_ESTATE);
    assert_status(pst_offload_host_memory(w->offload, 1, &memory, &bytes), PST_ESTATE);
    assert_ok(pst_offload_store(w->offload, 1, there, BYTES, owner(0)));
    assert_status(pst_offload_wait_load(w->offload, 1), PST_ESTATE);
    assert_error(w->runtime, "reload", "key 1");
    pst_event *events[PST_OFFLOAD_MOST_AFTER + 1] = {NULL};
    assert_status(
        pst_offload_load(w->offload, 1, there, BYTES, events, PST_OFFLOAD_MOST_AFTER + 1, NULL),
        PST_EINVAL);
    assert_ok(pst_offload_wait_store(w->offload, 1));
    finish_compute(w);
    assert_status(pst_offload_create(w->runtime, NULL, &(pst_offload *){NULL}), PST_EINVAL);
    assert_error(w->runtime, "options.size");
    free_memory(w, there, BYTES);
}

/* ---- any order ------------------------------------------------------------------------------ */

enum { KEYS = 5, PLACES = 6 };

typedef struct model {
    unsigned char *places[PLACES];
    int contents[PLACES], stored[KEYS];
} model;

static void random_step(world *w, model *m, uint64_t *dice, int *next) {
    const uint64_t key = random_below(dice, KEYS);
    const size_t place = random_below(dice, PLACES);
    switch (random_below(dice, 4)) {
    case 0:
        *next = *next % 250 + 1;
        compute_fill(w, m->places[place], *next, BYTES);
        m->contents[place] = *next;
        break;
    case 1:
        assert_ok(pst_offload_store(w->offload, key, m->places[place], BYTES, owner(0)));
        assert_ok(pst_offload_wait_store(w->offload, key));
        m->stored[key] = m->contents[place];
        break;
    case 2:
        if (m->stored[key] < 0) break;
        assert_ok(pst_offload_load(w->offload, key, m->places[place], BYTES, NULL, 0, owner(1)));
        assert_ok(pst_offload_wait_load(w->offload, key));
        m->contents[place] = m->stored[key];
        break;
    default:
        if (random_below(dice, 4) != 0) break;
        pst_offload_drop(w->offload, key);
        m->stored[key] = -1;
    }
}

static void any_order_of_calls_keeps_the_contents(void **state) {
    world *w = *state;
    uint64_t dice = random_seed("any_order_of_calls_keeps_the_contents");
    model m;
    int next = 0;
    for (size_t i = 0; i < PLACES; i++) {
        m.places[i] = device_memory(w, BYTES);
        compute_fill(w, m.places[i], m.contents[i] = 251, BYTES);
    }
    for (size_t i = 0; i < KEYS; i++)
        m.stored[i] = -1;
    for (int step = 0; step < 400; step++)
        random_step(w, &m, &dice, &next);
    finish_compute(w);
    for (size_t i = 0; i < PLACES; i++) {
        assert_filled(m.places[i], m.contents[i], BYTES);
        free_memory(w, m.places[i], BYTES);
    }
}

#define OFFLOAD_CASES(setup, teardown)                                                             \
    cmocka_unit_test_setup_teardown(what_is_stored_comes_back, setup, teardown),                   \
        cmocka_unit_test_setup_teardown(                                                           \
            a_load_comes_behind_its_store_and_a_store_behind_the_loads, setup, teardown),          \
        cmocka_unit_test_setup_teardown(one_store_is_loaded_many_times, setup, teardown),          \
        cmocka_unit_test_setup_teardown(memory_is_released_when_nobody_waits_too, setup,           \
                                        teardown),                                                 \
        cmocka_unit_test_setup_teardown(a_known_step_takes_no_memory, setup, teardown),            \
        cmocka_unit_test_setup_teardown(reserved_memory_is_used, setup, teardown),                 \
        cmocka_unit_test_setup_teardown(a_key_may_get_another_size, setup, teardown),              \
        cmocka_unit_test_setup_teardown(a_dropped_key_is_forgotten_and_its_copies_go_on, setup,    \
                                        teardown),                                                 \
        cmocka_unit_test_setup_teardown(memory_of_the_caller_is_adopted, setup, teardown),         \
        cmocka_unit_test_setup_teardown(what_cannot_be_is_refused, setup, teardown),               \
        cmocka_unit_test_setup_teardown(any_order_of_calls_keeps_the_contents, setup, teardown)

#endif
