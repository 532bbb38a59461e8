/* The behaviours, for a test program that defines `static const runner *the_runner(void)` first. */
#ifndef PST_TESTS_CUDA_KERNELS_ALL_CASES_H
#define PST_TESTS_CUDA_KERNELS_ALL_CASES_H

#include "../cmocka_all.h"
#include "cases.h"
#include "tests/random.h"

#ifndef ROUNDS
#define ROUNDS 1
#endif

static cases *begin(const char *test) {
    return cases_create(the_runner(), random_seed(test));
}

static void every_pair_of_dtypes_is_cast_as_on_the_host(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < 4 * ROUNDS; round++)
        for (int pair = 0; pair < 16; pair++)
            cases_cast_pair(cases, (pst_dtype)(pair / 4), (pst_dtype)(pair % 4));
    cases_destroy(cases);
}

static void pieces_of_all_kinds_go_in_one_call(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < 4 * ROUNDS; round++) {
        cases_cast_many(cases, 8);
        cases_cast_many(cases, 127);
        cases_cast_many(cases, 3000);
    }
    cases_destroy(cases);
}

static void every_pair_of_dtypes_is_summed_as_on_the_host(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < ROUNDS; round++)
        for (int pair = 0; pair < 16; pair++)
            for (size_t count = 0; count <= 8; count++)
                cases_sum(cases, (pst_dtype)(pair / 4), (pst_dtype)(pair % 4), count);
    cases_destroy(cases);
}

static void up_to_64_sources_are_summed(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (size_t count = 9; count <= 64; count += 11)
        cases_sum(cases, PST_FLOAT32, PST_BFLOAT16, count);
    cases_sum(cases, PST_BFLOAT16, PST_BFLOAT16, 64);
    cases_destroy(cases);
}

static void a_sum_may_replace_one_of_its_sources(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < ROUNDS; round++)
        for (int dtype = 0; dtype < 4; dtype++)
            for (size_t count = 1; count <= 8; count++)
                cases_sum_in_place(cases, (pst_dtype)dtype, count);
    cases_destroy(cases);
}

static void the_largest_is_found_as_on_the_host(void **state) {
    static const pst_dtype dtypes[] = {PST_FLOAT32, PST_FLOAT64, PST_INT8,  PST_UINT8,
                                       PST_INT16,   PST_INT32,   PST_INT64, PST_BOOL};
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
            for (size_t count = 1; count <= 8; count++)
                cases_maximum(cases, dtypes[i], count);
    cases_destroy(cases);
}

static void any_bytes_are_filled(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < 8 * ROUNDS; round++)
        cases_fill(cases);
    cases_destroy(cases);
}

static void rows_are_copied_by_number(void **state) {
    (void)state;
    cases *cases = begin(__func__);
    for (int round = 0; round < 8 * ROUNDS; round++)
        cases_copy_rows(cases);
    cases_destroy(cases);
}

static void steps_of_adamw_are_the_hosts(void **state) {
    (void)state;
    uint64_t random = random_seed(__func__);
    for (int round = 0; round < 8 * ROUNDS; round++) {
        adamw_cases(the_runner(), &random, 3);
        adamw_cases(the_runner(), &random, 60);
    }
    adamw_cases(the_runner(), &random, 500);
}

#define ALL_CASES                                                                                  \
    cmocka_unit_test(every_pair_of_dtypes_is_cast_as_on_the_host),                                 \
        cmocka_unit_test(pieces_of_all_kinds_go_in_one_call),                                      \
        cmocka_unit_test(every_pair_of_dtypes_is_summed_as_on_the_host),                           \
        cmocka_unit_test(up_to_64_sources_are_summed),                                             \
        cmocka_unit_test(a_sum_may_replace_one_of_its_sources),                                    \
        cmocka_unit_test(the_largest_is_found_as_on_the_host),                                     \
        cmocka_unit_test(any_bytes_are_filled), cmocka_unit_test(rows_are_copied_by_number),       \
        cmocka_unit_test(steps_of_adamw_are_the_hosts)

#endif
