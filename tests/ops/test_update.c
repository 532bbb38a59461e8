/* Updates behind reductions: that they are those of a step behind the backward, which groups have
 * them, what refuses them, and what is left when a backward is broken off. */
#include "update_rank.h"

/* On the devices that have AdamW, over one to three ranks. */
static void on_all_worlds(const model *model, rank_body body, void *argument) {
    for (int world = 1; world <= 3; world++)
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
    trainer_steps(it, 4, 1);
    CHECK_FINE();
    CHECK(it->updated == all_groups(it));
    trainer_steps(it, 1, 0);
    CHECK_FINE();
    CHECK(it->updated == 0);
    trainer_steps(it, 2, 1);
    CHECK_FINE();
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_are_those_of_a_step_behind_the_backward),
        cmocka_unit_test(groups_in_parts_are_updated_bucket_by_bucket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
