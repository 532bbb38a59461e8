/* Random use of an arena against an oracle that knows, unit by unit, who holds what and which
 * events it waits for. */
#include "tests/mem/hand_device.h"
#include "tests/mem/random.h"

#define UNIT   ((size_t)PST_ARENA_ALIGNMENT)
#define UNITS  128 /* capacity, in segments of a quarter of it */
#define EVENTS 8
#define LEASES 64
#define STEPS  4000
#define ROUNDS 12

typedef struct oracle {
    bench bench;
    random_source source;
    pst_arena *arena;
    pst_event events[EVENTS];
    unsigned char holder[UNITS]; /* index of the lease, from 1; 0: none */
    unsigned waits[UNITS];       /* events, a bit each */
    pst_lease leases[LEASES];
    size_t count, leased, peak, acquires;
} oracle;

static unsigned events_of(const oracle *o, const pst_lease *lease) {
    unsigned bits = 0;
    for (size_t i = 0; i < lease->after_count; i++) {
        unsigned bit = 1u << (lease->after[i] - o->events);
        assert_int_equal(bits & bit, 0); /* each once */
        bits |= bit;
    }
    return bits;
}

static unsigned pending_events(const oracle *o) {
    unsigned bits = 0;
    for (size_t i = 0; i < EVENTS; i++)
        if (o->events[i].status == PST_PENDING) bits |= 1u << i;
    return bits;
}

/* The lease lies on units that nobody holds, in one segment, and names what they wait for. */
static void check_new_lease(oracle *o, const pst_lease *lease) {
    size_t first = lease->offset / UNIT, count = lease->bytes / UNIT;
    unsigned waits = 0;
    assert_int_equal(lease->offset % UNIT, 0);
    assert_true(first + count <= UNITS);
    assert_int_equal(first / (UNITS / 4), (first + count - 1) / (UNITS / 4));
    for (size_t i = first; i < first + count; i++) {
        assert_int_equal(o->holder[i], 0);
        waits |= o->waits[i];
    }
    assert_int_equal(events_of(o, lease), waits & pending_events(o));
}

static void hold(oracle *o, const pst_lease *lease) {
    check_new_lease(o, lease);
    size_t index = o->count++;
    o->leases[index] = *lease;
    memset(o->holder + lease->offset / UNIT, (int)index + 1, lease->bytes / UNIT);
    memset(lease->memory, (int)index + 1, lease->bytes);
    o->leased += lease->bytes;
    if (o->leased > o->peak) o->peak = o->leased;
    o->acquires++;
}

static void assert_untouched(const pst_lease *lease, unsigned char byte) {
    const unsigned char *memory = lease->memory;
    for (size_t i = 0; i < lease->bytes; i += 37)
        assert_int_equal(memory[i], byte);
}

/* The last lease moves to the place of the one that ended. */
static void drop(oracle *o, size_t index, unsigned waits) {
    pst_lease *lease = &o->leases[index], *last = &o->leases[--o->count];
    assert_untouched(lease, (unsigned char)(index + 1));
    for (size_t i = 0; i < lease->bytes / UNIT; i++) {
        o->holder[lease->offset / UNIT + i] = 0;
        o->waits[lease->offset / UNIT + i] = waits;
    }
    o->leased -= lease->bytes;
    if (lease == last) return;
    *lease = *last;
    memset(o->holder + lease->offset / UNIT, (int)index + 1, lease->bytes / UNIT);
    memset(lease->memory, (int)index + 1, lease->bytes);
}

static size_t longest_free_run(const oracle *o) {
    size_t longest = 0, run = 0;
    for (size_t i = 0; i < UNITS; i++) {
        if (i % (UNITS / 4) == 0) run = 0;
        run = o->holder[i] == 0 && o->waits[i] == 0 ? run + 1 : 0;
        if (run > longest) longest = run;
    }
    return longest;
}

static void forget_done_events(oracle *o) {
    for (size_t i = 0; i < UNITS; i++)
        o->waits[i] &= pending_events(o);
}

static void acquire_some(oracle *o) {
    size_t bytes = 1 + random_below(&o->source, 12 * UNIT);
    pst_lease lease;
    pst_status status = pst_arena_acquire(o->arena, bytes, &lease);
    forget_done_events(o);
    if (status == PST_OK)
        hold(o, &lease);
    else /* only when the oracle sees no room either */
        assert_true(status == PST_ENOMEM && longest_free_run(o) * UNIT < bytes);
}

static int is_held(const oracle *o, size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++)
        if (o->holder[i] != 0) return 1;
    return 0;
}

static void acquire_planned(oracle *o) {
    size_t first = random_below(&o->source, UNITS), count = 1 + random_below(&o->source, 8);
    if (first % (UNITS / 4) + count > UNITS / 4) return;
    unsigned waits = 0;
    for (size_t i = first; i < first + count; i++)
        waits |= o->waits[i] & pending_events(o);
    int is_busy = is_held(o, first, count) || __builtin_popcount(waits) > (int)PST_LEASE_EVENTS;
    pst_lease lease;
    pst_status status = pst_arena_acquire_at(o->arena, first * UNIT, count * UNIT, &lease);
    assert_int_equal(status, is_busy ? PST_EBUSY : PST_OK);
    if (status != PST_OK) return;
    assert_int_equal(lease.offset, first * UNIT);
    hold(o, &lease);
}

/* Whether a piece or a lease may still name this event: recording it again would make them wait
 * once more, which the oracle does not follow. */
static int is_named(const oracle *o, size_t event) {
    unsigned named = 0;
    for (size_t i = 0; i < UNITS; i++)
        named |= o->waits[i];
    for (size_t i = 0; i < o->count; i++)
        named |= events_of(o, &o->leases[i]);
    return (named & (1u << event)) != 0;
}

static void release_some(oracle *o) {
    if (o->count == 0) return;
    size_t index = random_below(&o->source, o->count);
    pst_lease lease = o->leases[index];
    if (random_below(&o->source, 3) == 0) {
        drop(o, index, events_of(o, &lease) & pending_events(o));
        pst_arena_release(o->arena, &lease, NULL);
        return;
    }
    size_t event = random_below(&o->source, EVENTS);
    if (o->events[event].status != PST_PENDING && is_named(o, event)) return;
    o->events[event].status = PST_PENDING;
    drop(o, index, 1u << event);
    pst_arena_release(o->arena, &lease, &o->events[event]);
}

static void one_step(oracle *o) {
    size_t kind = random_below(&o->source, 10);
    if (kind < 3 && o->count < LEASES)
        acquire_some(o);
    else if (kind < 5 && o->count < LEASES)
        acquire_planned(o);
    else if (kind < 9)
        release_some(o);
    else
        o->events[random_below(&o->source, EVENTS)].status = PST_OK;
    pst_arena_stats stats = stats_of(o->arena);
    assert_int_equal(stats.leased, o->leased);
    assert_int_equal(stats.peak, o->peak);
    assert_int_equal(stats.acquires, o->acquires);
}

static void open_oracle(oracle *o) {
    bench_open(&o->bench);
    pst_arena_options options = arena_options(&o->bench);
    options.limit_bytes = UNITS * UNIT;
    assert_int_equal(pst_arena_create(o->bench.runtime, &options, &o->arena), PST_OK);
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(pst_arena_add_segment(o->arena, UNITS / 4 * UNIT), PST_OK);
}

/* With everything released and done, each segment is one piece again. */
static void close_oracle(oracle *o) {
    while (o->count > 0) {
        pst_lease lease = o->leases[o->count - 1];
        drop(o, o->count - 1, 0);
        pst_arena_release(o->arena, &lease, NULL);
    }
    for (size_t i = 0; i < EVENTS; i++)
        o->events[i].status = PST_OK;
    for (size_t i = 0; i < 4; i++) {
        pst_lease lease;
        assert_int_equal(pst_arena_acquire(o->arena, UNITS / 4 * UNIT, &lease), PST_OK);
        assert_int_equal(lease.after_count, 0);
    }
    assert_int_equal(stats_of(o->arena).grows, 4);
    pst_arena_destroy(o->arena);
    bench_close(&o->bench);
}

static void random_leases_agree_with_an_oracle(void **state) {
    (void)state;
    random_source source = random_open(__func__);
    for (size_t round = 0; round < ROUNDS; round++) {
        oracle o = {.source = {random_next(&source)}};
        open_oracle(&o);
        for (size_t step = 0; step < STEPS; step++)
            one_step(&o);
        close_oracle(&o);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_leases_agree_with_an_oracle)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
