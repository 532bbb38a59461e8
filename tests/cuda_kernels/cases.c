#include "cases.h"

#include "../cmocka_all.h"
#include "sched/device/host.h"
#include "tests/random.h"

#include <math.h>
#include <string.h>

struct cases {
    runner runner;
    uint64_t random;
    unsigned char *expected, *found;
    unsigned char dtype[CASES_BYTES]; /* of the element that begins here; PST_DTYPE_COUNT: a byte */
};

/* ---- memory ----------------------------------------------------------------------------- */

cases *cases_create(const runner *runner, uint64_t seed) {
    cases *cases = calloc(1, sizeof *cases);
    assert_non_null(cases);
    cases->runner = *runner;
    cases->random = seed;
    cases->expected = aligned_alloc(512, CASES_BYTES);
    cases->found = aligned_alloc(512, CASES_BYTES);
    assert_non_null(cases->expected);
    assert_non_null(cases->found);
    return cases;
}

void cases_destroy(cases *cases) {
    free(cases->expected);
    free(cases->found);
    free(cases);
}

static uint32_t below(cases *cases, uint32_t bound) {
    return random_below(&cases->random, bound);
}

/* Any bits (so NaN, infinity and subnormal numbers too), or numbers near one. */
static void randomise(cases *cases) {
    for (size_t i = 0; i < CASES_BYTES; i += 8) {
        cases->random = mix(cases->random);
        memcpy(cases->expected + i, &cases->random, 8);
    }
    for (size_t i = 0; i < CASES_BYTES; i++)
        cases->dtype[i] = PST_DTYPE_COUNT;
}

static void write_number(unsigned char *to, pst_dtype dtype, double number) {
    const float narrow = (float)number;
    const pst_cast cast = {to, dtype == PST_FLOAT64 ? (const void *)&number : (const void *)&narrow,
                           1, dtype, dtype == PST_FLOAT64 ? PST_FLOAT64 : PST_FLOAT32};
    assert_int_equal(pst__host_cast(&cast, 1.0), PST_OK);
}

/* Zeros, infinities, subnormal numbers, and what lies between two numbers of fewer bits. */
static double special(cases *cases) {
    static const double numbers[] = {
        0.0,
        -0.0,
        1.0,
        HUGE_VAL,
        -HUGE_VAL,
        0x1.fffffep127,
        0x1p-149,
        -0x1p-149,
        65504.0,
        65520.0,
        -65519.9,
        0x1p-24,
        0x1p-25,
        0x1.8p-25,
        0x1.01p0,
        0x1.03p0,
        0x1.002p0,
        0x1.006p0,
        0x1.01p0 + 0x1p-40,
        0x1p-133,
        0x1.002p0 - 0x1p-50,
        0x1.ffp127,
        0x1p1023,
    };
    return numbers[below(cases, sizeof numbers / sizeof numbers[0])];
}

/* A third of all sources keeps any bits, a third gets numbers that a sum of them does not drown. */
static void tame(cases *cases, size_t offset, size_t count, pst_dtype dtype) {
    const uint32_t kind = below(cases, 3);
    if (kind == 0) return;
    for (size_t i = 0; i < count; i++) {
        cases->random = mix(cases->random);
        write_number(cases->expected + offset + i * pst_dtype_size(dtype), dtype,
                     kind == 1 ? special(cases) : (double)(int64_t)cases->random * 0x1p-62);
    }
}

static void remember(cases *cases, size_t offset, size_t count, pst_dtype dtype) {
    for (size_t i = 0; i < count; i++)
        cases->dtype[offset + i * pst_dtype_size(dtype)] = (unsigned char)dtype;
}

/* ---- comparing -------------------------------------------------------------------------- */

static int is_nan(const unsigned char *at, pst_dtype dtype) {
    double value;
    const pst_cast cast = {&value, at, 1, PST_FLOAT64, dtype};
    return pst__host_cast(&cast, 1.0) == PST_OK && value != value;
}

static int equal_at(const cases *cases, size_t at, pst_dtype dtype, size_t size) {
    const unsigned char *expected = cases->expected + at, *found = cases->found + at;
    if (memcmp(expected, found, size) == 0) return 1;
    return dtype != PST_DTYPE_COUNT && is_nan(expected, dtype) && is_nan(found, dtype);
}

static void compare(cases *cases, const char *what) {
    cases->runner.get(cases->runner.context, cases->found);
    for (size_t at = 0; at < CASES_BYTES;) {
        const pst_dtype dtype = (pst_dtype)cases->dtype[at];
        const size_t size = dtype == PST_DTYPE_COUNT ? 1 : pst_dtype_size(dtype);
        if (!equal_at(cases, at, dtype, size))
            fail_msg("%s: byte %zu (%s): %02x%02x.. instead of %02x%02x..", what, at,
                     dtype == PST_DTYPE_COUNT ? "byte" : pst_dtype_name(dtype), cases->found[at],
                     cases->found[at + size - 1], cases->expected[at],
                     cases->expected[at + size - 1]);
        at += size;
    }
}

/* ---- places ----------------------------------------------------------------------------- */

/* Parts of the memory are handed out in order, with gaps of 0 to 63 bytes before them. */
typedef struct places {
    size_t end, limit;
} places;

static size_t place(cases *cases, places *places, size_t count, pst_dtype dtype) {
    const size_t size = pst_dtype_size(dtype);
    const size_t gap = below(cases, 2) == 0 ? 0 : below(cases, 64);
    const size_t begin = (places->end + gap + size - 1) / size * size;
    places->end = begin + count * size;
    assert_true(places->end <= places->limit);
    return begin;
}

/* Mostly small; now and then several blocks. */
static size_t random_count(cases *cases, uint32_t most) {
    static const uint32_t limits[] = {40, 2000, UINT32_MAX, UINT32_MAX};
    const uint32_t limit = limits[below(cases, 4)];
    return below(cases, limit < most ? limit : most);
}

static double random_scale(cases *cases) {
    static const double scales[] = {1.0, 0.125, 1.0 / 3.0, -2.5e-3, 1e4};
    return scales[below(cases, sizeof scales / sizeof scales[0])];
}

/* ---- cast, scale, copy ------------------------------------------------------------------ */

static void run_casts(cases *cases, const pst_cast *pieces, pst_cast *moved, size_t count,
                      double scale, const char *what) {
    for (size_t i = 0; i < count; i++) {
        moved[i] = pieces[i];
        moved[i].destination = cases->runner.memory + (uintptr_t)pieces[i].destination;
        if (pieces[i].source != NULL)
            moved[i].source = cases->runner.memory + (uintptr_t)pieces[i].source - 1;
    }
    cases->runner.put(cases->runner.context, cases->expected);
    assert_int_equal(cases->runner.cast(cases->runner.context, moved, count, scale), PST_OK);
    for (size_t i = 0; i < count; i++) {
        moved[i].destination = cases->expected + (uintptr_t)pieces[i].destination;
        if (pieces[i].source != NULL)
            moved[i].source = cases->expected + (uintptr_t)pieces[i].source - 1;
        assert_int_equal(pst__host_cast(&moved[i], scale), PST_OK);
    }
    compare(cases, what);
}

/* Addresses are offsets here, those of sources plus 1 so that NULL means that there is none. */
static pst_cast random_piece(cases *cases, places *places, uint32_t most, pst_dtype destination,
                             pst_dtype source, int zeros) {
    pst_cast piece = {.count = random_count(cases, most),
                      .destination_dtype = destination,
                      .source_dtype = source};
    const size_t to = place(cases, places, piece.count, destination);
    remember(cases, to, piece.count, destination);
    piece.destination = (void *)to;
    if (zeros) return piece;
    const size_t from = place(cases, places, piece.count, source);
    tame(cases, from, source <= PST_BFLOAT16 ? piece.count : 0, source);
    piece.source = (const void *)(from + 1);
    return piece;
}

void cases_cast_pair(cases *cases, pst_dtype destination, pst_dtype source) {
    char what[64];
    pst_cast piece, moved;
    places places = {0, CASES_BYTES};
    (void)snprintf(what, sizeof what, "cast %s to %s", pst_dtype_name(source),
                   pst_dtype_name(destination));
    randomise(cases);
    piece = random_piece(cases, &places, 60000, destination, source, 0);
    run_casts(cases, &piece, &moved, 1, random_scale(cases), what);
}

/* Other dtypes than those of floating point are copied only. */
static pst_cast any_piece(cases *cases, places *places, uint32_t most, double scale) {
    const pst_dtype destination = (pst_dtype)below(cases, PST_DTYPE_COUNT);
    const int converts = destination <= PST_BFLOAT16;
    const pst_dtype source = converts ? (pst_dtype)below(cases, 4) : destination;
    const int zeros = below(cases, 4) == 0 || (!converts && scale != 1.0);
    return random_piece(cases, places, most, destination, source, zeros);
}

void cases_cast_many(cases *cases, size_t most) {
    const size_t count = 1 + below(cases, (uint32_t)most);
    pst_cast *pieces = calloc(2 * count, sizeof *pieces);
    places places = {0, CASES_BYTES};
    assert_non_null(pieces);
    randomise(cases);
    const double scale = random_scale(cases);
    const uint32_t elements = (uint32_t)((CASES_BYTES / count / 2 - 72) / 8);
    for (size_t i = 0; i < count; i++)
        pieces[i] = any_piece(cases, &places, elements, scale);
    run_casts(cases, pieces, pieces + count, count, scale, "cast of many");
    free(pieces);
}

/* ---- sum -------------------------------------------------------------------------------- */

enum { MOST_SOURCES = 64 };

static void run_sum(cases *cases, pst_sum *sum, const size_t *from, size_t to, const char *what) {
    const void *sources[MOST_SOURCES];
    sum->sources = sources;
    remember(cases, to, sum->count, sum->destination_dtype);
    cases->runner.put(cases->runner.context, cases->expected);
    for (size_t k = 0; k < sum->source_count; k++)
        sources[k] = cases->runner.memory + from[k];
    sum->destination = cases->runner.memory + to;
    assert_int_equal(cases->runner.sum(cases->runner.context, sum), PST_OK);
    for (size_t k = 0; k < sum->source_count; k++)
        sources[k] = cases->expected + from[k];
    sum->destination = cases->expected + to;
    assert_int_equal(pst__host_sum(sum), PST_OK);
    compare(cases, what);
}

static pst_sum random_sum(cases *cases, pst_dtype destination, pst_dtype source,
                          size_t source_count) {
    const size_t room = CASES_BYTES / (source_count + 1) / 8 - 16;
    return (pst_sum){.source_count = source_count,
                     .count = random_count(cases, (uint32_t)room),
                     .scale = random_scale(cases),
                     .accumulate = (int)below(cases, 2),
                     .destination_dtype = destination,
                     .source_dtype = source,
                     .max_blocks = below(cases, 4),
                     .is_passing = (int)below(cases, 2)};
}

void cases_sum(cases *cases, pst_dtype destination, pst_dtype source, size_t source_count) {
    char what[64];
    size_t from[MOST_SOURCES];
    places places = {0, CASES_BYTES};
    (void)snprintf(what, sizeof what, "sum of %zu %s to %s", source_count, pst_dtype_name(source),
                   pst_dtype_name(destination));
    randomise(cases);
    pst_sum sum = random_sum(cases, destination, source, source_count);
    for (size_t k = 0; k < source_count; k++) {
        from[k] = place(cases, &places, sum.count, source);
        tame(cases, from[k], sum.count, source);
    }
    const size_t to = place(cases, &places, sum.count, destination);
    tame(cases, to, sum.count, destination);
    run_sum(cases, &sum, from, to, what);
}

void cases_sum_in_place(cases *cases, pst_dtype dtype, size_t source_count) {
    size_t from[MOST_SOURCES];
    places places = {0, CASES_BYTES};
    randomise(cases);
    pst_sum sum = random_sum(cases, dtype, dtype, source_count);
    for (size_t k = 0; k < source_count; k++) {
        from[k] = place(cases, &places, sum.count, dtype);
        tame(cases, from[k], sum.count, dtype);
    }
    run_sum(cases, &sum, from, from[below(cases, (uint32_t)source_count)], "sum in place");
}

/* ---- largest ----------------------------------------------------------------------------- */

void cases_maximum(cases *cases, pst_dtype dtype, size_t source_count) {
    size_t from[MOST_SOURCES];
    const void *sources[MOST_SOURCES];
    places places = {0, CASES_BYTES};
    randomise(cases);
    pst_sum maximum = random_sum(cases, dtype, dtype, source_count);
    for (size_t k = 0; k < source_count; k++)
        from[k] = place(cases, &places, maximum.count, dtype);
    const size_t to = place(cases, &places, maximum.count, dtype);
    if (dtype == PST_FLOAT32 || dtype == PST_FLOAT64) remember(cases, to, maximum.count, dtype);
    cases->runner.put(cases->runner.context, cases->expected);
    maximum.sources = sources;
    for (size_t k = 0; k < source_count; k++)
        sources[k] = cases->runner.memory + from[k];
    maximum.destination = cases->runner.memory + to;
    assert_int_equal(cases->runner.maximum(cases->runner.context, &maximum), PST_OK);
    for (size_t k = 0; k < source_count; k++)
        sources[k] = cases->expected + from[k];
    maximum.destination = cases->expected + to;
    assert_int_equal(pst__host_maximum(&maximum), PST_OK);
    compare(cases, pst_dtype_name(dtype));
}

/* ---- fill ------------------------------------------------------------------------------- */

void cases_fill(cases *cases) {
    places places = {0, CASES_BYTES};
    randomise(cases);
    const size_t bytes = random_count(cases, CASES_BYTES - 64);
    const size_t to = place(cases, &places, bytes, PST_UINT8);
    const int byte = (int)below(cases, 256);
    cases->runner.put(cases->runner.context, cases->expected);
    assert_int_equal(
        cases->runner.fill(cases->runner.context, cases->runner.memory + to, byte, bytes), PST_OK);
    memset(cases->expected + to, byte, bytes);
    compare(cases, "fill");
}

/* ---- rows by number --------------------------------------------------------------------- */

enum { MOST_RANGES = 70, MOST_NAMED = 40 };

/* Neighbouring parts of a table, with holes, at random places. */
static size_t random_ranges(cases *cases, places *places, size_t table_bytes,
                            pst_row_range *ranges) {
    size_t count = 0, first = 0;
    const size_t most = 1 + below(cases, MOST_RANGES);
    while (count < most && first < table_bytes) {
        first += below(cases, 3) == 0 ? below(cases, 50) : 0;
        size_t bytes = 1 + below(cases, (uint32_t)(1 + 2 * table_bytes / most));
        if (first + bytes > table_bytes) bytes = first < table_bytes ? table_bytes - first : 0;
        const size_t from = place(cases, places, bytes, PST_UINT8);
        const size_t to = place(cases, places, bytes, PST_UINT8);
        ranges[count++] =
            (pst_row_range){(void *)(uintptr_t)to, (void *)(uintptr_t)from, first, bytes};
        first += bytes;
    }
    return count;
}

static void based_on(const unsigned char *memory, const pst_row_range *offsets, size_t count,
                     pst_row_range *ranges) {
    for (size_t i = 0; i < count; i++) {
        ranges[i] = offsets[i];
        ranges[i].destination = (void *)(uintptr_t)(memory + (uintptr_t)offsets[i].destination);
        ranges[i].source = memory + (uintptr_t)offsets[i].source;
    }
}

/* Some name no row. */
static void name_rows(cases *cases, size_t at, const pst_row_copy *copy) {
    for (size_t i = 0; i < copy->count; i++) {
        const int64_t odd[] = {-1, (int64_t)copy->rows, INT64_MIN, INT64_MAX};
        const int64_t row = below(cases, 8) == 0 ? odd[below(cases, 4)]
                                                 : (int64_t)below(cases, (uint32_t)copy->rows);
        memcpy(cases->expected + at + i * sizeof row, &row, sizeof row);
    }
}

void cases_copy_rows(cases *cases) {
    pst_row_range offsets[MOST_RANGES], ranges[MOST_RANGES];
    places places = {0, CASES_BYTES};
    randomise(cases);
    pst_row_copy copy = {.count = below(cases, MOST_NAMED),
                         .rows = 1 + below(cases, 60),
                         .row_bytes = 1 + below(cases, 3000),
                         .ranges = ranges};
    const size_t named = place(cases, &places, MOST_NAMED, PST_INT64);
    copy.range_count = random_ranges(cases, &places, copy.rows * copy.row_bytes, offsets);
    name_rows(cases, named, &copy);
    cases->runner.put(cases->runner.context, cases->expected);
    copy.indices = (const int64_t *)(const void *)(cases->runner.memory + named);
    based_on(cases->runner.memory, offsets, copy.range_count, ranges);
    assert_int_equal(cases->runner.copy_rows(cases->runner.context, &copy), PST_OK);
    copy.indices = (const int64_t *)(const void *)(cases->expected + named);
    based_on(cases->expected, offsets, copy.range_count, ranges);
    pst__host_copy_rows(&copy);
    compare(cases, "rows");
}
