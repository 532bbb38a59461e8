/* Partitions in random programs, all ranks alike: backwards that are complete, of several graphs or
 * broken off, gradients that are missing or come again, targets that are bound anew. */
#include "partition_part.h"

/* What a parameter's target is to hold, and what waits for its bucket. */
typedef struct target {
    float values[300];
    float within; /* of them */
    int has_sum, is_old, adds;
    uint64_t step;     /* of what waits; 0: nothing does */
    pst_dtype travels; /* that */
    float apart;       /* it may be */
} target;

typedef struct program {
    part part;
    target targets[SIZES];
    uint64_t dice, steps, reports;
    int is_last, is_whole; /* a bucket holds everything: so what waits can be told */
} program;

static uint64_t draw(program *program, uint64_t bound) {
    program->dice++;
    return mix(program->dice) % bound;
}

/* ---- what is expected ------------------------------------------------------------------------ */

static void expect_sent(const rank_state *state, target *targets, pst_dtype dtype) {
    for (size_t p = 0; p < SIZES; p++) {
        target *target = &targets[p];
        if (target->step == 0 || target->travels != dtype) continue;
        for (size_t i = 0; i < sizes[p]; i++) {
            const float mean = mean_at(state, target->step, p, i);
            target->values[i] = target->adds ? target->values[i] + mean : mean;
        }
        target->within = (target->adds ? target->within : 0) + target->apart;
        target->step = 0;
    }
}

static void expect_forgotten(target *targets) {
    for (size_t p = 0; p < SIZES; p++) {
        if (targets[p].step != 0 && !targets[p].adds) targets[p].has_sum = 0;
        targets[p].step = 0;
    }
}

static void expect_bound(target *targets, float value) {
    expect_forgotten(targets);
    for (size_t p = 0; p < SIZES; p++) {
        targets[p] = (target){0};
        for (size_t i = 0; i < sizes[p]; i++)
            targets[p].values[i] = value;
    }
}

static void expect_ended(const rank_state *state, target *targets, int is_last) {
    for (int dtype = 0; dtype < PST_DTYPE_COUNT; dtype++)
        expect_sent(state, targets, (pst_dtype)dtype);
    for (size_t p = 0; p < SIZES && is_last; p++) {
        target *target = &targets[p];
        if (!target->is_old || target->has_sum) continue;
        memset(target->values, 0, sizeof target->values);
        target->within = 0;
        target->is_old = 0;
    }
}

static void check_targets(const program *program) {
    const part *part = &program->part;
    rank_state *state = part->state;
    const float *at = part->flat + GUARD;
    finish_compute(state);
    for (size_t p = 0; p < SIZES; at += part->count[p++])
        for (size_t i = 0; i < part->count[p] && state->failure[0] == '\0'; i++) {
            const target *target = &program->targets[p];
            const float wanted = target->values[part->first[p] + i], apart = at[i] - wanted;
            if (!(apart <= target->within && -apart <= target->within))
                note_wrong(state, "parameter", p, i, at[i], wanted);
        }
    finish_compute(state); /* tells what is noted */
    CHECK_FINE();
    check_guards(part);
}

/* ---- what is done ---------------------------------------------------------------------------- */

static void do_report(program *program) {
    const rank_state *state = program->part.state;
    const variant *variant = state->argument;
    const size_t p = draw(program, SIZES);
    target *target = &program->targets[p];
    const pst_dtype dtype = draw(program, 4) == 0 ? PST_BFLOAT16 : PST_FLOAT32;
    if (target->step != 0) expect_sent(state, program->targets, target->travels);
    target->adds = target->has_sum;
    target->has_sum = 1;
    target->step = ++program->steps;
    target->travels = variant->reduce_in_fp32 ? PST_FLOAT32 : dtype;
    target->apart = dtype == PST_FLOAT32 ? 0.0f : 0.02f;
    program->reports++;
    give_as(&program->part, p, target->step, dtype);
}

static void do_bind(program *program) {
    const float value = (float)draw(program, 10);
    fresh_flat(&program->part, value);
    bind_flat(&program->part);
    expect_bound(program->targets, value);
}

static void do_begin(program *program, int is_last) {
    expect_forgotten(program->targets);
    for (size_t p = 0; p < SIZES && program->is_last; p++) {
        program->targets[p].is_old |= program->targets[p].has_sum;
        program->targets[p].has_sum = 0;
    }
    program->is_last = is_last;
    begin(&program->part, is_last);
}

static void do_end(program *program) {
    rank_state *state = program->part.state;
    end(&program->part, (int)draw(program, 2));
    expect_ended(state, program->targets, program->is_last);
    if (draw(program, 2) == 0) check_targets(program);
}

static void do_backward(program *program) {
    rank_state *state = program->part.state;
    do_begin(program, (int)draw(program, 2));
    for (uint64_t graphs = 1 + draw(program, 2); graphs > 0; graphs--) {
        for (uint64_t count = draw(program, 2 * SIZES); count > 0; count--) {
            if (program->is_whole && draw(program, 30) == 0) do_bind(program);
            CHECK_FINE();
            DO(do_report(program));
        }
        if (program->is_whole && draw(program, 5) == 0) return; /* broken off */
        DO(do_end(program));
    }
    if (draw(program, 6) == 0) do_bind(program);
}

static void check_consumed(const program *program) {
    rank_state *state = program->part.state;
    uint64_t consumed = 0;
    for (size_t i = 0; i < program->part.gradient_count; i++) {
        CHECK(program->part.consumed[i] <= 1);
        consumed += (uint64_t)program->part.consumed[i];
    }
    CHECK(consumed == program->reports);
}

static void random_body(rank_state *state) {
    const variant *variant = state->argument;
    program *program = calloc(1, sizeof *program);
    program->dice = state->model->seed;
    program->is_whole = variant->bucket_bytes > 65536;
    open_part(&program->part, state, 7.0f);
    expect_bound(program->targets, 7.0f);
    for (int i = 0; i < 12 && state->failure[0] == '\0'; i++)
        do_backward(program);
    if (state->failure[0] == '\0') do_end(program);
    if (state->failure[0] == '\0') check_targets(program);
    if (state->failure[0] == '\0') check_consumed(program);
    close_part(&program->part);
    free(program);
}

static void run_program(uint64_t seed) {
    const uint64_t dice = mix(seed);
    const variant variant = {.route = (pst_partition_route)(dice % 3),
                             .bucket_bytes = dice / 3 % 2 == 0 ? 1u << 20 : 256u << dice / 6 % 4,
                             .reduce_in_fp32 = (int)(dice / 24 % 2),
                             .frees_in_compute_order = (int)(dice / 48 % 2)};
    const model model = {.deadline_ns = 20000000000u,
                         .device = ON_HOST + (int)(dice / 96 % (ON_CE - ON_HOST + 1)),
                         .seed = seed * 1000003u};
    printf("PST_SEED=%llu\n", (unsigned long long)seed);
    (void)fflush(stdout);
    run_ranks_on_device(1 + (int)(dice / 960 % MOST_RANKS), &model, random_body, (void *)&variant);
}

static void random_backwards_are_right(void **unused) {
    (void)unused;
    uint64_t seed = random_seed(__func__);
    for (int run = 0; run < random_programs(40); run++, seed++)
        run_program(seed);
}

/* A program in which an all-reduce of a backward that was broken off delivered behind the next
 * one's reduce-scatter, in two runs of five. */
static void what_was_broken_off_is_delivered_first(void **unused) {
    (void)unused;
    for (int run = 0; run < 10; run++)
        run_program(1795815042);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_backwards_are_right),
                                       cmocka_unit_test(what_was_broken_off_is_delivered_first)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
