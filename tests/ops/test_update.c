/* Updates behind reductions: that they are those of a step behind the backward, which groups have
 * them, what refuses them, and what is left when a backward is broken off. */
#include "update_rank.h"

/* On the devices that have AdamW, over one to three ranks; under a sanitizer over two, whose
 * threads do all that those of three do. */
static void on_all_worlds(const model *model, rank_body body, void *argument) {
    for (int world = UNDER_SANITIZER ? 2 : 1; world <= (UNDER_SANITIZER ? 2 : 3); world++)
        run_ranks_async(world, model, body, argument);
}

/* Groups of several members, larger than a part, over several buckets. */
static model model_in_parts(int stage) {
    model model = empty_model(stage);
    add_shape(&model, 40, 17, 1);
    add_shape(&model, 7, 3, 1);
    add_shape(&model, 2, 9, 0);
    add_shape(&model, 31, 5, 1);
    close_group(&model);
    add_shape(&model, 2, 300, 1);
    close_group(&model);
    add_shape(&model, 5, 4, 1);
    add_shape(&model, 9, 31, 1);
    close_group(&model);
    model.bucket_bytes = model.part_bytes = 256;
    return model;
}

/* ---- the same as behind the backward --------------------------------------------------------- */

static void train_with_and_without(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    DO(trainer_steps(it, 4, 1));
    CHECK(it->updated == all_groups(it));
    DO(trainer_steps(it, 1, 0));
    CHECK(it->updated == 0);
    DO(trainer_steps(it, 2, 1));
    CHECK(it->updated == all_groups(it));
}

static void train_in_all_ways(model model) {
    for (precision precision = PLAIN; precision <= NARROW; precision++) {
        const struct model made = with_precision(model, precision);
        on_all_worlds(&made, train_with_and_without, NULL);
    }
}

static void updates_are_those_of_a_step_behind_the_backward(void **unused) {
    (void)unused;
    for (int stage = 1; stage <= 3; stage++) {
        model model = odd_model(stage);
        model.delay_us = 10;
        train_in_all_ways(model);
    }
}

static void groups_in_parts_are_updated_bucket_by_bucket(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        model model = model_in_parts(stage);
        model.delay_us = 10;
        train_in_all_ways(model);
    }
}

/* Whether a step of all ranks asks for sums. */
static int sums_in_a_step(trainer *it, int updates) {
    rank_state *state = it->state;
    const uint64_t before = __atomic_load_n(&state->course->sums, __ATOMIC_RELAXED);
    trainer_steps(it, 1, updates);
    if (state->failure[0] == '\0' && pst_zero_drain(state->engine) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "pst_zero_drain");
    return __atomic_load_n(&state->course->sums, __ATOMIC_RELAXED) > before;
}

static void train_without_sums(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    CHECK(sums_in_a_step(it, 1)); /* before all is planned */
    trainer_steps(it, 2, 1);
    CHECK_OK(pst_zero_drain(state->engine));
    pause_device(state, 0); /* all have */
    CHECK(!sums_in_a_step(it, 1));
    CHECK(it->updated == all_groups(it));
}

static void copy_engines_go_on_from_sums_to_updates(void **unused) {
    (void)unused;
    for (precision precision = PLAIN; precision <= NARROW; precision++) {
        model model = with_precision(model_in_parts(3), precision);
        model.device = ON_CE;
        run_ranks_on_device(2, &model, train_without_sums, NULL);
    }
}

/* Behind the first step all is planned; without a wait the host may go on while nothing moves. */
static void train_while_nothing_moves(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    DO(trainer_steps(it, 3, 1));
    CHECK_OK(pst_zero_drain(state->engine)); /* what the ranks had, too, which the host asks for */
    pause_device(state, 1);
    trainer_steps(it, 2, 1);
    DO(pause_device(state, 0));
    CHECK(it->updated == all_groups(it));
}

static void steps_with_updates_do_not_wait_for_the_device(void **unused) {
    (void)unused;
    model model = odd_model(3);
    on_all_worlds(&model, train_while_nothing_moves, NULL);
}

/* Memory of sums is taken again as soon as what reads it is launched. */
static void train_slowly(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    trainer_steps(it, 4, 1);
    it->pause_us = 500;
    trainer_steps(it, 4, 1);
}

static void updates_that_are_late_are_waited_for(void **unused) {
    (void)unused;
    for (int one = 0; one <= 1; one++) {
        model model = model_in_parts(3);
        model.one_comm = one;
        model.delay_us = 200;
        model.seed = (uint64_t)one;
        on_all_worlds(&model, train_slowly, NULL);
    }
}

/* ---- which groups ---------------------------------------------------------------------------- */

static void leave_groups_out(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    trainer_steps(it, 3, 1);
    for (unsigned left_out = 1; left_out <= all_groups(it); left_out++) {
        it->left_out = left_out;
        DO(trainer_steps(it, 1, 1));
        CHECK(it->updated == (all_groups(it) & ~left_out));
    }
}

static void a_group_that_lacks_a_piece_goes_to_its_target(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        const model model = with_precision(model_in_parts(stage), MIXED);
        const struct model plain = model_in_parts(stage);
        on_all_worlds(&model, leave_groups_out, NULL);
        on_all_worlds(&plain, leave_groups_out, NULL);
    }
}

/* Zeros count as gradients, and one rank alone has none at all of it. */
static void miss_a_gradient(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    DO(trainer_steps(it, 3, 1));
    it->missing = 1;
    DO(trainer_steps(it, 1, 1));
    CHECK(it->updated == all_groups(it));
    it->missing = NO_PARAMETER;
    trainer_steps(it, 4, 1);
}

static void a_gradient_that_a_rank_lacks_counts_as_zeros(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    on_all_worlds(&model, miss_a_gradient, NULL);
}

/* The first group is used in the forward's beginning and at its end; its gradients are reported
 * early by the first of its two uses in the backward, or late by the second one. */
static void use_the_first_group_again(trainer *it, int early) {
    rank_state *state = it->state;
    CHECK_OK(pst_zero_begin_forward(state->engine, 1));
    for (size_t i = 0; i <= state->model->group_count && state->failure[0] == '\0'; i++)
        trainer_use(it, i % state->model->group_count);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_forward(state->engine));
    DO(trainer_begin_backward(it, 1));
    (early ? trainer_backward_use : trainer_use)(it, 0);
    for (size_t g = state->model->group_count; g-- > 1 && state->failure[0] == '\0';)
        trainer_backward_use(it, g);
    CHECK_FINE();
    (early ? trainer_use : trainer_backward_use)(it, 0); /* the values of before the step */
    CHECK_FINE();
    trainer_end_backward(it);
}

/* In stages 1 and 2 what is gathered lies apart from the shards, but for one rank alone, and where
 * peers read memory that was opened to them. */
static void use_a_group_twice(rank_state *state) {
    const int early = *(const int *)state->argument, stage = state->model->stage;
    const int is_shard = state->world == 1 || state->gather->ops->gathers_within;
    const int stays = stage < 3 ? is_shard : early;
    trainer *it = open_trainer(state);
    CHECK_FINE();
    for (int i = 0; i < 7; i++) {
        DO(use_the_first_group_again(it, early));
    }
    CHECK(it->updated == (stays ? all_groups(it) & ~1u : all_groups(it)));
}

static void a_group_that_is_used_behind_its_report_is_not_updated(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++)
        for (uint32_t ahead = 0; ahead <= 4; ahead += 2)
            for (int early = 0; early <= 1; early++) {
                model model = chain_model(stage, 4, 16);
                model.prefetch_ahead = ahead;
                model.bucket_bytes = 128; /* one group each */
                model.delay_us = 50;
                on_all_worlds(&model, use_a_group_twice, &early);
            }
}

/* ---- when ------------------------------------------------------------------------------------ */

static void be_too_early(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    CHECK(!may_update(state) && give_pieces(it) == PST_ESTATE);
    DO(trainer_forward(it));
    CHECK(!may_update(state) && give_pieces(it) == PST_ESTATE);
    DO(trainer_begin_backward(it, 1));
    CHECK(!may_update(state) && give_pieces(it) == PST_ESTATE);
    CHECK(text_has(state, "pst_zero_may_update"));
    DO(trainer_finish_backward(it, state->model->group_count));
    CHECK(it->updated == 0);
    DO(trainer_steps(it, 2, 1));
    CHECK(it->updated == all_groups(it));
    CHECK(!may_update(state) && give_pieces(it) == PST_ESTATE);
}

static void the_first_backward_updates_nothing(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    on_all_worlds(&model, be_too_early, NULL);
}

/* A backward that reduces nothing has updated nothing. */
static void accumulate(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    trainer_steps(it, 4, 1);
    DO(trainer_forward(it));
    CHECK_OK(pst_zero_begin_backward(state->engine, 0));
    CHECK(!may_update(state) && give_pieces(it) == PST_ESTATE);
    for (size_t g = state->model->group_count; g-- > 0 && state->failure[0] == '\0';)
        trainer_use(it, g);
    CHECK_OK(pst_zero_end_backward(state->engine));
    for (size_t g = 0; g < state->model->group_count; g++)
        CHECK(!pst_zero_is_updated(state->engine, state->groups[g]));
    DO(trainer_steps(it, 3, 1));
    CHECK(it->updated == all_groups(it));
}

static void an_accumulating_backward_updates_nothing(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    on_all_worlds(&model, accumulate, NULL);
}

static void train_on_the_host(rank_state *state) {
    const pst_adamw_piece none[MOST_PARAMETERS] = {{0}};
    const size_t count = state->model->parameter_count;
    build_engine(state);
    for (int i = 0; i < 3; i++) {
        CHECK_FINE();
        memset(state->has_target, 0, sizeof state->has_target);
        DO(forward(state, 1));
        make_gradients(state, 1);
        CHECK_OK(pst_zero_begin_backward(state->engine, 1));
        CHECK(!may_update(state));
        CHECK(pst_zero_update(state->engine, none, count) == PST_ESTATE);
        for (size_t g = state->model->group_count; g-- > 0 && state->failure[0] == '\0';)
            backward_use(state, g);
        CHECK_FINE();
        CHECK_OK(pst_zero_end_backward(state->engine));
        CHECK(stats_of(state).updates == 0);
        update(state);
    }
}

static void the_host_device_updates_nothing(void **unused) {
    (void)unused;
    model model = odd_model(3);
    for (model.one_comm = 0; model.one_comm <= 1; model.one_comm++)
        for (int world = 1; world <= 3; world++)
            run_ranks_on_device(world, &model, train_on_the_host, NULL);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void check_refusals(trainer *it) {
    rank_state *state = it->state;
    const size_t count = state->model->parameter_count;
    pst_adamw_piece pieces[MOST_PARAMETERS];
    memcpy(pieces, it->own, sizeof pieces);
    CHECK(pst_zero_update(state->engine, pieces, count - 1) == PST_EINVAL);
    CHECK(pst_zero_update(state->engine, NULL, count) == PST_EINVAL);
    CHECK(pst_zero_update(NULL, pieces, count) == PST_EINVAL);
    pieces[0].exp_avg_sq = NULL;
    CHECK(pst_zero_update(state->engine, pieces, count) ==
          (pieces[0].count > 0 ? PST_EINVAL : PST_OK));
    CHECK(pieces[0].count == 0 || text_has(state, "'p0'"));
    pieces[0].exp_avg_sq = it->own[0].exp_avg_sq;
    pieces[1].count++;
    CHECK(pst_zero_update(state->engine, pieces, count) == PST_EINVAL);
    CHECK(text_has(state, "'p1'"));
}

/* What was refused changes nothing: the pieces of before count. */
static void be_refused(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    trainer_steps(it, 3, 1);
    DO(trainer_forward(it));
    DO(trainer_begin_backward(it, 1));
    DO(check_refusals(it));
    CHECK_OK(give_pieces(it));
    DO(trainer_backward_use(it, state->model->group_count - 1));
    CHECK(!may_update(state));
    CHECK(give_pieces(it) == PST_ESTATE); /* too late */
    DO(trainer_finish_backward(it, state->model->group_count - 1));
    CHECK(it->updated == all_groups(it));
}

static void pieces_that_do_not_fit_are_refused(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    on_all_worlds(&model, be_refused, NULL);
}

static void do_without_adamw(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    trainer_steps(it, 3, 1);
    DO(trainer_forward(it));
    DO(trainer_begin_backward(it, 0));
    state->async->ops.adamw = NULL;
    CHECK(may_update(state) && give_pieces(it) == PST_EUNSUPPORTED);
    CHECK(text_has(state, "async"));
    DO(trainer_finish_backward(it, state->model->group_count));
    CHECK(it->updated == 0);
}

static void a_device_without_adamw_is_named(void **unused) {
    (void)unused;
    const model model = odd_model(3);
    for (int world = 1; world <= 3; world++)
        run_ranks_on_boards(world, &model, do_without_adamw, NULL);
}

/* ---- broken off ------------------------------------------------------------------------------ */

/* The last groups of the model, by bit. */
static unsigned last_groups(const trainer *it, size_t count) {
    const size_t all = it->state->model->group_count;
    return all_groups(it) & ~((1u << (all - count)) - 1u);
}

/* Buckets that were full have gone out, and one rank alone has updated at once. */
static void break_off(trainer *it, size_t count) {
    rank_state *state = it->state;
    const unsigned expected =
        state->world == 1 || state->model->bucket_bytes <= 128 ? last_groups(it, count) : 0;
    DO(trainer_forward(it));
    trainer_begin_backward(it, 1);
    for (size_t i = 0; i < count && state->failure[0] == '\0'; i++)
        trainer_backward_use(it, state->model->group_count - 1 - i);
    CHECK_FINE();
    CHECK_OK(pst_zero_drain(state->engine));
    expect_step(it, expected);
    for (size_t g = 0; g < state->model->group_count; g++) {
        CHECK(!state->has_target[g] &&
              state->consumed[g] == (g + count >= state->model->group_count));
        CHECK(pst_zero_is_updated(state->engine, state->groups[g]) == (int)(expected >> g & 1u));
    }
    CHECK_OK(pst_zero_updated(state->engine));
}

static void break_off_and_train(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    trainer_steps(it, 3, 1);
    for (size_t count = 0; count <= state->model->group_count; count++) {
        CHECK_FINE();
        DO(break_off(it, count));
        trainer_steps(it, 4, 1); /* the first backward behind it is one of two forwards */
        CHECK_FINE();
        CHECK(it->updated == all_groups(it));
    }
}

static void what_a_broken_backward_had_not_reduced_is_not_updated(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++)
        for (size_t bytes = 128; bytes <= 65536; bytes *= 512) {
            model model = chain_model(stage, 4, 16);
            model.bucket_bytes = bytes;
            model.delay_us = 20;
            on_all_worlds(&model, break_off_and_train, NULL);
        }
}

/* ---- many steps ------------------------------------------------------------------------------ */

/* A leak of a bucket's sums in each step would come to several of the arena's segments. */
static void train_for_long(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    DO(trainer_steps(it, 4, 1));
    CHECK_OK(pst_zero_drain(state->engine));
    const pst_zero_stats before = stats_of(state);
    for (int i = 0; i < 60 && state->failure[0] == '\0'; i++) {
        trainer_step(it, 1);
        CHECK_OK(pst_zero_drain(state->engine));
    }
    CHECK_FINE();
    const pst_zero_stats after = stats_of(state);
    CHECK(before.updates > 0 && after.updates == before.updates + 60 * state->model->group_count);
    CHECK((after.staging_reserved > 0) == (state->world > 1));
    CHECK(after.staging_reserved == before.staging_reserved);
    CHECK(after.sources_reserved == before.sources_reserved);
    CHECK(after.arena_reserved == before.arena_reserved);
    CHECK(after.replayed_passes > before.replayed_passes);
}

static void the_memory_of_sums_is_given_back(void **unused) {
    (void)unused;
    model model = chain_model(3, 3, 16);
    model.bucket_bytes = 4u << 20;
    on_all_worlds(&model, train_for_long, NULL);
}

static uint64_t replayed_in_a_step(trainer *it, int updates) {
    rank_state *state = it->state;
    const uint64_t before = stats_of(state).replayed_passes;
    trainer_step(it, updates);
    if (state->failure[0] == '\0') finish_compute(state);
    if (pst_zero_drain(state->engine) != PST_OK)
        fail_at(state, __FILE__, __LINE__, "pst_zero_drain");
    return stats_of(state).replayed_passes - before;
}

/* Some of six steps: a program is launched only once its last launch has ended. */
static void replay_some(trainer *it, int updates) {
    rank_state *state = it->state;
    const uint64_t wanted = state->world > 1 ? 2 : 1; /* one rank alone gathers nothing */
    int count = 0;
    for (int i = 0; i < 6 && state->failure[0] == '\0'; i++)
        count += replayed_in_a_step(it, updates) == wanted;
    CHECK_FINE();
    CHECK(count > 0);
    CHECK(it->updated == (updates ? all_groups(it) : 0));
}

/* A backward without updates is another program on the same path. */
static void replay_with_and_without(rank_state *state) {
    trainer *it = open_trainer(state);
    CHECK_FINE();
    for (int i = 0; i < 4 && state->failure[0] == '\0'; i++)
        replay_some(it, i % 2 == 0);
}

static void passes_with_updates_are_replayed(void **unused) {
    (void)unused;
    for (int stage = 2; stage <= 3; stage++) {
        model model = model_in_parts(stage);
        model.delay_us = 10;
        on_all_worlds(&model, replay_with_and_without, NULL);
    }
}

/* ---- at random ------------------------------------------------------------------------------- */

/* All ranks draw alike whether a step updates, and each for itself which groups. */
static void train_at_random(rank_state *state) {
    uint64_t dice = *(const uint64_t *)state->argument, own = dice + (uint64_t)state->rank;
    trainer *it = open_trainer(state);
    CHECK_FINE();
    for (int i = 0; i < 10; i++) {
        const int updates = drawn(&dice, 4) > 0;
        it->left_out = (unsigned)drawn(&own, 4) == 0 ? (unsigned)drawn(&own, 32) : 0;
        DO(trainer_steps(it, 1, updates));
        CHECK((it->updated & it->left_out) == 0);
    }
    CHECK(stats_of(state).updates > 0);
}

static void models_at_random_are_updated_alike(void **unused) {
    (void)unused;
    uint64_t dice = random_seed(__func__);
    for (int i = 0; i < random_programs(12); i++) {
        model model = with_precision(drawn_model(&dice), (precision)drawn(&dice, 3));
        model.in_place = (int)drawn(&dice, 2);
        model.transient = (int)drawn(&dice, 2);
        run_ranks_async(1 + i % 3, &model, train_at_random, &dice);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_are_those_of_a_step_behind_the_backward),
        cmocka_unit_test(groups_in_parts_are_updated_bucket_by_bucket),
        cmocka_unit_test(copy_engines_go_on_from_sums_to_updates),
        cmocka_unit_test(steps_with_updates_do_not_wait_for_the_device),
        cmocka_unit_test(updates_that_are_late_are_waited_for),
        cmocka_unit_test(a_group_that_lacks_a_piece_goes_to_its_target),
        cmocka_unit_test(a_gradient_that_a_rank_lacks_counts_as_zeros),
        cmocka_unit_test(a_group_that_is_used_behind_its_report_is_not_updated),
        cmocka_unit_test(the_first_backward_updates_nothing),
        cmocka_unit_test(an_accumulating_backward_updates_nothing),
        cmocka_unit_test(the_host_device_updates_nothing),
        cmocka_unit_test(pieces_that_do_not_fit_are_refused),
        cmocka_unit_test(a_device_without_adamw_is_named),
        cmocka_unit_test(what_a_broken_backward_had_not_reduced_is_not_updated),
        cmocka_unit_test(the_memory_of_sums_is_given_back),
        cmocka_unit_test(passes_with_updates_are_replayed),
        cmocka_unit_test(models_at_random_are_updated_alike),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
