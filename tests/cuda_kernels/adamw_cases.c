/* Random steps of AdamW: a device's kernel leaves the bits that the host's leaves, but for the last
 * ones of parameters whose moments have 16 bits. */
#include "cases.h"

#include "../cmocka_all.h"
#include "sched/device/host.h"
#include "tests/random.h"

#include <math.h>
#include <string.h>

enum { MOST_PIECES = 500, STEPS = 3 };
enum { PARAMETER, GRADIENT, EXP_AVG, EXP_AVG_SQ, LARGEST, COPY, SOURCE };
enum { ARRAYS = SOURCE + PST_ADAMW_MOST_SOURCES };

/* The beginning of the memory; pieces follow. */
typedef struct head {
    unsigned char coefficients[MOST_PIECES][PST_ADAMW_COEFFICIENTS_BYTES];
    float steps[MOST_PIECES];
    float lr, scale, factor, found_inf;
} head;

typedef struct piece {
    size_t at[ARRAYS]; /* offsets; 0: there is none */
    pst_dtype dtype[ARRAYS];
    size_t count, coefficients, sources;
    uint64_t first;
    double scale;
    int rounds_randomly;
} piece;

typedef struct trial {
    const runner *runner;
    uint64_t *random;
    unsigned char *expected, *found;
    piece pieces[MOST_PIECES];
    size_t count, end;
} trial;

static uint32_t below(trial *trial, uint32_t bound) {
    return random_below(trial->random, bound);
}

static double between(trial *trial, double low, double high) {
    return low + (high - low) * below(trial, 1u << 30) / (1u << 30);
}

/* ---- memory ----------------------------------------------------------------------------- */

static void write_number(unsigned char *to, pst_dtype dtype, double number) {
    const float narrow = (float)number;
    const pst_cast cast = {to, &narrow, 1, dtype, PST_FLOAT32};
    assert_int_equal(pst__host_cast(&cast, 1.0), PST_OK);
}

static double read_number(const unsigned char *from, pst_dtype dtype) {
    float number;
    const pst_cast cast = {&number, from, 1, PST_FLOAT32, dtype};
    assert_int_equal(pst__host_cast(&cast, 1.0), PST_OK);
    return number;
}

/* Squares are not negative; a few gradients have any bits. */
static void fill_array(trial *trial, const piece *piece, int array) {
    const size_t size = pst_dtype_size(piece->dtype[array]);
    const int any_bits = (array == GRADIENT || array >= SOURCE) && below(trial, 8) == 0;
    const double least = array == EXP_AVG_SQ || array == LARGEST ? 0.0 : -1.0;
    for (size_t i = 0; i < piece->count; i++) {
        unsigned char *to = trial->expected + piece->at[array] + i * size;
        const uint32_t bits = below(trial, UINT32_MAX);
        if (any_bits)
            memcpy(to, &bits, size);
        else
            write_number(to, piece->dtype[array], between(trial, least, 1.0));
    }
}

/* Half of all arrays lie aligned, the others anywhere. */
static void place_array(trial *trial, piece *piece, int array) {
    const size_t size = pst_dtype_size(piece->dtype[array]);
    const size_t gap = below(trial, 2) == 0 ? 0 : below(trial, 64);
    const size_t alignment = gap == 0 ? 16 : size;
    piece->at[array] = (trial->end + gap + alignment - 1) / alignment * alignment;
    trial->end = piece->at[array] + piece->count * size;
    assert_true(trial->end <= CASES_BYTES);
    fill_array(trial, piece, array);
}

static pst_dtype random_dtype(trial *trial) {
    static const pst_dtype dtypes[] = {PST_FLOAT32, PST_BFLOAT16, PST_FLOAT32, PST_BFLOAT16,
                                       PST_FLOAT16};
    return dtypes[below(trial, 5)];
}

/* In place of a gradient. */
static void add_sources(trial *trial, piece *piece) {
    const pst_dtype dtype = random_dtype(trial);
    piece->sources = 1 + below(trial, PST_ADAMW_MOST_SOURCES);
    piece->scale = below(trial, 2) == 0 ? 1.0 : between(trial, 0, 1);
    for (int array = SOURCE; array < SOURCE + (int)piece->sources; array++) {
        piece->dtype[array] = dtype;
        place_array(trial, piece, array);
    }
}

static void random_piece(trial *trial, piece *piece, size_t room) {
    const pst_dtype moment = random_dtype(trial);
    const uint32_t limit = below(trial, 2) == 0 ? 20 : (uint32_t)room;
    *piece = (struct piece){.count = below(trial, limit < room ? limit : (uint32_t)room)};
    for (int array = 0; array < ARRAYS; array++)
        piece->dtype[array] = random_dtype(trial);
    piece->dtype[EXP_AVG] = piece->dtype[EXP_AVG_SQ] = piece->dtype[LARGEST] = moment;
    piece->rounds_randomly = moment == PST_BFLOAT16 && below(trial, 2) == 0;
    piece->first = (uint64_t)below(trial, UINT32_MAX) << below(trial, 8);
    piece->coefficients = below(trial, (uint32_t)trial->count);
    if (below(trial, 2) == 0) add_sources(trial, piece);
    for (int array = 0; array < LARGEST; array++)
        if (array != GRADIENT || piece->sources == 0) place_array(trial, piece, array);
    if (below(trial, 4) == 0) place_array(trial, piece, LARGEST);
    if (below(trial, 2) == 0) place_array(trial, piece, COPY);
}

/* ---- a step ------------------------------------------------------------------------------ */

static void describe(const piece *piece, unsigned char *memory, const void **sources,
                     pst_adamw_piece *to) {
    void *at[ARRAYS];
    for (int array = 0; array < ARRAYS; array++)
        at[array] = piece->at[array] == 0 ? NULL : memory + piece->at[array];
    for (size_t i = 0; i < piece->sources; i++)
        sources[i] = at[SOURCE + i];
    *to = (pst_adamw_piece){.parameter = at[PARAMETER],
                            .gradient = at[GRADIENT],
                            .sources = sources,
                            .source_count = piece->sources,
                            .scale = piece->scale,
                            .exp_avg = at[EXP_AVG],
                            .exp_avg_sq = at[EXP_AVG_SQ],
                            .max_exp_avg_sq = at[LARGEST],
                            .copy = at[COPY],
                            .coefficients = ((head *)memory)->coefficients[piece->coefficients],
                            .count = piece->count,
                            .first = piece->first,
                            .parameter_dtype = piece->dtype[PARAMETER],
                            .gradient_dtype = piece->dtype[GRADIENT],
                            .moment_dtype = piece->dtype[EXP_AVG],
                            .copy_dtype = piece->dtype[COPY],
                            .source_dtype = piece->dtype[SOURCE],
                            .rounds_randomly = piece->rounds_randomly};
}

/* Pointers are those of `memory`, so that all but them is the same for both. */
static pst_adamw_settings settings_in(unsigned char *memory, const pst_adamw_settings *common,
                                      unsigned has) {
    head *head = (struct head *)memory;
    pst_adamw_settings settings = *common;
    settings.lr_at = has & 1u ? &head->lr : NULL;
    settings.gradient_scale = has & 2u ? &head->scale : NULL;
    settings.gradient_factor = has & 4u ? &head->factor : NULL;
    settings.found_inf = has & 8u ? &head->found_inf : NULL;
    return settings;
}

static void one_step(trial *trial, const pst_adamw_settings *common, unsigned has) {
    static pst_adamw_piece described[MOST_PIECES];
    static const void *sources[MOST_PIECES][PST_ADAMW_MOST_SOURCES];
    float *steps[MOST_PIECES];
    void *context = trial->runner->context;
    for (int is_host = 0; is_host < 2; is_host++) {
        unsigned char *memory = is_host ? trial->expected : trial->runner->memory;
        const pst_adamw_settings settings = settings_in(memory, common, has);
        for (size_t i = 0; i < trial->count; i++) {
            steps[i] = &((head *)memory)->steps[i];
            describe(&trial->pieces[i], memory, sources[i], &described[i]);
        }
        if (!is_host) {
            assert_int_equal(trial->runner->adamw_prepare(context, &settings, steps, trial->count,
                                                          ((head *)memory)->coefficients),
                             PST_OK);
            assert_int_equal(trial->runner->adamw(context, described, trial->count), PST_OK);
            continue;
        }
        pst__host_adamw_prepare(&settings, steps, trial->count, ((head *)memory)->coefficients);
        for (size_t i = 0; i < trial->count; i++)
            assert_int_equal(pst__host_adamw(&described[i]), PST_OK);
    }
}

/* ---- comparing --------------------------------------------------------------------------- */

/* A NaN may be any NaN: the one found is taken for the one expected. */
static void forgive_nans(trial *trial, const piece *piece, int array) {
    const size_t size = pst_dtype_size(piece->dtype[array]);
    for (size_t i = 0; piece->at[array] != 0 && i < piece->count; i++) {
        unsigned char *expected = trial->expected + piece->at[array] + i * size;
        const unsigned char *found = trial->found + piece->at[array] + i * size;
        if (isnan(read_number(expected, piece->dtype[array])) &&
            isnan(read_number(found, piece->dtype[array])))
            memcpy(expected, found, size);
    }
}

/* What a step may be off by where moments have 16 bits: next to nothing of what it moves, and so
 * the neighbour after rounding. Parameters of a piece have moved about as far as the largest. What
 * is forgiven is where the next step begins. */
static void forgive_last_bits(trial *trial, const piece *piece, int array) {
    const pst_dtype dtype = piece->dtype[array];
    const double unit = dtype == PST_FLOAT32 ? 1e-5 : dtype == PST_FLOAT16 ? 0x1p-9 : 0x1p-6;
    const size_t size = pst_dtype_size(dtype);
    double largest = 0;
    if (piece->at[array] == 0 || piece->dtype[EXP_AVG] == PST_FLOAT32) return;
    for (size_t i = 0; i < piece->count; i++) {
        const double value =
            fabs(read_number(trial->expected + piece->at[array] + i * size, dtype));
        if (isfinite(value) && value > largest) largest = value;
    }
    for (size_t i = 0; i < piece->count; i++) {
        unsigned char *expected = trial->expected + piece->at[array] + i * size;
        const unsigned char *found = trial->found + piece->at[array] + i * size;
        const double value = read_number(expected, dtype);
        if (fabs(read_number(found, dtype) - value) <= unit * fabs(value) + 1e-6 * largest)
            memcpy(expected, found, size);
    }
}

static void compare(trial *trial) {
    const size_t begin = offsetof(head, steps);
    trial->runner->get(trial->runner->context, trial->found);
    for (size_t i = 0; i < trial->count; i++)
        for (int array = 0; array < ARRAYS; array++) {
            const piece *piece = &trial->pieces[i];
            const size_t bytes = piece->count * pst_dtype_size(piece->dtype[array]);
            forgive_nans(trial, piece, array);
            if (array == PARAMETER || array == COPY) forgive_last_bits(trial, piece, array);
            if (piece->at[array] != 0 && memcmp(trial->expected + piece->at[array],
                                                trial->found + piece->at[array], bytes) != 0)
                fail_msg("adamw: piece %zu, array %d (%s), %zu elements: other bits", i, array,
                         pst_dtype_name(piece->dtype[array]), piece->count);
        }
    assert_memory_equal(trial->found + begin, trial->expected + begin, CASES_BYTES - begin);
}

void adamw_cases(const runner *runner, uint64_t *random, size_t most) {
    static trial trial;
    trial = (struct trial){.runner = runner, .random = random, .end = sizeof(head)};
    trial.expected = aligned_alloc(512, CASES_BYTES);
    trial.found = aligned_alloc(512, CASES_BYTES);
    assert_non_null(trial.expected);
    assert_non_null(trial.found);
    memset(trial.expected, 0x5a, CASES_BYTES);
    trial.count = 1 + below(&trial, (uint32_t)most);
    const size_t room = (CASES_BYTES - sizeof(head)) / trial.count / ARRAYS / 4;
    for (size_t i = 0; i < trial.count; i++)
        random_piece(&trial, &trial.pieces[i], room > 60 ? room - 20 : 1);
    head *head = (struct head *)trial.expected;
    for (size_t i = 0; i < trial.count; i++)
        head->steps[i] = (float)below(&trial, 1u << below(&trial, 21));
    head->lr = (float)between(&trial, 0, 0.1);
    head->scale = 65536.0f;
    head->factor = (float)between(&trial, 0, 1);
    head->found_inf = below(&trial, 4) == 0;
    runner->put(runner->context, trial.expected);
    const pst_adamw_settings common = {.lr = between(&trial, 0, 0.1),
                                       .beta1 = below(&trial, 4) == 0 ? 0.0 : 0.9,
                                       .beta2 = between(&trial, 0.9, 0.9999),
                                       .eps = 1e-8,
                                       .weight_decay = between(&trial, 0, 0.1),
                                       .seed = *random,
                                       .maximize = (int)below(&trial, 2)};
    for (int step = 0; step < STEPS; step++) {
        one_step(&trial, &common, below(&trial, 16));
        compare(&trial);
    }
    free(trial.expected);
    free(trial.found);
}
