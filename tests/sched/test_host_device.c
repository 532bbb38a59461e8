/* The host device: conversions against a slow reference, sums, copies, events, memory. */
#include "tests/random.h"
#include "tests/sched/harness.h"

#include <math.h>

typedef struct fixture {
    pst_runtime *runtime;
    pst_device *device;
    pst_stream *stream;
} fixture;

static int setup(void **state) {
    fixture *f = calloc(1, sizeof *f);
    f->runtime = open_runtime(0);
    f->device = pst_runtime_host(f->runtime);
    assert_ok(f->device->ops->stream_create(f->device, 0, &f->stream));
    *state = f;
    return 0;
}

static int teardown(void **state) {
    fixture *f = *state;
    f->device->ops->stream_destroy(f->device, f->stream);
    pst_runtime_destroy(f->runtime);
    free(f);
    return 0;
}

/* ---- the reference: 16-bit floats by their definition ----------------------------------- */

typedef struct half_format {
    int exponent_bits, fraction_bits;
} half_format;

static const half_format float16 = {5, 10}, bfloat16 = {8, 7};

static double half_value(half_format format, uint16_t bits) {
    const int bias = (1 << (format.exponent_bits - 1)) - 1;
    const int exponent = bits >> format.fraction_bits & ((1 << format.exponent_bits) - 1);
    const int fraction = bits & ((1 << format.fraction_bits) - 1);
    const double sign = bits >> 15 ? -1 : 1;
    if (exponent == (1 << format.exponent_bits) - 1)
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0) return sign * ldexp(fraction, 1 - bias - format.fraction_bits);
    return sign *
           ldexp(fraction + (1 << format.fraction_bits), exponent - bias - format.fraction_bits);
}

/* Nearest, ties to even: the neighbours of positive values are bit patterns that follow each other.
 */
static uint16_t half_bits(half_format format, double value) {
    const uint16_t infinity = (uint16_t)(((1 << format.exponent_bits) - 1) << format.fraction_bits);
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double magnitude = fabs(value);
    uint16_t low = 0, high = infinity;
    while (high - low > 1) {
        const uint16_t middle = (uint16_t)((low + high) / 2);
        if (half_value(format, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    /* One step beyond the largest finite value counts as the value that infinity stands for. */
    const double below = half_value(format, low);
    const double above = high == infinity ? 2 * below - half_value(format, (uint16_t)(low - 1))
                                          : half_value(format, high);
    const double to_low = magnitude - below, to_high = above - magnitude;
    const int take_high = to_high < to_low || (to_high == to_low && (low & 1));
    return (uint16_t)(sign | (take_high ? high : low));
}

static void cast(const fixture *f, void *to, pst_dtype to_dtype, const void *from,
                 pst_dtype from_dtype, size_t count, double scale) {
    const pst_cast piece = {to, from, count, to_dtype, from_dtype};
    assert_ok(f->device->ops->cast_scale_copy(f->device, f->stream, &piece, 1, scale));
}

static void every_16_bit_value_comes_back_exactly(void **state) {
    fixture *f = *state;
    static uint16_t bits[65536], back[65536];
    static float wide[65536];
    const struct {
        pst_dtype dtype;
        half_format format;
    } kinds[] = {{PST_FLOAT16, float16}, {PST_BFLOAT16, bfloat16}};
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; i < 65536; i++)
            bits[i] = (uint16_t)i;
        cast(f, wide, PST_FLOAT32, bits, kinds[k].dtype, 65536, 1.0);
        cast(f, back, kinds[k].dtype, wide, PST_FLOAT32, 65536, 1.0);
        for (size_t i = 0; i < 65536; i++) {
            const double expected = half_value(kinds[k].format, bits[i]);
            if (isnan(expected)) {
                assert_true(isnan(wide[i]));
                assert_true(isnan(half_value(kinds[k].format, back[i])));
            } else {
                assert_true((double)wide[i] == expected);
                assert_int_equal(back[i], bits[i]);
            }
        }
    }
}

#define SAMPLES 4096

static float any_float(uint64_t *random) {
    uint32_t bits = random_below(random, UINT32_MAX);
    /* Half of them near what float16 can hold, with its ties. */
    if (random_below(random, 2)) bits = (bits & 0x8fffe000u) | 0x38000000u | (bits & 1u) << 12;
    float value;
    memcpy(&value, &bits, sizeof value);
    return isnan(value) ? 1.0f : value;
}

static void rounding_is_to_nearest_even(void **state) {
    fixture *f = *state;
    uint64_t random = random_seed("rounding_is_to_nearest_even");
    static float from[SAMPLES];
    static uint16_t to[SAMPLES];
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < SAMPLES; i++)
            from[i] = any_float(&random);
        cast(f, to, PST_FLOAT16, from, PST_FLOAT32, SAMPLES, 1.0);
        for (size_t i = 0; i < SAMPLES; i++)
            assert_int_equal(to[i], half_bits(float16, (double)from[i]));
        cast(f, to, PST_BFLOAT16, from, PST_FLOAT32, SAMPLES, 1.0);
        for (size_t i = 0; i < SAMPLES; i++)
            assert_int_equal(to[i], half_bits(bfloat16, (double)from[i]));
    }
}

static void doubles_are_rounded_once(void **state) {
    fixture *f = *state;
    uint64_t random = random_seed("doubles_are_rounded_once");
    static double from[SAMPLES];
    static uint16_t to[SAMPLES];
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < SAMPLES; i++) {
            const double nudge = ldexp((double)random_below(&random, 3) - 1.0, -40);
            from[i] = (double)any_float(&random) * (1.0 + nudge);
        }
        cast(f, to, PST_FLOAT16, from, PST_FLOAT64, SAMPLES, 1.0);
        for (size_t i = 0; i < SAMPLES; i++)
            assert_int_equal(to[i], half_bits(float16, from[i]));
        cast(f, to, PST_BFLOAT16, from, PST_FLOAT64, SAMPLES, 1.0);
        for (size_t i = 0; i < SAMPLES; i++)
            assert_int_equal(to[i], half_bits(bfloat16, from[i]));
    }
}

static void pieces_are_cast_and_scaled(void **state) {
    fixture *f = *state;
    float a[1000], back[1000];
    double b[3] = {1, 2, 3};
    uint16_t half[1000];
    int32_t c[4] = {1, 2, 3, 4}, d[4], zeros[2] = {7, 7};
    float narrow[3];
    for (size_t i = 0; i < 1000; i++)
        a[i] = (float)i;
    const pst_cast pieces[] = {{half, a, 1000, PST_FLOAT16, PST_FLOAT32},
                               {narrow, b, 3, PST_FLOAT32, PST_FLOAT64},
                               {zeros, NULL, 2, PST_INT32, PST_INT32},
                               {d, c, 0, PST_INT32, PST_INT32}};
    assert_ok(f->device->ops->cast_scale_copy(f->device, f->stream, pieces, 4, 0.5));
    cast(f, back, PST_FLOAT32, half, PST_FLOAT16, 1000, 2.0);
    for (size_t i = 0; i < 1000; i++)
        assert_true(back[i] == a[i]);
    assert_true(narrow[2] == 1.5f);
    assert_int_equal(zeros[1], 0);
    cast(f, d, PST_INT32, c, PST_INT32, 4, 1.0);
    assert_memory_equal(c, d, sizeof c);
}

static void what_cannot_be_converted_is_refused(void **state) {
    fixture *f = *state;
    int32_t a[4] = {1, 2, 3, 4};
    float b[4];
    const pst_cast to_float = {b, a, 4, PST_FLOAT32, PST_INT32};
    const pst_cast scaled = {a, a, 4, PST_INT32, PST_INT32};
    const pst_device_ops *ops = f->device->ops;
    assert_status(ops->cast_scale_copy(f->device, f->stream, &to_float, 1, 1.0), PST_EUNSUPPORTED);
    assert_status(ops->cast_scale_copy(f->device, f->stream, &scaled, 1, 2.0), PST_EUNSUPPORTED);
    const void *sources[] = {a};
    const pst_sum sum = {b, sources, 1, 4, 1.0, 0, PST_FLOAT32, PST_INT32, 0, 0};
    assert_status(ops->sum(f->device, f->stream, &sum), PST_EUNSUPPORTED);
    pst_event *event;
    assert_status(ops->event_create(f->device, 1, &event), PST_EUNSUPPORTED);
}

/* The sum in fp32 in the order of the sources, written out. */
static void sums_are_made_in_the_order_of_the_sources(void **state) {
    fixture *f = *state;
    uint64_t random = random_seed("sums_are_made_in_the_order_of_the_sources");
    enum { COUNT = 1500, SOURCES = 5 };
    static uint16_t half[SOURCES][COUNT];
    static float wide[SOURCES][COUNT], total[COUNT], expected;
    const void *sources[SOURCES];
    for (size_t k = 0; k < SOURCES; k++) {
        for (size_t i = 0; i < COUNT; i++)
            wide[k][i] = (float)random_below(&random, 1000) / 7.0f;
        cast(f, half[k], PST_BFLOAT16, wide[k], PST_FLOAT32, COUNT, 1.0);
        cast(f, wide[k], PST_FLOAT32, half[k], PST_BFLOAT16, COUNT, 1.0);
        sources[k] = half[k];
    }
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        for (size_t i = 0; i < COUNT; i++)
            total[i] = 3.0f;
        const pst_sum sum = {total,      sources,     SOURCES,      COUNT, 0.25,
                             accumulate, PST_FLOAT32, PST_BFLOAT16, 0,     0};
        assert_ok(f->device->ops->sum(f->device, f->stream, &sum));
        for (size_t i = 0; i < COUNT; i++) {
            expected = wide[0][i];
            for (size_t k = 1; k < SOURCES; k++)
                expected += wide[k][i];
            expected *= 0.25f;
            if (accumulate) expected += 3.0f;
            assert_true(total[i] == expected);
        }
    }
}

static void halves_and_doubles_meet_in_double(void **state) {
    fixture *f = *state;
    const double from[] = {0.5, -3.0, 1024.0};
    double back[3];
    uint16_t half[3];
    for (int dtype = PST_FLOAT16; dtype <= PST_BFLOAT16; dtype++) {
        cast(f, half, (pst_dtype)dtype, from, PST_FLOAT64, 3, 1.0);
        cast(f, back, PST_FLOAT64, half, (pst_dtype)dtype, 3, 3.0);
        for (size_t i = 0; i < 3; i++)
            assert_true(back[i] == 3.0 * from[i]);
    }
}

static void a_sum_in_double_may_accumulate(void **state) {
    fixture *f = *state;
    const float a[] = {1.0f, 2.0f}, b[] = {0.25f, 0.5f};
    double total[] = {100.0, 1e-12};
    const void *sources[] = {a, b};
    const pst_sum sum = {total, sources, 2, 2, 2.0, 1, PST_FLOAT64, PST_FLOAT32, 0, 0};
    assert_ok(f->device->ops->sum(f->device, f->stream, &sum));
    assert_true(total[0] == 102.5);
    assert_true(total[1] == 5.0 + 1e-12);
}

static void a_sum_may_be_written_over_a_source(void **state) {
    fixture *f = *state;
    double a[700], b[700];
    for (size_t i = 0; i < 700; i++) {
        a[i] = (double)i;
        b[i] = 1e-9;
    }
    const void *sources[] = {a, b};
    const pst_sum sum = {b, sources, 2, 700, 2.0, 0, PST_FLOAT64, PST_FLOAT64, 0, 0};
    assert_ok(f->device->ops->sum(f->device, f->stream, &sum));
    for (size_t i = 0; i < 700; i++)
        assert_true(b[i] == ((double)i + 1e-9) * 2.0);
}

static void copies_and_fills(void **state) {
    fixture *f = *state;
    const pst_device_ops *ops = f->device->ops;
    char from[] = "abcdefgh", to[9] = {0}, grid[9] = {0};
    const pst_copy copies[] = {{to, from + 4, 4}, {to + 4, from, 4}, {NULL, NULL, 0}};
    assert_ok(ops->copy(f->device, f->stream, copies, 3));
    assert_string_equal(to, "efghabcd");
    assert_ok(ops->copy_2d(f->device, f->stream, grid, 2, from, 4, 2, 2));
    assert_string_equal(grid, "abef");
    assert_ok(ops->fill(f->device, f->stream, to + 1, 'x', 3));
    assert_string_equal(to, "exxxabcd");
}

static void rows_are_copied_by_number(void **state) {
    fixture *f = *state;
    const int64_t named[] = {3, 1, 3, 4, -1, INT64_MIN};
    const char table[] = "aabbccdd";
    char first[] = "......", second[] = "...";
    const pst_row_range ranges[] = {{first, table, 0, 5}, {second, table + 5, 5, 3}};
    const pst_row_copy copy = {named, 6, 4, 2, ranges, 2};
    assert_ok(f->device->ops->copy_rows(f->device, f->stream, &copy));
    assert_string_equal(first, "..bb..");
    assert_string_equal(second, ".dd");
}

static void memory_is_aligned_and_writable(void **state) {
    fixture *f = *state;
    const pst_device_ops *ops = f->device->ops;
    for (int kind = PST_MEMORY_DEVICE; kind <= PST_MEMORY_PINNED; kind++) {
        void *memory = NULL;
        assert_ok(ops->alloc(f->device, (pst_memory_kind)kind, 10000, &memory));
        assert_int_equal((uintptr_t)memory % 512, 0);
        memset(memory, 1, 10000);
        ops->free(f->device, (pst_memory_kind)kind, memory, 10000);
    }
    void *memory = &memory;
    assert_status(ops->alloc(f->device, PST_MEMORY_DEVICE, 0, &memory), PST_EINVAL);
    assert_null(memory);
    assert_status(ops->alloc(f->device, PST_MEMORY_DEVICE, SIZE_MAX / 2, &memory), PST_ENOMEM);
}

static void an_event_is_done_when_the_launches_before_it_are(void **state) {
    fixture *f = *state;
    const pst_device_ops *ops = f->device->ops;
    step slow = {.name = "slow", .asks = 1}, second = {.name = "second"};
    const pst_work work = {step_start, step_test, &slow}, next = {step_start, NULL, &second};
    pst_event *event;
    pst_stream *other;
    assert_ok(ops->event_create(f->device, 0, &event));
    assert_ok(ops->stream_wrap(f->device, NULL, &other));
    assert_ok(ops->event_query(f->device, event)); /* never recorded */
    assert_status(ops->launch(f->device, f->stream, &work), PST_PENDING);
    assert_ok(ops->event_record(f->device, event, f->stream));
    assert_status(ops->event_query(f->device, event), PST_PENDING);
    assert_status(ops->stream_wait(f->device, other, event), PST_PENDING);
    assert_status(ops->launch(f->device, f->stream, &next), PST_EBUSY);
    assert_status(ops->progress(f->device, f->stream), PST_PENDING);
    assert_ok(ops->progress(f->device, f->stream));
    assert_ok(ops->event_query(f->device, event));
    assert_ok(ops->stream_wait(f->device, other, event));
    assert_ok(ops->launch(f->device, f->stream, &next));
    assert_ok(ops->progress(f->device, f->stream));
    ops->stream_destroy(f->device, other);
    ops->event_destroy(f->device, event);
}

static void dtypes_have_sizes_and_names(void **state) {
    (void)state;
    assert_int_equal(pst_dtype_size(PST_BFLOAT16), 2);
    assert_int_equal(pst_dtype_size(PST_INT64), 8);
    assert_string_equal(pst_dtype_name(PST_FLOAT8_E5M2), "float8_e5m2");
    for (int d = 0; d < PST_DTYPE_COUNT; d++)
        assert_true(pst_dtype_size((pst_dtype)d) > 0 && pst_dtype_name((pst_dtype)d)[0] != '\0');
    assert_int_equal(pst_dtype_size(PST_DTYPE_COUNT), 0);
    assert_string_equal(pst_dtype_name(PST_DTYPE_COUNT), "unknown dtype");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_16_bit_value_comes_back_exactly),
        TEST(rounding_is_to_nearest_even),
        TEST(doubles_are_rounded_once),
        TEST(pieces_are_cast_and_scaled),
        TEST(what_cannot_be_converted_is_refused),
        TEST(sums_are_made_in_the_order_of_the_sources),
        TEST(halves_and_doubles_meet_in_double),
        TEST(a_sum_in_double_may_accumulate),
        TEST(a_sum_may_be_written_over_a_source),
        TEST(copies_and_fills),
        TEST(rows_are_copied_by_number),
        TEST(memory_is_aligned_and_writable),
        TEST(an_event_is_done_when_the_launches_before_it_are),
        TEST(dtypes_have_sizes_and_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
