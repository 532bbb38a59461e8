#include "tests/cmocka_all.h"

#include <penstock/status.h>
#include <string.h>

typedef struct status_row {
    pst_status status;
    const char *name;
} status_row;

#define ROW(name, value, text) {PST_##name, #name},
static const status_row rows[] = {PST_STATUS_MAP(ROW)};
static const size_t row_count = sizeof rows / sizeof rows[0];

static void each_status_has_its_own_name(void **state) {
    (void)state;
    for (size_t i = 0; i < row_count; ++i)
        assert_string_equal(pst_status_name(rows[i].status), rows[i].name);
}

static void each_status_has_a_text_that_no_other_has(void **state) {
    (void)state;
    for (size_t i = 0; i < row_count; ++i) {
        assert_true(strlen(pst_status_text(rows[i].status)) > 0);
        for (size_t other = 0; other < i; ++other)
            assert_string_not_equal(pst_status_text(rows[i].status),
                                    pst_status_text(rows[other].status));
    }
}

static void only_success_is_zero_and_only_pending_is_positive(void **state) {
    (void)state;
    for (size_t i = 0; i < row_count; ++i) {
        if (rows[i].status == PST_OK)
            assert_int_equal(rows[i].status, 0);
        else if (rows[i].status == PST_PENDING)
            assert_true(rows[i].status > 0);
        else
            assert_true(rows[i].status < 0);
    }
}

static void values_that_are_no_status_still_have_texts(void **state) {
    (void)state;
    assert_string_equal(pst_status_name((pst_status)-1000), "EUNKNOWN");
    assert_non_null(pst_status_text((pst_status)1000));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_status_has_its_own_name),
        cmocka_unit_test(each_status_has_a_text_that_no_other_has),
        cmocka_unit_test(only_success_is_zero_and_only_pending_is_positive),
        cmocka_unit_test(values_that_are_no_status_still_have_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
