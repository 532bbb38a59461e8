/* Reductions into flat partitions: what each rank gets, what adds up, how long memory is held. */
#include "world.h"

#include <penstock/partition.h>

static const int worlds[] = {1, 2, 4};

/* Elements of the parameters of the flat space, in its order. */
static const size_t sizes[] = {5, 300, 1, 77, 128, 40, 260, 9};
enum { SIZES = sizeof sizes / sizeof *sizes, GUARD = 8 };

static const float guard = -12345.0f;

typedef struct part {
    rank_state *state;
    pst_partition *partition;
    uint32_t ids[SIZES];
    size_t first[SIZES], count[SIZES]; /* what this rank owns */
    float *flat;                       /* its partition, with guards around it */
    size_t flat_count;
    float *gradients[64]; /* all that were made, until the end */
    size_t gradient_count;
    int consumed[64];
    size_t live, most; /* bytes of segments */
} part;

typedef struct variant {
    pst_partition_route route;
    size_t bucket_bytes;
    int reduce_in_fp32;
    int frees_in_compute_order;
    pst_dtype dtype; /* of gradients */
} variant;

/* ---- a partition of the flat space ----------------------------------------------------------- */

static size_t total_elements(void) {
    size_t total = 0;
    for (size_t i = 0; i < SIZES; i++)
        total += sizes[i];
    return total;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static void find_own(part *part) {
    const size_t world = (size_t)part->state->world;
    const size_t each = (total_elements() + world - 1) / world;
    const size_t begin = each * (size_t)part->state->rank;
    size_t at = 0;
    for (size_t i = 0; i < SIZES; at += sizes[i++]) {
        size_t low = at > begin ? at : begin, high = smaller(at + sizes[i], begin + each);
        part->count[i] = high > low ? high - low : 0;
        part->first[i] = high > low ? low - at : 0;
    }
    part->flat_count = each;
}

static pst_status take_segment(void *context, size_t bytes, void **memory) {
    part *part = context;
    part->live += bytes;
    if (part->live > part->most) part->most = part->live;
    return alloc_segment(NULL, bytes, memory);
}

static pst_status free_now(void *argument) {
    free(*(void **)argument);
    return PST_OK;
}

/* In the order of compute, like torch's allocator. */
static void give_segment(void *context, void *memory, size_t bytes) {
    part *part = context;
    part->live -= bytes;
    on_compute(part->state, free_now, &memory, sizeof memory);
}

static void note_token(void *context, void *token) {
    ((part *)context)->consumed[(size_t)token]++;
}

static void fresh_flat(part *part, float value) {
    part->flat = malloc((part->flat_count + 2 * GUARD) * sizeof(float));
    for (size_t i = 0; i < part->flat_count + 2 * GUARD; i++)
        part->flat[i] = i < GUARD || i >= GUARD + part->flat_count ? guard : value;
    part->gradients[part->gradient_count++] = part->flat; /* freed with them */
}

static void bind_flat(part *part) {
    rank_state *state = part->state;
    float *target = part->flat + GUARD;
    for (size_t i = 0; i < SIZES; i++) {
        CHECK_OK(pst_partition_bind(part->partition, part->ids[i],
                                    part->count[i] > 0 ? target : NULL, PST_FLOAT32, part->first[i],
                                    part->count[i]));
        target += part->count[i];
    }
}

static void create_part(part *part, rank_state *state) {
    const variant *variant = state->argument;
    const pst_partition_options options = {
        .size = sizeof options,
        .name = "test",
        .comm = state->reduce == NULL ? state->gather : state->reduce,
        .device = device_of(state),
        .compute = state->compute,
        .bucket_bytes = variant->bucket_bytes,
        .reduce_in_fp32 = variant->reduce_in_fp32,
        .route = variant->route,
        .segment_alloc = take_segment,
        .segment_free = give_segment,
        .segment_context = part,
        .frees_in_compute_order = variant->frees_in_compute_order,
        .consumed = note_token,
        .callback_context = part};
    part->state = state;
    find_own(part);
    CHECK_OK(pst_partition_create(state->runtime, &options, &part->partition));
    for (size_t i = 0; i < SIZES; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "p%zu", i);
        CHECK_OK(pst_partition_add(part->partition, name, sizes[i], &part->ids[i]));
    }
}

static void open_part(part *part, rank_state *state, float value) {
    create_part(part, state);
    CHECK_FINE();
    fresh_flat(part, value);
    bind_flat(part);
}

static void close_part(part *part) {
    rank_state *state = part->state;
    if (!is_on_host(state) && pst_runtime_status(state->runtime) == PST_OK) finish_compute(state);
    pst_partition_destroy(part->partition);
    if (!is_on_host(state)) (void)drain_compute(state);
    for (size_t i = 0; i < part->gradient_count; i++)
        free(part->gradients[i]);
    CHECK(part->live == 0);
}

/* ---- a backward ------------------------------------------------------------------------------ */

static void give_as(part *part, size_t index, uint64_t step, pst_dtype dtype) {
    rank_state *state = part->state;
    const size_t token = part->gradient_count++;
    float *values = malloc((sizes[index] + 1) * sizeof *values);
    for (size_t i = 0; i < sizes[index]; i++)
        values[i] = gradient_of(state->rank, step, index, i);
    part->gradients[token] = values;
    if (dtype == PST_BFLOAT16) {
        float *narrow = malloc((sizes[index] + 1) * sizeof *narrow);
        const pst_cast cast = {narrow, values, sizes[index], dtype, PST_FLOAT32};
        (void)pst__host_cast(&cast, 1.0);
        part->gradients[token] = narrow;
        free(values);
    }
    CHECK_OK(pst_partition_reduce(part->partition, part->ids[index], part->gradients[token], dtype,
                                  (void *)token)); // NOLINT: an index
}

static void give(part *part, size_t index, uint64_t step) {
    give_as(part, index, step, PST_FLOAT32);
}

/* Parameters [first, end), the last one first. */
static void give_all(part *part, size_t first, size_t end, uint64_t step) {
    for (size_t i = end; i-- > first && part->state->failure[0] == '\0';)
        give(part, i, step);
}

static void begin(part *part, int is_last) {
    rank_state *state = part->state;
    CHECK_OK(pst_partition_begin_backward(part->partition, is_last));
}

static void end(part *part, int release) {
    rank_state *state = part->state;
    CHECK_OK(pst_partition_end_backward(part->partition, release));
}

static void backward_of(part *part, int is_last, uint64_t step) {
    rank_state *state = part->state;
    begin(part, is_last);
    CHECK_FINE();
    give_all(part, 0, SIZES, step);
    CHECK_FINE();
    end(part, 1);
}

typedef float (*expected_value)(const rank_state *state, size_t parameter, size_t element);

/* Sums in rank order of what each rank sends: multiplied, as a world of 3 can tell. */
static float mean_at(const rank_state *state, uint64_t step, size_t parameter, size_t element) {
    float sum = 0;
    for (int rank = 0; rank < state->world; rank++)
        sum += gradient_of(rank, step, parameter, element) * (float)(1.0 / (double)state->world);
    return sum;
}

static float mean_1(const rank_state *state, size_t parameter, size_t element) {
    return mean_at(state, 1, parameter, element);
}

static float mean_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_at(state, 2, parameter, element);
}

static float mean_1_and_2(const rank_state *state, size_t parameter, size_t element) {
    return mean_1(state, parameter, element) + mean_2(state, parameter, element);
}

static float zero(const rank_state *state, size_t parameter, size_t element) {
    (void)state, (void)parameter, (void)element;
    return 0.0f;
}

/* finish_compute tells what is noted. */
static void check_parameter(const part *part, size_t index, expected_value expected) {
    rank_state *state = part->state;
    const float *at = part->flat + GUARD;
    for (size_t i = 0; i < index; i++)
        at += part->count[i];
    for (size_t i = 0; i < part->count[index]; i++) {
        const float wanted = expected(state, index, part->first[index] + i);
        if (at[i] != wanted) note_wrong(state, "parameter", index, i, at[i], wanted);
    }
}

static void check_guards(const part *part) {
    rank_state *state = part->state;
    for (size_t i = 0; i < GUARD; i++)
        CHECK(part->flat[i] == guard && part->flat[GUARD + part->flat_count + i] == guard);
}

static void check_all(const part *part, expected_value expected) {
    rank_state *state = part->state;
    finish_compute(state);
    for (size_t i = 0; i < SIZES && state->failure[0] == '\0'; i++)
        check_parameter(part, i, expected);
    finish_compute(state);
    CHECK_FINE();
    check_guards(part);
}

/* ---- running --------------------------------------------------------------------------------- */

static void on_worlds(const variant *variant, rank_body body) {
    model model = {.deadline_ns = 10000000000u};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        for (int device = ON_HOST; device <= ON_CE; device++) {
            model.device = device;
            run_ranks_on_device(worlds[i], &model, body, (void *)variant);
        }
}

/* Each way, in one bucket and in buckets that gradients are cut into, on three ranks. */
static void in_all_ways(rank_body body) {
    static const size_t bytes[] = {256, 1u << 20};
    model model = {.deadline_ns = 10000000000u};
    for (int route = PST_PARTITION_ALL_REDUCE; route <= PST_PARTITION_REDUCE_SCATTER; route++)
        for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
            const variant variant = {.route = (pst_partition_route)route, .bucket_bytes = bytes[i]};
            for (int device = ON_HOST; device <= ON_CE; device++) {
                model.device = device;
                run_ranks_on_device(3, &model, body, (void *)&variant);
            }
        }
}

#define TEST_ON_ALL_WAYS(name, body)                                                               \
    static void name(void **unused) {                                                              \
        (void)unused;                                                                              \
        in_all_ways(body);                                                                         \
    }

/* ---- values ---------------------------------------------------------------------------------- */

static void reduce_once(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    backward_of(&part, 1, 1);
    CHECK_FINE();
    check_all(&part, mean_1);
    CHECK_FINE();
    for (size_t i = 1; i < part.gradient_count; i++)
        CHECK(part.consumed[i] == 1);
    close_part(&part);
}
TEST_ON_ALL_WAYS(each_rank_gets_the_mean_of_what_it_owns, reduce_once)

static void any_number_of_ranks_chooses_a_way_by_itself(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 512};
    on_worlds(&variant, reduce_once);
}

static void accumulate(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    for (int update = 0; update < 2; update++) {
        backward_of(&part, 0, 1);
        CHECK_FINE();
        backward_of(&part, 1, 2);
        CHECK_FINE();
        check_all(&part, mean_1_and_2);
        CHECK_FINE();
    }
    close_part(&part);
}
TEST_ON_ALL_WAYS(backwards_add_up_until_the_last_one, accumulate)

/* A parameter that several graphs use, or that a recompiled graph reports again. */
static void report_twice(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    begin(&part, 1);
    CHECK_FINE();
    give_all(&part, 0, SIZES, 1);
    CHECK_FINE();
    give_all(&part, 0, SIZES, 2);
    CHECK_FINE();
    end(&part, 1);
    CHECK_FINE();
    check_all(&part, mean_1_and_2);
    CHECK_FINE();
    close_part(&part);
}
TEST_ON_ALL_WAYS(two_gradients_of_a_parameter_in_one_backward_add, report_twice)

static void report_twice_in_a_row(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    begin(&part, 1);
    for (size_t i = SIZES; i-- > 0;) {
        give(&part, i, 1);
        CHECK_FINE();
        end(&part, 0); /* of a graph */
        CHECK_FINE();
        give(&part, i, 2);
        CHECK_FINE();
    }
    end(&part, 1);
    CHECK_FINE();
    check_all(&part, mean_1_and_2);
    CHECK_FINE();
    close_part(&part);
}
TEST_ON_ALL_WAYS(gradients_of_several_graphs_add, report_twice_in_a_row)

static void leave_some_out(rank_state *state) {
    part part = {0};
    open_part(&part, state, 0.0f);
    CHECK_FINE();
    backward_of(&part, 1, 1);
    CHECK_FINE();
    begin(&part, 1);
    give_all(&part, 4, SIZES, 2); /* the others have none */
    CHECK_FINE();
    end(&part, 1);
    CHECK_FINE();
    finish_compute(state);
    for (size_t i = 0; i < SIZES; i++)
        check_parameter(&part, i, i < 4 ? zero : mean_2);
    finish_compute(state);
    CHECK_FINE();
    close_part(&part);
}
TEST_ON_ALL_WAYS(what_has_no_gradient_since_the_update_is_zero, leave_some_out)

/* As for stage 1: bound for a backward, and gone before the next one. */
static void bind_anew(rank_state *state) {
    part part = {0};
    create_part(&part, state);
    CHECK_FINE();
    for (int step = 0; step < 3; step++) {
        fresh_flat(&part, 0.0f);
        bind_flat(&part);
        CHECK_FINE();
        backward_of(&part, 1, 1);
        CHECK_FINE();
        check_all(&part, mean_1);
        CHECK_FINE();
        for (size_t i = 0; i < SIZES; i++)
            CHECK_OK(pst_partition_bind(part.partition, part.ids[i], NULL, PST_FLOAT32, 0, 0));
        memset(part.flat, 0xff, (part.flat_count + 2 * GUARD) * sizeof(float));
    }
    close_part(&part);
}
TEST_ON_ALL_WAYS(targets_may_be_others_in_each_step, bind_anew)

static void break_off(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    begin(&part, 1);
    give_all(&part, 5, SIZES, 2);
    CHECK_FINE();
    backward_of(&part, 1, 1);
    CHECK_FINE();
    check_all(&part, mean_1);
    CHECK_FINE();
    for (size_t i = 1; i < part.gradient_count; i++)
        CHECK(part.consumed[i] == 1);
    close_part(&part);
}

static void a_backward_that_was_broken_off_is_forgotten(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    on_worlds(&variant, break_off);
}

/* ---- dtypes ---------------------------------------------------------------------------------- */

static void reduce_bf16(rank_state *state) {
    const variant *variant = state->argument;
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    begin(&part, 1);
    for (size_t i = SIZES; i-- > 0;)
        give_as(&part, i, 1, i % 3 == 0 ? PST_FLOAT32 : PST_BFLOAT16);
    CHECK_FINE();
    end(&part, 1);
    CHECK_FINE();
    finish_compute(state);
    const float *at = part.flat + GUARD;
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < part.count[i]; j++, at++) {
            const float wanted = mean_1(state, i, part.first[i] + j), apart = *at - wanted;
            const float limit = i % 3 == 0 ? 0.0f : variant->reduce_in_fp32 ? 0.005f : 0.02f;
            CHECK(apart <= limit && -apart <= limit);
        }
    check_guards(&part);
    CHECK_FINE();
    close_part(&part);
}

static void gradients_travel_in_their_dtype_or_in_fp32(void **unused) {
    (void)unused;
    for (int fp32 = 0; fp32 <= 1; fp32++)
        for (int route = PST_PARTITION_ALL_REDUCE; route <= PST_PARTITION_REDUCE_SCATTER; route++) {
            const variant variant = {
                .route = (pst_partition_route)route, .bucket_bytes = 512, .reduce_in_fp32 = fp32};
            on_worlds(&variant, reduce_bf16);
        }
}

/* In buckets of their own, of which neither waits for the other. */
static void reduce_in_two_dtypes(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    begin(&part, 1);
    for (size_t i = SIZES; i-- > 0;) {
        give_as(&part, i, 1, PST_BFLOAT16);
        give_as(&part, i, 2, PST_FLOAT32);
    }
    CHECK_FINE();
    end(&part, 1);
    CHECK_FINE();
    finish_compute(state);
    const float *at = part.flat + GUARD;
    for (size_t i = 0; i < SIZES; i++)
        for (size_t j = 0; j < part.count[i]; j++, at++) {
            const float apart = *at - mean_1_and_2(state, i, part.first[i] + j);
            CHECK(apart <= 0.02f && -apart <= 0.02f);
        }
    close_part(&part);
}

static void two_gradients_of_different_dtypes_add(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    on_worlds(&variant, reduce_in_two_dtypes);
}

/* ---- which way ------------------------------------------------------------------------------- */

static pst_partition_stats stats_now(const part *part) {
    pst_partition_stats stats;
    pst_partition_get_stats(part->partition, &stats);
    return stats;
}

/* All gradients in one bucket are about evenly owned, a few belong to the last rank. */
static void choose(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    backward_of(&part, 1, 1);
    CHECK_FINE();
    CHECK(stats_now(&part).reductions == 1 && stats_now(&part).by_reduce_scatter == 1);
    begin(&part, 1);
    give(&part, SIZES - 1, 1);
    end(&part, 1);
    CHECK_FINE();
    CHECK(stats_now(&part).reductions == 2);
    CHECK(stats_now(&part).by_reduce_scatter == (state->world == 1 ? 2 : 1));
    close_part(&part);
}

static void even_buckets_are_scattered_and_others_all_reduced(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    on_worlds(&variant, choose);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Graphs that report nothing end with no buckets kept, and the last one that does releases them. */
static void hold_and_release(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    for (int step = 0; step < 3; step++) {
        begin(&part, 1);
        give_all(&part, 4, SIZES, 1);
        end(&part, 0);
        CHECK_FINE();
        CHECK(stats_now(&part).bucket_bytes > 0);
        give_all(&part, 0, 4, 1);
        end(&part, 1);
        CHECK_FINE();
        CHECK(stats_now(&part).bucket_bytes == 0);
        end(&part, 1); /* a graph without gradients */
        CHECK_FINE();
        CHECK(stats_now(&part).bucket_bytes == 0);
        check_all(&part, mean_1);
        CHECK_FINE();
    }
    CHECK(stats_now(&part).bucket_peak <= 2 * 1024 + 512 * (size_t)state->world);
    close_part(&part);
}

static void buckets_are_gone_behind_the_last_gradient(void **unused) {
    (void)unused;
    model model = {.deadline_ns = 10000000000u};
    const variant variant = {
        .bucket_bytes = 1024, .frees_in_compute_order = 1, .route = PST_PARTITION_ALL_REDUCE};
    for (int device = ON_HOST; device <= ON_ASYNC; device++) {
        model.device = device;
        run_ranks_on_device(3, &model, hold_and_release, (void *)&variant);
    }
}

/* ---- the host goes on ------------------------------------------------------------------------ */

static void train_while_nothing_moves(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    backward_of(&part, 1, 1); /* the ranks compare */
    CHECK_FINE();
    finish_compute(state);
    CHECK_FINE();
    async_pause(state->async, 1);
    for (int step = 0; step < 2; step++) {
        backward_of(&part, 1, 2);
        if (state->failure[0] != '\0') break;
    }
    async_pause(state->async, 0);
    CHECK_FINE();
    check_all(&part, mean_2);
    CHECK_FINE();
    close_part(&part);
}

static void backwards_do_not_wait_for_the_device(void **unused) {
    (void)unused;
    const model model = {.deadline_ns = 10000000000u, .device = ON_ASYNC};
    for (int route = PST_PARTITION_ALL_REDUCE; route <= PST_PARTITION_REDUCE_SCATTER; route++) {
        const variant variant = {.route = (pst_partition_route)route, .bucket_bytes = 256};
        for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
            run_ranks_on_device(worlds[i], &model, train_while_nothing_moves, (void *)&variant);
    }
}

/* ---- failing --------------------------------------------------------------------------------- */

static int text_has(const rank_state *state, const char *wanted) {
    char text[1024];
    (void)pst_runtime_error(state->runtime, text, sizeof text);
    return strstr(text, wanted) != NULL;
}

static int told; /* ranks that found it; the others hear of an abort */

static void report_in_another_order(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    begin(&part, 1);
    give(&part, 7, 1);
    give(&part, state->rank == 1 ? 2 : 0, 1); /* both take one slot */
    give(&part, state->rank == 1 ? 0 : 2, 1);
    CHECK_FINE();
    pst_status status = pst_partition_end_backward(part.partition, 1);
    for (int i = 0; i < 5000 && status == PST_OK; i++) {
        async_sleep(1000);
        status = pst_partition_begin_backward(part.partition, 1);
    }
    CHECK(status < 0);
    if (text_has(state, "reported other gradients"))
        (void)__atomic_add_fetch(&told, 1, __ATOMIC_RELAXED); /* the join publishes it */
    pst_partition_destroy(part.partition);
    for (size_t i = 0; i < part.gradient_count; i++)
        free(part.gradients[i]);
}

static void ranks_that_report_different_gradients_are_told(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20, .route = PST_PARTITION_ALL_REDUCE};
    model model = {.deadline_ns = 10000000000u};
    for (int device = ON_HOST; device <= ON_ASYNC; device++) {
        model.device = device;
        told = 0;
        run_ranks_on_device(2, &model, report_in_another_order, (void *)&variant);
        assert_true(told > 0);
    }
}

/* Rank 0 binds nothing of what it has of parameter 1. */
static void bind_too_little(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    part.count[1] -= state->rank == 0;
    bind_flat(&part);
    CHECK_FINE();
    begin(&part, 1);
    give_all(&part, 0, SIZES, 1);
    CHECK_FINE();
    CHECK(pst_partition_end_backward(part.partition, 1) == PST_EMISMATCH);
    CHECK(text_has(state, "parameter 'p1' of 300 elements: the ranks have bound 299"));
    close_part(&part);
}

static void elements_that_nobody_owns_are_named(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    const model model = {.deadline_ns = 10000000000u};
    run_ranks_on_device(2, &model, bind_too_little, (void *)&variant);
}

static void bind_wrongly(rank_state *state) {
    part part = {0};
    open_part(&part, state, 7.0f);
    CHECK_FINE();
    float *target = part.flat + GUARD;
    CHECK(pst_partition_bind(part.partition, part.ids[1], target, PST_FLOAT32, 299, 2) ==
          PST_EINVAL);
    CHECK(pst_partition_bind(part.partition, part.ids[1], NULL, PST_FLOAT32, 0, 1) == PST_EINVAL);
    CHECK(pst_partition_bind(part.partition, SIZES, target, PST_FLOAT32, 0, 1) == PST_EINVAL);
    CHECK(pst_partition_reduce(part.partition, SIZES, target, PST_FLOAT32, NULL) == PST_EINVAL);
    CHECK(pst_partition_reduce(part.partition, part.ids[1], NULL, PST_FLOAT32, NULL) == PST_EINVAL);
    backward_of(&part, 1, 1);
    CHECK_FINE();
    CHECK(pst_partition_bind(part.partition, part.ids[7], target, PST_FLOAT32, 1, 3) == PST_EINVAL);
    CHECK(text_has(state, "the ranks have agreed"));
    uint32_t lonely;
    CHECK_OK(pst_partition_add(part.partition, "lonely", 4, &lonely));
    CHECK_OK(pst_partition_begin_backward(part.partition, 1));
    CHECK_OK(pst_partition_reduce(part.partition, lonely, target, PST_FLOAT32, NULL));
    CHECK(pst_partition_end_backward(part.partition, 1) == PST_EINVAL);
    CHECK(text_has(state, "'lonely' has a gradient, but no rank has bound it"));
    close_part(&part);
}

static void wrong_bindings_are_named(void **unused) {
    (void)unused;
    const variant variant = {.bucket_bytes = 1u << 20};
    const model model = {.deadline_ns = 10000000000u};
    run_ranks_on_device(2, &model, bind_wrongly, (void *)&variant);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_rank_gets_the_mean_of_what_it_owns),
        cmocka_unit_test(any_number_of_ranks_chooses_a_way_by_itself),
        cmocka_unit_test(backwards_add_up_until_the_last_one),
        cmocka_unit_test(two_gradients_of_a_parameter_in_one_backward_add),
        cmocka_unit_test(gradients_of_several_graphs_add),
        cmocka_unit_test(what_has_no_gradient_since_the_update_is_zero),
        cmocka_unit_test(targets_may_be_others_in_each_step),
        cmocka_unit_test(a_backward_that_was_broken_off_is_forgotten),
        cmocka_unit_test(gradients_travel_in_their_dtype_or_in_fp32),
        cmocka_unit_test(two_gradients_of_different_dtypes_add),
        cmocka_unit_test(even_buckets_are_scattered_and_others_all_reduced),
        cmocka_unit_test(buckets_are_gone_behind_the_last_gradient),
        cmocka_unit_test(backwards_do_not_wait_for_the_device),
        cmocka_unit_test(ranks_that_report_different_gradients_are_told),
        cmocka_unit_test(elements_that_nobody_owns_are_named),
        cmocka_unit_test(wrong_bindings_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
