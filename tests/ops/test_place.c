/* Shards that lie where peers read them: nothing is copied, so whoever writes them meets the
 * readers. */
#include "world.h"

static void on_all_worlds(const model *model, rank_body body) {
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run_ranks(worlds[i], model, body, NULL);
}

static model odd_in_place(int stage, uint64_t seed) {
    model model = odd_model(stage);
    model.in_place = 1;
    model.bucket_bytes = 256;
    model.delay_us = 40;
    model.seed = seed;
    return model;
}

static int has_places(const rank_state *state) {
    return state->gather->ops->open_memory != NULL && state->model->gather_dtype == PST_FLOAT32;
}

static void *place_of(rank_state *state, size_t g) {
    void *place = NULL;
    if (pst_zero_shard_place(state->engine, state->groups[g], &place) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "no answer about a place");
    return place;
}

/* ---- where they are -------------------------------------------------------------------------- */

static void look_for_places(rank_state *state) {
    DO(build_engine(state));
    const pst_zero_stats stats = stats_of(state);
    size_t all = 0;
    for (size_t g = 0; g < state->model->group_count; g++) {
        const void *place = place_of(state, g);
        CHECK((place != NULL) == has_places(state));
        CHECK(!has_places(state) || place == (void *)state->shards[g]);
        all += state->layouts[g].shard_bytes;
    }
    CHECK(has_places(state) ? stats.places_reserved >= all : stats.places_reserved == 0);
}

static void places_are_where_peers_read_memory_that_was_opened(void **unused) {
    (void)unused;
    model model = chain_model(3, 4, 16);
    model.in_place = 1;
    on_all_worlds(&model, look_for_places);
    model.gather_dtype = PST_BFLOAT16;
    on_all_worlds(&model, look_for_places);
}

static void look_at_what_is_gathered(rank_state *state) {
    DO(build_engine(state));
    CHECK_OK(pst_zero_begin_forward(state->engine, 0));
    for (size_t g = 0; g < state->model->group_count && state->failure[0] == '\0'; g++) {
        void *memory = NULL;
        CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
        CHECK_OK(pst_zero_wait(state->engine, state->groups[g], &memory));
        CHECK(memory != NULL);
        CHECK((memory == (void *)state->shards[g]) ==
                  (has_places(state) && state->model->stage < 3) ||
              state->world == 1);
        end_use(state, g);
    }
    CHECK_FINE();
    CHECK_OK(pst_zero_end_forward(state->engine));
    if (has_places(state) && state->world > 1 && state->model->stage < 3)
        CHECK(stats_of(state).arena_reserved == 0);
    for (uint64_t step = 1; step <= 4; step++)
        DO(train_step(state, step)); /* compares with what one rank alone would have */
}

static void shards_lie_within_what_stages_1_and_2_gather(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= seeds_of(4); seed++)
        for (int stage = 1; stage <= 3; stage++) {
            model model = odd_in_place(stage, seed);
            on_all_worlds(&model, look_at_what_is_gathered);
            model.gather_dtype = PST_BFLOAT16;
            on_all_worlds(&model, look_at_what_is_gathered);
        }
}

static void bind_askew(rank_state *state) {
    char text[1024] = "";
    DO(build_engine(state));
    char *place = place_of(state, 1);
    if (place == NULL) return;
    CHECK(pst_zero_bind_shard(state->engine, state->groups[1], place + 8) == PST_EINVAL);
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    CHECK(strstr(text, "group 'g1': its shard overlaps its place") != NULL);
    CHECK_OK(pst_zero_bind_shard(state->engine, state->groups[1], state->shards[1]));
}

static void a_shard_in_a_part_of_its_place_is_refused(void **unused) {
    (void)unused;
    const model model = chain_model(3, 3, 64);
    on_all_worlds(&model, bind_askew);
}

/* ---- readers and writers --------------------------------------------------------------------- */

static void change_after_every_pass(rank_state *state) {
    DO(build_engine(state));
    for (uint64_t step = 1; step <= 6; step++) {
        fresh_targets(state);
        DO(forward(state, 1));
        update(state); /* no backward comes between */
        DO(forward(state, 0));
        update(state);
        DO(forward(state, 1));
        DO(backward(state, step));
        DO(update(state));
    }
}

static void shards_may_change_after_any_pass(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= seeds_of(4); seed++)
        for (int stage = 1; stage <= 3; stage++) {
            model model = odd_in_place(stage, seed);
            model.one_comm = seed > 2;
            run_ranks(2 * (int)(1 + seed % 2), &model, change_after_every_pass, NULL);
        }
}

/* Stages 1 and 2 gather all groups, also such as nobody uses. */
static void change_what_is_not_used(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 6; step++) {
        CHECK_OK(pst_zero_begin_forward(state->engine, 1));
        DO(use(state, 0));
        CHECK_OK(pst_zero_end_forward(state->engine));
        DO(update(state));
    }
}

/* Of a forward that was broken off gathers are on their way that nobody has waited for. */
static void change_in_mid_forward(rank_state *state) {
    DO(build_engine(state));
    for (int step = 0; step < 3; step++) {
        CHECK_OK(pst_zero_begin_forward(state->engine, 1));
        for (size_t g = 0; g + 1 < state->model->group_count; g++)
            CHECK_OK(pst_zero_gather(state->engine, state->groups[g]));
        CHECK_OK(pst_zero_updated(state->engine)); /* casts the last one's shard */
        DO(forward(state, 1));
        DO(finish_compute(state));
    }
}

static void gathers_that_are_launched_late_do_not_wait_for_later_writes(void **unused) {
    (void)unused;
    model model = chain_model(2, 4, 16);
    model.in_place = 1;
    model.start_us = 3000;
    run_ranks(2, &model, change_what_is_not_used, NULL);
    model.in_place = 0;
    model.stage = 3;
    model.gather_dtype = PST_BFLOAT16;
    run_ranks(2, &model, change_in_mid_forward, NULL);
}

/* ---- moving ---------------------------------------------------------------------------------- */

static void bind_at(rank_state *state, size_t g, float *shard) {
    state->shards[g] = shard;
    CHECK_OK(pst_zero_bind_shard(state->engine, state->groups[g], shard));
}

/* Each rank at steps of its own: what peers read is in the same place all the time. */
static void move_to_and_fro(rank_state *state) {
    float *elsewhere[MOST_GROUPS] = {NULL};
    build_engine(state);
    for (uint64_t step = 1; step <= 8 && state->failure[0] == '\0'; step++) {
        const size_t g = (step + (size_t)state->rank) % state->model->group_count;
        float *place = place_of(state, g);
        if (elsewhere[g] == NULL) elsewhere[g] = calloc(1, state->layouts[g].shard_bytes + 1);
        if (place != NULL) {
            forward(state, 0); /* peers may still read behind its end */
            bind_at(state, g, state->shards[g] == place ? elsewhere[g] : place);
            update(state); /* writes it, where it now is */
        }
        if (state->failure[0] == '\0') train_step(state, step);
    }
    if (state->failure[0] == '\0') finish_compute(state);
    pst_zero_destroy(state->engine);
    state->engine = NULL;
    for (size_t g = 0; g < state->model->group_count; g++) {
        if (state->shards[g] == elsewhere[g]) state->shards[g] = NULL;
        free(elsewhere[g]);
    }
}

static void shards_may_leave_their_places_and_come_back(void **unused) {
    (void)unused;
    for (uint64_t seed = 1; seed <= seeds_of(4); seed++) {
        model model = seed % 2 ? chain_model(3, 1, 300) : odd_model(3);
        model.in_place = 1;
        model.delay_us = 40;
        model.seed = seed;
        on_all_worlds(&model, move_to_and_fro);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(places_are_where_peers_read_memory_that_was_opened),
        cmocka_unit_test(shards_lie_within_what_stages_1_and_2_gather),
        cmocka_unit_test(a_shard_in_a_part_of_its_place_is_refused),
        cmocka_unit_test(shards_may_change_after_any_pass),
        cmocka_unit_test(gathers_that_are_launched_late_do_not_wait_for_later_writes),
        cmocka_unit_test(shards_may_leave_their_places_and_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
