/* A step of AdamW on the host: the formula, skipped steps, random rounding, refusals. */
#include "../cmocka_all.h"
#include "tests/random.h"

#include <penstock/optim.h>

#include <math.h>
#include <string.h>

enum { MOST = 5000, GAP = 7 };

static struct {
    pst_runtime *runtime;
    uint64_t random;
    _Alignas(16) unsigned char coefficients[PST_ADAMW_COEFFICIENTS_BYTES];
    float step;
    float parameter[MOST + GAP], gradient[MOST + GAP], exp_avg[MOST + GAP], exp_avg_sq[MOST + GAP];
    uint16_t first_moment[MOST + GAP], second_moment[MOST + GAP], copy[MOST + GAP];
} it;

static int begin(void **state) {
    (void)state;
    it.step = 0;
    return pst_runtime_create(NULL, &it.runtime) != PST_OK;
}

static int end(void **state) {
    (void)state;
    return pst_runtime_destroy(it.runtime) != PST_OK;
}

static double between(double low, double high) {
    return low + (high - low) * random_below(&it.random, 1u << 30) / (1u << 30);
}

static void draw(float *to, double low) {
    for (size_t i = 0; i < MOST + GAP; i++)
        to[i] = (float)between(low, 1.0);
}

static void draw_all(const char *test) {
    it.random = random_seed(test);
    draw(it.parameter, -1);
    draw(it.gradient, -1);
    draw(it.exp_avg, -1);
    draw(it.exp_avg_sq, 0);
    for (size_t i = 0; i < MOST + GAP; i++) {
        it.first_moment[i] = (uint16_t)(0x3f80 + random_below(&it.random, 128));
        it.second_moment[i] = (uint16_t)(0x3f80 + random_below(&it.random, 128));
    }
}

static pst_adamw_settings settings(void) {
    return (pst_adamw_settings){.lr = 0.01,
                                .beta1 = 0.9,
                                .beta2 = 0.999,
                                .eps = 1e-8,
                                .weight_decay = 0.1,
                                .seed = 1234567890123};
}

/* Elements from `at` on, which need not fit a vector. */
static pst_adamw_piece piece_of(size_t at, size_t count) {
    return (pst_adamw_piece){.parameter = it.parameter + at,
                             .gradient = it.gradient + at,
                             .exp_avg = it.exp_avg + at,
                             .exp_avg_sq = it.exp_avg_sq + at,
                             .coefficients = it.coefficients,
                             .count = count,
                             .first = at};
}

static pst_adamw_piece narrow_piece_of(size_t at, size_t count) {
    pst_adamw_piece piece = piece_of(at, count);
    piece.exp_avg = it.first_moment + at;
    piece.exp_avg_sq = it.second_moment + at;
    piece.moment_dtype = PST_BFLOAT16;
    piece.rounds_randomly = 1;
    return piece;
}

static pst_status prepare(const pst_adamw_settings *settings) {
    float *step = &it.step;
    return pst_adamw_prepare(it.runtime, NULL, NULL, settings, &step, 1, it.coefficients);
}

static pst_status update(const pst_adamw_piece *pieces, size_t count) {
    return pst_adamw(it.runtime, NULL, NULL, pieces, count);
}

static const char *text(void) {
    static char found[1024];
    (void)pst_runtime_error(it.runtime, found, sizeof found);
    return found;
}

/* ---- the formula ------------------------------------------------------------------------- */

typedef struct element {
    double parameter, exp_avg, exp_avg_sq;
} element;

static element expected(element from, double gradient, const pst_adamw_settings *by, double step) {
    element to;
    to.exp_avg = by->beta1 * from.exp_avg + (1 - by->beta1) * gradient;
    to.exp_avg_sq = by->beta2 * from.exp_avg_sq + (1 - by->beta2) * gradient * gradient;
    const double divisor = sqrt(to.exp_avg_sq) / sqrt(1 - pow(by->beta2, step)) + by->eps;
    to.parameter = from.parameter * (1 - by->lr * by->weight_decay) -
                   by->lr / (1 - pow(by->beta1, step)) * to.exp_avg / divisor;
    return to;
}

static element element_at(size_t i) {
    return (element){it.parameter[i], it.exp_avg[i], it.exp_avg_sq[i]};
}

static void assert_near(double found, double wanted) {
    if (fabs(found - wanted) > 1e-6 * (1 + fabs(wanted)))
        fail_msg("%.9g is not %.9g", found, wanted);
}

/* What lies beside the piece stays as it is. */
static void check_formula(size_t at, size_t count, pst_adamw_settings by, double factor) {
    static element wanted[MOST + GAP];
    const double step = it.step + 1;
    for (size_t i = 0; i < MOST + GAP; i++)
        wanted[i] = i >= at && i < at + count
                        ? expected(element_at(i), it.gradient[i] * factor, &by, step)
                        : element_at(i);
    const pst_adamw_piece piece = piece_of(at, count);
    assert_int_equal(prepare(&by), PST_OK);
    assert_int_equal(update(&piece, 1), PST_OK);
    assert_true(it.step == (float)step);
    for (size_t i = 0; i < MOST + GAP; i++) {
        assert_near(it.parameter[i], wanted[i].parameter);
        assert_near(it.exp_avg[i], wanted[i].exp_avg);
        assert_near(it.exp_avg_sq[i], wanted[i].exp_avg_sq);
    }
}

static void pieces_of_any_size_and_place_follow_the_formula(void **state) {
    (void)state;
    draw_all(__func__);
    for (size_t count = 0; count < 20; count++)
        check_formula(count % GAP, count, settings(), 1);
    check_formula(0, MOST + GAP, settings(), 1);
    check_formula(3, MOST, settings(), 1);
}

static void settings_in_memory_count(void **state) {
    (void)state;
    const float lr = 0.5f, scale = 8, factor = 0.25f, found_inf = 0;
    draw_all(__func__);
    pst_adamw_settings by = settings();
    by.lr_at = &lr;
    by.gradient_scale = &scale;
    by.gradient_factor = &factor;
    by.found_inf = &found_inf;
    by.maximize = 1;
    pst_adamw_settings same = by;
    same.lr = lr;
    check_formula(1, 600, same, -0.25 / 8);
}

static void a_skipped_step_changes_nothing(void **state) {
    (void)state;
    static float before[MOST + GAP];
    const float found_inf = 1;
    draw_all(__func__);
    memcpy(before, it.parameter, sizeof before);
    pst_adamw_settings by = settings();
    by.found_inf = &found_inf;
    const pst_adamw_piece piece = piece_of(0, MOST);
    assert_int_equal(prepare(&by), PST_OK);
    assert_int_equal(update(&piece, 1), PST_OK);
    assert_memory_equal(before, it.parameter, sizeof before);
    assert_true(it.step == 0.0f);
    by.found_inf = NULL;
    assert_int_equal(prepare(&by), PST_OK);
    assert_true(it.step == 1.0f);
}

/* ---- random rounding --------------------------------------------------------------------- */

static void narrow_step(const pst_adamw_settings *by) {
    const pst_adamw_piece piece = narrow_piece_of(0, MOST);
    assert_int_equal(prepare(by), PST_OK);
    assert_int_equal(update(&piece, 1), PST_OK);
}

static void random_rounding_replays(void **state) {
    (void)state;
    static uint16_t before[MOST], once[MOST], other[MOST];
    pst_adamw_settings by = settings();
    draw_all(__func__);
    memcpy(before, it.first_moment, sizeof before);
    narrow_step(&by);
    memcpy(once, it.first_moment, sizeof once);
    memcpy(it.first_moment, before, sizeof before);
    it.step = 0;
    narrow_step(&by);
    assert_memory_equal(once, it.first_moment, sizeof once);
    by.seed++;
    memcpy(it.first_moment, before, sizeof before);
    it.step = 0;
    narrow_step(&by);
    memcpy(other, it.first_moment, sizeof other);
    assert_memory_not_equal(once, other, sizeof once);
}

static void parts_of_a_piece_are_the_piece(void **state) {
    (void)state;
    static uint16_t whole[MOST], before[MOST], squares[MOST];
    const pst_adamw_settings by = settings();
    draw_all(__func__);
    memcpy(before, it.first_moment, sizeof before);
    memcpy(squares, it.second_moment, sizeof squares);
    narrow_step(&by);
    memcpy(whole, it.first_moment, sizeof whole);
    memcpy(it.first_moment, before, sizeof before);
    memcpy(it.second_moment, squares, sizeof squares);
    const pst_adamw_piece parts[] = {narrow_piece_of(1001, MOST - 1001), narrow_piece_of(0, 3),
                                     narrow_piece_of(3, 998)};
    it.step = 0;
    assert_int_equal(prepare(&by), PST_OK);
    assert_int_equal(update(parts, 3), PST_OK);
    assert_memory_equal(whole, it.first_moment, sizeof whole);
}

static float wide(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* All elements are to become 1 + 1/1024, an eighth of the way between two bfloat16. */
static void random_rounding_is_right_in_the_mean(void **state) {
    (void)state;
    pst_adamw_settings by = settings();
    double sum = 0;
    draw_all(__func__);
    by.seed = it.random;
    for (size_t i = 0; i < MOST; i++) {
        it.first_moment[i] = 0x3f80;
        it.gradient[i] = 1.0f + 10.0f / 1024;
    }
    narrow_step(&by);
    for (size_t i = 0; i < MOST; i++) {
        const float found = wide(it.first_moment[i]);
        assert_true(found == 1.0f || found == 1.0f + 1.0f / 128);
        sum += (found - 1.0) * 128;
    }
    /* Of MOST draws that are 1 an eighth of the time, within five deviations. */
    assert_true(fabs(sum / MOST - 0.125) < 5 * sqrt(0.125 * 0.875 / MOST));
}

static void a_copy_is_the_parameter_rounded(void **state) {
    (void)state;
    const pst_adamw_settings by = settings();
    draw_all(__func__);
    pst_adamw_piece piece = piece_of(2, MOST);
    piece.copy = it.copy + 1;
    piece.copy_dtype = PST_BFLOAT16;
    assert_int_equal(prepare(&by), PST_OK);
    assert_int_equal(update(&piece, 1), PST_OK);
    for (size_t i = 0; i < MOST; i++)
        assert_true(fabsf(wide(it.copy[1 + i]) - it.parameter[2 + i]) <=
                    fabsf(it.parameter[2 + i]) / 256);
}

/* ---- refusals ----------------------------------------------------------------------------- */

static void refused(pst_adamw_piece wrong, pst_status status, const char *why) {
    static float before[MOST + GAP];
    memcpy(before, it.parameter, sizeof before);
    const pst_adamw_piece pieces[2] = {piece_of(0, 10), wrong};
    assert_int_equal(update(pieces, 2), status);
    if (strstr(text(), "piece 1") == NULL || strstr(text(), why) == NULL) fail_msg("%s", text());
    assert_memory_equal(before, it.parameter, sizeof before);
}

static void sources_that_do_not_fit_are_named(void **state) {
    (void)state;
    const void *sources[PST_ADAMW_MOST_SOURCES + 1];
    const pst_adamw_settings by = settings();
    draw_all(__func__);
    assert_int_equal(prepare(&by), PST_OK);
    for (size_t i = 0; i <= PST_ADAMW_MOST_SOURCES; i++)
        sources[i] = it.gradient;
    pst_adamw_piece piece = piece_of(0, 10);
    piece.gradient = NULL;
    piece.sources = sources;
    piece.scale = 1;
    piece.source_count = PST_ADAMW_MOST_SOURCES + 1;
    refused(piece, PST_EUNSUPPORTED, "up to 8 sources");
    piece.source_count = 2;
    piece.source_dtype = PST_FLOAT64;
    refused(piece, PST_EUNSUPPORTED, "2 sources of float64");
    piece.source_dtype = PST_FLOAT32;
    sources[1] = NULL;
    refused(piece, PST_EINVAL, "lacks");
    sources[1] = (char *)it.gradient + 2;
    refused(piece, PST_EINVAL, "aligned");
    sources[1] = it.gradient;
    assert_int_equal(update(&piece, 1), PST_OK);
}

static void what_does_not_fit_is_named(void **state) {
    (void)state;
    pst_adamw_settings by = settings();
    draw_all(__func__);
    assert_int_equal(prepare(&by), PST_OK);
    pst_adamw_piece piece = piece_of(0, 10);
    piece.gradient = NULL;
    refused(piece, PST_EINVAL, "lacks");
    piece = piece_of(0, 10);
    piece.parameter = (char *)it.parameter + 1;
    refused(piece, PST_EINVAL, "aligned");
    piece = piece_of(0, 10);
    piece.gradient_dtype = PST_INT32;
    refused(piece, PST_EUNSUPPORTED, "int32");
    piece = piece_of(0, 10);
    piece.rounds_randomly = 1;
    refused(piece, PST_EUNSUPPORTED, "randomly");
    by.beta2 = 1;
    assert_int_equal(prepare(&by), PST_EINVAL);
    assert_non_null(strstr(text(), "betas"));
    by = settings();
    by.lr = NAN;
    assert_int_equal(prepare(&by), PST_EINVAL);
    assert_non_null(strstr(text(), "lr is"));
}

static void a_device_without_adamw_is_named(void **state) {
    (void)state;
    const pst_adamw_settings by = settings();
    pst_device_ops ops = *pst_runtime_host(it.runtime)->ops;
    pst_device device = {&ops, pst_runtime_host(it.runtime)->context};
    float *step = &it.step;
    ops.name = "bare";
    ops.adamw = NULL;
    ops.adamw_prepare = NULL;
    assert_int_equal(pst_adamw_prepare(it.runtime, &device, NULL, &by, &step, 1, it.coefficients),
                     PST_EUNSUPPORTED);
    assert_non_null(strstr(text(), "bare"));
    assert_int_equal(pst_adamw(it.runtime, &device, NULL, NULL, 0), PST_EUNSUPPORTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(pieces_of_any_size_and_place_follow_the_formula, begin,
                                        end),
        cmocka_unit_test_setup_teardown(settings_in_memory_count, begin, end),
        cmocka_unit_test_setup_teardown(a_skipped_step_changes_nothing, begin, end),
        cmocka_unit_test_setup_teardown(random_rounding_replays, begin, end),
        cmocka_unit_test_setup_teardown(parts_of_a_piece_are_the_piece, begin, end),
        cmocka_unit_test_setup_teardown(random_rounding_is_right_in_the_mean, begin, end),
        cmocka_unit_test_setup_teardown(a_copy_is_the_parameter_rounded, begin, end),
        cmocka_unit_test_setup_teardown(sources_that_do_not_fit_are_named, begin, end),
        cmocka_unit_test_setup_teardown(what_does_not_fit_is_named, begin, end),
        cmocka_unit_test_setup_teardown(a_device_without_adamw_is_named, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
