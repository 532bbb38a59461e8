/* Where rows lie: against torch.chunk's rule, and without overlap. */
#include "ops/transfer/gathered.h"
#include "ops/zero/layout.h"
#include "sched/runtime.h"
#include "world.h"

static void rows_are_dealt_out_as_torch_chunk_does(void **unused) {
    (void)unused;
    for (size_t rows = 0; rows < 40; rows++)
        for (size_t world = 1; world < 9; world++) {
            size_t chunk = (rows + world - 1) / world, next = 0;
            for (size_t rank = 0; rank < world; rank++) {
                size_t first = rank * chunk < rows ? rank * chunk : rows;
                size_t end = (rank + 1) * chunk < rows ? (rank + 1) * chunk : rows;
                pst__rows found = pst__rows_of(rows, world, rank);
                assert_int_equal(found.first, first);
                assert_int_equal(found.count, end - first);
                assert_int_equal(found.first, next);
                next = found.first + found.count;
            }
            assert_int_equal(next, rows);
        }
}

static void very_many_rows_do_not_overflow(void **unused) {
    (void)unused;
    pst__rows last = pst__rows_of(SIZE_MAX, 4, 3);
    assert_int_equal(last.first + last.count, SIZE_MAX);
    assert_int_equal(pst__rows_of(1, SIZE_MAX, SIZE_MAX - 1).count, 0);
}

static void look_at_layouts(rank_state *state) {
    DO(build_engine(state));
    const model *model = state->model;
    for (size_t g = 0; g < model->group_count; g++) {
        size_t shard_end = 0, gathered_end = 0, gradient_end = 0;
        for (size_t p = model->first[g]; p < model->first[g + 1]; p++) {
            pst_parameter_layout layout;
            CHECK_OK(pst_zero_parameter_layout(state->engine, state->groups[g],
                                               state->parameters[p], &layout));
            size_t bytes = layout.shard_rows * model->shapes[p].row_elements * sizeof(float);
            CHECK(layout.shard_offset % PST_ZERO_ALIGNMENT == 0);
            CHECK(layout.gathered_offset % PST_ZERO_ALIGNMENT == 0);
            CHECK(layout.shard_offset >= shard_end && layout.gathered_offset >= gathered_end);
            shard_end = layout.shard_offset + bytes;
            gathered_end = layout.gathered_offset + elements_of(&model->shapes[p]) * 2;
            if (!model->shapes[p].trainable) continue;
            CHECK(layout.gradient_offset % PST_ZERO_ALIGNMENT == 0);
            CHECK(layout.gradient_offset >= gradient_end);
            gradient_end = layout.gradient_offset + bytes;
        }
        CHECK(shard_end <= state->layouts[g].shard_bytes);
        CHECK(gathered_end <= state->layouts[g].gathered_bytes);
        CHECK(gradient_end <= state->layouts[g].gradient_bytes);
    }
    pst_parameter_layout layout;
    CHECK(pst_zero_parameter_layout(state->engine, 0, 4, &layout) == PST_EINVAL);
    CHECK(pst_zero_group_layout(state->engine, 99, &state->layouts[0]) == PST_EINVAL);
}

static void offsets_are_aligned_and_do_not_overlap(void **unused) {
    (void)unused;
    model model = odd_model(3);
    model.gather_dtype = PST_BFLOAT16;
    run_ranks(1, &model, look_at_layouts, NULL);
    run_ranks(4, &model, look_at_layouts, NULL);
}

static void frozen_parameters_take_no_room_among_gradients(void **unused) {
    (void)unused;
    pst_runtime *runtime;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    const pst__heap *heap = pst__runtime_heap(runtime);
    pst__layout layout = {.element_bytes = 4, .gather_element_bytes = 4, .reduce_element_bytes = 4};
    layout.member_count = 2;
    layout.members = pst__heap_alloc(heap, 2 * sizeof *layout.members);
    layout.members[0] = (pst__member){.rows = 100, .row_elements = 100};
    layout.members[1] = (pst__member){.rows = 4, .row_elements = 16, .trainable = 1};
    assert_int_equal(pst__layout_build(heap, &layout, 2, 0), PST_OK);
    assert_int_equal(layout.gradient_elements, 32);
    assert_int_equal(layout.gradient_bytes_whole, 4 * 16 * 4);
    pst__layout_free(heap, &layout);
    pst_runtime_destroy(runtime);
}

/* Ranks that gather a group without elements, and others that do not, would part. */
static void only_one_rank_alone_gathers_nothing(void **unused) {
    (void)unused;
    pst_runtime *runtime;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    const pst__heap *heap = pst__runtime_heap(runtime);
    for (size_t world = 1; world <= 2; world++) {
        pst__layout layout = {
            .element_bytes = 4, .gather_element_bytes = 4, .reduce_element_bytes = 4};
        layout.member_count = 1;
        layout.members = pst__heap_alloc(heap, sizeof *layout.members);
        layout.members[0] = (pst__member){.rows = 0, .row_elements = 8};
        assert_int_equal(pst__layout_build(heap, &layout, world, 0), PST_OK);
        assert_int_equal(layout.moves, world > 1);
        pst__layout_free(heap, &layout);
    }
    pst_runtime_destroy(runtime);
}

/* Each rank reads of the others where it writes to, and nothing of its own moves. */
static void a_shard_may_lie_within_what_is_gathered(void **unused) {
    (void)unused;
    pst_runtime *runtime;
    assert_int_equal(pst_runtime_create(NULL, &runtime), PST_OK);
    const pst__heap *heap = pst__runtime_heap(runtime);
    for (size_t rank = 0; rank < 3; rank++) {
        pst__layout layout = {.element_bytes = 2,
                              .gather_element_bytes = 2,
                              .reduce_element_bytes = 4,
                              .is_within = 1,
                              .member_count = 2};
        layout.members = pst__heap_alloc(heap, 2 * sizeof *layout.members);
        layout.members[0] = (pst__member){.rows = 4, .row_elements = 5, .trainable = 1};
        layout.members[1] = (pst__member){.rows = 6, .row_elements = 8, .trainable = 1};
        assert_int_equal(pst__layout_build(heap, &layout, 3, rank), PST_OK);
        assert_int_equal(layout.shard_elements * 2, layout.gathered_bytes);
        for (size_t m = 0; m < 2; m++) {
            const pst__member *member = &layout.members[m];
            const size_t first = pst__rows_of(member->rows, 3, rank).first * member->row_elements;
            assert_int_equal(member->shard_element * 2, member->gathered_offset + first * 2);
        }
        assert_int_equal(layout.segment_count, 5); /* of four rows the last rank has none */
        for (size_t i = 0; i < layout.segment_count; i++)
            assert_int_equal(layout.segments[i].source, layout.segments[i].destination);
        assert_true(layout.moves);
        pst__layout_free(heap, &layout);
    }
    pst_runtime_destroy(runtime);
}

static void illegal_transitions_leave_the_state(void **unused) {
    (void)unused;
    pst__gather_state state = PST__SHARDED;
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_WAIT), PST_ESTATE);
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_DROP), PST_ESTATE);
    assert_int_equal(state, PST__SHARDED);
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_ISSUE), PST_OK);
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_ISSUE), PST_ESTATE);
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_DROP), PST_ESTATE);
    assert_string_equal(pst__gather_state_name(state), "in flight");
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_WAIT), PST_OK);
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_KEEP), PST_OK);
    assert_int_equal(pst__gather_state_step(&state, PST__STEP_DROP), PST_OK);
    assert_int_equal(state, PST__SHARDED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_dealt_out_as_torch_chunk_does),
        cmocka_unit_test(very_many_rows_do_not_overflow),
        cmocka_unit_test(offsets_are_aligned_and_do_not_overlap),
        cmocka_unit_test(frozen_parameters_take_no_room_among_gradients),
        cmocka_unit_test(only_one_rank_alone_gathers_nothing),
        cmocka_unit_test(a_shard_may_lie_within_what_is_gathered),
        cmocka_unit_test(illegal_transitions_leave_the_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
