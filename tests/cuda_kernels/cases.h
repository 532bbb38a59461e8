/* What the device's kernels are asked, and the comparison with the host's, which are the reference:
 * all bytes of the memory have to be equal afterwards, but a NaN may be any NaN. */
#ifndef PST_TESTS_CUDA_KERNELS_CASES_H
#define PST_TESTS_CUDA_KERNELS_CASES_H

#include <penstock/device.h>

/* Whoever runs the kernels, in order. `memory` is CASES_BYTES of the device's. */
typedef struct runner {
    pst_status (*cast)(void *context, const pst_cast *pieces, size_t count, double scale);
    pst_status (*sum)(void *context, const pst_sum *sum);
    pst_status (*maximum)(void *context, const pst_sum *maximum);
    pst_status (*fill)(void *context, void *memory, int byte, size_t bytes);
    pst_status (*copy_rows)(void *context, const pst_row_copy *copy);
    pst_status (*adamw_prepare)(void *context, const pst_adamw_settings *settings,
                                float *const *steps, size_t count, void *coefficients);
    pst_status (*adamw)(void *context, const pst_adamw_piece *pieces, size_t count);
    void (*put)(void *context, const void *host); /* all of `memory` */
    void (*get)(void *context, void *host);       /* after all that was asked */
    void *context;
    unsigned char *memory;
} runner;

enum { CASES_BYTES = 1 << 20 };

typedef struct cases cases;

cases *cases_create(const runner *runner, uint64_t seed);
void cases_destroy(cases *cases);

/* One random question each, whose answer is checked. */
void cases_cast_pair(cases *cases, pst_dtype destination, pst_dtype source);
void cases_cast_many(cases *cases, size_t most); /* 1 to `most` (<= 4000) pieces of all kinds */
void cases_sum(cases *cases, pst_dtype destination, pst_dtype source, size_t source_count);
void cases_sum_in_place(cases *cases, pst_dtype dtype, size_t source_count);
void cases_maximum(cases *cases, pst_dtype dtype, size_t source_count);
void cases_fill(cases *cases);
void cases_copy_rows(cases *cases);
/* In adamw_cases.c: several steps of 1 to `most` (<= 500) pieces of all kinds. */
void adamw_cases(const runner *runner, uint64_t *random, size_t most);

#endif
