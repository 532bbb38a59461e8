/* Turns: no two readers of one source at once, and no deadlock, whatever the delays. */
#include "ce_world.h"

#define ROUNDS 12

/* The copies of all rounds are pulled by hand; ranks enqueue in a random order. */
static void enqueue_round(ce_rank *rank, uint64_t round, int take_turns) {
    const ce_world *world = rank->world;
    pst__ce *ce = rank->comm->context;
    const uint32_t sequence = pst__flag_sequence(ce->first_sequence, round, 1);
    pst__flag_steps steps = {.count = 0};
    for (int step = 0; step < world->size - 1; step++) {
        const int source = pst__turn_source(rank->rank, world->size, step);
        const pst_copy copy = {rank->home + CE_HOME / 2, world->ranks[source].home, 4096};
        if (take_turns) pst__turn_wait(&ce->turns, &steps, sequence, step);
        assert_int_equal(pst__flags_enqueue(&ce->flags, rank->pulls, &steps), PST_OK);
        assert_int_equal(world->device->ops->copy(world->device, rank->pulls, &copy, 1), PST_OK);
        if (take_turns) pst__turn_pass(&ce->turns, &steps, sequence, step);
    }
    assert_int_equal(pst__flags_enqueue(&ce->flags, rank->pulls, &steps), PST_OK);
}

static void run_rounds(ce_world *world, int take_turns) {
    uint64_t rounds[PST_CE_MAX_RANKS] = {0};
    for (uint64_t left = ROUNDS * (uint64_t)world->size; left > 0;) {
        const uint32_t rank = random_below(&world->dice, (uint32_t)world->size);
        world->clock += random_below(&world->dice, 3000);
        if (rounds[rank] == ROUNDS) continue;
        enqueue_round(&world->ranks[rank], ++rounds[rank], take_turns);
        left--;
    }
    if (!ce_run_all(world, 100000000)) fail_msg("%d ranks: locked up", world->size);
}

static ce_world world_of(uint64_t seed, int size) {
    ce_world world = {.size = size, .dice = seed};
    world.sim.latency_ns = random_below(&world.dice, 300);
    world.sim.bytes_each_us = 1000 + random_below(&world.dice, 100000);
    world.most_jitter = random_below(&world.dice, 20000);
    world.options.first_sequence = (uint32_t)(0u - random_below(&world.dice, ROUNDS + 2));
    return world;
}

static uint64_t collisions_of(uint64_t seed, int size, int take_turns) {
    ce_world world = world_of(seed, size);
    ce_open(&world);
    run_rounds(&world, take_turns);
    assert_int_equal(world.pulls, ROUNDS * size * (size - 1));
    ce_close(&world);
    return world.collisions;
}

static void no_two_readers_of_one_source(void **state) {
    (void)state;
    const uint64_t seed = random_seed("turns");
    for (int size = 2; size <= 8; size++)
        for (uint64_t i = 0; i < (uint64_t)random_programs(25); i++)
            if (collisions_of(mix(seed + i), size, 1) > 0)
                fail_msg("%d ranks, seed %llu: two readers of one source", size,
                         (unsigned long long)(seed + i));
}

/* The test above can fail. */
static void without_turns_readers_collide(void **state) {
    (void)state;
    uint64_t collisions = 0;
    for (uint64_t seed = 1; seed <= 5; seed++)
        collisions += collisions_of(seed, 4, 0);
    assert_true(collisions > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_two_readers_of_one_source),
        cmocka_unit_test(without_turns_readers_collide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
