/* Engines of several replicas, each of one rank: what goes between them goes over nccl. */
#include "engine_rank.h"

static void *create_alone(void *argument) {
    nccl_rank *rank = argument;
    engine_rank *self = &engines[rank->rank];
    pst_status status = pst_local_world_create(rank->runtime, 1, &self->place);
    if (status == PST_OK)
        status = pst_local_comm_create(self->place, rank->runtime, 0, 0, &self->host);
    if (status == PST_OK)
        status = pst_comm_exchange_open(rank->runtime, self->host, &self->exchange);
    if (status == PST_OK)
        status = pst_nccl_comm_create(rank->runtime, rank->device, &self->exchange, &rank->options,
                                      &self->alone);
    rank->status = status;
    return NULL;
}

/* All-reduces between them, and no gather that moves anything. */
static void steps_of_replicas_as_graphs_are_steps(void **state) {
    nccl_world *world = *state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        create_comms(world);
        on_ranks(world, RANKS, create_alone);
        for (int i = 0; i < RANKS; i++)
            assert_int_equal(world->ranks[i].status, PST_OK);
        train_and_check(world, seed, seed % 2 == 0 ? train_by_turns : train_by_launches,
                        seed % 2 == 0 ? 16 : 24);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(steps_of_replicas_as_graphs_are_steps, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
