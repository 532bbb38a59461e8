/* Flat shards: gathers and reductions in the caller's order. */
#include "flat_rank.h"

static void flat_backward(flat_rank *rank, int is_last) {
    rank_state *state = rank->state;
    CHECK_OK(pst_flat_begin_backward(rank->flat, is_last));
    for (size_t p = state->model->parameter_count; p-- > 0;) {
        DO(flat_use(rank, p, state->model->gather_dtype));
        DO(flat_report(rank, p));
    }
    CHECK_OK(pst_flat_end_backward(rank->flat, 1));
}

static void flat_forward(flat_rank *rank) {
    for (size_t p = 0; p < rank->state->model->parameter_count; p++) {
        flat_use(rank, p, rank->state->model->gather_dtype);
        rank_state *state = rank->state;
        CHECK_FINE();
    }
}

static void train(flat_rank *rank, int steps) {
    rank_state *state = rank->state;
    for (int step = 0; step < steps; step++) {
        DO(flat_forward(rank));
        DO(flat_backward(rank, 1));
        flat_step(rank);
    }
}

/* Frozen parameters' shards change, too, in these tests. */
static model trainable_model(pst_dtype dtype) {
    model model = odd_model(3);
    model.shapes[model.parameter_count - 1].trainable = 1;
    model.gather_dtype = dtype;
    return model;
}

static void train_body(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    if (state->failure[0] == '\0') train(&rank, 4);
    close_flat(&rank);
}

static void every_step_is_right(void **unused) {
    (void)unused;
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int dtype = 0; dtype < 2; dtype++) {
            model model = trainable_model(dtype == 0 ? PST_FLOAT32 : PST_BFLOAT16);
            model.prefetch_bytes = 2000;
            run_ranks(worlds[i], &model, train_body, NULL);
        }
}

static void in_place_body(rank_state *state) {
    flat_rank rank;
    pst_flat_stats stats = {.size = sizeof stats};
    open_flat(&rank, state);
    if (state->failure[0] == '\0') train(&rank, 4);
    pst_flat_get_stats(rank.flat, &stats);
    size_t odd = rank.chunks[4], whole = 0;
    for (size_t p = 0; p < state->model->parameter_count; p++)
        whole += rank.chunks[p];
    if (stats.source_bytes > (odd + 128) * sizeof(float) ||
        (stats.source_bytes == 0) != (state->gather->ops->open_memory == NULL))
        fail_at(state, __FILE__, __LINE__, "shards that lie in opened memory were copied");
    if (whole < 2 * (odd + 128)) fail_at(state, __FILE__, __LINE__, "too little to tell");
    close_flat(&rank);
}

static void shards_in_opened_memory_are_gathered_from_there(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 33);
    model.in_place = 1;
    model.prefetch_bytes = 2000;
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_ranks(worlds[i], &model, in_place_body, NULL);
}

static void moved_body(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    for (int step = 0; step < 4 && state->failure[0] == '\0'; step++) {
        const size_t p = step % 2 == 0 ? 1 : 2;
        float *moved = malloc((rank.chunks[p] + 1) * sizeof(float));
        if (!is_on_host(state)) finish_compute(state); /* it writes where shards are by then */
        CHECK_OK(pst_flat_unbind(rank.flat, rank.parameters[p]));
        uint32_t copy;
        void *memory;
        CHECK_OK(pst_flat_copy(rank.flat, rank.parameters[p], PST_FLOAT32, &copy));
        CHECK(pst_flat_gather(rank.flat, copy, &memory) == PST_ESTATE);
        state->gradients[step] = moved; /* freed with the rank */
        rank.shards[p] = moved;
        CHECK_OK(pst_flat_bind(rank.flat, rank.parameters[p], moved, moved, PST_FLOAT32));
        write_flat(&rank);
        CHECK_OK(pst_flat_updated(rank.flat));
        train(&rank, 2);
    }
    close_flat(&rank);
}

static void a_shard_may_move_between_steps(void **unused) {
    (void)unused;
    for (int in_place = 0; in_place <= 1; in_place++) {
        model model = chain_model(3, 6, 33);
        model.in_place = in_place;
        model.prefetch_bytes = 2000;
        run_ranks(3, &model, moved_body, NULL);
    }
}

static void large_gradients_travel_in_parts(void **unused) {
    (void)unused;
    model model = trainable_model(PST_FLOAT32);
    model.bucket_bytes = 512;
    run_ranks(3, &model, train_body, NULL);
}

static void ahead_body(rank_state *state) {
    flat_rank rank;
    pst_flat_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    open_flat(&rank, state);
    if (state->failure[0] == '\0') train(&rank, 3);
    pst_flat_get_stats(rank.flat, &before);
    if (state->failure[0] == '\0') train(&rank, 1);
    pst_flat_get_stats(rank.flat, &after);
    if (after.gathers - before.gathers > 3 || after.unused != before.unused ||
        after.ahead - before.ahead + 1 < state->model->parameter_count - 1)
        fail_at(state, __FILE__, __LINE__, "nothing was foreseen");
    close_flat(&rank);
}

static void what_followed_once_is_gathered_ahead_in_few_collectives(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 33); /* of one home: the fifth has another */
    model.prefetch_bytes = 1 << 20;
    model.prefetch_ahead = 100;
    run_ranks(2, &model, ahead_body, NULL);
}

/* How many of the copies are gathered when a hint names them. */
static size_t hinted(flat_rank *rank, size_t first, size_t count) {
    uint32_t copies[MOST_PARAMETERS];
    pst_flat_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    pst_flat_get_stats(rank->flat, &before);
    for (size_t i = 0; i < count; i++)
        (void)pst_flat_copy(rank->flat, rank->parameters[first + i], PST_FLOAT32, &copies[i]);
    if (pst_flat_prefetch(rank->flat, copies, count) != PST_OK)
        fail_at(rank->state, __FILE__, __LINE__, "prefetch");
    pst_flat_get_stats(rank->flat, &after);
    return (size_t)(after.ahead - before.ahead);
}

static void expect_hinted(flat_rank *rank, size_t first, size_t count, size_t expected) {
    if (rank->state->failure[0] == '\0' && hinted(rank, first, count) != expected)
        fail_at(rank->state, __FILE__, __LINE__, "not as many as there is room for");
}

/* Copies of 1056 bytes, and room for two. */
static void room_body(rank_state *state) {
    flat_rank rank;
    uint32_t copy;
    void *memory;
    open_flat(&rank, state);
    expect_hinted(&rank, 0, 4, 2);
    expect_hinted(&rank, 2, 2, 0);
    begin_flat_use(&rank, 0, PST_FLOAT32, &copy, &memory);
    expect_hinted(&rank, 1, 3, 1);
    (void)pst_flat_copy(rank.flat, rank.parameters[5], PST_FLOAT32, &copy);
    (void)pst_flat_set_resident(rank.flat, copy, 1); /* stays anyway */
    expect_hinted(&rank, 5, 1, 1);
    expect_hinted(&rank, 4, 1, 0);
    close_flat(&rank);
}

static void hints_are_followed_as_far_as_there_is_room(void **unused) {
    (void)unused;
    model model = chain_model(3, 6, 33);
    model.prefetch_bytes = 2500;
    run_ranks(2, &model, room_body, NULL);
}

static void large_body(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    expect_hinted(&rank, 0, 3, 1);
    close_flat(&rank);
}

static void a_copy_larger_than_the_room_is_gathered_ahead_alone(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 33);
    model.prefetch_bytes = 1000;
    run_ranks(2, &model, large_body, NULL);
}

/* Of 8 rows each, with room for 2500 bytes ahead. */
static model three_widths(size_t first, size_t second, size_t third) {
    model model = chain_model(3, 3, first);
    model.shapes[1].row_elements = second;
    model.shapes[2].row_elements = third;
    model.prefetch_bytes = 2500;
    return model;
}

/* The first one and the last are larger than the room, and what lies between them stays. */
static void place_body(rank_state *state) {
    flat_rank rank;
    uint32_t copies[3];
    void *memory[3];
    open_flat(&rank, state);
    for (size_t p = 0; p < 3 && state->failure[0] == '\0'; p++) {
        begin_flat_use(&rank, p, PST_FLOAT32, &copies[p], &memory[p]);
        if (p == 0) (void)pst_flat_release(rank.flat, copies[p]);
    }
    if (state->failure[0] == '\0' && memory[2] != memory[0])
        fail_at(state, __FILE__, __LINE__, "another place");
    (void)pst_flat_end_uses(rank.flat);
    close_flat(&rank);
}

static void large_copies_take_turns_at_one_place(void **unused) {
    (void)unused;
    model model = three_widths(400, 33, 400);
    run_ranks(2, &model, place_body, NULL);
}

/* As in a forward and its backward. */
static void again_body(rank_state *state) {
    const size_t uses[] = {0, 1, 2, 2, 1, 0};
    pst_flat_stats before = {.size = sizeof before}, after = {.size = sizeof after};
    flat_rank rank;
    open_flat(&rank, state);
    for (int step = 0; step < 3 && state->failure[0] == '\0'; step++) {
        pst_flat_get_stats(rank.flat, &before);
        for (size_t i = 0; i < 6 && state->failure[0] == '\0'; i++)
            flat_use(&rank, uses[i], PST_FLOAT32);
        (void)pst_flat_updated(rank.flat);
        pst_flat_get_stats(rank.flat, &after);
    }
    if (state->failure[0] == '\0' && after.gathered - before.gathered != 3)
        fail_at(state, __FILE__, __LINE__, "something was gathered twice");
    close_flat(&rank);
}

static void a_large_copy_that_is_used_again_soon_stays(void **unused) {
    (void)unused;
    model model = three_widths(33, 33, 400);
    run_ranks(2, &model, again_body, NULL);
}

static void resident_body(rank_state *state) {
    flat_rank rank;
    void *first = NULL, *memory = NULL;
    uint32_t copy;
    open_flat(&rank, state);
    for (int step = 0; step < 3 && state->failure[0] == '\0'; step++) {
        begin_flat_use(&rank, 1, PST_FLOAT32, &copy, &memory);
        if (step == 0 && pst_flat_set_resident(rank.flat, copy, 1) == PST_OK) first = memory;
        if (memory != first) fail_at(state, __FILE__, __LINE__, "it moved");
        (void)pst_flat_release(rank.flat, copy);
        train(&rank, 1);
    }
    close_flat(&rank);
}

static void a_resident_copy_keeps_its_address_and_follows_updates(void **unused) {
    (void)unused;
    model model = trainable_model(PST_FLOAT32);
    model.prefetch_bytes = 3000;
    run_ranks(2, &model, resident_body, NULL);
}

/* The first rank's shards change while the second one has not begun to read them. */
static void late_reader_body(rank_state *state) {
    flat_rank rank;
    uint32_t copy;
    void *memory;
    open_flat(&rank, state);
    CHECK_OK(pst_flat_copy(rank.flat, rank.parameters[1], PST_FLOAT32, &copy));
    CHECK_OK(pst_flat_set_resident(rank.flat, copy, 1));
    if (state->rank == 1) async_sleep(30000);
    CHECK_OK(pst_flat_prefetch(rank.flat, &copy, 1));
    if (state->rank == 1) {
        DO(begin_flat_use(&rank, 1, PST_FLOAT32, &copy, &memory));
        CHECK_OK(pst_flat_release(rank.flat, copy));
    }
    CHECK_OK(pst_flat_begin_backward(rank.flat, 1));
    CHECK_OK(pst_flat_end_backward(rank.flat, 1));
    write_flat(&rank);
    close_flat(&rank);
}

static void shards_do_not_change_below_a_gather_that_nobody_has_used(void **unused) {
    (void)unused;
    const model model = trainable_model(PST_FLOAT32);
    run_ranks(2, &model, late_reader_body, NULL);
}

/* C3: accumulation belongs to the parameter, whatever graph or backward a gradient comes from. */
static void accumulate_body(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    for (int step = 0; step < 3 && state->failure[0] == '\0'; step++) {
        flat_backward(&rank, 0);
        if (state->failure[0] == '\0' && pst_flat_begin_backward(rank.flat, 1) != PST_OK)
            fail_at(state, __FILE__, __LINE__, "begin_backward");
        flat_report(&rank, 1);
        flat_report(&rank, 1);
        flat_report(&rank, 0);
        (void)pst_flat_end_backward(rank.flat, 0);
        flat_report(&rank, 1);
        if (pst_flat_end_backward(rank.flat, 1) != PST_OK)
            fail_at(state, __FILE__, __LINE__, "end_backward");
        flat_step(&rank);
    }
    close_flat(&rank);
}

static void gradients_of_several_backwards_and_parts_add_up(void **unused) {
    (void)unused;
    model model = trainable_model(PST_FLOAT32);
    run_ranks(2, &model, accumulate_body, NULL);
}

/* The target of a parameter without a gradient since the last update. */
static void missing_body(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    if (state->failure[0] == '\0') train(&rank, 1);
    if (pst_flat_begin_backward(rank.flat, 1) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "begin_backward");
    flat_report(&rank, 0);
    if (pst_flat_end_backward(rank.flat, 1) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "end_backward");
    for (size_t p = 1; p < state->model->parameter_count; p++) {
        memset(rank.expected[p], 0, flat_elements(&rank, p) * sizeof(float));
        rank.has_sum[p] = 1;
    }
    flat_step(&rank);
    close_flat(&rank);
}

static void a_missing_gradient_is_zero_and_not_the_last_one(void **unused) {
    (void)unused;
    model model = trainable_model(PST_FLOAT32);
    run_ranks(2, &model, missing_body, NULL);
}

static void broken_body(rank_state *state) {
    flat_rank rank;
    open_flat(&rank, state);
    if (state->failure[0] == '\0') train(&rank, 1);
    (void)pst_flat_begin_backward(rank.flat, 1);
    flat_report(&rank, 1);
    memset(rank.has_sum, 0, sizeof rank.has_sum);
    if (state->failure[0] == '\0') train(&rank, 2);
    close_flat(&rank);
}

static void a_backward_that_was_broken_off_is_forgotten(void **unused) {
    (void)unused;
    model model = trainable_model(PST_FLOAT32);
    run_ranks(2, &model, broken_body, NULL);
}

static void to_memory_body(rank_state *state) {
    flat_rank rank;
    uint32_t copy;
    open_flat(&rank, state);
    for (size_t p = 0; p < state->model->parameter_count && state->failure[0] == '\0'; p++) {
        float *memory = malloc((rank.chunks[p] * (size_t)state->world + 1) * sizeof(float));
        if (pst_flat_copy(rank.flat, rank.parameters[p], PST_FLOAT32, &copy) != PST_OK ||
            pst_flat_gather_to(rank.flat, copy, memory) != PST_OK)
            fail_at(state, __FILE__, __LINE__, "gather_to");
        const flat_job job = {&rank, rank.version, p, memory, PST_FLOAT32, NULL, NULL};
        on_compute(state, check_flat_now, &job, sizeof job);
        finish_compute(state);
        free(memory);
    }
    close_flat(&rank);
}

static void a_copy_can_be_gathered_into_other_memory(void **unused) {
    (void)unused;
    model model = trainable_model(PST_FLOAT32);
    run_ranks(3, &model, to_memory_body, NULL);
}

/* ---- any order ------------------------------------------------------------------------------- */

static uint64_t draw(uint64_t *dice, uint64_t bound) {
    *dice += 0x9e3779b97f4a7c15u;
    return mix(*dice) % bound;
}

typedef struct open_use {
    uint32_t copy;
} open_use;

static pst_dtype draw_dtype(uint64_t *dice) {
    return draw(dice, 3) == 0 ? PST_BFLOAT16 : PST_FLOAT32;
}

static void hint(flat_rank *rank, uint64_t *dice) {
    rank_state *state = rank->state;
    uint32_t copies[4];
    size_t count = draw(dice, 5);
    for (size_t i = 0; i < count; i++) {
        size_t p = draw(dice, state->model->parameter_count);
        CHECK_OK(pst_flat_copy(rank->flat, rank->parameters[p], draw_dtype(dice), &copies[i]));
    }
    CHECK_OK(pst_flat_prefetch(rank->flat, copies, count));
}

/* Uses that nest; most of them in the order that the parameters have. */
static void random_uses(flat_rank *rank, uint64_t *dice) {
    rank_state *state = rank->state;
    uint32_t held[4];
    size_t count = 0, parameters = state->model->parameter_count;
    for (size_t i = 0; i < parameters; i++) {
        size_t p = draw(dice, 8) == 0 ? draw(dice, parameters) : i;
        void *memory;
        uint32_t copy;
        if (draw(dice, 10) == 0) hint(rank, dice);
        CHECK_FINE();
        DO(begin_flat_use(rank, p, draw_dtype(dice), &copy, &memory));
        if (draw(dice, 30) == 0)
            CHECK_OK(pst_flat_set_resident(rank->flat, copy, (int)draw(dice, 2)));
        if (count < 4 && draw(dice, 3) == 0)
            held[count++] = copy;
        else
            CHECK_OK(pst_flat_release(rank->flat, copy));
    }
    while (count > 0)
        CHECK_OK(pst_flat_release(rank->flat, held[--count]));
}

static void random_backward(flat_rank *rank, uint64_t *dice, int is_last) {
    rank_state *state = rank->state;
    CHECK_OK(pst_flat_begin_backward(rank->flat, is_last));
    for (uint64_t part = 1 + draw(dice, 2); part > 0; part--) {
        DO(random_uses(rank, dice));
        for (size_t p = state->model->parameter_count; p-- > 0;) {
            if (draw(dice, 4) != 0) flat_report(rank, p);
            CHECK_FINE();
        }
        CHECK_OK(pst_flat_end_backward(rank->flat, part == 1));
    }
}

static void random_body(rank_state *state) {
    uint64_t dice = state->model->seed;
    flat_rank rank;
    open_flat(&rank, state);
    for (int step = 0; step < 6 && state->failure[0] == '\0'; step++) {
        uint64_t steps_dice = draw(&dice, 3) == 0 ? dice : state->model->seed; /* often the same */
        int backwards = 1 + (int)draw(&dice, 2);
        for (int i = 1; i <= backwards && state->failure[0] == '\0'; i++) {
            uint64_t again = steps_dice;
            random_uses(&rank, &again);
            if (state->failure[0] == '\0') random_backward(&rank, &again, i == backwards);
        }
        flat_step(&rank);
    }
    close_flat(&rank);
}

static void random_programs_are_right(void **unused) {
    (void)unused;
    uint64_t seed = random_seed(__func__);
    for (int i = 0; i < random_programs(25); i++, seed++) {
        uint64_t dice = seed;
        model model = empty_model(3);
        for (size_t p = 2 + draw(&dice, 12); p > 0; p--)
            add_shape(&model, draw(&dice, 12), 1 + draw(&dice, 60), 1);
        model.prefetch_bytes = draw(&dice, 3) * (1 + draw(&dice, 20000));
        model.prefetch_ahead = (uint32_t)draw(&dice, 4);
        model.bucket_bytes = draw(&dice, 2) * 512 * (1 + draw(&dice, 20));
        model.one_comm = draw(&dice, 4) == 0;
        model.part_bytes = draw(&dice, 3) * 700; /* of a batch */
        model.in_place = draw(&dice, 2) == 0;
        model.delay_us = (unsigned)(draw(&dice, 3) * draw(&dice, 30));
        model.seed = seed;
        printf("PST_SEED=%llu\n", (unsigned long long)seed);
        (void)fflush(stdout);
        run_ranks(1 + (int)draw(&dice, MOST_RANKS), &model, random_body, NULL);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_step_is_right),
        cmocka_unit_test(shards_in_opened_memory_are_gathered_from_there),
        cmocka_unit_test(a_shard_may_move_between_steps),
        cmocka_unit_test(large_gradients_travel_in_parts),
        cmocka_unit_test(what_followed_once_is_gathered_ahead_in_few_collectives),
        cmocka_unit_test(hints_are_followed_as_far_as_there_is_room),
        cmocka_unit_test(a_copy_larger_than_the_room_is_gathered_ahead_alone),
        cmocka_unit_test(large_copies_take_turns_at_one_place),
        cmocka_unit_test(a_large_copy_that_is_used_again_soon_stays),
        cmocka_unit_test(a_resident_copy_keeps_its_address_and_follows_updates),
        cmocka_unit_test(shards_do_not_change_below_a_gather_that_nobody_has_used),
        cmocka_unit_test(gradients_of_several_backwards_and_parts_add_up),
        cmocka_unit_test(a_missing_gradient_is_zero_and_not_the_last_one),
        cmocka_unit_test(a_backward_that_was_broken_off_is_forgotten),
        cmocka_unit_test(a_copy_can_be_gathered_into_other_memory),
        cmocka_unit_test(random_programs_are_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
