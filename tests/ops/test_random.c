/* Random training programs against values that every rank can compute. The seed is printed;
 * PST_SEED replays one. */
#include "world.h"

#define PROGRAMS 60
#define STEPS    5

static uint64_t draw(uint64_t *state, uint64_t bound) {
    *state += 0x9e3779b97f4a7c15u;
    return mix(*state) % bound;
}

static model random_model(uint64_t *dice) {
    model model = empty_model(1 + (int)draw(dice, 3));
    size_t groups = 1 + draw(dice, 7);
    unsigned alone = 0; /* groups of one parameter */
    for (size_t g = 0; g < groups; g++) {
        const size_t members = 1 + draw(dice, 4);
        alone |= (unsigned)(members == 1) << g;
        for (size_t p = members; p > 0; p--)
            add_shape(&model, draw(dice, 12), 1 + draw(dice, 40), draw(dice, 5) != 0);
        close_group(&model);
    }
    model.gather_dtype = draw(dice, 3) == 0 ? PST_BFLOAT16 : PST_FLOAT32;
    model.prefetch_ahead = (uint32_t)draw(dice, 4);
    model.prefetch_bytes = draw(dice, 2) * (1 + draw(dice, 8000));
    model.keep_bytes = draw(dice, 2) * draw(dice, 20000);
    model.bucket_bytes = draw(dice, 2) * 128 * (1 + draw(dice, 20));
    model.part_bytes = draw(dice, 2) * 128 * (1 + draw(dice, 4));
    model.push_bytes = draw(dice, 2) * (1 + draw(dice, 300));
    model.one_comm = draw(dice, 4) == 0;
    model.in_place = draw(dice, 2) == 0;
    model.forward_only = (unsigned)(draw(dice, 2) * draw(dice, 1u << groups));
    model.looked_up = draw(dice, 2) == 0 ? model.forward_only & alone : 0;
    model.delay_us = (unsigned)(draw(dice, 3) * draw(dice, 30));
    model.seed = *dice;
    return model;
}

/* What a program does is drawn from one seed on all ranks; what a rank skips, from its own. */
typedef struct program {
    rank_state *state;
    uint64_t dice, own_dice;
    size_t uses[16], use_count; /* groups in the order of a forward */
    unsigned have[MOST_GROUPS]; /* by group: ranks with gradients in this backward */
    float *expected[MOST_PARAMETERS];
    int any[MOST_GROUPS]; /* a gradient was accumulated */
    int is_nested;        /* the first use is open during the others, in the last forward */
} program;

/* Now and then a group twice, or not at all. */
static void draw_uses(program *program) {
    size_t groups = program->state->model->group_count;
    program->use_count = 0;
    for (size_t g = 0; g < groups && program->use_count < 14; g++) {
        uint64_t kind = draw(&program->dice, 6);
        if (kind != 0) program->uses[program->use_count++] = g;
        if (kind == 1) program->uses[program->use_count++] = draw(&program->dice, groups);
    }
}

static void run_forward(program *program, int grad) {
    rank_state *state = program->state;
    int nested = draw(&program->dice, 2) != 0 && program->use_count > 0;
    if (grad) program->is_nested = nested;
    DO(begin_forward(state, grad));
    if (nested) begin_use(state, program->uses[0]);
    CHECK_FINE();
    for (size_t i = 0; i < program->use_count; i++) {
        DO(use_in_forward(state, program->uses[i], grad));
    }
    if (nested) end_use(state, program->uses[0]);
    CHECK_FINE();
    CHECK_OK(pst_zero_end_forward(state->engine));
}

static int was_used(const program *program, size_t g) {
    for (size_t i = 0; i < program->use_count; i++)
        if (program->uses[i] == g) return 1;
    return 0;
}

static int has_trainable(const model *model, size_t g) {
    for (size_t p = model->first[g]; p < model->first[g + 1]; p++)
        if (model->shapes[p].trainable && elements_of(&model->shapes[p]) > 0) return 1;
    return 0;
}

/* Whether backwards reach a frozen group is the same on all ranks and in all steps. */
static void draw_reached(program *program) {
    for (size_t g = 0; g < program->state->model->group_count; g++) {
        unsigned have = (unsigned)draw(&program->dice, 16);
        if (draw(&program->dice, 2) == 0) have = 15;
        if (!has_trainable(program->state->model, g)) have = g % 2 == 0 ? 0 : 15;
        program->have[g] = was_used(program, g) ? have : 0;
    }
}

/* On the host device each rank has an order of its own, another one in each step. On the others a
 * planned backward keeps to the order of the recorded one, which is that of autograd: from the last
 * use to the first. */
static size_t draw_order(program *program, size_t *order) {
    const size_t groups = program->state->model->group_count;
    const size_t shift = draw(&program->own_dice, groups);
    size_t count = 0;
    for (size_t i = 0; i < groups && program->state->model->device == ON_HOST; i++)
        order[count++] = (2 * groups - 1 - i - shift) % groups;
    if (count > 0) return count;
    if (program->is_nested) order[count++] = program->uses[0];
    for (size_t i = program->use_count; i-- > 0;) {
        size_t known = 0;
        while (known < count && order[known] != program->uses[i])
            known++;
        if (known == count) order[count++] = program->uses[i];
    }
    return count;
}

/* Groups that this rank reaches. */
static void run_backward(program *program, uint64_t step) {
    rank_state *state = program->state;
    size_t order[MOST_GROUPS];
    size_t count = draw_order(program, order);
    make_gradients(state, step);
    CHECK_OK(pst_zero_begin_backward(state->engine, 1));
    for (size_t i = 0; i < count; i++) {
        size_t g = order[i];
        if (!((program->have[g] >> state->rank) & 1u)) continue;
        DO(backward_use(state, g));
    }
    CHECK_OK(pst_zero_end_backward(state->engine));
}

static unsigned of_world(const program *program, size_t g) {
    return program->have[g] & ((1u << program->state->world) - 1u);
}

static void expect(program *program, uint64_t step) {
    rank_state *state = program->state;
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            if (!model->shapes[p].trainable || !was_used(program, g)) continue;
            int has_gradient = pst_zero_has_gradient(state->engine, state->parameters[p]);
            if (of_world(program, g) != 0) CHECK(has_gradient);
            /* Zeros may count as a gradient where the host does not wait for the other ranks. */
            if (of_world(program, g) == 0 && model->device == ON_HOST) CHECK(!has_gradient);
            for (size_t i = 0; i < elements_of(&model->shapes[p]); i++) {
                const unsigned have = of_world(program, g) & named_by(state, p, i);
                float mean = mean_gradient(state->world, have, step, p, i);
                program->expected[p][i] = (program->any[g] ? program->expected[p][i] : 0) + mean;
            }
        }
    for (size_t g = 0; g < model->group_count; g++)
        program->any[g] |= was_used(program, g);
}

/* Gradients that came too late for their turn are added after the others. */
static int equal(const model *model, float found, float expected) {
    if (!model->one_comm && model->device == ON_HOST) return found == expected;
    return found - expected < 1e-6f && expected - found < 1e-6f;
}

static void compare(program *program) {
    rank_state *state = program->state;
    const model *model = state->model;
    DO(finish_compute(state));
    for (size_t g = 0; g < model->group_count; g++)
        for (size_t p = model->first[g]; program->any[g] && p < model->first[g + 1]; p++) {
            pst_parameter_layout layout;
            CHECK_OK(pst_zero_parameter_layout(state->engine, state->groups[g],
                                               state->parameters[p], &layout));
            if (!model->shapes[p].trainable) continue;
            size_t width = model->shapes[p].row_elements;
            for (size_t i = 0; i < layout.shard_rows * width; i++)
                CHECK(equal(model, state->targets[g][layout.gradient_offset / sizeof(float) + i],
                            program->expected[p][layout.first_row * width + i]));
        }
}

/* Other values, after any pass. */
static void change(program *program) {
    if (program->state->failure[0] == '\0' && draw(&program->dice, 4) == 0) update(program->state);
}

static void run_step(program *program, uint64_t step) {
    if (draw(&program->dice, 3) == 0) draw_uses(program);
    if (draw(&program->dice, 3) == 0) run_forward(program, 0);
    change(program);
    if (draw(&program->dice, 4) == 0) run_forward(program, 1);
    change(program);
    run_forward(program, 1);
    if (draw(&program->dice, 4) == 0) run_forward(program, 1);
    if (draw(&program->dice, 4) == 0) run_forward(program, 0);
    draw_reached(program);
    run_backward(program, step);
}

static void run_program(rank_state *state) {
    uint64_t seed = *(const uint64_t *)state->argument;
    program program = {.state = state, .dice = seed, .own_dice = seed + (uint64_t)state->rank + 1};
    DO(build_engine(state));
    for (size_t p = 0; p < state->model->parameter_count; p++)
        program.expected[p] = calloc(elements_of(&state->model->shapes[p]) + 1, sizeof(float));
    draw_uses(&program);
    for (uint64_t step = 1; step <= STEPS && state->failure[0] == '\0'; step++) {
        run_step(&program, step);
        if (state->failure[0] == '\0') expect(&program, step);
        if (state->failure[0] == '\0') compare(&program);
        if (state->failure[0] != '\0' || draw(&program.dice, 3) == 0) continue;
        update(state);
        fresh_targets(state);
        memset(program.any, 0, sizeof program.any);
    }
    for (size_t p = 0; p < state->model->parameter_count; p++)
        free(program.expected[p]);
}

static void random_programs_match_the_oracle(void **unused) {
    (void)unused;
    const uint64_t first = random_seed(__func__);
    for (int i = 0; i < random_programs(PROGRAMS); i++) {
        uint64_t seed = first + (uint64_t)i, dice = seed;
        model model = random_model(&dice);
        int world = 1 << draw(&dice, 3);
        print_message("PST_SEED=%llu: %d ranks, stage %d, %zu groups\n", (unsigned long long)seed,
                      world, model.stage, model.group_count);
        run_ranks(world, &model, run_program, &seed);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_programs_match_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
