/* Which calls of NCCL a collective becomes. What they do to memory is nccl_collectives' matter. */
#include "fixture.h"

static void assert_calls(nccl_world *world, const pst_collective *collective,
                         const char *const expected[RANKS]) {
    (void)fake_nccl_trail(0);
    (void)fake_nccl_trail(1);
    for (int i = 0; i < RANKS; i++)
        if (start(&world->ranks[i], collective) != PST_OK) fail_msg("%s", world->ranks[i].text);
    for (int i = 0; i < RANKS; i++) {
        assert_int_equal(until_over(&world->ranks[i]), PST_OK);
        assert_string_equal(fake_nccl_trail(i), expected[i]);
    }
    assert_int_equal(fake_nccl_mismatches(), 0);
}

#define BOTH(text) ((const char *const[RANKS]){(text), (text)})

static pst_collective gather_of(nccl_world *world, const pst_segment *segments, size_t count) {
    return (pst_collective){.kind = PST_ALL_GATHER,
                            .name = "layer 1",
                            .dtype = PST_FLOAT8_E4M3,
                            .source = world->ranks[0].memory,
                            .source_bytes = 64,
                            .destination = world->ranks[0].memory + 4096,
                            .segments = segments,
                            .segment_count = count};
}

static void even_segments_are_one_all_gather(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    const pst_segment even[] = {{0, 0, 0, 16}, {1, 0, 16, 16}, {0, 16, 64, 8}, {1, 16, 72, 8}};
    pst_collective gather = gather_of(world, even, 2);
    assert_calls(world, &gather, BOTH("[AllGather 16] "));
    gather.segment_count = 4;
    assert_calls(world, &gather, BOTH("[AllGather 16, AllGather 8] "));
}

static void other_segments_are_broadcasts_in_the_same_group(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    const pst_segment segments[] = {{0, 0, 0, 16},  {1, 0, 16, 12}, /* the last rank has less */
                                    {1, 16, 40, 8}, {0, 16, 48, 8}, /* another order */
                                    {0, 24, 64, 8}, {1, 24, 80, 8}, /* a gap */
                                    {0, 32, 96, 8}, {1, 32, 104, 8}, {1, 40, 112, 4}};
    const pst_collective gather = gather_of(world, segments, 9);
    assert_calls(world, &gather,
                 BOTH("[Broadcast 16>0, Broadcast 12>1, Broadcast 8>1, Broadcast 8>0, "
                      "Broadcast 8>0, Broadcast 8>1, AllGather 8, Broadcast 4>1] "));
}

static pst_collective scatter_of(nccl_world *world, const pst_reduce_piece *piece) {
    return (pst_collective){.kind = PST_REDUCE_SCATTER,
                            .name = "bucket 1",
                            .dtype = PST_BFLOAT16,
                            .source = world->ranks[0].memory,
                            .source_bytes = 32,
                            .stride = 32,
                            .pieces = piece,
                            .piece_count = 1,
                            .staging = world->ranks[0].memory + 8192};
}

static void a_reduce_scatter_is_an_exchange_of_chunks(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    pst_comm *comm = world->ranks[0].comm;
    const pst_reduce_piece piece = {0, 16, world->ranks[0].memory + 4096, PST_BFLOAT16, 0};
    const pst_collective scatter = scatter_of(world, &piece);
    const char *const expected[RANKS] = {"[Send 32>1, Recv 32>1] ", "[Send 32>0, Recv 32>0] "};
    assert_int_equal(comm->ops->staging_bytes(comm, &scatter), 32);
    assert_calls(world, &scatter, expected);
}

static void the_others_are_the_calls_of_their_names(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    char *memory = world->ranks[0].memory;
    const pst_collective all_reduce = {.kind = PST_ALL_REDUCE,
                                       .dtype = PST_FLOAT32,
                                       .destination = memory,
                                       .count = 5,
                                       .reduce = PST_REDUCE_MAX};
    const pst_collective broadcast = {
        .kind = PST_BROADCAST, .dtype = PST_INT16, .destination = memory, .count = 5, .root = 1};
    const pst_collective barrier = {.kind = PST_BARRIER, .staging = memory};
    assert_calls(world, &all_reduce, BOTH("[AllReduce 5] "));
    assert_calls(world, &broadcast, BOTH("[Broadcast 10>1] "));
    assert_calls(world, &barrier, BOTH("[AllReduce 1] "));
}

static void what_is_empty_is_not_called(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    pst_collective nothing = {.dtype = PST_FLOAT32};
    for (int kind = 0; kind < PST_BARRIER; kind++) {
        nothing.kind = (pst_collective_kind)kind;
        assert_calls(world, &nothing, BOTH(""));
    }
}

static void what_nccl_does_not_reduce_is_refused_by_name(void **state) {
    nccl_world *world = *state;
    create_comms(world);
    const pst_collective reduce = {.kind = PST_ALL_REDUCE,
                                   .name = "flags",
                                   .dtype = PST_INT16,
                                   .destination = world->ranks[0].memory,
                                   .count = 5};
    nccl_rank *rank = &world->ranks[1];
    assert_int_equal(start(rank, &reduce), PST_EUNSUPPORTED);
    assert_non_null(strstr(rank->text, "all_reduce 'flags': NCCL does not reduce int16"));
    assert_int_equal(rank->comm->ops->status(rank->comm), PST_OK); /* and nothing else */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(even_segments_are_one_all_gather, set_up, tear_down),
        cmocka_unit_test_setup_teardown(other_segments_are_broadcasts_in_the_same_group, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(a_reduce_scatter_is_an_exchange_of_chunks, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(the_others_are_the_calls_of_their_names, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_is_empty_is_not_called, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_nccl_does_not_reduce_is_refused_by_name, set_up,
                                        tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
